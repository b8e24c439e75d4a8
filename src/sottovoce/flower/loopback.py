"""What Flower's processes are given on this machine: ports, an environment, their configuration."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from sottovoce.errors import FederationError, InputError

HOST = "127.0.0.1"
# Below the range from which the system takes the ports of outgoing connections: a port that was
# free a moment ago is not taken by one of them before Flower binds it.
PORTS = range(20_000, 32_000)
# Flower looks for work once a second; looking is cheap, waiting is not.
TASK_POLL = "0.1"


def environment(home: Path) -> dict[str, str]:
    """What Flower's processes should know of this machine: little."""
    bin_folder = str(Path(sys.executable).parent)
    inherited = dict(os.environ)
    no_proxy = ",".join(filter(None, [inherited.get("NO_PROXY"), HOST, "localhost"]))
    return {
        **inherited,
        # Flower starts its own commands by name.
        "PATH": os.pathsep.join([bin_folder, inherited.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": inherited.get(
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL", TASK_POLL
        ),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def config_text(config: Mapping[str, str | int | float | bool]) -> str:
    """A node's configuration as `flower-supernode --node-config` reads it.

    >>> print(config_text({"node": "/srv/my node.toml", "slots": 2, "fast": True}))
    node='/srv/my node.toml' slots=2 fast=true
    """
    words = []
    for key, value in config.items():
        if isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, str):
            if "'" in value or "\n" in value:
                raise InputError.of(key, value, "a text without ' and line breaks", "rename it")
            text = f"'{value}'"
        else:
            text = repr(value)
        words.append(f"{key}={text}")
    return " ".join(words)


def free_port() -> int:
    """A port on loopback that nobody listens on, chosen at random."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many of them, no two the same: nobody listens yet on those that were drawn before."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, min(len(PORTS), 100 + 2 * count)):
        if len(found) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
    if len(found) < count:
        raise FederationError(
            f"{count} free ports were not found between {PORTS.start} and {PORTS.stop - 1}; "
            "end what uses them, or start fewer nodes"
        )
    return found
