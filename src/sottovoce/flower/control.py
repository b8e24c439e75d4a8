"""What `flwr` does from the command line, as functions: register nodes, start and follow runs.

The command line takes two seconds to start; a federation on this machine asks these questions
many times a minute. Each function makes the same call to the SuperLink's control interface as the
command of the same name, over the same TLS.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

from sottovoce.errors import FederationError, InputError

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

    @property
    def finished(self) -> bool:
        """Whether it ended, well or not."""
        return self.status == "finished"

    @property
    def completed(self) -> bool:
        """Whether it ended well."""
        return self.finished and self.outcome == "completed"


def register_node(link: Link, public: Path, name: str) -> int:
    """Register a node's public key, as `flwr supernode register` does; return the node's id."""
    key = serialization.load_ssh_public_key(public.read_bytes())
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(f"{public} must be an ECDSA key; make one with ssh-keygen -t ecdsa -b 384")
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
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
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{private} must be an ECDSA key; make one with ssh-keygen -t ecdsa")
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    try:
        with _open_client(FleetHttpClient, link, "SuperNode", signed) as client:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
    except FederationError:
        return False
    return True


def start_run(link: Link, app: Path, config: Mapping[str, Scalar]) -> int:
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
    with _open_control(link) as client:
        answer = client.StartRun(request)
    if not answer.HasField("run_id"):
        raise FederationError("the SuperLink did not start the run; see its log")
    return int(answer.run_id)


def read_run_state(link: Link, run: int) -> RunState:
    """Return the state of a run, as `flwr list --run-id` does."""
    with _open_control(link) as client:
        runs = client.ListRuns(ListRunsRequest(run_id=run)).run_dict
    if run not in runs:
        raise FederationError(f"the SuperLink knows no run {run}; it may have been restarted")
    status = runs[run].status
    return RunState(status.status, status.sub_status, status.details)


def stop_run(link: Link, run: int) -> bool:
    """Ask the SuperLink to stop a run, as `flwr stop` does."""
    with _open_control(link) as client:
        return bool(client.StopRun(StopRunRequest(run_id=run)).success)


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


@contextmanager
def _open_control(link: Link) -> Iterator[Any]:
    with _open_client(ControlHttpClient, link, "flwr CLI") as client:
        yield client


@contextmanager
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


@contextmanager
def _bypass_proxy(address: str) -> Iterator[None]:
    """Keep a proxy from being asked for this machine; httpx reads the setting once."""
    host = address.rpartition(":")[0]
    before = {name: os.environ.get(name) for name in ("NO_PROXY", "no_proxy")}
    for name, value in before.items():
        os.environ[name] = f"{value},{host}" if value else host
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
