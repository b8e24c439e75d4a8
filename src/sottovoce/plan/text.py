"""Plans as text: reading TOML, `--set` and the file of budgets, and writing TOML.

Everything here turns text into plain data or back; what the data must be is checked in `plan`.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sottovoce.errors import InputError, PlanError
from sottovoce.privacy.budget import Budget

BUDGET_COLUMNS = ["id", "epsilon", "delta"]


def read(path: str | Path, what: str) -> str:
    """The text of a file, or a sentence why there is none."""
    try:
        # A byte order mark at the start (Windows) is no part of the text.
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        why = "there is no such file"
    except IsADirectoryError:
        why = "it is a folder, name the file in it"
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text (byte {error.start}), save it as UTF-8"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or "that is no path"
    raise PlanError(f"{what} {_shown(path)} cannot be read: {why}")


def parse(text: str, source: str = "the plan") -> dict[str, Any]:
    """TOML as plain data.

    >>> parse("[data]\\nclients = ")
    Traceback (most recent call last):
        ...
    sottovoce.errors.PlanError: the plan is not valid TOML: Invalid value (at line 2, the end)
    """
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise PlanError(f"{source} is not a plan: its values are nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        why = str(error).replace("end of document", f"line {len(text.splitlines())}, the end")
        if not isinstance(error, tomllib.TOMLDecodeError):
            why = "it has a number or a date that is too large to be one"
        why = re.sub(r"\s+", " ", why)
        # The place stands at the end of the message, so a long one is cut in its middle.
        why = why if len(why) <= 160 else f"{why[:100]}...{why[-50:]}"
        raise PlanError(f"{source} is not valid TOML: {why}") from None
    if not values:
        raise PlanError(f"{source} is empty; sottovoce init writes a plan with every key explained")
    return values


def parse_setting(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, the value being TOML or else taken as a word.

    >>> parse_setting("privacy.epsilon=4"), parse_setting("model.name=cnn")
    (('privacy.epsilon', 4), ('model.name', 'cnn'))
    >>> parse_setting("epsilon")
    Traceback (most recent call last):
        ...
    sottovoce.errors.PlanError: --set takes KEY=VALUE, got 'epsilon'; for example \
--set privacy.epsilon=4
    """
    key, equals, word = (part.strip() for part in text.partition("="))
    if not (key and equals and word):
        raise PlanError(
            f"--set takes KEY=VALUE, got {_shown(text)}; for example --set privacy.epsilon=4"
        )
    try:
        values = tomllib.loads(f"value = {word}")
    except (ValueError, RecursionError):
        return key, word
    # A line break in the word could have started a second key.
    return key, values["value"] if list(values) == ["value"] else word


def split_key(key: str) -> tuple[str, str]:
    """`section.key` or a key at the top of the plan as ("", key).

    >>> split_key("privacy.epsilon"), split_key("noise")
    (('privacy', 'epsilon'), ('', 'noise'))
    """
    parts = key.split(".")
    if len(parts) > 2 or not all(parts):
        raise PlanError(f"unknown key {_shown(key)}; a key is section.name, as privacy.epsilon")
    return (parts[0], parts[1]) if len(parts) == 2 else ("", key)


def read_budgets(path: str | Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ε and δ of clients 0, 1, 2, … from a CSV file with the columns id, epsilon, delta."""
    where = f"privacy.clients {_shown(path)}"
    rows = csv.reader(read(path, "privacy.clients").splitlines())
    found: dict[int, Budget] = {}
    try:
        header = [name.strip().lower() for name in next(rows, [])]
        if header != BUDGET_COLUMNS:
            raise PlanError(f"{where} line 1 must be id,epsilon,delta; name the columns there")
        for row in rows:
            line = f"{where} line {rows.line_num}"
            if not row:
                continue
            try:
                client, epsilon, delta = int(row[0]), float(row[1]), float(row[2])
            except (ValueError, IndexError):
                raise PlanError(f"{line} must be three numbers: id, epsilon, delta") from None
            if len(row) != 3:
                raise PlanError(f"{line} must be three numbers: id, epsilon, delta")
            if client in found:
                raise PlanError(f"{line} repeats client {client}; each id stands there once")
            try:
                found[client] = Budget(epsilon, delta)
            except InputError as error:
                raise PlanError(f"{line}: {error}") from None
    except csv.Error as error:
        raise PlanError(f"{where} line {rows.line_num} is not CSV: {error}") from None
    if not found:
        raise PlanError(f"{where} has no clients; give each a line id,epsilon,delta")
    missing = next((client for client in range(len(found)) if client not in found), None)
    if missing is not None:
        raise PlanError(
            f"{where} has {len(found)} clients but no id {missing}; ids run from 0 without a gap"
        )
    budgets = [found[client] for client in range(len(found))]
    return tuple(b.epsilon for b in budgets), tuple(b.delta for b in budgets)


def write(values: Mapping[str, Any]) -> str:
    """Plain data of two levels, or three, as TOML.

    >>> print(write({"schema": 1, "data": {"name": "digits", "samples": [3, 4]}}), end="")
    schema = 1
    <BLANKLINE>
    [data]
    name = "digits"
    samples = [3, 4]
    """
    lines = [f"{key} = {value_text(v)}" for key, v in values.items() if not isinstance(v, Mapping)]
    for section, keys in values.items():
        if isinstance(keys, Mapping):
            flat = {key: v for key, v in keys.items() if not isinstance(v, Mapping)}
            lines += ["", f"[{section}]", *(f"{key} = {value_text(v)}" for key, v in flat.items())]
            for key in (key for key in keys if key not in flat):
                lines += ["", f"[{section}.{key}]"]
                lines += [f"{key_text(name)} = {value_text(v)}" for name, v in keys[key].items()]
    return "\n".join(lines) + "\n"


def value_text(value: Any) -> str:
    """One value as TOML: JSON writes strings, numbers and lists the same way.

    >>> value_text(1e-5), value_text("mlp"), value_text({"age": [0, 9], "a b": ["é"]})
    ('1e-05', '"mlp"', '{age = [0, 9], "a b" = ["é"]}')
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key_text(k)} = {value_text(v)}" for k, v in value.items()) + "}"
    # Not ASCII: JSON's escapes beyond the first 65,536 characters are none of TOML's.
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def key_text(key: str) -> str:
    """A key as TOML, in quotes where it needs them.

    >>> key_text("age"), key_text("marital status")
    ('age', '"marital status"')
    """
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else value_text(key)


def _shown(value: object) -> str:
    text = ascii(str(value))
    return text if len(text) <= 80 else f"{text[:30]}...{text[-47:]}"
