"""`sottovoce reproduce`: run what is missing, judge, draw, and write the page."""

from __future__ import annotations

import base64
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln, logsumexp

from sottovoce.data import datasets
from sottovoce.data.files import hold_folder, write_file
from sottovoce.errors import DataError, InputError, RunError
from sottovoce.privacy.gaussian import Floats
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.reports.progress import ProgressLine
from sottovoce.studies import store
from sottovoce.studies.paper import definition, frontier, horizon, outcomes
from sottovoce.studies.paper.definition import Cell, Figure, Moments, Prototypes, expand, list_seeds
from sottovoce.studies.paper.outcomes import Judged, Outcome, Result, Runs, judge_folder
from sottovoce.studies.paper.page import draw_file, list_pictures, render_figures

Progress = Callable[[int, int], None]  # rounds done at most, rounds in all at most
Job = tuple[Cell, int, Prototypes | None]


def run_missing(
    figures: Sequence[Figure],
    *,
    quick: bool,
    folder: Path,
    progress: Progress,
    on: str | Executor | None = None,
) -> list[str]:
    """Run whatever the figures still lack; return a sentence for each data set that is missing."""
    runs, todo = outcomes.read_runs(folder), dict[tuple[str, int], Job]()
    # Pictures are made beside the run, so the figure that wants them goes first.
    for figure in sorted(figures, key=lambda figure: figure.prototypes is None):
        for cell, seed in list_missing(figure, quick, runs):
            todo.setdefault((cell.key, seed), (cell, seed, figure.prototypes))
    return train(list(todo.values()), folder, progress, on)


def train(
    jobs: Sequence[Job], folder: Path, progress: Progress, on: str | Executor | None = None
) -> list[str]:
    """Run these and store each as it ends; return a sentence for each data set that is missing."""
    if not jobs:
        return []
    # Loaded only now: what is there already is drawn without JAX.
    from sottovoce.simulation.simulate import open_executor

    total = sum(cell.plan.rounds.rounds for cell, _, _ in jobs)
    done, absent = 0, []
    with open_executor(on) as executor:
        for batch in _group_jobs(jobs):
            try:
                for cell, seed, outcome in _train(batch, executor):
                    outcomes.append_run(folder, cell.key, seed, outcome)
                    done += cell.plan.rounds.rounds
                    progress(done, total)
            except DataError as error:
                absent.append(str(error))
                done += sum(cell.plan.rounds.rounds for cell, _, _ in batch)
    return list(dict.fromkeys(absent))


def list_missing(figure: Figure, quick: bool, runs: Runs) -> list[tuple[Cell, int]]:
    """Return the runs that are still to be made, each once."""
    done = {key for key, run in runs.items() if run.pictures or figure.kind != "prototypes"}
    pairs = product(expand(figure, quick), list_seeds(figure, quick))
    wanted = {(cell.key, seed): (cell, seed) for cell, seed in pairs}
    return [pair for key, pair in wanted.items() if key not in done]


def _group_jobs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group jobs with the same data and seeds, which are simulated in one call."""
    by_plan: dict[str, list[Job]] = {}
    for job in jobs:
        by_plan.setdefault(job[0].key, []).append(job)
    portions: dict[Any, list[Job]] = {}
    for group in by_plan.values():
        seeds = tuple(seed for _, seed, _ in group)
        portions.setdefault((group[0][0].plan.data, seeds), []).extend(group)
    return list(portions.values())


def _train(jobs: list[Job], on: Executor | None) -> Iterator[tuple[Cell, int, Outcome]]:
    from sottovoce.simulation.simulate import simulate_each

    cells = list({cell.key: (cell, drawing) for cell, _, drawing in jobs}.values())
    seeds = list(dict.fromkeys(seed for _, seed, _ in jobs))
    for i, trained in simulate_each([cell.plan for cell, _ in cells], seeds=seeds, on=on):
        (cell, drawing), seed = cells[i // len(seeds)], seeds[i % len(seeds)]
        outcome = Outcome.of(trained.record)
        if drawing is not None:
            drawn = draw_prototypes(trained, drawing)
            images = datasets.load(str(trained.record["plan"]["data"]["name"]))
            score = measure_distinctness(drawn, images.test_x, images.test_y)
            outcome = replace(outcome, pictures=encode_pictures(drawn), distinct=score)
        yield cell, seed, outcome


def draw_prototypes(trained: Any, how: Prototypes) -> Floats:
    """Draw for every class the picture that a model assigns to it most surely (Fig. 3).

    Gradient ascent on the input, x ← x + rate · ∇ₓ(log p(class | x) − penalty·‖x‖²), from an empty
    picture, with pixels kept in [0, 1].
    """
    import jax
    import jax.numpy as jnp

    shape, classes = trained.record["model"]["shape"], trained.record["model"]["classes"]
    y = jnp.arange(classes)

    def uncertainty(x: Any) -> Any:
        losses = trained.model.loss(trained.params, x, y)
        return jnp.sum(losses) + how.penalty * jnp.sum(x**2)

    def step(_: int, x: Any) -> Any:
        return jnp.clip(x - how.rate * jax.grad(uncertainty)(x), 0, 1)

    start = jnp.zeros((classes, int(np.prod(shape))))
    return np.asarray(jax.lax.fori_loop(0, how.steps, step, start), dtype=np.float64)


def measure_distinctness(drawn: Floats, x: NDArray[Any], y: NDArray[Any]) -> float:
    """Return the mean correlation of each picture with the mean image of its class.

    >>> x = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    >>> y = np.array([0, 1])
    >>> measure_distinctness(x, x, y), measure_distinctness(np.zeros((2, 3)), x, y)
    (1.0, 0.0)
    """
    means = np.stack([x[y == c].mean(axis=0) for c in range(len(drawn))])
    a, b = (pictures - pictures.mean(axis=1, keepdims=True) for pictures in (drawn, means))
    sizes = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    values = np.sum(a * b, axis=1) / np.where(sizes > 0, sizes, 1.0)
    return round(float(np.mean(values)), 12)


def encode_pictures(drawn: Floats) -> str:
    """Encode pictures as text: one byte for each pixel, in base64.

    >>> encode_pictures(np.array([[0.0, 1.0]]))
    'AP8='
    """
    return base64.b64encode(np.round(255 * drawn).astype(np.uint8).tobytes()).decode()


def compute_moments(what: Moments) -> list[dict[str, Any]]:
    """Compute Fig. 2: for each panel λ, the paper's bound, the true log moment, and `breaks`.

    `breaks` has for every other C the first λ at which the bound is none.

    >>> from sottovoce.studies.paper.definition import load_figure
    >>> panels = compute_moments(load_figure("fig2").moments)
    >>> [panel["breaks"]["1.0"] for panel in panels]
    [28, 80, 7, 28]
    """
    first, last = what.orders
    orders = np.arange(first, last + 1)
    panels = []
    for panel in what.panels:
        q, ratios = float(panel["sampling"]), {}
        for clip in (what.clip, *what.other_clips):  # Δ/σ with Δ = 2ηC/n
            sensitivity = Recipe(what.learning_rate, clip).sensitivity([panel["samples"]])
            ratios[clip] = float(sensitivity[0]) / what.sigma
        curves = {"bound": compute_log_bound, "truth": compute_log_moment}
        found = {**panel, "ratio": ratios[what.clip], "order": orders.tolist()}
        for name, compute in curves.items():
            values = compute(orders, sampling=q, ratio=ratios[what.clip])
            found[name] = [float(f"{value:.6g}") for value in values]
        others = {str(clip): ratios[clip] for clip in what.other_clips}
        breaks = {clip: find_first_break(sampling=q, ratio=x) for clip, x in others.items()}
        panels.append(found | {"breaks": breaks})
    return panels


def compute_log_moment(order: ArrayLike, *, sampling: float, ratio: float) -> Floats:
    """Return the log moment ln D₁₀(λ) of the sampled Gaussian, for one λ or an array of them.

    With ν₀ = N(0, σ²), ν₁ = (1−q)·N(0, σ²) + q·N(Δ, σ²) and x = Δ/σ the paper defines (eq. 7)

        D₁₀(λ) = E_{ν₀}[(ν₁/ν₀)^{λ+1}] = Σ_l C(λ+1, l) (1−q)^{λ+1−l} q^l e^{l(l−1)x²/2}.

    `sampling` is q, `ratio` is x.

    >>> float(compute_log_moment(1, sampling=0.5, ratio=1.0).round(6))
    0.357374
    """
    answers = []
    for lam in np.atleast_1d(np.asarray(order, dtype=np.int64)):
        k = np.arange(lam + 2, dtype=np.float64)
        m = lam + 1.0
        log_choose = gammaln(m + 1) - gammaln(k + 1) - gammaln(m - k + 1)
        # 0·ln 0 = 0: at q = 1 only the last term is left.
        absent = np.where(k < m, (m - k) * np.log1p(-sampling) if sampling < 1 else -np.inf, 0.0)
        answers.append(
            logsumexp(log_choose + absent + k * np.log(sampling) + k * (k - 1) * ratio**2 / 2)
        )
    return np.asarray(answers, dtype=np.float64).reshape(np.shape(order))


def compute_log_bound(order: ArrayLike, *, sampling: float, ratio: float) -> Floats:
    """Return qλ(λ+1)x²/2, by which the paper bounds ln D₁₀ from above, eq. (15).

    It takes e^u − 1 ≈ u in the wrong direction: this is a bound only for small λ.

    >>> float(compute_log_bound(1, sampling=0.5, ratio=1.0))
    0.5
    """
    lam = np.asarray(order, dtype=np.float64)
    return np.asarray(sampling * lam * (lam + 1) * ratio**2 / 2, dtype=np.float64)


def compute_certain_break(*, sampling: float, ratio: float) -> float:
    """Return the λ beyond which the bound is certainly broken: λx²/2 > ln(1/q)/(1−q).

    Keeping only the last term of the sum, ln D₁₀ ≥ (λ+1)·(ln q + λx²/2), which exceeds
    qλ(λ+1)x²/2 exactly then. At q = 1 the bound is an equality and never breaks.

    >>> round(compute_certain_break(sampling=0.5, ratio=1.0), 6)
    2.772589
    """
    if sampling == 1:
        return float("inf")
    return float(-np.log(sampling) / (1 - sampling) * 2 / ratio**2)


def find_first_break(*, sampling: float, ratio: float) -> int | None:
    """Return the smallest integer λ ≥ 1 at which the paper's bound lies below the true moment.

    None at q = 1, where the two are equal.

    >>> find_first_break(sampling=0.5, ratio=1.0)
    3
    """
    if (end := compute_certain_break(sampling=sampling, ratio=ratio)) == float("inf"):
        return None
    # In every case that test_reproduce_moments.py tries it stays broken from there on: bisect.
    low, high = 0, int(end) + 1
    while high - low > 1:
        middle = (low + high) // 2
        true = compute_log_moment(middle, sampling=sampling, ratio=ratio)
        broken = bool(true > compute_log_bound(middle, sampling=sampling, ratio=ratio))
        low, high = (low, middle) if broken else (middle, high)
    return high


ALL = "all"


def format_listing() -> str:
    """Return a line for each figure."""
    figures = [definition.load_figure(name) for name in definition.list_figures()]
    rows = [
        *((figure.name, figure.paper, figure.title) for figure in figures),
        (ALL, "", "every one of those above"),
        (frontier.NAME, "ours", "What the same budget buys"),
        (horizon.NAME, "ours", "Which rule finds the number of rounds"),
    ]
    return "\n".join(f"{name:<13} {paper:<8} {title}" for name, paper, title in rows)


def reproduce(
    names: Sequence[str],
    *,
    quick: bool = False,
    out: str | Path = "results",
    quiet: bool = False,
    on: str | Executor | None = None,
) -> list[Judged]:
    """Make the figures that are named in the folder `out`; what is there already is not run again.

    `reproduce(["fig2"], quick=True)` returns the verdict on every claim of Figure 2. Where a data
    set is missing its figures are left out, the others are made, and then the error says which.
    """
    wanted, out = choose_figures(names), Path(out)
    words = ["sottovoce", "reproduce", *names, *["--quick"] * quick]
    command = shlex.join([*words, "--out", out.name or str(out)])
    began, show = time.monotonic(), ProgressLine(sys.stderr, quiet=quiet)
    sweeps = [figure for figure in wanted if figure.kind != "moments"]
    progress, skipped = partial(_show_progress, show), []
    with _open_folder(out, quick) as folder:
        absent = run_missing(sweeps, quick=quick, folder=folder, progress=progress, on=on)
        show.close()
        runs = outcomes.read_runs(folder)
        for figure in wanted:
            if figure.moments is not None:
                panels = compute_moments(figure.moments)
                result = Result(figure, quick, command=command, moments=panels)
            elif not list_missing(figure, quick, runs):
                result = outcomes.gather_result(figure, quick, runs, command)
            else:
                skipped.append(figure.name)
                continue
            result.save(folder)
            drawing = draw_file(list_pictures(result))
            write_file(folder / f"{figure.name}.svg", drawing.encode())
        outcomes.end_journal(folder, outcomes.read_finished(folder))
        write_page(folder)
        all_judged = judge_folder(folder)
    if not quiet:
        made = f"{len(wanted) - len(skipped)} figures in {time.monotonic() - began:.0f} s"
        print(made, file=sys.stderr, flush=True)
    if skipped:
        raise DataError(f"{', '.join(skipped)} could not be made: {' '.join(absent)}")
    return [one for one in all_judged if one.figure.name in {f.name for f in wanted}]


def reproduce_study(
    name: str,
    *,
    only: Sequence[str] = (),
    quick: bool = False,
    out: Path = Path("results"),
    quiet: bool = False,
    on: str | Executor | None = None,
) -> Path:
    """Make `out/frontier` or `out/horizon` (`only` some panels): what is there is not run again."""
    show = ProgressLine(sys.stderr, quiet=quiet)
    run = partial(train, progress=partial(_show_progress, show), on=on)
    with _open_folder(out, quick) as folder, closing(show):
        if name == frontier.NAME:
            frontier.reproduce(quick=quick, out=folder, train=run)
        else:
            horizon.reproduce(quick=quick, only=only, out=folder, train=run)
    return folder / name


def choose_figures(names: Sequence[str]) -> list[Figure]:
    """Return the named figures, each once, in their order.

    >>> [figure.name for figure in choose_figures(["fig9", "fig2"])]
    ['fig2', 'fig9']
    """
    every_name = definition.list_figures()
    for alone in (frontier.NAME, horizon.NAME):
        if alone in names:
            raise InputError(
                f"{alone} is made alone; name it in a command by itself, without figures"
            )
    chosen = every_name if ALL in names else [definition.load_figure(name).name for name in names]
    if not chosen:
        raise InputError(f"name a figure ({', '.join(every_name)}) or {ALL}")
    return [definition.load_figure(name) for name in every_name if name in chosen]


def write_page(folder: Path) -> Path:
    """Write index.html from the figures in the folder; nothing is trained."""
    path = folder / "index.html"
    with np.errstate(all="ignore"):  # of damaged figures
        all_judged = load_finished(folder)
        try:
            page = render_figures(all_judged)
        except store.DAMAGE:
            for judged in all_judged:  # which one?
                with store.refuse_damage(folder / f"{judged.figure.name}.json"):
                    render_figures([judged])
            raise
    write_file(path, page.encode())
    return path


def load_finished(folder: Path) -> list[Judged]:
    """Load and judge the figures of a folder; refuse a folder without any."""
    all_judged = judge_folder(folder)
    if not all_judged:
        raise RunError(
            f"{folder} holds neither a run nor figures; sottovoce train and reproduce make them"
        )
    return all_judged


@contextmanager
def _open_folder(out: Path, quick: bool) -> Iterator[Path]:
    """Make the folder if need be, and be the only process that writes into it.

    One with quick results is refused for full ones, and vice versa.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError.of("--out", str(out), "a folder", f"{error.strerror}") from None
    for study in (frontier, horizon, outcomes):  # an outcome is one of a figure, in `out` itself
        for path in sorted((out / getattr(study, "NAME", "")).glob("*.json")):
            content = store.read_results(path, study.SCHEMA)
            with store.refuse_damage(path):
                is_quick = content["quick"] if content else quick
            if is_quick != quick:
                kind = "quick" if is_quick else "full"
                remedy = f"{path.relative_to(out)} there is {kind}: name another folder"
                raise InputError.of("--out", str(out), f"a folder without {kind} results", remedy)
    with hold_folder(out):
        yield out


def _show_progress(line: ProgressLine, done: int, total: int) -> None:
    """Show rounds done and rounds in all; runs may stop early, so the time left is a bound."""
    if not line.due() and done != total:
        return
    left = (time.monotonic() - line.began) * (total - done) / max(1, done)
    fraction = done / max(1, total)
    text = f"{fraction:4.0%}  {done:,} of {total:,} rounds, at most {left:.0f} s left"
    bar = "█" * round(24 * fraction) + "·" * (24 - round(24 * fraction))
    line.say(f"{bar} {text}" if line.live else text)
