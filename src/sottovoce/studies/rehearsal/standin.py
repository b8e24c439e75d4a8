"""The stand-in: rows that replace the clients' own in a rehearsal (docs/rehearsal.md).

They are public rows, digits drawn anew (`draw_digits`) or synthetic rows of a public schema
(`make_rows`). The plan's own data are never opened: a rehearsal on them would be a release that
nobody pays for. A stand-in has rows to train on, rows that choose a setting (validation), and rows
that only tell what it reaches (test).

The federation (`fit_plan`) has as many rows as the stand-in, and the noise of the real one. The
noise of a step is 2ηC√T/(n·μ): a client with n/f rows and a budget that is worth f·μ adds what the
real client will add, and only the gradients are means over fewer rows. Where the unit is a client,
n does not matter and the budget stays.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.data import datasets, tables
from sottovoce.data.federated import find_classes, read_labels
from sottovoce.data.files import read_npz
from sottovoce.data.tables import Spec, is_bounds
from sottovoce.errors import InputError
from sottovoce.models.base import Regression
from sottovoce.plan import Plan
from sottovoce.plan.data import DATASETS
from sottovoce.privacy import calibration, seeds
from sottovoce.privacy.seeds import Purpose

Floats = NDArray[np.float32]
ClientSizes: TypeAlias = tuple[int, ...]  # rows of each client of the real federation

TURN = 0.22  # radians, either way
LEAN = 0.15  # shift of x as a share of y, either way
SIZE = (0.85, 1.15)
SHIFT = 0.06  # as a share of the side, either way
STROKE = (0.10, 0.40)  # ink below this becomes paper: the higher, the thinner the strokes
SHARP = (1.5, 3.0)
BOX = 20 / 28  # the share of the side that a digit fills in larger pictures, as in MNIST
CHUNK = 2048


def draw_digits(
    sources: Floats, pick: NDArray[np.int64], shape: tuple[int, ...], rng: np.random.Generator
) -> Floats:
    """Draw sources[pick[i]] anew as picture i of `shape` (height, width, colours)."""
    high, wide, colours = shape[0], shape[1], shape[2] if len(shape) > 2 else 1
    out = np.empty((len(pick), high, wide, colours), np.float32)
    for start in range(0, len(pick), CHUNK):
        chunk = sources[pick[start : start + CHUNK]]
        ink = _transform_pictures(chunk, high, wide, rng)
        drawn_ends = (rng.uniform(*ends, len(ink)) for ends in (STROKE, SHARP))
        paper, sharp = (values.astype(np.float32)[:, None, None] for values in drawn_ends)
        drawn = np.clip((ink - paper) * sharp, 0, 1)[..., None]
        if colours > 1:
            pair = rng.uniform(0, 1, (2, len(ink), 1, 1, colours)).astype(np.float32)
            drawn = pair[0] + drawn * (pair[1] - pair[0])
        out[start : start + CHUNK] = drawn
    return out


def resize_pictures(pictures: Floats, shape: tuple[int, ...]) -> Floats:
    """Resize pictures (n, height, width, colours) to `shape` by linear interpolation.

    Colours become grey by their mean, grey becomes colours by repetition.

    >>> resize_pictures(np.ones((1, 28, 28, 1), np.float32), (8, 8, 3)).shape
    (1, 8, 8, 3)
    """
    import jax

    wanted = shape[2] if len(shape) > 2 else 1
    if pictures.shape[3] != wanted:
        pictures = np.repeat(pictures.mean(axis=3, keepdims=True), wanted, axis=3)
    size = (len(pictures), *shape[:2], wanted)
    return np.asarray(jax.image.resize(pictures, size, "linear", antialias=False), np.float32)


def _transform_pictures(pictures: Floats, high: int, wide: int, rng: np.random.Generator) -> Floats:
    """Scale, turn, slant and shift each picture: every new pixel is interpolated from old ones."""
    n, rows, columns = pictures.shape
    turn = rng.uniform(-TURN, TURN, n)
    lean: NDArray[np.float64] = np.asarray(rng.uniform(-LEAN, LEAN, n))
    box = BOX if min(high, wide) >= 16 else 1.0
    size: NDArray[np.float64] = box * rng.uniform(SIZE[0], SIZE[1], (2, n))
    shift: NDArray[np.float64] = rng.uniform(-SHIFT, SHIFT, (2, n))
    y = ((np.arange(high) + 0.5) / high - 0.5)[None, :, None] - shift[0][:, None, None]
    x = ((np.arange(wide) + 0.5) / wide - 0.5)[None, None, :] - shift[1][:, None, None]
    cosine, sine = np.cos(turn)[:, None, None], np.sin(turn)[:, None, None]
    down = (cosine * y + sine * x) / size[0][:, None, None]
    across = (cosine * x - sine * y) / size[1][:, None, None] + lean[:, None, None] * down
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1)))  # outside of a picture there is paper
    at_y = np.clip((down + 0.5) * rows + 0.5, 0, rows + 1 - 1e-6)
    at_x = np.clip((across + 0.5) * columns + 0.5, 0, columns + 1 - 1e-6)
    top, left = at_y.astype(int), at_x.astype(int)
    weight_y, weight_x = (at_y - top).astype(np.float32), (at_x - left).astype(np.float32)
    i = np.arange(n)[:, None, None]
    upper = (1 - weight_x) * padded[i, top, left] + weight_x * padded[i, top, left + 1]
    lower = (1 - weight_x) * padded[i, top + 1, left] + weight_x * padded[i, top + 1, left + 1]
    return np.asarray((1 - weight_y) * upper + weight_y * lower, np.float32)


WORDS: dict[str, Any] = tomllib.loads(
    (resources.files("sottovoce.studies.rehearsal") / "words.toml").read_text("utf-8")
)
UNEVEN = ("auroc", "auprc", "balanced_accuracy")  # metrics that a plan names for uneven classes
RARE = 0.05  # then the rarest class has this many rows for one of the most frequent
KINDS = 8
# As in real tables, most rows have the same few categories, and most numbers lie in a narrow part
# of their bounds, more often the lower one. So all rows share a large mean, along which a long step
# overshoots, and what tells them apart is small beside it.
ALIKE = 5.0  # the larger, the more the kinds agree in their shares of categories
MIDDLE = (0.1, 0.6)  # of a number's bounds: where its mean lies
DRIFT = 0.2  # the deviation of the kinds' means from it
NARROW = (4.0, 32.0)  # α + β of the beta distribution around these
BEST = 0.85  # the share of rows that whoever knows the rule predicts right
EXPLAINED = 0.6  # R² of whoever knows the rule
SPREAD = 0.3  # the deviation of targets in [−1, 1]
SHARED = 0.5  # the columns that are the same in all rows of a person
NUMBERED = {"ipums": 57}  # the number of features where `data.datasets` does not list the columns


class Field(NamedTuple):
    """A column: `width` features, of which a category sets one, and a number the first.

    `categories` is 0 for a number, which is from `low` to 1. Categories beyond the width set none.
    """

    width: int
    categories: int
    low: float = 0.0


def list_fields(
    name: str | None, columns: Mapping[str, Spec], label: str | None, missing: str | None = None
) -> list[Field]:
    """List the columns of a census table by its name, or those that a plan declares.

    >>> sum(field.width for field in list_fields("acs", {}, None))
    76
    >>> found = list_fields(None, {"age": (0.0, 9.0), "sex": ("f", "m"), "y": ("0", "1")}, "y")
    >>> [(field.width, field.categories) for field in found]
    [(1, 0), (2, 2)]
    >>> [field.width for field in list_fields(None, {"age": (0.0, 9.0)}, "y", missing="flag")]
    [2]
    """
    known = {"acs": datasets.ACS, "adult": datasets.ADULT}
    if name in known:
        return [Field(c.width, len(getattr(c, "categories", ()))) for c in known[name]]
    if name in NUMBERED:
        return [Field(1, 0) for _ in range(NUMBERED[name])]
    specs = [spec for column, spec in columns.items() if column != label and spec]
    number = Field(2 if missing == "flag" else 1, 0, low=-1.0)
    return [number if is_bounds(spec) else Field(len(spec), len(spec)) for spec in specs]


def make_rows(
    fields: Sequence[Field],
    classes: int,
    rows: int,
    rng: np.random.Generator,
    shares: Sequence[float] = (),
    person: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Make synthetic rows of these columns, and their labels, in these shares of the classes.

    Labels of one class are numbers in [−1, 1]. `person` has the number of each row's person.

    >>> x, y = make_rows(list_fields("adult", {}, None), 2, 500, np.random.default_rng(1))
    >>> x.shape, float(x.min()), float(x.max()) <= 1, 0.3 < y.mean() < 0.7
    ((500, 103), 0.0, True, np.True_)
    """
    from scipy.special import softmax

    if not fields:
        raise InputError(
            "the plan declares no columns to make rows from; list them in data.columns, or give "
            "public rows with --public"
        )
    kind = rng.integers(0, KINDS, rows if person is None else int(person.max()) + 1)
    columns = [_draw_column(field, kind, rng, person) for field in fields]
    parts = [column @ rng.normal(size=(column.shape[1], classes)) for column in columns]
    scores = sum(part / np.maximum(part.std(axis=0), 1e-9) for part in parts)
    scores -= np.median(scores, axis=0)
    scores /= max(float(scores.std()), 1e-9)
    x = np.concatenate(columns, axis=1).astype(np.float32)
    if classes == 1:
        noise = np.sqrt(1 - EXPLAINED) * rng.normal(size=rows)
        targets = np.sqrt(EXPLAINED) * scores[:, 0] + noise
        middle = 2 * rng.uniform(*MIDDLE) - 1
        return x, np.clip(middle + SPREAD * targets, -1, 1).astype(np.float32)
    # softmax(s·scores) with the s at which the likeliest class is right with BEST.
    s = _bisect(lambda s: softmax(s * scores, axis=1).max(axis=1).mean(), BEST, 1e-3, 1e3, 40)
    chances = np.asarray(softmax(s * scores, axis=1))
    for _ in range(60 if shares else 0):  # find each class's intercept that gives it its share
        chances = chances * (np.asarray(shares) / chances.mean(axis=0))
        chances = chances / chances.sum(axis=1, keepdims=True)
    draw = rng.random((rows, 1))
    y = np.minimum((np.cumsum(chances, axis=1) < draw).sum(axis=1), classes - 1)
    y[: min(classes, rows)] = np.arange(min(classes, rows))  # every class occurs
    return x, y.astype(np.int32)


def _bisect(
    rise: Callable[[float], float], wanted: float, low: float, high: float, steps: int
) -> float:
    """Return the largest number found below which a rising function stays below what is wanted."""
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rise(middle) < wanted else (low, middle)
    return low


def _draw_column(
    field: Field,
    kind: NDArray[np.int64],
    rng: np.random.Generator,
    person: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    if person is not None:  # one cell for all rows of a person, or one for each
        if rng.random() < SHARED:
            return _draw_column(field, kind, rng)[person]
        kind = kind[person]
    out = np.zeros((len(kind), field.width))
    if field.categories == 0:
        middle = rng.uniform(*MIDDLE) + rng.normal(0, DRIFT, KINDS)
        middle = np.clip(middle, 0.05, 0.95)[kind]
        narrow = np.exp(rng.uniform(*np.log(NARROW)))
        drawn = rng.beta(narrow * middle, narrow * (1 - middle))
        out[:, 0] = field.low + (1 - field.low) * drawn
        if field.width > 1:  # the second feature says that the number is missing
            absent = rng.random(len(kind)) < rng.uniform(0, 0.5)
            out[absent, 0], out[absent, 1] = 0.0, 1.0
        return out
    common = rng.dirichlet(np.full(field.categories, 0.5))
    shares = np.array([rng.dirichlet(ALIKE * common + 0.02) for _ in range(KINDS)])
    draw = rng.random((len(kind), 1))
    code = np.minimum((np.cumsum(shares[kind], axis=1) < draw).sum(axis=1), field.categories - 1)
    (seen,) = np.nonzero(code < field.width)
    out[seen, code[seen]] = 1.0
    return out


def announce_federation(
    plan: Plan, clients: int | None = None, samples: int | None = None
) -> ClientSizes:
    """Return how many rows each client trains on, as a plan announces it: no data are opened.

    `samples` is the number of rows that a client holds; with `data.client` those of the whole
    table, of which validation and test take their share (as `data.partition.split_by_column` does).
    """
    data = plan.data
    pairs = (("clients", clients, data.clients), ("samples", samples, data.samples))
    for key, wanted, planned in pairs:
        if wanted is not None and planned is not None:
            remedy = f"it says {planned}"
            raise InputError.of(f"--{key}", wanted, f"absent where the plan has data.{key}", remedy)
        if wanted is not None and wanted < 1:
            raise InputError.of(f"--{key}", wanted, "a whole number ≥ 1", "as announced")
    U = data.clients or clients
    if U is None:
        raise InputError(
            "data.clients follows from the table, which a rehearsal does not open; say how many "
            "clients there will be with --clients"
        )
    for key in ("epsilon", "delta"):  # which a plan cannot check if its table decides the clients
        values = getattr(plan.privacy, key)
        if isinstance(values, tuple) and len(values) != U:
            raise InputError(
                f"privacy.{key} is a list of {len(values)} and --clients is {U}; give one number "
                "for all, or one for each client"
            )
    if isinstance(data.samples, tuple):
        sizes = data.samples
        return tuple(sizes[i * len(sizes) // U] for i in range(U))
    size = data.samples if data.samples is not None else samples
    if size is not None:
        size = size if data.client is None else _count_training_rows(plan, size, U)
        return (size,) * U
    if data.name is None or data.name == "arrays":
        raise InputError(
            "data.samples is what a client holds and the plan leaves it to the data, which a "
            "rehearsal does not open; say how many rows with --samples"
        )
    facts = DATASETS[data.name]
    held_out = int(data.validation) if data.public is None else data.public
    rest = facts.rows - held_out - (0 if data.test == 0 else int(float(data.test)))
    return (max(1, rest // U),) * U


def sum_held_out(plan: Plan) -> tuple[float, int]:
    """Return what validation and test take of a table: a share of all rows, and a number of rows.

    >>> sum_held_out(Plan(data={"path": "a.csv", "label": "y", "infer": True, "test": 50}))
    (0.1, 50)
    """
    taken = [v for v in (plan.data.validation, plan.data.test) if not isinstance(v, str)]
    share = sum(v for v in taken if isinstance(v, float))
    return float(share), sum(v for v in taken if isinstance(v, int))


def _count_training_rows(plan: Plan, held: int, U: int) -> int:
    """Return how many of a client's rows in the table it trains on."""
    share, rows = sum_held_out(plan)
    left = int(round(held * U * (1 - share) - rows, 6) // U)
    if left < 1:
        raise InputError.of(
            "--samples",
            held,
            f"more than data.validation = {plan.data.validation} and data.test = {plan.data.test} "
            f"take of {U} clients",
            "these are all rows of a client, and one or more must be left to train on",
        )
    return left


def choose_spare_factor(plan: Plan) -> int:
    """Return how many times as many rows are needed; with few classes a client, some are left."""
    return 3 if plan.data.split in ("labels", "dirichlet") else 1


def fit_plan(plan: Plan, real: ClientSizes, rows: int) -> tuple[Plan, float]:
    """Return the plan of a federation on `rows` rows with the noise of the real one, and f."""
    plan = plan.choose_learning_rate(real, plan.recipe().clip)
    least, rows = plan.data.labels_per_client or 1, rows // choose_spare_factor(plan)
    if rows < least * len(real):
        raise InputError(
            f"the stand-in has {rows} rows to train on and {len(real)} clients need "
            f"{least * len(real)} or more; give more public rows"
        )
    f = max(1.0, sum(real) / rows)
    sizes = np.maximum(least, np.floor(np.array(real) / f + 1e-9)).astype(int)
    while sizes.sum() > rows:  # because some clients were raised to the smallest size
        sizes[np.argmax(sizes)] -= 1
    alike = len(set(sizes.tolist())) == 1
    changes: dict[str, object] = {
        "data.name": "arrays",
        "data.clients": len(sizes),
        "data.samples": int(sizes[0]) if alike else sizes.tolist(),
        "noise": "simulated",
    }
    if plan.data.split in ("column", "sizes", "iid"):
        changes["data.split"] = "iid" if alike else "sizes"
    else:
        split = {key: getattr(plan.data, key) for key in ("split", "labels_per_client", "alpha")}
        changes |= {f"data.{key}": value for key, value in split.items() if value is not None}
    scale = np.array(real) / sizes
    if plan.local.unit == "person":  # arrays are given with ids, and a client's samples are persons
        changes |= {"data.person": None, "data.rows_per_person": plan.rows_per_person}
    if plan.regression is not None:
        changes["data.target"] = list(plan.regression[1:])
    if plan.local.unit != "client" and scale.max() > 1:
        budgets = np.broadcast_arrays(plan.privacy.epsilon, plan.privacy.delta, scale)
        clients = [(float(e), float(d), float(f)) for e, d, f in zip(*budgets, strict=True)]
        found = {client: _find_epsilon(*client, plan) for client in sorted(set(clients))}
        each = [found[client] for client in clients]
        changes["privacy.epsilon"] = each[0] if len(found) == 1 else each
    return plan.replace(**changes), float(scale.max())


def _find_epsilon(epsilon: float, delta: float, f: float, plan: Plan) -> float:
    """Return the ε whose capacity is f² times that of this one."""

    def worth(e: float) -> float:
        return float(calibration.capacity(e, delta, calibration=plan.privacy.calibration))

    wanted = f * f * worth(epsilon)
    if worth(1e6) < wanted:
        remedy = "its budget would be out of range"
        raise InputError.of("the stand-in", f"1/{f:.0f} of the rows", "larger", remedy)
    return _bisect(worth, wanted, epsilon, 1e6, 80)


MOST_ROWS = 10_000  # to train on: beyond, clients hold fewer rows than the real ones
MOST_JUDGES = 4_000  # that choose, and as many that tell
FEW = 2_000  # public rows, below which a fifth of them chooses and a fifth tells, not a tenth

Public: TypeAlias = "str | Path | tuple[ArrayLike, ArrayLike] | None"
Pair: TypeAlias = tuple[NDArray[np.float32], NDArray[Any]]  # labels: classes, or targets
Persons: TypeAlias = NDArray[np.int64] | None  # the number of each row's person, from 0


@dataclass(frozen=True, eq=False)
class StandIn:
    """The rows, and in words what they are and how far to trust them."""

    kind: Literal["public", "drawn", "synthetic"]
    about: str
    trust: str
    train: Pair
    validation: Pair
    test: Pair
    shape: tuple[int, ...]
    classes: int
    sources: int | None = None  # different pictures or persons behind the rows that tell
    origin: str = "made"  # made | published | said (to be public) | own (the plan's); see `cost`
    name: str = ""  # of public rows, as the user gave it
    person: Persons = None  # of the rows to train on, where persons are protected
    target: Regression | None = None  # the number that is predicted; `classes` is then 1

    @property
    def units(self) -> int:
        """The number of records, or persons, to train on."""
        return len(self.train[1]) if self.person is None else int(self.person.max()) + 1

    @property
    def cost(self) -> dict[str, str]:
        """What a rehearsal on these rows costs in privacy, in the words of `[cost.…]`.

        It depends on where the rows come from (`origin`): nothing if they were made, or published
        by others than the plan; nothing if a file that is said to be public is, which cannot be
        checked; and nothing is claimed of the plan's own rows (the embedded digits).

        >>> pair = ([[0.0]], [0])
        >>> said = {"origin": "said", "name": "a.csv"}
        >>> rows = StandIn("public", "", "", pair, pair, pair, (1,), 2, **said)
        >>> rows.cost["sentence"]
        'none, provided that a.csv is public: you say so, sottovoce cannot check'
        """
        words = WORDS["cost"].get(self.origin, WORDS["cost"]["nothing"])
        return {key: text.format(name=self.name) for key, text in words.items()}

    @property
    def telling(self) -> int:
        """The number of independent rows that tell what a setting reaches."""
        return min(len(self.test[1]), self.sources or len(self.test[1]))

    @property
    def choosing(self) -> int:
        """The number of independent rows that choose."""
        return min(len(self.validation[1]), self.sources or len(self.validation[1]))

    def fingerprint(self) -> str:
        """Return a hash that identifies these rows."""
        digest = hashlib.blake2b(digest_size=16)
        for x, y in (self.train, self.validation, self.test):
            digest.update(np.ascontiguousarray(x).data)
            digest.update(np.ascontiguousarray(y).data)
        return digest.hexdigest()


def make_stand_in(
    plan: Plan, real: ClientSizes, public: Public = None, *, seed: int = 0
) -> StandIn:
    """Make the stand-in for a plan from `public` rows, or from what its kind of data allows."""
    rng = seeds.generator(seed, Purpose.SPLIT, 10)
    wanted = min(sum(real), MOST_ROWS) * choose_spare_factor(plan)
    if public is None and plan.data.name == "digits":
        public = "digits"
    if public is not None:
        return _take_public(plan, public, wanted, rng)
    if plan.data.name == "arrays" or plan.data.is_array_file:
        raise InputError(
            "a plan says nothing of the rows of arrays, so nothing can stand in for them; give "
            "public rows, as rehearse(plan, public=(X, y)) or --public rows.npz"
        )
    if plan.data.pictures:
        if plan.regression is not None:
            bound = "absent where digits stand in for pictures"
            raise InputError.of("model.loss", plan.model.loss, bound, "give rows with --public")
        return _draw_stand_in(plan, wanted, rng)
    return _make_synthetic(plan, wanted, rng)


def _count_judges(wanted: int) -> int:
    """Return how many rows choose, and how many tell."""
    return int(np.clip(2 * wanted // 5, 400, MOST_JUDGES))


def _draw_stand_in(plan: Plan, wanted: int, rng: np.random.Generator) -> StandIn:
    dataset = datasets.DATASETS[str(plan.data.name)]
    digits = datasets.load("digits")
    order = rng.permutation(len(digits.train_y))
    first, second = int(0.6 * len(order)), int(0.8 * len(order))
    high, wide = dataset.shape[:2]
    sources = digits.train_x.reshape(-1, 8, 8)

    def draw_rows(indices: NDArray[np.int64], count: int) -> Pair:
        pick = indices[rng.integers(0, len(indices), count)]
        x = draw_digits(sources, pick, dataset.shape, rng)
        return x.reshape(count, -1), digits.train_y[pick]

    return StandIn(
        kind="drawn",
        sources=len(order) - second,
        about=WORDS["drawn"]["about"].format(rows=len(order), high=high, wide=wide),
        trust=WORDS["drawn"]["trust"],
        train=draw_rows(order[:first], wanted),
        validation=draw_rows(order[first:second], _count_judges(wanted)),
        test=draw_rows(order[second:], _count_judges(wanted)),
        shape=dataset.shape,
        classes=dataset.classes,
    )


def _make_synthetic(plan: Plan, wanted: int, rng: np.random.Generator) -> StandIn:
    data = plan.data
    if data.infer:
        raise InputError(
            "data.infer = true leaves the columns to the table, which a rehearsal does not open; "
            "declare them in data.columns, or give public rows with --public"
        )
    fields = list_fields(data.name, data.columns or {}, data.label, data.missing)
    target, judges = plan.regression, _count_judges(wanted)
    classes = 1 if target is not None else data.classes or 2
    person, rows = None, wanted
    if plan.rows_per_person:
        count = np.minimum(rng.geometric(0.5, wanted), plan.rows_per_person)
        person, rows = np.repeat(np.arange(wanted), count), int(count.sum())
    ids = None if person is None else np.append(person, wanted + np.arange(2 * judges))
    shares = data.prevalence or ()  # published ones, or uneven ones for such a metric
    if not shares and plan.metric in UNEVEN and classes > 1:
        rarer = RARE ** (np.arange(classes) / (classes - 1))
        shares = tuple((rarer / rarer.sum()).tolist())
    uneven = f", in the shares {', '.join(f'{share:.1%}' for share in shares)}" if shares else ""
    x, y = make_rows(fields, classes, rows + 2 * judges, rng, shares, ids)
    x, y = np.roll(x, -rows, axis=0), np.roll(y, -rows)  # every class is among the judges
    if target is None:
        y[judges : judges + classes] = np.arange(classes)
    else:
        y = target.restore(y).astype(np.float32)
    label = f"{classes} classes{uneven}" if target is None else "a number as the label"
    best = f"is right in about {BEST:.0%}" if target is None else f"has R² {EXPLAINED:g}"
    best = f"of even classes {best}" if uneven else best
    if person is not None:
        label += f"; {wanted:,} persons with {rows / wanted:.1f} rows on average"
    return StandIn(
        kind="synthetic",
        about=WORDS["synthetic"]["about"].format(
            columns=len(fields), features=x.shape[1], label=label, best=best
        ),
        trust=WORDS["synthetic"]["trust"]
        + ("" if uneven or plan.metric or target is not None else WORDS["synthetic"]["metric"]),
        validation=(x[:judges], y[:judges]),
        test=(x[judges : 2 * judges], y[judges : 2 * judges]),
        train=(x[2 * judges :], y[2 * judges :]),
        shape=(x.shape[1],),
        classes=classes,
        person=person,
        target=target,
    )


def _take_public(plan: Plan, public: Public, wanted: int, rng: np.random.Generator) -> StandIn:
    data, wanted_shape = plan.data, None  # or what the plan alone says of a row
    if data.name is not None and data.name != "arrays":
        wanted_shape = datasets.DATASETS[data.name].shape
    elif data.name is None and not (data.infer or data.is_array_file):
        fields = list_fields(None, data.columns or {}, data.label, data.missing)
        wanted_shape = (sum(field.width for field in fields),)
    pictured = wanted_shape is not None and len(wanted_shape) == 3
    target = plan.regression
    name, x, y, shape, ids = _load_public(plan, public, pictured)
    if pictured and len(shape) in (2, 3) and wanted_shape is not None:
        x = resize_pictures(x.reshape(len(x), *shape[:2], -1), wanted_shape)
        x, shape = x.reshape(len(x), -1), wanted_shape
    elif wanted_shape is not None and shape != wanted_shape:
        bound = f"rows of shape {wanted_shape} as the plan's"
        raise InputError.of("--public", shape, bound, "give rows of the same kind")
    classes = 1 if target is not None else plan.data.classes
    classes = int(y.max()) + 1 if classes is None else classes
    labels = np.unique(y)
    if target is None and not np.array_equal(labels, np.arange(classes)):
        raise InputError.of(
            "--public labels",
            f"{len(labels)} classes from {int(labels[0])} to {int(labels[-1])}",
            f"the {classes} classes 0 to {classes - 1} of the plan",
            "show every class, and no other",
        )
    person = np.arange(len(y)) if ids is None else _number(ids)
    persons = int(person.max()) + 1
    judges = min(_count_judges(wanted), max(1, persons // (5 if persons < FEW else 10)))
    if persons < 10 * classes:
        what = "rows" if ids is None else "persons"
        bound = f"{10 * classes} {what} or more"
        raise InputError.of("--public", f"{persons} {what}", bound, "give more of them")
    order = rng.permutation(persons)
    # One row of each class comes first, because the number of classes is read from these rows.
    pairs = [order[np.isin(order, person[y == k])][:2].tolist() for k in range(classes)]
    pairs = pairs if target is None else [order[:2].tolist()]
    if min(map(len, pairs)) < 2:
        raise InputError("--public has a class of one row; show two or more of every class")
    choose = list(dict.fromkeys(pair[0] for pair in pairs))
    tell = [p for p in dict.fromkeys(pair[1] for pair in pairs) if p not in choose]
    rest = np.setdiff1d(order, [*choose, *tell], assume_unique=True)
    rest = rest[rng.permutation(len(rest))]
    more = max(0, judges - len(choose))
    groups = rest[2 * more :][:wanted], [*choose, *rest[:more]], [*tell, *rest[more : 2 * more]]
    picked = [np.array(group, dtype=np.int64) for group in groups]
    if ids is not None:  # nobody is both trained on and judged by
        picked = [np.flatnonzero(np.isin(person, group)) for group in picked]
    training, choosing, telling = picked
    is_own = name == plan.data.name
    published = isinstance(public, str) and name in datasets.DATASETS
    words = WORDS["public"]
    return StandIn(
        kind="public",
        origin="own" if is_own else "published" if published else "said",
        name=name,
        about=words["about" if is_own or published else "said"].format(rows=len(y), name=name),
        trust=words["own" if is_own else "trust"],
        train=(x[training], y[training]),
        validation=(x[choosing], y[choosing]),
        test=(x[telling], y[telling]),
        shape=shape,
        classes=classes,
        person=_number(person[training]) if plan.rows_per_person else None,
        sources=None if ids is None else min(map(len, groups[1:])),
        target=target,
    )


def _number(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return the number of each id among all ids, from 0."""
    return np.unique(ids, return_inverse=True)[1].reshape(-1)


Loaded: TypeAlias = tuple[NDArray[np.float32], NDArray[Any], tuple[int, ...]]


def _load_public(plan: Plan, public: Public, pictured: bool) -> tuple[str, *Loaded, Persons]:
    """Return the name of public rows, rows, labels, the shape of a row, and persons or None."""
    target = plan.regression
    if isinstance(public, tuple):
        return "what was given from Python", *_check_rows("public", *public, pictured, target), None
    text = str(public)
    if text in datasets.DATASETS:
        if text == plan.data.name and text != "digits":
            remedy = "settings chosen on the clients' rows would cost privacy that nobody pays"
            raise InputError.of("--public", text, "other rows than the plan's own", remedy)
        arrays = datasets.load(text)
        x = np.concatenate([arrays.train_x, arrays.test_x.reshape(-1, arrays.train_x.shape[1])])
        return text, x, np.concatenate([arrays.train_y, arrays.test_y]), arrays.shape, None
    path = Path(text)
    if not path.is_file():
        bound = f"a file, or one of {', '.join(datasets.DATASETS)}"
        raise InputError.of("--public", text, bound, "name public rows")
    for key in ("path", "validation", "test"):
        file = getattr(plan.data, key)
        if isinstance(file, str | Path) and Path(file).exists() and path.samefile(file):
            remedy = (
                "settings chosen on these rows would cost privacy that nobody pays, or be tested "
                "on what chose them"
            )
            raise InputError.of("--public", text, f"another file than data.{key}", remedy)
    if path.suffix.lower() == ".npz":
        try:
            x, y = read_npz(path, "x", "y").values()
        except (OSError, ValueError):
            bound, remedy = "an .npz with the arrays x and y", "save it with numpy.savez"
            raise InputError.of("--public", text, bound, remedy) from None
        return path.name, *_check_rows(path.name, x, y, pictured, target), None
    is_table = plan.data.path is not None and not plan.data.is_array_file
    if path.suffix.lower() not in (".csv", ".parquet") or not is_table:
        bound = "an .npz with x and y, or a .csv or .parquet for a plan of a table"
        raise InputError.of("--public", text, bound, "save the rows as one of these")
    unused = dict.fromkeys(("client", "validation", "test"))
    unused |= {} if plan.rows_per_person else {"person": None}
    source = plan.data.table() | {"path": path} | unused
    table = tables.read_table(tables.Source(**source, target=target))
    labels = table.y if target is None else target.restore(table.y).astype(np.float32)
    return path.name, table.x, labels, (table.x.shape[1],), table.person


def _check_rows(
    name: str, x: ArrayLike, y: ArrayLike, pictured: bool, target: Regression | None
) -> Loaded:
    kind = "whole numbers from 0" if target is None else "finite numbers"
    bound = f"x[n, …] of finite numbers and y[n] of {kind}"
    what = f"the rows of {name}"
    try:
        rows_, labels = np.asarray(x), np.asarray(y)
    except ValueError:  # lists of unequal length
        raise InputError.of(what, "no arrays", bound, "one label for each row") from None
    # Labels may be names, as those of arrays to train on.
    if target is None and labels.dtype.kind in "bfOU" and labels.ndim == 1:
        labels = read_labels(f"labels of {name}", labels)
        if labels.dtype.kind not in "iuf":
            labels = find_classes([labels]).encode(labels, name)
    if rows_.dtype.kind not in "fiub" or labels.dtype.kind not in ("iu", "iuf")[target is not None]:
        kinds = f"x of {rows_.dtype} and y of {labels.dtype}"
        raise InputError.of(what, kinds, bound, "encode categories first")
    if rows_.ndim < 2 or labels.shape != rows_.shape[:1] or not rows_.size:
        raise InputError.of(what, (rows_.shape, labels.shape), bound, "one label for each row")
    with np.errstate(over="ignore"):
        flat = rows_.astype(np.float32).reshape(len(rows_), -1)
    if not np.isfinite(flat).all():
        raise InputError.of(what, "a number that is not finite", bound, "leave such rows out")
    if target is not None:
        if not np.isfinite(labels).all():
            raise InputError.of(what, "a label that is not finite", bound, "leave such rows out")
        return flat, labels.astype(np.float32), rows_.shape[1:]
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= len(labels):  # there are never more classes than rows
        found = f"labels from {least} to {most}"
        raise InputError.of(what, found, bound, "number the classes 0, 1, 2, …")
    if pictured:
        flat = _scale_pixels(what, flat, whole=rows_.dtype.kind in "iu")
    return flat, labels.astype(np.int32), rows_.shape[1:]


def _scale_pixels(given: str, x: NDArray[np.float32], *, whole: bool) -> NDArray[np.float32]:
    """Scale pictures to 0 to 1 like the named datasets: clipping and step depend on the scale.

    >>> _scale_pixels("x", np.array([[0, 51, 255]], np.float32), whole=True).tolist()
    [[0.0, 0.20000000298023224, 1.0]]
    """
    low, high = float(x.min()), float(x.max())
    bytes_ = whole and 127 < high <= 255  # else a dark picture of another scale
    if low < 0 or (high > 1 and not bytes_):
        bound = "whole numbers from 0 to 255, or numbers from 0 to 1"
        remedy = "bring the pictures to one of these scales"
        raise InputError.of(given, f"from {low:g} to {high:g}", bound, remedy)
    return x / np.float32(255) if bytes_ else x
