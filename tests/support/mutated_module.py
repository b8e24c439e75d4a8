"""A module of the package with one line changed: to show that a test would notice."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path


def mutated(name: str, old: str, new: str, *more: tuple[str, str]) -> types.ModuleType:
    """The module `name` with the only occurrence of `old` replaced by `new`; nothing is patched."""
    original = importlib.import_module(name)
    source = Path(str(original.__file__)).read_text("utf-8")
    for was, becomes in ((old, new), *more):
        if source.count(was) != 1:
            raise ValueError(f"{was!r} occurs {source.count(was)} times in {name}, not once")
        source = source.replace(was, becomes)
    module = types.ModuleType(f"{name}_mutated")
    module.__file__ = original.__file__
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(source, str(original.__file__), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module
