"""Write all JSON Schemas of the package from its classes: `make schemas`."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from sottovoce import schemas
from sottovoce.plan import Plan
from sottovoce.runs.record import Record

#: The documents beside plans: the class with their keys, and a title.
DOCUMENTS = {
    "audit": (schemas.AuditDocument, "What sottovoce audit measured"),
    "calibrate": (schemas.CalibrationDocument, "sottovoce calibrate --json"),
    "certificate": (schemas.CertificateDocument, "sottovoce.certificate/1"),
    "description": (schemas.DescriptionDocument, "sottovoce describe"),
    "rehearsal": (
        schemas.RehearsalDocument,
        "What sottovoce rehearse chose, and every federation it ran",
    ),
    "record": (Record, "record.json of a run folder"),
}


class DocumentSchema(GenerateJsonSchema):
    """Generates the JSON Schema of a document: no unknown keys, no null for an absent key."""

    def generate(self, schema: Any, mode: Any = "validation") -> dict[str, Any]:
        """Return the schema, with its dialect."""
        return {"$schema": self.schema_dialect, **super().generate(schema, mode)}

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: the name of a key is its title."""
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        """Return the schema of a key that may be absent."""
        value = schema["schema"]
        return self.generate_inner(value["schema"] if value["type"] == "nullable" else value)

    def typed_dict_schema(self, schema: Any) -> dict[str, Any]:
        """Return the schema of a part."""
        return _complete(super().typed_dict_schema(schema), schema["cls"])

    def model_schema(self, schema: Any) -> dict[str, Any]:
        """Return the schema of the whole."""
        return _complete(super().model_schema(schema), schema["cls"])


def _complete(made: dict[str, Any], document: type) -> dict[str, Any]:
    """Return the schema with the class's own descriptions, refusing unknown keys."""
    made |= {"additionalProperties": False}
    if "description" in made:
        made["description"] = " ".join(made["description"].split())
    for key, text in _read_descriptions(document).items():
        made["properties"][key]["description"] = " ".join(text.split())
    return made


def _read_descriptions(document: type) -> dict[str, str]:
    """Return what is said of each key of a class, and of those it inherits keys from.

    It stands below the key as a text, or above or beside it as a comment that begins with `#:`.
    """
    found: dict[str, str] = {}
    for parent in getattr(document, "__orig_bases__", ()):
        if inspect.isclass(parent):
            found |= _read_descriptions(parent)
    try:
        source = inspect.getsource(document)
    except OSError:  # made without a class statement, as a key that is no name needs
        return found
    (tree,), lines = ast.parse(source).body, source.splitlines()
    assert isinstance(tree, ast.ClassDef)
    for key, below in itertools.zip_longest(tree.body, tree.body[1:]):
        match key:
            case ast.AnnAssign(target=ast.Name(id=name)):
                above = itertools.takewhile(_is_description, reversed(lines[: key.lineno - 1]))
                beside = lines[key.lineno - 1].partition("  #: ")[2]
                said = [*reversed([line.strip().removeprefix("#:") for line in above]), beside]
                found |= {name: " ".join(said)} if any(said) else {}
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                found[name] = text
    return found


def _is_description(line: str) -> bool:
    return line.strip().startswith("#:")


def generate_schemas() -> dict[str, str]:
    """Return the text of every schema by the name of its file."""
    generated = {
        name: TypeAdapter(document).json_schema(schema_generator=DocumentSchema) | {"title": title}
        for name, (document, title) in DOCUMENTS.items()
    }
    generated["plan"] = Plan.json_schema()
    return {
        f"{name}.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        for name, schema in generated.items()
    }


def main() -> None:
    """Write the files."""
    for name, text in generate_schemas().items():
        Path(schemas.__file__).with_name(name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
