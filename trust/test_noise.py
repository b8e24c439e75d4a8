"""Secure noise at the sizes of a long run (two minutes: `make trust`).

The questions of tests/statistics/test_secure_noise.py with up to fifty times the draws.
False-alarm rates: 1e-9 a question.
"""

from __future__ import annotations

import jax
import numpy as np
import opendp.prelude as dp
import pytest
from scipy import stats

from sottovoce.privacy import secure_noise
from sottovoce.privacy.secure_noise import build_envelope, draw
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


@pytest.mark.parametrize("sigma", [1, 2, 7, 50, 300])
def test_every_integer_has_its_probability(sigma):
    assert fit(draw, sigma, 5_000_000, pieces=20) > FALSE_ALARM


def test_a_comparison_wrong_by_a_hundredth_would_be_noticed(monkeypatch):
    """Fast accepts up to 1 % of the peak above the bell: seen on bars as wide as σ."""
    wrong = mutated(
        "sottovoce.privacy.secure_noise", "bell * (1 - MARGIN)", "bell + 0.01 * staircase.scale"
    )
    monkeypatch.setattr(secure_noise, "BARS", 1)
    monkeypatch.setattr(wrong, "build_envelope", build_envelope.__wrapped__)
    assert fit(wrong.draw, 300, 1_000_000, pieces=10) < FALSE_ALARM


@pytest.mark.parametrize("sigma", [2**20 + 1, 2**33, 2**36 + 5, 2**40 - 1, 2**52])
def test_wide_noise_has_the_shape_and_the_spread_of_the_bell(sigma):
    noise = draw(10_000_000, sigma)
    assert fit_of_large(noise, sigma, groups=2000) > FALSE_ALARM
    assert spread_is(noise, sigma, within=0.002)  # 8.9 of its standard deviations
    assert not spread_is(noise, sigma * 2 // 3, within=0.002)
    assert not spread_is(noise, sigma * 3 // 2, within=0.002)


@pytest.mark.parametrize("sigma", [3, 50, 1000, 2**33])
def test_against_opendps_proved_sampler(sigma):
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
    measure = dp.m.make_gaussian(*space, scale=float(sigma))
    theirs = np.concatenate([measure([0] * 50_000) for _ in range(6)])
    assert stats.ks_2samp(draw(theirs.size, sigma), theirs).pvalue > FALSE_ALARM
    assert stats.ks_2samp(draw(theirs.size, -(-sigma * 31 // 30)), theirs).pvalue < FALSE_ALARM


@pytest.mark.parametrize("sigma", [2, 16, 50])
def test_the_slow_path_draws_the_same_distribution(sigma, monkeypatch):
    slow, is_below = [], secure_noise.is_below
    monkeypatch.setattr(secure_noise, "BARS", 1)
    monkeypatch.setattr(secure_noise, "MARGIN", 0.9)
    monkeypatch.setattr(
        secure_noise, "build_envelope", lambda sigma: build_envelope.__wrapped__(sigma, 1)
    )
    monkeypatch.setattr(secure_noise, "is_below", lambda *a: slow.append(1) or is_below(*a))
    assert fit(draw, sigma, 300_000) > FALSE_ALARM
    assert len(slow) > 60_000


def test_far_out_the_lowest_bits_are_as_free_as_anywhere():
    far = beyond(draw, 2**52, distance=4, count=5_000_000, pieces=40)
    assert far.size > 12_000  # 12,668 expected, 113 standard
    assert fit_of_low_bits(far, bits=8) > FALSE_ALARM
    farther = far[np.abs(far) > 4.9 * 2**52]
    assert farther.size > 100  # 192 expected
    assert fit_of_low_bits(farther) > FALSE_ALARM
    holes = beyond(float_draw, 2**52, distance=4, count=1_000_000, pieces=10)
    assert fit_of_low_bits(holes) < FALSE_ALARM


def test_support_attack_on_a_million_coordinates():
    count, normals = 1_000_000, float_normals()
    noise = np.asarray(jax.random.normal(jax.random.key(1), (count,)))
    for one, other in [(0.0, 0.5), (0.25, 0.75), (0.1, 0.11)]:
        uploads = np.float32(one) + noise
        assert float_possible(uploads, np.float32(one), normals).all()
        assert 1 - float_possible(uploads, np.float32(other), normals).mean() > 0.5
    for sigma in (2**31, 2**33 + 7, 2**40):
        needed = draw(count, sigma) + 2**31
        assert secure_possible(needed, build_envelope(sigma), secure_noise).all()
