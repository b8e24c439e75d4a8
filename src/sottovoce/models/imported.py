"""A model of your own, named in a plan or a node file: `package.module:name` or `file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from sottovoce.errors import InputError, SottovoceError

_BOUND = "package.module:name or file.py:name of a model"


def find(where: str, key: str = "model.own") -> Any:
    """The object that `where` names. Importing it runs its code: it is trusted like any program.

    >>> find("json:loads")('"a model would stand here"')
    'a model would stand here'
    >>> find("json")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: model.own must be package.module:name or file.py:name of a model, \
got 'json'; name the file or package, a colon, and the model in it
    """
    place, name = require_named(where, key)
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, name)
    except SottovoceError:  # sottovoce.custom says itself what is wrong
        raise
    except (Exception, SystemExit) as error:  # its code may raise anything
        raise InputError.of(key, where, _BOUND, _told(error)) from None


def _told(error: BaseException) -> str:
    """What went wrong; in the model's own code also the kind of error, file and line."""
    said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:120]
    place = None
    if isinstance(error, SyntaxError):
        place = error.filename, error.lineno
    else:
        for frame, line in traceback.walk_tb(error.__traceback__):
            code = frame.f_code.co_filename
            if not code.startswith("<frozen") and code not in (__file__, importlib.__file__):
                place = code, line
    if place is None or place[0] is None:
        return said
    return f"{type(error).__name__} in line {place[1]} of {Path(place[0]).name}: {said}"


def require_named(where: str, key: str = "model.own") -> tuple[str, str]:
    """The two parts of `where`, by its form alone: nothing is imported.

    >>> require_named("study/net.py:model"), require_named("package.net:model")
    (('study/net.py', 'model'), ('package.net', 'model'))
    """
    place, _, name = where.rpartition(":")
    known = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if not known or not name.isidentifier():
        remedy = "name the file or package, a colon, and the model in it"
        raise InputError.of(key, where, _BOUND, remedy)
    return place, name


def beside(where: str, folder: str | Path) -> str:
    """`where` with a file's name taken from `folder`, as other paths of a plan are.

    >>> beside("net.py:model", "study"), beside("package.net:model", "study")
    ('study/net.py:model', 'package.net:model')
    """
    place, _, name = where.rpartition(":")
    return f"{Path(folder, place)}:{name}" if place.endswith(".py") else where


def _file(path: Path) -> ModuleType:
    path = path.resolve()
    title = f"sottovoce_own_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if title in sys.modules:
        return sys.modules[title]
    spec = importlib.util.spec_from_file_location(title, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {path.name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[title]
        raise
    return module
