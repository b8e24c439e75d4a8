"""The committed JSON Schemas are what the code generates, and accept what it writes."""

from __future__ import annotations

import copy
import json
from importlib import resources
from typing import Any

import jsonschema
import pytest

from sottovoce.errors import RunError
from sottovoce.privacy.budget import NOT_COVERED
from sottovoce.runs.record import Record
from support.example_record import example
from support.schemas import generate_schemas

FOLDER = resources.files("sottovoce").joinpath("schemas")


def test_the_committed_schemas_are_what_the_code_generates():
    """To renew them: make schemas."""
    generated = generate_schemas()
    assert {path.name for path in FOLDER.iterdir() if path.name.endswith(".json")} == {*generated}
    for name, text in generated.items():
        assert FOLDER.joinpath(name).read_text("utf-8") == text, name


@pytest.mark.parametrize("name", generate_schemas())
def test_every_schema_is_one_and_names_its_dialect(name):
    schema = json.loads(FOLDER.joinpath(name).read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"]
    assert schema["description"]


def record_schema() -> dict[str, Any]:
    return json.loads(FOLDER.joinpath("record.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ["record", "calibrate"])
def test_the_schema_of_a_guarantee_enumerates_what_is_not_covered(name):
    schema = json.loads(FOLDER.joinpath(f"{name}.json").read_text("utf-8"))
    guarantee = schema["$defs"]["GuaranteeEntry"]["properties"]
    assert guarantee["not_covered"]["items"]["enum"] == list(NOT_COVERED)


def places(value: Any, path: tuple[Any, ...] = ()):
    """Every place in a record but inside the plan, which is free, and one of a list."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            if path != ("plan",) and path != ("versions",):
                yield from places(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[-1], (*path, len(value) - 1))


def change(record: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(record)
    at = changed
    for key in path[:-1]:
        at = at[key]
    if value is Ellipsis:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return changed


def refusal_of(record: dict[str, Any]) -> str | None:
    try:
        Record.parse(record)
    except RunError as error:
        return str(error)
    return None


BAD = [..., None, True, -1, "-1", 0.5, [], {}]


def test_reading_a_record_refuses_what_its_schema_refuses():
    """Every place of a record with a value of every kind: class and schema say the same of it."""
    record, _ = example(clients=2, stop_after=2)
    record = json.loads(json.dumps(record))
    validator = jsonschema.Draft202012Validator(record_schema())
    validator.validate(record)
    refused = 0
    for path in places(record):
        for value in BAD if path else ():
            changed = change(record, path, value)
            fits, sentence = validator.is_valid(changed), refusal_of(changed)
            if sentence is None:
                # Codes and versions may be those of a later release; null stands for an absent key.
                later = path[:2] == ("guarantee", "not_covered") or path[0] == "versions"
                assert fits or later or (path, value) == (("clients",), None), (path, value)
                continue
            refused += 1
            assert not fits, (path, value, sentence)
            assert "\n" not in sentence
            assert len(sentence) < 300
    assert refused > 200


def test_a_record_that_is_read_and_written_is_the_same(tmp_path):
    record, _ = example(clients=2, stop_after=2)
    (tmp_path / "record.json").write_text(json.dumps(record), "utf-8")
    read = Record.read(tmp_path)
    assert read.to_dict() == record
    read.write(tmp_path)
    assert json.loads((tmp_path / "record.json").read_text("utf-8")) == record


def test_a_key_of_a_later_version_does_not_make_a_record_unreadable():
    record, _ = example(clients=2, stop_after=2)
    later = {**record, "weather": "fine", "result": {**record["result"], "wind": 3}}
    assert Record.parse(later).to_dict() == record
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(later, record_schema())
