"""A peer as a process that waits: started, checked against the reference, asked, frozen, stopped.

While another peer is asked, all processes of this one are stopped (SIGSTOP): Ray's would otherwise
keep a core a little busy, and the others would pay for it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import numpy as np
from environments import python_of
from noise_check import Noise, Unfit
from protocol import descendants
from reference import evaluate
from roster import Peer
from work import Arrays, Work

HERE = Path(__file__).resolve().parent
#: float32 sums of 40,000 rows differ by 1e-6 of their length; one row whose unit lies at the ReLU's
#: kink, on in one precision and off in the other, by up to 1e-4. Another clip is off by 1e-1.
TOLERANCE = 3e-4
#: Turns that everyone has at least; their noise is looked at too.
LEAST = 3


def variables(threads: int) -> dict[str, str]:
    """The environment in which every library uses this many threads."""
    found = dict(os.environ)
    for name in ("OMP", "OPENBLAS", "MKL"):
        found[f"{name}_NUM_THREADS"] = str(threads)
    found |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(HERE.parent / "src"),
        "PYTHONWARNINGS": "ignore",
    }
    if threads == 1:
        found["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return found


class Running:
    """One started peer."""

    def __init__(
        self,
        peer: Peer,
        work_file: Path,
        threads: int,
        logs: Path,
        *,
        more: dict[str, str] | None = None,  # environment variables of this start
    ) -> None:
        python = sys.executable if peer.environment is None else str(python_of(peer.environment))
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[-threads:]))
        script = str(HERE / "peers" / f"{peer.script}.py")
        self.peer = peer
        self.log = logs / f"{peer.key}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["taskset", "-c", cores, python, script, str(work_file), *peer.words],
                env=variables(threads) | peer.variables | (more or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the harness, which ends its peers itself
            )
        try:
            self.ready = self._hear()
        except BaseException:  # Ctrl-C too: it must not be left behind
            self.stop()
            raise
        self.freeze()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = [part for part in self.log.read_text().splitlines() if part.strip()][-1:]
            raise Unfit(f"it ended: {last[0].strip() if last else 'without a word'}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _signal(self, what: signal.Signals) -> None:
        for process in [self.process.pid, *descendants(self.process.pid)]:
            try:
                os.kill(process, what)
            except ProcessLookupError:
                continue

    def freeze(self) -> None:
        """Stop all its processes until it is asked."""
        self._signal(signal.SIGSTOP)

    def ask(self, line: str) -> dict[str, Any]:
        """One request and its answer."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            return self._hear()
        finally:
            self.freeze()

    def stop(self) -> None:
        """End it, and whatever it has started."""
        self._signal(signal.SIGCONT)
        below = descendants(self.process.pid)
        try:
            self.process.communicate("stop\n", timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        for process in below:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue


def distance(work: Work, expected: Arrays, params: Arrays) -> float:
    """‖average − expected‖ / ‖expected‖, the average read from the new weights.

    >>> from work import SHAPES, make
    >>> work = make(SHAPES["tiny"])
    >>> step = {name: np.ones(array.shape) for name, array in work.params.items()}
    >>> moved = {name: array - 1.01 for name, array in work.params.items()}
    >>> round(distance(work, step, moved), 4)
    0.01
    """
    wrong = size = 0.0
    for name, array in expected.items():
        average = (work.params[name].astype(np.float64) - params[name]) / work.rate
        wrong += float(np.sum((average - array) ** 2))
        size += float(np.sum(array**2))
    return (wrong / size) ** 0.5


def check(running: Running, work: Work, expected: Arrays) -> tuple[dict[str, float], Noise]:
    """A round without noise against float64; where arrays are small, some with noise as well.

    Nothing here is timed for the table. `first_s` is the first round, compilation included.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as away:
        out = Path(away) / "out.npz"
        told = running.ask(f"check {out}")
        silent = {name: array[0] for name, array in weights(out, work).items()}
        error = distance(work, expected, silent)
        if not error <= TOLERANCE:
            raise Unfit(f"its average is off by {error:.2g} of its length (at most {TOLERANCE:g})")
        loss, accuracy = evaluate(work, silent)
        if not (abs(told["loss"] - loss) <= TOLERANCE * abs(loss)):
            raise Unfit(f"its test loss is {told['loss']:.6g}, not {loss:.6g}")
        if not abs(told["accuracy"] - accuracy) <= 3 / work.shape.tested + 1e-6:
            raise Unfit(f"its accuracy is {told['accuracy']:.6g}, not {accuracy:.6g}")
        found = {"error": error, "first_s": told["wall_s"][0], "peak_mb": told["peak_mb"]}
        noise = Noise(silent, work.std)
        while not noise.is_enough(after=LEAST):
            turn(running, work, noise, 1.0, out)
    return found, noise


def turn(running: Running, work: Work, noise: Noise, seconds: float, out: Path) -> dict[str, Any]:
    """Rounds of about so many seconds together, and a look at the noise of every one of them."""
    told = running.ask(f"rounds {seconds:g} {out}")
    noise.look(weights(out, work))
    return told


def weights(out: Path, work: Work) -> Arrays:
    """What a peer wrote, the rounds along the first axis."""
    with np.load(out) as file:
        return {name: file[name] for name in work.params}
