"""Check rows before they are trained on: missing, clipped, unknown and repeated values, by client.

`check_table` and `check_arrays` read all rows once; of a table they keep a batch, and a few bytes
per row to find repeats. The result is for whoever holds the rows: `sottovoce check`, the first
lines of `train`, and on a client's own machine `worker --check`. It is computed from private rows
without noise, so that nothing of it is written to a run or sent to a server.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.data import tables
from sottovoce.data.files import read_npz, why
from sottovoce.data.tables import Layout, Scan, Source, Spec, is_bounds, looks_like_id
from sottovoce.errors import DataError, InputError, PlanError, SottovoceError
from sottovoce.models.base import Regression

if TYPE_CHECKING:
    import polars as pl

    from sottovoce.client.node import Node
    from sottovoce.data.federated import Given
    from sottovoce.plan import Plan

#: A warning is given where more than this share of a client's rows is touched, and more than a few.
TOUCHED, FEW_ROWS = 0.05, 3
ALMOST_ALL = 0.95  # of a column's numbers outside its bounds: the bounds are wrong
NARROW, BINS = 0.1, 200  # the part of its public range that a column should fill
RARE = 0.05  # the share of a class below which accuracy misleads
LARGEST = 50.0  # larger numbers in arrays are taken for unscaled ones
LEAST_TESTED = 50  # test rows below which a result says little: ± 0.07 and more
LEAST_WIDE = 5  # columns from which equal rows are no coincidence
LABEL_REMEDY = (
    ", or list the class in data.columns; a number to predict needs model.loss = squared or huber"
)
ONE_CLASS = "all labels are of one class: there is nothing to learn; give rows of every class"
SEEDS = 3  # some splits fit with one seed and not with another
SHOWN = 20  # clients or classes on one line, columns of a list
_WORDS = {
    "missing": "empty in this column and are read as {middle}",
    "outside": "outside {spec} and are clipped to it",
    "unknown": "not among the categories {spec} and become none of them",
    "unreadable": "",
}

Counts = dict[str, Counter[str]]  # by kind, by client


@dataclass
class Report:
    """What was found; `findings` are (level, column, sentence)."""

    file: str
    rows: int = 0
    clients: Counter[str] = field(default_factory=Counter)
    labels: Counts = field(default_factory=lambda: defaultdict(Counter))  # by client, by class
    columns: dict[str, Counts] = field(default_factory=dict)
    specs: dict[str, Spec] = field(default_factory=dict)
    evaluation: dict[str, int] = field(default_factory=dict)  # the rows of its evaluation files
    findings: list[tuple[Literal["error", "warning"], str, str]] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        """The sentences that stop a training."""
        return [text for level, _, text in self.findings if level == "error"]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        clients = [
            {"name": name, "rows": self.clients[name], "labels": self.labels[name]}
            for name in tables.sort_texts(self.clients)
        ]
        columns = [
            {"name": name, "public": list(self.specs[name]), **kinds}
            for name, kinds in self.columns.items()
        ]
        keys = ("level", "column", "text")
        findings = [dict(zip(keys, found, strict=True)) for found in self.findings]
        head = {"file": self.file, "rows": self.rows, "evaluation": self.evaluation}
        return {**head, "clients": clients, "columns": columns, "findings": findings}

    def format_lines(self) -> list[str]:
        """Return the report for people."""
        named = [
            f"{name} {self.clients[name]:,}" for name in tables.sort_texts(self.clients) if name
        ]
        by = f", {len(named)} clients ({_shorten(named)})" if named else ""
        lines = [f"{self.file}: {self.rows:,} rows{by}"]
        lines += [f"{file}: {rows:,} rows to evaluate on" for file, rows in self.evaluation.items()]
        total: Counter[str] = sum(self.labels.values(), Counter())
        shares = [f"{name} {count / self.rows:.1%}" for name, count in sorted(total.items())]
        lines += [f"label: {_shorten(shares)}"] if shares else []
        touched = {c: kinds for c, kinds in self.columns.items() if any(kinds.values())}
        if touched:
            lines += ["", f"{'column':<24}{'missing':>10}{'outside':>10}{'unknown':>10}"]
        for column, kinds in list(touched.items())[:SHOWN]:
            cells = [sum(counts.values()) / self.rows for counts in list(kinds.values())[:3]]
            lines.append(f"{column[:23]:<24}" + "".join(f"{cell:>10.1%}" for cell in cells))
        findings = sorted(self.findings, key=lambda found: found[0])  # errors first
        found = [f"{level}: {text}" for level, _, text in findings]
        return [*lines, "", *(found or ["nothing to warn of"])]

    def count_rows(self, clients: Sequence[str], labels: Sequence[str | None]) -> None:
        """Count rows by client, and by class; without labels where they are numbers."""
        self.clients.update(clients)
        for (client, label), count in Counter(zip(clients, labels, strict=False)).items():
            if label is not None:
                self.labels[client][label] += count

    def warn(self, text: str, column: str = "") -> None:
        """Add a warning, of a column or of the whole."""
        self.findings.append(("warning", column, f"{column}: {text}" if column else text))

    def fail(self, text: str, column: str = "") -> None:
        """Add an error."""
        self.findings.append(("error", column, f"{column}: {text}" if column else text))

    def name_evaluation(self, file: str | Path) -> str:
        """Return the name of a file of evaluation rows, or its path where that name is taken."""
        return str(file) if Path(file).name in self.evaluation else Path(file).name

    def add_evaluation(self, other: Report) -> None:
        """Add the findings about a file of evaluation rows, whose name each of them begins with."""
        self.evaluation[other.file] = other.rows
        self.findings += [(level, c, f"{other.file}: {text}") for level, c, text in other.findings]


def _shorten(items: list[str]) -> str:
    return ", ".join(items[:SHOWN]) + (", …" if len(items) > SHOWN else "")


def check_plan(plan: Plan) -> Report:
    """Check the table or the arrays that a plan names."""
    data = plan.data
    data.require_other_rows()
    if data.path is None:
        remedy = f"name a plan with one; {data.name} needs no check"
        raise InputError.of("data.path", None, "your own table or arrays", remedy)
    from sottovoce.data.federated import deal_arrays, deal_classes, read_arrays

    if data.is_array_file:
        given = read_arrays(plan)
        report = _check_array_file(plan, given)
        _check_deal(report, lambda seed: deal_arrays(plan, given, seed))
    else:
        source = Source(**data.table(), target=plan.regression)
        is_split = not isinstance(data.test, str)
        report = check_table(source, plan.rows_per_person, is_split=is_split)
        if data.person is None:  # the rows of a person are not counted
            _check_deal(report, lambda seed: deal_classes(plan, *_list_rows(report), seed))
    return _judge_plan(report, plan)


def _check_deal(report: Report, deal: Callable[[int], object]) -> None:
    """Add an error where rows without errors cannot be dealt as the plan says, with any seed."""
    refusal = ""
    for seed in range(SEEDS if not report.errors else 0):
        try:
            deal(seed)
        except SottovoceError as error:
            refusal = str(error)
        else:
            return
    if refusal:
        report.fail(refusal)


def _check_array_file(plan: Plan, given: Given) -> Report:
    how: Any = {"target": plan.regression, "classes": given.classes}
    counted, weighed = not (given.validation or given.test), not plan.rows_per_person
    (x, y), name = cast(Any, given.train), Path(str(plan.data.path)).name
    report = check_arrays(name, x, y, given.client, **how, has_weights=weighed, counted=counted)
    for key in ("validation", "test"):
        if (pair := getattr(given, key)) is not None:
            shown = report.name_evaluation(str(getattr(plan.data, key)))
            report.add_evaluation(check_arrays(shown, *pair, **how))
    return report


def _list_rows(report: Report) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the class and the client of as many rows as were counted, in another order."""
    counted = [
        (client, label, count)
        for client, name in enumerate(tables.sort_texts(report.clients))
        for label, count in (report.labels[name] or {"": report.clients[name]}).items()
    ]  # a number to predict has no labels
    clients, labels, counts = zip(*counted, strict=True)
    classes = np.unique(labels, return_inverse=True)[1]
    return np.repeat(classes, counts), np.repeat(np.array(clients, np.int32), counts)


def _judge_plan(report: Report, plan: Plan) -> Report:
    """Add errors where the plan does not fit the clients, and a warning of few test rows."""
    test, clients = plan.data.test, len(report.clients)
    known = plan.data.client is not None and clients > 0
    try:
        plan.replace(**{"data.clients": clients} if known else {})
    except PlanError as error:  # such as a list of budgets of another length
        report.fail(str(error))
    if known and plan.data.clients not in (None, clients):
        report.fail(
            f"data.clients must be {clients}, the clients of column {plan.data.client}, got "
            f"{plan.data.clients}; leave it out, it follows from the table"
        )
    if isinstance(test, str) and test == plan.data.validation:
        report.warn(
            "data.validation and data.test are one file: rows that steer a run flatter its result; "
            "name other rows for one of them"
        )
    rows: int | float = 0 if isinstance(test, str) else test
    if isinstance(test, str):
        rows = report.evaluation.get(test, report.evaluation.get(Path(test).name, 0))
    tested = round(rows * report.rows) if isinstance(rows, float) else rows
    if 0 < tested < LEAST_TESTED and not report.errors:
        report.warn(
            f"about {tested} rows to test on: a share measured on them has a standard error of up "
            f"to {0.5 / tested**0.5:.2f}; take more for data.test, or name a file of other rows"
        )
    return report


def check_node_rows(node: Node) -> Report:
    """Check the rows of a node file, on the client's own machine."""
    path, table = node.data, node.table
    if table is not None:
        source = Source(path, **table, person=node.person, target=node.target)
        return check_table(source, node.rows_per_person)
    try:
        x, y = read_npz(path, "x", "y").values()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as arrays x and y: {why(error)}") from None
    return check_arrays(path.name, x, y, target=node.target, counted=False)


def check_table(source: Source, rows_per_person: int = 0, *, is_split: bool = False) -> Report:
    """Check a CSV or Parquet file against what the plan or the node file says about it.

    `rows_per_person` is how many rows of a person are used where persons are protected, else 0;
    `is_split` says that test rows are taken from this table.
    """
    opened, report = tables.check_source(source), Report(Path(source.path).name)
    if not _check_ragged_rows(opened.path, report):
        return report
    layout = tables.make_layout(opened, source)
    reader = _TableReader(report, layout, source.client, source.person)
    used = {layout.label, source.client, *layout.columns} - {*layout.inferred}
    reader.ids = [
        name
        for name, kind in opened.schema.items()
        if name not in used and looks_like_id(name) and tables.has_cells_to_read(kind)
    ]
    if source.person is not None:
        reader.ids = [source.person]
    wanted = [name for name, kind in opened.schema.items() if name and not kind.is_nested()]
    reader.read(opened, wanted)
    reader.judge_columns()
    reader.judge_rows(len(wanted), rows_per_person, is_split and source.person is None)
    kinds = tables.guess_kinds(opened.path) if source.infer else {}
    for column in layout.inferred:
        if kinds[column] == "id" and column != layout.label:
            report.warn(
                "it looks like an id, and data.infer makes a feature of it; leave it out with "
                f"{column[:30]!a} = [] in data.columns, or name it in data.person or data.client",
                column,
            )
    for file in dict.fromkeys((source.validation, source.test)):
        if file is None:
            continue
        other = Report(report.name_evaluation(file))
        if _check_ragged_rows(Path(file), other):
            public, scan = _TableReader(other, layout), tables.open_table(file)
            kinds_there = {c: kind for c, kind in scan.schema.items() if c in reader.ids}
            public.ids = [c for c, kind in kinds_there.items() if tables.has_cells_to_read(kind)]
            public.read(scan, [layout.label, *layout.columns, *public.ids])
            public.judge_columns()
            public.judge_shared_ids(reader)
        report.add_evaluation(other)
    return report


def _check_ragged_rows(path: Path, report: Report) -> bool:
    """Return whether a CSV can be read on: no row has more cells than the header."""
    if path.suffix.lower() == ".csv":
        ragged = tables.find_ragged_rows(path)
        if ragged.longer:
            report.fail(
                f"rows with more than {ragged.cells} cells: {len(ragged.longer):,}, the first is "
                f"row {ragged.longer[0]}; correct them (a text with a separator needs quotes)"
            )
            return False
        if ragged.shorter:
            report.warn(
                f"rows with fewer than {ragged.cells} cells: {len(ragged.shorter):,}, the first is "
                f"row {ragged.shorter[0]}; the cells that they lack are read as missing"
            )
    return True


class _TableReader:
    """Counts over the batches of a table."""

    def __init__(
        self, report: Report, layout: Layout, client: str | None = None, person: str | None = None
    ) -> None:
        self.report, self.layout, self.client, self.ids = report, layout, client, list[str]()
        named = {"client": client, "person": person}
        self.roles = {role: column for role, column in named.items() if column is not None}
        self.unnamed = Counter[str]()  # rows without a client, or without a person
        self.values: dict[str, set[str]] = defaultdict(set)  # a few texts of each column
        self.ranges: dict[str, tuple[float, float]] = {}  # of numbers
        self.bins: dict[str, NDArray[Any]] = defaultdict(lambda: np.zeros(BINS, np.int64))
        self.others: Counts = defaultdict(Counter)  # by column, frequent texts of no category
        self.first: dict[str, tuple[int, str]] = {}  # the row and cell of a kind and column
        self.hashes: dict[str, list[NDArray[np.uint64]]] = defaultdict(list)
        self.persons: dict[str, list[NDArray[np.uint64]]] = defaultdict(list)  # at any client
        label: Spec = layout.classes if layout.target is None else layout.target[1:]
        report.specs = {**layout.columns, layout.label: label}
        report.columns = {name: {kind: Counter() for kind in _WORDS} for name in report.specs}

    def read(self, opened: Scan, columns: list[str]) -> None:
        """Count all rows of a table that has these columns."""
        for batch in opened.batches(columns):
            self.add_batch(batch)
        if not self.report.rows:
            opened.count_rows()  # it says what to do

    def add_batch(self, batch: pl.DataFrame) -> None:
        """Count one batch."""
        import polars as pl

        report = self.report
        names = pl.Series("client", [""] * len(batch))
        if self.client is not None:
            names = tables.as_text(batch[self.client]).fill_null("(none)").alias("client")
        for role, column in self.roles.items():
            if (empty := tables.as_text(batch[column]).is_null()).any():
                self.first.setdefault(role, (report.rows + int(empty.arg_max() or 0) + 1, ""))
                self.unnamed[role] += int(empty.sum())
        for column, spec in report.specs.items():
            cells = batch[column]
            is_target = column == self.layout.label and self.layout.target is not None
            for kind, mask in _mark_cells(cells, spec, is_target).items():
                report.columns[column][kind].update(names.filter(mask).to_list())
                if kind == "unknown":
                    others = tables.as_text(cells).filter(mask).value_counts(sort=True).head(SHOWN)
                    self.others[column] += Counter(dict(others.iter_rows()))
                if mask.any():
                    row = int(mask.arg_max() or 0)
                    found = report.rows + row + 1, str(tables.as_text(cells[row : row + 1])[0])[:40]
                    self.first.setdefault(f"{kind}:{column}", found)
            if is_bounds(spec):
                low, high = self.ranges.get(column, (np.inf, -np.inf))
                numbers = tables.as_number(cells).drop_nulls().to_numpy()
                self.ranges[column] = numbers.min(initial=low), numbers.max(initial=high)
                lowest, highest = cast(tuple[float, float], spec)
                if highest > lowest:  # the inferred bounds of a column may be one number
                    place = (numbers.clip(lowest, highest) - lowest) / (highest - lowest) * BINS
                    bins = place.astype(np.int64).clip(max=BINS - 1)
                    self.bins[column] += np.bincount(bins, minlength=BINS)
            if len(self.values[column]) <= SHOWN:
                texts = tables.as_text(cells).drop_nulls().unique().head(SHOWN + 1)
                self.values[column].update(texts.to_list())
        labels = tables.as_text(batch[self.layout.label]).to_list()
        report.count_rows(names.to_list(), labels if self.layout.target is None else ())
        self.hashes[""].append(batch.hash_rows(seed=1).to_numpy())
        for column in self.ids:
            pairs = pl.DataFrame([names, tables.as_text(batch[column]).alias("id")]).drop_nulls()
            self.hashes[column].append(pairs.hash_rows(seed=1).to_numpy())
            self.persons[column].append(pairs["id"].hash(seed=1).to_numpy())
        report.rows += len(batch)

    def judge_columns(self) -> None:
        """Add what the counts say of columns and labels."""
        report, label = self.report, self.layout.label
        for column, spec in self.layout.columns.items():
            if count := sum(report.columns[column]["unreadable"].values()):
                row, cell = self.first[f"unreadable:{column}"]
                report.fail(
                    f"cells that are no number: {count:,}, the first is {cell!a} in row {row}; "
                    + tables.suggest_number(cell),
                    column,
                )
            self._judge_values(column, spec)
            if not (is_bounds(spec) and self.layout.missing == "flag"):
                self._warn_of(column, "missing", _show_spec(spec))
            if len(self.values[column]) <= 1:
                report.warn("all rows have the same value; it can be left out", column)
        for role, count in self.unnamed.items():
            report.fail(
                f"rows that name no {role}: {count:,}, the first is row {self.first[role][0]}; "
                "every row belongs to one",
                self.roles[role],
            )
        target = self.layout.target
        if target is not None:
            self._judge_values(label, (target.low, target.high))
        _judge_absent_classes(report, self.layout.classes)
        for kind, words in (
            ("missing", "no label"),
            ("unknown", "a label that is no class"),
            ("unreadable", "a label that is no number"),
        ):
            if count := sum(report.columns[label][kind].values()):
                row, cell = self.first[f"{kind}:{label}"]
                hint = tables.suggest_case(cell, self.layout.classes) if kind == "unknown" else ""
                shown = "the cell is empty" if kind == "missing" else f"{cell!a}"
                report.fail(
                    f"rows with {words}: {count:,}, the first is row {row} ({shown}){hint}; "
                    "correct or remove them" + (LABEL_REMEDY if kind == "unknown" else ""),
                    label,
                )

    def judge_rows(self, wide: int, rows_per_person: int, is_split: bool) -> None:
        """Add what the counts say of classes, copies and persons."""
        report = self.report
        _judge_labels(report, has_weights=not rows_per_person)
        rows = np.concatenate(self.hashes.pop(""))
        if wide >= LEAST_WIDE:
            _judge_repeats(report, len(rows) - len(np.unique(rows)))
        for column, hashes in self.hashes.items():
            here, anywhere = _count_most(hashes), _count_most(self.persons[column])
            remarks, where = [], ""
            if here > max(1, rows_per_person):
                remarks = [
                    f"{rows_per_person} of them are used (data.rows_per_person)"
                    if rows_per_person
                    else "a person with k rows is protected k times less, unless data.person "
                    'names it with local.unit = "person"'
                ]
                where = " at a client" if self.client else ""
            if is_split and anywhere > 1:
                remarks.append(
                    "one person can be in training and test rows, which flatters the result, "
                    f"unless data.person = {column[:30]!a} keeps it on one side"
                )
            if remarks:
                most = here if where else anywhere
                text = f"{column} repeats: one person has up to {most:,} rows{where}; "
                report.warn(text + "; ".join(remarks))

    def judge_shared_ids(self, trained: _TableReader) -> None:
        """Warn of rows to evaluate on whose person is in the training table too."""
        for column, hashes in self.persons.items():
            known = np.concatenate(trained.persons[column])
            if shared := int(np.isin(np.concatenate(hashes), known).sum()):
                self.report.warn(
                    f"{shared:,} rows are of a person who has rows in {trained.report.file} too, "
                    "which flatters the result; evaluate on rows of others",
                    column,
                )

    def _judge_values(self, column: str, spec: Spec) -> None:
        """Say where bounds or categories do not fit the values, or are too wide for them."""
        report, shown, key = self.report, _show_spec(spec), "data.columns"
        if column == self.layout.label:
            key = "the target's range"
        kind, most = ("outside", ALMOST_ALL) if is_bounds(spec) else ("unknown", 1.0)
        found = report.columns[column]
        count, present = sum(found[kind].values()), report.rows - sum(found["missing"].values())
        if count and (count == present or count > most * present):
            listed = ", ".join(f"{text!a}" for text in sorted(self.values[column])[:5])
            if is_bounds(spec):
                listed = "{:g} to {:g}".format(*self.ranges[column])
            wrong = f"outside {shown}" if kind == "outside" else f"none of its categories {shown}"
            part = "every value is" if count == present else f"{count / present:.1%} are"
            hint = self._suggest_case(column, spec)
            report.fail(f"{part} {wrong}: the file has {listed}{hint}; correct {key}", column)
            return
        self._warn_of(column, kind, shown)
        bins = self.bins[column].cumsum()
        is_judged = is_bounds(spec) and column not in self.layout.inferred and bins[-1] > 0
        if not is_judged or len(self.values[column]) <= 1:
            return
        # A few numbers, as 0 and 1, are judged by all of them: 1 may be rare.
        tail = 0.01 if len(self.values[column]) > SHOWN else 0.0
        first = np.searchsorted(bins, tail * bins[-1], side="right")
        last = np.searchsorted(bins, (1 - tail) * bins[-1])
        if (fill := (last - first + 1) / BINS) < NARROW:
            report.warn(
                f"{1 - 2 * tail:.0%} of the values fill {fill:.1%} of {shown}, which costs "
                "accuracy; if a codebook or common sense gives narrower bounds, write those (not "
                "bounds of these rows, which are private), or store its logarithm",
                column,
            )

    def _suggest_case(self, column: str, spec: Spec) -> str:
        cell = self.first.get(f"unknown:{column}", (0, ""))[1]
        return tables.suggest_case(cell, spec)

    def _warn_of(self, column: str, kind: str, shown: str) -> None:
        counts, clients = self.report.columns[column][kind], self.report.clients
        shares = {name: counts[name] / clients[name] for name in counts if counts[name] > FEW_ROWS}
        if not shares or max(shares.values()) <= TOUCHED:
            return
        worst = max(shares, key=lambda client: shares[client])
        by = f" (most at {worst}: {shares[worst]:.1%})" if worst and len(clients) > 1 else ""
        share = sum(counts.values()) / self.report.rows
        middle, remedy = "none of the categories", ""
        if kind == "unknown":
            # For the holder of the rows alone, as all of this report is.
            frequent = ", ".join(f"{text[:30]!a}" for text, _ in self.others[column].most_common(3))
            case = self._suggest_case(column, self.report.specs[column])
            remedy = f"; the most frequent others: {frequent}{case}"
        if shown.startswith("["):
            middle = f"the middle of {shown}"
            remedy = (
                '; data.missing = "flag" gives the model an input that says which are empty'
                * (kind == "missing")
            )
        words = _WORDS[kind].format(spec=shown, middle=middle)
        self.report.warn(f"{share:.1%} of the rows are {words}{by}{remedy}", column)


def describe_unfit_cells(path: str | Path, layout: Layout) -> str | None:
    """Return a sentence about cells that were read as something else; None: all fit.

    They are outside the bounds, unknown categories, or empty where the model has no flag for it.
    """
    counts, empty, rows = Counter[str](), Counter[str](), 0
    for batch in tables.open_table(path, "FILE").batches(list(layout.columns)):
        rows += len(batch)
        for column, spec in layout.columns.items():
            marks = _mark_cells(batch[column], spec)
            counts[column] += int(marks["outside" if is_bounds(spec) else "unknown"].sum())
            if is_bounds(spec) and layout.missing != "flag":
                empty[column] += int(marks["missing"].sum())
    said = {
        "numbers outside their bounds were clipped, and unknown categories read as none": counts,
        "empty numbers were read as the middle of their bounds": empty,
    }
    parts = [
        f"{words}: {_shorten([f'{column} {n:,}' for column, n in found.items() if n])}"
        for words, found in said.items()
        if found.total()
    ]
    return f"{Path(path).name}: of {rows:,} rows, {'; '.join(parts)}" if parts else None


def _show_spec(spec: Spec) -> str:
    return f"[{spec[0]:g}, {spec[1]:g}]" if is_bounds(spec) else _shorten([*map(str, spec)])


def _mark_cells(cells: pl.Series, spec: Spec, is_target: bool = False) -> dict[str, pl.Series]:
    """Return which cells are missing, outside of the bounds, unknown or no number.

    An infinite number is outside; as a number to predict it is none.
    """
    if not is_bounds(spec):
        texts = tables.as_text(cells)
        return {"missing": texts.is_null(), "unknown": ~texts.is_in(list(spec)).fill_null(True)}
    numbers = tables.as_number(cells)
    unreadable = numbers.is_null() & tables.is_text(cells)
    if is_target:
        unreadable |= numbers.is_infinite().fill_null(False)
    outside = ((numbers < spec[0]) | (numbers > spec[1])).fill_null(False)
    missing = numbers.is_null() & ~unreadable
    return {"missing": missing, "outside": outside, "unreadable": unreadable}


def _count_most(hashes: list[NDArray[np.uint64]]) -> int:
    return int(np.unique(np.concatenate(hashes), return_counts=True)[1].max(initial=0))


def _judge_absent_classes(report: Report, classes: Sequence[str]) -> None:
    """Warn of declared classes without rows: in the whole file, and at clients."""
    total: Counter[str] = sum(report.labels.values(), Counter())
    absent = [name for name in classes if not total[name]]
    if absent and total:
        report.warn(
            f"no row has the class {_shorten(absent)}, which data.columns declares: nothing can be "
            "learnt or measured of it; correct its name, or leave it out"
        )
    lacking = [
        f"{client} ({_shorten([c for c in classes if total[c] and not found[c]])})"
        for client, found in sorted(report.labels.items())
        if client and 1 < len(found) < len(classes) - len(absent)
    ]
    if lacking:
        report.warn(f"clients without rows of a class: {_shorten(lacking)}")


def _judge_labels(report: Report, *, has_weights: bool) -> None:
    total: Counter[str] = sum(report.labels.values(), Counter())
    name, count = min(total.items(), key=lambda pair: pair[1], default=("", 0))
    if 2 <= len(total) <= SHOWN and count < RARE * report.rows:
        share, weights = count / report.rows, ""
        if has_weights:  # which a plan that protects persons refuses
            weights = ", and see model.class_weights, with which a rare class counts for more"
        report.warn(
            f"the class {name} has {share:.1%} of the rows: a model that never names it can be "
            f"right in {1 - share:.1%}; judge by AUROC or balanced accuracy{weights}"
        )
    folded: dict[str, list[str]] = defaultdict(list)
    for text in sorted(total):
        folded[text.strip().casefold()].append(text)
    for alike in [names for names in folded.values() if len(names) > 1][:FEW_ROWS]:
        report.warn(
            f"the labels {_shorten(alike)} differ in upper and lower case only, and are different"
            " classes; write them alike in the file"
        )
    single = [client for client, found in report.labels.items() if client and len(found) == 1]
    if single and len(total) > 1:
        listed = _shorten(tables.sort_texts(single))
        report.warn(f"clients with rows of one class only: {listed}")


def _judge_repeats(report: Report, repeated: int) -> None:
    if repeated > max(FEW_ROWS, TOUCHED * report.rows):
        report.warn(
            f"{repeated / report.rows:.1%} of the rows are copies of another row; if a record is "
            "there twice, remove one, because the promise is for a row"
        )


def check_arrays(
    file: str,
    x: NDArray[Any],
    y: NDArray[Any],
    owner: ArrayLike | None = None,
    target: Regression | None = None,
    classes: Sequence[str] = (),
    has_weights: bool = True,
    counted: bool = True,
) -> Report:
    """Check arrays x[n, …] and y[n], with the client of each row and declared classes, if any.

    `counted` says that the classes are those of y. What training refuses is an error.
    """
    from sottovoce.data.federated import check_pair, read_labels

    report = Report(file, rows=len(y) if y.ndim else 0)
    try:
        how: Any = {"target": target, "counted": counted and not classes}
        samples, _ = check_pair("data", (x, y), **how, finite=False)
        names = np.full(len(y), "")
        if owner is not None:
            names = read_labels("data.client", owner).astype(str)
        if names.shape != y.shape:
            raise InputError.of("data.client", names.shape, f"{len(y)} names", "one a row")
    except InputError as error:
        report.fail(str(error))
        return report
    rows, is_text = samples.x, x.ndim == 1  # texts, packed into numbers
    labels = samples.y.astype(str)
    report.count_rows(names.tolist(), labels.tolist() if target is None else ())
    if target is not None:
        outside = float(np.mean((y < target.low) | (y > target.high)))
        if outside > TOUCHED:
            shown = f"[{target.low:g}, {target.high:g}]"
            words = _WORDS["outside"].format(spec=shown)
            report.warn(f"{outside:.1%} of the rows are {words}", "y")
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        report.fail(
            f"{int((~finite).sum()):,} rows hold a number that is missing or not finite, the first "
            f"is row {int(finite.argmin()) + 1}; fill them in with a public value or remove them",
            "x",
        )
    scaled = x.reshape(len(x), -1) if x.dtype.kind in "iu" else rows  # bytes are said to be bytes
    if not is_text and (sentence := describe_scale(scaled[finite])) is not None:
        report.warn(sentence, "x")
    constant = 0 if is_text else int((rows.min(axis=0) == rows.max(axis=0)).sum())
    if constant > TOUCHED * rows.shape[1]:
        report.warn(f"{constant:,} of {rows.shape[1]:,} columns are constant", "x")
    if target is None and not classes and counted and len(np.unique(labels)) == 1:
        report.warn(ONE_CLASS, "y")
    _judge_absent_classes(report, classes)
    _judge_labels(report, has_weights=has_weights)
    if rows.shape[1] >= LEAST_WIDE and not is_text:
        _judge_repeats(report, len(rows) - len({hash(row.tobytes()) for row in rows}))
    return report


def describe_scale(x: NDArray[Any]) -> str | None:
    """Return a sentence where numbers are not scaled: pixels as bytes, or large ones.

    >>> describe_scale(np.array([[0, 255]], np.uint8))
    'whole numbers from 0 to 255 are used as they are; divide pixels by 255'
    >>> describe_scale(np.array([[0.0, 1.0]])) is None
    True
    """
    is_empty = not x.size or x.dtype.kind == "U"
    low, high = (0.0, 0.0) if is_empty else (float(x.min()), float(x.max()))
    if x.dtype.kind in "iu" and low >= 0 and LARGEST < high <= 255:
        return f"whole numbers from {low:g} to {high:g} are used as they are; divide pixels by 255"
    if max(-low, high) > LARGEST:
        return (
            f"numbers from {low:g} to {high:g} are used as they are; scale them to about [-1, 1] "
            "by public constants, or clipping and step do not fit them"
        )
    return None
