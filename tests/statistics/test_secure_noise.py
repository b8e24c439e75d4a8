"""Noise that is safe to release: exactly the discrete Gaussian, never the same twice, no holes.

The noise is the system's; each statistical question has a false-alarm rate of 1e-9, spreads 2e-8.
`trust/test_noise.py` asks the same with up to fifty times the draws.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc

import jax
import mpmath
import numpy as np
import opendp.prelude as dp
import pytest
from scipy import stats

from sottovoce.errors import InputError
from sottovoce.privacy import secure_noise
from sottovoce.privacy.secure_noise import FINE_BITS, MARGIN, SLOTS, build_envelope, draw
from support import TESTS
from support.mutated_module import mutated
from support.noise_statistics import (
    FALSE_ALARM,
    beyond,
    fit,
    fit_of_large,
    fit_of_low_bits,
    float_draw,
    spread_is,
)
from support.support_attack import float_normals, float_possible, secure_possible

dp.enable_features("contrib")

SECURE = "sottovoce.privacy.secure_noise"
SIGMAS = [1, 2, 3, 7, 63, 64, 127, 128, 1000, 2**20 + 1, 2**33, 2**35 + 12345, 2**40 - 1, 2**52]


# --- the distribution ---------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [1, 2, 7, 50, 300])
def test_every_integer_has_its_probability(sigma):
    assert fit(draw, sigma, 2_000_000) > FALSE_ALARM


@pytest.mark.parametrize("sigma", [2**20 + 1, 2**33, 2**40 - 1, 2**52])
def test_wide_noise_has_the_shape_of_the_bell(sigma):
    assert fit_of_large(draw(1_000_000, sigma), sigma) > FALSE_ALARM


@pytest.mark.parametrize("sigma", [2**33, 2**36 + 1, 2**40])
def test_spread_is_accepted_and_two_thirds_or_three_halves_of_it_are_not(sigma):
    assert spread_is(draw(1_000_000, sigma), sigma, within=0.004)
    assert not spread_is(draw(1_000_000, sigma * 2 // 3), sigma, within=0.004)
    assert not spread_is(draw(1_000_000, sigma * 3 // 2), sigma, within=0.004)


@pytest.mark.parametrize("sigma", [50, 2**33])
def test_against_opendps_proved_sampler(sigma):
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
    theirs = np.array(dp.m.make_gaussian(*space, scale=float(sigma))([0] * 20_000))
    assert stats.ks_2samp(draw(20_000, sigma), theirs).pvalue > FALSE_ALARM
    assert stats.ks_2samp(draw(20_000, sigma * 2 // 3), theirs).pvalue < FALSE_ALARM


# --- the proof's premises, checked in whole numbers (docs/proofs.md, a) -------------------------


def bell_enclosure(staircase, value):
    """Fractions of 2⁸⁰ around S·exp(−y²/2σ²)."""
    low, high = secure_noise.exp_enclosure(int(value) ** 2, 2 * staircase.sigma**2, 80)
    return staircase.scale * low, staircase.scale * high


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("reach", [1, 8])
def test_the_staircase_encloses_the_bell(sigma, reach):
    staircase = build_envelope.__wrapped__(sigma, reach)
    width = 1 << staircase.width_bits
    bars = staircase.starts.size
    rests = np.diff(staircase.edges)
    for start, floor, rest in zip(staircase.starts, staircase.floors, rests[:bars], strict=True):
        first, last = int(start), int(start) + width - 1
        near, far = sorted((abs(first), abs(last)))
        near = 0 if first <= 0 <= last else near
        top = int(floor) + int(rest)
        assert int(floor) << 80 <= bell_enclosure(staircase, far)[0]
        assert top << 80 >= bell_enclosure(staircase, near)[1]
    # Bars and tails cover every integer once, and slots repeat each bar as often as its floor says.
    tail = staircase.tail_start
    assert np.array_equal(staircase.starts, np.arange(-tail, tail, width))
    used = staircase.slots[: staircase.sure]
    assert np.array_equal(used, np.repeat(staircase.starts, staircase.floors >> FINE_BITS))
    assert staircase.sure + -(-int(staircase.edges[-1]) >> FINE_BITS) <= SLOTS
    # A tail's blocks: the first high enough, each next at most half, weighed as 2 first blocks.
    assert staircase.tail_height << 80 >= bell_enclosure(staircase, tail)[1]
    assert (tail << staircase.tail_bits) >= sigma**2
    blocks = 2 * 2**staircase.tail_bits // width
    assert rests[bars:].tolist() == [blocks * staircase.tail_height] * 2
    assert staircase.width_bits + 16 <= 64


@pytest.mark.parametrize("sigma", SIGMAS)
def test_floating_point_is_off_by_far_less_than_the_margin(sigma):
    staircase = build_envelope(sigma)
    rng = np.random.default_rng(0)
    values = np.rint(rng.uniform(-8.1, 8.1, 500) * sigma).astype(np.int64)
    for value, found in zip(values, staircase.bell(values), strict=True):
        with mpmath.workdps(40):
            exact = staircase.scale * mpmath.exp(-(mpmath.mpf(int(value)) ** 2) / (2 * sigma**2))
            assert abs(mpmath.mpf(float(found)) / exact - 1) < 2**-44 < MARGIN / 8


@pytest.mark.parametrize("bits", [64, 128, 512])
def test_the_exponential_is_enclosed(bits):
    rng = np.random.default_rng(bits)
    for _ in range(300):
        numerator = int(rng.integers(0, 2**62)) * 2 ** int(rng.integers(0, 60))
        denominator = int(rng.integers(1, 2**62)) * 2 ** int(rng.integers(40, 60))
        low, high = secure_noise.exp_enclosure(numerator, denominator, bits)
        with mpmath.workprec(2 * bits + 200):
            exact = mpmath.ldexp(mpmath.exp(-mpmath.mpf(numerator) / denominator), bits)
            assert 0 <= low <= exact <= high
        assert high - low <= 3
    assert secure_noise.exp_enclosure(0, 1, bits) == (2**bits, 2**bits)


@pytest.mark.parametrize("sigma", [7, 1000, 2**33, 2**52])
def test_where_floating_point_is_sure_whole_numbers_agree(sigma):
    """Heights around the bell: a sure yes is one for every continuation of the bits, as is a no."""
    staircase = build_envelope(sigma)
    rng = np.random.default_rng(1)
    values = np.rint(rng.normal(size=400) * 2 * sigma).astype(np.int64)
    bell = staircase.bell(values)
    height = np.floor(bell * (1 + rng.choice([-1, 1], 400) * 2 ** rng.uniform(-46, -34, 400)))
    height = height.astype(np.int64)
    yes = height + 1 <= bell * (1 - MARGIN)
    no = height >= bell * (1 + MARGIN)
    assert yes.sum() > 50
    assert no.sum() > 50
    for i in np.flatnonzero(yes | no):
        for bit in (0, 1):
            late = [int(height[i]), 1, staircase.scale, int(values[i]) ** 2, 2 * sigma**2]
            exact = secure_noise.is_below(*late, random_bits=lambda k, bit=bit: bit * (2**k - 1))
            assert exact == yes[i]


def test_undecided_bits_are_drawn_until_they_decide():
    low, _ = secure_noise.exp_enclosure(1, 2, 192)
    asked = []

    def bits(k):  # U agrees with e^-½ for 192 bits, and then is below it
        asked.append(k)
        return low >> (192 - sum(asked)) & (2**k - 1) if sum(asked) <= 192 else 0

    assert secure_noise.is_below(0, 1, 1, 1, 2, bits)
    assert sum(asked) > 192


def coarse(module, monkeypatch, margin, reach=1):
    """The sampler with bars as wide as σ, tails from σ on, and floating point hardly ever sure."""
    monkeypatch.setattr(secure_noise, "BARS", 1)
    monkeypatch.setattr(module, "MARGIN", margin)
    monkeypatch.setattr(
        module, "build_envelope", lambda sigma: build_envelope.__wrapped__(sigma, reach)
    )
    return module.draw


@pytest.mark.parametrize("sigma", [1, 2, 11, 16])
def test_the_slow_path_draws_the_same_distribution(sigma, monkeypatch):
    slow, below = [], secure_noise.is_below
    monkeypatch.setattr(secure_noise, "is_below", lambda *a: slow.append(1) or below(*a))
    assert fit(coarse(secure_noise, monkeypatch, margin=0.9), sigma, 15_000) > FALSE_ALARM
    assert len(slow) > 3_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("is_below(int(height[i]), 1,", "True or is_below(int(height[i]), 1,"),
        ("is_below(int(height[i]), 1,", "is_below(0, int(height[i]) + 1,"),
        ("else ~value", "else -value"),
        ("staircase.scale << block", "staircase.scale"),
        ("while source.draw_bits(1):", "while source.draw_bits(2):"),
        ("values[i], accepted[i] = _propose_from_tail(", "_, accepted[i] = _propose_from_tail("),
        ("~in_bars & (bar < bars + 2)", "~in_bars & (bar < bars + 1)"),
        ("- 1\n    bars", "\n    bars"),
    ],
)
def test_a_wrong_slow_path_would_be_noticed(old, new, monkeypatch):
    wrong = mutated(SECURE, old, new)
    assert fit(coarse(wrong, monkeypatch, margin=0.9), 16, 40_000) < FALSE_ALARM


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("into[open_places] = values\n", "pass\n"),
        ("refused = refused[refused_again]", "break"),
        ("height + 1 <= bell * (1 - MARGIN)", "height + 1 > bell * (1 - MARGIN)"),
        ("+ (position - staircase.edges[bar_or_last])", ""),
    ],
)
def test_a_wrong_fast_path_would_be_noticed(old, new, monkeypatch):
    wrong = mutated(SECURE, old, new)
    assert fit(coarse(wrong, monkeypatch, margin=MARGIN, reach=8), 16, 200_000) < FALSE_ALARM


def test_the_fast_path_on_coarse_bars_is_right(monkeypatch):
    assert fit(coarse(secure_noise, monkeypatch, margin=MARGIN, reach=8), 16, 200_000) > FALSE_ALARM


# --- no holes -----------------------------------------------------------------------------------


def test_far_out_the_lowest_bits_are_as_free_as_anywhere():
    far = beyond(draw, 2**52, distance=4, count=500_000, pieces=12)
    assert far.size > 200  # 380 expected
    assert fit_of_low_bits(far) > FALSE_ALARM
    for sigma in (2**20, 2**33, 2**40):
        assert fit_of_low_bits(draw(500_000, sigma)) > FALSE_ALARM


def test_holes_would_be_noticed():
    far = beyond(float_draw, 2**52, distance=4, count=500_000, pieces=12)
    assert fit_of_low_bits(far) < FALSE_ALARM
    even = mutated(SECURE, "(1 << staircase.width_bits) - 1)", "(1 << staircase.width_bits) - 2)")
    assert fit_of_low_bits(even.draw(10_000, 2**33)) < FALSE_ALARM


@pytest.mark.slow
def test_support_attack_proves_most_float_uploads_and_no_secure_one():
    count, one, other = 100_000, np.float32(0.25), np.float32(0.75)
    normals = float_normals()
    with_noise = one + np.asarray(jax.random.normal(jax.random.key(0), (count,)))
    assert float_possible(with_noise, one, normals).all()
    proved = 1 - float_possible(with_noise, other, normals).mean()
    assert proved > 0.5

    sigma, moved = 2**33 + 7, 2**31
    staircase = build_envelope(sigma)
    needed = draw(count, sigma) + moved  # what the noise was if the data were the other ones
    assert secure_possible(needed, staircase, secure_noise).all()


@pytest.mark.parametrize("lost", [2, 2**10])
def test_the_attack_would_find_a_sampler_with_holes(lost):
    holes = mutated(
        SECURE,
        "np.uint64((1 << staircase.width_bits) - 1)",
        f"np.uint64((1 << staircase.width_bits) - {lost})",
    )
    needed = draw(10_000, 2**33) + 2**31
    assert secure_possible(needed, build_envelope(2**33), holes).mean() < 0.6


def test_attack_on_a_rounded_float64_normal_beyond_five_sigma():
    """Which grid points beyond 5σ a float64 inversion can reach: hardly any, at σ = 2⁴⁰."""
    sigma = 2**40
    needed = np.random.default_rng(2).integers(5 * sigma, 6 * sigma, 2000)
    at = np.rint(stats.norm.cdf(needed / sigma) * 2**53).astype(np.int64)
    reached = np.zeros(needed.size, dtype=bool)
    for step in range(-4, 5):
        uniform = np.minimum(at + step, 2**53 - 1) / 2**53
        reached |= np.rint(sigma * stats.norm.ppf(uniform)) == needed
    assert reached.mean() < 0.1
    assert secure_possible(needed, build_envelope(sigma), secure_noise).all()


# --- never the same twice -----------------------------------------------------------------------


def alike(first, second):
    """How far two draws are from uncorrelated, in standard errors; 6.2 has a rate below 1e-9."""
    return abs(float(np.mean(first / 2**33 * (second / 2**33)))) * np.sqrt(first.size)


def same_noise_twice(module):
    first, second = module.draw(100_000, 2**33), module.draw(100_000, 2**33)
    return alike(first, second) > 6.2 or bool(np.any(first[:8] == second[:8]))


def test_two_calls_share_nothing():
    assert not same_noise_twice(secure_noise)
    # An equal pair of 2³³-wide noise among 8 by chance: 8 · 2⁻³⁴, 5e-10. Nor do lowest bits agree:
    first, second = draw(100_000, 2**33), draw(100_000, 2**33)
    assert abs(np.mean((first & 1) == (second & 1)) - 0.5) * 2 * np.sqrt(first.size) < 6.2


def test_neighbours_and_chunks_share_nothing():
    noise = draw(4 * 2**16, 2**33)
    for lag in (1, 2, 64, 2**16):
        assert alike(noise[lag:], noise[:-lag]) < 6.2
    above = np.abs(noise) > 0.6744898 * 2**33  # the larger half
    same = np.mean(above[1:] == above[:-1])
    assert abs(same - 0.5) * 2 * np.sqrt(noise.size) < 6.2


class Entropy:
    """An operating system whose entropy is this text, from its beginning."""

    def __init__(self, text):
        self.text, self.asked = text, 0

    def __call__(self, count):
        taken = self.text[self.asked : self.asked + count]
        self.asked += count
        assert len(taken) == count, "more entropy than a key of 32 bytes and a counter of 16"
        return taken


def drawn_from(text, monkeypatch, module=secure_noise):
    """Noise of one call from this entropy, and how much of it was asked for."""
    with monkeypatch.context() as patch:
        entropy = Entropy(text)
        patch.setattr(os, "urandom", entropy)
        return module.draw(100, 2**33), entropy.asked


def test_every_bit_of_48_bytes_of_entropy_counts(monkeypatch):
    """256 bits of key and 128 of counter, taken anew for every call: any of them changes it all."""
    text = bytes(range(48))
    noise, asked = drawn_from(text, monkeypatch)
    again, _ = drawn_from(text, monkeypatch)
    assert asked == 48
    assert np.array_equal(noise, again)  # from nothing else: so that what follows means something
    for place in range(48):
        for bit in range(8):
            flipped = bytearray(text)
            flipped[place] ^= 1 << bit
            other, _ = drawn_from(bytes(flipped), monkeypatch)
            # An equal pair of 2³³-wide noise by chance: 100 · 384 · 2⁻³⁴, 2e-6 in all.
            assert not np.any(noise == other), f"bit {bit} of byte {place} changes too little"


def test_a_reused_key_would_be_noticed(monkeypatch):
    assert same_noise_twice(secure_noise) is False
    monkeypatch.setattr(os, "urandom", bytes)
    assert same_noise_twice(secure_noise)


FORK = """
import json, os, sys
from support import mutated_module as mutants
from sottovoce.privacy import secure_noise
{mutation}
secure_noise.draw(10, 2**33)
answers = []
for _ in range(4):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(secure_noise.draw(20, 2**33).tolist()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answers.append(json.load(pipe))
    os.wait()
answers.append(secure_noise.draw(20, 2**33).tolist())
print(json.dumps(answers))
"""


def values_seen_in_forks(mutation=""):
    """How many different values five processes draw, of 100: one of them the parent."""
    code = FORK.format(mutation=mutation)
    paths = [str(TESTS), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return len({value for answer in json.loads(done.stdout) for value in answer})


def test_forked_processes_draw_different_noise():
    assert values_seen_in_forks() == 100  # a chance pair: 100²/2 · 2⁻³⁴ = 3e-7


def test_a_stream_kept_between_calls_would_be_noticed():
    kept = "globals().setdefault('kept', _Stream()),"
    change = f"'staircase = _Stream(),', \"staircase = {kept}\""
    mutation = f"secure_noise = mutants.mutated({SECURE!r}, {change})"
    assert values_seen_in_forks(mutation) < 100


# --- manners ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [True, 0, -1, 1.0, 2.5, 2**52 + 1, None, "3", float("nan")])
def test_a_sigma_that_is_none_is_refused(sigma):
    with pytest.raises(
        InputError, match=r"^sigma must be a whole number from 1 to 4503599627370496"
    ):
        draw(1, sigma)


@pytest.mark.parametrize("count", [True, -1, 1.0, None, "3", 2**60])
def test_a_count_that_is_none_is_refused(count):
    with pytest.raises(InputError, match=r"^count must be a whole number from 0"):
        draw(count, 1)


def test_a_key_or_seed_cannot_be_given():
    with pytest.raises(TypeError):
        draw(1, 1, 0)
    with pytest.raises(TypeError):
        draw(1, 1, key=b"0" * 32)


@pytest.mark.parametrize("count", [0, 1, 2, 2**16 - 1, 2**16, 2**16 + 1, np.int64(5)])
def test_as_many_as_asked(count):
    noise = draw(count, np.int64(2**33))
    assert noise.shape == (count,)
    assert noise.dtype == np.int64


def test_memory_beside_the_result_is_bounded():
    draw(1, 2**33)
    tracemalloc.start()
    try:
        noise = draw(5_000_000, 2**33)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - noise.nbytes < 8e6


def test_a_device_that_draws_noise_does_not_load_jax():
    code = "import sys, sottovoce.privacy.secure_noise\n"
    code += "print(sorted({'jax', 'scipy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.stdout.strip() == "[]", done.stderr
