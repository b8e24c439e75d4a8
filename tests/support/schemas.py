"""Write all JSON Schemas of the package from its classes: `make schemas`."""

from __future__ import annotations

import json
from pathlib import Path

from sottovoce import schemas
from sottovoce.plan import Plan
from sottovoce.runs.record import Record

#: The documents beside plans and records: the class with their keys, and a title.
DOCUMENTS = {
    "audit": (schemas.AuditDocument, "What sottovoce audit measured"),
    "calibrate": (schemas.CalibrationDocument, "sottovoce calibrate --json"),
    "certificate": (schemas.CertificateDocument, "sottovoce.certificate/1"),
    "description": (schemas.DescriptionDocument, "sottovoce describe"),
    "rehearsal": (
        schemas.RehearsalDocument,
        "What sottovoce rehearse chose, and every federation it ran",
    ),
}


def generate_schemas() -> dict[str, str]:
    """Return the text of every schema by the name of its file."""
    generated = {
        name: schemas.describe_document(document, title)
        for name, (document, title) in DOCUMENTS.items()
    }
    generated |= {"plan": Plan.json_schema(), "record": Record.json_schema()}
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
