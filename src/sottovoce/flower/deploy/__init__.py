"""What a server and a client between machines need on disk, and whether all is well with it.

`init_server` and `init_node` make keys, configuration and systemd units of one machine, give every
file to the one user that needs it, and return what is left for a person to do. Nothing is
overwritten but a server's units, which follow its newest folder. The templates lie beside this
file. `read_node_status` and `read_server_status` look at this machine's files and services alone.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sottovoce._version import __version__
from sottovoce.client.ledger import Check, Verification
from sottovoce.client.node import TABLES, Node
from sottovoce.client.vault import Vault
from sottovoce.data.files import is_held
from sottovoce.errors import InputError, SottovoceError
from sottovoce.flower import certificates, server_app
from sottovoce.flower.transport import ENVELOPE, SLACK
from sottovoce.models.network import PRESETS
from sottovoce.plan import Plan
from sottovoce.plan.base import write_toml
from sottovoce.plan.data import DATASETS
from sottovoce.reports.watch import RunsFolder
from sottovoce.runs import checkpoint
from sottovoce.runs.record import ROUNDS

try:
    import pwd
except ImportError:  # Windows
    raise InputError("services are made for systemd; run these commands on Linux") from None

HERE = Path(__file__).parent
MIB = 1 << 20
ANNOUNCED = 2048  # bytes: the list of an answer's three parts takes about half of that
FEWEST_DAYS = 14  # that a certificate must still be valid
PATIENCE = 20.0  # seconds that a status waits for a worker which has the vault
USER = re.compile(r"[a-z_][a-z0-9_-]{0,24}")
NODE_UNITS = ("worker", "node")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}")


@dataclass(frozen=True)
class ServerPlaces:
    """Where the parts of a server lie, who runs it, and how large it may get."""

    folder: Path = Path("/etc/sottovoce/server")
    state: Path = Path("/var/lib/sottovoce")
    runs: Path = Path("/srv/sottovoce")
    units: Path = Path("/etc/systemd/system")
    authority: Path = Path("/etc/sottovoce/authority")
    user: str = "sottovoce"
    port: int = 8000
    link_port: int = 8001
    parameters: int = 1_000_000
    clients: int = 20

    def __post_init__(self) -> None:
        _require_user(self.user)
        _require_range("port", self.port, 65535)
        _require_range("link-port", self.link_port, 65535)
        _require_range("parameters", self.parameters, 2**28)
        _require_range("clients", self.clients, 10_000)
        if self.port == self.link_port:
            raise InputError.of("link-port", self.port, "another than port", "choose another")

    @property
    def proxy_keys(self) -> Path:
        """The folder of the proxy's certificate and key, which the server's user cannot read."""
        return self.folder.parent / f"{self.folder.name}-proxy"

    @property
    def largest(self) -> int:
        """The most bytes of one answer: a masked input has 8 bytes a parameter, an upload 4."""
        return 8 * self.parameters + SLACK + ENVELOPE


@dataclass(frozen=True)
class NodePlaces:
    """Where the parts of a client lie, and who runs it."""

    name: str
    server: str
    ca: Path
    folder: Path = Path("/etc/sottovoce/node")
    data: Path | None = None  # /srv/NAME
    state: Path | None = None  # /var/lib/NAME
    units: Path = Path("/etc/systemd/system")
    user: str | None = None  # NAME
    port: int = 9094

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InputError.of("name", self.name, "letters, digits and . _ -", "rename it")
        _require_user(self.owner)
        if not re.fullmatch(r"[^\s:/]+:[0-9]{1,5}", self.server):
            raise InputError.of("server", self.server, "HOST:PORT", "the server's operator knows")
        _require_range("port", self.port, 65535)

    @property
    def owner(self) -> str:
        """The user of the client's services."""
        return self.user or self.name.lower()

    @property
    def rows(self) -> Path:
        """The folder of rows, node file and vault."""
        return self.data or Path("/srv") / self.name

    @property
    def home(self) -> Path:
        """The folder of the services' own state: the second witness, Flower's home."""
        return self.state or Path("/var/lib") / self.owner


@dataclass(frozen=True)
class NodeTerms:
    """What a client's owner decides: which rows, what is public of them, and their budget."""

    rows: Path
    epsilon: float
    delta: float
    classes: int | None = None
    plan: Path | None = None  # of the federation: what is public of the columns, clip and unit

    def to_toml(self, name: str) -> str:
        """Return the node file; refuse terms and rows that a worker would refuse, beforehand."""
        if not self.rows.is_file():
            raise InputError.of("rows", str(self.rows), "a file that exists", "name the rows")
        plan = None if self.plan is None else Plan.load(self.plan)
        data = {"path": f"rows{self.rows.suffix}", **self._describe_rows(plan)}
        clip, unit = (1.0, "record") if plan is None else (plan.recipe().clip, plan.local.unit)
        if plan is not None and plan.rows_per_person:
            data |= {"person": plan.data.person, "rows_per_person": plan.rows_per_person}
        policy = {"epsilon": self.epsilon, "delta": self.delta, "clip": clip, "unit": unit}
        values = {"schema": 1, "name": name, "vault": f"{name}.vault"}
        values |= {"data": data, "policy": policy}
        if plan is not None and plan.model.features in PRESETS:  # a file is the client's to name
            values["model"] = {"features": plan.model.features}
        text = write_toml(values)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "node.toml"
            file.write_text(text, "utf-8")
            replace(Node.load(file), data=self.rows).read_rows()
        return text

    def _describe_rows(self, plan: Plan | None) -> dict[str, Any]:
        public: dict[str, Any] = {}
        if plan is not None and plan.data.target is not None:
            public["target"] = list(plan.data.target)
        if self.rows.suffix not in TABLES:
            named = None if plan is None or plan.data.name is None else DATASETS[plan.data.name]
            classes = self.classes or (named and named.classes)
            if not public and classes is None:
                raise InputError("classes is missing; give how many labels there are: --classes N")
            return public or {"classes": classes}
        if plan is None or not plan.data.columns or plan.data.infer:
            raise InputError(
                "plan must be a plan whose data.columns says what is public of every column, "
                "without data.infer; give the federation's, which the server's operator has: --plan"
            )
        columns = {column: list(spec) for column, spec in plan.data.columns.items()}
        given = {"missing": plan.data.missing, "text": plan.data.text}
        public |= {key: value for key, value in given.items() if value is not None}
        return {"label": plan.data.label, **public, "columns": columns}


def init_server(names: Sequence[str], places: ServerPlaces, passphrase: bytes) -> str:
    """Make a server's keys, proxy configuration and units; return what is left to do.

    What can be refused is refused before a user, a folder or a key is made.
    """
    for name in names:
        certificates.parse_name(name)
    keys, proxy_keys = places.folder, places.proxy_keys
    for folder in (keys, proxy_keys):
        if any(folder.glob("*")):
            remedy = "keys are never overwritten; name another"
            raise InputError.of("folder", str(folder), "new or empty", remedy)
    proxy_state = places.state.parent / f"{places.state.name}-proxy"
    same = "folder largest state runs user port link_port proxy_keys authority"
    answers = places.largest * places.clients  # of a round: the SuperLink keeps a few copies of
    values = {  # each, the ServerApp decodes all
        **{key: str(getattr(places, key)) for key in same.split()},
        "link_memory": str(1024 * MIB + 4 * answers),
        "server_memory": str(2048 * MIB + 8 * answers),
        "announced": str(ANNOUNCED),
        "parameters": f"{places.parameters:,}",
        "proxy_state": str(proxy_state),
        "nginx": shutil.which("nginx") or "/usr/sbin/nginx",
        "ca": str(places.authority / "ca.crt"),
        "ca_key": str(places.authority / "ca.key"),
        "where": f"{names[0] if names else 'SERVER'}:{places.port}",
    }
    templates = "nginx.conf", "connection.toml", "server.txt"
    nginx, connection, steps = (_fill_template(name, values) for name in templates)
    units = _fill_units(places.units, values, "superlink", "server", "proxy")
    authority = _find_or_make_authority(places.authority, passphrase)
    owner, proxy_owner = (_find_or_make_user(u) for u in (places.user, f"{places.user}-proxy"))
    for folder, whose, mode in (
        (keys, owner, 0o750),
        (keys / "flwr", owner, 0o750),
        (proxy_keys, proxy_owner, 0o700),
        (places.state, owner, 0o700),
        (proxy_state, proxy_owner, 0o700),
        (places.runs, owner, 0o750),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        _give_to_user(folder, whose, mode)
    certificates.make_server_keys(proxy_keys, authority, names=names, owner=proxy_owner)
    certificates.make_server_keys(keys, authority, stem="link", owner=owner)
    certificates.make_worker_secret(keys, "worker", owner)
    certificates.write_new(keys / "flwr" / "config.toml", connection.encode(), owner)
    certificates.write_new(proxy_keys / "nginx.conf", nginx.encode(), proxy_owner)
    for folder, whose in ((keys, owner), (proxy_keys, proxy_owner)):
        certificates.write_new(folder / "ca.crt", authority.certificate.read_bytes(), whose)
    _write_units(places.units, units)
    return steps


def renew_server(places: ServerPlaces, passphrase: bytes) -> str:
    """Sign the server's two certificates for another year; no key changes."""
    authority = certificates.find_authority(places.authority, passphrase)
    certificates.renew_certificate(places.proxy_keys, signed_by=authority)
    certificates.renew_certificate(places.folder, stem="link", signed_by=authority)
    units = "sottovoce-superlink sottovoce-server sottovoce-proxy"
    return f"both certificates are signed for another year; now: systemctl restart {units}\n"


def init_node(places: NodePlaces, terms: NodeTerms | None = None) -> str:
    """Make a client's key, node file and units; return what is left to do.

    With terms the rows are copied to the client's folder, and the vault is all that is missing.
    """
    certificates.read_end(places.ca)  # it is one
    node, text = places.rows / "node.toml", None
    if terms is not None:
        text, rows = terms.to_toml(places.name), places.rows / f"rows{terms.rows.suffix}"
        for file in (node, rows):
            if file.exists() and not file.samefile(terms.rows):
                raise InputError(f"{file} is there already; move it, or leave the rows out")
    same = "name server folder rows home owner port"
    values = {key: str(getattr(places, key)) for key in same.split()} | {"python": sys.executable}
    # Root would run a model of the client's own, which its user may change.
    values["as_user"] = f"runuser -u {places.owner} -- env " if os.geteuid() == 0 else ""
    units = _fill_units(places.units, values, *NODE_UNITS)
    text = text or _fill_template("node.toml", values)
    _require_unused(places, units)
    owner = _find_or_make_user(places.owner)
    for folder, mode in ((places.folder, 0o750), (places.rows, 0o700), (places.home, 0o700)):
        folder.mkdir(parents=True, exist_ok=True)
        _give_to_user(folder, owner, mode)
    certificates.make_node_key(places.folder, places.name, owner)
    certificates.make_worker_secret(places.folder, places.name, owner)
    certificates.write_new(places.folder / "ca.crt", places.ca.read_bytes(), owner)
    if terms is not None and rows.exists():
        _give_to_user(rows, owner, 0o600)
    elif terms is not None:
        shutil.copyfile(terms.rows, certificates.write_new(rows, b"", owner))
    if not node.exists():
        certificates.write_new(node, text.encode(), owner)
    _write_units(places.units, units)
    steps = _fill_template("node.txt", values).split("\n\n")
    left = [step for step in steps if terms is None or not step.startswith(" #?")]
    numbers = itertools.count(1)
    return re.sub(r"(?m)^ #\??", lambda _: f" {next(numbers)}.", "\n".join(left))


@dataclass(frozen=True)
class Status(Verification):
    """Health of one machine: the checks, and numbers that may leave it."""

    role: str = ""
    name: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return one object."""
        return asdict(self) | {"healthy": self.broken is None, "software": __version__}

    def to_prometheus(self) -> str:
        """Return the text that Prometheus reads, also through the node exporter's textfiles."""
        who = f'role="{self.role}",name={json.dumps(self.name, ensure_ascii=False)}'
        text = ""
        for name, value in {"healthy": float(self.broken is None), **self.numbers}.items():
            text += f"# TYPE sottovoce_{name} gauge\nsottovoce_{name}{{{who}}} {value:.12g}\n"
        text += "# TYPE sottovoce_check_passed gauge\n"
        for c in self.checks:
            text += f'sottovoce_check_passed{{{who},check="{c.name}"}} {int(c.wrong is None)}\n'
        return text


def read_node_status(path: Path, folder: Path) -> Status:
    """Look at a client's node file, vault, certificate and services. The rows are not read.

    Numbers are those that its servers know together; `disclose = false` leaves the budget out.
    """
    node = Node.load(path)
    numbers: dict[str, float] = {}
    looks, wrong = node.vault.name, None
    try:
        with Vault.open(node.vault, dataset=None, wait=PATIENCE) as vault:
            entries = list(vault.entries())
            left = vault.left
            looks = f"{node.vault.name}: {len(entries):,} turns, {left:.1%} of the budget left"
            numbers["turns"] = len(entries)
            if entries:
                newest = datetime.fromisoformat(entries[-1].time)
                numbers["last_turn_timestamp_seconds"] = newest.timestamp()
            if vault.policy.disclose:
                numbers["budget_left_ratio"] = left
            vault.require_running()
            if left == 0:
                wrong = f"{node.vault} is spent: this client declines every request from now on"
    except SottovoceError as error:
        state, wrong = os.environ.get("SOTTOVOCE_STATE"), str(error)
        wrong += f" (as the worker's user, with SOTTOVOCE_STATE={state})" if state else ""
    files = (node.data, *(node.sum_files or ()))
    lost = [file for file in files if not os.access(file, os.R_OK)]
    wanting = "is missing or cannot be read, and no request is answered without it; put it back"
    checks = (
        Check("node", f"{path}", f"{lost[0]} {wanting}" if lost else None),
        Check("vault", looks, wrong),
        _check_certificate("authority", folder / "ca.crt", folder, numbers),
        *_check_services(*NODE_UNITS),
    )
    return Status(str(path), checks, "node", node.name, numbers)


def read_server_status(places: ServerPlaces) -> Status:
    """Look at a server's certificates, services and newest run."""
    folder, numbers = places.folder, dict[str, float]()
    checks = (
        _check_certificate("proxy certificate", places.proxy_keys / "server.crt", folder, numbers),
        _check_certificate("link certificate", folder / "link.crt", folder, numbers),
        *_check_services("superlink", "server", "proxy"),
        _check_newest_run(places.runs, numbers),
    )
    return Status(str(places.folder), checks, "server", places.folder.name, numbers)


def _check_newest_run(runs: Path, numbers: dict[str, float]) -> Check:
    """Look at the run that was begun or written last: it goes on, has finished, or is not well.

    A run that ended before its first round has left nothing but the file of its lock.
    """
    files = [file for name in (ROUNDS, server_app.LOCK) for file in runs.rglob(name)]
    if not files:
        return Check("run", f"no run in {runs} yet", None)
    folder = max(files, key=lambda file: file.stat().st_mtime).parent
    is_led, status, rounds = is_held(folder), "failed", "no round"
    for run in RunsFolder(folder).look():
        status, rounds = run.status, f"{run.done} rounds"
        numbers |= {"rounds": run.done, "last_round_timestamp_seconds": run.written}
        if run.rounds:
            missing = numbers["clients_missing"] = len(run.rounds[-1].get("missing", {}))
            rounds += f", {missing} clients without an upload in the last"
    if is_led and status != "damaged":  # perhaps it still waits for its clients
        status = "running"
    if status in ("running", "finished", "unknown"):  # unknown: there are no locks here
        return Check("run", f"{folder}: {status}, {rounds}", None)
    wrong = f"{folder} is {status}, and `journalctl -u sottovoce-server` may say why; "
    can_resume = (folder / checkpoint.NAME).exists()
    wrong += "run it again with resume=true" if can_resume else "start it anew in another folder"
    return Check("run", f"{folder}: {status}, {rounds}", f"{wrong}, or move it out of {runs}")


def _check_certificate(name: str, path: Path, folder: Path, numbers: dict[str, float]) -> Check:
    try:
        ends = [certificates.read_end(path) for path in (path, path.with_name("ca.crt"))]
    except (InputError, OSError) as error:
        return Check(name, str(path), str(error))
    numbers[name.replace(" ", "_") + "_end_timestamp_seconds"] = ends[0].timestamp()
    days, last = ((end - datetime.now(UTC)).days for end in ends)
    remedy = f"bring ca.key back and run `sottovoce server renew --folder {folder}`"
    if last < FEWEST_DAYS:  # nothing that it signs is valid for longer
        remedy = "its authority ends too, so the server needs `sottovoce server init` with another "
        remedy += "--folder and --authority, and every client the new ca.crt"
    wrong = f"{path} is valid for {days} more days; {remedy}" if days < FEWEST_DAYS else None
    return Check(name, f"{path.name} is valid until {ends[0]:%Y-%m-%d}", wrong)


def _check_services(*names: str) -> list[Check]:
    """Ask systemd whether services run; without systemd nothing is known of them."""
    if not Path("/run/systemd/system").exists():
        return [Check("services", "not checked: systemd does not run here", None)]
    checks = []
    for name in (f"sottovoce-{name}" for name in names):
        done = subprocess.run(["systemctl", "is-active", name], capture_output=True, text=True)
        state = done.stdout.strip() or "unknown"
        wrong = f"{name} is {state}; see `journalctl -u {name}`" if done.returncode else None
        checks.append(Check(name, state, wrong))
    return checks


def _find_or_make_authority(folder: Path, passphrase: bytes) -> certificates.Authority:
    if (folder / "ca.crt").exists():
        return certificates.find_authority(folder, passphrase)
    if (given := len(passphrase)) < 8:
        raise InputError.of("passphrase", given, "at least 8 characters", "it protects ca.key")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return certificates.make_authority(folder, passphrase=passphrase)


def _require_unused(places: NodePlaces, units: Iterable[Path]) -> None:
    """Refuse a second client of a machine, and an account as whose other services may run."""
    files = [unit for unit in units if unit.exists()]
    files += [places.folder] if any(places.folder.glob("*")) else []
    if files:
        found = ", ".join(map(str, files))
        raise InputError(
            f"a machine has one client, and here are files of one ({found}); set a second one up "
            "elsewhere or in a container, or, to replace this one, stop it and move these away"
        )
    if places.user is None and _find_user(places.owner) is not None:
        raise InputError(
            f"{places.owner} is a user of this machine already, and may run what must not read the "
            f"key; name another by --user, or say --user {places.owner} if it runs nothing else"
        )


def _fill_units(folder: Path, values: dict[str, str], *names: str) -> dict[Path, str]:
    hardening = (HERE / "hardening").read_text("utf-8").rstrip()
    filled = {**values, "bin": str(Path(sys.executable).parent), "hardening": hardening}
    units = {folder / f"sottovoce-{name}.service": f"{name}.service" for name in names}
    return {path: _fill_template(name, filled) for path, name in units.items()}


def _write_units(folder: Path, units: Mapping[Path, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in units.items():
        path.write_text(text)


def _fill_template(name: str, values: dict[str, str]) -> str:
    text = (HERE / name).read_text("utf-8")
    for key, value in values.items():
        is_plain = not any(c.isspace() or c in "'\"\\;{}$%" for c in value)
        if not is_plain and key not in ("hardening", "as_user"):
            raise InputError.of(key, value, "without spaces and quotes", "name it plainly")
        text = text.replace(f"{{{{{key}}}}}", value)
    assert "{{" not in text, name
    return text


def _require_user(name: str) -> None:
    if not USER.fullmatch(name):
        raise InputError.of("user", name, "small letters, digits and _ -", "give one by --user")


def _require_range(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise InputError.of(name, value, f"from 1 to {most:,}", "choose another")


def _find_user(name: str) -> certificates.Owner | None:
    """Return a user of this machine; None without root, which can give nothing to anybody."""
    try:
        found = pwd.getpwnam(name) if os.geteuid() == 0 else None
    except KeyError:
        found = None
    return found and (found.pw_uid, found.pw_gid)


def _find_or_make_user(name: str) -> certificates.Owner | None:
    """Return a service's user, made if it is missing; None without root."""
    if os.geteuid() == 0 and _find_user(name) is None:
        words = ["useradd", "--system", "--user-group", "--shell", "/usr/sbin/nologin"]
        words += ["--home-dir", f"/var/lib/{name}", "--no-create-home", name]
        if subprocess.run(words).returncode:
            raise InputError(f"useradd did not make the user {name}; make it, then add --user")
    return _find_user(name)


def _give_to_user(path: Path, owner: certificates.Owner | None, mode: int) -> None:
    path.chmod(mode)
    if owner is not None:
        os.chown(path, *owner, follow_symlinks=False)
