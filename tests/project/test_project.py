"""The house as promised: public names, what an import loads, one error tree, live documents."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import shlex
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
import typer.main

import sottovoce
from sottovoce import errors
from sottovoce.cli import commands
from sottovoce.client.node import _KEYS as NODE_KEYS
from sottovoce.privacy import gaussian
from sottovoce.privacy.calibration import capacity, paper_sigma, vault_capacity
from support import ROOT
from support.imports import modules_after

HEAVY = {"jax", "flwr", "scipy", "polars", "pooch", "matplotlib", "torch", "jinja2"}


@pytest.mark.parametrize(
    "statement",
    [
        "import sottovoce",
        "import sottovoce.cli.commands",
        "from sottovoce import calibrate; calibrate()",
    ],
)
def test_a_light_start(statement):
    assert not modules_after(statement) & HEAVY


def test_public_names_are_there_and_documented():
    assert sorted(sottovoce.__all__) == sottovoce.__all__
    for name in sottovoce.__all__:
        assert inspect.getdoc(getattr(sottovoce, name)), name
    assert set(sottovoce.__all__) <= set(dir(sottovoce))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sottovoce.nonsense


def test_the_package_can_be_looked_at_without_optional_packages():
    """`help`, Tab and `import *` touch every name, also those that need more to be of use."""
    absent = "sys.modules |= dict.fromkeys(('flwr', 'sklearn', 'torch'))"
    look = "import inspect; from sottovoce import *; found = dict(inspect.getmembers(sottovoce))"
    check = "assert {*dir(sottovoce)} <= {*found} and 'TorchModel' not in found"
    modules_after(f"{absent}; import sottovoce; {look}; {check}")


def every_module():
    for info in pkgutil.walk_packages(sottovoce.__path__, "sottovoce."):
        if not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


#: How large src/ may be. A change that makes it smaller lowers the number of lines here.
MOST_MODULES, MOST_NAMES, MOST_LAYERS, MOST_LINES = 130, 16, 10, 44_810


def test_the_house_stays_small_enough_to_be_read():
    source = ROOT / "src" / "sottovoce"
    modules = list(source.rglob("*.py"))
    names = [path for path in source.iterdir() if path.name[0] != "_" and path.name != "py.typed"]
    house = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    assert len(modules) <= MOST_MODULES, "merge by concept: CONTRIBUTING.md"
    assert len(names) <= MOST_NAMES
    assert len(house["contracts"][0]["layers"]) <= MOST_LAYERS
    assert sum(len(path.read_text("utf-8").splitlines()) for path in modules) <= MOST_LINES


def test_tests_lie_where_the_code_lies():
    """`tests/PACKAGE/test_MODULE.py` or `test_MODULE_TOPIC.py`, except what tests no module."""
    source, apart = ROOT / "src" / "sottovoce", {"benchmarks", "project"}
    apart |= {"browser", "crash", "hostile", "mutants", "statistics"}
    astray = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder, words = path.parent.relative_to(ROOT / "tests"), path.stem.split("_")[1:]
        modules = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
        beside = [source / folder / name for name in modules]
        if folder.parts[0] not in apart and not any(
            module.with_suffix(".py").exists() or module.is_dir() for module in beside
        ):
            astray.append(str(path.relative_to(ROOT)))
    assert astray == []


def test_every_module_and_public_function_says_what_it_is():
    for module in every_module():
        assert inspect.getdoc(module), module.__name__
        for name, thing in vars(module).items():
            public = (
                not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__
            )
            if public and (inspect.isfunction(thing) or inspect.isclass(thing)):
                assert inspect.getdoc(thing), f"{module.__name__}.{name}"


def test_a_class_name_means_one_thing():
    owners: dict[str, set[str]] = {}
    for module in every_module():
        for name, thing in vars(module).items():
            if inspect.isclass(thing) and thing.__module__.startswith("sottovoce."):
                owners.setdefault(name, set()).add(f"{thing.__module__}.{thing.__qualname__}")
    assert not {name: where for name, where in owners.items() if len(where) > 1}


IRREGULAR = re.compile(
    "begun|borne|bought|bound|built|chosen|dealt|done|drawn|fed|found|given|gone|grown|heard|held|"
    "kept|known|laid|led|left|lost|made|meant|met|paid|said|seen|sent|shown|spent|taken|thrown|"
    "told|worn|written"
)


def is_participle(name: str) -> bool:
    """Whether a name is one word that says what was done, and so not what the function does."""
    word = name.strip("_")
    verbs = ("embed", "feed", "need", "seed", "speed")
    return bool(IRREGULAR.fullmatch(word) or re.fullmatch("[a-z]+ed", word)) and word not in verbs


def test_no_function_is_named_by_a_bare_participle():
    """Functions are verbs with an object; a property may be an adjective."""
    source = ROOT / "src" / "sottovoce"
    found = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and is_participle(node.name):
                decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
                if not decorators & {"property", "cached_property"}:
                    found.append(f"{path.relative_to(source)}: {node.name}")
    assert found == []


def test_every_error_is_in_the_tree_drawn_at_the_head_of_its_file():
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__)) | {"SottovoceError"}
    classes = {
        name: thing
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and issubclass(thing, Exception)
    }
    assert set(classes) == drawn
    assert all(issubclass(thing, errors.SottovoceError) for thing in classes.values())


PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))


def anchors(page: Path) -> set[str]:
    """What a page's headings can be linked by, as GitHub makes it of them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_documents_name_only_what_exists(name):
    page = ROOT / name
    text = page.read_text("utf-8")
    for link, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#?([^)\s]*)\)", text):
        there = page.parent / link if link else page
        assert there.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in anchors(there), f"{name} links to {link}#{anchor}"
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"(?:`|^\$ )make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name} names make {target}"


# Decisions and CHANGELOG.md name files as they were called on their day.
CURRENT_PAGES = [name for name in PAGES if name != "CHANGELOG.md" and "decisions/" not in name]
# Files of a reader's own that the pages name.
USER_FILES = {
    "plan.toml",
    "torch:FILE.py",
    "file.py",
    "net.py",
    "/srv/ward-3/node.toml",
    "models/NAME.py",
}


@pytest.mark.parametrize("name", CURRENT_PAGES)
def test_paths_that_documents_name_exist(name):
    """Paths are relative to the root or to src/sottovoce."""
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text("utf-8"), flags=re.DOTALL)
    named = re.findall(r"`(?:[^`\n]*[\s\"])?([^`\s\"]+\.(?:py|toml|md))(?:: ?[^`\n]*)?`", text)
    roots = (ROOT, ROOT / "src" / "sottovoce")
    missing = {path for path in named if not any((root / path).exists() for root in roots)}
    assert missing <= USER_FILES


def exists_in_package(name: str) -> bool:
    """Tell whether `sottovoce.<name>` is a module or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["sottovoce", *parts[:count]]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute, None)
        return found is not None
    return False


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "docs/protocol.md"])
def test_code_that_documents_name_exists(name):
    """Dotted names begin with a package; keys of a plan and files look alike and are left out."""
    schema = json.loads((ROOT / "src/sottovoce/schemas/plan.json").read_text("utf-8"))
    packages = "|".join(info.name for info in pkgutil.iter_modules(sottovoce.__path__))
    named = re.findall(rf"`((?:{packages})(?:\.\w+)+)`", (ROOT / name).read_text("utf-8"))
    assert named
    checked = set(named) - set(plan_keys(schema, schema)) - {"errors.py"}
    assert [one for one in sorted(checked) if not exists_in_package(one)] == []


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the first words name, and the words after it."""
    found: click.Command = typer.main.get_command(commands.app)
    while isinstance(found, click.Group) and words:
        assert words[0] in found.commands, f"there is no command {words[0]}"
        found, words = found.commands[words[0]], words[1:]
    return found, words


@pytest.mark.parametrize("name", PAGES)
def test_commands_of_documents_can_be_typed(name):
    """Commands after `$` are parsed, options and all; of those in a sentence the names are."""
    text = (ROOT / name).read_text("utf-8")
    for line in re.findall(r"^\s*\$ sottovoce (.*)$", text, re.MULTILINE):
        command, rest = command_of(shlex.split(line, comments=True))
        try:
            command.make_context("sottovoce", rest)
        except click.UsageError as error:
            raise AssertionError(f"{name}: {line}: {error.format_message()}") from error
    for line in re.findall(r"`sottovoce ([^`]*)`", text):
        first, *others = line.replace(" | ", "|").split()
        parts = [[first, *others]]
        if others and "|" in others[0]:
            parts = [[first, other] for other in others[0].split("|")]
        for words in parts:
            command, rest = command_of(words)
            known = {option for param in command.params for option in param.opts}
            assert {word for word in rest if word.startswith("-")} <= known, f"{name}: {line}"


def test_architecture_names_every_package():
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    for path in (ROOT / "src" / "sottovoce").iterdir():
        if path.name.startswith("_") or path.name == "py.typed":
            continue
        room = f"{path.name}/" if path.is_dir() else path.name
        assert f"`{room}`" in text, f"ARCHITECTURE.md does not name {room}"


def test_architecture_has_the_order_that_import_linter_checks():
    """A package uses only those below it; packages of one layer do not use each other."""
    house = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = house["contracts"][0]["layers"]
    place = {room.strip(): i for i, layer in enumerate(layers) for room in layer.split(":")}
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    table = text[text.index("| package |") :].partition("\n\n")[0]
    packages = [
        room.rstrip("/").removesuffix(".py") for room in re.findall(r"^\| `(.*?)` \|", table, re.M)
    ]
    known = [place[room] for room in packages if room in place]
    assert len(known) == len(place)
    assert known == sorted(known)


def test_every_proof_names_its_tests():
    text = (ROOT / "docs" / "proofs.md").read_text("utf-8")
    sections = re.split(r"^## \(", text, flags=re.MULTILINE)[1:]
    assert len(sections) >= 4
    for section in sections:
        _, _, told = section.partition("\nTests: ")
        named = re.findall(r"`((?:tests|trust)/[\w/]+\.py)", told)
        assert named, section.splitlines()[0]
        assert all((ROOT / name).exists() for name in named)


def plan_keys(part: dict, whole: dict, prefix: str = ""):
    for key, value in part.get("properties", {}).items():
        value = whole["$defs"][value["$ref"].rpartition("/")[2]] if "$ref" in value else value
        if "properties" in value:
            yield from plan_keys(value, whole, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_the_price_of_discrete_noise_is_the_same_on_every_page():
    exact, vault = (worth(8, 1e-5, calibration="exact") for worth in (capacity, vault_capacity))
    for page in ("guarantee.md", "proofs.md"):
        assert f"{1 - float(vault) / float(exact):.1e} of " in (ROOT / "docs" / page).read_text()


def test_options_name_only_keys_of_a_plan():
    """The reference of all keys is generated (tests/project/test_site.py)."""
    text = (ROOT / "docs" / "options.md").read_text("utf-8")
    schema = json.loads((ROOT / "src/sottovoce/schemas/plan.json").read_text("utf-8"))
    named = re.findall(r"`((?:data|model|local|privacy|rounds|server)\.\w+)`", text)
    assert len(set(named)) > 40
    assert set(named) <= set(plan_keys(schema, schema))


def test_the_page_on_deployment_has_every_key_of_a_node_file():
    text = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    # The second block is that of the roster, as an operator adds it.
    blocks = re.findall(r"```toml\n# /srv/ward-3/node\.toml(.*?)```", text, re.DOTALL)
    keys = {key for names in NODE_KEYS.values() for key in names}
    assert len(blocks) == 2
    assert keys - set(re.findall(r"\w+", " ".join(blocks))) == set()


def list_texts(folder: Path):
    """All texts in the source below a folder; what an f-string fills in is …"""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                pieces = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                yield "".join(map(str, pieces))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_page_on_vaults_explains_messages_that_a_vault_has():
    page = (ROOT / "docs" / "ledger.md").read_text("utf-8")
    table = page[page.index("| the message says |") :].partition("\n\n")[0]
    cells = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert len(cells) > 30
    texts = "\n".join(list_texts(ROOT / "src" / "sottovoce" / "client"))
    for cell in cells:
        # What stands for a name or a number, and a second wording of the same row, are cut off.
        for words in re.split(r"`key`|…|\d+|\bN\b|\(.*?\)|, (?=cannot|it is)|(?= is in use)", cell):
            assert words.strip(" ,`") in texts, cell


def test_the_readme_is_short_and_its_number_is_the_true_one():
    """Its Python is a doctest. Opened once, it must fit into two minutes."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 120
    noise = paper_sigma(20, 1e-5, sensitivity=1, rounds=1)
    true = float(gaussian.epsilon(1e-5, 1 / noise))
    for page in ("README.md", "docs/paper.md"):
        words = " ".join((ROOT / page).read_text("utf-8").split())
        assert f"promises ε = 20 (δ = 1e-5) and gives {true:.1f}" in words


def test_no_file_names_this_machine_or_a_registry():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: there is no list of tracked files")
    here = str(ROOT)
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".npz", ".gz", ".png", ".onnx"} or not path.exists():
            continue
        text = path.read_text("utf-8")
        assert here not in text, name
        assert "simple/" not in text or name == "tests/project/test_project.py", name


def test_every_exact_test_is_run_by_make_test():
    """`make test` runs them apart, by the files that tests/parts.py names."""
    parts = runpy.run_path(str(ROOT / "tests" / "parts.py"))
    mark = "@pytest.mark." + "exact"
    marked = [
        path for path in (ROOT / "tests").rglob("test_*.py") if mark in path.read_text("utf-8")
    ]
    assert {path.relative_to(ROOT).as_posix() for path in marked} == set(parts["WHERE_EXACT"])
