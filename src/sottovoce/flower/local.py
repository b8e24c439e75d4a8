"""A federation on this machine: one SuperLink and N SuperNodes on loopback, nothing left behind.

    with local.start_federation(folder, ["a.toml", "b.toml"]) as running:
        run = running.run(local.APP, {"plan": "plan.toml"})
        running.wait(run, seconds=600)

TLS and node authentication are on: certificates and keys are made in the folder, the nodes' keys
are registered, ports are free ones, and every party has a FLWR_HOME of its own (two nodes that
unpack one bundle into one folder trip over each other). A SuperNode that dies is started again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import socket
import ssl
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read once, when flwr is imported

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from sottovoce.errors import FederationError, InputError, SottovoceError
from sottovoce.flower import certificates, worker
from sottovoce.flower.processes import Process, Processes

HOST = "127.0.0.1"
# Below the range from which the system takes the ports of outgoing connections: a port that was
# free a moment ago is not taken by one of them before Flower binds it.
PORTS = range(20_000, 32_000)
# Seconds; Flower would look for work once a second.
TASK_POLL = "0.1"
Scalar = str | int | float | bool
Client = TypeVar("Client", bound=ProtobufClient)


class NoAnswer(FederationError):
    """The SuperLink did not answer this time; it may be busy, and answer later."""


@dataclass(frozen=True)
class Link:
    """Where a SuperLink listens, and its certificate authority (None: plaintext on loopback)."""

    address: str
    authority: Path | None


@dataclass(frozen=True)
class RunState:
    """What the SuperLink says of a run."""

    status: str
    outcome: str
    details: str


def make_environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes on this machine."""
    bin_folder, no_proxy = str(Path(sys.executable).parent), f"{HOST},localhost"
    if os.environ.get("NO_PROXY"):
        no_proxy = f"{os.environ['NO_PROXY']},{no_proxy}"
    return {
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": TASK_POLL,
        **os.environ,
        # Flower starts its own commands by name.
        "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def find_free_ports(count: int) -> list[int]:
    """Return so many random ports on loopback that nobody listens on, no two the same."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, min(len(PORTS), 100 + 2 * count)):
        if len(ports) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            ports.append(port)
    if len(ports) < count:
        raise FederationError(
            f"{count} free ports were not found between {PORTS.start} and {PORTS.stop - 1}; "
            "end what uses them, or start fewer nodes"
        )
    return ports


APP = Path(__file__).parent / "app"
CONNECTION = "federation"
READY = 300.0  # seconds; a process that dies is noticed at once
# Seconds until a node that was refused (exit code 305: still counted online) tries again.
RETRY = 10.0
# Starts without a pause; a process that ends more often has a reason that may pass with time.
AT_ONCE = 5
# Seconds between two looks at the processes.
BEAT = 0.25
# Seconds for which a SuperLink that is too busy to say how a run stands is asked again.
SLOW = 120.0
# Seconds in which a worker may store and send what it has paid for before it is ended.
LAST_STEP = 20.0


@dataclass
class SuperNodeProcess:
    """One SuperNode, with what it needs to be started again."""

    name: str
    file: str  # its node file
    key: certificates.NodeKey | None
    id: int | None
    port: int
    process: Process | None = None
    worker: Process | None = None
    starts: int = 0
    falls: int = 0  # how often its worker ended unexpectedly


@dataclass(eq=False)
class LocalFederation:
    """A running SuperLink with its SuperNodes; the options are those of `start_federation`."""

    folder: Path
    processes: Processes
    link: Link
    app: str | None
    warm: str | None = None
    pinned: bool = False
    nodes: list[SuperNodeProcess] = field(default_factory=list)
    _link_process: Process | None = None
    _server: Process | None = None
    _closing: threading.Event = field(default_factory=threading.Event)
    _supervisor: threading.Thread | None = None

    def run(self, app: Path, config: Mapping[str, Scalar]) -> int:
        """Bundle the app in this folder and start it, as `flwr run` does; return the run's id."""
        try:
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                content = build_fab_from_disk(app)  # a warning of Flower's own
        except ValueError as error:
            raise InputError(f"{app} is no Flower app: {error}") from error
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(
            fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config))
        )
        with _open_control(self.link) as client:
            answer = client.StartRun(request)
        if not answer.HasField("run_id"):
            raise FederationError(f"the SuperLink started no run; its log is in {self.folder}/logs")
        return int(answer.run_id)

    def wait(
        self,
        run: int,
        *,
        seconds: float = math.inf,
        every: float = 0.5,
        on_beat: Callable[[], None] = lambda: None,
    ) -> RunState:
        """Wait for a run's end; raise FederationError if it failed or takes longer."""
        state = RunState("pending", "", "")
        heard = time.monotonic()

        def is_finished() -> bool:
            nonlocal state, heard
            on_beat()
            try:
                state = read_run_state(self.link, run)
            except NoAnswer:
                self.check()
                if time.monotonic() - heard > SLOW:
                    raise
                return False
            heard = time.monotonic()
            return state.status == "finished"

        if not wait_for(is_finished, seconds, every=every, check=self.check):
            with _open_control(self.link) as client:  # as `flwr stop` does
                client.StopRun(StopRunRequest(run_id=run))
            raise FederationError(
                f"the run was not over after {seconds:.0f} s; it is {state.status}"
            )
        if state.outcome != "completed":
            why = state.details.removeprefix("ServerApp failed with exception: ")
            words = [
                _quote_log(node.worker, f"the worker of {node.name} ended {node.falls} times")
                for node in self.nodes
                if node.falls and node.worker is not None
            ]
            raise FederationError(
                "\n".join([f"the run {state.outcome or 'failed'}: {why}", *words])
            )
        return state

    def check(self) -> None:
        """Raise if the SuperLink is gone: then waiting is useless."""
        _require_alive(self._link_process, "the SuperLink")

    def environment(self, party: str) -> dict[str, str]:
        """Return the environment of one party, with its own FLWR_HOME and no telemetry."""
        home = self.folder / "home" / party
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return make_environment(home)

    def _start(
        self, name: str, argv: list[str], *, party: str, grace: float = 0.0, **more: str
    ) -> Process:
        """Start a process with a log of its own, in the environment of its party."""
        log, env = self.folder / "logs" / f"{name}.log", {**more, **self.environment(party)}
        return self.processes.start(name, argv, log=log, env=env, grace=grace)

    def start_link(self, server: certificates.ServerKeys | None) -> None:
        """Start the SuperLink and wait until it answers."""
        port = self.link.address.rpartition(":")[2]
        argv = [_find_tool("flower-superlink"), "--host", HOST, "--port", port]
        argv.append("--disable-runtime-dependency-installation")
        if server is None:
            argv.append("--insecure")
        else:
            argv += ["--ssl-ca-certfile", str(server.authority)]
            argv += ["--ssl-certfile", str(server.certificate), "--ssl-keyfile", str(server.key)]
            argv.append("--enable-supernode-auth")
        if self.pinned:
            argv += ["--isolation", "process"]
            argv += ["--superexec-auth-secret-file", str(self._secret("superlink"))]
        self._link_process = self._start("superlink", argv, party="superlink")

    def start_server(self) -> None:
        """Start the process that leads runs with the installed ServerApp, whatever is shipped."""
        if not self.pinned:
            return
        argv = [sys.executable, "-m", "sottovoce.flower.server_worker"]
        argv += ["--link", self.link.address, "--secret", str(self._secret("superlink"))]
        argv += ["--authority", str(self.link.authority)] if self.link.authority else []
        self._server = self._start("server", argv, party="superlink", grace=LAST_STEP)

    def start_node(self, node: SuperNodeProcess) -> None:
        """Start a SuperNode, which connects to the SuperLink."""
        argv = [_find_tool("flower-supernode"), "--superlink", self.link.address]
        argv += ["--host", HOST, "--port", str(node.port)]
        if node.key is None or self.link.authority is None:
            argv.append("--insecure")
        else:
            argv += ["--root-certificates", str(self.link.authority)]
            argv += ["--auth-supernode-private-key", str(node.key.private)]
        argv += ["--node-config", f"node='{node.file}'"]
        if self.app is not None:
            argv += ["--isolation", "process"]
            argv += ["--superexec-auth-secret-file", str(self._secret(node.name))]
        node.starts += 1
        node.process = self._start(node.name, argv, party=node.name)

    def start_worker(self, node: SuperNodeProcess) -> None:
        """Start the process that answers a SuperNode's messages with the installed app."""
        if self.app is None:
            return
        argv = [sys.executable, "-m", "sottovoce.flower.worker", "--app", self.app]
        argv += ["--node", f"{HOST}:{node.port}", "--secret", str(self._secret(node.name))]
        argv += [] if self.warm is None else ["--warm", self.warm]
        # The nodes share this machine's cores; with more threads they would slow each other down.
        threads = str(max(1, (os.cpu_count() or 1) // len(self.nodes)))
        name = f"{node.name}.worker"
        node.worker = self._start(
            name, argv, party=node.name, grace=LAST_STEP, OMP_NUM_THREADS=threads
        )

    def supervise(self) -> None:
        """Restart SuperNodes and workers that ended unasked, until the federation closes."""
        due: dict[str, float] = {}

        def is_due(process: Process | None, soon: Callable[[], bool] = lambda: False) -> bool:
            """Return whether a process that ended unasked is to be started again now."""
            if process is None or process.code is None or process.asked:
                return False
            if process.name not in due:
                due[process.name] = time.monotonic() + (0.0 if soon() else RETRY)
            if time.monotonic() < due[process.name]:
                return False
            del due[process.name]
            return True

        def count_fall(node: SuperNodeProcess) -> bool:
            node.falls += 1
            return node.falls < AT_ONCE

        def watch() -> None:
            while not self._closing.wait(BEAT):
                # What cannot be started now (a full disk, no memory) is due again, like all else.
                with contextlib.suppress(SottovoceError, OSError):
                    if is_due(self._server):
                        self.start_server()
                    for node in self.nodes:
                        if is_due(node.worker, partial(count_fall, node)):
                            self.start_worker(node)
                        if is_due(node.process, partial(self._release_session, node)):
                            self.start_node(node)

        self._supervisor = threading.Thread(target=watch, daemon=True)
        self._supervisor.start()

    def close(self) -> None:
        """End restarts; the processes end with their context."""
        self._closing.set()
        if self._supervisor is not None:
            self._supervisor.join()

    def _secret(self, name: str) -> Path:
        path = self.folder / "keys" / f"{name}.secret"
        return path if path.exists() else certificates.make_worker_secret(path.parent, name)

    def _release_session(self, node: SuperNodeProcess) -> bool:
        """Return whether a SuperNode that ended may come back at once: its old session is over."""
        if node.key is None or node.id is None:
            return node.starts < AT_ONCE
        return release_session(self.link, node.key.private, node.id) and node.starts < AT_ONCE


@contextlib.contextmanager
def start_federation(
    folder: Path,
    files: Sequence[str],
    *,
    app: str | None = worker.APP,
    warm: str | None = None,
    pinned: bool = False,
    insecure: bool = False,
    keys: Path | None = None,
) -> Iterator[LocalFederation]:
    """Start a SuperLink and a SuperNode for each node file; all are online when this enters.

    The folder gets keys, logs and FLWR_HOMEs, for its owner's eyes alone. `app` is the ClientApp
    that the nodes run whatever the server ships (see `worker`); None leaves it to Flower, which
    runs what was shipped. `warm` names a function that each worker calls before it is asked
    anything. `pinned` does for the server what `app` does for the nodes: the installed ServerApp
    leads (see `server_worker`). `insecure` is for a demonstration on loopback: no TLS, no
    authentication. `keys` is a folder of an earlier session, whose nodes' keys are used again: a
    run knows its clients by them. Whatever ends the context (an error, Ctrl-C, kill -9) ends every
    process.
    """
    if not files:
        raise InputError.of("files", list(files), "at least one node file", "name a node")
    for file in files:
        if "'" in file or "\n" in file:
            raise InputError.of("node", file, "a path without ' and line breaks", "rename it")
    folder = folder.resolve()
    keys = folder / "keys" if keys is None else keys
    for path in (keys, *(folder / name for name in ("certificates", "keys", "home", "logs"))):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    server = None
    if not insecure:
        authority = certificates.make_authority(folder / "certificates")
        server = certificates.make_server_keys(folder / "certificates", authority)
    first, *ports = find_free_ports(1 + len(files))
    link = Link(f"{HOST}:{first}", None if server is None else server.authority)
    with Processes() as processes:
        running = LocalFederation(folder, processes, link, app=app, warm=warm, pinned=pinned)
        _write_connection(folder / "home" / "superlink", link)
        running.start_link(server)
        try:
            for index, (file, port) in enumerate(zip(files, ports, strict=True)):
                name = f"node{index}"
                key = None if insecure else certificates.find_or_make_node_key(keys, name)
                running.nodes.append(SuperNodeProcess(name, file, key, None, port))
            running.start_server()
            if not wait_for(lambda: is_answering(link), READY, check=running.check):
                words = f"the SuperLink did not answer in {READY:.0f} s"
                raise FederationError(_quote_log(processes.all["superlink"], words))
            for node in running.nodes:
                if node.key is not None:
                    node.id = register_node(link, node.key.public, node.name)
                running.start_node(node)
                running.start_worker(node)
            _wait_for_nodes(running, READY)
            running.supervise()
            yield running
        finally:
            running.close()


def is_answering(link: Link) -> bool:
    """Return whether the SuperLink reports that it is healthy."""
    url = f"http{'s' if link.authority else ''}://{link.address}/health"
    try:
        trust = link.authority and ssl.create_default_context(cafile=str(link.authority))
        answer = httpx.get(url, timeout=5, trust_env=False, verify=trust or False)
    except (OSError, httpx.HTTPError):
        return False
    return answer.status_code == 200


def _wait_for_nodes(running: LocalFederation, seconds: float) -> None:
    wanted = len(running.nodes)

    def check() -> None:
        running.check()
        for node in running.nodes:
            _require_alive(node.process, f"SuperNode {node.name}")
            _require_alive(node.worker, f"the worker of {node.name}")

    def all_online() -> bool:
        with contextlib.suppress(NoAnswer):
            return len(list_online(running.link)) >= wanted
        return False

    if not wait_for(all_online, seconds, every=0.25, check=check):
        known = list_online(running.link)
        late = [node for node in running.nodes if node.id is None or node.id not in known]
        process = late[0].process
        words = f"{len(late)} of {wanted} SuperNodes were not online after {seconds:.0f} s"
        raise FederationError(words if process is None else _quote_log(process, words))


def _write_connection(home: Path, link: Link) -> None:
    """Write the connection that `flwr run APP federation` uses, with this folder as FLWR_HOME."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    trust = f"root-certificates = '{link.authority}'" if link.authority else "insecure = true"
    (home / "config.toml").write_text(
        f"[superlink]\ndefault = '{CONNECTION}'\n\n"
        f"[superlink.{CONNECTION}]\naddress = '{link.address}'\n{trust}\n",
        "utf-8",
    )


def _find_tool(name: str) -> str:
    """Return one of Flower's commands, beside the python that runs this."""
    return str(Path(sys.executable).parent / name)


def _require_alive(process: Process | None, what: str) -> None:
    """Raise with the end of its log if a process that was started has ended."""
    if process is not None and not process.alive:
        raise FederationError(_quote_log(process, f"{what} ended with exit code {process.code}"))


def _quote_log(process: Process, words: str) -> str:
    tail = process.tail()
    end = f"the last lines of {process.log}:\n{tail}" if tail else "its log is empty"
    return f"{words}; {end}"


# What `flwr` does from the command line, as functions. The command line takes two seconds to start,
# and a federation on this machine asks these questions many times a minute. Each function makes the
# same call to the SuperLink's control interface as the command, over the same TLS.


def register_node(link: Link, public: Path, name: str) -> int:
    """Register a node's public key, as `flwr supernode register` does; return the node's id."""
    key = serialization.load_ssh_public_key(public.read_bytes())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    pem = key.public_bytes(serialization.Encoding.PEM, form)
    with _open_control(link) as client:
        return int(client.RegisterNode(RegisterNodeRequest(public_key=pem, name=name)).node_id)


def list_online(link: Link) -> set[int]:
    """Return the ids of nodes that the SuperLink counts as online, as `flwr supernode list`."""
    with _open_control(link) as client:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    return {int(node.node_id) for node in nodes if node.status == "online"}


def release_session(link: Link, private: Path, node: int) -> bool:
    """End the session that a killed node left open, with its key; return whether there was one.

    A SuperLink counts a node as online for up to a minute after its last heartbeat, and refuses it
    if it comes back before that. Once it knows that the old session is over it lets the node in at
    once, and answers what was asked of it with an error instead of silence.
    """
    key = serialization.load_ssh_private_key(private.read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)  # made here
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    try:
        with _open_client(FleetHttpClient, link, "SuperNode", signed) as client:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
    except FederationError:
        return False
    return True


def read_run_state(link: Link, run: int) -> RunState:
    """Return the state of a run, as `flwr list --run-id` does."""
    with _open_control(link) as client:
        runs = client.ListRuns(ListRunsRequest(run_id=run)).run_dict
    if run not in runs:
        raise FederationError(f"the SuperLink knows no run {run}; it may have been restarted")
    status = runs[run].status
    return RunState(status.status, status.sub_status, status.details)


def wait_for(
    question: Callable[[], bool], seconds: float, *, every: float = 0.1, check: Callable[[], None]
) -> bool:
    """Ask until the answer is yes, at most `seconds`; `check` raises when waiting is useless."""
    until = time.monotonic() + seconds
    while not question():
        check()
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True


def _open_control(link: Link) -> contextlib.AbstractContextManager[Any]:
    return _open_client(ControlHttpClient, link, "flwr CLI")


@contextlib.contextmanager
def _open_client(kind: type[Client], link: Link, component: str, *more: Any) -> Iterator[Client]:
    authority = None if link.authority is None else link.authority.read_bytes()
    with _bypass_proxy(link.address):
        client = kind.from_server_address(
            link.address,
            insecure=authority is None,
            root_certificates=authority,
            interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *more],
        )
    try:
        yield client
    except httpx.HTTPStatusError as error:
        refused = NoAnswer if error.response.is_server_error else FederationError
        raise refused(
            f"the SuperLink at {link.address} refused: {error.response.text[:200]}"
        ) from error
    except httpx.HTTPError as error:
        raise NoAnswer(
            f"the SuperLink at {link.address} does not answer ({type(error).__name__}); "
            "is it running, and is its certificate signed by the authority given?"
        ) from error
    finally:
        client.close()


_ENVIRONMENT = threading.Lock()  # two threads that changed it at once would take it from each other


@contextlib.contextmanager
def _bypass_proxy(address: str) -> Iterator[None]:
    """Keep a proxy from being asked for this machine; httpx reads the setting once."""
    host, names = address.rpartition(":")[0], ("NO_PROXY", "no_proxy")
    with _ENVIRONMENT:
        before = {name: os.environ[name] for name in names if name in os.environ}
        for name in names:
            os.environ[name] = ",".join(filter(None, (before.get(name), host)))
        try:
            yield
        finally:
            for name in names:
                del os.environ[name]
            os.environ.update(before)
