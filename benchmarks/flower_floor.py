"""A round of our transport beside Flower's own floor: an empty app that sends a model back.

The floor is Flower as it comes: an `ArrayRecord` to every node by `send_and_receive`, a ClientApp
that returns it, in the process that Flower starts for every message. Then the same with the
interval at which Flower looks for work shortened (the one setting it has), our transport alone (as
many bytes through `transport.ask` and `worker`), and `sottovoce federate`: real clients that clip,
draw noise and book it durably in their vaults, and a server that checks, averages and evaluates.
All over TLS with authenticated nodes on loopback. The last column is its ratio to Flower as it
comes, which is to be at most 1.3.

    python benchmarks/flower_floor.py [--nodes 3] [--rounds 6] [--parameters 2410 200000 5000000]

A node looks for messages every 3 s, which no setting changes: no round is shorter than that.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kept import keep

from sottovoce.flower import local

EMPTY = {
    "pyproject.toml": """
        [project]
        name = "empty"
        version = "1.0.0"
        description = "Sends a model and gets it back."
        license = "Apache-2.0"
        dependencies = []

        [tool.flwr.app]
        publisher = "sottovoce"

        [tool.flwr.app.components]
        serverapp = "empty_server:app"
        clientapp = "empty_client:app"

        [tool.flwr.app.config]
        out = ""
        nodes = 3
        rounds = 3
        parameters = 1
        """,
    "empty_client.py": """
        from flwr.app import Message
        from flwr.clientapp import ClientApp

        app = ClientApp()

        @app.train()
        def train(message, context):
            return Message(message.content, reply_to=message)
        """,
    "empty_server.py": """
        import json, time
        from pathlib import Path
        import numpy as np
        from flwr.app import ArrayRecord, Message, RecordDict
        from flwr.serverapp import ServerApp

        app = ServerApp()

        @app.main()
        def main(grid, context):
            config, times = context.run_config, []
            model = np.random.default_rng(0).standard_normal(config["parameters"], np.float32)
            while len(nodes := list(grid.get_node_ids())) < config["nodes"]:
                time.sleep(0.2)
            for _ in range(config["rounds"] + 1):
                start = time.perf_counter()
                content = RecordDict({"model": ArrayRecord([model])})
                replies = list(grid.send_and_receive([Message(content, n, "train") for n in nodes]))
                model = replies[0].content["model"].to_numpy_ndarrays()[0]
                assert len(replies) == len(nodes)
                times.append(time.perf_counter() - start)
            Path(config["out"]).write_text(json.dumps(times))
        """,
}
OURS = {
    "pyproject.toml": EMPTY["pyproject.toml"],
    "empty_client.py": """
        from sottovoce.flower.client_app import build_app

        class Same:
            def hello(self, node):
                return node.name.encode()

            def answer(self, request, node):
                return request

        app = build_app(Same())
        """,
    "empty_server.py": """
        import json, time
        from pathlib import Path
        import numpy as np
        from sottovoce.flower.server_app import build_app

        def conduct(roll, config):
            times = []
            model = np.random.default_rng(0).standard_normal(config["parameters"], np.float32)
            while len(roll.seats) < config["nodes"]:
                roll.greet(seconds=120)
                time.sleep(0.25)
            for t in range(config["rounds"] + 1):
                start = time.perf_counter()
                requests = dict.fromkeys(roll.seats, model.tobytes())
                answers = roll.ask(requests, seconds=300)
                model = np.frombuffer(next(iter(answers.values())), np.float32)
                assert answers == requests and len(answers) == config["nodes"]
                times.append(time.perf_counter() - start)
            Path(config["out"]).write_text(json.dumps(times))

        app = build_app(conduct, bytes.decode)
        """,
}
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        lines = text.splitlines()[1:]
        (folder / name).write_text("\n".join(line[8:] for line in lines))
    return folder


def measure(
    kind: str, sizes: list[int], *, nodes: int, rounds: int
) -> tuple[float, dict[int, list[float]]]:
    """Seconds until all nodes are online, and of every round but the first, by model size."""
    with tempfile.TemporaryDirectory(prefix="floor-") as away:
        folder = Path(away)
        app = write(folder / "app", OURS if kind == "ours" else EMPTY)
        os.environ[POLL] = "1.0" if kind == "Flower as it comes" else local.TASK_POLL
        os.environ["PYTHONPATH"] = os.pathsep.join([str(app), *filter(None, sys.path)])
        files = [str(folder / f"n{i}") for i in range(nodes)]
        ours = "empty_client:app" if kind == "ours" else None
        began, found = time.perf_counter(), {}
        with local.start_federation(folder / "run", files, app=ours) as running:
            ready = time.perf_counter() - began
            for size in sizes:
                out = folder / f"{size}.json"
                config = {"out": str(out), "nodes": nodes, "rounds": rounds, "parameters": size}
                running.wait(running.run(app, config), seconds=1200)
                found[size] = json.loads(out.read_text())[1:]
    return ready, found


def federate(sizes: list[int], *, nodes: int, rounds: int) -> tuple[float, dict[int, list[float]]]:
    """The same of `sottovoce federate`: from upload to upload, as they were kept round by round."""
    ready, found = 0.0, {}
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="floor-") as away:
            out = Path(away) / "run"
            hidden = round((size - 10) / 75)  # 64 inputs, 10 classes: 75 numbers a hidden unit
            words = ["--clients", nodes, "--out", out, "--keep-uploads", "--deadline", 1200]
            for setting in (f"model.hidden={hidden}", f"rounds.rounds={rounds + 1}"):
                words += ["--set", setting]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            done = subprocess.run(
                [sys.executable, "-m", "sottovoce", "federate", *map(str, words)],
                capture_output=True,
                text=True,
                check=True,
            )
            ready = max(ready, float(done.stdout.split("online after ")[1].split()[0]))
            closed: dict[str, float] = {}
            for path in (out / "uploads").iterdir():
                t = path.name.split("-")[0]
                closed[t] = max(closed.get(t, 0.0), path.stat().st_mtime)
            times = [closed[t] for t in sorted(closed)]
            found[size] = [b - a for a, b in itertools.pairwise(times)]
    return ready, found


def main() -> None:
    """Measure all four and print a table."""
    parser = argparse.ArgumentParser(description="One round beside Flower's own floor.")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--parameters", type=int, nargs="+", default=[2_410, 200_000, 5_000_000])
    given = parser.parse_args()
    print(f"{given.nodes} nodes, median (fastest–slowest) of {given.rounds} rounds, seconds")
    print(f"{'':<24}{'ready':>7}" + "".join(f"{size:>24,}" for size in given.parameters))
    floor: dict[int, float] = {}
    kept, began = {}, time.perf_counter()
    for kind in ("Flower as it comes", "Flower, polling faster", "ours", "sottovoce federate"):
        measured = federate if kind == "sottovoce federate" else functools.partial(measure, kind)
        ready, found = measured(given.parameters, nodes=given.nodes, rounds=given.rounds)
        middle = {size: statistics.median(times) for size, times in found.items()}
        floor = floor or middle
        kept[kind] = {"ready_s": ready, "seconds": {str(size): found[size] for size in found}}
        cells = [
            f"{middle[size]:.2f} ({min(times):.2f}–{max(times):.2f})"
            for size, times in found.items()
        ]
        ratios = ", ".join(f"{middle[size] / floor[size]:.2f}" for size in found)
        line = f"{kind:<24}{ready:>7.1f}" + "".join(f"{cell:>24}" for cell in cells)
        print(f"{line}   ×{ratios}", flush=True)
    keep("flower_floor", ("flwr",), kept, minutes=(time.perf_counter() - began) / 60)
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
