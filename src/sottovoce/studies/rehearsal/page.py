"""Render the page of a rehearsal: the choice and its reasons, the prediction, what it cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sottovoce._version import __version__
from sottovoce.reports.charts import BLUE, INK, ORANGE, draw_svg, tidy_axes
from sottovoce.reports.pages import (
    format_count,
    format_number,
    format_whole,
    render_page,
)
from sottovoce.studies.rehearsal.search import format_difference
from sottovoce.studies.rehearsal.space import RATE, ROUNDS

if TYPE_CHECKING:
    from markupsafe import Markup

    from sottovoce.studies.rehearsal.rehearsing import Rehearsal

_SIZE = (4.3, 3.3)


def render_rehearsal(result: Rehearsal) -> str:
    """Return the page of a rehearsal."""
    headline, toml = describe_choice(result), result.to_toml()
    content = json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False)
    surfaces: list[tuple[str, str, Markup]] = []
    if {ROUNDS, RATE} & set(result.setting):
        surfaces = [
            ("Loss over T and η", "loss", draw_surface(result, "loss")),
            (
                f"{result.metric[0].upper()}{result.metric[1:]} over T and η",
                f"{result.metric}, per cent",
                draw_surface(result, "accuracy"),
            ),
        ]
    return render_page(
        "rehearsal.html.j2",
        title=headline,
        headline=headline,
        banner=result.rows.trust,
        version=__version__,
        result=result,
        tiles=_list_tiles(result),
        choices=[
            [key, _format_setting(result.setting[key]), reason]
            for key, reason in result.reasons.items()
        ],
        surfaces=surfaces,
        trials=_list_trials(result),
        files=[
            ("plan.toml", "plan.toml", "application/toml", toml),
            ("rehearsal.json", "rehearsal.json", "application/json", content),
        ],
        toml=toml,
    )


def describe_choice(result: Rehearsal) -> str:
    """Return the choice and what it should reach in one sentence."""
    plan, prediction = result.plan, result.prediction
    name = plan.data.name or "your table"
    features = f" on {plan.model.features} features" if plan.model.features else ""
    rounds = format_count(round(prediction.rounds), "round")
    return (
        f"Rehearsed for {name}: {plan.model.name}{features}, {rounds} of "
        f"η = {format_number(plan.local.rate)}; {prediction.summarise()}; "
        f"{result.cost.short}."
    )


def _list_tiles(result: Rehearsal) -> list[tuple[str, str]]:
    prediction, theory, planned = result.prediction, result.theory, result.plan.rounds.rounds
    show = result.format_value
    mean = show(prediction.mean)
    if prediction.low is None or prediction.high is None:
        noiseless = show(prediction.mean + prediction.lost)
        reached = [
            (
                "the budget costs, on the stand-in",
                "unknown"
                if prediction.lost < 0
                else format_difference(prediction.metric, prediction.lost),
            ),
            ("with and without its noise", f"{mean} / {noiseless}"),
        ]
    else:
        low, high = show(prediction.low), show(prediction.high)
        reached = [
            ("predicted on the stand-in", mean),
            ("95 % of runs on the stand-in", f"{low} – {high}"),
        ]
    rounds = "rounds T, rehearsed"
    if round(prediction.rounds) != planned:
        rounds = f"rounds done, rehearsed (T₀ = {planned:,})"
    return [
        *reached,
        (
            f"{result.metric} as given, on the rows that chose",
            show(result.baseline.value),
        ),
        (rounds, format_whole(prediction.rounds)),
        ("rounds T, Theorem 2", "–" if theory is None else f"{theory.best_rounds:,}"),
        ("cost in privacy", result.cost.tile),
    ]


def _list_trials(result: Rehearsal) -> list[list[str]]:
    return [
        [
            trial.stage,
            *(_format_setting(trial.setting[key]) for key in result.setting),
            str(trial.seed),
            "–" if trial.loss is None else f"{trial.loss:.4f}",
            result.format_value(trial.value, 2),
            str(trial.rounds),
        ]
        for trial in result.trials
    ]


def _format_setting(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def find_points(result: Rehearsal, measure: str) -> dict[tuple[float, float], float]:
    """Return (T, η) → the best value found there by the first seed with the chosen model."""
    chosen, first = result.setting, result.seeds[0]
    found: dict[tuple[float, float], float] = {}
    for trial in result.trials:
        if trial.seed != first or trial.setting.get("model") != chosen.get("model"):
            continue
        value = trial.loss if measure == "loss" else trial.value
        if value is None:
            continue
        at = _find_coordinates(trial.setting, result)
        better = min if measure == "loss" else max
        found[at] = value if at not in found else better(found[at], value)
    return found


def _find_coordinates(setting: Any, result: Rehearsal) -> tuple[float, float]:
    return (
        float(setting.get(ROUNDS, result.plan.rounds.rounds)),
        float(setting.get(RATE, result.plan.local.rate)),
    )


def draw_surface(result: Rehearsal, measure: str) -> Markup:
    """Draw the points as numbers on a logarithmic map, darker where they are better."""
    found = find_points(result, measure)
    chosen = _find_coordinates(result.setting, result)
    values = np.array(list(found.values()))
    order = np.argsort(np.argsort(-values if measure == "loss" else values, kind="stable"))
    shade = 0.06 + 0.5 * order / max(1, len(values) - 1)
    best_first = [list(found)[i] for i in np.argsort(-order)]
    labelled = choose_labels([*([chosen] if chosen in found else []), *best_first])

    def paint(figure: Any) -> None:
        ax = figure.add_subplot()
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        for ((T, eta), value), dark in zip(found.items(), shade, strict=True):
            ax.plot(
                T, eta, marker="o", markersize=19, color=BLUE, alpha=float(dark), linestyle="none"
            )
            if (T, eta) in labelled:
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
            seen = sorted({point[at] for point in found})
            ticks = _space_ticks(seen)
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            low, high = seen[0], seen[-1]
            (ax.set_xlim if at == 0 else ax.set_ylim)(low / 1.6, high * 1.6)
        ax.minorticks_off()
        ax.set(xlabel="rounds T₀", ylabel="step η")
        tidy_axes(ax)

    what = "Loss" if measure == "loss" else f"{result.metric[0].upper()}{result.metric[1:]}"
    label = (
        f"{what} at {len(found)} pairs of rounds and step; chosen: {chosen[0]:g} rounds of "
        f"{chosen[1]:g}"
    )
    return draw_svg(f"surface-{measure}", label, paint, size=_SIZE)


def choose_labels(points: Sequence[tuple[float, float]]) -> set[tuple[float, float]]:
    """Return the points whose numbers fit on the map without touching; the first ones go first.

    >>> sorted(choose_labels([(10.0, 1.0), (11.0, 1.0), (40.0, 1.0), (10.0, 8.0)]))
    [(10.0, 1.0), (10.0, 8.0), (40.0, 1.0)]
    """
    logs = np.log2(np.array(points))
    # The limits are a factor 1.6 beyond the points; a number takes a tenth of the map's width.
    parts = logs / (np.ptp(logs, axis=0) + 2 * np.log2(1.6)) / (0.1, 0.075)
    kept: list[int] = []
    for i in range(len(points)):
        if all(np.abs(parts[i] - parts[other]).max() >= 1 for other in kept):
            kept.append(i)
    return {points[i] for i in kept}


def _space_ticks(values: Sequence[float]) -> list[float]:
    """Return values that are a factor 1.9 or more apart, so that their numbers do not touch.

    >>> _space_ticks([10.0, 14.0, 20.0, 40.0])
    [10.0, 20.0, 40.0]
    """
    kept: list[float] = []
    for value in values:
        if not kept or value >= 1.9 * kept[-1]:
            kept.append(value)
    return kept
