"""Models of a user's own: JAX functions made into a model, and models named in plans.

`custom(init, apply, loss)` makes a model of three JAX functions; `models.torch_model` has the one
for PyTorch. A plan or a node file names a model as `package.module:name` or `file.py:name`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError, SottovoceError
from sottovoce.models import base
from sottovoce.models.base import Array, Arrays, Floats, JaxModel, Model, Params, decide, jax, jnp
from sottovoce.privacy.grid import Products

_BOUND = "package.module:name or file.py:name of a model"


@final
@dataclass(frozen=True)
class Custom(JaxModel):
    """A model of four JAX functions; see `custom`."""

    init_with: Callable[[Array], Params]
    apply_with: Callable[[Params, Array], Array]
    loss_of_scores: Callable[[Array, Array], Array]
    decide: Callable[[Array], Array]

    def init(self, key: Array) -> Params:
        return self.init_with(key)

    def apply(self, params: Params, x: Array) -> Array:
        return self.apply_with(params, x)

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        losses = self.loss_of_scores(self.apply(params, x), y)
        if losses.shape != x.shape[:1]:
            # A mean over the batch would make every sample's gradient depend on its neighbours.
            raise InputError(
                f"the loss of a custom model must be an array of shape {x.shape[:1]}, got "
                f"{losses.shape!r:.60}; return one loss per row and leave out the mean"
            )
        return losses

    def predict(self, params: Params, x: Array) -> Array:
        return self.decide(self.apply(params, x))

    def factor_gradients(
        self, params: Arrays, x: Floats, y: Any
    ) -> tuple[Products, NDArray[np.bool_]]:
        """Return every sample's gradient in float64, each computed alone by one compiled loop.

        The functions are traced once, so that nothing of one sample can reach another; outer
        products of dense layers are not written out. All samples have such factors.
        """
        with jax.enable_x64(True):
            tree, rows = self.unflatten(params), (jnp.asarray(x), jnp.asarray(y))
            factors = jax.device_get(base.clipping.compute_factors_alone(self, tree, *rows))
        by_name = dict(zip(base.flatten_parameters(tree), factors, strict=True))
        return Products(tuple(by_name[name] for name in sorted(by_name))), np.ones(len(x), bool)


def custom(
    init: Callable[[Array], Params],
    apply: Callable[[Params, Array], Array],
    loss: Callable[[Array, Array], Array],
    predict: Callable[[Array], Array] | None = None,
) -> Custom:
    """Return your own model, made of three JAX functions.

    `init(key)` gives any tree of floating-point arrays, which are trained as float32 at least.
    `apply(params, x)` gives the scores of rows x, (n, features): in training of one row alone, so
    that a row's scores must not depend on others.
    `loss(scores, y)` gives one loss per row, `predict(scores)` the class of each row; without it
    the largest score wins, or the sign where there is one score a row.

    >>> import jax.numpy as jnp
    >>> line = custom(
    ...     init=lambda key: jnp.zeros(2),
    ...     apply=lambda w, x: x @ w,
    ...     loss=lambda scores, y: (scores - y) ** 2,
    ... )
    >>> line.loss(jnp.ones(2), jnp.array([[1.0, 2.0]]), jnp.array([5.0])).tolist()
    [4.0]
    """
    return Custom(init, apply, loss, decide if predict is None else predict)


def load_own_model(where: str) -> Model:
    """Return the model that `model.own` names; importing it runs its code."""
    return adopt_model(find_object(where), "model.own", where)


def adopt_model(candidate: Any, key: str = "model", shown: Any = None) -> Model:
    """Return a model as it is, and a PyTorch module as a `TorchModel`.

    >>> adopt_model("mlp")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: model must be a model or a torch module, got 'mlp'; make it with \
sottovoce.custom or TorchModel, or name a model in the plan
    """
    if (torch := sys.modules.get("torch")) is not None and isinstance(candidate, torch.nn.Module):
        from sottovoce.models.torch_model import TorchModel

        return TorchModel(candidate)
    if isinstance(candidate, Model):
        return candidate
    remedy = "make it with sottovoce.custom or TorchModel, or name a model in the plan"
    shown = candidate if shown is None else shown
    raise InputError.of(key, shown, "a model or a torch module", remedy)


def require_fitting(model: Model, features: int, classes: int, is_number: bool) -> None:
    """Refuse a model of one's own whose scores do not fit, or depend on more than their own row.

    Rows and parameters are drawn: zeros, with which many models begin, would hide it.
    """
    if isinstance(model, Custom):
        _require_shapes(model, features, is_number)
    elif isinstance(model, JaxModel):
        return
    else:
        kind = np.float64 if is_number else np.int64
        base.require_rows(model, model.draw_parameters(0), 1, features, kind)
    draw, shapes = np.random.default_rng(0).standard_normal, model.shapes()
    drawn: dict[str, Any] = {
        name: np.float32(draw(form) / max((1, *form)) ** 0.5) for name, form in shapes.items()
    }

    def score(x: NDArray[Any]) -> Any:
        if not isinstance(model, JaxModel):
            return model.scores(drawn, x)
        # Not its `scores`, which take one row at a time.
        scores = model.apply(model.unflatten(drawn), jnp.asarray(x))
        return base.arrange_scores(np.asarray(scores))

    rows = np.stack([np.zeros(features), np.ones(features), np.arange(features) % 2])
    scores, *others = (score(rows[pair].astype("f4")) for pair in ([0, 1], [0, 2], [2, 1]))
    if is_number:
        base.take_numbers(scores)
    if scores is None:
        return
    rounding = 1e-3 * np.abs(np.nan_to_num(scores)).max()
    for k, other in enumerate(others):
        if not np.allclose(scores[k], other[k], rtol=0, atol=rounding, equal_nan=True):
            raise InputError(
                "the scores of a row must depend on this row alone, and those of your own model "
                "change with the row beside it; normalise over features (LayerNorm), not over rows"
            )
    if not is_number and getattr(model, "decide", decide) is decide and scores.shape[1] != classes:
        bound = f"{classes} a row, one for each class"
        remedy = "end in as many (one score s a row counts as two, 0 and s)"
        raise InputError.of("the scores of your own model", scores.shape[1], bound, remedy)


def _require_shapes(model: Custom, features: int, is_number: bool) -> None:
    x, y = jnp.zeros((2, features)), jnp.zeros(2, "float32" if is_number else "int32")
    try:
        params = jax.eval_shape(model.init, jax.random.key(0))
        jax.eval_shape(model.loss, params, x, y)
        shape = jax.eval_shape(model.predict, params, x).shape
    except SottovoceError:
        raise
    except Exception as error:  # its code may raise anything
        raise InputError(
            f"your own model does not fit rows of {features} numbers, scores and labels; correct "
            f"it ({explain_error(error)})"
        ) from None
    kinds = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)})
    if not kinds or not all(jnp.issubdtype(kind, jnp.floating) for kind in kinds):
        bound, remedy = "arrays of floating-point numbers", "keep all else out of init's result"
        raise InputError.of("the parameters of your own model", kinds or None, bound, remedy)
    if shape != (2,):
        bound, remedy = "one number for each of 2 rows, shape (2,)", "correct apply or predict"
        raise InputError.of("predict of your own model", shape, bound, remedy)


def find_object(where: str, key: str = "model.own") -> Any:
    """Return the object that `where` names. Importing runs its code: it is trusted like a program.

    >>> find_object("json:loads")('"a model would stand here"')
    'a model would stand here'
    >>> find_object("json")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: model.own must be package.module:name or file.py:name of a model, \
got 'json'; name the file or package, a colon, and the model in it
    """
    source, name = split_name(where, key)
    try:
        is_file = source.endswith(".py")
        module = _load_file(Path(source)) if is_file else importlib.import_module(source)
    except SottovoceError:  # sottovoce.custom says itself what is wrong
        raise
    except (Exception, SystemExit) as error:  # its code may raise anything
        raise InputError.of(key, where, _BOUND, explain_error(error)) from None
    if not hasattr(module, name):
        raise InputError.of(key, where, _BOUND, f"{Path(source).name} has no {name}")
    return getattr(module, name)


def explain_error(error: BaseException) -> str:
    """Return what went wrong; in the model's code also the kind of error, file and line."""
    message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:120]
    origin = None
    if isinstance(error, SyntaxError):
        origin = error.filename, error.lineno
    else:
        for frame, line in traceback.walk_tb(error.__traceback__):
            code = frame.f_code.co_filename
            is_library = code.startswith("<frozen") or f"{os.sep}jax{os.sep}" in code
            if not is_library and code not in (__file__, importlib.__file__):
                origin = code, line
    if origin is None or origin[0] is None:
        return message
    return f"{type(error).__name__} in line {origin[1]} of {Path(origin[0]).name}: {message}"


def split_name(where: str, key: str = "model.own") -> tuple[str, str]:
    """Return file or package, and name, by the form of `where` alone: nothing is imported.

    >>> split_name("study/net.py:model"), split_name("package.net:model")
    (('study/net.py', 'model'), ('package.net', 'model'))
    """
    source, _, name = where.rpartition(":")
    is_known = source.endswith(".py") or all(word.isidentifier() for word in source.split("."))
    if not is_known or not name.isidentifier():
        remedy = "name the file or package, a colon, and the model in it"
        raise InputError.of(key, where, _BOUND, remedy)
    return source, name


def resolve_beside(where: str, folder: str | Path) -> str:
    """Return `where` with a file's name taken from `folder`, as other paths of a plan are.

    >>> resolve_beside("net.py:model", "study"), resolve_beside("package.net:model", "study")
    ('study/net.py:model', 'package.net:model')
    """
    source, _, name = where.rpartition(":")
    return f"{Path(folder, source)}:{name}" if source.endswith(".py") else where


def _load_file(path: Path) -> ModuleType:
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
