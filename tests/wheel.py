"""Build the wheel, install it into a fresh environment outside the clone, and use it there."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    """The command's standard output; a failure ends the script with what it printed."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Exit 0 only if the installed wheel calibrates, trains, and carries its data."""
    with tempfile.TemporaryDirectory() as folder:
        away = Path(folder)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", away, ROOT, cwd=away)
        (wheel,) = away.glob("sottovoce-*.whl")
        venv.create(away / "env", with_pip=True)
        scripts = away / "env" / "bin"
        pip = [scripts / "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, "--constraint", ROOT / "constraints.txt", wheel, cwd=away)
        answer = json.loads(run(scripts / "sottovoce", "calibrate", "--json", cwd=away))
        if abs(answer["mu"] - 1.66603060) > 1e-7:
            sys.exit(f"the installed calibrate answers μ = {answer['mu']}")
        schema = json.loads(run(scripts / "sottovoce", "schema", "calibrate", cwd=away))
        if "guarantee" not in schema["properties"]:
            sys.exit("the installed schema is not the calibrate schema")
        run(
            scripts / "sottovoce",
            "train",
            "--quiet",
            "--seed",
            "1",
            "--out",
            away / "run",
            cwd=away,
        )
        page = (away / "run" / "report.html").read_text("utf-8")
        if "test accuracy" not in page:
            sys.exit("the installed train wrote no page")
        where = "import sottovoce; print(sottovoce.__file__)"
        place = run(scripts / "python", "-c", where, cwd=away)
        if str(away) not in place:
            sys.exit(f"sottovoce was imported from {place.strip()}, not from the wheel")
        print(f"{wheel.name} installed and used in a fresh environment")


if __name__ == "__main__":
    main()
