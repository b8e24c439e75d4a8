"""The command line: one library call per command, one plain sentence per error.

Exit codes: 0 ok, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import platform
import select
import shutil
import signal
import sys
import time
from importlib import metadata, resources
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer
import typer.core
from typer import Argument, Option

from sottovoce._version import __version__
from sottovoce.cli.deploy import node_app, server_app
from sottovoce.cli.ledger import AsJson, SecondLedger, ledger_app, make_group, print_result
from sottovoce.errors import InputError, SottovoceError

PlanFile = Annotated[
    Path | None, Argument(help="A plan (TOML). Without one: the embedded default.")
]
Settings = Annotated[
    list[str] | None, Option("--set", help="Change one key, as privacy.epsilon=4; may be repeated.")
]
RunFolder = Annotated[
    Path | None, Option(help="A new or empty folder for the run (default: runs/…).")
]
Resume = Annotated[bool, Option("--resume", help="Continue the run that stopped in --out.")]
RecordAsJson = Annotated[bool, Option("--json", help="The record on stdout.")]
Quiet = Annotated[bool, Option("--quiet", help="No progress, only the result.")]
Log = Annotated[
    list[str] | None,
    Option(
        "--log",
        help="Send numbers of rounds and result to mlflow, tensorboard or wandb; may be repeated.",
        metavar="TOOL",
    ),
]
On = Annotated[
    str | None, Option(help="Where runs are computed: ray, or ray:ADDRESS (default: this process).")
]
Quick = Annotated[bool, Option("--quick", help="A smaller version that takes less time.")]

MOST_PROGRAMS = 4000  # compiled ones that are kept; a run on the digits has 17


# With rich installed typer escapes "[required]" in help texts, also where it prints them plainly.
typer.core.HAS_RICH = False

app = typer.Typer(
    name="sottovoce",
    help="Federated learning in which no client has to trust the server.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main() -> NoReturn:
    """Run the command line and exit; every error becomes one sentence on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # ε in a latin-1 pipe must not raise an error
            stream.reconfigure(errors="replace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))
    try:
        code = app(standalone_mode=False)
        if code == 130:  # typer's exit code for Ctrl-C
            raise KeyboardInterrupt
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        code = 2
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "sottovoce"
        message = _suggest_setting(error) or " ".join(error.format_message().split()).rstrip(".")
        code = _print_error(f"{message}; see {command} --help", 2)
    except InputError as error:
        code = _print_error(str(error), 2)
    except SottovoceError as error:
        code = _print_error(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C changes nothing
        code = _print_error("interrupted", 130)
    except (OSError, SystemExit) as error:
        # typer turns a broken pipe into exit code 1.
        cause = error.__context__ if isinstance(error, SystemExit) else error
        if not isinstance(cause, OSError):
            raise
        if _has_reader_left(cause):  # head or less reads no more
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(0)
        refusal = f"the system refused: {cause.strerror or cause}"
        code = _print_error(f"{refusal}; nothing more was done", 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code or 0)


def keep_compiled_programs() -> None:
    """Let JAX keep compiled programs in the user's cache folder, so that a second start is quick.

    Call it before JAX is imported. SOTTOVOCE_CACHE names another folder, or is `off`. A program is
    code that will run: the folder is for its owner alone, and one that others can enter is not
    used. It has the programs of one version for one processor; those that were not used for a month
    are removed. Any of it can be deleted at any time.
    """
    base = os.environ.get("SOTTOVOCE_CACHE")
    if base == "off" or "JAX_COMPILATION_CACHE_DIR" in os.environ or "jax" in sys.modules:
        return
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    machine = f"{platform.machine()} {flags} {metadata.version('jax')} {metadata.version('jaxlib')}"
    digest = hashlib.sha256(machine.encode()).hexdigest()[:12]
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        parent = Path(base or Path(home) / "sottovoce") / "compiled"
        folder = parent / f"{__version__}-{digest}"
        if folder.is_dir() and sum(1 for _ in folder.iterdir()) > MOST_PROGRAMS:
            shutil.rmtree(folder)
        if not folder.is_dir():
            parent.mkdir(parents=True, exist_ok=True)
            for unused in parent.glob("*-" + "?" * len(digest)):
                if time.time() - unused.stat().st_mtime > 30 * 86_400:
                    shutil.rmtree(unused, ignore_errors=True)
            folder.mkdir(mode=0o700)
        os.utime(folder)
        status = folder.stat()
        if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o077):
            return
    except (OSError, RuntimeError):  # no home, or a full disk: everything is compiled as before
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"  # else paths are part of names


def _suggest_setting(error: click.UsageError) -> str | None:
    """Return a sentence for an option that is a key of the plan, as --epsilon; None for others."""
    takes_settings = error.ctx and any(p.name == "settings" for p in error.ctx.command.params)
    if not isinstance(error, click.NoSuchOption) or not takes_settings:
        return None
    import sottovoce.plan  # noqa: F401 - it fills TABLES
    from sottovoce.plan.base import TABLES

    key = error.option_name.lstrip("-").replace("-", "_")
    names = [f"{title}.{key}" for title, table in TABLES.items() if key in table.model_fields]
    return f"no such option {error.option_name}: write --set {names[0]}=…" if names else None


def _has_reader_left(error: OSError) -> bool:
    """Return whether the reader of standard output left, and not that of another pipe."""
    if not isinstance(error, BrokenPipeError):
        return False
    if not hasattr(select, "poll"):  # Windows: no other pipe is written to
        return True
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _print_error(sentence: str, code: int) -> int:
    sys.stderr.write(f"sottovoce: {sentence}\n")
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        click.echo(f"sottovoce {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def calibrate(
    epsilon: Annotated[float | None, Option(help="Budget ε of a client.")] = None,
    delta: Annotated[float | None, Option(help="Budget δ of a client.")] = None,
    rounds: Annotated[int | None, Option(help="Number of rounds T.")] = None,
    clients: Annotated[int | None, Option(help="Number of clients U.")] = None,
    per_round: Annotated[
        int | None, Option(help="Number of clients in a round, K (default: all of them).")
    ] = None,
    samples: Annotated[int | None, Option(help="Samples n of a client.")] = None,
    clip: Annotated[float | None, Option(help="Clipping norm C of per-sample gradients.")] = None,
    learning_rate: Annotated[float | None, Option(help="Step size η.")] = None,
    unit: Annotated[
        str | None, Option(help="What is protected: record | person | client.", metavar="UNIT")
    ] = None,
    calibration: Annotated[str | None, Option(help="exact | zcdp | paper.", metavar="NAME")] = None,
    parameters: Annotated[
        int | None, Option(help="Parameters of the model, for advice on the noise.")
    ] = None,
    colluding: Annotated[
        int | None, Option(help="Other clients that side with whoever sees the models.")
    ] = None,
    expect: Annotated[
        bool, Option("--expect", help="What federations of several sizes have reached.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compute the noise a budget buys, and what the paper's noise really guarantees.

    Options that are not given come from the embedded default plan. Nothing is read or written.

    \b
    Examples:
      sottovoce calibrate
      sottovoce calibrate --epsilon 4 --delta 1e-6 --rounds 50 --clients 20 --samples 1000
      sottovoce calibrate --unit client --json
      sottovoce calibrate --expect --epsilon 4 --clients 5 --samples 400 --parameters 120
    """
    options: dict[str, Any] = dict(locals())
    from sottovoce.schedules import calibrate as library

    del options["expect"], options["as_json"]
    answer = library.calibrate(**options)
    if as_json:
        expected = {"expected": library.load_expected()} if expect else {}
        click.echo(json.dumps({**answer.to_json(), **expected}, ensure_ascii=False))
    else:
        click.echo((library.format_expected if expect else library.format_table)(answer))
    for sentence in answer.advice:
        click.echo(f"warning: {sentence}", err=True)


@app.command()
def check(
    plan: Annotated[
        Path | None, Argument(help="A plan (TOML) that names your table or arrays.")
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Check your rows before training: missing, clipped, unknown, constant and repeated values.

    It reads all rows once, prints what it found by column and client, and trains nothing. The
    numbers are computed without noise, for whoever holds the rows: do not publish them. The exit
    code is 2 if a column cannot be used as the plan says.

    \b
    Examples:
      sottovoce check plan.toml
      sottovoce check plan.toml --json
    """
    from sottovoce.data.check import check_plan
    from sottovoce.plan import Plan
    from sottovoce.reports.progress import announce_reading

    loaded = Plan.load(plan, settings or [])
    announce_reading(loaded.data.path)
    report = check_plan(loaded)
    print_result(report.to_json() if as_json else "\n".join(report.format_lines()))
    if report.errors:
        raise typer.Exit(2)


@app.command()
def train(
    plan: PlanFile = None,
    settings: Settings = None,
    out: RunFolder = None,
    seed: Annotated[
        int | None, Option(help="Make the simulation repeatable (default: from the OS).")
    ] = None,
    resume: Resume = False,
    log: Log = None,
    as_json: RecordAsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a model in a private federation, simulated on this machine.

    Shows every round, then the result and what is guaranteed; writes the run's folder with
    record.json, model.npz, trace.npz, splits.npz, rounds.jsonl and report.html.

    \b
    Examples:
      sottovoce train
      sottovoce train --set privacy.epsilon=4 --seed 1 --out runs/first
      sottovoce train plan.toml --json > record.json
      sottovoce train plan.toml --log tensorboard
      sottovoce train --resume --out runs/first
    """
    keep_compiled_programs()
    from sottovoce.cli.train import train

    shown: dict[str, Any] = {"as_json": as_json, "quiet": quiet, "log": log or ()}
    train(plan, settings or [], out=out, seed=seed, resume=resume, **shown)


@app.command()
def federate(
    plan: Annotated[
        Path | None, Argument(help="A plan (TOML). Without one: 3 clients, 8 rounds of the digits.")
    ] = None,
    clients: Annotated[
        int | None, Option(help="How many clients (the same as --set data.clients=N).")
    ] = None,
    settings: Settings = None,
    out: RunFolder = None,
    deadline: Annotated[
        float | None, Option(help="Seconds a round waits for answers (default: 600).")
    ] = None,
    minimum: Annotated[
        int | None, Option(help="Uploads that a round needs to count (default: 1).")
    ] = None,
    resume: Resume = False,
    keep_uploads: Annotated[
        bool, Option("--keep-uploads", help="Keep every upload that counted.")
    ] = False,
    insecure: Annotated[
        bool, Option("--insecure", help="No TLS, no authentication: a demonstration.")
    ] = False,
    second_ledger: SecondLedger = False,
    log: Log = None,
    as_json: RecordAsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a model in a real federation on Flower: a server and N clients on this machine.

    Every client is a process with its own rows, its own vault and secure noise, over TLS, with keys
    made for this run. The folder is that of `train`, with the clients below nodes/. Ctrl-C is safe
    and leaves no process behind. Needs the extra `flower`.

    \b
    Examples:
      sottovoce federate
      sottovoce federate plan.toml --clients 5 --out runs/five
      sottovoce federate --resume --out runs/five
    """
    options = dict(locals())
    keep_compiled_programs()
    from sottovoce.flower.federate import federate

    del options["plan"], options["settings"]
    federate(plan, settings or [], **options | {"log": log or ()})


@app.command()
def init(
    path: Annotated[Path, Argument(help="The file to write.")] = Path("plan.toml"),
    table: Annotated[
        Path | None, Option("--from", help="Draft it from the header of this table (CSV, Parquet).")
    ] = None,
) -> None:
    """Write a plan with every key explained; it runs as it is.

    With --from it is a draft for your own table. It runs once you have filled in what must be
    public: bounds and categories are never copied from the data.

    \b
    Examples:
      sottovoce init
      sottovoce init hospital.toml
      sottovoce init --from people.csv people.toml
    """
    from sottovoce.data.tables import draft_plan
    from sottovoce.plan import Plan

    text = Plan.template() if table is None else draft_plan(table, path)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError.of("PATH", str(path), "a new file", "name another or move it") from None
    except OSError as error:
        remedy = f"{error.strerror}: name another"
        raise InputError.of("PATH", str(path), "a file that can be written", remedy) from None
    todo = f"edit it, then run: sottovoce train {path}"
    if table is not None:
        todo = (
            "fill in the label (of a measurement also target and loss) and what is public about "
            f"the columns, then run: sottovoce check {path}, and train"
        )
    click.echo(f"{path} is written; {todo}")


@app.command()
def describe(
    files: Annotated[
        list[Path], Argument(help="A node file, a plan, or description.json of several clients.")
    ],
    settings: Settings = None,
    share: Annotated[
        float,
        Option(
            help="The share of the ledger's budget (of μ², which adds up) that it may take; "
            "of ε = 8, a tenth is ε ≈ 2.1."
        ),
    ] = 0.1,
    bins: Annotated[int, Option(help="The bins of each histogram.")] = 10,
    out: Annotated[
        Path | None, Option(help="A new folder: description.json and description.html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Release means, histograms, counts and correlations of a table's columns, with noise.

    A client describes its own table (a node file): one release, which its vault pays for. With a
    plan all clients of its table do, on this machine. Several descriptions are combined into one,
    which costs nothing.

    \b
    Examples:
      sottovoce describe ward.toml --out ward-description
      sottovoce describe people.toml --share 0.05
      sottovoce describe ward/description.json clinic/description.json --out both
    """
    from sottovoce.client import describe as client
    from sottovoce.data.files import require_empty
    from sottovoce.reports.certificate import export_description

    if out is not None:  # before anything is paid for
        require_empty(out, resumable=False)
    if not 2 <= bins <= 1000:
        raise InputError.of("bins", bins, "a whole number from 2 to 1000", "10 is the default")
    if all(file.suffix.lower() == ".json" for file in files):
        description = client.combine([client.read_description(file) for file in files])
    elif len(files) > 1:
        remedy = "describe one first"
        raise InputError.of("FILES", str(files[1]), "description.json if there are several", remedy)
    elif client.is_node_file(files[0]):
        description = client.describe_node(files[0], share=share, bins=bins)
    else:
        from sottovoce.plan import Plan
        from sottovoce.simulation.secure import describe_plan

        description = describe_plan(Plan.load(files[0], settings or []), share=share, bins=bins)
    if out is not None:
        export_description(description.to_json(), out)
    if as_json:
        click.echo(json.dumps(description.to_json(), ensure_ascii=False))
        return
    click.echo("\n".join(description.format_lines()))
    if out is not None:
        click.echo(f"\npage   {out / 'description.html'}")


@app.command()
def features(
    file: Annotated[Path, Argument(help="Samples: .npy, or .npz with x (and y).")],
    network: Annotated[
        str, Option(help="efficientnet-lite0 | wordllama | onnx:FILE | torch:FILE.py:NAME")
    ],
    out: Annotated[Path, Option(help="The file to write: .npz with x (and y).")],
    project: Annotated[
        int | None, Option(help="Dimensions of a fixed random projection (default: none).")
    ] = None,
) -> None:
    """Compute the features of a public, frozen network, one sample at a time.

    The result is a file of arrays that plans and node files take as data. With model.features in a
    plan the same happens on the way, on every client.

    \b
    Examples:
      sottovoce features images.npz --network efficientnet-lite0 --out features.npz
      sottovoce features rows.npy --network onnx:net.onnx --project 400 --out features.npz
    """
    from sottovoce.data.federated import compute_features

    click.echo(compute_features(file, network, out, project=project))


@app.command()
def predict(
    run: Annotated[Path, Argument(help="The folder of a run.")],
    file: Annotated[
        Path, Argument(help="Samples: .npy, .npz (array x) or .csv; a table: .csv, .parquet.")
    ],
    proba: Annotated[
        bool, Option("--proba", help="Print the probability of every class, too, as CSV.")
    ] = False,
    threshold: Annotated[
        float | None,
        Option(help="Of two classes, answer the rarer one if its probability is at least this."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the class of each sample of a file, one per line.

    Samples must be scaled as in training (digits: pixels / 16, images: pixels / 255). A table is
    encoded as the training table was: it needs the same columns, and the label may be absent.
    Probabilities are calibrated on the run's validation rows if there were enough of them. The
    prediction stays the model's own answer, which the run's accuracy counts: another class may be
    more probable.

    \b
    Examples:
      sottovoce predict runs/first samples.npy
      sottovoce predict runs/people new.csv --proba
      sottovoce predict runs/people new.csv --threshold 0.05
    """
    from sottovoce.data.tables import read_samples
    from sottovoce.runs.trained import load

    suffix = file.suffix.lower()
    arrays = read_samples(file) if suffix in (".npy", ".npz") else None
    model = load(run)
    is_table = arrays is None and model.record.get("table") is not None
    if is_table and suffix not in (".csv", ".parquet"):
        remedy = "the run was trained on a table: save the rows as one with its columns"
        raise InputError.of("FILE", file.name, "a .csv or .parquet file", remedy)
    rows = model.read_table(file) if is_table else read_samples(file) if arrays is None else arrays
    shares = model.predict_proba(rows).tolist() if proba else None
    labels = model.predict(rows, threshold).tolist()
    answers = labels if model.classes is None else [model.classes[label] for label in labels]
    if shares is None:
        text = json.dumps({"predictions": answers}) if as_json else "\n".join(map(str, answers))
        click.echo(text)
        return
    names = model.classes or tuple(map(str, range(model.record["model"]["classes"])))
    if as_json:
        columns = {"predictions": answers, "classes": names, "probabilities": shares}
        click.echo(json.dumps(columns))
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("prediction", *names))
    for answer, row in zip(answers, shares, strict=True):
        writer.writerow((answer, *(f"{p:.6g}" for p in row)))


@app.command()
def export(
    run: Annotated[Path, Argument(help="The folder of a run.")],
    to: Annotated[
        str, Option("--to", help="onnx | safetensors | torch | sklearn", metavar="FORMAT")
    ],
    out: Annotated[Path | None, Option(help="The file to write (default: RUN/model.…).")] = None,
) -> None:
    """Write the model of a run for another tool, and print the file's path.

    onnx, torch (a torch.export program) and sklearn (an estimator, by joblib) take rows as the
    model was trained on and give calibrated probabilities, or the number; for svm, softmax and
    mlp. safetensors holds the parameters of any model. The guarantee is written into the file.

    \b
    Examples:
      sottovoce export runs/first --to onnx
      sottovoce export runs/first --to safetensors --out model.safetensors
    """
    from sottovoce.runs.integrations import export_run
    from sottovoce.runs.trained import load

    click.echo(export_run(load(run), to, out, "--to"))


@app.command()
def report(
    folder: Annotated[Path, Argument(help="The folder of a run, or of figures.", metavar="DIR")],
) -> None:
    """Draw the page of a run, or of the figures in a folder, again; nothing is trained.

    \b
    Examples:
      sottovoce report runs/first
      sottovoce report results
    """
    if folder.is_dir() and not (folder / "record.json").exists():
        from sottovoce.studies.paper.reproduce import write_page

        click.echo(write_page(folder))
        return
    from sottovoce import reports

    click.echo(reports.write_report(folder))


@app.command()
def watch(
    folder: Annotated[
        Path, Argument(help="The folder that runs are in, or one run.", metavar="RUNS")
    ] = Path("runs"),
    port: Annotated[int, Option(help="The port on 127.0.0.1 (default: a free one).")] = 0,
) -> None:
    """Serve a page that follows the runs of a folder while they go on; Ctrl-C ends it.

    It shows curves, horizon, budget left and clients of each run, compares runs, and computes what
    another budget would buy. It listens on this machine only, for whoever has the printed address.
    Needs the extra `watch`.

    \b
    Examples:
      sottovoce watch runs
      sottovoce watch runs/first --port 8765
    """
    from sottovoce.reports.watch import serve

    serve(folder, port, click.echo)


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None, Argument(help="Figures, or all. Without one: a list of them.")
    ] = None,
    quick: Quick = False,
    out: Annotated[
        Path, Option(help="The folder of the results; those it already has are not run again.")
    ] = Path("results"),
    claims: Annotated[
        bool, Option("--claims", help="Only print the table of claims of --out.")
    ] = False,
    only: Annotated[
        list[str] | None, Option("--only", help="Only these panels of horizon; may be repeated.")
    ] = None,
    on: On = None,
    quiet: Quiet = False,
) -> None:
    """Make the figures of the paper, with a verdict on every claim.

    Writes NAME.json and NAME.svg for each figure and one page, index.html. After Ctrl-C the same
    command continues. Figures made elsewhere are merged by copying their files.

    \b
    Examples:
      sottovoce reproduce
      sottovoce reproduce fig2 fig4
      sottovoce reproduce all --quick --out quick
      sottovoce reproduce frontier
      sottovoce reproduce horizon --only mnist
      sottovoce reproduce --claims
    """
    keep_compiled_programs()
    from sottovoce.studies.paper import reproduce as figures
    from sottovoce.studies.paper.outcomes import format_markdown

    options: Any = {"quick": quick, "out": out, "quiet": quiet, "on": on}
    if claims:
        click.echo(format_markdown(figures.load_finished(out)))
    elif not names:
        click.echo(figures.format_listing())
    elif only and names != ["horizon"]:
        raise InputError("--only names panels of horizon; leave it out, or reproduce horizon")
    elif names in (["horizon"], ["frontier"]):
        (name,) = names
        folder = figures.reproduce_study(name, only=only or (), **options)
        click.echo((folder / f"{name}.md").read_text("utf-8"), nl=False)
        click.echo(f"picture   {folder / f'{name}.svg'}")
    else:
        judged = figures.reproduce(names, **options)
        click.echo(format_markdown(judged))
        click.echo(f"page   {out / 'index.html'}")


@app.command()
def audit(
    target: Annotated[
        Path | None,
        Argument(
            help="A plan (TOML) or the folder of a run. Without one: the embedded default.",
            metavar="[PLAN | RUN]",
        ),
    ] = None,
    quick: Quick = False,
    out: Annotated[
        Path | None, Option(help="A new or empty folder (default: runs/audit-… or RUN/audit).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack like a curious server, and measure ε beside the promised one.

    Shows the result of each attack without noise and with it, beside a ceiling for all attackers.
    Measures the noise of real uploads and of the paper's formula. Writes audit.html, audit.json
    and drawings. The exit code is 1 if a measurement contradicts the promise, and 2 if there is no
    measurement.

    \b
    Examples:
      sottovoce audit --quick
      sottovoce audit plan.toml --out audit
      sottovoce audit runs/first --json
    """
    keep_compiled_programs()
    from sottovoce.studies.audit.auditing import audit

    raise typer.Exit(audit(target, quick=quick, out=out, as_json=as_json))


data_app = make_group("The datasets.")
app.add_typer(data_app, name="data")


@data_app.command()
def fetch(
    name: Annotated[str, Argument(help="mnist | cifar10 | acs | adult", metavar="NAME")],
) -> None:
    """Download a dataset into the cache (unless SOTTOVOCE_DATA has it), and print its folder.

    \b
    Example:
      sottovoce data fetch mnist
    """
    from sottovoce.data import datasets

    click.echo(datasets.find(name))


app.add_typer(ledger_app, name="ledger")
app.add_typer(server_app, name="server")
app.add_typer(node_app, name="node")


@app.command()
def rehearse(
    plan: PlanFile = None,
    settings: Settings = None,
    public: Annotated[
        str | None, Option(help="Public rows: a dataset's name, a table, an .npz with x and y.")
    ] = None,
    keep: Annotated[
        list[str] | None, Option(help="A key or section that stays as it is; may be repeated.")
    ] = None,
    runs: Annotated[
        int | None,
        Option(help="Private federations at most (default: 120, or what --minutes allows)."),
    ] = None,
    minutes: Annotated[
        float | None, Option(help="About how long it may take; at least five runs are made.")
    ] = None,
    clients: Annotated[
        int | None, Option(help="Number of clients, if only the private table has it.")
    ] = None,
    samples: Annotated[
        int | None,
        Option(
            help="Rows of each client, if only the private table has it (with data.client: all "
            "rows of the client, validation and test rows included; else its training rows)."
        ),
    ] = None,
    seed: Annotated[int, Option(help="Another stand-in and other noise.")] = 0,
    out: Annotated[
        Path | None, Option(help="A new or empty folder (default: runs/rehearsal-…).")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue the rehearsal that was stopped in --out.")
    ] = False,
    on: On = None,
    as_json: Annotated[bool, Option("--json", help="rehearsal.json on stdout.")] = False,
    quiet: Quiet = False,
) -> None:
    """Choose rounds, step, clipping, schedule, model and features before any private row is read.

    Runs whole private federations like the plan's on a stand-in: public rows, or rows made up for
    this kind of data. Costs no privacy, provided that what --public names is public, which cannot
    be checked. Writes plan.toml (ready to train, every choice with its reason),
    rehearsal.json and report.html. Ctrl-C keeps what is done.

    \b
    Examples:
      sottovoce rehearse
      sottovoce rehearse plan.toml --minutes 10 --out rehearsed
      sottovoce rehearse plan.toml --public survey.csv --keep model
      sottovoce rehearse plan.toml --resume --out rehearsed
    """
    options = dict(locals())
    keep_compiled_programs()
    from sottovoce.studies.rehearsal.rehearsing import run_command

    del options["plan"], options["settings"], options["keep"]
    run_command(plan, settings or [], keep=keep or [], **options)


@app.command()
def schema(
    name: Annotated[
        str,
        Argument(
            help="plan | record | calibrate | certificate | description | audit | rehearsal",
            metavar="NAME",
        ),
    ],
) -> None:
    """Print the JSON Schema of something sottovoce reads or writes.

    \b
    Examples:
      sottovoce schema plan
      sottovoce schema calibrate
    """
    folder = resources.files("sottovoce").joinpath("schemas")
    names = sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name[0] != "_")
    if name not in names:
        raise InputError.of("schema", name, " or ".join(names), "name what you want described")
    click.echo(folder.joinpath(f"{name}.json").read_text("utf-8").rstrip())


if __name__ == "__main__":
    main()
