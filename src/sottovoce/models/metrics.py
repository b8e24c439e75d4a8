"""How good a model is: metrics, what a constant answer scores, and calibrated probabilities.

| metric | of | a constant answer scores |
|---|---|---|
| `accuracy` | classes | the share of the most frequent class |
| `balanced_accuracy`: mean recall of the classes present | classes | 1 / classes present |
| `auroc`: area under the ROC curve | classes | 1/2 |
| `auprc`: average precision, of the rarer of two classes | classes | the share of the class |
| `log_loss`, `brier`, `calibration_error` | probabilities | those of the classes' shares |
| `mae` | numbers | that of the median, which has the least |
| `rmse`, `r2` | numbers | those of the mean |

With more than two classes `auroc` and `auprc` are means over the classes present, each against the
others. Everything is numpy and a function of labels and scores; nothing is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: The metrics that a plan may name, and how a reader is told of them.
CLASS_METRICS = {
    "accuracy": "test accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "log_loss": "log loss",
    "brier": "Brier score",
}
#: The best constant answer, where it is not the most frequent class.
_CONSTANTS = {"mae": "the median", "rmse": "the mean", "r2": "the mean"}
_CONSTANTS |= dict.fromkeys(("log_loss", "brier", "calibration_error"), "the shares of the classes")
REGRESSION_METRICS = {"mae": "mean absolute error", "rmse": "RMSE", "r2": "R²"}
TITLES = CLASS_METRICS | {"calibration_error": "calibration error"} | REGRESSION_METRICS
GAINS = TITLES | {"brier": "1 − Brier score", "log_loss": "e^(−log loss)"}  # of `to_gain`
GAINS |= {"mae": "1 − mean absolute error / range", "rmse": "1 − RMSE / range"}
WORST_R2 = -10.0  # of `to_gain`: a model that diverged must not outweigh the others in a mean
SHARES = ("accuracy", "balanced_accuracy")  # of rows, which are read in per cent
LESS_IS_BETTER = frozenset({"log_loss", "brier", "calibration_error", "mae", "rmse"})

MOST_OF_TWO = 0.7  # the largest share of one of two classes that counts as balanced
ERRORS = 2.0  # standard errors by which a model must be better than a constant answer
CALIBRATION_ROWS = 10  # of each class: fewer say too little of a probability
ENOUGH_ROWS = 2000  # to fit a temperature and a bias for each class
BINS = 10  # of equal counts, for calibration
POINTS = 60  # of a curve
MOST_CURVES = 6  # classes of which curves are drawn, as many as there are colours
_FLATTEST = 1e-6  # 1/T where the order of the scores tells nothing; above 0, it keeps the order


class Measured(NamedTuple):
    """A metric, that of a constant answer on the same rows, and the standard error between them."""

    value: float
    baseline: float
    error: float

    def is_better(self, metric: str) -> bool:
        """Return whether it beats the constant answer by more than two standard errors.

        A model that has learnt nothing is then called better about once in 44 times.
        """
        sign = -1 if metric in LESS_IS_BETTER else 1
        gain = sign * (self.value - self.baseline)
        return bool(gain > ERRORS * self.error + 1e-9 * abs(self.baseline))


def to_gain(metric: str, value: float, width: float = 1.0) -> float:
    """Return a metric as a number up to 1 of which more is better; the least for NaN.

    It is 0 at least, and R² −10. `width` is that of the target's range, for errors.

    >>> to_gain("auroc", 0.8), to_gain("brier", 0.25), to_gain("mae", 2.0, 8.0)
    (0.8, 0.75, 0.75)
    """
    if metric == "r2":
        return WORST_R2 if math.isnan(value) else max(WORST_R2, value)
    if metric in ("mae", "rmse"):
        return 0.0 if math.isnan(value) else max(0.0, 1 - value / width)
    gain = {"brier": 1 - value, "log_loss": math.exp(-value)}.get(metric, value)
    return 0.0 if math.isnan(gain) else gain


def restore_metric(metric: str, shortfall: float, unit: float = 1.0) -> float:
    """Return the metric of which this is missing, as `find_shortfall` computed it.

    `unit` is what 1 of a scaled target is worth: errors are then in the unit of the target.

    >>> restore_metric("auroc", 0.25), restore_metric("brier", 0.25), restore_metric("mae", 0.5, 10)
    (0.75, 0.25, 5.0)
    """
    if metric in ("mae", "rmse"):
        return shortfall * unit
    return shortfall if metric in LESS_IS_BETTER else 1 - shortfall


def choose_metric(labels: NDArray[Any], classes: int) -> str:
    """Return the metric that heads a result where the plan names none.

    It is accuracy where the classes are balanced: the most frequent has at most 70 % of the public
    rows and at most twice its equal share. Otherwise it is AUROC for two classes, and balanced
    accuracy for more.
    """
    largest = np.bincount(labels).max(initial=0) / max(1, len(labels))
    if not is_unequal(largest, classes):
        return "accuracy"
    return "auroc" if classes == 2 else "balanced_accuracy"


def is_unequal(largest: float, classes: int) -> bool:
    """Return whether the most frequent class has so large a share that accuracy misleads."""
    return largest > min(MOST_OF_TWO, 2 / classes)


def measure_classes(
    labels: NDArray[Any],
    predicted: NDArray[Any],
    scores: Floats | None = None,
    calibrated: Floats | None = None,
) -> dict[str, Measured]:
    """Return every metric of a classifier that its answers allow.

    `predicted` are classes. `scores` (n, classes) are logits, `calibrated` the same after
    calibration, from which the probabilities come; without scores there are only the metrics of
    the classes, and where scores are not finite the others are NaN.
    """
    counts = np.bincount(labels, minlength=0 if scores is None else scores.shape[1])
    present = np.flatnonzero(counts)
    shares, hit = counts / len(labels), predicted == labels
    top = int(np.argmax(counts))
    recalls = np.bincount(labels, weights=hit)[present] / counts[present]
    measured = {
        "accuracy": Measured(
            float(np.mean(hit)), float(shares[top]), _error(hit - 1.0 * (labels == top))
        ),
        "balanced_accuracy": Measured(
            float(np.mean(recalls)),
            1 / len(present),
            math.sqrt(np.sum(_binomial_error(recalls, counts[present]) ** 2)) / len(present),
        ),
    }
    if scores is None:
        return measured
    if not np.isfinite(scores).all():
        unknown = Measured(math.nan, math.nan, math.nan)
        return dict.fromkeys((*CLASS_METRICS, "calibration_error"), unknown) | measured
    measured |= _measure_order(labels, scores, counts)
    logs = _log_softmax(scores if calibrated is None else calibrated)
    losses = -logs[np.arange(len(labels)), labels]
    measured["log_loss"] = _compare_rows(losses, -np.log(shares[labels]))
    truth = np.arange(logs.shape[1]) == labels[:, None]
    # Of two classes it is the squared error of one, as is usual.
    half = 0.5 if logs.shape[1] == 2 else 1.0
    squared_errors = [half * np.sum((p - truth) ** 2, axis=1) for p in (np.exp(logs), shares)]
    measured["brier"] = _compare_rows(*squared_errors)
    table = measure_reliability(labels, np.exp(logs))
    gap = float(np.average(np.abs(table[:, 0] - table[:, 1]), weights=table[:, 2]))
    return measured | {"calibration_error": Measured(gap, 0.0, math.nan)}


def measure_regression(targets: Floats, predictions: Floats) -> dict[str, Measured]:
    """Return every metric of a regression, beside the best constant answer on the same targets."""
    deviations, errors = targets - np.mean(targets), targets - predictions
    squares = _compare_rows(errors**2, deviations**2)
    root, spread = math.sqrt(squares.value), math.sqrt(squares.baseline)
    is_constant = squares.baseline == 0  # constant targets: nothing can be explained
    return {
        "mae": _compare_rows(np.abs(errors), np.abs(targets - np.median(targets))),
        "rmse": Measured(root, spread, squares.error / max(root + spread, 1e-300)),
        "r2": Measured(
            math.nan if is_constant else 1 - squares.value / squares.baseline,
            0.0,
            math.nan if is_constant else squares.error / squares.baseline,
        ),
    }


def _compare_rows(values: Floats, constant: Floats) -> Measured:
    return Measured(float(np.mean(values)), float(np.mean(constant)), _error(values - constant))


def _error(differences: Floats) -> float:
    """Return the standard error of a mean of differences, row by row."""
    rows = len(differences)
    return float(np.std(differences, ddof=1)) / math.sqrt(rows) if rows > 1 else math.inf


def _binomial_error(share: Any, rows: Any) -> Any:
    """Return the standard error of a share; never 0, as if two more rows had gone either way."""
    share = (share * rows + 1) / (rows + 2)
    return np.sqrt(share * (1 - share) / rows)


# Metrics of the order of the scores.


def _measure_order(
    labels: NDArray[Any], scores: Floats, counts: NDArray[Any]
) -> dict[str, Measured]:
    rows, present = len(labels), [k for k, n in enumerate(counts) if 0 < n < len(labels)]
    if not present:  # all rows are of one class: there is nothing to put in order
        return dict.fromkeys(("auroc", "auprc"), Measured(math.nan, math.nan, math.nan))
    judged = present if scores.shape[1] > 2 else [find_rarer(counts)]
    ordered = order_scores(scores)
    areas, precisions, errors, binomial = [], [], [], []
    for k in judged:
        positives = int(counts[k])
        # `compute_auroc` and `compute_auprc` of one sort, with what every threshold adds.
        hits, false = _count_above(labels == k, ordered[:, k])
        more, alarms = np.diff(hits, prepend=0), np.diff(false, prepend=0)
        areas.append(float(alarms @ (hits - more / 2)) / (positives * (rows - positives)))
        precisions.append(float(more @ (hits / (hits + false))) / positives)
        # Of a ranking at random (Mann and Whitney): what it must be told apart from.
        errors.append(math.sqrt((rows + 1) / (12 * positives * (rows - positives))))
        binomial.append(float(_binomial_error(precisions[-1], positives)))
    # The classes' errors are not independent: their mean is the most that the mean's can be.
    columns = precisions, counts[judged] / rows, binomial
    return {
        "auroc": Measured(float(np.mean(areas)), 0.5, float(np.mean(errors))),
        "auprc": Measured(*(float(np.mean(column)) for column in columns)),
    }


def find_rarer(counts: Sequence[int] | NDArray[Any]) -> int:
    """Return the rarer of two classes, whose probability is asked for: 1 where they are equal.

    >>> find_rarer([3, 9]), find_rarer([5, 5]), find_rarer([5])
    (0, 1, 1)
    """
    return int(len(counts) < 2 or counts[1] <= counts[0])


def order_scores(scores: Floats) -> Floats:
    """Return scores by which the rows of each class, a column, are put in order against all others.

    They grow with the probability of the class; unlike it they do not round to 1.
    """
    return scores - scores[:, ::-1] if scores.shape[1] == 2 else _log_softmax(scores)


def compute_auroc(is_positive: Any, scores: Any, xp: Any = np) -> Any:
    """Return the share of pairs (positive, negative) in the right order; a tie counts as half.

    `xp` is numpy, or JAX's numpy inside a compiled program, here and below.
    """
    below, up_to = (xp.searchsorted(xp.sort(scores), scores, side=s) for s in ("left", "right"))
    ranks = (below + up_to + 1) / 2  # of tied scores the middle
    positives = xp.sum(is_positive, dtype=ranks.dtype)
    over = xp.sum(xp.where(is_positive, ranks, 0)) - positives * (positives + 1) / 2
    return over / (positives * (len(scores) - positives))


def compute_auprc(is_positive: Any, scores: Any, xp: Any = np) -> Any:
    """Return the average precision: the mean over positives of the precision at their scores."""
    order = xp.argsort(scores)
    below = xp.searchsorted(scores[order], scores, side="left")
    hits = xp.cumsum(is_positive[order][::-1])[::-1][below]  # positives from this score upwards
    precision = xp.where(is_positive, hits / (len(scores) - below), 0)
    return xp.sum(precision) / xp.sum(is_positive)


def _count_above(is_positive: NDArray[np.bool_], scores: Floats) -> tuple[Floats, Floats]:
    """Return true and false positives at every distinct score as the threshold, from the top."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(is_positive[order], dtype=np.float64)[last]
    return hits, last + 1 - hits


def draw_curves(labels: NDArray[Any], logits: Floats) -> dict[str, Any]:
    """Return the points of the reliability curve, and of the ROC and PR curves.

    These two are of the rarer class, `positive`: (false alarms, found) and (found, precision), at
    most 60 points with both ends. With more than two classes `by_class` has them of the rarest
    six, each against all others.
    """
    table = measure_reliability(labels, compute_probabilities(logits))
    drawn: dict[str, Any] = {"reliability": table.round(6).tolist()}
    counts, ordered = np.bincount(labels, minlength=logits.shape[1]), order_scores(logits)
    if logits.shape[1] > 2:
        rarest = [int(k) for k in np.argsort(counts, kind="stable") if 0 < counts[k] < len(labels)]
        return drawn | {"by_class": [_draw_class(labels, ordered, k) for k in rarest[:MOST_CURVES]]}
    return drawn | (_draw_class(labels, ordered, find_rarer(counts)) if counts.all() else {})


def _draw_class(labels: NDArray[Any], ordered: Floats, k: int) -> dict[str, Any]:
    hits, false = _count_above(labels == k, ordered[:, k])
    tpr, fpr = np.append(0, hits / hits[-1]), np.append(0, false / false[-1])
    return {
        "positive": k,
        "roc": _thin(np.stack([fpr, tpr], axis=1), tpr + fpr),
        "pr": _thin(np.stack([hits / hits[-1], hits / (hits + false)], axis=1), tpr[1:]),
    }


def _thin(points: Floats, along: Floats) -> list[list[float]]:
    """Return at most 60 points, evenly spaced in `along`, which never falls."""
    wanted = np.linspace(along[0], along[-1], POINTS - 2)
    indices = np.concatenate([[0], np.searchsorted(along, wanted), [len(along) - 1]])
    indices = np.minimum(indices, len(along) - 1)  # in order, so that equal ones are neighbours
    thinned: list[list[float]] = points[indices[np.diff(indices, prepend=-1) > 0]].round(6).tolist()
    return thinned


def measure_reliability(labels: NDArray[Any], probabilities: Floats) -> Floats:
    """Return mean probability, share of true answers and rows of ten bins of equal counts.

    The probability is that of the rarer of two classes; of more, of the class that is most likely.
    """
    k: Any = np.argmax(probabilities, axis=1)
    if probabilities.shape[1] == 2:
        k = find_rarer(np.bincount(labels, minlength=2))
    chosen = np.broadcast_to(k, labels.shape)
    likelihood, is_so = probabilities[np.arange(len(labels)), chosen], labels == chosen
    order = np.argsort(likelihood, kind="stable")
    starts = np.linspace(0, len(labels), BINS, endpoint=False).astype(int)
    # Equal probabilities stay in one bin.
    starts = np.unique(np.searchsorted(likelihood[order], likelihood[order][starts]))
    bins = np.split(order, starts[1:])
    return np.array([[likelihood[rows].mean(), is_so[rows].mean(), len(rows)] for rows in bins])


# Probabilities.


class Calibration(NamedTuple):
    """Scores s become logits s/T + b, fitted on public rows; they leave two classes in order."""

    temperature: float
    bias: tuple[float, ...]

    def apply(self, scores: Floats) -> Floats:
        """Return the calibrated logits."""
        return np.asarray(scores / self.temperature + np.asarray(self.bias))


def compute_probabilities(scores: Floats, calibration: Calibration | None = None) -> Floats:
    """Return softmax of the scores, after calibration."""
    return np.exp(_log_softmax(scores if calibration is None else calibration.apply(scores)))


def _log_softmax(scores: Floats) -> Floats:
    top = np.arange(len(scores)), np.argmax(scores, axis=1)
    scores = scores - scores[top][:, None]
    others = np.exp(scores)
    others[top] = 0.0  # log1p keeps the digits of what is nearly certain
    return np.asarray(scores - np.log1p(np.sum(others, axis=1, keepdims=True)))


def choose_calibration_rows(labels: NDArray[Any], classes: int) -> slice:
    """Return which rows to calibrate on: of many every k-th, if every class still has enough.

    A sweep fits a calibration for each run, and a few numbers need no more rows.
    """
    some = slice(None, None, 1 + len(labels) // ENOUGH_ROWS)
    enough = np.bincount(labels[some], minlength=classes).min() >= CALIBRATION_ROWS
    return some if enough else slice(None)


def fit_calibration(labels: NDArray[Any], scores: Floats) -> Calibration | None:
    """Return temperature and biases that make public rows most likely; None with too few of them.

    Every class needs ten rows. With two classes this is Platt scaling (2000). As in his targets,
    each of n rows counts as its class by (n + 1)/(n + 2) and as the others by the rest, so that a
    perfect separation does not give certainty. The likelihood is concave in 1/T and b.
    """
    rows, classes = scores.shape
    counts = np.bincount(labels, minlength=classes)
    if counts.min() < CALIBRATION_ROWS or not np.isfinite(scores).all():
        return None
    targets = np.full((rows, classes), 1 / (rows + 2) / (classes - 1))
    targets[np.arange(rows), labels] = (rows + 1) / (rows + 2)
    scale = max(float(np.std(scores - scores.mean(axis=1, keepdims=True))), 1e-12)
    scaled = (scores - scores.mean(axis=1, keepdims=True)) / scale
    solution = _maximise(scaled, targets, slope=None)
    if solution[0] < _FLATTEST * scale:
        solution = _maximise(scaled, targets, slope=_FLATTEST * scale)
    slope, bias = solution[0], solution[1:]
    return Calibration(float(scale / slope), tuple((bias - bias.mean()).tolist()))


def _maximise(scores: Floats, targets: Floats, slope: float | None) -> Floats:
    """Return (a, b) of the most likely logits a·s + b by Newton's method; `slope` fixes a."""
    rows, classes = scores.shape
    point = np.zeros(1 + classes)
    point[0] = 1.0 if slope is None else slope

    def compute_logs(point: Floats) -> tuple[Floats, float]:
        logs = _log_softmax(point[0] * scores + point[1:])
        return logs, -float(np.sum(targets * logs))

    logs, loss = compute_logs(point)
    for _ in range(100):
        p = np.exp(logs)
        gradient = np.append(np.sum((p - targets) * scores), np.sum(p - targets, axis=0))
        mean = np.sum(p * scores, axis=1, keepdims=True)
        cross = np.sum(p * (scores - mean), axis=0)
        hessian = np.empty((1 + classes, 1 + classes))
        hessian[0, 0] = np.sum(p * (scores - mean) ** 2)
        hessian[0, 1:] = hessian[1:, 0] = cross
        hessian[1:, 1:] = np.diag(p.sum(axis=0)) - p.T @ p
        hessian[1:, 1:] += rows / classes**2  # all biases together change nothing
        if slope is not None:
            gradient[0], hessian[0], hessian[:, 0] = 0, 0, 0
        hessian += np.diag(np.full(1 + classes, 1e-9 * rows))
        step, share = np.linalg.solve(hessian, gradient), 1.0
        if np.abs(step).max() < 1e-6:
            break
        tried = compute_logs(point - step)
        while share > 1e-6 and tried[1] > loss:
            share /= 2
            tried = compute_logs(point - share * step)
        if share <= 1e-6 or np.abs(share * step).max() < 1e-6:
            break
        point, (logs, loss) = point - share * step, tried
    return point


# What heads a result.


def describe_metrics(metric: str, values: Mapping[str, Measured], **about: Any) -> dict[str, Any]:
    """Return `headline` and `metrics` of a record; `about` is that of `describe_headline`."""
    chosen = values[metric]
    headline = {"metric": metric, **chosen._asdict(), "is_better": chosen.is_better(metric)}
    headline["text"] = describe_headline(metric, chosen, **about)
    found = {name: measured._asdict() for name, measured in values.items()}
    return {"headline": headline, "metrics": found}


def describe_headline(
    metric: str, measured: Measured, *, rows: int, most_frequent: str = "", only: str | None = None
) -> str:
    """Return the words that head a result; `only` is the class that every row was given, if any."""
    numbers = [format_metric(metric, value) for value in measured[:2]]
    if not math.isfinite(measured.value):
        return f"no {TITLES[metric]}: scores are not finite, or the {rows:,} test rows all alike"
    words = f"{TITLES[metric]} {numbers[0]} ({describe_constant(metric)}: {numbers[1]})"
    if measured.is_better(metric):
        always = f", but it says '{only}' to every test row: choose a --threshold"
        return words + (always if only is not None else "")
    saying = _CONSTANTS.get(metric, f"'{most_frequent}'")
    seems = Measured(measured.value, measured.baseline, 0.0).is_better(metric)
    noise = f", within the noise of {rows:,} test rows" if seems else ""
    return f"no better than always saying {saying}{noise}: {words}"


def describe_constant(metric: str) -> str:
    """Return the words for the constant answer that the baseline is of."""
    return f"always {_CONSTANTS.get(metric, 'the most frequent class')}"


def format_metric(metric: str, value: float) -> str:
    """Return a metric as it is read: shares of rows in per cent, others with three decimals.

    >>> format_metric("accuracy", 0.5), format_metric("auroc", 0.5), format_metric("mae", 1234.56)
    ('50.0%', '0.500', '1235')
    """
    if not math.isfinite(value):
        return "–"
    if metric in SHARES:
        return f"{value:.1%}"
    return f"{value:.4g}" if metric in ("mae", "rmse") else f"{value:.3f}"
