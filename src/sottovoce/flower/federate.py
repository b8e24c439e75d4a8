"""`sottovoce federate`: a real federation on Flower from one command, on this machine.

The plan's data are dealt to nodes, each with its own vault; a SuperLink and a SuperNode for each
client are started over TLS (`flower.local`); the run is followed from here, and everything that was
started is stopped, whatever happens. Between machines every client makes its own files; here one
command makes all of them. The run folder is that of `train`, and more:

    OUT/plan.toml                    what will run (written last: without it a folder is unfinished)
    OUT/public.npz                   the server's validation and test rows
    OUT/admitted.csv                 the clients that may take part, and their samples
    OUT/nodes/client-0/rows.npz      one client's rows
    OUT/nodes/client-0/node.toml     what that client has decided: its budget, its clip, its unit
    OUT/nodes/client-0/client.vault  its ledger
    OUT/federation.json              how it was started, for --resume
    OUT/flower/1/                    keys, certificates and logs of the first session (2/: the next,
                                     with the nodes' keys of the first)
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from sottovoce.client import ledger, sum_protocol
from sottovoce.client.vault import fingerprint_file, witness
from sottovoce.client.vault.policy import USUAL_TURNS
from sottovoce.data import federated, tables
from sottovoce.data.federated import Holdings
from sottovoce.data.files import make_folder, require_empty, write_file, write_npz
from sottovoce.errors import FederationError, InputError, RunError, VaultRefusal
from sottovoce.flower.certificates import fingerprint_ssh
from sottovoce.models import custom
from sottovoce.models.base import Regression
from sottovoce.models.network import is_network, resolve_network
from sottovoce.plan import Plan
from sottovoce.plan.base import write_toml
from sottovoce.privacy import seeds
from sottovoce.privacy.budget import format_claim
from sottovoce.privacy.calibration import vault_capacity
from sottovoce.reports import progress
from sottovoce.runs import checkpoint
from sottovoce.runs.integrations import Tracker, require_package
from sottovoce.schedules.pricing import plan_turns
from sottovoce.server.coordinator import read_admitted
from sottovoce.server.federation import add_client_count, build
from sottovoce.server.members import Patience

if TYPE_CHECKING:
    from sottovoce.flower.local import LocalFederation


PLAN, PUBLIC, NODES, NODE = "plan.toml", "public.npz", "nodes", "node.toml"
ADMITTED = "admitted.csv"
ROSTER, KEY = "roster.pem", "sum-key.pem"
ROUNDS = 1000  # that a node allows in one run, unless the plan needs more
STEPS = 16  # likewise, in one turn


@dataclass(frozen=True)
class Options:
    """How a federation is run, stored in its folder for `--resume`."""

    deadline: float = 600.0
    minimum: int = 1
    keep_uploads: bool = False
    insecure: bool = False

    def __post_init__(self) -> None:
        Patience(clients=1, deadline=self.deadline, minimum=self.minimum)


DEFAULTS = Options()


def deal(
    plan: Plan, out: Path, *, options: Options = DEFAULTS, second_ledger: bool = False
) -> list[Path]:
    """Read the plan's data and deal them to node folders below `out`; return the node files.

    Which client gets which rows is drawn anew each time; the written plan has absolute paths. A
    file that was dealt to vaults before is dealt again only with `second_ledger`.
    """
    plan.data.require_other_rows()
    if (path := plan.data.path) is None:
        return _deal_to_nodes(plan, out, options, "", [])
    file_hash = fingerprint_file(path)[0]
    with witness.hold_ledgers(file_hash):  # or two runs that start together see no vaults
        earlier = witness.find_ledgers(file_hash)  # `ledger create` notes them, too
        if earlier and not second_ledger:
            raise VaultRefusal(
                f"the rows of {Path(path).name} have {len(earlier)} vaults already "
                f"({', '.join(sorted({v or k for k, v in earlier.items()}))}), and a new run makes "
                "new ones: what is promised to a record then adds up over all of them; go on with "
                "a stopped run by --resume, try settings with `sottovoce train`, which spends "
                "nothing, or add --second-ledger, your recorded word that you want another promise"
            )
        return _deal_to_nodes(plan, out, options, file_hash, list(earlier))


def _deal_to_nodes(
    plan: Plan, out: Path, options: Options, file_hash: str, earlier: Sequence[str]
) -> list[Path]:
    """Deal the rows to a folder that is this run's alone, or leave no folder behind."""
    held = federated.deal_rows(plan, seed=seeds.draw_seed())  # a node makes features itself
    # Promise and noise, before anything is made or paid for; features' values do not matter here.
    lens = federated.build_features(plan, held)
    build(plan, seed=0, held=replace(held, features=lens, counted=False)).log_advice()
    plan = make_paths_absolute(add_client_count(plan, held))
    make_folder(out)
    try:
        (out / NODES).mkdir(mode=0o700)  # by whoever has the folder: another run may begin in it
    except FileExistsError:
        remedy = "another run has just begun there: name another"
        raise InputError.of("out", str(out), "a new or empty folder", remedy) from None
    try:
        return _fill_folder(plan, held, out, options, file_hash, earlier)
    except BaseException:
        # It was new or empty, and half of a federation can neither be started nor resumed.
        shutil.rmtree(out, ignore_errors=True)
        raise


def _fill_folder(
    plan: Plan, held: Holdings, out: Path, options: Options, file_hash: str, earlier: Sequence[str]
) -> list[Path]:
    """Make rows, node files and vaults, note the vaults under the hash of the rows' file."""
    names = _name_clients(held)
    public = replace(held, fresh_vaults=True, names=tuple(names))  # the record says that it is so
    federated.save_public(out / PUBLIC, public)
    keys = [Ed25519PrivateKey.generate() for _ in names]  # used where the server learns only sums
    files = [_make_node(plan, held, i, out / NODES / name, keys) for i, name in enumerate(names)]
    # Made for this run, as the record says; where rows had vaults before, the operator stated it.
    stated: Any = {"second_ledger": True, "others": earlier, "maker": "" if earlier else "federate"}
    statements = [ledger.create_from_node(file, **stated) for file in files]
    for statement in statements if file_hash else ():
        witness.note_ledger(file_hash, statement.vault, str(out.resolve()))
    lines = [f"{name},{n}\n" for name, n in zip(names, held.samples.tolist(), strict=True)]
    write_file(out / ADMITTED, "".join(["client,samples\n", *lines]).encode())
    write_file(out / OPTIONS, json.dumps(asdict(options) | {"plan": plan.to_dict()}).encode())
    write_file(out / PLAN, plan.to_toml().encode())
    return files


def load_dealt(out: Path) -> tuple[Plan, list[Path]]:
    """Return the plan and the node files that `deal` has written to a folder, in its order.

    The n-th node has the n-th key, by which a run knows its client. Clients whose names are numbers
    are dealt in the order of the numbers; up to 0.2 a folder has no table that says so.
    """
    if not (out / PLAN).exists():
        raise RunError(f"{out} holds no federation to go on with; start a new one")
    names = [*read_admitted(out / ADMITTED)] if (out / ADMITTED).exists() else []
    order = {name: place for place, name in enumerate(names)}
    files = sorted((out / NODES).glob(f"*/{NODE}"))
    return Plan.load(out / PLAN), sorted(files, key=lambda file: order.get(file.parent.name, -1))


def make_paths_absolute(plan: Plan) -> Plan:
    """Return the plan with absolute paths, to be read from anywhere on this machine."""
    here, changes = Path.cwd(), dict[str, object]()
    if plan.model.own is not None:
        changes["model.own"] = custom.resolve_beside(plan.model.own, here)
    if plan.model.features is not None:
        changes["model.features"] = resolve_network(plan.model.features, here)
    for key in ("path", "validation", "test"):
        if isinstance(file := getattr(plan.data, key), str):
            changes[f"data.{key}"] = str(here / file)
    return plan.replace(**changes) if changes else plan


def format_node_file(
    plan: Plan, i: int, *, name: str, classes: int, target: Regression | None = None
) -> str:
    """Return client `i`'s terms as a node file: what the plan promises it."""
    epsilon, delta = (float(values[i]) for values in plan.budgets())
    values: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "vault": "client.vault",
        "answer_every": 0.0,  # server and clients have one owner here: nobody else measures time
        "data": {"path": "rows.npz"}
        | ({"classes": classes} if target is None else {"target": list(target[1:])}),
        "policy": {
            "epsilon": epsilon,
            "delta": delta,
            "clip": plan.recipe().clip,
            "unit": plan.local.unit,
            "calibration": plan.privacy.calibration,
            "max_rounds": max(ROUNDS, plan.rounds.rounds, plan.local.steps),
            "max_steps": max(STEPS, plan.local.steps),
            # The vault is made for this one run, which may take all of it.
            "limits": {"run_share": 1.0, "max_work": 2**62, "max_bytes": 2**62},
        },
    }
    rounds = plan.rounds
    turns = plan_turns(
        rounds.cohort, rounds=rounds.rounds, clients=plan.clients, per_round=plan.per_round
    )
    if turns < USUAL_TURNS:  # a vault's own floor lets each take a quarter: the rest would be lost
        capacity = float(vault_capacity(epsilon, delta, calibration=plan.privacy.calibration))
        values["policy"]["floor"] = float(format_claim(math.sqrt(turns / capacity)))
    if plan.privacy.view == "sum":
        counted = {"honest": plan.privacy.honest, "corrupt": plan.privacy.corrupt or 0}
        values["policy"]["sum"] = {"roster": ROSTER, "key": KEY, **counted}
    if plan.rows_per_person:
        values["data"] |= {"person": "person", "rows_per_person": plan.rows_per_person}
    own, features = plan.model.own, plan.model.features
    model = {} if own is None else {"own": own}
    if features is not None and is_network(features):
        model["features"] = features
    return write_toml(values | ({"model": model} if model else {}))


def _name_clients(held: Holdings) -> list[str]:
    """Name the clients as their table does where that makes plain folder names, else by number."""
    plain = all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) for name in held.names)
    if held.names and plain and len({name.lower() for name in held.names}) == len(held.names):
        return list(held.names)
    clients = len(held.samples)
    return [f"client-{i:0{len(str(clients - 1))}d}" for i in range(clients)]


def _make_node(
    plan: Plan, held: Holdings, i: int, folder: Path, keys: Sequence[Ed25519PrivateKey]
) -> Path:
    folder.mkdir(mode=0o700)
    if plan.privacy.view == "sum":
        sum_protocol.write_keys(folder / KEY, keys[i], folder / ROSTER, keys)
    end = int(held.samples[: i + 1].sum())
    mine = slice(end - int(held.samples[i]), end)
    y = held.train.y[mine]
    rows: dict[str, NDArray[Any]] = {
        "x": held.train.x[mine],
        "y": y if held.target is None else held.target.restore(y),
    }
    if plan.rows_per_person and held.person is not None:
        rows["person"] = held.person[mine]
    write_npz(folder / "rows.npz", rows)
    file = folder / NODE
    text = format_node_file(plan, i, name=folder.name, classes=held.classes, target=held.target)
    file.write_text(text, "utf-8")
    return file


# Where no plan is given: the embedded one with fewer clients and rounds, and all rows dealt.
EMBEDDED: dict[str, Any] = {
    "data": {"name": "digits", "clients": 3},
    "rounds": {"schedule": "fixed", "rounds": 8},
}
OPTIONS, SESSIONS, PROGRESS = "federation.json", "flower", "progress.jsonl"
GATHERING = 180.0
# Seconds in which a stopped server may write its record before it is ended.
LAST_WORDS = 20.0
# Seconds that a round takes for each message to the clients, on a machine that is not busy.
MESSAGE_SECONDS, SUM_MESSAGES = 4.0, 5
LONG = 120.0  # seconds after which it is said how to shorten a run
GONE = 5.0  # seconds without the server process after which it counts as gone

SECURE = (
    "A real federation: every client is a process with its own vault, every message is encrypted, "
    "and the noise is real. This command plays all of them, and so sees their data."
)
DEMONSTRATION = "\nA demonstration: more rounds learn more (as --set rounds.rounds=40)."
INSECURE = (
    "A demonstration: the clients' vaults and their noise are real, the transport is not "
    "encrypted and nobody is authenticated. The record says so."
)


def federate(
    path: Plan | str | Path | Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    *,
    clients: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    as_json: bool = False,
    quiet: bool = False,
    insecure: bool = False,
    keep_uploads: bool = False,
    deadline: float | None = None,
    minimum: int | None = None,
    log: Sequence[str] = (),
    second_ledger: bool = False,
) -> Path:
    """Run a plan between real processes, or resume such a run, and print the result.

    `path` is that of a TOML file, a `Plan`, or a dictionary. Returns the run's folder: from Python,
    `load(federate(plan, out="runs/five", quiet=True))` is the trained model. `second_ledger` states
    that rows which have vaults of an earlier run may have others: budgets add up.
    """
    out = None if out is None else Path(out)
    stream = sys.stderr if as_json else sys.stdout
    stated: dict[str, Any] = {"deadline": deadline, "minimum": minimum}
    stated |= {"keep_uploads": keep_uploads or None, "insecure": insecure or None}
    stated = {key: value for key, value in stated.items() if value is not None}
    if resume:
        folder = checkpoint.require_out(out)
        if path is not None or settings or clients is not None or insecure:
            raise InputError(
                "--resume goes on with the plan, the clients and the transport of the run; "
                "leave PLAN, --set, --clients and --insecure out"
            )
        plan, options = _load_stopped(folder, stated)
    else:
        plan, options = load_plan(path, settings, clients), Options(**stated)
        folder = out if out is not None else progress.name_new_folder(plan)
        require_empty(folder)
        if plan.data.path is not None and not plan.data.is_array_file:
            tables.check_source(tables.Source(**plan.data.table()))
    warm = _check_plan(plan, options, folder)
    if plan.data.path is not None and not resume:
        progress.print_findings(plan, path)
    trackers = [Tracker(name, plan.to_dict(), folder) for name in log]
    show = progress.choose_display(stream, quiet=quiet, waiting="starting the nodes …")

    from sottovoce import reports

    if resume:
        nodes = load_dealt(folder)[1]
    else:
        nodes = deal(plan, folder, options=options, second_ledger=second_ledger)
    show.say(INSECURE if options.insecure else SECURE)
    if not resume:
        show.say(describe_duration(plan))
    # A service manager's SIGTERM is treated as Ctrl-C: the server writes its record first.
    gets_signals = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if gets_signals else None
    try:
        with show:
            _lead_run(folder.resolve(), nodes, options, show, warm, trackers)
        page = reports.write_report(folder)
    except KeyboardInterrupt:
        print(checkpoint.describe_stop(folder, "federate"), file=sys.stderr, flush=True)
        if (folder / "record.json").exists():
            reports.write_report(folder)
            _end_trackers(trackers, folder)
        raise
    except FederationError as error:
        stop = checkpoint.describe_stop(folder, "federate", "the run stopped")
        raise FederationError(f"{error}\n{stop}") from None
    finally:
        if gets_signals:
            signal.signal(signal.SIGTERM, before)
    _end_trackers(trackers, folder)
    record = json.loads((folder / "record.json").read_text("utf-8"))
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        hint = "" if path is not None or resume else f"{DEMONSTRATION}\n"
        show.say(hint + progress.summarize_run(record, folder, page))
    return folder


def describe_duration(plan: Plan) -> str:
    """Return how long a run on this machine may take, and how to shorten it."""
    pace = MESSAGE_SECONDS * (SUM_MESSAGES if plan.privacy.view == "sum" else 1)
    rounds = plan.rounds.rounds
    text = (
        f"At most {rounds} rounds of about {pace:.0f} s (Flower's nodes look for work every 3 s): "
        f"about {progress.format_seconds(rounds * pace)}."
    )
    if rounds * pace > LONG:
        text += (
            " Fewer rounds end sooner and learn less (--set rounds.rounds=20); `sottovoce train` "
            "forecasts the result in seconds."
        )
    return text


def _end_trackers(trackers: Sequence[Tracker], folder: Path) -> None:
    if trackers:
        from sottovoce.runs.trained import load  # it loads JAX

        for tracker in trackers:
            tracker.on_end(load(folder))


def load_plan(path: Any, settings: Sequence[str], clients: int | None) -> Plan:
    """Return the plan, for real clients; without one a small one with all rows of the digits."""
    more = [*settings, *([] if clients is None else [f"data.clients={clients}"]), "noise=secure"]
    plan = Plan.read(EMBEDDED if path is None else path, more)
    if plan.needs_python:
        raise InputError(
            "data.name = arrays, model.name = custom and parts are given from Python; "
            "name a data set, and where your model is (model.own)"
        )
    return plan


def _check_plan(plan: Plan, options: Options, folder: Path) -> str | None:
    """Refuse what can be refused before a process is started or a file written.

    Returns what the nodes should import before they are asked, where the model is PyTorch's.
    """
    if plan.data.clients is not None and options.minimum > plan.per_round:
        bound = f"at most {plan.per_round}, the clients of a round"
        remedy = "ask for fewer, or raise rounds.per_round"
        raise InputError.of("minimum", options.minimum, bound, remedy)
    if any(c in str(folder.resolve()) for c in "'\n"):  # a node's file is named in quotes
        raise InputError.of("out", str(folder), "a path without ' and line breaks", "name another")
    for package in ("flwr", "cryptography"):
        require_package(package, "federate", "flower")
    if plan.model.own is not None:
        return custom.load_own_model(plan.model.own).warm_up
    return None


def _lead_run(
    folder: Path,
    nodes: Sequence[Path],
    options: Options,
    show: progress.SilentDisplay,
    warm: str | None,
    trackers: Sequence[Tracker],
) -> None:
    # Loaded only now: Flower takes a second to import.
    from sottovoce.flower import local

    session = _make_session_folder(folder)
    files = [str(node.resolve()) for node in nodes]
    began = time.monotonic()
    keys = _find_keys(folder)
    with local.start_federation(
        session, files, warm=warm, pinned=True, insecure=options.insecure, keys=keys
    ) as running:
        follow = _Follower(folder, running, session / PROGRESS, show, trackers)
        show.note(f"{len(nodes)} nodes are online after {time.monotonic() - began:.0f} s")
        run = running.run(
            local.APP,
            {
                "plan": str(folder / PLAN),
                "public": str(folder / PUBLIC),
                "out": str(folder),
                "clients": len(nodes),
                "gathering": GATHERING,
                "deadline": options.deadline,
                "minimum": options.minimum,
                "resume": (folder / checkpoint.NAME).exists(),
                "keep-uploads": options.keep_uploads,
                "insecure": options.insecure,
                "name": "sottovoce federate",
                "progress": str(follow.path),
                "admitted": str(admitted) if (admitted := folder / ADMITTED).exists() else "",
            },
        )
        try:
            running.wait(run, every=1.0, on_beat=follow)
        except _Finished:
            pass  # Flower tells the end of a run by the wall clock, which may have been set back
        except BaseException:
            follow.end_server()
            raise
        follow()


class _Finished(Exception):
    """The server has written the record of a finished run, whatever Flower says of it."""


@dataclass(eq=False)
class _Follower:
    """Shows the rounds that the server reports, and notices when the server was killed.

    Flower would notice that, too, a minute later.
    """

    folder: Path
    running: LocalFederation
    path: Path
    show: progress.SilentDisplay
    trackers: Sequence[Tracker] = ()
    read: int = 0  # bytes of the file at `path`
    lost: float | None = None  # since when the server is gone
    seen: bool = False

    def __call__(self) -> None:
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.read)
            whole, newline, _ = file.read().rpartition(b"\n")
            self.read += len(whole) + len(newline)
            for line in whole.splitlines():
                done = checkpoint.RoundDone(**json.loads(line))
                self.show.round(done)
                for tracker in self.trackers:
                    tracker.on_round(done)
        here = self.find_server() is not None
        self.seen = self.seen or here
        if here or not self.seen:
            self.lost = None
        elif self.lost is None:
            self.lost = time.monotonic()
        elif time.monotonic() - self.lost > GONE:
            if self._has_finished():
                raise _Finished
            raise FederationError("the server was killed, or ended without saying why")

    def find_server(self) -> int | None:
        """Return the pid of the process that leads the run, by the lock that it holds.

        It has to live and belong to this federation: pids are reused.
        """
        from sottovoce.flower import keeper, server_app

        try:
            pid = int((self.folder / server_app.LOCK).read_text("ascii"))
        except (OSError, ValueError):
            return None
        return pid if pid in keeper.list_descendants(self.running.processes.pid) else None

    def _has_finished(self) -> bool:
        try:
            record = json.loads((self.folder / "record.json").read_text("utf-8"))
        except (OSError, ValueError):
            return False
        return record.get("status") == "finished" and not (self.folder / checkpoint.NAME).exists()

    def end_server(self) -> None:
        """Ask the server to write its record and to end, and wait for that, but not for long."""
        from sottovoce.flower import keeper

        until = time.monotonic() + LAST_WORDS
        if (pid := self.find_server()) is not None:
            keeper.send_signal(pid, signal.SIGINT)
        while self.find_server() is not None and time.monotonic() < until:
            time.sleep(0.1)


def _make_session_folder(folder: Path) -> Path:
    """Make a new folder for certificates and logs: keys are never overwritten."""
    for number in count(1):
        with contextlib.suppress(FileExistsError):
            (path := folder / SESSIONS / str(number)).mkdir(mode=0o700, parents=True)
            break
    return path


def _find_keys(folder: Path) -> Path:
    """Return where the nodes' keys are by which the run knows its clients, or else the first ones.

    Up to 0.2 every session made new ones, and the first may have ended before the run began.
    """
    files = [*(folder / SESSIONS).glob("*/keys/*.pub")]
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = {key for key, _ in checkpoint.read_public_state(folder)[0]["header"]["registered"]}
        made = {file: file.read_bytes() for file in files}
        files = [f for f, k in made.items() if k and fingerprint_ssh(k) in known] or files
    sessions = {int(file.parts[-3]) for file in files if file.parts[-3].isdecimal()}
    return folder / SESSIONS / str(min(sessions, default=1)) / "keys"


def _load_stopped(folder: Path, stated: dict[str, Any]) -> tuple[Plan, Options]:
    plan, _ = load_dealt(folder)
    if (folder / "record.json").exists():
        checkpoint.require_stopped(folder)
    try:
        stored = json.loads((folder / OPTIONS).read_text("utf-8"))
        now = plan.to_dict()
        _require_same(stored.pop("plan", now), now)
        options, is_begun = Options(**(stored | stated)), (folder / checkpoint.NAME).exists()
        if is_begun and not options.insecure and not (keys := _find_keys(folder)).exists():
            why = "the run knows its clients by these keys"
            raise RunError(f"{keys} is missing; put it back, or start a new run: {why}")
        return plan, options
    except InputError:
        raise
    except (OSError, ValueError, TypeError):
        raise RunError(
            f"{folder / OPTIONS} is missing or damaged; start the run anew in another folder"
        ) from None


def _require_same(begun: Any, now: Any, key: str = "") -> None:
    """Refuse a plan that was edited after the run began: its vaults promise what it was."""
    if isinstance(begun, dict) and isinstance(now, dict):
        for name in begun | now:
            _require_same(begun.get(name), now.get(name), f"{key}.{name}".lstrip("."))
    elif begun != now:
        remedy = "put it back, or start a new run in another folder"
        raise InputError.of(f"{key} in {PLAN}", now, f"{begun!r} as when the run began", remedy)
