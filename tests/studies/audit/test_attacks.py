"""The attacks: they succeed without noise, for the stated reason, and noise holds them down."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from scipy import stats

from sottovoce.privacy import gaussian
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.studies.audit import attacks, findings, messages
from sottovoce.studies.audit.attacks import Victim, find_nearest, mse, psnr, ssim
from sottovoce.studies.audit.auditing import load_target
from sottovoce.studies.audit.messages import AuditSetting, Level, bound_guess_rate, bound_rate

pytestmark = pytest.mark.slow  # JAX compiles; left out of the editing loop

CLEAN = Level(None)
NOISY = [Level(4.0), Level(8.0), Level(20.0)]


@lru_cache(maxsize=1)
def on():
    return load_target(None)


@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e3])
def test_one_sample_is_read_off_exactly_however_it_was_clipped(clip):
    recipe = Recipe(2.0, clip)
    client = Victim(on().form, recipe, on().x[:30], on().y[:30])
    found = attacks.invert_first_layer(client, on().model, CLEAN)
    assert found.error < 1e-5 * min(1.0, clip)  # the grid's own rounding is all that is lost
    assert found.identified == 1.0
    assert found.labels.all()
    assert found.ssim > 0.999
    assert found.psnr > 60


@pytest.mark.parametrize("level", NOISY, ids=str)
def test_noise_keeps_samples_and_labels_under_their_ceilings(level):
    """Of 60 samples each; a rate above its ceiling by chance: < 1e-3."""
    found = attacks.invert_first_layer(on().client.select(range(60)), on().model, level)
    for right, candidates in ((found.recognised, 60), (found.labels, on().form.classes)):
        assert bound_rate(int(right.sum()), 60)[0] <= bound_guess_rate(candidates, level.mu)
    assert found.error > 0.05


def test_several_samples_are_found_by_matching_gradients_and_not_with_noise():
    own, pool = np.array([31, 7, 12]), on().take_pool(40)  # somewhere in the pool
    clean, noisy = (
        attacks.match_gradients(pool, own, on().model, level, steps=900)
        for level in (CLEAN, Level(4.0))
    )
    assert np.array_equal(clean.originals, pool.x[own])
    assert (clean.candidates, clean.tries, clean.judged.tolist()) == (38, 3, [True, False, False])
    assert clean.error < 0.01 < 0.1 < noisy.error
    assert clean.recognised.all()
    assert clean.labels.all()


def test_trap_weights_isolate_samples_of_an_honest_client_and_not_with_noise():
    victim = on().client
    clean = attacks.set_trap(victim, on().public, CLEAN)
    assert clean.rates.hits >= 5
    assert clean.rates.alarms == 0
    for level in NOISY:
        noisy = attacks.set_trap(victim, on().public, level)
        assert noisy.rates.hits == 0
        assert noisy.rates.bound_mu()[0] <= level.mu


def test_a_bin_with_one_sample_holds_that_sample():
    """By construction: three samples of different brightness, and thresholds between them."""
    x = np.array([[0.2, 0.1], [0.5, 0.6], [0.9, 0.8]])
    form = attacks.Form("mlp", (2,), 2, {"hidden": 3})
    trap = attacks.make_trap_model(form, np.random.default_rng(0).random((500, 2)), 3)
    trap["b1"] = -np.array([0.1, 0.4, 0.7]) * trap["w1"][:, 0].sum()
    victim = Victim(form, Recipe(1.0, 1.0), x, np.array([0, 1, 0]))
    assert attacks.read_bins(victim.read_gradient(CLEAN, trap)) == pytest.approx(x, abs=1e-4)


def test_the_likeliest_candidate_is_named_without_noise_and_under_its_ceiling_with_it():
    """60 samples; above the ceiling by chance: < 1e-3. At ε = 20 it knows more than nothing."""
    pool = on().take_pool(60)
    assert attacks.name_candidates(pool, on().model, CLEAN).recognised.all()
    for level in NOISY:
        found = attacks.name_candidates(pool, on().model, level)
        assert bound_rate(int(found.recognised.sum()), 60)[0] <= bound_guess_rate(60, level.mu)
    assert (
        found.recognised.sum() >= 3
    )  # of 60; blindly 3 or more happen in 8 %, here less than 1e-3


@lru_cache(maxsize=4)
def attack_members(level):
    pool, how = on().take_pool(40), {"runs": 32, "progress": lambda done, count: None}
    models = attacks.attack_models(pool, level, rounds=80, **how)
    uploads = attacks.attack_uploads(pool, level, on().model, rounds=6, **how)
    return {attack.name: attack for attack in (*models, *uploads)}


def test_members_of_an_overfit_model_are_found_without_noise():
    found = attack_members(CLEAN)
    assert found["LiRA, final model"].auc > 0.9
    assert found["loss threshold, final model"].auc > 0.8
    assert found["LiRA, whole transcript"].auc > 0.7
    assert found["LiRA, one upload"].auc > 0.6
    assert all(attack.members.sum(axis=1).tolist() == [20] * 32 for attack in found.values())


@pytest.mark.parametrize("level", [Level(4.0), Level(20.0)], ids=str)
def test_with_noise_every_rate_is_under_its_ceiling(level):
    for attack in attack_members(level).values():
        assert not any(attack.exceeds(fpr) for fpr in attacks.JUDGED_AT)
        assert not attack.area_exceeds
        assert attack.auc < attack.auc_ceiling + 0.06
        assert attack.auc < attack_members(CLEAN)[attack.name].auc


def test_likelihood_ratios_reach_the_best_test():
    """Gaussian statistics of known shift: the area is Φ(μ/√2) to what 200 runs can tell."""
    rng = np.random.default_rng(1)
    there = rng.random((200, 100)) < 0.5
    scores = attacks.compute_ratios(rng.standard_normal((200, 100)) + 1.5 * there, there)
    found = attacks.Attack("", CLEAN, scores, there)
    assert found.auc == pytest.approx(float(gaussian.auc(1.5)), abs=0.02)
    alarms, hits = found.compute_curve()
    assert np.trapezoid(hits, alarms) == pytest.approx(found.auc, abs=0.005)


def _halves(rng, runs, records):
    return np.argsort(rng.random((runs, records)), axis=1) < records // 2


@pytest.mark.parametrize("runs", [6, 16, 64])
def test_scores_of_pure_noise_know_nothing(runs):
    """The mean area over 100 attacks is 1/2 to 5 standard errors, which are at most 0.005."""
    rng, areas = np.random.default_rng(4), []
    for _ in range(100):
        there = _halves(rng, runs, 64)
        scores = attacks.compute_ratios(rng.standard_normal((runs, 64)), there)
        areas.append(attacks.Attack("", CLEAN, scores, there).auc)
    error = np.std(areas) / 10
    assert error < 0.005
    assert np.mean(areas) == pytest.approx(0.5, abs=5 * error)


def test_what_a_run_has_in_common_accuses_nobody_and_knowledge_does():
    """Scores that are the run's own luck, at μ → 0: at most 5 % of 200 audits at 95 % (1e-6)."""
    rng, least, wrong = np.random.default_rng(5), Level(1e-3), 0
    for _ in range(200):
        there = _halves(rng, 32, 40)
        luck = 3 * rng.standard_normal((32, 1)) + 0.1 * rng.standard_normal((32, 40))
        wrong += attacks.Attack("", least, luck, there).prove_mu(0.1, wrong=0.05) > 0
    assert wrong <= stats.binom.ppf(1 - 1e-6, 200, 0.05)
    knowing = attacks.Attack("", Level(8.0), (there := _halves(rng, 128, 40)) * 1.0, there)
    assert knowing.exceeds(0.1)
    assert knowing.area_exceeds
    guessing = attacks.Attack("", Level(8.0), rng.random((128, 40)), there)
    assert not guessing.exceeds(0.1)
    assert not guessing.area_exceeds


@pytest.mark.parametrize("shift", [0.5, 2.0])
def test_the_ceiling_of_an_area_is_reached_by_the_best_attack_on_two_records(shift):
    """One of two records was there, and one number of N(±μ/2, 1) says which: Φ(μ/2), to 5 sd."""
    rng, runs = np.random.default_rng(6), 20_000
    there = _halves(rng, runs, 2)
    told = rng.normal(np.where(there[:, 0], shift / 2, -shift / 2))
    found = attacks.Attack("", CLEAN, np.stack([told, -told], axis=1), there)
    assert found.auc == pytest.approx(float(stats.norm.cdf(shift / 2)), abs=2.5 / runs**0.5 * 1.5)


@pytest.mark.parametrize(("guesses", "right"), [(100, 100), (300, 288), (300, 160), (50, 20)])
def test_one_run_bounds_are_those_of_jax_privacy(guesses, right):
    oracle = pytest.importorskip("jax_privacy.auditing")
    for delta in (0.0, 1e-5):
        ours = messages.refute_epsilon(1000, guesses, right, delta, 0.95)
        wanted = oracle._epsilon_one_run(0.0, 1000, guesses, right, 0.05, delta)
        assert ours == pytest.approx(wanted, abs=1e-4)
    ours = float(gaussian.epsilon(1e-5, messages.refute_mu(1000, guesses, right, 0.95)))
    wanted = oracle._epsilon_one_run_fdp(1e-6, 1000, guesses, right, 0.05, 1e-5)
    assert ours == pytest.approx(wanted, abs=1e-3)


def test_one_run_proves_something_and_never_too_much():
    """400 canaries in each of 12 runs at ε = 8: none is refuted (false alarm < 2 %)."""
    found = [
        messages.play_one_run(AuditSetting(8.0, 1e-5, Recipe(2.0, 1.0)), 400, seed=s)
        for s in range(12)
    ]
    assert not any(run.contradicts for run in found)
    assert np.median([run.gaussian_epsilon for run in found]) > 0.8
    expected = stats.norm.cdf(found[0].setting.promised / 2)  # of all coins, not of the surest
    assert np.mean([run.right / run.guesses for run in found]) > expected


def test_one_run_refutes_a_client_that_draws_too_little_noise(monkeypatch):
    draw = messages.release.secure_noise.draw
    monkeypatch.setattr(
        messages.release.secure_noise, "draw", lambda n, sigma: draw(n, sigma // 20)
    )
    assert messages.play_one_run(AuditSetting(1.0, 1e-5, Recipe(2.0, 1.0)), 1000).contradicts


def test_pictures_are_compared_as_pictures():
    rng = np.random.default_rng(2)
    one, other = rng.random((2, 64))
    assert mse(one, one) == 0
    assert psnr(one, one) == 200
    assert ssim(one, one) == pytest.approx(1)
    assert abs(ssim(one, other)) < 0.5
    assert find_nearest([0.5 * other + 0.1], [one, other]).tolist() == [1]
    assert find_nearest([np.full(64, np.nan)], [one, other]).shape == (1,)


def test_parts_of_the_attacks_by_example():
    gradient = {"w1": np.array([[0.0, 6.0], [0.0, 2.0]]), "b1": np.array([0.0, 2.0])}
    assert attacks.invert_gradient(gradient).tolist() == [3.0, 1.0]
    assert attacks.guess_labels({"b2": np.array([-1.9, 0.6, -0.6])}, 3).tolist() == [0, 0, 2]
    assert attacks.choose_one_per_class(np.array([1, 1, 0, 2]), 3) == [2, 0, 3]
    assert [attacks.has_pixels(np.array([[low, 1.0]])) for low in (0.0, -3.0)] == [True, False]
    form = attacks.Form("svm", (1,), 2, {"kappa": 0.0})
    start, x = {"b": np.zeros(()), "w": np.zeros(1)}, np.full((1, 1), 3.0)
    clipped = Victim(form, Recipe(1.0, 1.0), x, np.ones(1, np.int64)).clip_gradients(start)
    assert clipped.round(3).tolist() == [[-0.316, -0.949]]


def test_numbers_of_the_audit_by_example():
    assert round(messages.compute_mu(0.8413, 0.1587), 2) == 2.0
    counted = messages.count_rates([1.0, 2.0], [-1.0, 1.5], 0.0)
    assert counted == messages.Rates(hits=2, positives=2, alarms=1, negatives=2)
    bounds = [messages.bound_mean(values) for values in ([1.0] * 32, [0.4, 0.6] * 16)]
    assert np.round(bounds, 3).tolist() == [[0.789, 1.0], [0.193, 0.807]]
    assert [messages.format_lower_bound(v, 1) for v in (28.4516, 8.1)] == ["28.4", "8.1"]
    share, plain = findings.Row("", "", {}), findings.Row("", "", {}, False)
    assert findings.split_finding(share, findings.Finding(0.021, 0.09)) == ("2.1 %", "(9.0 %)")
    assert findings.split_finding(plain, findings.Finding(1.2e-17)) == ("1.2e-17", "")
    found = findings.Finding(0.5, 0.9, counts=messages.Rates(1, 2, 1, 100))
    assert findings.split_finding(share, found) == ("50.0 %", "at 1.0 % (90.0 %)")
