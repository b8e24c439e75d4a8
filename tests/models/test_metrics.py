"""Metrics against brute-force references, their properties, and what heads a result."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.models import metrics
from sottovoce.models.metrics import Measured, measure_classes, measure_regression

SCORES = st.lists(st.tuples(st.booleans(), st.integers(-4, 4)), min_size=2, max_size=40).filter(
    lambda rows: len({label for label, _ in rows}) == 2
)


def draw(rows: int, classes: int, seed: int = 0, *, skill: float = 1.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    scores = rng.normal(size=(rows, classes))
    scores[np.arange(rows), labels] += skill
    return labels, scores


def of(labels, scores, **more):
    return measure_classes(labels, np.argmax(scores, axis=1), scores, **more)


def pairs(is_positive, scores) -> float:
    """AUROC by its definition: all pairs of a positive and a negative row."""
    wins = [
        (a > b) + (a == b) / 2
        for a, p in zip(scores, is_positive, strict=True)
        for b, q in zip(scores, is_positive, strict=True)
        if p and not q
    ]
    return sum(wins) / len(wins)


def average_precision(is_positive, scores) -> float:
    """AUPRC by its definition: at every distinct score, gained recall times precision."""
    area, before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        taken = [p for p, s in zip(is_positive, scores, strict=True) if s >= threshold]
        recall = sum(taken) / sum(is_positive)
        area, before = area + (recall - before) * sum(taken) / len(taken), recall
    return area


@given(SCORES)
def test_areas_are_those_of_their_definitions(rows) -> None:
    labels, scores = np.array([a for a, _ in rows]), np.array([float(b) for _, b in rows])
    assert metrics.compute_auroc(labels, scores) == pytest.approx(pairs(labels, scores))
    assert metrics.compute_auprc(labels, scores) == pytest.approx(average_precision(labels, scores))


@given(SCORES)
def test_the_area_depends_on_the_order_alone(rows) -> None:
    labels, scores = np.array([a for a, _ in rows]), np.array([float(b) for _, b in rows])
    area = metrics.compute_auroc(labels, scores)
    assert metrics.compute_auroc(labels, np.exp(3 * scores) - 7) == pytest.approx(area)
    assert metrics.compute_auroc(labels, -scores) == pytest.approx(1 - area)
    assert metrics.compute_auroc(labels, np.zeros(len(labels))) == 0.5


def test_two_classes_by_hand() -> None:
    labels = np.array([0, 0, 0, 1])
    scores = np.log(np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]]))
    found = of(labels, scores)
    assert found["accuracy"][:2] == (0.75, 0.75)
    assert found["balanced_accuracy"][:2] == (pytest.approx((2 / 3 + 1) / 2), 0.5)
    assert found["auroc"][:2] == (pytest.approx(2 / 3), 0.5)
    assert found["auprc"][:2] == (pytest.approx(0.5), 0.25)
    assert found["log_loss"].value == pytest.approx(-np.log([0.9, 0.8, 0.3, 0.6]).mean())
    assert found["log_loss"].baseline == pytest.approx(-0.75 * math.log(0.75) - math.log(0.25) / 4)
    assert found["brier"].value == pytest.approx((0.01 + 0.04 + 0.49 + 0.16) / 4)
    assert found["brier"].baseline == pytest.approx(0.75 * 0.25)
    assert found["calibration_error"].value == pytest.approx((0.1 + 0.2 + 0.7 + 0.4) / 4)


def test_more_classes_are_means_over_those_present() -> None:
    labels, scores = draw(200, 4)
    labels[labels == 2] = 1  # class 2 does not occur
    found = of(labels, scores)
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    seen = (0, 1, 3)
    assert found["auroc"].value == pytest.approx(
        np.mean([pairs(labels == k, p[:, k]) for k in seen])
    )
    assert found["auprc"].value == pytest.approx(
        np.mean([average_precision(labels == k, p[:, k]) for k in seen])
    )
    predicted = scores.argmax(axis=1)
    recalls = [np.mean(predicted[labels == k] == k) for k in seen]
    assert found["balanced_accuracy"][:2] == (pytest.approx(np.mean(recalls)), pytest.approx(1 / 3))
    assert found["brier"].value == pytest.approx(
        np.mean(np.sum((p - np.eye(4)[labels]) ** 2, axis=1))
    )


def test_a_constant_answer_scores_the_baselines() -> None:
    """The oracle of the baselines: a model that always gives the shares of the classes."""
    for classes in (2, 5):
        labels, _ = draw(300, classes, seed=classes)
        labels = np.minimum(labels, np.random.default_rng(1).integers(0, classes, 300))
        shares = np.bincount(labels, minlength=classes) / 300
        found = of(labels, np.tile(np.log(shares), (300, 1)))
        for name, measured in found.items():
            assert measured.value == pytest.approx(measured.baseline, abs=1e-12), name
            assert not measured.is_better(name)


def test_numbers_by_hand_and_against_the_mean() -> None:
    targets = np.array([1.0, 2.0, 3.0, 6.0])
    found = measure_regression(targets, targets + np.array([1, -1, 1, -1]))
    assert found["mae"][:2] == (1.0, 1.5)
    assert found["rmse"][:2] == (1.0, pytest.approx(np.std(targets)))
    assert found["r2"][:2] == (pytest.approx(1 - 4 / 14), 0.0)
    constant = measure_regression(targets, np.full(4, 3.0))
    assert not any(measured.is_better(name) for name, measured in constant.items())
    assert math.isnan(measure_regression(np.ones(3), np.zeros(3))["r2"].value)


@pytest.mark.parametrize("metric", metrics.CLASS_METRICS)
def test_a_model_of_chance_is_seldom_called_better(metric) -> None:
    """Two standard errors are passed by chance in 2.3 % of trials, of 400: at most 24 (3.5 sd)."""
    rng, called = np.random.default_rng(3), 0
    for _ in range(400):
        labels = (rng.random(300) < 0.1).astype(int)
        noise = np.log(0.1 / 0.9) + 0.5 * rng.normal(size=300)
        called += of(labels, np.stack([np.zeros(300), noise], 1))[metric].is_better(metric)
    assert called <= 24


def test_scores_that_are_not_finite_leave_what_classes_say() -> None:
    labels, scores = draw(50, 3)
    scores[7] = np.nan
    found = of(labels, scores)
    assert math.isfinite(found["accuracy"].value)
    assert math.isnan(found["auroc"].value)
    assert not found["auroc"].is_better("auroc")
    assert measure_classes(labels, labels).keys() == {"accuracy", "balanced_accuracy"}
    assert metrics.fit_calibration(labels, scores) is None


def test_the_rule_of_the_headline() -> None:
    def rule(*counts: int) -> str:
        return metrics.choose_metric(np.repeat(np.arange(len(counts)), counts), len(counts))

    assert rule(70, 30) == rule(50, 50) == rule(*[20] * 10) == "accuracy"
    assert rule(71, 29) == rule(3, 97) == "auroc"
    assert rule(50, 25, 25) == "accuracy"
    assert rule(70, 15, 15) == "balanced_accuracy"
    assert rule(21, *[8] * 9, 7) == "balanced_accuracy"


def test_calibration_keeps_the_order_of_two_classes_and_lowers_the_loss() -> None:
    for seed in range(20):
        labels, scores = draw(120, 2, seed, skill=np.random.default_rng(seed).normal())
        scores = scores * 5 + [2.0, 0.0]
        fitted = metrics.fit_calibration(labels, scores)
        assert fitted is not None
        before, after = scores[:, 1] - scores[:, 0], np.diff(fitted.apply(scores), axis=1)[:, 0]
        assert (np.argsort(before) == np.argsort(after)).all()
        raw, better = of(labels, scores), of(labels, scores, calibrated=fitted.apply(scores))
        assert better["log_loss"].value < raw["log_loss"].value
        assert better["auroc"] == raw["auroc"]


def test_calibration_finds_the_temperature_and_the_bias_of_the_scores() -> None:
    rng = np.random.default_rng(5)
    truth = rng.normal(size=(60_000, 3)) * 2
    labels = np.array([rng.choice(3, p=p) for p in metrics.compute_probabilities(truth)])
    fitted = metrics.fit_calibration(labels, 4 * (truth + np.array([0.5, 0.0, -0.5])))
    assert fitted is not None
    assert fitted.temperature == pytest.approx(4, rel=0.03)
    assert fitted.bias == pytest.approx((-0.5, 0.0, 0.5), abs=0.05)
    found = metrics.measure_reliability(labels, metrics.compute_probabilities(truth))
    assert np.abs(found[:, 0] - found[:, 1]).max() < 0.03


def test_calibration_needs_ten_rows_of_every_class() -> None:
    scores = np.random.default_rng(1).normal(size=(100, 2))
    assert metrics.fit_calibration(np.repeat([0, 1], [91, 9]), scores) is None
    fitted = metrics.fit_calibration(np.repeat([0, 1], [90, 10]), scores)
    assert fitted is not None
    rows = metrics.compute_probabilities(scores, fitted)
    assert rows[:, 1].mean() == pytest.approx(0.1, abs=0.03)  # not one half, whatever the scores
    apart = np.stack([np.zeros(40), np.repeat([-1.0, 1.0], 20)], axis=1)
    sure = metrics.fit_calibration(np.repeat([0, 1], 20), apart)
    assert sure is not None  # told apart without an error: likely, not certain
    most = metrics.compute_probabilities(apart, sure)[:, 1].max()
    assert most == pytest.approx(41 / 42, abs=1e-6)


def test_calibration_of_few_rows_of_many_classes_does_little_harm() -> None:
    """Probabilities that are right stay nearly so with 18 rows a class, as the digits have."""
    rng, truth = np.random.default_rng(9), np.random.default_rng(8).normal(size=(2180, 10)) * 3
    labels = np.array([rng.choice(10, p=p) for p in metrics.compute_probabilities(truth)])
    fitted = metrics.fit_calibration(labels[:180], truth[:180])
    assert fitted is not None
    labels, truth = labels[180:], truth[180:]
    raw, calibrated = of(labels, truth), of(labels, truth, calibrated=fitted.apply(truth))
    assert calibrated["log_loss"].value < raw["log_loss"].value + 0.05
    assert calibrated["calibration_error"].value < 0.05


def test_curves_are_short_and_keep_their_ends_and_area() -> None:
    labels, scores = draw(5000, 2)
    labels = np.minimum(labels, np.arange(5000) % 3)  # class 1 is the rarer
    found = metrics.draw_curves(labels, scores)
    assert found["positive"] == 1
    fpr, tpr = np.array(found["roc"]).T
    assert len(fpr) <= metrics.POINTS
    assert len(found["pr"]) <= metrics.POINTS
    assert found["roc"][0] == [0, 0]
    assert found["roc"][-1] == found["pr"][-1][:1] * 2 == [1, 1]
    area = np.sum(np.diff(fpr) * (tpr[1:] + tpr[:-1]) / 2)
    assert area == pytest.approx(of(labels, scores)["auroc"].value, abs=0.003)


def test_curves_of_several_classes_are_of_the_rarest_against_all_others() -> None:
    rng = np.random.default_rng(4)
    labels = rng.choice(8, 4000, p=[0.4, 0.2, 0.1, 0.1, 0.08, 0.06, 0.04, 0.02])
    scores = rng.normal(size=(4000, 8)) + 2 * np.eye(8)[labels]
    found = metrics.draw_curves(labels, scores)["by_class"]
    assert [curve["positive"] for curve in found] == np.argsort(np.bincount(labels)).tolist()[:6]
    for curve in found:
        k, (fpr, tpr) = curve["positive"], np.array(curve["roc"]).T
        area = np.sum(np.diff(fpr) * (tpr[1:] + tpr[:-1]) / 2)
        ordered = metrics.order_scores(scores)[:, k]
        assert area == pytest.approx(metrics.compute_auroc(labels == k, ordered), abs=0.003)
        assert curve["pr"][-1][0] == 1
    assert metrics.draw_curves(np.zeros(9, int), scores[:9])["by_class"] == []


def test_the_words_of_a_headline() -> None:
    def words(metric, *measured, only=None):
        return metrics.describe_headline(
            metric, Measured(*measured), rows=240, most_frequent="no", only=only
        )

    assert words("auroc", 0.79, 0.5, 0.03) == "AUROC 0.790 (always the most frequent class: 0.500)"
    assert words("auroc", 0.79, 0.5, 0.03, only="no").endswith(
        "but it says 'no' to every test row: choose a --threshold"
    )
    assert words("auroc", 0.54, 0.5, 0.03).startswith(
        "no better than always saying 'no', within the noise of 240 test rows: AUROC 0.540"
    )
    assert words("accuracy", 0.97, 0.98, 0.0).startswith("no better than always saying 'no': test")
    assert words("auroc", math.nan, math.nan, math.nan).startswith(
        "no AUROC: scores are not finite"
    )
    assert words("rmse", 2.0, 3.0, 0.1) == "RMSE 2 (always the mean: 3)"
    assert "no better than always saying the mean" in words("r2", -0.1, 0.0, 0.1)
    assert "(always the shares of the classes: 0.776)" in words("log_loss", 0.737, 0.776, 0.001)


def test_a_model_of_a_skewed_number_that_learnt_nothing_is_no_better():
    """Its best constant by absolute errors is the median; "always the mean" would flatter it."""
    rng = np.random.default_rng(3)
    targets = np.exp(rng.normal(8, 1, 2000))
    learnt_nothing = measure_regression(targets, np.full(2000, np.median(targets) * 1.1))
    assert not any(found.is_better(name) for name, found in learnt_nothing.items())


def test_many_rows_are_calibrated_on_some_of_them():
    """Every k-th row, unless a class would then have too few."""
    labels = np.arange(100_000) % 7
    some = metrics.choose_calibration_rows(labels, 7)
    assert metrics.ENOUGH_ROWS / 2 <= len(labels[some]) <= metrics.ENOUGH_ROWS
    rare = np.zeros(100_000, int)
    rare[:12] = 1
    assert len(rare[metrics.choose_calibration_rows(rare, 2)]) == len(rare)
    assert len(labels[:50][metrics.choose_calibration_rows(labels[:50], 7)]) == 50
