"""What is published beside the code: containers, workflows and citation say what the code does."""

from __future__ import annotations

import fnmatch
import re
import shlex
import tomllib

import pytest
import yaml

import sottovoce
from sottovoce.flower import deploy
from support import ROOT

FILES = [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".devcontainer" / "devcontainer.json"]


def read_command(service: str) -> list[str]:
    """The words of a service of compose.yaml, with the defaults of its variables."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
    return shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", services[service]["command"]))


@pytest.fixture(scope="module")
def units(tmp_path_factory):
    """The commands of the units as `server init` and `node init` write them, without folders."""
    top = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deploy.os, "geteuid", lambda: 1000)
        at = {"folder": top / "etc/sottovoce/server", "state": top / "var/lib/sottovoce",
              "runs": top / "srv/sottovoce", "authority": top / "ca"}  # fmt: skip
        deploy.init_server(
            ["here"], deploy.ServerPlaces(**at, units=top / "units"), b"a passphrase"
        )
        node = deploy.NodePlaces(
            "ward-3", "server.example.org:8000", top / "ca" / "ca.crt",
            folder=top / "etc/sottovoce/node", data=top / "srv/node",
            state=top / "var/lib/sottovoce", units=top / "units", user="sottovoce",
        )  # fmt: skip
        deploy.init_node(node)
    commands = {}
    for path in (top / "units").iterdir():
        (line,) = re.findall(r"^ExecStart=(.*)$", path.read_text("utf-8"), re.MULTILINE)
        first, *others = shlex.split(line.replace(f"{top}/", "/"))
        commands[path.stem.removeprefix("sottovoce-")] = [first.rpartition("/")[2], *others]
    return commands


@pytest.mark.parametrize(
    ("service", "unit"),
    [("superlink", "superlink"), ("proxy", "proxy"), ("leader", "server"), ("node", "node"),
     ("worker", "worker")],
)  # fmt: skip
def test_a_container_runs_what_the_service_runs(service, unit, units):
    assert read_command(service) == units[unit]


def test_every_file_that_the_image_copies_is_sent_to_the_builder():
    text = (ROOT / "Dockerfile").read_text("utf-8")
    sources = [word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
               for word in line.split()]  # fmt: skip
    sent = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert {"src", "constraints.txt"} <= set(sources)
    for name in sources:
        assert (ROOT / name).exists()
        assert f"!{name}" in sent


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_workflows_name_what_exists(path):
    text = path.read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("$(VENV)", ".venv")
    for target in re.findall(r"\bmake ([a-z./-]+)", text):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
    for folder in re.findall(r"\btests/[a-z]+\b", text):
        assert (ROOT / folder).is_dir(), folder


def test_metadata_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text("utf-8"))
    tested = workflow["jobs"]["first-steps"]["strategy"]["matrix"]["python"]
    named = [
        c.rpartition(" ")[2] for c in project["classifiers"] if fnmatch.fnmatch(c, "*Python :: 3.*")
    ]
    assert tested == named
    assert project["requires-python"] == f">={named[0]}"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["license"] == project["license"]
    assert citation["version"] == sottovoce.__version__
    assert {url.split("/")[2] for url in project["urls"].values()} == {"arxiv.org"}


def test_every_extra_is_documented():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (ROOT / "docs" / "options.md").read_text("utf-8").partition("## Extras")[2]
    rows = re.findall(r"^\| (`.*?`) \|", text.partition("\n## ")[0], re.MULTILINE)
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(named) == sorted(project["optional-dependencies"])
