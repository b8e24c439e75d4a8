"""The integer grid: norms never above 2³⁰, sums exact, whatever floating point does before it."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.errors import InputError
from sottovoce.privacy import grid
from support.mutated_module import mutated
from support.neighbours import reach, squared, work

many = settings(max_examples=150, deadline=None, derandomize=True, database=None)
CLIPS = st.floats(-15, 15).map(lambda power: 10.0**power)
ANY = st.one_of(
    st.floats(width=64),  # NaN and infinities included
    st.sampled_from([0.0, 5e-324, -5e-324, 1e-160, 1e154, -1e154, 1.4e154, 1e300, np.inf, np.nan]),
)
BLOCKS = st.integers(1, 6).flatmap(
    lambda d: st.lists(st.lists(ANY, min_size=d, max_size=d), min_size=1, max_size=5)
)


def exact(rows, clip):
    """The sum again, slowly: rational numbers, one row at a time, an integer square root."""
    total = [0] * len(rows[0])
    for row in rows:
        if not all(map(math.isfinite, row)) or not math.isfinite(sum(v * v for v in row)):
            continue
        norm2 = sum(Fraction(v) ** 2 for v in row)
        unit = Fraction(clip) / Fraction(grid._CLIP)
        for i, v in enumerate(row):
            # v / max(1, ‖row‖/C) in units, to 2⁻⁶⁴ of a unit
            size = Fraction(v) / unit
            if norm2 > Fraction(clip) ** 2:
                root = Fraction(math.isqrt(int(norm2 / Fraction(clip) ** 2 * (1 << 128))), 1 << 64)
                size /= root
            total[i] += size
    return total


@pytest.mark.slow
@many
@given(BLOCKS, CLIPS)
def test_the_sum_is_the_clipped_sum_to_one_unit_a_row(rows, clip):
    found = grid.clipped_sum([np.array(rows)], clip, len(rows[0]))
    for mine, wanted in zip(found.tolist(), exact(rows, clip), strict=True):
        # truncation takes off less than one unit a row, floating point 2⁻⁵⁰ of 2³⁰ more
        assert abs(mine - wanted) <= len(rows) * (1 + 2**-18)


@many
@given(BLOCKS, CLIPS)
def test_no_row_is_longer_than_the_norm_and_no_place_matters(rows, clip):
    block = np.array(rows)
    each = [grid.clipped_sum([block[i : i + 1].copy()], clip, block.shape[1])
            for i in range(len(block))]  # fmt: skip
    assert all(squared(one) <= grid.NORM**2 for one in each)
    total = sum(each)
    backwards = grid.clipped_sum([block[::-1].copy()], clip, block.shape[1])
    split = grid.clipped_sum([block[:1].copy(), block[1:].copy()], clip, block.shape[1])
    for other in (grid.clipped_sum([block.copy()], clip, block.shape[1]), backwards, split):
        assert other.tolist() == total.tolist()


@pytest.mark.parametrize("clip", [1e-15, 1e-3, 1.0, 1e15])
def test_a_row_at_the_norm_keeps_its_length(clip):
    """Opposite rows: the sum moves by 0.999 Δ and more, and never by more than Δ."""
    row = np.array([[clip * 0.6, -clip * 0.8, 0.0]])
    for scale in (1.0, 1e5):
        one, two = (grid.clipped_sum([sign * scale * row], clip, 3) for sign in (1, -1))
        assert 0.999999 < reach(one - two, grid.grid_sensitivity("record", 1)) <= 1


def test_the_integer_check_catches_what_floats_let_through():
    """Were the aim 2³⁰ itself, rounding would now and then end above it; the check is exact."""
    bold = mutated("sottovoce.privacy.grid", "_CLIP = (1 - 2**-40) * NORM", "_CLIP = 1.0001 * NORM")
    rng = np.random.default_rng(1)
    block = rng.standard_normal((200, 3))
    assert not bold.clipped_sum([block.copy()], 1e-3, 3).any()  # all refused, none too long
    blind = mutated("sottovoce.privacy.grid", "<= NORM**2", "<= 2**62")
    blind._CLIP = 1.0001 * grid.NORM
    one = blind.clipped_sum([block[:1].copy()], 1e-3, 3)
    assert squared(one) > grid.NORM**2


def test_values_beside_floats_largest_squares_become_nothing():
    rows = np.array([[1.4e154, 0.0], [np.inf, 0.0], [np.nan, 0.0], [0.0, -1e308]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grid.clipped_sum([rows], 1.0, 2).tolist() == [0, 0]


def factors(seed, rows=9, kinds=("normal", "large", "spoilt")):
    """Products of dense layers' sizes; some rows far beyond the clip, some not finite."""
    rng = np.random.default_rng(seed)
    sides = [rng.standard_normal((rows, size)) for size in (1, 5, 7, 5, 5, 3)]
    if "large" in kinds:
        sides[1][1], sides[2][2], sides[3][3] = 1e120, 1e-120, -1e90
    if "spoilt" in kinds:
        sides[1][4, 2], sides[2][5, 0], sides[4][6], sides[5][7] = np.nan, np.inf, 1e200, -np.inf
    return grid.Products(tuple(zip(sides[::2], sides[1::2], strict=True)))


@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("seed", range(20))
def test_products_are_what_they_are_written_out_to_one_unit_a_row(seed, clip):
    block = factors(seed)
    written = block.write_out()
    count = written.shape[1]
    one, two = (grid.clipped_sum([it], clip, count) for it in (block, written))
    assert np.abs(one - two).max() <= len(block)
    each = [grid.clipped_sum([block.take_rows(i, i + 1)], clip, count) for i in range(len(block))]
    assert all(squared(row) <= grid.NORM**2 for row in each)
    assert sum(each).tolist() == one.tolist()
    assert not any(each[i].any() for i in (4, 5, 6, 7))
    assert all(each[i].any() for i in (0, 1, 3, 8))


@pytest.mark.parametrize("numbers", [1, 9, 40, 200])
def test_it_does_not_matter_how_much_is_written_out_at_a_time(numbers, monkeypatch):
    for seed in range(10):
        whole = grid.clipped_sum([factors(seed)], 0.1, 55)
        with monkeypatch.context() as small:
            small.setattr(grid, "_SEGMENT", numbers)
            small.setattr(grid, "_ROWS", 1 + seed % 4)
            assert grid.clipped_sum([factors(seed)], 0.1, 55).tolist() == whole.tolist()


def test_too_long_a_row_goes_and_the_others_stay():
    """A check in several segments: a row that is found out in the last takes the first with it."""
    bold = mutated("sottovoce.privacy.grid", "_CLIP = (1 - 2**-40) * NORM", "_CLIP = 1.0001 * NORM")
    bold._SEGMENT = 8
    rows = np.zeros((3, 20))
    rows[0], rows[1, 0], rows[2] = 5.0, 0.5, np.linspace(-9, 9, 20)  # the middle one is not clipped
    assert bold.clipped_sum([rows], 1.0, 20).tolist() == [int(0.5 * bold._CLIP)] + 19 * [0]


@pytest.mark.slow
@many
@given(
    st.lists(
        st.lists(st.integers(-(2**31), 2**31) | st.integers(-70, 70), min_size=6, max_size=6),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([1, 2**3, 2**14, 2**20]),
)
def test_squared_lengths_are_never_understated(rows, part):
    """On either side of 2⁵³, where floating-point sums begin to round, and of 2⁶¹."""
    whole = [[value // part for value in row] for row in rows]
    for found, row in zip(
        grid._bound_squared_norms(np.array(whole, dtype=float)).tolist(), whole, strict=True
    ):
        exact = sum(v * v for v in row)
        assert min(exact, 2**61) <= found <= min(exact + (exact >> 40), 2**61)


def test_squared_lengths_are_never_understated_in_the_longest_segment():
    """Rows made to round down at every addition, as long as a segment may be."""
    for first in (2.0**26 + 1, 2.0**30 - 1, 2.0**29 + 3):
        for rest in (1.0, 3.0, 2.0**13 + 1, 2.0**20 - 1):
            row = np.full((1, grid._TERMS), rest)
            row[0, 0] = first
            exact = sum(int(v) ** 2 for v in row[0])
            assert exact <= grid._bound_squared_norms(row)[0] <= exact + (exact >> 40)


def test_what_is_no_number_is_too_long():
    rows = np.array([[np.nan, 1.0], [np.inf, 0.0], [1e200, 0.0], [3.0, 4.0], [2.0**30, 1.0]])
    with np.errstate(all="ignore"):
        *far, small, near = grid._bound_squared_norms(rows).tolist()
    assert far == [2**61] * 3
    assert small == 25
    assert 2**60 < near < 2**60 + 2**20


# One record of a data set, as a server could make its gradient with weights of its choice.
ODD_ROWS = {
    "within the clip": (1.0, 1.0), "beyond 2⁵³": (1e3, 1.0), "at the clip": (1e8, 1e8),
    "not a number": (np.nan, 1.0), "infinite": (1.0, np.inf), "squares overflow": (1e160, 1.0),
    "subnormal": (5e-324, 1.0), "subnormal product": (1e-160, 1e-160),
    "squares underflow": (1e-163, 1e153), "zero": (0.0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("clip", [1e-15, 1.0, 1e9])
@pytest.mark.parametrize("kind", ODD_ROWS)
def test_the_work_does_not_depend_on_a_record(kind, clip):
    """The same operations on arrays of the same sizes, whatever one record's gradient is."""
    rng = np.random.default_rng(0)
    sides = [rng.standard_normal((70, size)) for size in (1, 5, 7, 40)]

    def spent(one, other):
        mine = [side.copy() for side in sides]
        mine[1][3], mine[2][3], mine[3][3] = 0.0, one * mine[2][3], other * mine[3][3]
        block = grid.Products(((mine[0], mine[1]), (mine[2], mine[3])))
        with np.errstate(all="ignore"):
            written = block.write_out()
        factors = work(lambda: grid.clipped_sum([block], clip, 285))
        return factors, work(lambda: grid.clipped_sum([written], clip, 285))

    assert spent(*ODD_ROWS[kind]) == spent(1.0, 1.0)


@many
@given(BLOCKS, CLIPS, st.lists(st.floats(1e-6, 1.0), min_size=5, max_size=5))
def test_a_weight_multiplies_what_was_clipped_and_lengthens_nothing(rows, clip, weights):
    weight = np.array(weights)[: len(rows)]
    total = np.zeros(len(rows[0]), np.int64)
    for i, row in enumerate(rows):
        alone = grid.clipped_sum([np.array([row])], clip, len(row))
        scaled = grid.clipped_sum([np.array([row])], clip, len(row), weight[i : i + 1])
        assert squared(scaled) <= squared(alone) <= grid.NORM**2
        assert np.abs(scaled - weight[i] * alone).max() <= 2
        total += scaled
    blocks = [np.array(rows[:2]), np.array(rows[2:]).reshape(-1, len(rows[0]))]
    assert grid.clipped_sum(blocks, clip, len(rows[0]), weight).tolist() == total.tolist()
    assert grid.clipped_sum(blocks, clip, len(rows[0]), np.ones(len(rows))).tolist() == (
        grid.clipped_sum(blocks, clip, len(rows[0])).tolist()
    )


@pytest.mark.parametrize("clip", [1e-15, 1.0])
def test_no_subnormal_number_enters_a_product(clip, monkeypatch):
    """They take longer on many processors, so that one record's would show in the time."""
    least, real = [], np.multiply

    def multiply(one, other, **options):
        for factor in (one, other, product := real(one, other, **options)):
            least.append(np.min(np.abs(factor), where=factor != 0, initial=1.0))
        return product

    class Watched:
        def __getattr__(self, name):
            return multiply if name == "multiply" else getattr(np, name)

    monkeypatch.setattr(grid, "np", Watched())
    rng = np.random.default_rng(1)
    for size in (1e-320, 1e-160, 1e-75, 1e-60, 1e120):
        left, right = size * rng.standard_normal((3, 4)), 1e-150 * rng.standard_normal((3, 5))
        right[0] /= 1e-150
        for weights in (None, np.full(3, 1e-6)):
            grid.clipped_sum([grid.Products(((left, right),))], clip, 20, weights)
    assert min(least) >= np.finfo(float).tiny


LOSSES = st.lists(ANY, min_size=1, max_size=8)
BOUNDS = st.floats(-6, 6).map(lambda power: 10.0**power)


@many
@given(LOSSES, ANY, BOUNDS, st.integers(0, 7))
def test_a_bounded_sum_moves_by_at_most_its_sensitivity(losses, other, bound, place):
    values = np.array(losses)
    changed = values.copy()
    changed[place % len(values)] = other
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, two = grid.bounded_sum(values, bound), grid.bounded_sum(changed, bound)
    assert type(one) is int
    assert 0 <= one <= len(values) * grid.REPLACED
    assert abs(one - two) <= grid.grid_sensitivity("record", len(values))
    assert grid.bounded_sum(values[::-1].copy(), bound) == one


def test_a_bounded_sum_reaches_its_sensitivity():
    for n in (1, 9):
        low, high = np.zeros(n), np.full(n, 5.0)
        assert grid.bounded_sum(high, 2.0) - grid.bounded_sum(low, 2.0) == grid.grid_sensitivity(
            "client", n
        )
    assert grid.bounded_sum(np.array([1e308, -1e308]), 1e-6) == grid.REPLACED


def test_sums_have_room_for_as_many_samples_as_a_vault_takes():
    assert grid.MOST_SAMPLES * grid.NORM + 16 * grid.LARGEST_NOISE < 2**63
    assert grid.MOST_SAMPLES * grid.REPLACED <= 2**63  # of losses, which are summed unsigned
    for samples in (0, -1, grid.MOST_SAMPLES + 1):
        with pytest.raises(InputError, match="samples must be from 1"):
            grid.grid_sensitivity("record", samples)
    assert grid.grid_sensitivity("client", grid.MOST_SAMPLES) == 2**63
