# ruff: noqa: E501
"""The page of a rehearsal: what was chosen and why, the surfaces, the prediction, what it cost.

One file that asks nothing of the network and runs no script, in the style of a run's page.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sottovoce._version import __version__
from sottovoce.reports.charts import BLUE, INK, ORANGE, draw_svg, tidy_axes
from sottovoce.reports.pages import (
    document,
    escape,
    format_count,
    format_number,
    format_percent,
    sheet,
)
from sottovoce.studies.rehearsal.space import RATE, ROUNDS

if TYPE_CHECKING:
    from sottovoce.studies.rehearsal.prediction import Prediction
    from sottovoce.studies.rehearsal.rehearsing import Rehearsal

_CSS = """a { color: var(--blue); margin-right: 0.9rem; }
section > p { margin-top: 0.8rem; }
td, th { overflow-wrap: normal; }
pre { font-size: 0.84rem; margin: 0.3rem 0; }
"""
_SIZE = (4.3, 3.3)


def headline(result: Rehearsal) -> str:
    """The choice and what it should reach, in one sentence."""
    plan, found = result.plan, result.prediction
    name = plan.data.name or "your table"
    seen = f" on {plan.model.features} features" if plan.model.features else ""
    return (
        f"Rehearsed for {name}: {plan.model.name}{seen}, {format_count(round(found.rounds), 'round')} of "
        f"η = {format_number(plan.local.learning_rate)}; {found.short()}; {result.cost.short}."
    )


def render(result: Rehearsal) -> str:
    """The page as text."""
    sentence = headline(result)
    parts = [
        _tiles(result),
        _chosen(result),
        _surfaces(result),
        _cost(result),
        _theorem(result),
        _runs(result),
        _files(result),
    ]
    body = f"""<header>
<p class="eyebrow"><span>sottovoce</span> rehearsal</p>
<h1>{escape(sentence)}</h1>
<p class="banner" role="note">{escape(result.rows.trust)}</p>
</header>
<main>
{"".join(part for part in parts if part)}
</main>
<footer><p>Written by sottovoce {escape(__version__)} from <code>rehearsal.json</code>. \
This page loads nothing from the network.</p></footer>"""
    return document(title=sentence, css=sheet("sottovoce.reports", "page.css") + _CSS, body=body)


def _tiles(result: Rehearsal) -> str:
    found, theory = result.prediction, result.theory
    if found.low is None or found.high is None:
        told = [
            ("the budget costs, on the stand-in", f"{100 * found.lost:.1f} points"),
            ("with and without its noise", f"{format_percent(found.mean)} / {_without(found)}"),
        ]
    else:
        told = [
            ("predicted on the stand-in", format_percent(found.mean)),
            (
                "95 % of runs on the stand-in",
                f"{format_percent(found.low)} – {format_percent(found.high)}",
            ),
        ]
    tiles = [
        *told,
        ("as given, on the rows that chose", format_percent(result.baseline.accuracy)),
        (_rounds(result), f"{found.rounds:,.0f}"),
        ("rounds T, Theorem 2", "–" if theory is None else f"{theory.best_rounds:,}"),
        ("cost in privacy", result.cost.tile),
    ]
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in tiles)
    return f'\n<dl class="tiles">{rows}</dl>'


def _rounds(result: Rehearsal) -> str:
    planned = result.plan.rounds.rounds
    if round(result.prediction.rounds) == planned:
        return "rounds T, rehearsed"
    return f"rounds done, rehearsed (T₀ = {planned:,})"


def _without(found: Prediction) -> str:
    return format_percent(found.mean + found.lost)


def _chosen(result: Rehearsal) -> str:
    rows = [[key, _value(result.setting[key]), why] for key, why in result.reasons.items()]
    early = (
        ""
        if result.complete
        else "<p>The runs or minutes were used up before the search came to its end: more of them "
        "may find better settings.</p>"
    )
    seeds = format_count(len(result.seeds), "seed")
    return f"""
<section aria-labelledby="chosen">
<h2 id="chosen">What was chosen, and why</h2>
{early}{_table("Choices", ["key", "chosen", "why"], rows)}
<p>In brackets: accuracy on the stand-in rows that choose, each one setting changed and the rest \
as chosen (models: the best found of each); means over {seeds} for the finalists, the first seed \
for all. The best mean over {seeds} won, of equals the one with fewer rounds. \
{escape(result.doubt())} {escape(result.mixed or "")}</p>
</section>"""


def _surfaces(result: Rehearsal) -> str:
    if not {ROUNDS, RATE} & set(result.setting):
        return ""
    cells = []
    for measure, title in (("loss", "Loss over T and η"), ("accuracy", "Accuracy over T and η")):
        caption = (
            "Each number is the best found at that pair with the model chosen "
            f"({'loss' if measure == 'loss' else 'percent'}, on the rows that choose); the ring "
            "is the choice."
        )
        cells.append(
            f'<figure class="card"><h3>{title}</h3>{surface(result, measure)}'
            f"<figcaption>{escape(caption)}</figcaption></figure>\n"
        )
    return f"""
<section aria-labelledby="surface">
<h2 id="surface">The surface</h2>
<div class="figures">
{"".join(cells)}</div>
</section>"""


def points(result: Rehearsal, measure: str) -> dict[tuple[float, float], float]:
    """(T, η) → the best value found there with the chosen model; the first seed's."""
    chosen, first = result.setting, result.seeds[0]
    found: dict[tuple[float, float], float] = {}
    for trial in result.trials:
        if trial.seed != first or trial.setting.get("model") != chosen.get("model"):
            continue
        value = trial.loss if measure == "loss" else trial.accuracy
        if value is None:
            continue
        at = _place(trial.setting, result)
        better = min if measure == "loss" else max
        found[at] = value if at not in found else better(found[at], value)
    return found


def _place(setting: Any, result: Rehearsal) -> tuple[float, float]:
    own = result.plan
    return (
        float(setting.get(ROUNDS, own.rounds.rounds)),
        float(setting.get(RATE, own.local.learning_rate)),
    )


def surface(result: Rehearsal, measure: str) -> str:
    """The points as numbers on a logarithmic map, darker where it is better."""
    found = points(result, measure)
    chosen = _place(result.setting, result)
    values = np.array(list(found.values()))
    order = np.argsort(np.argsort(-values if measure == "loss" else values, kind="stable"))
    shade = 0.06 + 0.5 * order / max(1, len(values) - 1)

    def paint(figure: Any) -> None:
        ax = figure.add_subplot()
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        for ((T, eta), value), dark in zip(found.items(), shade, strict=True):
            ax.plot(
                T, eta, marker="o", markersize=19, color=BLUE, alpha=float(dark), linestyle="none"
            )
            shown = f"{value:.2f}" if measure == "loss" else f"{100 * value:.1f}"
            ax.text(T, eta, shown, ha="center", va="center", fontsize=8.6, color=INK)
        ax.plot(
            *chosen,
            marker="o",
            markersize=23,
            color=ORANGE,
            fillstyle="none",
            markeredgewidth=2,
            linestyle="none",
        )
        for axis, at in ((ax.xaxis, 0), (ax.yaxis, 1)):
            seen = sorted({place[at] for place in found})
            ticks = _apart(seen)
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            low, high = seen[0], seen[-1]
            (ax.set_xlim if at == 0 else ax.set_ylim)(low / 1.6, high * 1.6)
        ax.minorticks_off()
        ax.set(xlabel="rounds T₀", ylabel="step η")
        tidy_axes(ax)

    what = "Loss" if measure == "loss" else "Accuracy"
    label = (
        f"{what} at {len(found)} pairs of rounds and step; chosen: {chosen[0]:g} rounds of "
        f"{chosen[1]:g}"
    )
    return draw_svg(f"surface-{measure}", label, paint, size=_SIZE)


def _apart(values: Sequence[float]) -> list[float]:
    """Those that are a factor 1.9 or more apart, so that their numbers do not touch.

    >>> _apart([10.0, 14.0, 20.0, 40.0])
    [10.0, 20.0, 40.0]
    """
    kept: list[float] = []
    for value in values:
        if not kept or value >= 1.9 * kept[-1]:
            kept.append(value)
    return kept


def _cost(result: Rehearsal) -> str:
    rows, factor = len(result.rows.train[1]), result.factor
    less = (
        f" A client here holds {1 / factor:.0%} of the rows that it will hold, with a budget worth "
        f"{factor:.3g} times as much (in μ), so that every step has the noise of the real one."
        if factor > 1
        else ""
    )
    found = result.prediction
    each = ", ".join(format_percent(a) for a in found.accuracies)
    counted = " and counts the chance of its test rows" if found.tested else ""
    ranged = "" if found.low is None else f" The range is for one run more{counted}."
    return f"""
<section aria-labelledby="cost">
<h2 id="cost">What it cost, and how far to trust it</h2>
<p>In privacy: {escape(result.cost.why)}</p>
<p>The stand-in: {escape(result.rows.about)}; {rows:,} rows to train on.{escape(less)} \
{escape(result.rows.trust)}</p>
<p>{escape(found.words())}</p>
<p>That is of {format_count(len(found.accuracies), "run")} with fresh seeds on \
{len(result.rows.test[1]):,} stand-in rows that chose nothing: {escape(each)}; mean \
{format_percent(found.mean, 2)}, standard deviation {format_percent(found.deviation, 2)}.{escape(ranged)}</p>
</section>"""


def _theorem(result: Rehearsal) -> str:
    found = result.theory
    if found is None:
        return """
<section aria-labelledby="theorem">
<h2 id="theorem">Theorem 2</h2>
<p>Its constants could not be estimated: the loss of this model is not smooth enough, or does not \
fall under plain gradient descent.</p>
</section>"""
    cells = [
        ["T by Theorem 2", f"{found.best_rounds:,}"],
        ["T rehearsed", result.rounds],
        ["smoothness L", format_number(found.smoothness, 3)],
        ["PL constant μ", format_number(found.curvature, 3)],
        ["gap Θ", format_number(found.gap, 3)],
        ["divergence ε̄²", format_number(found.divergence, 3)],
        ["η told to it (at most 1/L)", format_number(found.learning_rate, 3)],
        ["parameters d", f"{found.dimension:,}"],
    ]
    return f"""
<section aria-labelledby="theorem">
<h2 id="theorem">The best T by Theorem 2, beside the rehearsed one</h2>
{_table("Theorem 2", ["", "value"], cells)}
<p>As derived anew, with its constants estimated on the stand-in. It bounds a mean loss, knows \
nothing of clipping and of no step longer than 1/L: an orientation, not what was chosen.</p>
</section>"""


def _runs(result: Rehearsal) -> str:
    knobs = list(result.setting)
    rows = [
        [
            trial.stage,
            *(_value(trial.setting[key]) for key in knobs),
            str(trial.seed),
            "–" if trial.loss is None else f"{trial.loss:.4f}",
            format_percent(trial.accuracy, 2),
            str(trial.rounds),
        ]
        for trial in result.trials
    ]
    head = ["stage", *knobs, "seed", "loss", "accuracy", "rounds"]
    return f"""
<section aria-labelledby="runs">
<h2 id="runs">Every federation that was run</h2>
<details><summary>{format_count(len(rows), "run")}</summary>
{_table("Runs", head, rows)}
</details>
</section>"""


def _files(result: Rehearsal) -> str:
    content = json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False)
    links = "".join(
        f'<a download="{name}" href="data:{kind};base64,'
        f'{base64.b64encode(text.encode()).decode()}">{name}</a> '
        for name, kind, text in (
            ("plan.toml", "application/toml", result.toml()),
            ("rehearsal.json", "application/json", content),
        )
    )
    return f"""
<section aria-labelledby="plan">
<h2 id="plan">The plan</h2>
<p>{links}</p>
<details><summary>plan.toml</summary>
<div class="card scroll" role="region" aria-label="plan.toml" tabindex="0">
<pre>{escape(result.toml())}</pre></div>
</details>
</section>"""


def _value(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def _table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="card scroll" role="region" aria-label="{escape(name)}" tabindex="0"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )
