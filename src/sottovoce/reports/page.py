"""One run as one page. Every string of the record is escaped on its way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.errors import RunError
from sottovoce.privacy.budget import LEAKS
from sottovoce.reports import figures
from sottovoce.reports.card import asked, card, tighter
from sottovoce.reports.confusion import confusion
from sottovoce.reports.document import document, sheet
from sottovoce.reports.run import Clients, Run, read
from sottovoce.reports.text import ceiling, count, duration, escape, number, percent, value

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
    return _page(Run.of(record, trace))


def headline(run: Run) -> str:
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


def _page(run: Run) -> str:
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


def _tiles(run: Run) -> str:
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


def _figures(run: Run, mu: float) -> str:
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


def _watched(run: Run) -> str:
    if run.section("data").get("validation") == 0:
        return "On the test rows, which steer this run as in the paper: the test is no fresh one."
    return "What the schedule watches."


def _shrinking(run: Run) -> str:
    times = len(run.triggers)
    if not times:
        return "T, the number of rounds planned, did not change."
    often = "once" if times == 1 else f"{times} times"
    # The rule is applied after the last round too, where it may end below the rounds done.
    end = max(run.next_horizon[-1], len(run.next_horizon))
    return f"Learning stopped paying: T shrank {often}, to {end:,}."


def _budgets(run: Run) -> str:
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


def _fairness(run: Run) -> str:
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


def _epsilon(run: Run) -> str:
    """What stands over the clients' own ε: the paper's noise does not give what was asked for."""
    return "ε asked for" if run.calibration == "paper" else "ε"


def _range(values: Any, form: Callable[[float], str] = number) -> str:
    low, high = form(float(values.min())), form(float(values.max()))
    return low if low == high else f"{low} to {high}"


def _plan(run: Run) -> str:
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


def _clients(run: Run) -> str:
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


def _origin(run: Run) -> str:
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
