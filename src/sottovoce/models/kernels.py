"""The cnn's steps as kernels for an NVIDIA GPU, in Pallas: no window of a picture is written.

XLA writes the window of every tile to memory, and in float32 most of what lies between two
products. Here a kernel reads the windows of its tiles from the padded pictures, and the hidden
layer and its error are written once each, in bfloat16. `models/cnn.py` has the same steps for all
other devices; tests hold these kernels against them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

ITEMS = 256  # tiles in a program of the convolution
TILES = 64  # in a step of a row's gradient
ROWS, COLUMNS = 16, 256  # in a step of the way back through the dense layer
PROGRAMS = 528  # for the rows' gradients: four for each unit of an H200
WARPS = {"convolve": 8, "send_back": 8, "kernel_gradients": 4}
STAGES = 2
_describe: Any = jax.ShapeDtypeStruct
_find_limits: Any = jnp.finfo


@final
@dataclass(frozen=True)
class CnnKernels:
    """The kernels for a cnn of given sizes; what is loaded and multiplied has powers of two."""

    shape: tuple[int, int, int]  # of a picture
    kernel: int
    padding: int
    tile: tuple[int, int]
    places: tuple[int, int]  # of the map
    channels: int
    interpret: bool = False  # on a CPU, for tests

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return self.places[1] // self.tile[1]

    @property
    def tiles(self) -> int:
        """Tiles of a map."""
        return self.places[0] // self.tile[0] * self.across

    @property
    def numbers(self) -> int:
        """Numbers of the map in a tile."""
        return math.prod(self.tile) * self.channels

    @property
    def lines(self) -> int:
        """Lines of a window."""
        return self.tile[0] + self.kernel - 1

    @property
    def line(self) -> int:
        """Numbers in a line of a window."""
        return (self.tile[1] + self.kernel - 1) * self.shape[2]

    @property
    def columns(self) -> int:
        """Numbers loaded for a line: at least one follows it."""
        return _round_up(self.line + 1)

    @property
    def outputs(self) -> int:
        """Numbers computed for a tile."""
        return _round_up(self.numbers)

    @property
    def pitch(self) -> int:
        """Numbers from one line of a padded picture to the next: it has a whole last window."""
        last = (self.across - 1) * self.tile[1] * self.shape[2]
        return -(-(last + self.columns) // 8) * 8  # 16 bytes, which are loaded at once

    def compile_all(self, classes: int) -> None:
        """Compile the kernels for a few rows, or raise what the compiler does."""
        rows, kinds = 8, (jnp.bfloat16, jnp.float32)
        band, size = (self.lines * self.line, self.numbers), self.tiles * self.numbers
        params = [_describe(shape, jnp.float32) for shape in (band, band[1:])]
        error = [_describe(shape, jnp.float32) for shape in ((rows, classes), (classes, size))]
        x = [_describe((rows, math.prod(self.shape)), kind) for kind in kinds]

        def compute(x: Array, band: Array, bias: Array, error: Array, back: Array) -> Any:
            hidden = self.convolve(self.pad(x), band, bias, finite=True)
            return self.kernel_gradients(self.pad(x), self.send_back(hidden, error, back)[0])

        jax.jit(compute).lower(x[0], *params, *error).compile()
        jax.jit(lambda x, *band: self.convolve(self.pad(x), *band)).lower(x[1], *params).compile()

    def pad(self, x: Array) -> Array:
        """Return the pictures of rows with zeros around them, (n, lines, pitch)."""
        high, wide, colours = self.shape
        left = self.padding * colours
        around = [(0, 0), (self.padding,) * 2, (left, self.pitch - left - wide * colours)]
        return jnp.pad(x.reshape(-1, high, wide * colours), around)

    def convolve(self, padded: Array, band: Array, bias: Array, *, finite: bool = False) -> Array:
        """Return the hidden layer, (n, tiles, numbers), in the type of the pictures.

        With `finite` it has the largest number for what is not finite, as in `base.relu_finite`.
        """
        n, kind = padded.shape[0], padded.dtype
        band = band.reshape(self.lines, self.line, self.numbers).astype(kind)
        beyond = (0, self.outputs - self.numbers)
        band = jnp.pad(band, [(0, 0), (0, self.columns - self.line), beyond])
        most = float(_find_limits(kind).max)

        def compute(x_ref: Any, band_ref: Any, bias_ref: Any, out_ref: Any) -> None:
            item, number = pl.program_id(0) * ITEMS + jnp.arange(ITEMS), jnp.arange(self.outputs)
            is_there, row = item < n * self.tiles, item // self.tiles

            def step(i: Array, total: Array) -> Array:
                windows = self._load_line(x_ref, row, item % self.tiles, i, is_there)
                product: Array = triton.dot(windows, band_ref[i], allow_tf32=True)
                return total + product

            zero = jnp.zeros((ITEMS, self.outputs), jnp.float32)
            total = jax.lax.fori_loop(0, self.lines, step, zero) + bias_ref[...][None, :]
            if finite:
                total = jnp.where(total < most, total, most)
            hidden = jnp.where(total <= 0, 0.0, total).astype(kind)
            where = item[:, None] * self.numbers + number[None, :]
            mask = is_there[:, None] & (number < self.numbers)[None, :]
            triton.store(out_ref.at[where], hidden, mask=mask)

        size = n * self.tiles * self.numbers
        programs, out = -(-n * self.tiles // ITEMS), (_describe((size,), kind),)
        call = self._compile("convolve", compute, programs, out)
        found: Array = call(padded.reshape(-1), band, jnp.pad(bias, beyond))[0]
        return found.reshape(n, self.tiles, self.numbers)

    def send_back(self, hidden: Array, error: Array, back: Array) -> tuple[Array, Array]:
        """Return the error of the hidden layer in its type, (n, tiles, numbers), and ‖h‖²."""
        n, classes = error.shape
        size, labels = self.tiles * self.numbers, _round_up(classes)

        def compute(
            hidden_ref: Any, error_ref: Any, back_ref: Any, out_ref: Any, norm_ref: Any
        ) -> None:
            row, label = pl.program_id(0) * ROWS + jnp.arange(ROWS), jnp.arange(labels)
            is_row, is_label = row < n, label < classes
            errors = triton.load(
                error_ref.at[row[:, None] * classes + label[None, :]],
                mask=is_row[:, None] & is_label[None, :],
                other=0.0,
            )

            def step(k: Array, squared: Array) -> Array:
                column = k * COLUMNS + jnp.arange(COLUMNS)
                is_column = column < size
                weights = triton.load(
                    back_ref.at[label[:, None] * size + column[None, :]],
                    mask=is_label[:, None] & is_column[None, :],
                    other=0.0,
                )
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

    def kernel_gradients(self, padded: Array, error: Array) -> tuple[Array, Array]:
        """Return each row's gradient by the kernel, (n, channels, 5, 5, colours), and by the bias.

        A program adds up a row's gradient by the band, puts it into memory of its own, and folds it
        from there: a number of the kernel is found at the shift of every place of a tile.
        """
        n, (a, b), colours = padded.shape[0], self.tile, self.shape[2]
        programs, size = min(n, PROGRAMS), self.kernel**2 * colours
        page = self.outputs * self.columns

        def compute(x_ref: Any, error_ref: Any, out_ref: Any, sums_ref: Any) -> None:
            program, number = pl.program_id(0), jnp.arange(self.outputs)
            of_program = program * (self.lines * page)
            place = number[:, None] * self.columns + jnp.arange(self.columns)[None, :]

            def step(row: Array, t: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
                tile = t * TILES + jnp.arange(TILES)
                is_there = tile < self.tiles
                where = (row * self.tiles + tile)[:, None] * self.numbers + number[None, :]
                mask = is_there[:, None] & (number < self.numbers)[None, :]
                errors = triton.load(error_ref.at[where], mask=mask, other=0)
                found = []
                for i, total in enumerate(totals):
                    windows = self._load_line(x_ref, row, tile, i, is_there, one=i == 0)
                    found.append(total + triton.dot(errors, windows, trans_a=True))
                return tuple(found)

            def compute_row(k: Array, _: Any) -> None:
                row = program + k * programs
                zero = jnp.zeros((self.outputs, self.columns), jnp.float32)
                totals = jax.lax.fori_loop(
                    0,
                    -(-self.tiles // TILES),
                    lambda t, totals: step(row, t, totals),
                    (zero,) * self.lines,
                )
                for i, total in enumerate(totals):
                    triton.store(sums_ref.at[of_program + i * page + place], total)
                self._wait()
                fold(row)
                self._wait()

            def fold(row: Array) -> None:
                channel = jnp.arange(1 << (self.channels - 1).bit_length())[:, None]
                at = jnp.arange(_round_up(size + 1))[None, :]
                is_there = (channel < self.channels) & (at <= size)
                total = jnp.zeros(is_there.shape, jnp.float32)
                for shift in range(a * b):
                    # The bias's gradient is the last number: the errors times the column of ones.
                    line = jnp.where(at < size, at // (self.kernel * colours) + shift // b, 0)
                    column = at % (self.kernel * colours) + shift % b * colours
                    column = jnp.where(at < size, column, self.line)
                    where = (shift * self.channels + channel) * self.columns + line * page + column
                    total += triton.load(sums_ref.at[of_program + where], mask=is_there, other=0.0)
                where = (row * self.channels + channel) * (size + 1) + at
                triton.store(out_ref.at[where], total, mask=is_there)

            jax.lax.fori_loop(0, (n - program + programs - 1) // programs, compute_row, None)

        lengths = n * self.channels * (size + 1), programs * self.lines * page
        out = tuple(_describe((length,), jnp.float32) for length in lengths)
        call = self._compile("kernel_gradients", compute, programs, out)
        found = call(padded.reshape(-1), error.reshape(-1))[0].reshape(n, self.channels, size + 1)
        shape = (n, self.channels, self.kernel, self.kernel, colours)
        return found[..., :-1].reshape(shape), found[..., -1]

    def _load_line(
        self, x_ref: Any, row: Array, tile: Array, i: Any, is_there: Array, one: bool = False
    ) -> Array:
        """Return line i of windows, [tiles, columns], and a one after it if asked.

        What else follows a line is not used: the band is 0 there, and no sum of it is read.
        """
        (a, b), column = self.tile, jnp.arange(self.columns)[None, :]
        high = self.shape[0] + 2 * self.padding
        line = row * high + tile // self.across * a + i
        where = line * self.pitch + tile % self.across * (b * self.shape[2])
        found = triton.load(x_ref.at[where[:, None] + column], mask=is_there[:, None], other=0)
        return jnp.where(column == self.line, jnp.ones_like(found), found) if one else found

    def _wait(self) -> None:
        """Wait until all threads of the program have written: they read each other's numbers."""
        if not self.interpret:
            triton.debug_barrier()

    def _compile(self, name: str, compute: Any, programs: int, out: Any) -> Any:
        return pl.pallas_call(
            compute,
            grid=(programs,),
            out_shape=out,
            compiler_params=triton.CompilerParams(num_warps=WARPS[name], num_stages=STAGES),
            interpret=self.interpret,
            name=name,
        )


def _round_up(size: int) -> int:
    """Return the next power of two, at least the 16 of the smallest product."""
    return max(16, 1 << (size - 1).bit_length())
