"""The message-level audit: it measures the promised μ, it judges the paper, and it can fail.

A proven μ exceeds the true one in one audit of a thousand at most; counts are of fresh noise from
the operating system, so that each assertion says its own false-alarm rate.
"""

from __future__ import annotations

import numpy as np
import pytest
from mutants import mutated
from scipy import stats

from sottovoce import client
from sottovoce.audit import messages
from sottovoce.audit.ceiling import Rates, area, between, counted, guess, threshold_at
from sottovoce.audit.messages import FORM, Duel, Setting, measure, model, neighbours
from sottovoce.privacy import calibration, gaussian, grid
from sottovoce.privacy.sensitivity import Recipe

RECIPE = Recipe(learning_rate=2.0, clip=1.0)


@pytest.mark.parametrize(("hits", "trials"), [(0, 50), (3, 50), (50, 50), (7000, 20_000)])
def test_intervals_are_clopper_and_pearsons(hits, trials):
    wanted = stats.binomtest(hits, trials).proportion_ci(0.999, "exact")
    assert between(hits, trials, 0.999) == pytest.approx((wanted.low, wanted.high), rel=1e-9)


@pytest.mark.slow
def test_a_proven_mu_is_seldom_above_the_true_one():
    """4,000 audits of Gaussian scores at 95 %: at most 5 % are too high (false alarm: 1e-6)."""
    rng, mu = np.random.default_rng(0), 1.3
    wrong = 0
    for _ in range(4000):
        having, without = rng.normal(mu / 2, size=400), rng.normal(-mu / 2, size=400)
        wrong += counted(having, without, 0.0).exceeds(mu, confidence=0.95)
    assert wrong <= stats.binom.ppf(1 - 1e-6, 4000, 0.05)


def test_areas_thresholds_and_guesses():
    rng = np.random.default_rng(1)
    yes, no = rng.normal(1.0, size=500), rng.normal(size=700)
    wanted = np.mean(yes[:, None] > no[None, :])
    assert area(yes, no) == pytest.approx(wanted, rel=1e-12)
    assert np.mean(no > threshold_at(no, 0.1)) == pytest.approx(0.1)
    assert guess(10, 0.0) == pytest.approx(0.1)
    assert Rates(5, 10, 5, 10).mu == 0.0


@pytest.mark.parametrize("clip", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("unit", ["record", "client"])
def test_the_neighbours_are_as_far_apart_as_neighbours_can_be(unit, clip):
    recipe = Recipe(1.0, clip, unit=unit)
    x, y, other = neighbours(recipe)
    for sign in (1.0, -1.0):
        one, two = (client.step(FORM, model(sign), x, labels, recipe) for labels in (y, other))
        moved = np.sqrt(sum(np.sum((one[name] - two[name]) ** 2) for name in one))
        assert 0.999 <= moved / float(recipe.sensitivity(messages.SAMPLES)) <= 1 + 1e-9


def test_the_noise_that_is_audited_is_the_noise_that_was_bought():
    for setting in (Setting(4, 1e-3, RECIPE), Setting(8, 1e-5, RECIPE, "zcdp", rounds=6)):
        assert Duel.of(setting).mu == pytest.approx(setting.capacity() ** 0.5, rel=1e-4)
        assert Duel.of(setting).mu <= setting.promised


@pytest.mark.slow
def test_the_measured_mu_is_the_promised_one():
    """20,000 messages a side at μ = 1.67: proven ≥ 0.85 μ (false alarm < 1e-9), ≤ μ (1e-3)."""
    found = measure(Setting(8.0, 1e-5, RECIPE), 10_000)
    low, _, high = found.mu
    assert 0.85 * found.setting.promised <= low <= found.setting.promised <= high
    assert 0 < found.free_epsilon <= 8.0
    assert found.epsilon[0] <= 8.0
    assert not found.contradicts


@pytest.mark.slow
def test_the_papers_noise_does_not_keep_its_promise():
    """The proven ε of Theorem 1's noise at ε = 20, δ = 1e-3 is beyond 20 (true: 30.3)."""
    found = measure(Setting(20.0, 1e-3, Recipe(1.0, 5.0), "paper"), 2_000)
    assert found.contradicts
    assert found.true == pytest.approx(5.3808, abs=1e-3)
    assert found.mu[0] <= found.true
    assert 22 < found.epsilon[0] <= float(gaussian.epsilon(1e-3, found.true)) < 30.4
    assert found.free_epsilon < 20  # so many messages cannot show it without the shape


RAW = "gradients.losses(form, now, np.asarray(x, np.float64), np.asarray(y), own)"
DRAW = "noise = [secure.draw(count, sigma) for sigma in paid.noise]"

#: Bugs of a release: how each is written into the real code, and how many runs show it.
BUGS = {
    "noise of 0.8 σ": (DRAW, DRAW.replace("sigma)", "4 * sigma // 5)"), 2000),
    "a raw loss beside the upload": (
        "told: dict[str, float] = {}",
        f"told: dict[str, float] = {{'loss': float(np.mean({RAW}))}}",
        200,
    ),
    "the same noise in every round": (
        DRAW,
        DRAW.replace("secure.draw(count, sigma)", "_KEPT.setdefault(0, secure.draw(count, sigma))"),
        200,
    ),
    "noise on the first parameter only": (
        "for drawn in noise:",
        "for drawn in [np.where(np.arange(count) == 0, drawn, 0) for drawn in noise]:",
        200,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_audit_can_fail(bug, monkeypatch):
    """Each bug is found (missed: < 1e-5), where the code as it stands would not be accused."""
    old, new, runs = BUGS[bug]
    kept = ("_MINT = object()", "_MINT, _KEPT = object(), {}")
    monkeypatch.setattr(messages, "client", mutated("sottovoce.client", old, new, kept))
    assert measure(Setting(12.0, 1e-5, RECIPE), runs).contradicts


@pytest.mark.slow
def test_the_audit_finds_a_reused_key(monkeypatch):
    """AES with the same key and counter in every message: the noise of two rounds is one."""
    fixed = mutated(
        "sottovoce.noise.secure",
        "algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16))",
        "algorithms.AES(bytes(32)), modes.CTR(bytes(16))",
    )
    monkeypatch.setattr(client, "secure", fixed)
    assert measure(Setting(12.0, 1e-5, RECIPE), 200).contradicts


def test_what_no_number_of_messages_can_show():
    assert Rates(20_000, 20_000, 0, 20_000).epsilon(1e-5) < np.log(20_000)
    assert calibration.capacity(20, 1e-3, calibration="paper") > gaussian.mu(20, 1e-3) ** 2
    assert grid.change("record", messages.SAMPLES) == 2**31
