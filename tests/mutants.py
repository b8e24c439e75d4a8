"""A module of the package with one line changed: to show that a test would notice."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path


def mutated(name: str, old: str, new: str) -> types.ModuleType:
    """The module `name` with the only occurrence of `old` replaced by `new`; nothing is patched."""
    original = importlib.import_module(name)
    source = Path(str(original.__file__)).read_text("utf-8")
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times in {name}, not once")
    module = types.ModuleType(f"{name}_mutated")
    module.__file__ = original.__file__
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(source.replace(old, new), str(original.__file__), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module
