"""Why a plan is refused, in one plain sentence.

What a value must be is read off the JSON Schema of the plan and what it is for off the field's
description, so a new field needs no sentence of its own here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sottovoce.errors import PlanError

Keys = Mapping[str, Sequence[str]]  # section → its keys; "" is the top of the plan
Schema = Mapping[str, Any]


def named(*parts: object) -> str:
    """A dotted name that is safe to print: odd or endless parts are quoted and cut.

    >>> named("rounds", "beta"), named("data", "a b")
    ('rounds.beta', "data.'a b'")
    """
    return ".".join(_safe(part) for part in (parts if parts[0] else parts[1:]))


def _safe(part: object) -> str:
    text = str(part)
    if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", text):
        return text
    return ascii(text if len(text) <= 40 else text[:37] + "...")[:60]


def unknown(section: str, key: str, keys: Keys) -> PlanError:
    """A key nobody knows: where it belongs, or the nearest name, or all names.

    >>> keys = {"": ["noise", "rounds"], "rounds": ["beta", "zeta"], "privacy": ["epsilon"]}
    >>> print(unknown("rounds", "betta", keys))
    unknown key rounds.betta; did you mean rounds.beta?
    >>> print(unknown("", "epsilon", keys))
    unknown key epsilon; epsilon belongs to [privacy]
    """
    head = f"unknown key {named(section, key)}"
    homes = [home for home in keys if key in keys[home] and home != section]
    if homes:
        where = " or ".join(f"[{home}]" if home else "the top of the plan" for home in homes)
        return PlanError(f"{head}; {key} belongs to {where}")
    near = difflib.get_close_matches(key, keys.get(section, ()), 1)
    if near:
        return PlanError(f"{head}; did you mean {named(section, near[0])}?")
    # Further away only for a near certainty: a wrong hint is worse than the list.
    everywhere = {other: home for home in keys for other in keys[home]}
    near = difflib.get_close_matches(key, everywhere, 1, 0.8)
    if near:
        return PlanError(f"{head}; did you mean {named(everywhere[near[0]], near[0])}?")
    what = f"the keys of [{section}]" if section else "the sections and keys of a plan"
    return PlanError(f"{head}; {what} are {joined(keys.get(section, ()), 'and')}")


def refused(problems: Sequence[Any], section: str, schema: Schema, keys: Keys) -> PlanError:
    """The sentence for what pydantic found (`ValidationError.errors()`) in one section."""
    # A misspelt key explains most other troubles, so it is told first.
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, PlanError):
        return cause
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return unknown(section, key, keys)
    # Of "neither a number nor a list", tell what is wrong inside the list if it is one.
    same = [problem for problem in problems if problem["loc"][0] == key]
    inside = [problem for problem in same if isinstance(problem["loc"][-1], int)]
    field = schema["properties"][key]
    purpose = f"it is {field['description']}"
    name, value = named(section, key), first["input"]
    if inside:
        name, value = f"{name}[{inside[0]['loc'][-1]}]", inside[0]["input"]
        field = next(kind["items"] for kind in field["anyOf"] if "items" in kind)
    names = [name for kind in (field, *field.get("anyOf", ())) for name in kind.get("enum", ())]
    near = difflib.get_close_matches(str(value)[:60].lower(), names, 1)
    return PlanError.of(
        name, value, expected(field), f"did you mean {near[0]}?" if near else purpose
    )


def expected(schema: Schema) -> str:
    """What a JSON Schema asks for, in words.

    >>> expected({"type": "integer", "minimum": 1, "maximum": 9})
    'a whole number from 1 to 9'
    >>> expected({"anyOf": [{"type": "number"}, {"type": "array"}, {"type": "null"}]})
    'a number or a list of such'
    >>> expected({"enum": ["svm", "mlp", "cnn"]})
    'svm, mlp or cnn'
    """
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(expected(kind) for kind in kinds)
    if "const" in schema or "enum" in schema:
        return joined(schema.get("enum", [schema.get("const")]), "or")
    noun = {
        "integer": "a whole number",
        "number": "a number",
        "array": "a list of such",
        "string": "text",
        "boolean": "true or false",
        "object": "a table of lists",
    }[schema["type"]]
    if "exclusiveMinimum" in schema:
        return f"{noun} between {schema['exclusiveMinimum']:g} and {schema['exclusiveMaximum']:g}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        # %.10g: 1000000 rather than 1e+06.
        return f"{noun} from {low:.10g} to {high:.10g}"
    return noun if high is None else f"{noun} up to {high:.10g}"


def joined(names: Sequence[object], last: str) -> str:
    """A list as people write it.

    >>> joined(["svm", "mlp", "cnn"], "or")
    'svm, mlp or cnn'
    """
    texts = [str(name) for name in names]
    return f" {last} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
