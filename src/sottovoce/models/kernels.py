"""Steps of the cnn and the mlp as kernels for an NVIDIA GPU, in Pallas: little is written.

XLA writes the window of every tile to memory, and in float32 most of what lies between two
products. Here windows overlap in memory, and the hidden layer and its error are written once each,
in bfloat16. `models/cnn.py` has the same steps for all other devices; tests hold these kernels
against them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

CUT = 32  # slots in a program that copies them
ITEMS = 128  # tiles in a program of the convolution
SLOTS = 64  # in a step of a row's gradient
ROWS, COLUMNS = 16, 256  # in a step of the way back through the dense layer
PROGRAMS = 264  # for the rows' gradients: two for each unit of an H200
WARPS = 4
STAGES = {"cut": 1, "convolve": 2, "send_back": 3, "kernel_gradients": 3}
_describe: Any = jax.ShapeDtypeStruct
_find_limits: Any = jnp.finfo


@final
class CnnKernels:
    """The kernels for a cnn of given sizes; what is loaded and multiplied has powers of two.

    A *slot* has as many lines of a picture as a tile is high, side by side, each as wide as a
    window. The window of tile t consists of the slots t, t + across, t + 2·across, …
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        kernel: int,
        padding: int,
        tile: tuple[int, int],
        places: tuple[int, int],  # of the map
        channels: int,
        interpret: bool = False,  # on a CPU, for tests
    ) -> None:
        self.shape, self.kernel, self.padding, self.tile = shape, kernel, padding, tile
        self.channels, self.interpret = channels, interpret
        self.across = places[1] // tile[1]  # tiles side by side
        self.tiles = places[0] // tile[0] * self.across
        self.numbers = math.prod(tile) * channels  # of the map in a tile
        self.outputs = _round_up(self.numbers)  # computed for a tile
        self.lines = tile[0] + kernel - 1  # of a window
        self.line = (tile[1] + kernel - 1) * shape[2]  # numbers in a line of a window
        self.columns = _round_up(self.line + 1)  # from one line of a slot to the next
        self.width = _round_up(tile[0] * self.columns)  # numbers of a slot
        self.groups = -(-self.lines // tile[0])  # slots of a window
        self.slots = self.tiles + (self.groups - 1) * self.across  # of a picture

    def compile_all(self, classes: int) -> None:
        """Compile the kernels for a few rows, or raise what the compiler does."""
        rows, kinds = 8, (jnp.bfloat16, jnp.float32)
        band, size = (self.lines * self.line, self.numbers), self.tiles * self.numbers
        params = [_describe(shape, jnp.float32) for shape in (band, band[1:])]
        error = [_describe(shape, jnp.float32) for shape in ((rows, classes), (classes, size))]
        x = [_describe((rows, math.prod(self.shape)), kind) for kind in kinds]

        def compute(x: Array, band: Array, bias: Array, error: Array, back: Array) -> Any:
            hidden = self.convolve(self.cut(x), band, bias, finite=True)
            return self.kernel_gradients(self.cut(x), self.send_back(hidden, error, back)[0])

        jax.jit(compute).lower(x[0], *params, *error).compile()
        jax.jit(lambda x, *band: self.convolve(self.cut(x), *band)).lower(x[1], *params).compile()

    def cut(self, x: Array) -> Array:
        """Return the slots of rows, (n, slots, width), with zeros around a picture.

        A one follows the first line of a slot: errors times it are the gradient by the bias.
        """
        n, (a, b), (high, wide, colours) = len(x), self.tile, self.shape

        def compute(x_ref: Any, out_ref: Any) -> None:
            item, number = pl.program_id(0) * CUT + jnp.arange(CUT), jnp.arange(self.width)
            row, slot = item // self.slots, item % self.slots
            i, j = number // self.columns, number % self.columns
            line = (slot // self.across * a - self.padding)[:, None] + i[None, :]
            column = ((slot % self.across * b - self.padding) * colours)[:, None] + j[None, :]
            is_inside = (line >= 0) & (line < high) & (column >= 0) & (column < wide * colours)
            is_inside &= (item < n * self.slots)[:, None] & ((j < self.line) & (i < a))[None, :]
            where = (row[:, None] * high + line) * (wide * colours) + column
            found = triton.load(x_ref.at[where], mask=is_inside, other=0)
            found = jnp.where((number == self.line)[None, :], jnp.ones_like(found), found)
            where = item[:, None] * self.width + number[None, :]
            triton.store(out_ref.at[where], found, mask=(item < n * self.slots)[:, None])

        out = (_describe((n * self.slots * self.width,), x.dtype),)
        call = self._compile("cut", compute, -(-n * self.slots // CUT), out)
        found: Array = call(x.reshape(-1))[0]
        return found.reshape(n, self.slots, self.width)

    def convolve(self, slots: Array, band: Array, bias: Array, *, finite: bool = False) -> Array:
        """Return the hidden layer, (n, tiles, numbers), in the type of the pictures.

        With `finite` it has the largest number for what is not finite, as in `base.relu_finite`.
        """
        n, kind, high = slots.shape[0], slots.dtype, self.tile[0]
        band = band.reshape(self.lines, self.line, self.numbers).astype(kind)
        beyond = (0, self.outputs - self.numbers)
        below = (0, self.groups * high - self.lines)
        band = jnp.pad(band, [below, (0, self.columns - self.line), beyond])
        band = band.reshape(self.groups, high * self.columns, self.outputs)
        band = jnp.pad(band, [(0, 0), (0, self.width - high * self.columns), (0, 0)])
        most = float(_find_limits(kind).max)

        def compute(slots_ref: Any, band_ref: Any, bias_ref: Any, out_ref: Any) -> None:
            item, number = pl.program_id(0) * ITEMS + jnp.arange(ITEMS), jnp.arange(self.outputs)
            is_there, column = item < n * self.tiles, jnp.arange(self.width)
            first = item // self.tiles * self.slots + item % self.tiles

            def step(i: Array, total: Array) -> Array:
                where = (first + i * self.across)[:, None] * self.width + column[None, :]
                part = triton.load(slots_ref.at[where], mask=is_there[:, None], other=0)
                product: Array = triton.dot(part, band_ref[i], allow_tf32=True)
                return total + product

            zero = jnp.zeros((ITEMS, self.outputs), jnp.float32)
            total = jax.lax.fori_loop(0, self.groups, step, zero) + bias_ref[...][None, :]
            if finite:
                total = jnp.where(total < most, total, most)
            hidden = jnp.where(total <= 0, 0.0, total).astype(kind)
            where = item[:, None] * self.numbers + number[None, :]
            mask = is_there[:, None] & (number < self.numbers)[None, :]
            triton.store(out_ref.at[where], hidden, mask=mask)

        size = n * self.tiles * self.numbers
        programs, out = -(-n * self.tiles // ITEMS), (_describe((size,), kind),)
        call = self._compile("convolve", compute, programs, out)
        found: Array = call(slots.reshape(-1), band, jnp.pad(bias, beyond))[0]
        return found.reshape(n, self.tiles, self.numbers)

    def send_back(self, hidden: Array, error: Array, back: Array) -> tuple[Array, Array]:
        """Return the error of the hidden layer in its type, (n, tiles, numbers), and ‖h‖²."""
        n, classes = error.shape
        size, labels = self.tiles * self.numbers, _round_up(classes)

        def compute(*refs: Any) -> None:
            hidden_ref, error_ref, back_ref, out_ref, norm_ref = refs
            row, label = pl.program_id(0) * ROWS + jnp.arange(ROWS), jnp.arange(labels)
            is_row, is_label = row < n, label < classes
            where = row[:, None] * classes + label[None, :]
            mask = is_row[:, None] & is_label[None, :]
            errors = triton.load(error_ref.at[where], mask=mask, other=0.0)

            def step(k: Array, squared: Array) -> Array:
                column = k * COLUMNS + jnp.arange(COLUMNS)
                is_column = column < size
                where = label[:, None] * size + column[None, :]
                mask = is_label[:, None] & is_column[None, :]
                weights = triton.load(back_ref.at[where], mask=mask, other=0.0)
                where = row[:, None] * size + column[None, :]
                mask = is_row[:, None] & is_column[None, :]
                part = triton.load(hidden_ref.at[where], mask=mask, other=0)
                sent = jnp.where(part > 0, triton.dot(errors, weights, allow_tf32=True), 0.0)
                triton.store(out_ref.at[where], sent.astype(hidden.dtype), mask=mask)
                part = part.astype(jnp.float32)
                return squared + jnp.sum(part * part, axis=1)

            zero = jnp.zeros(ROWS, jnp.float32)
            squared = jax.lax.fori_loop(0, -(-size // COLUMNS), step, zero)
            triton.store(norm_ref.at[row], squared, mask=is_row)

        out = _describe((n * size,), hidden.dtype), _describe((n,), "float32")
        call = self._compile("send_back", compute, -(-n // ROWS), out)
        sent, squared = call(hidden.reshape(-1), error.reshape(-1), back.reshape(-1))
        return sent.reshape(hidden.shape), squared

    def kernel_gradients(self, slots: Array, error: Array) -> tuple[Array, Array]:
        """Return each row's gradient by the kernel, (n, channels, 5, 5, colours), and by the bias.

        A program adds up a row's gradient by the band, puts it into memory of its own, and folds it
        from there: a number of the kernel is found at the shift of every place of a tile.
        """
        n, (a, b), colours = slots.shape[0], self.tile, self.shape[2]
        programs, size = min(n, PROGRAMS), self.kernel**2 * colours
        page = self.outputs * self.width  # of a slot of the window
        wait: Any = (lambda: None) if self.interpret else triton.debug_barrier

        def compute(slots_ref: Any, error_ref: Any, out_ref: Any, sums_ref: Any) -> None:
            program, number = pl.program_id(0), jnp.arange(self.outputs)
            of_program, column = program * (self.groups * page), jnp.arange(self.width)

            def step(row: Array, k: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
                slot = k * SLOTS + jnp.arange(SLOTS)
                where = (row * self.slots + slot)[:, None] * self.width + column[None, :]
                part = triton.load(slots_ref.at[where], mask=(slot < self.slots)[:, None], other=0)
                found = []
                for i, total in enumerate(totals):
                    tile = slot - i * self.across  # whose window has this slot
                    is_there = (tile >= 0) & (tile < self.tiles)
                    mask = is_there[:, None] & (number < self.numbers)[None, :]
                    where = (row * self.tiles + tile)[:, None] * self.numbers + number[None, :]
                    errors = triton.load(error_ref.at[where], mask=mask, other=0)
                    found.append(total + triton.dot(errors, part, trans_a=True))
                return tuple(found)

            def compute_row(k: Array, _: Any) -> None:
                row = program + k * programs
                zero = (jnp.zeros((self.outputs, self.width), jnp.float32),) * self.groups
                totals = jax.lax.fori_loop(0, -(-self.slots // SLOTS), partial(step, row), zero)
                where = number[:, None] * self.width + column[None, :]
                for i, total in enumerate(totals):
                    triton.store(sums_ref.at[of_program + i * page + where], total)
                wait()  # the threads of a program read each other's numbers
                fold(row)
                wait()

            def fold(row: Array) -> None:
                channel = jnp.arange(1 << (self.channels - 1).bit_length())[:, None]
                at = jnp.arange(_round_up(size + 1))[None, :]
                is_there = (channel < self.channels) & (at <= size)
                total = jnp.zeros(is_there.shape, jnp.float32)
                for shift in range(a * b):
                    # The bias's gradient is the last number: the errors times the ones.
                    line = jnp.where(at < size, at // (self.kernel * colours) + shift // b, 0)
                    column = at % (self.kernel * colours) + shift % b * colours
                    column = jnp.where(at < size, column, self.line)
                    where = (shift * self.channels + channel) * self.width + column
                    where += line // a * page + line % a * self.columns
                    total += triton.load(sums_ref.at[of_program + where], mask=is_there, other=0.0)
                where = (row * self.channels + channel) * (size + 1) + at
                triton.store(out_ref.at[where], total, mask=is_there)

            jax.lax.fori_loop(0, (n - program + programs - 1) // programs, compute_row, None)

        lengths = n * self.channels * (size + 1), programs * self.groups * page
        out = tuple(_describe((length,), jnp.float32) for length in lengths)
        call = self._compile("kernel_gradients", compute, programs, out)
        found = call(slots.reshape(-1), error.reshape(-1))[0].reshape(n, self.channels, size + 1)
        shape = (n, self.channels, self.kernel, self.kernel, colours)
        return found[..., :-1].reshape(shape), found[..., -1]

    def _compile(self, name: str, compute: Any, programs: int, out: Any) -> Any:
        return pl.pallas_call(
            compute,
            grid=(programs,),
            out_shape=out,
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES[name]),
            interpret=self.interpret,
            name=name,
        )


CLIPPED_NUMBERS = 4096  # of a hidden layer in a step of the mlp's errors
CLIPPED_PROGRAMS = 528  # for all runs of a batch
CLIPPED_STAGES = 1
MOST_UNITS, MOST_CLASSES = 512, 64  # whose numbers fit into registers, for 16 rows


@final
@dataclass(frozen=True)
class MlpKernel:
    """The mlp between its two large products: scores, errors, norms, and the second layer's sums.

    XLA reads and writes the hidden layer and its error several times there. Here it is read once,
    and the clipped error is written once, both in bfloat16; products have operands of bfloat16,
    two for a number of float32.
    """

    interpret: bool = False  # on a CPU, for tests

    def clip_errors(
        self, before: Array, params: Any, clip: Array, squared: Array, y: Array, weight: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Return the clipped errors of the hidden layer, and the sums but w1's.

        `before` is x·w1, [rows, runs, hidden]; `squared` and `y` are [rows], of all runs; the
        parameters, `clip` and `weight` [runs, rows] are those of each run. A row of weight 0 adds
        nothing, nor does one whose norm is not finite, as in `Mlp.sum_plainly`.
        """
        (n, runs, hidden), classes = before.shape, params["b2"].shape[1]
        if hidden > MOST_UNITS or classes > MOST_CLASSES:
            raise ValueError("a kernel cannot hold so wide a layer")
        units, labels = _round_up(hidden), _round_up(classes)
        size = max(16, CLIPPED_NUMBERS // units)
        blocks = -(-n // size)
        programs = max(1, min(blocks, CLIPPED_PROGRAMS // runs))
        most = float(_find_limits(jnp.bfloat16).max)
        least = float(_find_limits("float32").tiny) ** 0.5

        def compute(*refs: Any) -> None:
            before_ref, b1_ref, b2_ref, w2_ref, clip_ref, squared_ref, y_ref, weight_ref = refs[:8]
            program, run = pl.program_id(0), pl.program_id(1)
            unit, label = jnp.arange(units), jnp.arange(labels)
            is_unit, is_label = unit < hidden, label < classes
            b1 = triton.load(b1_ref.at[run * hidden + unit], mask=is_unit, other=0.0)
            b2 = triton.load(b2_ref.at[run * classes + label], mask=is_label, other=0.0)
            bound = clip_ref[run]

            def load_weights(unit: Array, label: Array) -> tuple[Array, Array]:
                mask = (unit < hidden) & (label < classes)
                where = (run * hidden + unit) * classes + label
                return _split_numbers(triton.load(w2_ref.at[where], mask=mask, other=0.0))

            w2 = load_weights(unit[:, None], label[None, :])
            back = load_weights(unit[None, :], label[:, None])

            def step(k: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
                row = (program + k * programs) * size + jnp.arange(size)
                is_row = row < n
                where = (row[:, None] * runs + run) * hidden + unit[None, :]
                mask = is_row[:, None] & is_unit[None, :]
                found = triton.load(before_ref.at[where], mask=mask, other=0)
                found = found.astype(jnp.float32) + b1[None, :]
                found = jnp.where(found <= 0, 0.0, jnp.where(found < most, found, most))
                rounded = found.astype(jnp.bfloat16)
                h = rounded.astype(jnp.float32)
                scores = triton.dot(rounded, w2[0]) + triton.dot(rounded, w2[1]) + b2[None, :]
                scores = jnp.where(is_label[None, :], scores, -jnp.inf)
                powers = jnp.exp(scores - jnp.max(scores, axis=1)[:, None])
                true = triton.load(y_ref.at[row], mask=is_row, other=0)
                is_true = label[None, :] == true[:, None]
                others = jnp.where(is_true, 0.0, powers / jnp.sum(powers, axis=1)[:, None])
                others = jnp.where(others < least, 0.0, others)  # as in `base.drop_tiny`
                error2 = jnp.where(is_true, -jnp.sum(others, axis=1)[:, None], others)
                high, low = _split_numbers(error2)
                sent = triton.dot(high, back[0]) + triton.dot(high, back[1])
                sent += triton.dot(low, back[0])
                error1 = jnp.where((h > 0) & ~(jnp.abs(sent) < least), sent, 0.0)
                norms = jnp.sum(error1 * error1, axis=1)
                norms *= triton.load(squared_ref.at[row], mask=is_row, other=0.0)
                norms += jnp.sum(error2 * error2, axis=1) * (jnp.sum(h * h, axis=1) + 1)
                norm = jnp.sqrt(norms)
                factor = triton.load(weight_ref.at[run * n + row], mask=is_row, other=0.0)
                factor *= jnp.where(norm > bound, bound / norm, 1.0)
                factor = jnp.where(norms < jnp.inf, factor, 0.0)[:, None]  # 0 where it is NaN
                error1 = jnp.where(factor != 0, error1 * factor, 0.0)
                error2 = jnp.where(factor != 0, error2 * factor, 0.0)
                triton.store(refs[8].at[where], error1.astype(jnp.bfloat16), mask=mask)
                second = triton.dot(rounded, error2.astype(jnp.bfloat16), trans_a=True)
                first, last = jnp.sum(error1, axis=0), jnp.sum(error2, axis=0)
                return sums[0] + second, sums[1] + first, sums[2] + last

            steps = (blocks - program + programs - 1) // programs
            shapes = (units, labels), (units,), (labels,)
            zero = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
            second, first, last = jax.lax.fori_loop(0, steps, step, zero)
            here = run * programs + program
            where = (here * hidden + unit[:, None]) * classes + label[None, :]
            triton.store(refs[9].at[where], second, mask=is_unit[:, None] & is_label[None, :])
            triton.store(refs[10].at[here * hidden + unit], first, mask=is_unit)
            triton.store(refs[11].at[here * classes + label], last, mask=is_label)

        lengths = [runs * programs * length for length in (hidden * classes, hidden, classes)]
        sums = [_describe((length,), jnp.float32) for length in lengths]
        call = pl.pallas_call(
            compute,
            grid=(programs, runs),
            out_shape=(_describe((before.size,), jnp.bfloat16), *sums),
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=CLIPPED_STAGES),
            interpret=self.interpret,
            name="clip_errors",
        )
        given = before, params["b1"], params["b2"], params["w2"], clip, squared, y, weight
        error, *sums = call(*(array.reshape(-1) for array in given))
        w2, b1, b2 = (jnp.sum(part.reshape(runs, programs, -1), axis=1) for part in sums)
        return error.reshape(before.shape), {"b1": b1, "b2": b2, "w2": w2.reshape(runs, hidden, -1)}


def _split_numbers(values: Array) -> tuple[Array, Array]:
    """Return two numbers of bfloat16 that add up to 16 bits of one of float32."""
    high = values.astype(jnp.bfloat16)
    return high, (values - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _round_up(size: int) -> int:
    """Return the next power of two, at least the 16 of the smallest product."""
    return max(16, 1 << (size - 1).bit_length())
