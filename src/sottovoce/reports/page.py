"""One run as one page. Every string of the record is escaped on its way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.errors import RunError
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import LEAKS, NOT_COVERED, THIS_RUN_ONLY, TRAINING_ONLY, round_up
from sottovoce.reports import figures
from sottovoce.reports.document import (
    ceiling,
    count,
    document,
    duration,
    escape,
    number,
    percent,
    sheet,
    value,
)
from sottovoce.reports.run import CheckedRun, Clients, read

# The confusion matrix of the test: which class is taken for which.


def confusion(run: CheckedRun) -> str:
    """The matrix as a table, each row shaded by its shares; nothing where the record has none."""
    table = run.confusion
    if table is None or not table.sum():
        return ""
    names = run.classes if len(run.classes) == len(table) else [str(i) for i in range(len(table))]
    shares = table / np.maximum(1, table.sum(axis=1, keepdims=True))
    head = "".join(f'<th scope="col" class="n">{escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(
            f'<td class="n" style="--part:{100 * share:.0f}%">{count:,}</td>'
            for count, share in zip(counts, own, strict=True)
        )
        + f'<td class="n">{percent(float(own[i]))}</td></tr>'
        for i, (name, counts, own) in enumerate(zip(names, table, shares, strict=True))
    )
    return f"""
<section aria-labelledby="confusion">
<h2 id="confusion">Which class is taken for which</h2>
<div class="card scroll" role="region" aria-label="Confusion matrix" tabindex="0">
<table class="confusion"><caption class="hidden">Test rows by their class (row) and the class they \
were taken for (column)</caption>
<thead><tr><th scope="col">is … taken for</th>{head}<th scope="col" class="n">right</th></tr>
</thead>
<tbody>{body}</tbody></table></div>
</section>"""


# The guarantee card: what holds, in figures and in words; what does not; fuel and attacker.


_UNITS = {"record": "one record of a client’s data", "client": "a client’s whole dataset"}
_ADJACENCIES = {"replace-one": "replace-one: the unit is replaced by any other"}
_ADVERSARIES = {"server": "the server, which sees every upload and knows who sent it"}
_CALIBRATIONS = {
    "exact": "exact (Gaussian differential privacy)",
    "zcdp": "zcdp (zero-concentrated differential privacy)",
    "paper": "paper (Theorem 1, which can add too little noise)",
}


def card(run: CheckedRun, mu: float) -> str:
    """The card as one section. `mu` is the attacker's, `Run.attacker_mu`."""
    unit = _UNITS.get(run.unit, run.unit)
    if {*TRAINING_ONLY} & {*run.not_covered}:
        unit = unit.replace("data", "training data")
    facts = [
        ("ε", "privacy loss", ceiling(run.epsilon)),
        ("δ", "added to every probability at most", ceiling(run.delta)),
        ("Unit", "", unit),
        ("Adjacency", "", _ADJACENCIES.get(run.adjacency, run.adjacency)),
        ("Adversary", "", _ADVERSARIES.get(run.adversary, run.adversary)),
        ("Calibration", "", _CALIBRATIONS.get(run.calibration, run.calibration)),
    ]
    rows = "".join(
        f"<div><dt>{name}{f' <small>{escape(hint)}</small>' if hint else ''}</dt>"
        f"<dd>{escape(shown)}</dd></div>"
        for name, hint, shown in facts
    )
    # The list below says it again, one to a line.
    paragraph = run.text.partition(" Not covered: ")[0]
    uncovered = "".join(f"<li>{escape(NOT_COVERED.get(c, c))}</li>" for c in run.not_covered)
    others = tighter(run)
    whose = (
        "<p>For the client with the loosest budget; "
        f"{count(others, 'client')} {'has a tighter one' if others == 1 else 'have tighter ones'} "
        "(see “By budget”).</p>"
        if others
        else ""
    )
    return f"""
<section class="card" aria-labelledby="guarantee">
<h2 id="guarantee">The guarantee</h2>
{_asked(run)}{_leaks(run)}{whose}
<div class="columns">
<div>
<dl class="facts">{rows}</dl>
<p>{escape(paragraph)}</p>
{_free(run)}{_rehearsed(run)}</div>
<div>
{_gauge(run)}
{_attacker(run, mu)}
<h3>Not covered</h3>
<ul>{uncovered}</ul>
</div>
</div>
</section>"""


def _free(run: CheckedRun) -> str:
    """What was done after the noise, and why the card is the same without it."""
    if run.finish is None:
        return ""
    cost = (
        "from what clients released and from the validation records, which the guarantee does not "
        "cover; for the records that were trained on it costs no privacy"
    )
    if "raw-signal" in run.not_covered:
        cost = (
            "over rounds that the clients' raw losses steered, which the guarantee does not cover"
        )
    elif "evaluation-in-unit" in run.not_covered:
        cost = (
            "from what clients released and from their own validation rows, for which nobody paid"
        )
    return (
        f"<p>After the noise, on the server: {escape(run.finish)}. That is computed {cost}.</p>\n"
    )


def _rehearsed(run: CheckedRun) -> str:
    """How the settings were chosen: a word of the plan, which no run can check."""
    told = run.plan.get("rehearsed")
    if told is None:
        return ""
    return f"<p>Settings were chosen, as the plan says: {escape(told)}.</p>\n"


def tighter(run: CheckedRun) -> int:
    """How many clients have another budget than the loosest, whose (ε, δ) stands on the card."""
    own = run.clients
    if own is None or not run.disclosed:
        return 0
    loosest = (run.epsilon, run.delta)
    if run.calibration == "paper":  # what holds is not what was asked for
        most = int(np.nanargmax(own.capacity))
        loosest = (own.epsilon[most], own.delta[most])
    told = np.isfinite(own.epsilon)
    return int((told & ((own.epsilon != loosest[0]) | (own.delta != loosest[1]))).sum())


def asked(run: CheckedRun) -> float | None:
    """The largest ε that was asked for, if it is not the one that holds (`paper` only)."""
    if run.calibration != "paper":
        return None
    if run.clients is not None:
        epsilon = float(np.nanmax(run.clients.epsilon))
    else:
        wanted = run.section("privacy").get("epsilon")
        if isinstance(wanted, bool) or not isinstance(wanted, int | float):
            return None
        epsilon = float(wanted)
    return epsilon if epsilon != run.epsilon else None


def _asked(run: CheckedRun) -> str:
    wanted = asked(run)
    if wanted is None:
        return ""
    return (
        f'<p class="note">The plan asks for ε = {number(wanted)}, but with the paper’s noise '
        f"ε = {ceiling(run.epsilon)} is what holds. Choose <code>calibration = exact</code> to get "
        "what is asked for.</p>"
    )


def _leaks(run: CheckedRun) -> str:
    """A visible warning where something outside the budget left the clients."""
    codes = [code for code in LEAKS if code in run.not_covered]
    if not codes:
        return ""
    what = " and ".join(escape(NOT_COVERED[code]) for code in codes)
    return (
        f'<p class="note">The budget does not cover {what}: ε, the fuel gauge and the attacker’s '
        "view below hold only for a deployment that does not do so.</p>"
    )


def _gauge(run: CheckedRun) -> str:
    if run.clients is None or not run.disclosed:
        return ""
    used = float(np.nanmax(run.clients.used))
    if run.calibration == "paper":
        meaning = (
            "It is counted by the paper’s formula, so neither the gauge nor the ε of the plan is "
            "the guarantee: the ε on this card is."
        )
    else:
        meaning = (
            "The guarantee is the cap, not the gauge: a run that stops early still promises the "
            "ε on this card, not less."
        )
    return f"""<h3>Fuel gauge</h3>
<div class="gauge" role="img" aria-label="{percent(used)} of the fuel is spent">\
<span style="width:{100 * used:.2f}%"></span></div>
<p><strong>{percent(used)}</strong> spent by the client that used most of its tank. {meaning}</p>"""


def _attacker(run: CheckedRun, mu: float) -> str:
    if not run.disclosed:
        return ""
    thing = "dataset" if run.unit == "client" else "record"
    of = (
        " of a client that discloses its budget" if "undisclosed-budgets" in run.not_covered else ""
    )
    found, area = round_up(float(gaussian.tpr(0.01, mu)), 3), round_up(float(gaussian.auc(mu)), 3)
    drawn = ", with noise drawn securely" if "simulated-noise" in run.not_covered else ""
    seen = "the messages of this run" if {*THIS_RUN_ONLY} & {*run.not_covered} else "all messages"
    return f"""<h3>The attacker’s view</h3>
<dl class="pair">
<div><dt>found at 1&nbsp;% false alarms</dt><dd>{percent(found)}</dd></div>
<div><dt>area under the curve (AUC)</dt><dd>{area:.3f}</dd></div>
</dl>
<p>At the cap, once all fuel is spent{drawn}: no attacker who reads {seen} and asks whether \
a {thing}{of} was this one or another does better, whatever else it knows or computes. A coin \
would score 1.0&nbsp;% and 0.500.</p>"""


SIMULATED = (
    "Simulation: this is what a deployment of this plan would guarantee; "
    "do not publish this model as private."
)
IN_SIMULATION_ONLY = (
    "Simulation of what no deployment does (see what is not covered); "
    "do not publish this model as private."
)
_MOST_LISTED = 200  # clients in the table
_MOST_GROUPS = 12  # budget groups; more distinct budgets are gathered into this many
_VERBS = {"finished": "Finished", "interrupted": "Interrupted", "failed": "Failed"}


def write(folder: Path) -> Path:
    """Read a run folder and write its report.html; the path of the page."""
    folder = Path(folder)
    page = _page(read(folder))
    path = folder / "report.html"
    try:
        path.write_text(page, "utf-8")
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}); check the folder's permissions"
        ) from error
    return path


def render(record: Mapping[str, Any], trace: Mapping[str, Any] | None = None) -> str:
    """The page of a record (and its trace.npz, if there is one) as text; nothing is read."""
    return _page(CheckedRun.of(record, trace))


def headline(run: CheckedRun) -> str:
    """Status, accuracy, data and model, rounds and ε in one sentence."""
    data, model = run.section("data"), run.section("model")
    name = str(data.get("name") or data.get("path") or "your data")
    with_model = f"{_article(model['name'])} {model['name']}" if model.get("name") else "your model"
    after = f"after {run.used:,} of {count(run.planned, 'round')}"
    holds = f"ε {'up to' if tighter(run) else '='} {ceiling(run.epsilon)}"
    if not run.disclosed:
        holds = "budgets that the clients keep to themselves"
    wanted = asked(run)
    if wanted is not None:
        holds += f" ({number(wanted)} was asked for)"
    if run.disclosed and "undisclosed-budgets" in run.not_covered:
        holds += " for the clients that disclose it"
    if any(code in run.not_covered for code in LEAKS):
        holds += ", but for what it does not cover"
    if np.isfinite(run.test_accuracy):
        reached = f"{percent(run.test_accuracy)} test accuracy"
    else:
        reached = "no test accuracy"
    return f"{_VERBS[run.status]}: {reached} on {name} with {with_model}, {after}, at {holds}."


def _article(name: object) -> str:
    # A name without vowels is spelt: an svm, an mlp, a cnn; but a softmax.
    word = str(name).lower()
    return "an" if word[:1] in ("aeiou" if {*word} & {*"aeiou"} else "fhlmnrsx") else "a"


def _page(run: CheckedRun) -> str:
    mu = run.attacker_mu()
    sentence = escape(headline(run))
    only = any(code in run.not_covered for code in ("paper-calibration", *LEAKS))
    words = IN_SIMULATION_ONLY if only else SIMULATED
    banner = f'<p class="banner" role="note">{words}</p>' if run.noise == "simulated" else ""
    parts = [
        _tiles(run),
        card(run, mu),
        _figures(run, mu),
        confusion(run),
        _budgets(run),
        _fairness(run),
        _plan(run),
        _clients(run),
        _origin(run),
    ]
    body = f"""<header>
<p class="eyebrow"><span>sottovoce</span> run report \
<span class="status {run.status}">{run.status}</span></p>
<h1>{sentence}</h1>
{banner}
</header>
<main>
{"".join(part for part in parts if part)}
</main>
<footer><p>Written by sottovoce {escape(run.versions.get("sottovoce", ""))} from \
<code>record.json</code>. This page loads nothing from the network.</p></footer>"""
    return document(title=headline(run), css=sheet("sottovoce.reports", "page.css"), body=body)


def _tiles(run: CheckedRun) -> str:
    clients = len(run.clients) if run.clients is not None else run.section("data").get("clients")
    shown = f"{clients:,}" if isinstance(clients, int) else "–"
    tiles = [
        ("test accuracy", percent(run.test_accuracy)),
        ("test loss", number(run.test_loss, 3)),
        (f"rounds used of {run.planned:,}", f"{run.used:,}"),
        ("clients", shown),
        ("time", duration(run.seconds)),
    ]
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in tiles)
    return f'\n<dl class="tiles">{rows}</dl>'


def _figures(run: CheckedRun, mu: float) -> str:
    drawn: list[tuple[str, str, str]] = []
    if run.used:
        marked = " Dotted lines: T shrank." if 0 < len(run.triggers) <= 60 else ""
        drawn += [
            ("Validation loss", _watched(run) + marked, figures.loss(run)),
            (
                "Validation accuracy",
                "On unprotected records." + marked,
                figures.accuracy(run),
            ),
            ("The horizon", _shrinking(run), figures.horizon(run)),
            ("Noise", "Standard deviation on one coordinate of one upload.", figures.noise(run)),
        ]
        left = run.fuel()
        if left is not None:
            caption = "What is left of the clients’ budgets, as Σ μ²."
            drawn.append(("Fuel left", caption, figures.fuel(left, run)))
    if run.disclosed:
        caption = "The most any attacker finds, against its false alarms."
        drawn.append(("The attacker’s view", caption, figures.attacker(mu)))
    cells = "".join(
        f'<figure class="card"><h3>{title}</h3>{svg}<figcaption>{text}</figcaption></figure>\n'
        for title, text, svg in drawn
    )
    none = "" if run.used else "<p>No round was finished, so there is no course to draw.</p>"
    return f"""
<section aria-labelledby="course">
<h2 id="course">Round by round</h2>
{none}<div class="figures">
{cells}</div>
</section>"""


def _watched(run: CheckedRun) -> str:
    if run.section("data").get("validation") == 0:
        return "On the test rows, which steer this run as in the paper: the test is no fresh one."
    return "What the schedule watches."


def _shrinking(run: CheckedRun) -> str:
    times = len(run.triggers)
    if not times:
        return "T, the number of rounds planned, did not change."
    often = "once" if times == 1 else f"{times} times"
    # The rule is applied after the last round too, where it may end below the rounds done.
    end = max(run.next_horizon[-1], len(run.next_horizon))
    return f"Learning stopped paying: T shrank {often}, to {end:,}."


def _budgets(run: CheckedRun) -> str:
    if run.clients is None:
        return ""
    groups = budget_groups(run.clients)
    if len(groups) < 2 or not run.disclosed:
        return ""
    used = run.clients.used
    rows = []
    for group in groups:
        rows.append(
            [
                _range(run.clients.epsilon[group], ceiling),
                _range(run.clients.delta[group], ceiling),
                f"{len(group):,}",
                _range(run.clients.participations[group]),
                percent(float(np.median(used[group]))),  # a dash where a client keeps it
                percent(float(used[group].max())),
            ]
        )
    head = [_epsilon(run), "δ", "clients", "participations", "spent, median", "spent, most"]
    return f"""
<section aria-labelledby="budgets">
<h2 id="budgets">By budget</h2>
{_table("Clients by budget", head, rows, numbers_from=0)}
</section>"""


def _fairness(run: CheckedRun) -> str:
    """Accuracy by client and by budget, where the test rows are clients' own."""
    if not run.fairness:
        return ""
    if "why" in run.fairness:
        text = f"<p>Accuracy by client is not shown: {escape(run.fairness['why'])}.</p>"
    else:
        names = {"min": "least", "q1": "quarter", "median": "median", "q3": "three quarters"}
        spread = run.fairness["spread"]
        cells = [[percent(spread[key]) for key in spread]]
        head = [names.get(key, "most") for key in spread]
        text = _table("Accuracy of clients on their own test rows", head, cells, numbers_from=0)
        if len(run.fairness["groups"]) > 1:
            rows = [
                [ceiling(g["epsilon"]), ceiling(g["delta"]), f"{g['clients']:,.0f}",
                 f"{g['rows']:,.0f}", percent(g["accuracy"])]
                for g in run.fairness["groups"]
            ]  # fmt: skip
            head = [_epsilon(run), "δ", "clients", "test rows", "accuracy"]
            text += _table("Accuracy by budget", head, rows, numbers_from=0)
    return f"""
<section aria-labelledby="fairness">
<h2 id="fairness">Who is served how well</h2>
{text}
</section>"""


def budget_groups(clients: Clients) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """The clients' indices by budget, tightest first; many distinct budgets are gathered."""
    order = np.lexsort((clients.delta, clients.epsilon))
    pairs = np.stack((clients.epsilon, clients.delta), axis=1)[order]
    pairs = np.nan_to_num(pairs, nan=np.inf)  # who keeps its budget to itself is one group, last
    changes = np.flatnonzero(np.any(pairs[1:] != pairs[:-1], axis=1)) + 1
    if len(changes) < _MOST_GROUPS:
        return np.split(order, changes)
    return np.array_split(order, _MOST_GROUPS)


def _epsilon(run: CheckedRun) -> str:
    """What stands over the clients' own ε: the paper's noise does not give what was asked for."""
    return "ε asked for" if run.calibration == "paper" else "ε"


def _range(values: Any, form: Callable[[float], str] = number) -> str:
    low, high = form(float(values.min())), form(float(values.max()))
    return low if low == high else f"{low} to {high}"


def _plan(run: CheckedRun) -> str:
    general = {key: v for key, v in run.plan.items() if not isinstance(v, dict)}
    sections = [(f"[{key}]", v) for key, v in run.plan.items() if isinstance(v, dict)]
    if general:
        sections.append(("general", general))
    tables = []
    for name, values in sections:
        rows = "".join(
            f'<tr><th scope="row">{escape(key)}</th><td>{escape(value(v))}</td></tr>'
            for key, v in values.items()
        )
        tables.append(
            f'<div class="card"><table><caption>{escape(name)}</caption>'
            f"<tbody>{rows}</tbody></table></div>\n"
        )
    return f"""
<section aria-labelledby="plan">
<h2 id="plan">The plan</h2>
<div class="plan">
{"".join(tables)}</div>
</section>"""


def _clients(run: CheckedRun) -> str:
    c = run.clients
    if c is None or len(c) > _MOST_LISTED:
        return ""
    who = run.who
    rows = [
        [
            who[i].name if who else f"{i}",
            number(c.samples[i]) if np.isnan(c.samples[i]) else f"{c.samples[i]:,.0f}",
            ceiling(c.epsilon[i]),
            ceiling(c.delta[i]),
            number(c.sensitivity[i]),
            f"{c.participations[i]:,.0f}",
            number(c.capacity[i]),
            number(c.spent[i]),
            percent(c.used[i]),
        ]
        for i in range(len(c))
    ]
    head = ["client", "samples", _epsilon(run), "δ", "sensitivity Δ", "participations"]
    head += ["capacity (μ²)", "spent (μ²)", "spent"]
    table = _table("The clients", head, rows, numbers_from=1 if who else 0)
    if who:
        known = [
            [
                w.name,
                number(w.counted) if np.isnan(w.counted) else f"{w.counted:,.0f}",
                w.version,
                w.key,
                w.remarks or "–",
            ]
            for w in who
        ]
        columns = ["client", "samples that count", "version", "key", "remarks"]
        table += _table("Who the clients are", columns, known, numbers_from=len(columns))
    remarks = sum(1 for w in who if w.remarks)
    noted = f", {count(remarks, 'client')} with remarks" if remarks else ""
    return f"""
<section aria-labelledby="clients">
<h2 id="clients">The clients</h2>
<details{" open" if remarks else ""}><summary>{count(len(c), "client")}, one by one{noted}</summary>
{table}
</details>
</section>"""


def _origin(run: CheckedRun) -> str:
    facts = [
        ("engine", run.engine),
        ("noise", run.noise),
        ("seed", "none: the operating system’s entropy" if run.seed is None else run.seed),
        ("started (UTC)", run.started.replace("T", " ").removesuffix("Z").removesuffix("+00:00")),
        ("time", duration(run.seconds)),
        ("time per round", duration(run.seconds_per_round)),
        ("model (SHA-256)", run.model_sha256 or "–"),
        *((f"{name} version", shown) for name, shown in run.versions.items()),
    ]
    rows = [[str(name), str(shown)] for name, shown in facts]
    return f"""
<section aria-labelledby="origin">
<h2 id="origin">How it was made</h2>
{_table("How the run was made", [], rows, numbers_from=2)}
</section>"""


def _table(caption: str, head: list[str], rows: list[list[str]], *, numbers_from: int) -> str:
    """A table whose first column heads its rows; columns from `numbers_from` on align right."""

    def cell(tag: str, column: int, text: str, scope: str = "") -> str:
        right = ' class="n"' if column >= numbers_from else ""
        return f"<{tag}{scope}{right}>{escape(text)}</{tag}>"

    top = "".join(cell("th", i, text, ' scope="col"') for i, text in enumerate(head))
    body = "".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", i, text) for i, text in enumerate(row[1:], start=1))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="card scroll" role="region" aria-label="{escape(caption)}" tabindex="0">'
        f'<table><caption class="hidden">{escape(caption)}</caption>'
        f"{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table></div>"
    )
