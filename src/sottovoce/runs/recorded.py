"""The record of a run folder, read back: one place that says what is missing or damaged in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from sottovoce.data.files import why
from sottovoce.errors import RunError

SCHEMA = "sottovoce.record/1"
AGAIN = "restore the file, or run the plan again into a new folder"
#: What every reader of a record relies on; `report/run.py` asks for more.
_NEEDS: dict[str, tuple[type, ...]] = {
    "initial": (dict,),
    "rounds": (list,),
    "plan": (dict,),
    "plan.model": (dict,),
    "plan.model.name": (str,),
    "result": (dict,),
    "result.test_accuracy": (int, float, NoneType),
    "result.rounds_used": (int,),
    "result.model_sha256": (str, NoneType),
    "guarantee": (dict, NoneType),
}


def read(folder: Path) -> dict[str, Any]:
    """The record of a run folder, or a sentence why there is none."""
    path = Path(folder) / "record.json"
    try:
        record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise RunError(
            f"{path} is missing; name a folder that `sottovoce train` has written"
        ) from None
    except OSError as error:
        raise RunError(
            f"{path} cannot be read ({error.strerror}); check that it is a file you may open"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({why(error)}); {AGAIN}") from error
    require_schema(record)
    for name, kinds in _NEEDS.items():
        found: Any = record
        for key in name.split("."):
            if key not in found:
                raise _damaged(f"it lacks {name!r}")
            found = found[key]
        if not isinstance(found, kinds):
            raise _damaged(f"{name} is {found!r:.40}")
    if record["guarantee"] is not None and "text" not in record["guarantee"]:
        raise _damaged("it lacks 'guarantee.text'")
    return dict(record)


def require_schema(record: Any) -> None:
    """Refuse what is no record of this kind."""
    if not isinstance(record, Mapping) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, Mapping) else type(record).__name__
        raise RunError(
            f'record.json must have schema "{SCHEMA}", got {found!r:.60}; '
            "use the version of sottovoce that wrote it"
        )


def _damaged(what: str) -> RunError:
    return RunError(f"record.json is damaged, {what}; {AGAIN}")
