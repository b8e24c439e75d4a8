"""Build the packages twice, check them, install the wheel outside the clone, and use it there.

    python tests/wheel.py [--out dist]

The two builds must be equal byte by byte (SOURCE_DATE_EPOCH is the time of the commit). twine
checks the metadata, hadolint the Dockerfile, JSON Schemas the workflows, forms and compose.yaml.
`--out` keeps wheel, sdist and sbom.cdx.json, the CycloneDX list of what an installation contains.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Files that no import names, and without which an installed command fails.
NEEDED = ("py.typed", "plan/default.toml", "schemas/record.json", "flower/deploy/node.service")
SCHEMAS = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "compose-spec": "compose.yaml",
    "citation-file-format": "CITATION.cff",
}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Return the command's standard output; a failure ends the script with what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    if done.returncode != 0:
        sys.exit(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def make_environment(folder: Path, *requirements: str | Path) -> Path:
    """Install the requirements into a new environment; return its folder of commands."""
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "pip", "install", "--quiet", "--no-compile"]
    pip += ["--disable-pip-version-check", "--constraint", ROOT / "constraints.txt"]
    run(*pip, *requirements, cwd=folder)
    return folder / "bin"


def build(tools: Path, folder: Path) -> dict[str, str]:
    """Build sdist and wheel; return the digest of each by its name."""
    time = "315532800"  # 1980, the first year that a zip file can hold
    if (ROOT / ".git").exists():
        time = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    command = (tools / "python", "-m", "build", "--outdir", folder, ROOT)
    run(*command, cwd=folder.parent, SOURCE_DATE_EPOCH=time)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def check_contents(wheel: Path, sdist: Path) -> None:
    """Require the package and nothing else in the wheel, and its tests in the sdist."""
    names = zipfile.ZipFile(wheel).namelist()
    if strange := [name for name in names if not re.match(r"sottovoce(-[^/]*\.dist-info)?/", name)]:
        sys.exit(f"the wheel has files outside the package: {strange[:5]}")
    missing = [name for name in NEEDED if f"sottovoce/{name}" not in names]
    tracked = {path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py")}
    missing += [str(path) for path in tracked if str(path) not in names]
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "tests/wheel.py"}
    if missing or not wanted <= inside:
        sys.exit(f"missing in the wheel: {missing[:5]}; in the sdist: {sorted(wanted - inside)}")


def check_files(tools: Path, packages: list[Path]) -> None:
    """Check metadata, Dockerfile, workflows, forms, compose file and citation."""
    run(tools / "twine", "check", "--strict", *packages, cwd=ROOT)
    run(tools / "hadolint", "Dockerfile", cwd=ROOT)
    for schema, pattern in SCHEMAS.items():
        command = (tools / "check-jsonschema", "--builtin-schema", f"vendor.{schema}")
        run(*command, *sorted(ROOT.glob(pattern)), cwd=ROOT)


def use(scripts: Path, away: Path) -> None:
    """Calibrate, read a schema and train with what is installed; end the script if one is wrong."""
    answer = json.loads(run(scripts / "sottovoce", "calibrate", "--json", cwd=away))
    if abs(answer["mu"] - 1.66603060) > 1e-7:
        sys.exit(f"the installed calibrate answers μ = {answer['mu']}")
    schema = json.loads(run(scripts / "sottovoce", "schema", "calibrate", cwd=away))
    if "guarantee" not in schema["properties"]:
        sys.exit("the installed schema is not the calibrate schema")
    train = ("train", "--quiet", "--seed", "1", "--out", away / "run")
    run(scripts / "sottovoce", *train, cwd=away)
    page = (away / "run" / "report.html").read_text("utf-8")
    if "test accuracy" not in page:
        sys.exit("the installed train wrote no page")
    where = "import sottovoce; print(sottovoce.__file__)"
    place = run(scripts / "python", "-c", where, cwd=away)
    if str(away) not in place:
        sys.exit(f"sottovoce was imported from {place.strip()}, not from the wheel")


def list_parts(tools: Path, scripts: Path, path: Path) -> int:
    """Write the CycloneDX list of what is installed; return how many parts it has.

    Paths of this machine, which pip notes for a local wheel, are left out.
    """
    command = (tools / "cyclonedx-py", "environment", "--output-reproducible", "--of", "JSON")
    said = json.loads(run(*command, scripts / "python", cwd=path.parent))
    for part in said["components"]:
        references = part.get("externalReferences", [])
        part["externalReferences"] = [x for x in references if not x["url"].startswith("file:")]
    path.write_text(json.dumps(said, indent=1) + "\n", "utf-8")
    if "file:" in path.read_text("utf-8") or str(scripts.parent) in path.read_text("utf-8"):
        sys.exit("sbom.cdx.json names a path of this machine")
    return len(said["components"])


def main() -> None:
    """Exit 0 only if both builds are equal, pass all checks, and the wheel can be used."""
    out = Path(sys.argv[2]).absolute() if sys.argv[1:2] == ["--out"] else None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    with tempfile.TemporaryDirectory() as folder:
        away = Path(folder)
        tools = make_environment(away / "tools", *extras["optional-dependencies"]["release"])
        first, second = build(tools, away / "first"), build(tools, away / "second")
        if first != second:
            sys.exit(f"two builds differ: {first} and {second}")
        (wheel,), (sdist,) = (list((away / "first").glob(end)) for end in ("*.whl", "*.tar.gz"))
        check_contents(wheel, sdist)
        check_files(tools, [wheel, sdist])
        scripts = make_environment(away / "env", wheel)
        use(scripts, away)
        parts = list_parts(tools, scripts, away / "first" / "sbom.cdx.json")
        if out is not None:
            shutil.copytree(away / "first", out, dirs_exist_ok=True)
            print("\n".join(f"{digest}  {out.name}/{name}" for name, digest in first.items()))
        print(f"{wheel.name}: reproducible, checked, installed and used; {parts} parts in its SBOM")


if __name__ == "__main__":
    main()
