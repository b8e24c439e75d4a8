"""The process beside a SuperLink that leads runs with the *installed* ServerApp.

    flower-superlink --isolation process --superexec-auth-secret-file SECRET --host 127.0.0.1 …
    python -m sottovoce.flower.server_worker --link 127.0.0.1:8001 --authority ca.crt \\
        --secret SECRET --runs /srv/sottovoce

Whoever reaches a SuperLink's control interface may submit an app, and Flower as it comes unpacks it
and runs it as the server's user. This worker takes the submitted run and never opens the bundle: it
runs the ServerApp of the sottovoce that is installed here. Of the submission it reads the run's
configuration alone, where only known keys are allowed and every path has to lie below `--runs`. One
run is led at a time, each in a process of its own; the next waits for its end.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read once, when flwr is imported

import httpx
from flwr.common.serde import context_from_proto, run_from_proto
from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import ServerApp
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.logger import (
    flush_logs,
    mirror_output_to_queue,
    start_log_uploader,
    stop_log_uploader,
)
from flwr.supercore.task_identity import TaskIdentity

from sottovoce.errors import InputError
from sottovoce.flower import processes, server_app, worker
from sottovoce.flower.grid import BoundedGrid

APP = "sottovoce.flower.server_app:app"
# The bundle that `flwr run` ships names the settings of a run and their defaults.
BUNDLE = Path(__file__).parent / "app"
PATHS = ("plan", "public", "out", "progress", "admitted")

log = logging.getLogger("sottovoce")


def serve(link: str, authority: bytes | None, secret: bytes, runs: Path | None) -> None:
    """Take the runs that the SuperLink was given, one after the other, for ever."""
    app = load(APP)
    client = worker.connect(link, authority, secret)
    worker.take_tasks(
        client,
        "flwr-serverapp",
        lambda token: lead(link, authority, app, token, runs),
        ask_to_end=signal.SIGINT,
    )


def load(name: str) -> ServerApp:
    """Import the installed ServerApp; what a submitter shipped is never looked at."""
    module, _, attribute = name.partition(":")
    app = getattr(importlib.import_module(module), attribute)
    assert isinstance(app, ServerApp)
    return app


def lead(link: str, authority: bytes | None, app: ServerApp, token: str, runs: Path | None) -> None:
    """Lead the one run that this token stands for, and tell the SuperLink how it ended."""
    for number in server_app.STOPS:
        signal.signal(number, _interrupt)
    lines: Queue[str | None] = Queue()
    mirror_output_to_queue(lines)  # so that `flwr log` shows what the app says
    grid = BoundedGrid(link, authority is None, authority, token=token)
    client = grid._runtime_client
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    outcome, details, uploader = "failed", "the run was not begun", None
    try:
        heartbeat.start()
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        context, run = context_from_proto(task.context), run_from_proto(task.run)
        grid.set_run(run)
        uploader = start_log_uploader(lines, 0, run.run_id, client)
        context.run_config = configuration(run.override_config, runs)
        log.info("run %d begins", run.run_id)
        app(grid=grid, context=context)
        outcome, details = "completed", ""
    except KeyboardInterrupt:
        outcome, details = "stopped", "Task stopped by user."
    except Exception as error:
        details = f"ServerApp failed with exception: {error}"
        log.error("the run failed: %s", str(error))
        raise
    finally:
        log.info("the run ended: %s", outcome)
        grid._retry_invoker.max_time = worker.PATIENCE
        if uploader is not None:
            flush_logs(lines)
        try:
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=outcome, details=details))
        except httpx.HTTPError:  # a run that was stopped has ended for the SuperLink already
            log.info("the SuperLink did not take the end of the run")
        if uploader is not None:
            stop_log_uploader(lines, uploader)
        if heartbeat.is_running:
            heartbeat.stop()
        grid.close()


def configuration(given: Mapping[str, Any], runs: Path | None) -> dict[str, Any]:
    """Return a run's settings: the defaults of the installed app and what the submitter gave.

    Unknown keys are refused, and so are paths outside `runs` (None: any path).
    """
    app = tomllib.loads((BUNDLE / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]
    settings: dict[str, Any] = {**app["config"], **given}
    for key in settings:
        if key not in server_app.KINDS:
            known = ", ".join(server_app.KINDS)
            raise InputError(f"unknown key {key} in the run config; it may have {known}")
    for key in PATHS:
        value = settings[key]
        if runs is None or not isinstance(value, str) or not value:
            continue
        if not Path(value).resolve().is_relative_to(runs.resolve()):
            raise InputError.of(
                key, value, f"a path below {runs}", "put the run there, or change --runs"
            )
    return settings


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line, then serve."""
    parser = argparse.ArgumentParser(
        prog="python -m sottovoce.flower.server_worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--link", required=True, help="the SuperLink's --host:--port")
    parser.add_argument("--authority", type=Path, help="ca.crt; without it nothing is encrypted")
    parser.add_argument("--secret", type=Path, required=True, help="the file given to it as well")
    parser.add_argument("--runs", type=Path, help="the folder that every path of a run lies in")
    parser.add_argument("--log", choices=["plain", "json"], default="plain")
    given = parser.parse_args(words)
    processes.begin(as_json=given.log == "json")
    authority = None if given.authority is None else given.authority.read_bytes()
    serve(given.link, authority, worker.read_secret(given.secret), given.runs)


if __name__ == "__main__":
    processes.run(main)
