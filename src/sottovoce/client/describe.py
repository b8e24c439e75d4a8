"""Release statistics of a table: means, histograms, counts and correlations in one upload.

`describe_node` asks this client's own device (`client.device`) for one round of the model
`models.statistics`. So a description is a release like any other: the policy allows it, the vault
pays for it before anything is computed, and the ledger shows it. `Description` turns the upload
into a table for people; `combine` adds the descriptions of several clients. Both only process what
was released, which costs no privacy.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.client import messages
from sottovoce.client.device import PATIENCE, answer_request, check_node, open_vault
from sottovoce.client.messages import Request
from sottovoce.client.node import Node
from sottovoce.client.vault import Vault
from sottovoce.data import files
from sottovoce.data.tables import Layout, Source, check_source, is_bounds, make_layout
from sottovoce.errors import DataError, InputError, Refusal, TankEmpty
from sottovoce.models.base import Floats, Regression
from sottovoce.models.statistics import BINS, PARAMETER, Statistics
from sottovoce.privacy import calibration
from sottovoce.privacy.budget import NOT_COVERED, Unit, format_budget, list_always_not_covered
from sottovoce.privacy.grid import MOST_SAMPLES
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.schedules.base import Round

if TYPE_CHECKING:
    from sottovoce.schemas import CorrelationEntry, DescriptionDocument, StatisticsEntry

SCHEMA: Literal["sottovoce.description/1"] = "sottovoce.description/1"
MISSING = (
    "A missing number counts as the middle of its bounds here, in mean and histogram; with "
    'data.missing = "flag" it is left out and counted.'
)
SHARE = 0.1  # of the budget, unless the user chooses another
_BARS = " ▁▂▃▄▅▆▇█"
_SHOWN = 10  # correlations
_ROUND_UP = 1 + 1e-11  # pays for the 2⁻⁴⁰ by which σ is larger than the grid's, and for floats


@dataclass(frozen=True, eq=False)
class Description:
    """Released statistics: the noised mean of `models.statistics`, and what is public about it."""

    layout: Layout
    unit: Unit
    delta: float
    epsilon: float  # of this release alone, for the client that it tells most about
    clients: dict[str, int]  # samples by name
    mean: Floats  # of s, without the divisor
    error: float  # the standard deviation of the noise in each number of `mean`
    bins: int = BINS
    not_covered: tuple[str, ...] = ()
    left: float | None = None  # the share of the ledger's budget that is left after it

    @property
    def model(self) -> Statistics:
        """The model whose upload this is."""
        return make_model(self.layout, bins=self.bins)

    @property
    def samples(self) -> int:
        """How many samples all clients have together."""
        return sum(self.clients.values())

    @property
    def text(self) -> str:
        """The promise as one paragraph."""
        about = {"record": "one record", "person": "one person", "client": "all data"}[self.unit]
        left = (
            "" if self.left is None else f" {int(100 * self.left)}% of the ledger's budget is left."
        )
        return (
            f"These statistics are {format_budget(self.epsilon, self.delta)}-"
            f"differentially private for {about} of each client (adjacency: replace-one), whoever "
            f"reads them.{left} Not covered: "
            + "; ".join(NOT_COVERED[code] for code in self.not_covered)
            + "."
        )

    def summarise(self) -> tuple[list[StatisticsEntry], StatisticsEntry]:
        """Return what was released about each column, and about the label."""
        parts = {name: self.mean[part] for name, part in self.model.parts.items()}
        i, start = 0, 0  # the next number, the next category
        columns: list[StatisticsEntry] = []
        for name, spec in self.layout.columns.items():
            if not is_bounds(spec):
                columns.append(self._describe_categories(name, spec, parts["categories"][start:]))
                start += len(spec)
                continue
            missing = None
            if self.layout.missing == "flag":
                missing = float(np.clip(parts["missing"][i], 0, 1))
            entry = self._describe_number(name, spec, i, missing)
            shares = parts["bins"][i * self.bins : (i + 1) * self.bins]
            entry["histogram"] = np.clip(shares, 0, 1).tolist()
            if missing is not None:
                entry["missing"] = missing
            columns.append(entry)
            i += 1
        label, target = self.layout.label, self.layout.target
        if target is None:
            return columns, self._describe_categories(label, self.layout.classes, parts["label"])
        return columns, self._describe_number(label, target[1:], -1, None)

    def _describe_number(
        self, name: str, bounds: Any, i: int, missing: float | None
    ) -> StatisticsEntry:
        """Describe number i by the rows that have it; `missing` is the released share of others.

        A missing number adds 0 to every sum, so that sums are divided by the share that is present.
        That share has noise, too: the mean's error is √(1 + mean²) times that of its sum.
        """
        present = 1.0 if missing is None else max(1 - missing, self.error)
        means, products = self._moments
        mean, error = float(np.clip(means[i] / present, -1, 1)), self.error / present
        variance = products[i, i] / present - (means[i] / present) ** 2
        low, high = bounds
        half = (high - low) / 2
        entry: StatisticsEntry = {
            "name": name,
            "low": low,
            "high": high,
            "mean": low + half * (1 + mean),
            "mean_error": half * error * (1 if missing is None else math.hypot(1, mean)),
        }
        if self._is_seen(variance, present):
            entry["deviation"] = half * math.sqrt(variance)
        return entry

    def _describe_categories(self, name: str, names: Any, shares: Floats) -> StatisticsEntry:
        clipped = np.clip(shares[: len(names)], 0, 1).tolist()
        return {"name": name, "shares": dict(zip(names, clipped, strict=True))}

    @cached_property
    def _moments(self) -> tuple[Floats, Floats]:
        """The means of the numbers and of their products on [−1, 1], the label last if it is one.

        A missing number counts as 0.
        """
        model = self.model
        first, second = np.triu_indices(model.correlated)
        products = np.empty((model.correlated, model.correlated))
        products[first, second] = products[second, first] = self.mean[model.parts["products"]]
        label = self.mean[model.parts["label"]]
        signed = label if model.number_loss is not None else label[1:] - label[:1]
        means = np.append(self.mean[model.parts["numbers"]], signed)[: model.correlated]
        return means, products

    def _is_seen(self, variance: ArrayLike, present: float = 1.0) -> NDArray[np.bool_]:
        """Return whether the noise does not hide a variance."""
        return np.asarray(variance) >= 4 * self.error / (self.model.weight * present)

    def correlate(self) -> list[CorrelationEntry]:
        """Return the correlation of each pair of numbers, and the standard error of its noise.

        A missing number counts as 0. A column whose variance the noise hides is left out.
        """
        names = [name for name, spec in self.layout.columns.items() if is_bounds(spec)]
        if len(names) < self.model.correlated:
            two = self.layout.target is None
            names.append(
                f"{self.layout.label}={self.layout.classes[1]}" if two else self.layout.label
            )
        means, products = self._moments
        covariances, noise = products - np.outer(means, means), self.error / self.model.weight
        variance = np.diag(covariances)
        variance = np.where(self._is_seen(variance), variance, np.nan)
        scale = np.sqrt(np.outer(variance, variance))
        values = np.clip(covariances / scale, -1, 1)
        return [
            {
                "first": names[i],
                "second": names[j],
                "correlation": float(values[i, j]),
                "error": float(noise / scale[i, j]),
            }
            for i, j in zip(*np.triu_indices(len(names), 1), strict=True)
            if math.isfinite(values[i, j])
        ]

    def to_json(self) -> DescriptionDocument:
        """Return the description as plain data, from which `read_description` makes it again."""
        columns, label = self.summarise()
        target = self.layout.target
        return {
            "schema": SCHEMA,
            "clients": self.clients,
            "samples": self.samples,
            "unit": self.unit,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "not_covered": list(self.not_covered),
            "text": self.text,
            "columns": columns,
            "label": label,
            "share_error": self.error,
            "correlations": self.correlate(),
            "released": {
                "table": self.layout.to_json(),
                "target": None if target is None else [target.low, target.high],
                "bins": self.bins,
                "mean": self.mean.tolist(),
            },
        }

    def format_lines(self) -> list[str]:
        """Return the description for people."""
        columns, label = self.summarise()
        unit = {"person": "persons"}.get(self.unit, "rows")
        many = f"{len(self.clients)} clients" if len(self.clients) > 1 else next(iter(self.clients))
        lines = [f"{self.samples:,} {unit} of {many}", ""]
        for entry in [*columns, label]:
            lines += _format_entry(entry, self.error)
        tried = max(1, math.comb(self.model.correlated, 2))
        beyond = NormalDist().inv_cdf(1 - 0.025 / tried)  # 2 errors would list 1 pair in 20
        pairs = [
            (abs(value), f"{pair['first']} and {pair['second']}", value, pair["error"])
            for pair in self.correlate()
            if abs(value := pair["correlation"]) > beyond * pair["error"]
        ]
        if pairs:
            words = "pairs that are beyond the noise (95 % sure of all)"
            lines += ["", f"correlations of {tried:,} {words}"]
        for _, pair, value, error in sorted(pairs, reverse=True)[:_SHOWN]:
            lines.append(f"  {pair:<40} {value:+.2f} ± {2 * error:.2f}")
        if pairs and self.layout.missing == "flag":
            lines.append("A missing number counts as the middle of its bounds in a correlation.")
        if self.layout.missing == "middle" and any(map(is_bounds, self.layout.columns.values())):
            lines += ["", MISSING]
        # Names may come from another client: none of them may steer the terminal.
        return [re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", line) for line in [*lines, "", self.text]]


def _format_entry(entry: StatisticsEntry, error: float) -> list[str]:
    name = entry["name"][:24]
    if "shares" in entry:
        shares = ", ".join(f"{text} {share:.1%}" for text, share in entry["shares"].items())
        return [f"{name:<24} {shares}  (each ± {2 * error:.1%})"]
    bars = entry.get("histogram", [])
    most = max(bars, default=0) or 1
    drawn = "".join(_BARS[round(share / most * 8)] for share in bars)
    missing = f", missing {entry['missing']:.1%}" if "missing" in entry else ""
    spread = f"{entry['deviation']:.3g}" if "deviation" in entry else "hidden by noise"
    return [
        f"{name:<24} mean {entry['mean']:.4g} ± {2 * entry['mean_error']:.2g}, standard deviation "
        f"{spread}{missing}, {entry['low']:g} {drawn or 'to'} {entry['high']:g}"
    ]


def make_model(layout: Layout, *, bins: int = BINS, norm: float = 1.0) -> Statistics:
    """Return the model of a table's statistics."""
    if layout.text is not None:
        remedy = "texts have no mean; describe a copy of the table without them"
        raise InputError.of("data.text", layout.text, "absent for a description", remedy)
    number = int(layout.missing == "flag")
    counts = tuple(number if is_bounds(s) else len(s) + 1 for s in layout.columns.values())
    loss = None if layout.target is None else "squared"
    return Statistics(counts, len(layout.classes) or 1, bins, norm, loss)


def make_description(
    layout: Layout, uploaded: Any, sigma: float, *, recipe: Recipe, **known: Any
) -> Description:
    """Return the description that one client's upload is, of the model with `recipe.clip`."""
    (samples,) = known["clients"].values()
    if layout.target is not None:
        layout = replace(layout, target=layout.target._replace(loss=""))
    model = make_model(layout, bins=known["bins"])
    scale = np.full(model.size, model.divisor)
    scale[model.parts["products"]] /= model.weight
    mu2 = (float(recipe.sensitivity(samples)) / sigma) ** 2 * _ROUND_UP
    epsilon = float(calibration.bound_epsilon(known["delta"], mu2))
    mean = np.asarray(uploaded, np.float64) * scale
    return Description(
        layout, epsilon=max(epsilon, 1e-6), mean=mean, error=sigma * model.divisor, **known
    )


def plan_release(tank: Tank, whole: int, share: float, most: int = 10**6) -> Round:
    """Return the round that takes at most this share of a budget of `whole` units.

    It is the first of so many equal ones. A run of `most` rounds may be too short for a small
    share: then the noise is scaled up.

    >>> plan_release(Tank.full(1.0).spend(FULL // 10), FULL, share=0.1)
    Round(t=0, horizon=9, scale=1.0, spread=None)
    >>> plan_release(Tank.full(1.0), FULL, share=0.25, most=1)
    Round(t=0, horizon=1, scale=2.000000000001819, spread=1)
    """
    most_units = int(Fraction(str(share)) * whole)
    if not tank.left:
        raise TankEmpty("the privacy budget has nothing left for a description")
    rounds = int(tank.left) // (most_units + 1) + 1  # so that left // rounds ≤ most_units
    if rounds <= most:
        return Round(0, rounds)
    rounds = (FULL - int(tank.opened)) // (most_units + 1) + 1  # a scaled round is a share of that
    return Round(0, most, math.sqrt(rounds / most) * (1 + 2**-40), most)


def require_share(share: float) -> None:
    """Refuse a share that is not from 1e-6 to 1; a smaller one would release only noise."""
    if not 1e-6 <= share <= 1:
        raise InputError.of("share", share, "from 1e-06 to 1", "0.1 is a tenth of the budget")


def is_node_file(path: Path) -> bool:
    """Return whether a TOML file is a node file: it names a vault. Another may be a plan."""
    try:
        return "vault" in tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):  # `Node.load` says what is wrong with it
        return False


def describe_node(path: Path, *, share: float = SHARE, bins: int = BINS) -> Description:
    """Release a description of the table that a node file names; the client's vault pays for it."""
    node = Node.load(path)
    require_share(share)
    if node.table is None:
        raise InputError.of(
            "data.path", node.data.name, "a table whose columns are declared", "describe a .csv"
        )
    check_node(node)
    rows, source = node.read_rows(), Source(node.data, **node.table, target=node.target)
    layout, run = make_layout(check_source(source), source), secrets.token_hex(16)
    with open_vault(node, rows) as vault:  # with the node file's terms, as the answer will
        policy = vault.policy
        turn = plan_release(vault.tank(run), vault.limit, share, policy.max_rounds)
    norm = min(1.0, policy.clip)
    model = make_model(layout, bins=bins, norm=norm)
    recipe = Recipe(1 / norm, norm, unit=policy.unit)
    # A message of a number names a loss, which statistics do not need.
    target = None if node.target is None else node.target._replace(loss="squared")
    form = replace(model.form(), rows_per_person=node.rows_per_person, target=target)
    zeros = {PARAMETER: np.zeros(model.size, np.float32)}
    request = Request(run, turn, 1, 1, "balanced", recipe, form, zeros, encoding=rows.encoding)
    head, arrays = messages.unpack(answer_request(request.to_blob(), node))
    if head["kind"] != "upload":
        raise Refusal(f"the client refuses its own description ({head['code']}): {head['text']}")
    with Vault.open(node.vault, dataset=rows.fingerprint, wait=PATIENCE) as vault:
        left = vault.left if policy.disclose else None
    return make_description(
        layout,
        arrays[PARAMETER],
        head["sigma"][0],
        recipe=recipe,
        unit=policy.unit,
        delta=policy.delta,
        clients={node.name: policy.samples},
        bins=bins,
        left=left,
        not_covered=list_uncovered(policy.unit),
    )


def list_uncovered(unit: Unit, *also: str) -> tuple[str, ...]:
    """Return the codes of what a description's promise does not cover; it evaluates nothing."""
    codes = (*list_always_not_covered(unit), *also)
    return tuple(code for code in dict.fromkeys(codes) if not code.startswith("evaluation"))


def combine(descriptions: Sequence[Description]) -> Description:
    """Return one description of all clients together: their means, weighted by their samples."""
    first = descriptions[0]
    clients: dict[str, int] = {}
    for other in descriptions:
        if (other.layout, other.bins, other.unit) != (first.layout, first.bins, first.unit):
            raise InputError(
                "descriptions must be of the same columns, bounds, categories, bins and unit to be "
                "combined; describe each client with the same declarations"
            )
        if twice := clients.keys() & other.clients.keys():
            raise InputError.of("client", sorted(twice)[0], "in one description", "leave one out")
        clients |= other.clients
    weight = np.array([other.samples for other in descriptions]) / sum(clients.values())
    loosest = max(descriptions, key=lambda one: (one.epsilon, one.delta))
    codes = dict.fromkeys(code for other in descriptions for code in other.not_covered)
    return replace(
        first,
        clients=clients,
        epsilon=loosest.epsilon,
        delta=max(other.delta for other in descriptions),
        mean=np.einsum("i,ij->j", weight, np.stack([other.mean for other in descriptions])),
        error=math.sqrt(sum((w * o.error) ** 2 for w, o in zip(weight, descriptions, strict=True))),
        not_covered=tuple(codes),
        left=None if len(descriptions) > 1 else first.left,
    )


def read_description(path: Path) -> Description:
    """Read a description that `sottovoce describe` has written."""
    from pydantic import TypeAdapter, ValidationError

    from sottovoce.schemas import DescriptionDocument

    try:
        values = TypeAdapter(DescriptionDocument).validate_python(
            json.loads(path.read_text("utf-8"))
        )
        released = values["released"]
        layout = Layout.from_json(released["table"])
        if released["target"] is not None:
            layout = replace(layout, target=Regression("", *released["target"]))
        description = Description(
            layout,
            values["unit"],
            values["delta"],
            values["epsilon"],
            values["clients"],
            np.array(released["mean"]),
            values["share_error"],
            released["bins"],
            tuple(values["not_covered"]),
        )
        if description.mean.shape != (description.model.size,) or not description.clients:
            raise ValueError("its numbers are not those of its columns")
        if max(description.clients.values()) > MOST_SAMPLES:
            raise ValueError("a client has more samples than any vault")
        with np.errstate(over="raise", invalid="raise"):
            json.dumps(description.to_json(), allow_nan=False)  # as `--out` will
        return description
    except FileNotFoundError:
        raise InputError.of("FILE", str(path), "a file that exists", "check its name") from None
    except (OSError, ArithmeticError, ValueError, TypeError, KeyError) as error:
        why = files.why(error) if not isinstance(error, ValidationError) else "it lacks keys of one"
        raise DataError(f"{path.name} cannot be read as a description: {why}") from None
