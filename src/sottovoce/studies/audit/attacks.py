"""The attacks of a curious server: it reconstructs samples, and tells members from others.

docs/audit.md explains them and has what they find.

`invert_first_layer`   with h = relu(x w1 + b1) a sample adds x ⊗ e to the gradient of w1 and e to
                       that of b1: their quotient is the sample, however it was clipped
`name_candidates`      the candidate with the largest ⟨upload, g⟩ − |g|²/2: no attack on a client
                       with one sample and an honest model is better
`match_gradients`      looks with Adam for samples that minimise 1 − cos(Σ clip(g(x, y)), upload)
                       (Zhu et al. 2019, Geiping et al. 2020; the code is our own)
`set_trap`             weights whose hidden units look at the same brightness with rising
                       thresholds: a sample alone between two of them is read (Fowl et al. 2022)
`attack_models`,       was this record in the training data? Two normal distributions of a statistic
`attack_uploads`       over shadow runs with and without it, and their likelihood ratio (LiRA:
                       Carlini et al. 2022)

Distributions and thresholds are fitted on the even runs alone; the odd runs are judged. A half with
a record and a half without it differ in one replaced record, so that every rate obeys
TPR ≤ Φ(Φ⁻¹(FPR) + μ), with μ of the run's whole budget. To tell a member i from another record j of
the same run is a test between two halves in which i and j are swapped: the area under a run's curve
is Φ(μ/2) at most on average. Records of one run share its noise, and only runs are independent.
Therefore a ceiling is contradicted by a mean over runs (`messages.bound_mean`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.client import release
from sottovoce.client.release import Parameters
from sottovoce.data.federated import Given
from sottovoce.models.base import Form, Params, flatten_parameters, gradient_matrix, sample_losses
from sottovoce.models.metrics import compute_auroc
from sottovoce.models.mlp import Mlp
from sottovoce.models.person import split_persons
from sottovoce.plan import Plan
from sottovoce.privacy.gaussian import cdf
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.schedules.aggregate import average
from sottovoce.server.federation import build
from sottovoce.simulation.simulate import simulate_each
from sottovoce.studies.audit.messages import (
    WRONG_PER_COMPARISON,
    Level,
    Rates,
    bound_mean,
    choose_threshold,
    compute_mu,
    flatten,
    price_run,
)

Floats = NDArray[np.float64]
Rows = NDArray[np.float64]
Labels = NDArray[Any]  # classes, or numbers in [−1, 1]; 0 for persons
Members = NDArray[np.bool_]  # [runs, rows]: which rows each run had
Progress = Callable[[int, int], None]

SEED = 0  # of all that an audit draws; the noise that protects a client has none
SILENT = 1e6  # the ε of "no noise" in the simulator: σ is a thousandth of Δ
JUDGED_AT = (0.1, 0.01, 0.001)  # false alarms at which an attacker is judged
STARTS = 4  # of the search for samples
EXACT = 1e-5  # mean squared error below which a sample counts as stolen
_QUIET = 1e-3  # weight of the last layer: scores near 0 make all classes almost equally likely
_C1, _C2 = 0.01**2, 0.03**2  # of SSIM, for pixels from 0 to 1
_SHRUNK = 8  # the weight of the common variance, in runs


@dataclass(frozen=True)
class Victim:
    """A client that the server attacks, with the rows that it holds."""

    form: Form
    recipe: Recipe
    x: Rows
    y: Labels

    def select(self, rows: ArrayLike) -> Victim:
        """Return a client that holds only these rows."""
        return replace(self, x=self.x[np.asarray(rows)], y=self.y[np.asarray(rows)])

    def send_uploads(
        self, level: Level, models: Iterator[Parameters], count: int, honest: int = 1
    ) -> Iterator[Parameters]:
        """Yield `count` uploads, one for each model that the server sends.

        With noise they are made by `client.release` and together spend all of ε, in sums with the
        noise of `honest` clients. Without noise they are `release.step`, which no client may send.
        """
        if level.epsilon is None:
            for model in itertools.islice(models, count):
                yield release.step(self.form, model, self.x, self.y, self.recipe)
            return
        budget = level.epsilon, level.delta, level.calibration
        prices = price_run(*budget, count, self.recipe.unit, len(self.y), honest=honest)
        for t, (paid, model) in enumerate(zip(prices, models, strict=False)):
            sent = release.release(
                self.form, model, self.x, self.y, recipe=self.recipe, paid=paid,
                head={"kind": "upload", "t": t},
            )  # fmt: skip
            yield {name: leaf.astype(np.float64) for name, leaf in sent.params.items()}

    def read_gradient(self, level: Level, model: Parameters) -> Parameters:
        """Return Σ clip(g) + noise, as the server computes it from an upload worth all of ε."""
        upload = next(self.send_uploads(level, iter([model]), 1))
        scale = len(self.y) / self.recipe.learning_rate
        return {name: scale * (np.asarray(model[name]) - upload[name]) for name in upload}

    def read_each_alone(self, level: Level, model: Parameters) -> Iterator[Parameters]:
        """Yield for each row the gradient of a client that holds nothing else."""
        return (self.select([i]).read_gradient(level, model) for i in range(len(self.y)))

    def clip_gradients(self, model: Parameters) -> Floats:
        """Return each record's gradient, clipped to the norm C, as an array [rows, parameters]."""
        matrix = gradient_matrix(self.form, model, self.x, self.y)
        norms = np.linalg.norm(matrix, axis=1, keepdims=True)
        matrix /= np.maximum(1.0, norms / self.recipe.clip)
        return np.asarray(matrix)


def name_candidates(pool: Victim, model: Parameters, level: Level) -> Reconstructions:
    """Name the likeliest candidate for each sample of the pool, from one upload of it alone."""
    candidates = pool.clip_gradients(model)
    lengths = np.sum(candidates**2, axis=1) / 2
    gradients = pool.read_each_alone(level, model)
    named = np.array([np.argmax(candidates @ flatten(g) - lengths) for g in gradients])
    return judge_each(pool, level, pool.x[named], named, pool.y[named])


def guess_labels(gradient: Parameters, count: int) -> NDArray[np.int64]:
    """Guess `count` labels from the gradient of the last bias.

    The most negative entry gives a label; what one sample lowers its label's entry by, estimated as
    half of the lowest, is then added there; and so on.
    """
    pulled, labels = np.array(gradient["b2"], dtype=np.float64), []
    share = max(-pulled.min() / 2, 1e-12)
    for _ in range(count):
        labels.append(int(np.argmin(pulled)))
        pulled[labels[-1]] += share
    return np.array(sorted(labels))


def _compute_misfit(
    model: Mlp, params: Params, goal: Params, clip: float, x: jax.Array, y: jax.Array
) -> Any:
    def clip_gradient(row: jax.Array, label: jax.Array) -> Params:
        gradient = jax.grad(lambda p: model.loss(p, row[None], label[None])[0])(params)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)) + 1e-20)
        return jax.tree.map(lambda leaf: leaf / jnp.maximum(1.0, norm / clip), gradient)

    total = jax.tree.map(lambda leaf: leaf.sum(axis=0), jax.vmap(clip_gradient)(x, y))
    pairs = list(zip(jax.tree.leaves(total), jax.tree.leaves(goal), strict=True))
    inner = sum(jnp.sum(a * b) for a, b in pairs)
    sizes = [jnp.sqrt(sum(jnp.sum(pair[i] ** 2) for pair in pairs) + 1e-20) for i in (0, 1)]
    return 1 - inner / (sizes[0] * sizes[1])


@partial(jax.jit, static_argnums=(0, 1))
def _minimise_misfit(
    model: Mlp, steps: int, params: Params, goal: Params, y: jax.Array, clip: float, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    slope = jax.value_and_grad(
        lambda x: _compute_misfit(model, params, goal, clip, jax.nn.sigmoid(x), y)
    )

    def descend(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = jax.random.normal(key, (y.shape[0], model.features))

        def step(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x, mean, square, _ = state
            value, g = slope(x)
            mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
            t = i + 1.0
            rate = 0.1 * 0.5 * (1 + jnp.cos(jnp.pi * i / steps))
            move = (mean / (1 - 0.9**t)) / (jnp.sqrt(square / (1 - 0.999**t)) + 1e-12)
            return x - rate * move, mean, square, value

        zero = jnp.zeros_like(start)
        x, _, _, value = jax.lax.fori_loop(0, steps, step, (start, zero, zero, jnp.inf))
        return jax.nn.sigmoid(x), value

    return jax.vmap(descend)(keys)


def match_gradients(
    pool: Victim, rows: NDArray[np.int64], params: Parameters, level: Level, steps: int
) -> Reconstructions:
    """Reconstruct the samples `rows` of the pool from one upload by matching gradients.

    An original is recognised if one of the pictures found resembles it more than any other sample
    of the pool. Only the first of `rows` is judged. Given the others it is equally likely to be any
    of the rest of the pool, and a server that names k of them is right with probability
    Φ(Φ⁻¹(k/rest) + μ) at most.
    """
    victim, count, form = pool.select(rows), len(rows), pool.form
    gradient = victim.read_gradient(level, params)
    model = Mlp(form.features, int(form.options["hidden"]), form.classes)
    guesses = guess_labels(gradient, count)
    trees = [{name: jnp.asarray(leaf, jnp.float32) for name, leaf in tree.items()}
             for tree in (params, gradient)]  # fmt: skip
    keys = jax.random.split(jax.random.key(SEED), STARTS)
    labels, clip = jnp.asarray(guesses), pool.recipe.clip
    starts, misfit = _minimise_misfit(model, steps, *trees, labels, clip, keys)
    found = np.asarray(starts[int(np.argmin(misfit))], dtype=np.float64)
    nearest = find_nearest(found, pool.x)
    shown = found[find_nearest(victim.x, found)]
    left, hits = list(guesses), np.zeros(count, dtype=bool)
    for i, label in enumerate(victim.y):
        if int(label) in left:
            left.remove(int(label))
            hits[i] = True
    recognised, judged = np.isin(rows, nearest), np.arange(count) == 0
    rest = len(pool.y) - count + 1
    return Reconstructions(level, victim.x, victim.y, shown, recognised, hits, judged, rest, count)


def has_pixels(rows: Rows) -> bool:
    """Return whether all values are from 0 to 1, as the search for pictures assumes."""
    return bool(np.min(rows) >= 0 and np.max(rows) <= 1)


@dataclass(frozen=True, eq=False)
class TrapResult:
    """The pictures in the bins, the client's sample that each resembles most, and what was stolen.

    `rates` counts a record as found if a picture equals it up to EXACT: the client's records as
    positives, records that the client does not have as negatives. All come from one upload and
    share its noise, so the rates are shown and decide nothing.
    """

    level: Level
    found: Floats
    nearest: NDArray[np.int64]
    rates: Rates


def make_trap_model(form: Form, public: Rows, samples: int) -> Parameters:
    """Make a dishonest server's weights from public samples and the client's number of samples.

    A bin is so wide that about one of the client's samples falls into it.
    """
    look = np.linspace(0.8, 1.2, form.features) / form.features
    hidden = int(form.options["hidden"])
    width = min(1 / samples, 1 / (hidden + 1))
    at = np.quantile(public @ look, 1 - width * np.arange(hidden, 0, -1))
    pull = _QUIET * np.cos(np.arange(form.classes))  # differs between any two classes
    return {
        "b1": -at,
        "b2": np.zeros(form.classes),
        "w1": np.tile(look[:, None], (1, hidden)),
        "w2": np.tile(pull, (hidden, 1)),
    }


def read_bins(gradient: Parameters) -> Floats:
    """Return one picture for each bin: the quotient of the differences of adjacent units."""
    w = np.diff(gradient["w1"], axis=1, append=0.0)
    b = np.diff(gradient["b1"], append=0.0)
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.asarray((w / b).T), posinf=0.0, neginf=0.0)


def set_trap(victim: Victim, public: Rows, level: Level) -> TrapResult:
    """Send trap weights to the victim, which spends its whole budget on one upload."""
    gradient = victim.read_gradient(level, make_trap_model(victim.form, public, len(victim.y)))
    found = read_bins(gradient)
    hits, alarms = _count_stolen(found, victim.x), _count_stolen(found, public)
    rates = Rates(hits, len(victim.y), alarms, len(public))
    return TrapResult(level, found, find_nearest(found, victim.x), rates)


def _count_stolen(found: Floats, rows: Rows) -> int:
    nearest = find_nearest(found, rows)
    return len({int(i) for i, x in zip(nearest, found, strict=True) if mse(x, rows[i]) < EXACT})


def mse(picture: ArrayLike, other: ArrayLike) -> float:
    """Return the mean squared error."""
    return float(np.mean((_to_array(picture) - _to_array(other)) ** 2))


def psnr(picture: ArrayLike, other: ArrayLike) -> float:
    """Return the peak signal-to-noise ratio in decibels, for pixels from 0 to 1; at most 200."""
    return float(-10 * np.log10(max(mse(picture, other), 1e-20)))


def ssim(picture: ArrayLike, other: ArrayLike) -> float:
    """Return the structural similarity (one window over the picture), for pixels from 0 to 1."""
    x, y = _to_array(picture).ravel(), _to_array(other).ravel()
    joint = np.cov(x, y, bias=True)
    top = (2 * x.mean() * y.mean() + _C1) * (2 * joint[0, 1] + _C2)
    bottom = (x.mean() ** 2 + y.mean() ** 2 + _C1) * (joint[0, 0] + joint[1, 1] + _C2)
    return float(top / bottom)


def find_nearest(found: ArrayLike, candidates: ArrayLike) -> NDArray[np.int64]:
    """Return for every reconstruction the index of the candidate with the highest correlation."""
    return np.asarray(np.argmax(_standardise(found) @ _standardise(candidates).T, axis=1))


def _standardise(rows: ArrayLike) -> Floats:
    values = _to_array(rows)
    values = values - values.mean(axis=1, keepdims=True)
    length = np.linalg.norm(values, axis=1, keepdims=True)
    return np.asarray(values / np.where(length > 0, length, 1.0))


def _to_array(values: ArrayLike) -> Floats:
    return np.nan_to_num(np.asarray(values, dtype=np.float64))


@dataclass(frozen=True, eq=False)
class Reconstructions:
    """Samples, what an attack reconstructed, and which were recognised among candidates."""

    level: Level
    originals: Floats
    truth: Labels
    found: Floats
    recognised: NDArray[np.bool_]  # whether the right candidate was named
    labels: NDArray[np.bool_]  # whether the right label was found
    judged: NDArray[np.bool_]  # one of each upload: the others share its noise and decide nothing
    candidates: int
    tries: int = 1  # how many candidates may be named for a sample

    @property
    def error(self) -> float:
        """The mean squared error over all samples."""
        return mse(self.originals, self.found)

    @property
    def psnr(self) -> float:
        """The median over pictures, in decibels."""
        pairs = zip(self.originals, self.found, strict=True)
        return float(np.median([psnr(original, picture) for original, picture in pairs]))

    @property
    def ssim(self) -> float:
        """The mean over pictures."""
        pairs = zip(self.originals, self.found, strict=True)
        return float(np.mean([ssim(original, picture) for original, picture in pairs]))

    @property
    def identified(self) -> float:
        """The share of samples that were recognised."""
        return float(np.mean(self.recognised))


def invert_gradient(gradient: Parameters) -> Floats:
    """Return x = ∂w1[:, j] / ∂b1[j] at the unit j with the largest gradient of the bias."""
    unit = int(np.argmax(np.abs(gradient["b1"])))
    bottom = float(gradient["b1"][unit])
    return np.asarray(gradient["w1"][:, unit] / (bottom if bottom else 1.0))


def invert_first_layer(pool: Victim, model: Parameters, level: Level) -> Reconstructions:
    """Reconstruct each sample of the pool from one upload of it alone; all are candidates."""
    gradients = pool.read_each_alone(level, model)
    pairs = [(invert_gradient(g), np.argmin(g["b2"])) for g in gradients]
    pictures, labels = (np.array(values) for values in zip(*pairs, strict=True))
    return judge_each(pool, level, pictures, find_nearest(pictures, pool.x), labels)


def judge_each(
    pool: Victim, level: Level, found: Floats, named: NDArray[np.int64], labels: Labels
) -> Reconstructions:
    """Compare what was found of each sample of the pool, from one upload each, with the sample."""
    count = len(pool.y)
    recognised, judged = named == np.arange(count), np.ones(count, dtype=bool)
    right = np.asarray(labels == pool.y)
    return Reconstructions(level, pool.x, pool.y, found, recognised, right, judged, count)


def choose_one_per_class(y: Labels, classes: int) -> list[int]:
    """Return the index of the first sample of each class, for a drawing."""
    return [int(np.flatnonzero(y == c)[0]) for c in range(classes) if np.any(y == c)]


@dataclass(frozen=True, eq=False)
class Attack:
    """The scores of every record in every run (high: "it was there"), and which were there."""

    name: str
    level: Level
    scores: Floats
    members: Members

    @property
    def areas(self) -> Floats:
        """The area under the ROC curve of each judged run."""
        runs = zip(self.scores[1::2], self.members[1::2], strict=True)
        return np.array([compute_auroc(there, scores) for scores, there in runs])

    @property
    def auc(self) -> float:
        """The mean area: how often a member scores above another record of its run."""
        return float(self.areas.mean())

    def _count(self, fpr: float) -> NDArray[np.int64]:
        """Count hits, members, alarms and others of each odd run; even ones choose a threshold."""
        threshold = choose_threshold(self.scores[::2][~self.members[::2]], fpr)
        over, there = self.scores[1::2] > threshold, self.members[1::2]
        return np.asarray(np.sum([over & there, there, over & ~there, ~there], axis=2))

    def count_rates(self, fpr: float) -> Rates:
        """Count hits and alarms in the judged runs, for the table only: records are dependent."""
        return Rates(*self._count(fpr).sum(axis=1).tolist())

    def prove_mu(self, fpr: float, wrong: float = WRONG_PER_COMPARISON) -> float:
        """Return the μ that the shares of hits and alarms in each run prove."""
        found, members, false, others = self._count(fpr)
        hits, alarms = found / members, false / others
        least, most = bound_mean(hits, 1 - wrong)[0], bound_mean(alarms, 1 - wrong)[1]
        return max(0.0, compute_mu(least, most))

    def compute_curve(self) -> tuple[Floats, Floats]:
        """Return FPR and TPR at every threshold, over all records of the judged runs."""
        order = np.argsort(-self.scores[1::2], axis=None)
        there = self.members[1::2].ravel()[order]
        alarms, hits = np.cumsum(~there), np.cumsum(there)
        return alarms / float(alarms[-1]), hits / float(hits[-1])

    def exceeds(self, fpr: float) -> bool:
        """Return whether the rates contradict their ceiling.

        Chance alone does so with probability `WRONG_PER_COMPARISON` at most.
        """
        return self.level.epsilon is not None and self.prove_mu(fpr) > self.level.mu

    @property
    def area_exceeds(self) -> bool:
        """Whether the mean area contradicts its ceiling, with the same probability of error."""
        return bound_mean(self.areas, 1 - 2 * WRONG_PER_COMPARISON)[0] > self.auc_ceiling

    @property
    def auc_ceiling(self) -> float:
        """Φ(μ/2), the largest mean area."""
        return 1.0 if self.level.epsilon is None else float(cdf(self.level.mu / 2))


def compute_ratios(statistic: Floats, members: Members) -> Floats:
    """Return ln of the likelihood ratio of each statistic, by distributions of the even runs.

    An even run is left out when it is scored itself. A record that all even runs had, or none,
    gets 0.
    """
    taught = np.arange(len(statistic)) % 2 == 0
    middle = statistic[taught].mean(axis=0)
    values = statistic - middle  # centred, so that squares lose no digits
    smallest = 1e-12 * (1 + np.mean(statistic[taught] ** 2, axis=0))

    def fit(runs: Members) -> tuple[Floats, Floats, Floats]:
        teaching = runs & taught[:, None]
        count = teaching.sum(axis=0) - teaching
        total = (values * teaching).sum(axis=0) - values * teaching
        squares = (values**2 * teaching).sum(axis=0) - values**2 * teaching
        mean = total / np.maximum(count, 1)
        return count, mean, np.maximum(squares - count * mean**2, 0.0)

    fits = [fit(members), fit(~members)]
    (had, _, spread), (lacked, _, other_spread) = fits
    common = (spread + other_spread) / np.maximum(had + lacked - 2, 1)
    logs = []
    for count, mean, squares in fits:
        # Few runs give a poor variance, so it is shrunk towards that of both groups.
        variance = np.maximum((squares + _SHRUNK * common) / (count + _SHRUNK), smallest)
        logs.append(-((values - mean) ** 2) / (2 * variance) - np.log(variance) / 2)
    known = (had > 0) & (lacked > 0)
    return np.where(known, logs[0] - logs[1], 0.0)


def attack_models(
    pool: Victim, level: Level, *, runs: int, rounds: int, progress: Progress
) -> list[Attack]:
    """Attack the final models of simulated runs, by a loss threshold and by LiRA."""
    form, recipe, x, y = pool.form, pool.recipe, pool.x, pool.y
    half, rows, ids = len(y) // 2, (x, y), np.arange(len(y))
    steering = (len(y) - half) // 2
    data: dict[str, Any] = {"name": "arrays", "clients": 1, "samples": half}
    data |= {"validation": steering, "test": len(y) - half - steering}
    model = {"name": "mlp", "hidden": form.options["hidden"]}
    number = form.target is not None
    if form.rows_per_person:
        cells, labels, weight = split_persons(x, form.rows_per_person, number)
        ids = np.repeat(ids, form.rows_per_person)[weight > 0]
        rows = cells[weight > 0], labels[weight > 0]
        data["rows_per_person"] = form.rows_per_person
    if form.target is not None:  # labels are scaled already
        model, data = {**model, "loss": form.target.loss}, {**data, "target": [-1, 1]}
    budget = {"epsilon": level.epsilon or SILENT, "delta": level.delta}
    plan = Plan(
        data=data,
        model=model,
        local={"learning_rate": recipe.learning_rate, "clip": recipe.clip, "unit": recipe.unit},
        privacy=budget | {"calibration": level.calibration},
        rounds={"schedule": "fixed", "rounds": rounds},
    )
    pair = rows[0].astype(np.float32), rows[1].astype(np.float32 if number else np.int32)
    given = Given(pair, person=ids if form.rows_per_person else None)
    losses, members = np.empty((runs, len(y))), np.zeros((runs, len(y)), dtype=bool)
    shadows = simulate_each([plan], seeds=range(runs), given=given, together=True)
    for done, (seed, trained) in enumerate(shadows, start=1):
        split = build(plan, seed=seed, data=given).held.split
        assert split is not None, "arrays are split among clients"
        members[seed, ids[np.concatenate(split.clients)]] = True
        leaves = flatten_parameters(trained.params).items()
        params = {name: np.asarray(leaf, np.float64) for name, leaf in leaves}
        losses[seed] = sample_losses(form, params, x, y)
        progress(done, runs)
    confidence = -np.log(np.expm1(np.clip(losses, 1e-8, 50.0)))  # ln p/(1 − p)
    return [
        Attack("loss threshold, final model", level, -losses, members),
        Attack("LiRA, final model", level, compute_ratios(confidence, members), members),
    ]


def attack_uploads(
    pool: Victim, level: Level, start: Parameters, *, runs: int, rounds: int, progress: Progress,
    clients: int = 1, honest: int = 1,
) -> list[Attack]:  # fmt: skip
    """Attack the uploads of a client, the first one and all of a run; each is the next model.

    The first upload is compared with the ceiling of the whole run, although its own is lower. With
    several clients the attacker sees the models alone, which are the means of their uploads.
    """
    rng, size = np.random.default_rng(SEED), len(pool.y)
    half = size // 2
    members = np.zeros((runs, size), dtype=bool)
    projections = np.zeros((rounds, runs, size))
    for run in range(runs):
        rows = rng.permutation(size)[:half]
        members[run, rows] = True
        models, groups = [start], np.array_split(rows, clients)
        uploads = [
            pool.select(group).send_uploads(
                level, (models[-1] for _ in range(rounds)), rounds, honest
            )
            for group in groups
        ]
        weight = np.array([len(group) for group in groups]) / half
        for t, sent in enumerate(zip(*uploads, strict=True)):
            upload = average(sent, weight)
            # The inner product of the upload's step with each record's clipped gradient.
            step = flatten(models[-1]) - flatten(upload)
            projections[t, run] = pool.clip_gradients(models[-1]) @ step
            models.append(upload)
        progress(run + 1, runs)
    first, every = projections[0], projections.sum(axis=0)
    if clients > 1:
        watched = replace(level, share=honest / clients)
        return [Attack("LiRA, all models", watched, compute_ratios(every, members), members)]
    return [
        Attack("LiRA, one upload", level, compute_ratios(first, members), members),
        Attack("LiRA, whole transcript", level, compute_ratios(every, members), members),
    ]
