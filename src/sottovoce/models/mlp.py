"""The mlp: one hidden layer of ReLU units and softmax, in JAX and in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np

from sottovoce.models import base, softmax
from sottovoce.models.base import Array, Arrays, Floats, Inspected, Params, Shapes, jax, jnp
from sottovoce.privacy.grid import Products

if TYPE_CHECKING:
    from sottovoce.models import kernels

PARTS = 8  # of the rows, where an accelerator sums over them for one run alone
FEW_ROWS = 4096  # with fewer, a kernel of our own is not worth its compilation
MOST_NUMBERS = 2**31  # of the hidden layers of all runs, which a kernel can address


@final
@dataclass(frozen=True)
class Mlp(base.NamedModel):
    """One hidden layer of ReLU units, then softmax."""

    features: int
    hidden: int
    classes: int
    number_loss: str | None = None  # where it predicts a number, with one output

    name = "mlp"
    options = (base.Option("hidden", 256, "256 is the paper's"),)
    needs_jax = False
    keeps_factors = True
    cleans_rows = True
    uses_bfloat16 = True
    predicts_numbers = True

    def shapes(self) -> Shapes:
        f, h, c = self.features, self.hidden, self.classes
        return {"b1": (h,), "b2": (c,), "w1": (f, h), "w2": (h, c)}

    # In JAX

    def init(self, key: Array) -> Params:
        first, second = jax.random.split(key)
        w1, b1 = base.draw_layer(first, (self.features, self.hidden), self.features)
        w2, b2 = base.draw_layer(second, (self.hidden, self.classes), self.hidden)
        return {"w1": w1, "b1": b1, "w2": w2, "b2": b2}

    def apply(self, params: Params, x: Array) -> Array:
        hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
        scores: Array = hidden @ params["w2"] + params["b2"]
        return scores

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        return softmax.compute_loss(self.apply(params, x), y, self.number_loss)

    def numbers_per_row(self) -> int:
        return self.features + 2 * self.hidden

    def numbers_per_evaluated_row(self) -> int:
        return self.features + self.hidden

    def sum_chunk(
        self, prepared: Params, clip: Array, rows: Inspected, y: Array, weight: Array
    ) -> Params:
        kernel = load_kernel(self) if len(y) >= FEW_ROWS else None
        if kernel is None or rows.x.dtype != jnp.bfloat16:
            return self.sum_plainly(prepared, clip, rows, y, weight)
        return compile_sum(self, kernel)(prepared, clip, rows, y, weight)

    def sum_plainly(
        self, params: Params, clip: Array, rows: Inspected, y: Array, weight: Array
    ) -> Params:
        """Return what `sum_chunk` does, on any device."""
        x, is_clean, squared = rows
        hidden = base.relu_finite(multiply(x, params["w1"]) + params["b1"], params["w1"].dtype)
        error2 = softmax.score_errors(hidden @ params["w2"] + params["b2"], y, self.number_loss)
        error1 = jnp.where(hidden > 0, base.drop_tiny(error2 @ params["w2"].T), 0)
        norms = base.squared_norms(error1) * squared + base.squared_norms(error2) * (
            base.squared_norms(hidden) + 1
        )
        factor = base.clip_factors(norms, is_clean, weight, clip)
        error1, error2 = base.scale_counted(error1, factor), base.scale_counted(error2, factor)
        return {
            "w1": compile_row_sum()(x, error1),
            "b1": jnp.sum(error1, axis=0),
            "w2": hidden.T @ error2,
            "b2": jnp.sum(error2, axis=0),
        }

    # In numpy, as a device computes it

    def losses(self, params: Arrays, x: Floats, y: Any) -> Floats:
        return softmax.compute_loss_numpy(self._forward(params, x)[1], y, self.number_loss)

    def gradient_block(self, params: Arrays, x: Floats, y: Any) -> Products:
        hidden, scores = self._forward(params, x)
        error2 = softmax.score_errors_numpy(scores, y, self.number_loss)
        error1 = np.where(hidden > 0, base.multiply_rows(error2, params["w2"].T), 0.0)
        ones = np.ones((len(y), 1))
        return Products(((ones, error1), (ones, error2), (x, error1), (hidden, error2)))

    def _forward(self, params: Arrays, x: Floats) -> tuple[Floats, Floats]:
        hidden = np.maximum(base.multiply_rows(x, params["w1"]) + params["b1"], 0)
        return hidden, base.multiply_rows(hidden, params["w2"]) + params["b2"]


def multiply(left: Array, right: Array) -> Array:
    """Return left @ right in the type of `left`, added up in that of `right`."""
    return jnp.matmul(left, right.astype(left.dtype), preferred_element_type=right.dtype)


@cache
def compile_row_sum() -> Any:
    """Return the function (x, error) ↦ xᵀ·error, the sum of the rows' outer products.

    For one run the product is small and its sum long: an accelerator has too few pieces of the
    result to keep all its units busy, so it sums parts of the rows side by side. Several runs side
    by side (under vmap) keep it busy by themselves.
    """

    @jax.custom_batching.custom_vmap
    def sum_rows(x: Array, error: Array) -> Array:
        rows = x.shape[0]
        if jax.default_backend() == "cpu" or rows % PARTS or rows < 1024 * PARTS:
            return multiply(x.T, error)
        parts, errors = (a.reshape(PARTS, rows // PARTS, -1) for a in (x, error.astype(x.dtype)))
        sums = jnp.einsum("pnf,pnh->pfh", parts, errors, preferred_element_type=error.dtype)
        return jnp.sum(sums, axis=0)

    @sum_rows.def_vmap
    def sum_rows_of_runs(_: int, batched: list[bool], x: Array, error: Array) -> tuple[Array, bool]:
        axes = tuple(0 if is_batched else None for is_batched in batched)
        return jax.vmap(lambda x, error: multiply(x.T, error), in_axes=axes)(x, error), True

    return sum_rows


@cache
def load_kernel(model: Mlp) -> kernels.MlpKernel | None:
    """Return the kernel for this model, or None: not on an NVIDIA GPU, or it does not compile."""
    if jax.default_backend() != "gpu" or model.number_loss is not None:
        return None
    try:
        from sottovoce.models.kernels import MlpKernel

        kernel, of = MlpKernel(), cast(Any, jax.ShapeDtypeStruct)
        params = {name: of(shape, "float32") for name, shape in model.shapes().items()}
        row_numbers, y, n = of((64,), "float32"), of((64,), "int32"), (64, model.features)
        rows = Inspected(of(n, "bfloat16"), of((64,), "bool"), row_numbers)
        arguments = params, of((), "float32"), rows, y, row_numbers
        jax.jit(compile_sum(model, kernel)).lower(*arguments).compile()
    except Exception:  # whatever is missing, the other steps do the same
        return None
    return kernel


@cache
def compile_sum(model: Mlp, kernel: kernels.MlpKernel) -> Any:
    """Return `Mlp.sum_plainly` with a kernel between the two large products.

    Runs on the same rows share them: their hidden layers lie side by side in each row, so that both
    products are single ones. Runs on rows of their own take the plain steps.
    """

    def sum_runs(params: Params, clip: Array, rows: Inspected, y: Array, weight: Array) -> Params:
        x, w1 = rows.x, params["w1"]
        n, runs = len(y), len(w1)
        before = jnp.einsum("nf,rfh->nrh", x, w1.astype(x.dtype), preferred_element_type=x.dtype)
        weight = jnp.where(rows.is_clean, weight, 0)
        error, sums = kernel.clip_errors(before, params, clip, rows.squared, y, weight)
        parts = max(1, PARTS // runs) if n % PARTS == 0 else 1
        error = error.astype(x.dtype).reshape(parts, n // parts, runs, -1)
        pieces = x.reshape(parts, n // parts, -1), error
        first = jnp.einsum("pnf,pnrh->pfrh", *pieces, preferred_element_type=w1.dtype)
        return sums | {"w1": jnp.moveaxis(jnp.sum(first, axis=0), 1, 0)}

    @jax.custom_batching.custom_vmap
    def sum_rows(params: Params, clip: Array, rows: Inspected, y: Array, weight: Array) -> Params:
        alone = jax.tree.map(lambda leaf: leaf[None], params)
        total = sum_runs(alone, clip[None], rows, y, weight[None])
        return jax.tree.map(lambda leaf: leaf[0], total)

    @sum_rows.def_vmap
    def sum_rows_of_runs(size: int, batched: Any, *arguments: Any) -> tuple[Params, Any]:
        params, clip, rows, y, weight = batched
        is_shared = not any(jax.tree.leaves((rows, y)))
        is_shared &= size * len(arguments[3]) * model.hidden < MOST_NUMBERS
        if is_shared and all(jax.tree.leaves((params, clip, weight))):
            total = sum_runs(*arguments)
        else:
            axes = jax.tree.map(lambda has_runs: 0 if has_runs else None, tuple(batched))
            total = jax.vmap(model.sum_plainly, in_axes=axes)(*arguments)
        return total, jax.tree.map(lambda leaf: True, total)

    return sum_rows
