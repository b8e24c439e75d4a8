"""Attacks that read samples and labels off the gradient of one upload.

With h = relu(x w1 + b1) every sample adds x ⊗ e to the gradient of w1 and e to that of b1, so that
for a single sample column j of the one divided by number j of the other *is* the sample, whatever
it was clipped to. With several samples the quotient is a weighted mean of those that light unit j.
The bias of the last layer gets p − onehot(y): its most negative number is at the label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.client.release import Parameters
from sottovoce.errors import InputError
from sottovoce.models.base import Form, Params, gradient_matrix
from sottovoce.models.mlp import Mlp
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.studies.audit.ceiling import Rates
from sottovoce.studies.audit.target import Labels, Level, Rows, Victim

# The likeliest candidate: the best guess of a server that knows all candidates.
#
# Before noise a client with one sample uploads that sample's clipped gradient g, and the server
# knows the g of every candidate; noise is Gaussian, so that the likeliest candidate is the one with
# the largest ⟨received, g⟩ − |g|²/2. No attacker is right more often where all are equally likely,
# at a model that an honest server sends. Other samples of the client change nothing if the server
# knows them: it takes their gradients out of the sum, and the noise is the same.


Floats = NDArray[np.float64]


def clip_gradients(form: Form, model: Parameters, x: Rows, y: Labels, clip: float) -> Floats:
    """Return [rows, parameters]: the gradient of each record, clipped to the norm C.

    >>> form = Form("svm", (1,), 2, {"kappa": 0.0})
    >>> start = {"b": np.zeros(()), "w": np.zeros(1)}
    >>> x, y = np.full((1, 1), 3.0), np.ones(1, np.int64)
    >>> clip_gradients(form, start, x, y, 1.0).round(3).tolist()
    [[-0.316, -0.949]]
    """
    rows = gradient_matrix(form, model, x, y)
    rows /= np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / clip)
    return np.asarray(rows)


def name_labels(
    form: Form, recipe: Recipe, model: Parameters, x: Rows, y: Labels, level: Level
) -> Reconstructions:
    """Name the likeliest candidate for every sample.

    Each sample is the only one of its client, which spends its whole budget on one upload.
    """
    candidates = clip_gradients(form, model, x, y, recipe.clip)
    lengths = np.sum(candidates**2, axis=1) / 2
    named = np.empty(len(y), dtype=np.int64)
    for i in range(len(y)):
        received = Victim(form, recipe, x[i : i + 1], y[i : i + 1]).gradient(level, model)
        flat = np.concatenate([received[name].ravel() for name in sorted(received)])
        named[i] = np.argmax(candidates @ flat - lengths)
    right, judged = named == np.arange(len(y)), np.ones(len(y), dtype=bool)
    return Reconstructions(level, x, y, x[named], right, y[named] == y, judged, len(y))


# Gradient matching: several samples whose gradients add up to the one received.
#
# The server looks for x that minimise 1 − cos(Σ clip(g(x, y)), received) with Adam from several
# random starts, all at once (Zhu et al. 2019, Geiping et al. 2020; the code is our own). Labels are
# read off the last bias first. Without noise a handful of small pictures is found; the more noise,
# the less.


def guess_labels(gradient: Parameters, count: int, shares: Floats) -> NDArray[np.int64]:
    """Guess labels greedily: each takes its share out of where the last bias was pulled up.

    >>> guess_labels({"b2": np.array([-1.9, 0.6, -0.6])}, 3, np.full(3, 0.95)).tolist()
    [0, 0, 2]
    """
    pulled, found = np.array(gradient["b2"], dtype=np.float64), []
    for _ in range(count):
        found.append(int(np.argmin(pulled)))
        pulled[found[-1]] += shares[found[-1]]
    return np.array(sorted(found))


def search_samples(
    model: Mlp,
    params: Parameters,
    received: Parameters,
    y: NDArray[np.int64],
    clip: float,
    *,
    seed: int,
    steps: int,
    starts: int = 4,
) -> Floats:
    """Return the samples with these labels whose clipped gradients best fit the one received."""
    tree = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in params.items()}
    goal = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in received.items()}
    keys = jax.random.split(jax.random.key(seed), starts)
    found, misfit = _search(model, steps, tree, goal, jnp.asarray(y), clip, keys)
    return np.asarray(found[int(np.argmin(np.asarray(misfit)))], dtype=np.float64)


def _misfit(
    model: Mlp, params: Params, goal: Params, clip: float, x: jax.Array, y: jax.Array
) -> Any:
    def clip_one(row: jax.Array, label: jax.Array) -> Params:
        gradient = jax.grad(lambda p: model.loss(p, row[None], label[None])[0])(params)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)) + 1e-20)
        return jax.tree.map(lambda leaf: leaf / jnp.maximum(1.0, norm / clip), gradient)

    total = jax.tree.map(lambda leaf: leaf.sum(axis=0), jax.vmap(clip_one)(x, y))
    pairs = list(zip(jax.tree.leaves(total), jax.tree.leaves(goal), strict=True))
    inner = sum(jnp.sum(a * b) for a, b in pairs)
    sizes = [jnp.sqrt(sum(jnp.sum(pair[i] ** 2) for pair in pairs) + 1e-20) for i in (0, 1)]
    return 1 - inner / (sizes[0] * sizes[1])


@partial(jax.jit, static_argnums=(0, 1))
def _search(
    model: Mlp,
    steps: int,
    params: Params,
    goal: Params,
    y: jax.Array,
    clip: float,
    keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    slope = jax.value_and_grad(lambda x: _misfit(model, params, goal, clip, jax.nn.sigmoid(x), y))

    def search_from(key: jax.Array) -> tuple[jax.Array, jax.Array]:
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

    return jax.vmap(search_from)(keys)


def match_gradients(
    level: Level, recipe: Recipe, form: Form, params: Parameters, pool: Rows, y: Labels,
    members: NDArray[np.int64], *, seed: int, steps: int,
) -> Reconstructions:  # fmt: skip
    """Reconstruct the samples `members` of the pool from one upload.

    An original is recognised if one of the finds resembles it more than any other of the pool. The
    first member is judged. Given the others it is equally likely to be any of the rest of the
    pool, and a server that names k is right in Φ(Φ⁻¹(k/rest) + μ) at most.
    """
    victim, count = Victim(form, recipe, pool[members], y[members]), len(members)
    received = victim.gradient(level, params)
    model = Mlp(form.features, int(form.options["hidden"]), form.classes)
    guessed = guess_labels(received, count, np.full(form.classes, _estimate_pull(received)))
    found = search_samples(
        model, params, received, guessed, victim.recipe.clip, seed=seed, steps=steps
    )
    named = find_most_alike(found, pool)
    shown = found[find_most_alike(victim.x, found)]
    left, hits = list(guessed), np.zeros(count, dtype=bool)
    for i, label in enumerate(victim.y):
        if int(label) in left:
            left.remove(int(label))
            hits[i] = True
    names, judged = np.isin(members, named), np.arange(count) == 0
    rest = len(pool) - count + 1
    return Reconstructions(level, victim.x, victim.y, shown, names, hits, judged, rest, count)


def join_reconstructions(found: Sequence[Reconstructions]) -> Reconstructions:
    """Join the reconstructions of several clients."""
    names = ("originals", "truth", "found", "names", "labels", "judged")
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(one, name) for one in found]) for name in names
    }
    return replace(found[0], **joined)


def _estimate_pull(received: Parameters) -> float:
    """Estimate how far one label pulls the last bias, of which all moves sum to zero."""
    pulled = np.asarray(received["b2"])
    return float(max(-pulled.min() / 2, 1e-12))


def has_pixel_range(rows: Rows) -> bool:
    """Return whether values are pixels from 0 to 1, as the search assumes.

    >>> has_pixel_range(np.array([[0.0, 1.0]])), has_pixel_range(np.array([[-3.0, 1.0]]))
    (True, False)
    """
    return bool(np.min(rows) >= 0 and np.max(rows) <= 1)


# Trap weights: a dishonest server isolates single samples in an honest client's sum.
#
# All hidden units look at the same brightness m·x, with thresholds that rise from unit to unit. A
# sample between the thresholds of units j and j + 1 lights unit j and not unit j + 1: the
# difference of their gradients holds the samples of that bin alone, and where there is one, its
# quotient is that sample exactly, however many others the client has (Fowl et al. 2022). Clipping
# scales a sample's gradient as a whole, and so does not help; noise does. The server needs to know
# no more than how bright samples usually are, for which it has its public validation set.


EXACT = 1e-5  # mean squared error below which a sample counts as stolen
_QUIET = 1e-3  # weight of the last layer: scores stay near 0, and so every class near likely


@dataclass(frozen=True, eq=False)
class Loot:
    """Pictures that the bins gave, the sample that each resembles most, and how many are exact.

    `rates` count a record as found if a picture equals it to EXACT: the client's own records, and
    as negatives records that the client does not have. They are all of one upload and so share its
    noise: the rates are shown, and decide nothing.
    """

    level: Level
    found: Floats
    nearest: NDArray[np.int64]
    rates: Rates


def build_trap(form: Form, public: Rows, samples: int) -> Parameters:
    """Build the weights that a dishonest server sends, from public samples and the client's n.

    Bins are as wide as one sample in n: each of the brightest has its chance to be alone.

    >>> rows = np.random.default_rng(0).random((99, 2))
    >>> trap = build_trap(Form("mlp", (2,), 2, {"hidden": 3}), rows, 9)
    >>> bool(np.all(np.diff(trap["b1"]) < 0))
    True
    """
    if form.name != "mlp":
        raise InputError.of("model", form.name, "mlp", "the trap is set in the first dense layer")
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
    """Return a picture for each bin: the quotient of the differences of adjacent units."""
    w = np.diff(gradient["w1"], axis=1, append=0.0)
    b = np.diff(gradient["b1"], append=0.0)
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.asarray((w / b).T), posinf=0.0, neginf=0.0)


def set_trap(victim: Victim, public: Rows, level: Level) -> Loot:
    """Send the trap to a victim, which spends its whole budget on one upload."""
    received = victim.gradient(level, build_trap(victim.form, public, len(victim.y)))
    found = read_bins(received)
    mine, others = _count_stolen(found, victim.x), _count_stolen(found, public)
    rates = Rates(mine, len(victim.y), others, len(public))
    return Loot(level, found, find_most_alike(found, victim.x), rates)


def _count_stolen(found: Floats, rows: Rows) -> int:
    nearest = find_most_alike(found, rows)
    return len({int(i) for i, x in zip(nearest, found, strict=True) if mse(x, rows[i]) < EXACT})


# How alike a picture and its reconstruction are: MSE, PSNR, SSIM, and whether it is recognised.


_C1, _C2 = 0.01**2, 0.03**2  # of SSIM, for pixels from 0 to 1


def mse(one: ArrayLike, other: ArrayLike) -> float:
    """Return the mean squared error.

    >>> mse([0.0, 1.0], [0.0, 0.5])
    0.125
    """
    return float(np.mean((_to_array(one) - _to_array(other)) ** 2))


def psnr(one: ArrayLike, other: ArrayLike) -> float:
    """Return the peak signal-to-noise ratio in decibels, at most 200, for pixels from 0 to 1.

    >>> round(psnr([0.0, 1.0], [0.0, 0.9]), 2)
    23.01
    """
    return float(-10 * np.log10(max(mse(one, other), 1e-20)))


def ssim(one: ArrayLike, other: ArrayLike) -> float:
    """Return the structural similarity (SSIM, one window), for pixels from 0 to 1.

    >>> picture = [0.0, 0.2, 1.0, 0.4]
    >>> round(ssim(picture, picture), 6), ssim(picture, [1.0, 0.8, 0.0, 0.6]) < 0
    (1.0, True)
    """
    x, y = _to_array(one).ravel(), _to_array(other).ravel()
    joint = np.cov(x, y, bias=True)
    top = (2 * x.mean() * y.mean() + _C1) * (2 * joint[0, 1] + _C2)
    bottom = (x.mean() ** 2 + y.mean() ** 2 + _C1) * (joint[0, 0] + joint[1, 1] + _C2)
    return float(top / bottom)


def find_most_alike(found: ArrayLike, candidates: ArrayLike) -> NDArray[np.int64]:
    """Return for every reconstruction the candidate that it resembles most (by correlation).

    >>> find_most_alike([[0.1, 0.9]], [[1.0, 0.0], [0.0, 1.0]]).tolist()
    [1]
    """
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
    """Samples, what an attack made of them, and whether it was recognised among candidates."""

    level: Level
    originals: Floats
    truth: Labels
    found: Floats
    names: NDArray[np.bool_]  # whether each was told from the other candidates
    labels: NDArray[np.bool_]  # whether each label was found
    judged: NDArray[np.bool_]  # one of each upload: the others share its noise and decide nothing
    candidates: int
    tries: int = 1  # how many of the candidates were named for each

    @property
    def error(self) -> float:
        """Mean squared error over all."""
        return mse(self.originals, self.found)

    @property
    def psnr(self) -> float:
        """The median over pictures, in decibels."""
        pairs = zip(self.originals, self.found, strict=True)
        return float(np.median([psnr(one, other) for one, other in pairs]))

    @property
    def ssim(self) -> float:
        """The mean over pictures."""
        pairs = zip(self.originals, self.found, strict=True)
        return float(np.mean([ssim(one, other) for one, other in pairs]))

    @property
    def identified(self) -> float:
        """How often the right one of the candidates was named."""
        return float(np.mean(self.names))


def invert_gradient(gradient: Parameters) -> Floats:
    """Return x = ∂w1[:, j] / ∂b1[j] at the unit j whose bias moved most.

    >>> w1, b1 = np.array([[0.0, 6.0], [0.0, 2.0]]), np.array([0.0, 2.0])
    >>> invert_gradient({"w1": w1, "b1": b1}).tolist()
    [3.0, 1.0]
    """
    unit = int(np.argmax(np.abs(gradient["b1"])))
    bottom = float(gradient["b1"][unit])
    return np.asarray(gradient["w1"][:, unit] / (bottom if bottom else 1.0))


def guess_label(gradient: Parameters) -> int:
    """Return the label at which the bias of the last layer was pulled up.

    >>> guess_label({"b2": np.array([0.1, -0.8, 0.7])})
    1
    """
    return int(np.argmin(gradient["b2"]))


def invert_first_layer(
    form: Form, recipe: Recipe, model: Parameters, x: Rows, y: Labels, level: Level
) -> Reconstructions:
    """Reconstruct every sample from the gradient of the first layer.

    Each sample is the only one of its client, which spends its whole budget on one upload. All
    samples together are the candidates for recognition.
    """
    if form.name != "mlp":
        raise InputError.of("model", form.name, "mlp", "the attack reads the first dense layer")
    found, labels = [], []
    for row, right in zip(x, y, strict=True):
        victim = Victim(form, recipe, row[None], np.array([right]))
        received = victim.gradient(level, model)
        found.append(invert_gradient(received))
        labels.append(guess_label(received) == right)
    pictures = np.array(found)
    names = find_most_alike(pictures, x) == np.arange(len(y))
    judged = np.ones(len(y), dtype=bool)
    return Reconstructions(level, x, y, pictures, names, np.array(labels), judged, len(y))


def pick_one_per_class(y: Labels, classes: int) -> list[int]:
    """Return the index of the first sample of each class.

    >>> pick_one_per_class(np.array([1, 1, 0, 2]), 3)
    [2, 0, 3]
    """
    return [int(np.flatnonzero(y == c)[0]) for c in range(classes) if np.any(y == c)]
