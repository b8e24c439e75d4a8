"""Per-sample gradients in blocks of bounded memory: what a device's release is made of.

The exact integer sum of `privacy.grid` wants every sample's own gradient. They are formed for as
many samples as fit in a fixed amount of memory, as rows (samples, parameters) in the order of the
parameters' names; samples × parameters never exists as a whole. svm, softmax and mlp are numpy, so
that a device that trains them never loads JAX.

A row of a block depends on its own sample and the model alone, to the last bit: each is computed by
itself, never in one product with its neighbours. Otherwise a server could choose weights at which a
different rounding (as a batch with a NaN in it may have) switches a ReLU of every row, and the sum
would move by more than its sensitivity.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.errors import InputError
from sottovoce.models.form import Form, Shapes
from sottovoce.privacy.grid import Products, flush_tiny

# svm, softmax and mlp in float64 numpy: what a device computes, and what JAX is held against.
#
# No JAX here: a client that trains one of them never loads it. The losses are those of `base`;
# only the precision and the library differ.


Floats = NDArray[np.float64]

NAMES = ("svm", "softmax", "mlp")
LEAST_SCORE = -500.0  # below the largest of a row: e⁻⁵⁰⁰ is far from subnormal, which takes longer
SLAB = 1 << 16  # numbers of a matrix that all rows are multiplied by before the next


def losses_numpy(
    name: str,
    params: Mapping[str, ArrayLike],
    x: ArrayLike,
    y: ArrayLike,
    *,
    kappa: float = 0.01,
) -> Floats:
    """F(D_m, w) for every row of svm, softmax or mlp; see `base` for the formulas.

    >>> losses_numpy("svm", {"w": [1.0], "b": 0.0}, [[2.0], [-0.5]], [1, 1], kappa=0.0).tolist()
    [0.0, 1.5]
    """
    arrays, rows, labels = _given(name, params, x, y)
    with np.errstate(all="ignore"):
        if name == "svm":
            w, b = arrays["w"], arrays["b"]
            scores = row_by_row(rows, w[:, None])[:, 0] + b
            hinge = np.maximum(1 - (2.0 * labels - 1) * scores, 0)
            return np.asarray(hinge + kappa / 2 * (np.sum(w**2) + b**2))
        scores = _scores(arrays, rows) if name == "softmax" else _hidden(arrays, rows)[1]
        scores = scores - np.max(scores, axis=1, keepdims=True)
        picked = scores[np.arange(len(labels)), labels]
        return np.asarray(np.log(np.sum(np.exp(np.maximum(scores, LEAST_SCORE)), axis=1)) - picked)


def _given(
    name: str, params: Mapping[str, ArrayLike], x: ArrayLike, y: ArrayLike
) -> tuple[dict[str, Floats], Floats, NDArray[np.int64]]:
    if name not in NAMES:
        raise InputError.of("model name", name, "svm, softmax or mlp", "the others need JAX")
    arrays = {key: np.asarray(value, np.float64) for key, value in params.items()}
    return arrays, np.asarray(x, np.float64), np.asarray(y, np.int64)


def row_by_row(x: Floats, w: Floats) -> Floats:
    """x @ w, every row multiplied by itself: what it gives depends neither on place nor on company.

    One product of all rows rounds a row differently at the edge of a block than in the middle. A
    large w is gone through in slabs that stay in the cache for all rows.

    >>> row_by_row(np.array([[1.0, 2.0], [0.0, 1.0]]), np.array([[3.0], [4.0]])).tolist()
    [[11.0], [4.0]]
    """
    product = np.empty((len(x), w.shape[1]))
    width = max(1, SLAB // max(1, len(w)))
    for j in range(0, w.shape[1], width):
        product[:, j : j + width] = np.matmul(x[:, None, :], w[:, j : j + width])[:, 0]
    return product


def softmax_error(scores: Floats, y: NDArray[Any]) -> Floats:
    """softmax − one-hot, the derivative of the cross-entropy by every row's scores.

    At the label p − 1 is written −Σ of the others: it keeps its digits where p is nearly 1.

    >>> softmax_error(np.zeros((1, 2)), np.array([1])).tolist()
    [[0.5, -0.5]]
    """
    error = np.exp(np.maximum(scores - np.max(scores, axis=1, keepdims=True), LEAST_SCORE))
    error /= np.sum(error, axis=1, keepdims=True)
    error[np.arange(len(y)), y] = 0
    error[np.arange(len(y)), y] = -np.sum(error, axis=1)
    return np.asarray(error)


def _scores(params: dict[str, Floats], x: Floats) -> Floats:
    return row_by_row(x, params["w"]) + params["b"]


def _hidden(params: dict[str, Floats], x: Floats) -> tuple[Floats, Floats]:
    hidden = np.maximum(row_by_row(x, params["w1"]) + params["b1"], 0)
    return hidden, row_by_row(hidden, params["w2"]) + params["b2"]


Params = Mapping[str, Floats]

BLOCK_NUMBERS = 1 << 22  # float64 numbers of one block: 32 MiB


class OwnModel(Protocol):
    """A model of the client's own (PyTorch, JAX, …), by what a release needs of it.

    What it says of a sample must not depend on the other samples, not even in the last bit. It is
    therefore given one sample at a time, and read-only copies of the parameters and the sample.
    """

    def shapes(self) -> Shapes:
        """Names and shapes of the parameters."""
        ...

    def gradients(self, params: Params, x: Floats, y: NDArray[Any]) -> Mapping[str, Floats]:
        """Every sample's own gradient, each array (samples, *shape of the parameter)."""
        ...

    def losses(self, params: Params, x: Floats, y: NDArray[Any]) -> Floats:
        """The loss of every sample."""
        ...


class ForeignModel(ABC):
    """A model that is not JAX's, on a device and at the server: parameters are named arrays."""

    @abstractmethod
    def shapes(self) -> Shapes:
        """Names and shapes of the parameters, sorted by name."""

    @abstractmethod
    def first(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Fresh parameters, a function of the seed."""

    @abstractmethod
    def gradients(
        self, params: Mapping[str, NDArray[Any]], x: NDArray[Any], y: NDArray[Any]
    ) -> Mapping[str, NDArray[Any]]:
        """Every sample's own gradient, each array (samples, *shape of the parameter)."""

    @abstractmethod
    def losses(
        self, params: Mapping[str, NDArray[Any]], x: NDArray[Any], y: NDArray[Any]
    ) -> NDArray[np.float64]:
        """The loss of every sample."""

    @abstractmethod
    def predict(self, params: Mapping[str, NDArray[Any]], x: NDArray[Any]) -> NDArray[np.int64]:
        """The most likely class of every sample."""


def rows_per_block(numbers: int) -> int:
    """How many samples are worked on at a time, each of which takes so many numbers.

    >>> rows_per_block(2410), rows_per_block(10**9)
    (1740, 1)
    """
    return max(1, BLOCK_NUMBERS // max(1, numbers))


def blocks(
    form: Form, params: Params, x: Floats, y: NDArray[Any], own: OwnModel | None = None
) -> Iterator[Floats | Products]:
    """Per-sample gradients of the form's loss at `params`, block by block, for `grid.clipped_sum`.

    Those of dense layers are not written out. Numbers below 2⁻²⁵⁰ count as 0: products of them
    would be subnormal, and the time that takes would tell of the sample.
    """
    params = {name: flush_tiny(leaf) for name, leaf in params.items()}
    count = sum(leaf.size for leaf in params.values())
    dense = form.name in ("softmax", "mlp")
    rows = rows_per_block(sum(map(sum, form.shapes().values())) if dense else count)
    for start in range(0, len(y), rows):
        part, labels = flush_tiny(x[start : start + rows]), y[start : start + rows]
        with np.errstate(all="ignore"):
            match form.name:
                case "softmax":
                    block: Floats | Products = _softmax(params, part, labels)
                case "mlp":
                    block = _mlp(params, part, labels)
                case _:
                    block = np.empty((len(labels), count))
                    _write(block, form, params, part, labels, own)
        yield block


def written(
    form: Form, params: Params, x: Floats, y: NDArray[Any], own: OwnModel | None = None
) -> Floats:
    """All of them written out, (samples, parameters): for few samples, or a small model.

    >>> form = Form("svm", (2,), 2, kappa=0.0)
    >>> params = {"b": np.zeros(()), "w": np.zeros(2)}
    >>> written(form, params, np.array([[4.0, 2.0]]), np.array([1])).tolist()
    [[-1.0, -4.0, -2.0]]
    """
    with np.errstate(all="ignore"):
        return np.concatenate(
            [Products.of(block).write_out() for block in blocks(form, params, x, y, own)]
        )


def losses(
    form: Form, params: Params, x: Floats, y: NDArray[Any], own: OwnModel | None = None
) -> Floats:
    """F(D_m, w) of every sample.

    >>> form = Form("svm", (1,), 2, kappa=0.0)
    >>> params = {"b": np.zeros(()), "w": np.ones(1)}
    >>> losses(form, params, np.array([[2.0]]), np.array([0])).tolist()
    [3.0]
    """
    rows, parts = rows_per_block(sum(leaf.size for leaf in params.values())), []
    for start in range(0, len(y), rows):
        part, labels = x[start : start + rows], y[start : start + rows]
        with np.errstate(all="ignore"):
            match form.name:
                case "svm" | "softmax" | "mlp":
                    parts.append(losses_numpy(form.name, params, part, labels, kappa=form.kappa))
                case "cnn":
                    from sottovoce.models.custom import cnn_losses

                    parts.append(cnn_losses(form, params, part, labels))
                case _:
                    assert own is not None, "the device has refused such a request before"
                    parts.append(_own_losses(params, part, labels, own))
    return np.concatenate(parts)


def require_rows(own: OwnModel, params: Params, samples: int, features: int) -> None:
    """An error if a client's own model does not give every row its own, seen on rows of zeros.

    It is asked before anything is booked and without the client's samples, so that what it says
    cannot depend on them.
    """
    count = min(samples, rows_per_block(sum(leaf.size for leaf in params.values())))
    x, y = _read_only(np.zeros((count, features))), _read_only(np.zeros(count, np.int64))
    copies = _copied(params)  # as a release gives them
    with np.errstate(all="ignore"):
        block = np.empty((count, sum(leaf.size for leaf in params.values())))
        _fill(block, params, own.gradients(copies, x, y))
        _losses_of(own, copies, x, y)


def _own(block: Floats, params: Params, x: Floats, y: NDArray[Any], own: OwnModel) -> None:
    """The gradients of a client's own model; a sample that its code fails on has none (NaN).

    An error that only some samples cause would tell the server of them. The code is given one
    sample at a time: what it makes of a block may depend on all of it, in the last bits at least,
    and the block would be another one where a sample fails. It is given copies that nobody can
    write to: a model that works in place must not put a row into what is sent. Some code can
    (`torch.from_numpy`), so that every sample has copies of its own.
    """
    for row in range(len(y)):
        one = slice(row, row + 1)
        try:
            told = own.gradients(_copied(params), _read_only(x[one]), _read_only(y[one]))
            _fill(block[one], params, told)
        except KeyboardInterrupt:
            raise
        except BaseException:  # an exit that a sample causes would tell of it, too
            block[one] = np.nan


def _own_losses(params: Params, x: Floats, y: NDArray[Any], own: OwnModel) -> Floats:
    """The losses of a client's own model; NaN, which counts as the bound, where its code fails."""
    told = np.full(len(y), np.nan)
    for row in range(len(y)):
        one = slice(row, row + 1)
        try:
            told[one] = _losses_of(own, _copied(params), _read_only(x[one]), _read_only(y[one]))
        except KeyboardInterrupt:
            raise
        except BaseException:
            told[one] = np.nan
    return told


def _copied(params: Params) -> Params:
    return {name: _read_only(leaf) for name, leaf in params.items()}


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy over immutable bytes: unlike a flag, that cannot be taken back."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def _losses_of(own: OwnModel, params: Params, x: Floats, y: NDArray[Any]) -> Floats:
    told = np.asarray(own.losses(params, x, y), np.float64)
    if told.shape != y.shape:
        raise InputError.of("losses", told.shape, f"{y.shape}, one a sample", "mend model.own")
    return told


def _write(
    block: Floats, form: Form, params: Params, x: Floats, y: NDArray[Any], own: OwnModel | None
) -> None:
    match form.name:
        case "svm":
            _svm(block, params, x, y, form.kappa)
        case "cnn":
            from sottovoce.models.custom import cnn

            _fill(block, params, cnn(form, params, x, y))
        case _:
            assert own is not None, "the device has refused such a request before"
            _own(block, params, x, y, own)


def _svm(block: Floats, params: Params, x: Floats, y: NDArray[Any], kappa: float) -> None:
    w, b = params["w"], params["b"]
    sign = 2.0 * y - 1
    error = np.where(sign * (row_by_row(x, w[:, None])[:, 0] + b) < 1, -sign, 0.0)
    block[:, 0] = error + kappa * b
    np.multiply(error[:, None], x, out=block[:, 1:])
    block[:, 1:] += kappa * w


def _softmax(params: Params, x: Floats, y: NDArray[Any]) -> Products:
    error = softmax_error(row_by_row(x, params["w"]) + params["b"], y)
    return Products(((np.ones((len(y), 1)), error), (x, error)))


def _mlp(params: Params, x: Floats, y: NDArray[Any]) -> Products:
    hidden = np.maximum(row_by_row(x, params["w1"]) + params["b1"], 0)
    scores = row_by_row(hidden, params["w2"]) + params["b2"]
    error2 = softmax_error(scores, y)
    error1 = np.where(hidden > 0, row_by_row(error2, params["w2"].T), 0.0)
    one = np.ones((len(y), 1))
    return Products(((one, error1), (one, error2), (x, error1), (hidden, error2)))


def _fill(block: Floats, params: Params, own: Mapping[str, Any]) -> None:
    at = 0
    for name in sorted(params):
        leaf, wanted = np.asarray(own[name], np.float64), (len(block), *params[name].shape)
        if leaf.shape != wanted:  # as many numbers in another order would mix the samples
            raise InputError.of(
                f"gradient {name}", leaf.shape, f"{wanted}, a row a sample", "mend model.own"
            )
        size = math.prod(wanted[1:])
        block[:, at : at + size] = leaf.reshape(len(block), size)
        at += size
