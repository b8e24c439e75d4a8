"""The keys of the JSON documents that sottovoce writes, with their types and bounds.

The functions that make a document name its class here as what they return, so that mypy holds
them to its keys. Only the code that validates a document or generates its schema imports this file
at run time: `sottovoce calibrate` and a device start without pydantic.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

from sottovoce.privacy.budget import NOT_COVERED, Calibration, Unit

#: Text is no number. Unknown keys are left out when a document is read; its schema refuses them.
STRICT = ConfigDict(strict=True)

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Delta = Annotated[float, Field(gt=0, le=0.5)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
#: A code of a later version is no damage, so that only the schema lists the codes.
NotCovered = Annotated[
    list[Annotated[str, WithJsonSchema({"enum": [*NOT_COVERED]})]],
    Field(json_schema_extra={"uniqueItems": True}),
]


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
    made["description"] = " ".join(made["description"].split())
    for key, text in _read_docstrings(document).items():
        made["properties"][key]["description"] = " ".join(text.split())
    return made


def _read_docstrings(document: type) -> dict[str, str]:
    """Return the text below each key of a class, and of those it inherits keys from."""
    found: dict[str, str] = {}
    for parent in getattr(document, "__orig_bases__", ()):
        if inspect.isclass(parent):
            found |= _read_docstrings(parent)
    (tree,) = ast.parse(inspect.getsource(document)).body
    assert isinstance(tree, ast.ClassDef)
    for key, below in itertools.pairwise(tree.body):
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                found[name] = text
    return found


class GuaranteeEntry(TypedDict):
    """What holds; under `paper` calibration epsilon differs from what was asked."""

    epsilon: Positive
    delta: Delta
    unit: Unit
    adjacency: Literal["replace-one"]
    adversary: Literal["server"]
    calibration: Calibration
    not_covered: NotCovered
    text: str
