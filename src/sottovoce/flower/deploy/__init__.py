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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    raise InputError(
        "services are made for systemd; run server init and node init on Linux"
    ) from None

HERE = Path(__file__).parent
MIB = 1 << 20
QUIET = "FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1"
# What the proxy lets one address do. Ten SuperNodes behind one address stay below it.
LIMITS = {"calls": 20, "burst": 200, "replies": 5, "replies_burst": 20, "connections": 64}
# The list of an answer's three parts takes about a kilobyte.
ANNOUNCED = 2048
MOST_PARAMETERS = 2**28
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
        for name, value, most in (
            ("port", self.port, 65535),
            ("link-port", self.link_port, 65535),
            ("parameters", self.parameters, MOST_PARAMETERS),
            ("clients", self.clients, 10_000),
        ):
            if not 1 <= value <= most:
                raise InputError.of(name, value, f"from 1 to {most:,}", "choose another")
        if self.port == self.link_port:
            raise InputError.of("link-port", self.port, "another than port", "choose another")

    @property
    def proxy_keys(self) -> Path:
        """The folder of the proxy's certificate and key, which the server's user cannot read."""
        return self.folder.parent / f"{self.folder.name}-proxy"

    @property
    def largest(self) -> int:
        """The most bytes of one answer: float32 parameters and what surrounds them."""
        return 4 * self.parameters + SLACK + ENVELOPE

    @property
    def link_memory(self) -> int:
        """The most memory of the SuperLink: itself, and a few copies of an answer a client."""
        return 1024 * MIB + 4 * self.largest * self.clients

    @property
    def server_memory(self) -> int:
        """The most memory of the ServerApp: itself, and all answers of a round, decoded."""
        return 2048 * MIB + 8 * self.largest * self.clients


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
        if not 1 <= self.port <= 65535:
            raise InputError.of("port", self.port, "from 1 to 65,535", "choose another")

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
        """Return the node file; refuse terms that a worker would refuse, before any is written."""
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
            Node.load(file)
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
    """Make a server's keys, proxy configuration and units; return what is left to do."""
    proxy = f"{places.user}-proxy"
    keys, proxy_keys = places.folder, places.proxy_keys
    for folder in (keys, proxy_keys):
        if any(folder.glob("*")):
            remedy = "keys are never overwritten; name another"
            raise InputError.of("folder", str(folder), "new or empty", remedy)
    proxy_state = places.state.parent / f"{places.state.name}-proxy"
    same = "largest state runs user port link_port link_memory server_memory proxy_keys authority"
    values = {
        **{key: str(value) for key, value in LIMITS.items()},
        **{key: str(getattr(places, key)) for key in same.split()},
        "announced": str(ANNOUNCED),
        "parameters": f"{places.parameters:,}",
        "keys": str(keys),
        "proxy_state": str(proxy_state),
        "nginx": shutil.which("nginx") or "/usr/sbin/nginx",
    }
    nginx = _fill_template("nginx.conf", {**values, "keys": str(proxy_keys)})
    units = {name: _fill_unit(name, values) for name in ("superlink", "server", "proxy")}
    owner, proxy_owner = _find_or_make_user(places.user), _find_or_make_user(proxy)
    authority = _find_or_make_authority(places.authority, passphrase)
    for folder, whose, mode in (
        (keys, owner, 0o750),
        (keys / "flwr", owner, 0o750),
        (proxy_keys, proxy_owner, 0o700),
        (places.state, owner, 0o700),
        (proxy_state, proxy_owner, 0o700),
        (places.runs, owner, 0o750),
    ):
        _make_folder(folder, whose, mode)
    certificates.make_server_keys(proxy_keys, authority, names=names, owner=proxy_owner)
    certificates.make_server_keys(keys, authority, stem="link", owner=owner)
    certificates.make_worker_secret(keys, "worker", owner)
    connection = (
        "[superlink]\ndefault = 'federation'\n\n[superlink.federation]\n"
        f"address = '127.0.0.1:{places.link_port}'\nroot-certificates = '{keys / 'ca.crt'}'\n"
    )
    vouches = authority.certificate.read_bytes()
    for path, content, whose in (
        (keys / "ca.crt", vouches, owner),
        (keys / "flwr" / "config.toml", connection.encode(), owner),
        (proxy_keys / "ca.crt", vouches, proxy_owner),
        (proxy_keys / "nginx.conf", nginx.encode(), proxy_owner),
    ):
        certificates.write_new(path, content, whose)
    _write_units(places.units, units)
    where = f"{names[0] if names else 'SERVER'}:{places.port}"
    more = {"ca": str(authority.certificate), "ca_key": str(authority.key), "where": where}
    return _fill_template("server.txt", {**values, **more})


def renew_server(places: ServerPlaces, passphrase: bytes) -> str:
    """Sign the server's two certificates for another year; no key changes."""
    authority = certificates.find_authority(places.authority, passphrase)
    certificates.renew_certificate(places.proxy_keys, signed_by=authority)
    certificates.renew_certificate(places.folder, stem="link", signed_by=authority)
    return "both certificates are signed for another year; now run:\n" + (
        "  systemctl restart sottovoce-superlink sottovoce-server sottovoce-proxy\n"
    )


def init_node(places: NodePlaces, terms: NodeTerms | None = None) -> str:
    """Make a client's key, node file and units; return what is left to do.

    With terms the rows are copied to the client's folder, and the vault is all that is missing.
    """
    if not places.ca.is_file():
        raise InputError.of("ca", str(places.ca), "a file that exists", "the server sends ca.crt")
    node, text = places.rows / "node.toml", None
    if terms is not None:
        text, rows = terms.to_toml(places.name), places.rows / f"rows{terms.rows.suffix}"
        for file in (node, rows):
            if file.exists() and not file.samefile(terms.rows):
                raise InputError(f"{file} is there already; move it, or leave the rows out")
    values = {
        "name": places.name,
        "server": places.server,
        "keys": str(places.folder),
        "data": str(places.rows),
        "state": str(places.home),
        "user": places.owner,
        "port": str(places.port),
        "bin": _find_bin(),
        "python": sys.executable,
        # Root would run a model of the client's own, which its user may change.
        "as_user": f"runuser -u {places.owner} -- env " if os.geteuid() == 0 else "",
    }
    units = {name: _fill_unit(name, values) for name in NODE_UNITS}
    text = text or _fill_template("node.toml", values)
    _require_unused(places)
    owner = _find_or_make_user(places.owner)
    for folder, mode in ((places.folder, 0o750), (places.rows, 0o700), (places.home, 0o700)):
        _make_folder(folder, owner, mode)
    certificates.make_node_key(places.folder, places.name, owner)
    certificates.make_worker_secret(places.folder, places.name, owner)
    certificates.write_new(places.folder / "ca.crt", places.ca.read_bytes(), owner)
    if terms is not None and rows.exists():
        rows.chmod(0o600)
        _give_to_user(rows, owner)
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
        head = {"role": self.role, "name": self.name, "healthy": self.broken is None}
        return head | asdict(self) | {"software": __version__}

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
            left = max(0.0, 1 - vault.spent / vault.limit)
            looks = f"{node.vault.name}: {len(entries):,} turns, {left:.1%} of the budget left"
            numbers["turns"] = len(entries)
            if entries:
                newest = datetime.fromisoformat(entries[-1].time)
                numbers["last_turn_timestamp_seconds"] = newest.timestamp()
            if vault.policy.disclose:
                numbers["budget_left_ratio"] = left
            vault.require_running()
            if left <= 0:
                wrong = f"{node.vault} is spent: this client declines every request from now on"
    except SottovoceError as error:
        state = os.environ.get("SOTTOVOCE_STATE")
        where = "" if state is None else f" (as the worker's user, with SOTTOVOCE_STATE={state})"
        wrong = f"{error}{where}"
    lost = [file for file in (node.data, *(node.sum_files or ())) if not file.is_file()]
    wanting = "is missing, and no request is answered without it; put it back"
    checks = (
        Check("node", f"{path}", f"{lost[0]} {wanting}" if lost else None),
        Check("vault", looks, wrong),
        _check_certificate("authority", folder / "ca.crt", folder, numbers),
        *_check_services(*NODE_UNITS),
    )
    return Status(str(path), checks, "node", node.name, numbers)


def read_server_status(places: ServerPlaces) -> Status:
    """Look at a server's certificates, services and newest run."""
    numbers: dict[str, float] = {}
    proxy = places.proxy_keys / "server.crt"
    checks = (
        _check_certificate("proxy certificate", proxy, places.folder, numbers),
        _check_certificate("link certificate", places.folder / "link.crt", places.folder, numbers),
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
    is_led, status, rounds = is_held(folder / server_app.LOCK), "failed", "no round"
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
    can_resume = (folder / checkpoint.NAME).exists()
    remedy = "run it again with resume=true" if can_resume else "start it anew in another folder"
    wrong = f"{folder} is {status}, and `journalctl -u sottovoce-server` may say why; {remedy}"
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
        remedy = (
            "its authority ends too, so run `sottovoce server init` on the server with another "
            "--folder and --authority, and give the new ca.crt to every client"
        )
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
    if len(passphrase) < 8:
        remedy = "it protects ca.key"
        raise InputError.of("passphrase", f"{len(passphrase)} characters", "at least 8", remedy)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return certificates.make_authority(folder, passphrase=passphrase)


def _require_unused(places: NodePlaces) -> None:
    """Refuse a second client of a machine, and an account as whose other services may run."""
    files = [places.units / f"sottovoce-{name}.service" for name in NODE_UNITS]
    files = [file for file in files if file.exists()]
    files += [places.folder] if any(places.folder.glob("*")) else []
    if files:
        raise InputError(
            f"a machine has one client, and it has files of one already "
            f"({', '.join(map(str, files))}); set a second one up on another machine or in a "
            "container of its own, or, to replace this one, stop its services and move these away"
        )
    if places.user is None and _find_user(places.owner) is not None:
        raise InputError(
            f"{places.owner} is a user of this machine already, and what else runs as it could "
            f"read this client's key; name another by --user, or say --user {places.owner} where "
            "it is this client's alone"
        )


def _fill_unit(name: str, values: dict[str, str]) -> str:
    hardening = (HERE / "hardening").read_text("utf-8").rstrip()
    filled = {"quiet": QUIET, "bin": _find_bin(), **values, "hardening": hardening}
    return _fill_template(f"{name}.service", filled)


def _write_units(folder: Path, units: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in units.items():
        (folder / f"sottovoce-{name}.service").write_text(text)


def _fill_template(name: str, values: dict[str, str]) -> str:
    text = (HERE / name).read_text("utf-8")
    for key, value in values.items():
        is_plain = not any(c.isspace() or c in "'\"\\;{}$%" for c in value)
        if not is_plain and key not in ("hardening", "quiet", "as_user"):
            raise InputError.of(key, value, "without spaces and quotes", "name it plainly")
        text = text.replace(f"{{{{{key}}}}}", value)
    assert "{{" not in text, name
    return text


def _find_bin() -> str:
    return str(Path(sys.executable).parent)


def _require_user(name: str) -> None:
    if not USER.fullmatch(name):
        bound = "a name of small letters, digits, _ -"
        raise InputError.of("user", name, bound, "give one by --user")


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
        try:
            subprocess.run(words, check=True)
        except (OSError, subprocess.CalledProcessError):
            raise InputError(
                f"useradd could not make the user {name}; make it yourself, then add --user"
            ) from None
    return _find_user(name)


def _make_folder(path: Path, owner: certificates.Owner | None, mode: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    _give_to_user(path, owner)


def _give_to_user(path: Path, owner: certificates.Owner | None) -> None:
    if owner is not None:
        os.chown(path, *owner, follow_symlinks=False)
