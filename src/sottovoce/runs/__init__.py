"""A run on disk: `record` (record.json), `checkpoint` (the state after a round and what follows
from it), `trained` (the model with its record, read back with `load`).
"""
