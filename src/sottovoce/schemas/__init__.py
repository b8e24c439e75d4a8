"""JSON Schemas of what sottovoce reads and writes, generated from the code.

`python -m sottovoce.schemas` writes the files anew; `tests/project/test_schemas.py` compares them.
`documents` describes the keys of each document.
"""
