"""Deliberate bugs, one at a time, each with the privacy property that must notice it.

A mutant is a change to the real source of one module, which no longer keeps its promise but still
trains. `trial(mutant, killers)` builds a package with it and runs, in processes of their own, first
`trains` and then the killers named, which are properties of `privacy_killers` or tests by their id:

    killed      the killer's assertion failed: it noticed
    survived    nothing noticed
    idle        it does not train, or the killer stopped for another reason: no kill
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sottovoce
from mutants.reviewed_mutants import AUTHORED, REVIEWED
from support import ROOT, TESTS

PACKAGE = Path(str(sottovoce.__file__)).parent
KILLED, SURVIVED, IDLE = 10, 0, 3
WORDS = {KILLED: "killed", SURVIVED: "survived"}
LIVE: set[subprocess.Popen[str]] = set()  # so that who is interrupted can end them


@dataclass(frozen=True)
class Mutant:
    """A bug: what it is, where, and which killer is named for it."""

    name: str
    module: str
    killer: str
    changes: tuple[tuple[str, str], ...]

    def write(self, folder: Path) -> None:
        """A package in this folder, all links but for the mutated module; compiled as PACKAGE is."""
        home = folder / "sottovoce"
        own = PACKAGE.joinpath(*self.module.split(".")).with_suffix(".py")
        compiled = f"{own.parent / '__pycache__' / own.stem}."
        for path in PACKAGE.rglob("*"):
            if path.is_dir() or str(path).startswith(compiled):
                continue
            place = home / path.relative_to(PACKAGE)
            place.parent.mkdir(parents=True, exist_ok=True)
            if path == own:
                place.write_text(self.mutated(path.read_text("utf-8")), "utf-8")
            else:
                place.symlink_to(path)

    def mutated(self, source: str) -> str:
        """The source with the bug; every place of it must be there exactly once."""
        for old, new in self.changes:
            if source.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} occurs {source.count(old)} times, not once")
            source = source.replace(old, new)
        return source


class Nursery:
    """A process that forks one for each trial (`trial_nursery`); it ends with the context."""

    def __enter__(self) -> Nursery:
        words = [sys.executable, "-m", "mutants.trial_nursery"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, cwd=TESTS, text=True, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def run(
        self, names: Sequence[str], folder: Path, env: dict[str, str], *, seconds: int
    ) -> tuple[int, str]:
        """Run the killers: their exit code, and all that they said."""
        path, said = env["PYTHONPATH"].split(os.pathsep), folder / "said"
        order = {"names": [*names], "environment": env, "path": path, "folder": str(ROOT),
                 "said": str(said), "seconds": seconds}  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        return code, said.read_text("utf-8", "replace").strip()


def trial(
    mutant: Mutant, killers: Sequence[str], nursery: Nursery | None = None
) -> tuple[str, str]:
    """What became of it, and what was said."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mutant.write(folder)
        tests = [killer for killer in killers if "::" in killer]
        own = [killer for killer in killers if killer not in tests] or ["none"] * bool(tests)
        known = {**environment(folder), "MUTANT_MODULE": mutant.module}
        if nursery is None:
            code, said = _run(["-m", "mutants.mutant_trial", *own], folder, known, seconds=900)
        else:
            code, said = nursery.run(own, folder, known, seconds=900)
        if code != SURVIVED or not tests:
            return WORDS.get(code, "idle"), said[-900:]
        seen, said = hunt(mutant, folder, tests, seconds=900)
        if seen["killer"]:
            return "killed", seen["killer"]
        return ("idle" if seen["noticed"] or not seen["ran"] else "survived"), said[-600:]


def hunt(
    mutant: Mutant, folder: Path, tests: Sequence[str], *, seconds: float
) -> tuple[dict[str, Any], str]:
    """pytest against the mutant in this folder until the first kill: `mutant_plugin` decides."""
    told = folder / "told.json"
    more = {"MUTANT_MODULE": mutant.module, "MUTANT_TOLD": str(told)}
    words = ["-m", "pytest", "-q", "-p", "mutants.mutant_plugin", "-p", "no:cacheprovider", *tests]
    _, said = _run(words, folder, {**environment(folder), **more}, seconds=seconds)
    return seen_in(told), said


def _run(
    words: Sequence[str], folder: Path, env: dict[str, str], *, seconds: float
) -> tuple[int, str]:
    """Python with these words: its exit code, and all that it said."""
    with (folder / "said").open("w") as file:
        child = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=env, text=True,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        LIVE.add(child)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
            file.write(f"\nran past {seconds:g} seconds")
        finally:
            LIVE.discard(child)
    return code, (folder / "said").read_text("utf-8", "replace").strip()


def seen_in(told: Path) -> dict[str, Any]:
    """What the plugin has written so far."""
    try:
        seen: dict[str, Any] = json.loads(told.read_text("utf-8"))
    except (OSError, ValueError):
        seen = {"ran": 0, "total": 0, "killer": "", "noticed": []}
    return seen


def environment(folder: Path) -> dict[str, str]:
    """In which `import sottovoce` means the mutant; the machine's witnesses lie in its folder."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS)]),
        "SOTTOVOCE_STATE": str(folder / "state"),
        "JAX_PLATFORMS": "cpu",
    }


def _bug(name: str, module: str, killer: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, module, killer, changes)


_DRAW = "noise = (secure_noise.draw(count, sigma) for sigma in paid.noise)"
_TOLD = "noised_loss: dict[str, float] = {}\n"
_RAW = "float(np.nanmean(np.asarray(x, np.float64)[:1]))"
_NO_CHECK = (("<= NORM**2", "<= 2**62"),)
_NO_REFUSAL = ("if (over := units > self.left).any():", "if (over := units > 9 * FULL).any():")

MUTANTS = [
    # What is drawn.
    _bug("noise of 0.8 σ", "client.release", "the_noise_paid_for_is_there",
         (_DRAW, _DRAW.replace("sigma)", "4 * sigma // 5)"))),
    _bug("σ² taken for σ", "privacy.tank", "noise_is_worth_no_more_than_its_debit",
         ("/ np.sqrt(mu2) * _ROUND_UP", "/ mu2 * _ROUND_UP")),
    _bug("noise kept and used again", "client.release", "noise_is_fresh",
         (_DRAW, _DRAW.replace("secure_noise.draw(count, sigma)",
                              "_KEPT.setdefault(count, secure_noise.draw(count, sigma))")),
         ("_MINT = object()", "_MINT, _KEPT = object(), {}")),
    _bug("one draw for all steps", "client.release", "the_noise_paid_for_is_there",
         (_DRAW, "noise = [secure_noise.draw(count, paid.noise[0])] * len(paid.noise)")),
    _bug("noise on the last step only", "client.release", "the_noise_paid_for_is_there",
         ("_sum_clipped(form, now, x, y, recipe, own) + drawn,",
          "_sum_clipped(form, now, x, y, recipe, own) + drawn * (len(taken) == len(paid.noise)),"),
         ("    for drawn in noise:\n", "    taken = []\n    for drawn in noise:\n        taken.append(1)\n")),
    _bug("one coordinate without noise", "client.release", "the_noise_paid_for_is_there",
         ("for drawn in noise:", "for drawn in [np.where(np.arange(count) == 3, 0, d) for d in noise]:")),
    _bug("no noise where the model is zero", "client.release", "the_noise_paid_for_is_there",
         ("    for drawn in noise:\n",
          "    zero = np.concatenate([leaf.ravel() for leaf in now.values()]) == 0\n"
          "    for drawn in [np.where(zero, d // 2, d) for d in noise]:\n")),
    _bug("a loss without its noise", "client.release", "the_noise_paid_for_is_there",
         ("grid.bounded_sum(losses, loss_bound) + loss_noise",
          "grid.bounded_sum(losses, loss_bound) + 0 * loss_noise")),
    _bug("the same key in every message", "privacy.secure_noise", "noise_is_fresh",
         ("algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16))",
          "algorithms.AES(bytes(32)), modes.CTR(bytes(16))")),
    _bug("a stream that forks share", "privacy.secure_noise", "noise_is_fresh",
         ("source, staircase = _Stream(), build_envelope(sigma)",
          "source = globals().setdefault('_kept', _Stream())\n    staircase = build_envelope(sigma)")),
    _bug("a bell too narrow", "privacy.secure_noise", "noise_has_its_shape",
         ("_Stream(), build_envelope(sigma)", "_Stream(), build_envelope(max(1, 9 * sigma // 10))")),
    _bug("even numbers only", "privacy.secure_noise", "noise_has_its_shape",
         ("(1 << staircase.width_bits) - 1)", "(1 << staircase.width_bits) - 2)")),
    _bug("one side of the bell", "privacy.secure_noise", "noise_has_its_shape",
         ("    return noise\n\n\nclass _Stream", "    return np.abs(noise)\n\n\nclass _Stream")),
    _bug("noise on a coarser grid", "privacy.secure_noise", "noise_has_its_shape",
         ("    return noise\n\n\nclass _Stream", "    return noise >> 12 << 12\n\n\nclass _Stream")),
    _bug("a message that repeats itself", "privacy.secure_noise", "noise_is_fresh",
         ("    return noise\n\n\nclass _Stream",
          "    noise[count // 2:] = noise[: count - count // 2]\n    return noise\n\n\nclass _Stream")),
    _bug("simulated noise of half the σ", "simulation.compiled", "simulated_noise_is_fresh_and_whole",
         ("noise = draw_simulated_noise(key, params, order.std)",
          "noise = draw_simulated_noise(key, params, order.std / 2)")),
    _bug("the same simulated noise in every round", "simulation.compiled",
         "simulated_noise_is_fresh_and_whole",
         ("jax.random.fold_in(jax.random.wrap_key_data(order.key), t)",
          "jax.random.fold_in(jax.random.wrap_key_data(order.key), 0 * t)")),
    # What is clipped.
    _bug("no clipping", "privacy.grid", "sums_stay_within_sensitivity",
         ("np.maximum(np.sqrt(np.where(usable, squared, 0.0)), clip)",
          "np.maximum(clip, 0 * np.where(usable, squared, 0.0))"), *_NO_CHECK),
    _bug("clipped coordinate by coordinate", "privacy.grid", "sums_stay_within_sensitivity",
         ("squared = block.squared_norms()", "squared = np.max(block.write_out() ** 2, axis=1)"),
         *_NO_CHECK),
    _bug("clipped a fifth too late", "privacy.grid", "sums_stay_within_sensitivity",
         ("_CLIP = (1 - 2**-40) * NORM", "_CLIP = 1.2 * NORM"), *_NO_CHECK),
    _bug("clipped by the mean norm of the block", "privacy.grid", "sums_stay_within_sensitivity",
         ("np.maximum(np.sqrt(np.where(usable, squared, 0.0)), clip)",
          "np.maximum(np.sqrt(np.mean(np.where(usable, squared, 0.0)) + 0 * squared), clip)"),
         *_NO_CHECK),
    _bug("clipped after the sum", "privacy.grid", "sums_stay_within_sensitivity",
         ("total += _quantised_sum(rows, clip, weight, part)",
          "total += len(block) * _quantised_sum("
          "Products.of(block.write_out().sum(axis=0, keepdims=True)), clip, weight, part)")),
    _bug("a class weight above 1", "privacy.sensitivity", "sensitivity_covers_every_recipe",
         ("not LEAST_WEIGHT <= weight <= 1:", "not LEAST_WEIGHT <= weight <= 100:")),
    _bug("a class weight before clipping", "privacy.grid",
         "tests/privacy/test_grid.py::test_a_weight_multiplies_what_was_clipped_and_lengthens_nothing",
         ("squared = block.squared_norms()", "squared = block.squared_norms() * np.square(weight)")),
    _bug("a loss without an upper bound", "privacy.grid", "losses_are_bounded",
         ("np.minimum(np.maximum(np.trunc(scaled * REPLACED), 0), REPLACED)",
          "np.minimum(np.maximum(np.trunc(scaled * REPLACED), 0), 2.0**40)")),
    _bug("losses bounded at twice the bound", "privacy.grid", "losses_are_bounded",
         ("np.trunc(scaled * REPLACED), 0), REPLACED)", "np.trunc(scaled * REPLACED), 0), 2 * REPLACED)")),
    _bug("divided by the rows that are there", "client.release", "one_record_moves_an_upload_by_its_sensitivity",
         ("+ drawn, recipe, samples)",
          "+ drawn, recipe, max(1, int(np.isfinite(np.asarray(x, np.float64)).all(axis=1).sum())))")),
    _bug("a second path for long rows", "privacy.grid", "tests/privacy/test_grid.py::test_the_work_does_not_depend_on_a_record",
         ("    return np.fmin(sums * _SLACK, float(_TOO_LONG)).astype(np.int64)\n",
          "    if np.max(sums) < 2.0**53:\n        return sums.astype(np.int64)\n"
          "    return np.fmin(sums * _SLACK, float(_TOO_LONG)).astype(np.int64)\n")),
    _bug("a norm whose squares underflow", "privacy.grid", "tests/privacy/test_grid.py::test_the_work_does_not_depend_on_a_record",
         ("        block = block.flush_tiny()\n", "")),
    _bug("a length that may be understated", "privacy.grid",
         "tests/privacy/test_grid.py::test_squared_lengths_are_never_understated_in_the_longest_segment",
         ("_SLACK = 1 + 2**-41", "_SLACK = 1.0")),
    # What it is worth.
    _bug("Δ without its factor 2", "privacy.grid", "sensitivity_covers_every_recipe",
         ("REPLACED = 2 * NORM", "REPLACED = NORM")),
    _bug("a client's Δ taken for a record's", "privacy.grid", "sensitivity_covers_every_recipe",
         ('(samples if protected == "client" else 1)', '(samples if protected == "nobody" else 1)')),
    _bug("Δ in words without its factor 2", "privacy.sensitivity",
         "sensitivity_covers_every_recipe",
         ("np.asarray(2 * self.learning_rate", "np.asarray(self.learning_rate")),
    _bug("Δ of a client divided by n", "privacy.sensitivity", "sensitivity_covers_every_recipe",
         ('np.ones_like(n) if self.unit == "client"', 'np.ones_like(n) if self.unit == "nobody"')),
    _bug("E steps as 2ηCE/n", "privacy.sensitivity", "sensitivity_covers_every_recipe",
         ('moved = one_step + (self.steps - 1 if self.noise_at == "last-step" else 0)',
          "moved = one_step * self.steps")),
    _bug("E steps charged as one", "privacy.sensitivity", "sensitivity_covers_every_recipe",
         ('return self.steps if self.noise_at == "every-step" else 1', "return 1")),
    _bug("a group charged as one record", "privacy.sensitivity", "sensitivity_covers_every_recipe",
         ("np.minimum(self.group, n) / n", "1 / n")),
    _bug("minibatches let through", "privacy.sensitivity", "sensitivity_covers_every_recipe",
         ('if self.batch != "full":', 'if self.batch == "none":')),
    _bug("gradients that are not clipped", "privacy.sensitivity", "sensitivity_covers_every_recipe",
         ("if self.clip == math.inf:", "if self.clip == -math.inf:"), ("<= _LARGEST:", "<= math.inf:")),
    _bug("σ printed too small", "schedules.calibrate",
         "tests/schedules/test_calibrate.py::test_whoever_types_the_printed_noise_keeps_the_promise",
         ("*map(format_claim, (sigma, 1 / mu_release, mu_release, mu, epsilon)),",
          '*(f"{n:.6g}" for n in (sigma, 1 / mu_release, mu_release, mu)), format_claim(epsilon),')),
    _bug("exact capacity a little larger", "privacy.calibration", "capacity_keeps_its_promise",
         ("return gaussian.mu(epsilon, delta) ** 2\n", "return gaussian.mu(epsilon, delta) ** 2 * 1.01\n")),
    _bug("amplification by q", "privacy.calibration", "capacity_keeps_its_promise",
         ("return gaussian.mu(epsilon, delta) ** 2\n",
          "return gaussian.mu(epsilon, delta) ** 2 / sampling\n")),
    _bug("ρ taken for μ²", "privacy.calibration", "capacity_keeps_its_promise",
         ("np.asarray(2 * root_rho**2", "np.asarray(4 * root_rho**2")),
    _bug("the paper's formula in a vault", "privacy.calibration", "capacity_keeps_its_promise",
         ('    if calibration == "paper":\n        remedy', '    if calibration == "never":\n        remedy')),
    _bug("ln(1/δ) with the wrong base", "privacy.calibration", "capacity_keeps_its_promise",
         ("-np.log(delta)\n    if calibration == \"zcdp\"", "-np.log10(delta)\n    if calibration == \"zcdp\"")),
    # What is booked.
    _bug("half of what it costs", "privacy.tank", "noise_is_worth_no_more_than_its_debit",
         ("mu2 = self.capacity * (np", "mu2 = 2 * self.capacity * (np")),
    _bug("σ rounded down", "client.release", "noise_is_worth_no_more_than_its_debit",
         ("sigma = math.ceil(max(", "sigma = math.floor(max(")),
    _bug("a loss that nobody pays for", "client.release", "noise_is_worth_no_more_than_its_debit",
         ("noise.append(_noise(tank, units_of_step - share, change, floor))",
          "noise.append(_noise(tank, units_of_step, change, floor))")),
    _bug("steps priced from a full tank", "client.release", "noise_is_worth_no_more_than_its_debit",
         ("        tank = tank.spend(units_of_step)\n", "")),
    _bug("nothing is written off", "privacy.tank", "budgets_are_never_overspent",
         ("spent=self.spent + units, debits", "spent=self.spent, debits")),
    _bug("a share of the full tank, unchecked", "privacy.tank", "budgets_are_never_overspent",
         ("self._make_offer(self.left // remaining, sensitivity)", "self._make_offer(FULL // remaining, sensitivity)"),
         _NO_REFUSAL),
    _bug("a decaying schedule past its end", "privacy.tank", "budgets_are_never_overspent",
         ("np.where(units <= self.left, units, 0)", "np.where(units <= FULL, units, 0)"), _NO_REFUSAL),
    _bug("no floor", "client.release", "no_release_is_below_the_floor",
         ("        if floor > 0:", "        if floor < 0:"),
         ("max(float(tank.noise(units, float(change))), float(change) * floor)",
          "float(tank.noise(units, float(change)))")),
    _bug("most asked first", "schedules.pricing", "nobody_is_asked_more_than_planned",
         ("np.argsort(asked[shuffled]", "np.argsort(-asked[shuffled]")),
    # What leaves.
    _bug("a raw mean beside the upload", "client.release", "heads_say_nothing_private",
         (_TOLD, _TOLD.replace("{}", f"{{'loss': min(max({_RAW}, -9.0), 9.0)}}"))),
    _bug("a raw loss beside the upload", "client.release", "uploads_keep_mu",
         (_TOLD, "noised_loss: dict[str, float] = {'loss': float(np.mean(sample_losses("
          "form, now, np.asarray(x, np.float64), np.asarray(y), own)))}\n")),
    _bug("any word in the head", "client.release", "heads_say_nothing_private",
         ("if extra := head.keys() - PUBLIC:", "if extra := head.keys() - head.keys():")),
    _bug("a norm counted as public", "client.release", "heads_say_nothing_private",
         ('"receipt", "budget"})', '"receipt", "budget", "gradient_norm"})')),
    _bug("uploads without release", "client.release", "only_release_makes_uploads",
         ("if mint is not _MINT:", "if mint is None:")),
    _bug("steps that nobody paid for", "client.release", "what_was_not_paid_for_is_refused",
         ("if len(paid.noise) != recipe.releases or", "if len(paid.noise) > recipe.releases or")),
    _bug("an error that tells of a record", "client.release", "heads_say_nothing_private",
         ("    now, samples = _sort_leaves(params), len(np.asarray(y))\n",
          "    now, samples = _sort_leaves(params), len(np.asarray(y))\n"
          "    if np.isnan(np.asarray(x, np.float64)).any():\n        raise ValueError('no number')\n")),
    _bug("a hidden budget told", "client.device", "hidden_budgets_stay_hidden",
         ("    if not vault.policy.disclose:\n        return None\n", "")),
    _bug("hashes without salt", "client.vault.chain", "receipts_cannot_be_tried_out",
         ("os.urandom(32).hex()", "bytes(32).hex()")),
    # The ledger.
    _bug("debit when the upload is stored", "client.vault.journal",
         "the_debit_is_durable_before_anything_is_computed",
         ("        self.spent += sum(units)\n", "        self.pending = sum(units)\n"),
         ("        turn = replace(turn, stored=line.seq,",
          "        self.spent += self.pending\n        turn = replace(turn, stored=line.seq,")),
    _bug("refund of what was not stored", "client.vault.journal",
         "the_debit_is_durable_before_anything_is_computed",
         ("        self.spent += sum(units)\n",
          "        before, self.pending = getattr(self, 'pending', 0), sum(units)\n"
          "        self.spent += sum(units) - (before if turn is not None else 0)\n")),
    _bug("no sync of the ledger", "client.vault.journal",
         "tests/crash/test_vault.py::test_a_power_cut_forgets_nothing_that_was_promised",
         ('"synchronous = EXTRA"', '"synchronous = OFF"')),
    _bug("one unit booked, whatever it costs", "client.device", "a_device_stays_within_its_budget",
         ("                paid.units,\n                server=",
          "                [1] * len(paid.units),\n                server=")),
    _bug("a run that takes all of the budget", "client.vault.vault",
         "tests/client/test_device.py::test_a_run_takes_its_share_of_the_budget_and_is_planned_within_it",
         ("            self._count_share(policy.run_share) - books.spent_by_run(run),\n", "")),
    _bug("a run planned with all of the budget", "client.vault.vault",
         "tests/client/test_device.py::test_a_run_takes_its_share_of_the_budget_and_is_planned_within_it",
         ("spent=np.array(FULL - max(0, self.count_left(run, server, policy)), dtype=np.int64)",
          "spent=np.array(FULL - max(0, self.limit - books.spent), dtype=np.int64)")),
    _bug("a server that takes all of the budget", "client.vault.vault",
         "tests/client/test_device.py::test_a_server_takes_its_share_of_the_budget",
         ("            self._count_share(policy.server_share) - books.spent_by_server(server),\n", "")),
    _bug("a share that may grow", "client.vault.policy", "a_policy_is_only_tightened",
         ('"max_rounds", "max_steps", *LIMITS):', '"max_rounds", "max_steps"):')),
    _bug("work without a bound", "client.device", "tests/client/test_device.py::test_steps_are_bounded_before_they_are_priced",
         ("            policy.max_work,\n", "            2**62,\n")),
    _bug("a ledger beyond its quota", "client.device", "tests/client/test_device.py::test_a_ledger_keeps_to_its_quota",
         ("_upload_bytes(request) > policy.max_bytes:", "_upload_bytes(request) > 2**62:")),
    _bug("noise drawn after the data", "client.release",
         "tests/client/test_device.py::test_the_noise_of_a_step_is_drawn_before_its_data_and_alone",
         ("    for drawn in noise:\n        now = _apply_sum(now, _sum_clipped(form, now, x, y, recipe, own) + drawn,",
          "    for _ in paid.noise:\n        now = _apply_sum(now, _sum_clipped(form, now, x, y, recipe, own) + next(noise),")),
    _bug("a debit without room for its upload", "client.vault.vault",
         "tests/client/test_device.py::test_a_limit_that_an_answer_would_meet_burns_no_budget",
         ("            self._hold_room(room)\n", "")),
    _bug("a debit without memory for its work", "client.device",
         "tests/client/test_device.py::test_a_limit_that_an_answer_would_meet_burns_no_budget",
         ("        if not is_key_step:\n            _require_memory(request, rows)\n", "")),
    _bug("failed answers that go on burning", "client.device",
         "tests/client/test_device.py::test_an_answer_that_fails_stops_the_client_until_its_operator_says_so",
         ("            _note_failure(node, rows, _describe_error(error))\n", "")),
    _bug("kills that go on burning", "client.vault.vault",
         "tests/client/test_device.py::test_one_killed_process_is_forgiven_and_a_second_in_a_row_is_not",
         ("self._books.failed or self._books.unanswered >= _MOST_UNANSWERED", "self._books.failed")),
    _bug("sent and not stored", "client.device", "a_round_has_one_answer",
         ("            vault.store(reserved, upload.blob)\n", "")),
    _bug("sent before it is stored", "client.device", "a_round_has_one_answer",
         ("            vault.store(reserved, upload.blob)\n            return upload.blob",
          "            try:\n                vault.store(reserved, upload.blob)\n            finally:\n"
          "                return upload.blob")),
    _bug("a tightened budget forgotten", "client.vault.vault", "a_tightened_budget_holds",
         ("return self.policy.count_parts(self._books.capacity)", "return FULL")),
    _bug("a loosened ε", "client.vault.policy", "a_policy_is_only_tightened",
         ('for name in ("epsilon", "delta", "clip", "max_rounds", "max_steps", *LIMITS):',
          'for name in ("delta", "clip", "max_rounds", "max_steps", *LIMITS):')),
    _bug("more steps than the vault allowed", "client.vault.policy", "a_policy_is_only_tightened",
         ('for name in ("epsilon", "delta", "clip", "max_rounds", "max_steps", *LIMITS):',
          'for name in ("epsilon", "delta", "clip", "max_rounds", *LIMITS):')),
    _bug("as many steps as a server likes", "client.device", "tests/client/test_device.py::test_steps_are_bounded_before_they_are_priced",
         ("min(policy.max_steps, policy.max_rounds)", "min(1000, policy.max_rounds)")),
    _bug("an answer that leaves when it is ready", "flower.client_app",
         "tests/flower/test_server_app_routes.py::test_a_reply_leaves_at_a_multiple_of_a_public_time",
         ("        wait_until_multiple(began, _read_answer_every(context))\n", "        pass\n")),
    _bug("refusals that leave at once", "flower.client_app",
         "tests/flower/test_server_app_routes.py::test_a_reply_leaves_at_a_multiple_of_a_public_time",
         ("    began = time.monotonic()\n    try:\n", "    began, failed = time.monotonic(), False\n    try:\n"),
         ("        log.error(\"no answer: %s\", type(error).__name__)\n", "        failed = True\n"),
         ("    finally:\n        wait", "    finally:\n        failed or wait")),
    _bug("live arrays for a model of the client's own", "models.base",
         "tests/client/test_device.py::test_an_own_model_that_mixes_its_samples_is_refused_before_anything_is_booked",
         ("    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)\n", "    return array\n"),
         ("    params = {name: flush_tiny(leaf) for name, leaf in params.items()}\n    factors", "    factors")),
    _bug("one copy for all samples of an own model", "models.base",
         "tests/client/test_device.py::test_an_own_model_that_writes_through_read_only_memory_mixes_no_samples",
         ("        for i in range(len(y)):\n            row = slice(i, i + 1)\n            try:\n                numbers[i] = compute(_copy_all(params),",
          "        copies = _copy_all(params)\n        for i in range(len(y)):\n            row = slice(i, i + 1)\n            try:\n                numbers[i] = compute(copies,")),
    _bug("features made before the reserve", "client.device",
         "tests/client/test_device.py::test_no_row_is_looked_at_before_its_debit_is_durable",
         ("        paid = _price_turn(request, policy, vault, change)\n",
          "        if request.form.lens is not None:\n            request.form.lens.apply(rows.x)\n"
          "        paid = _price_turn(request, policy, vault, change)\n")),
    _bug("a refusal that tells files apart", "client.device",
         "tests/client/test_device.py::test_what_is_wrong_with_the_clients_files_is_not_told_apart",
         ("        log.error(\"the client's own files cannot be used: %s\", _describe_error(error))\n",
          "        return make_refusal(\"data\", \"the client's own files cannot be used\")\n")),
    _bug("a lowered floor", "client.vault.policy", "a_policy_is_only_tightened",
         ("if new.floor < old.floor:", "if new.floor < 0:")),
    _bug("a unit changed after releases", "client.vault.policy", "a_policy_is_only_tightened",
         ("< UNITS.index(old.unit) or spent > 0)", "< UNITS.index(old.unit) or spent > FULL)")),
    _bug("the server's unit instead of the client's", "client.device", "a_server_may_only_tighten",
         ("if UNITS.index(unit) < UNITS.index(policy.unit):", 'if policy.unit == "nobody":')),
    _bug("the server's clip instead of the client's", "client.device", "a_server_may_only_tighten",
         ("if request.recipe.clip > policy.clip:", "if request.recipe.clip > 9 * policy.clip:")),
    _bug("receipts ignored", "client.device", "an_older_ledger_is_not_used",
         ("if request.receipt is not None and not vault.contains(request.receipt):", "if False:")),
    _bug("other data under the same ledger", "client.vault.vault", "an_older_ledger_is_not_used",
         ("if dataset is not None and dataset != chest.books.dataset:", "if False:")),
    # Written from the code alone, before a test was looked at.
    _bug("a client's loss with a record's noise", "client.release", "noise_is_worth_no_more_than_its_debit",
         ("loss_noise = _noise(tank, share, change, floor)",
          "loss_noise = _noise(tank, share, grid.REPLACED, floor)")),
    _bug("a loss that borrows the model's noise", "client.release", "a_loss_has_noise_of_its_own",
         ("int(secure_noise.draw(1, paid.loss_noise)[0])",
          "int((noise := list(noise))[0][0]) * paid.loss_noise // paid.noise[0]")),
    _bug("steps whose keys collide", "simulation.compiled", "simulated_steps_have_noise_of_their_own",
         ("e * clients + i", "e * steps + i")),
    _bug("a window that takes the next client's rows", "simulation.compiled", "a_clients_steps_use_its_own_rows",
         ("(row >= first) & (row < first + rows.samples[i])", "(row >= first)")),
    _bug("a share cut after it was priced", "privacy.tank", "offers_are_worth_their_units",
         ("return self._make_offer(np.where(units <= self.left, units, 0), sensitivity)",
          "full = self._make_offer(units, sensitivity)\n"
          "        return replace(full, units=np.minimum(full.units, self.left))")),
    _bug("a tightened cap rounded up", "client.vault.policy", "tightened_caps_are_within_their_budget",
         ("return int(FULL * now / Fraction(capacity))",
          "return int(FULL * now / Fraction(capacity)) + (now != Fraction(capacity))")),
    _bug("the machine's witness by its number", "client.vault.chest", "a_parted_vault_is_not_taken_for_the_newest",
         ("if known is not None and not self.contains(known):",
          "if known is not None and known.seq > self.books.seq:")),
    _bug("the machine's witness kept at opening only", "client.vault.chest", "an_older_pair_is_not_taken_for_the_newest",
         ("        witness.write_machine_witness(self.receipt())\n        try:\n            witness.write_witness(self.path",
          "        if kind == 'open':\n            witness.write_machine_witness(self.receipt())\n        try:\n            witness.write_witness(self.path")),
    _bug("a machine without a witness trusts the file", "client.vault.chest",
         "a_machine_without_a_witness_trusts_no_file",
         ("            self.require_known()\n", "")),
    _bug("a ledger of one line trusted anywhere", "client.vault.chest",
         "a_machine_without_a_witness_trusts_no_file",
         ("        if not self.is_known():\n", "        if self.books.seq > 1 and not self.is_known():\n")),
    _bug("a witness of the first lines taken for one of all", "client.vault.chest",
         "a_state_folder_that_was_put_back_vouches_for_nothing_later",
         ("_MOST_LINES = 2 ", "_MOST_LINES = 2**60 ")),
    _bug("a word given elsewhere taken for a crash", "client.vault.chest",
         "a_word_given_elsewhere_is_not_mistaken_for_a_crash",
         ('if line.kind in ("move", "restore")]', "if False]")),
    _bug("a word of any machine taken for this one's", "client.vault.chest",
         "a_word_given_elsewhere_is_not_mistaken_for_a_crash",
         ('facts.get("kept") == known.to_proof()', '"kept" in facts')),
    _bug("a copied witness taken for the newest", "client.vault.rebinding",
         "a_copied_witness_restores_nothing_by_itself",
         ("[*receipts, known], nothing_since", "proofs, nothing_since")),
    _bug("a receipt's word left out of the record", "client.vault.rebinding",
         "a_copied_witness_restores_nothing_by_itself",
         ("if nothing_since or unseen else None", "if nothing_since else None")),
    _bug("a second ledger from elsewhere moved into service", "client.vault.rebinding",
         "a_second_ledger_is_noticed_wherever_it_was_made",
         ("        if second_ledger or chest.is_second():\n", "        if second_ledger:\n")),
    _bug("a second ledger that was never noted", "client.vault.chest",
         "a_second_ledger_is_noticed_wherever_it_was_made",
         ("            if self.is_second():  #", "            if False:  #")),
    _bug("a vault told by its inode alone", "client.vault.chest", "an_older_pair_is_not_taken_for_the_newest",
         ("if known is not None and not self.contains(known):", "if known is not None and self.is_copy():")),
    _bug("a restore that takes a fitting pair for the newest", "client.vault.rebinding",
         "a_machine_without_a_witness_trusts_no_file",
         ("    elif unknown or nothing_since:\n        return\n",
          "    elif unknown or nothing_since or witness.read_witness(chest.path):\n        return\n")),
    _bug("two copies in use at once", "client.vault.chest", "two_copies_are_not_in_use_at_once",
         ("            self.claim_id()\n", "")),
    _bug("a second ledger that nobody is asked about", "client.vault.chest",
         "rows_have_one_ledger_unless_their_operator_says_so",
         ("if others and not second_ledger:", "if others and second_ledger is None:")),
    _bug("a second ledger without a record", "client.vault.chest",
         "rows_have_one_ledger_unless_their_operator_says_so",
         ('return {"second": others} if second_ledger else {}', "return {}")),
    _bug("a ledger forgotten with its file", "client.vault.witness",
         "rows_have_one_ledger_unless_their_operator_says_so",
         ("        path = _locate_mark(key, dataset) / vault\n",
          "        path = _locate_mark(os.urandom(32), dataset) / vault\n")),
    _bug("bound to rows that have a ledger", "client.vault.rebinding",
         "rows_have_one_ledger_unless_their_operator_says_so",
         ("state_second_ledger(dataset, vault=books.id, second_ledger=second_ledger)",
          "state_second_ledger(dataset, vault=books.id, second_ledger=True)")),
    _bug("rows that a ledger was bound to later forgotten", "client.vault.rebinding",
         "a_ledger_counts_for_all_rows_it_was_bound_to",
         ("            witness.note_ledger(dataset, books.id)\n", "")),
    _bug("a restore that burns by its first proof", "client.vault.rebinding", "a_restore_burns_all_that_is_known",
         ("*(s - books.spent for s in spent)])", "*(s - books.spent for s in spent[:1])])")),
    _bug("receipts of two histories taken for one", "client.vault.rebinding",
         "a_restore_burns_no_less_than_two_copies_have_spent",
         ("    elif _have_parted(unknown, chest.books.spent):\n", "    elif False:\n")),
    _bug("a gap that covers its own restore", "client.vault.chest", "a_gap_is_paid_for_as_far_as_it_is_known",
         ("if line is None else line.hash == receipt.hash",
          "if line is None else line.kind == 'restore' or line.hash == receipt.hash")),
    _bug("any lost line taken for a gap", "client.vault.journal", "no_gap_is_opened_by_a_lost_line",
         ('above.kind != "restore" or above.prev != below.hash', "False")),
    _bug("an old line taken at its word", "client.vault.journal", "an_old_line_is_known_by_its_content",
         ("if line != link_line(line.prev, *row[:4]):", "if False:")),
    _bug("a summary held against nothing", "client.vault.chest", "a_summary_gives_nothing_back",
         ('confirmed = line.facts.get("summary") == sha256(content)', "confirmed = True")),
    _bug("records held against nothing", "client.vault.journal", "a_round_that_the_records_forgot_is_not_answered_anew",
         ("if content is None or sha256(content) != wanted:", "if content is None:")),
    _bug("a dropped round answered anew", "client.vault.journal", "a_round_that_was_acknowledged_has_no_second_answer",
         ("        return None if values is None else Turn(*values)\n",
          "        turn, own = None if values is None else Turn(*values), self.run(run)\n"
          "        if turn and turn.stored and own and t < own.before and turn.stored < own.line:\n"
          "            return Turn(turn.reserve, turn.hash)\n        return turn\n")),
    _bug("uploads dropped that nobody acknowledged", "client.vault.vault", "what_nobody_acknowledged_is_kept",
         ("        if seen is None or not self.contains(seen):\n            return None\n",
          "        if t > 1 and self._books.turn(run, t - 1) is not None:\n"
          "            before = self._books.turn(run, t - 1)\n"
          "            return run, t - 1, before.reserve\n"
          "        if seen is None or not self.contains(seen):\n            return None\n")),
    _bug("uploads dropped by another run's receipt", "client.vault.journal", "what_nobody_acknowledged_is_kept",
         ("WHERE run = ? AND t < ? AND seq < ?", "WHERE ? != '' AND t < ? AND seq < ?")),
    _bug("a restore by another vault's receipt", "client.vault.rebinding", "a_restore_takes_proofs_of_its_own_vault_only",
         ("if proof.vault != books.id:", "if not proof.vault:")),
    _bug("a move that asks no witness", "client.vault.rebinding", "an_older_vault_is_not_moved_into_service",
         ("        chest.claim_id()\n        chest.require_witnessed()\n", "        chest.claim_id()\n")),
    _bug("the σ of a hidden budget in the record", "server.coordinator", "tests/server/test_coordinator.py::test_what_clients_keep_to_themselves_is_in_no_record",
         ("    sigma[:, hidden] = np.nan  # R9\n", "")),
    _bug("a server that keeps the first receipt", "server.coordinator", "tests/server/test_coordinator.py::test_every_client_is_asked_with_the_newest_receipt_it_gave",
         ("replace(member, receipt=answer.receipt, account=answer.account)",
          "replace(member, account=answer.account)")),
    _bug("a server that was stopped and forgets the newest receipts", "server.coordinator",
         "tests/server/test_coordinator.py::test_a_resumed_server_still_knows_a_vault_that_was_set_back",
         ('header.update({"plan": run.federation.plan.to_dict()} | roll.to_json())',
          'header.update({"plan": run.federation.plan.to_dict()})')),
    _bug("a server that takes a model without noise", "server.checks", "tests/hostile/test_uploads.py::test_an_upload_without_its_noise",
         ("    if x < 1 and (x == 0", "    if x < 0 and (x == 0"),
         ("    if same:\n", "    if same < 0:\n")),
    _bug("a server that forgets what uploads showed", "server.checks", "tests/hostile/test_uploads.py::test_a_client_that_forgets_its_noise_is_found_in_the_end",
         ("expected.shown[0] + (distance / sigma) ** 2, expected.shown[1] + count",
          "(distance / sigma) ** 2, count")),
    _bug("a client asked to pay for what is refused", "server.coordinator",
         "tests/server/test_coordinator.py::test_a_client_whose_records_changed_pays_once_in_vain",
         ('answers.why[i] = roll.gone[i] = "samples"', 'answers.why[i] = "samples"')),
    _bug("metrics of a budget that is not disclosed", "flower.deploy.__init__", "tests/flower/test_deploy_operating.py::test_a_client_that_does_not_disclose_shows_no_budget",
         ("            if vault.policy.disclose:\n", "            if vault.policy:\n")),
    _bug("a claim of no noise that no budget could buy", "server.checks",
         "tests/hostile/test_uploads.py::test_a_client_without_disclosed_budget_has_noise_that_a_vault_could_buy",
         ("if released * (1 - 1e-9) > _largest_capacity():", "if released < 0:")),
    _bug("a claim of noise that widens the bound", "server.checks", "tests/hostile/test_uploads.py::test_a_claim_of_more_noise_than_the_budget_calls_for_goes_no_further",
         ("math.hypot(*(min(s, most) for s in sigma))", "math.hypot(*sigma)")),
    _bug("a server that weighs the first step only", "server.checks", "tests/hostile/test_uploads.py::test_every_step_of_an_upload_is_paid_for",
         ("ratios = [expected.sensitivity / s for s in sigma]",
          "ratios = [expected.sensitivity / s for s in sigma[:1]]")),
    _bug("a plaintext sitting that TLS washes clean", "server.coordinator",
         "tests/server/test_coordinator.py::test_what_one_sitting_did_not_cover_the_whole_run_does_not_cover",
         ('before = header.get("not_covered", ["insecure-transport"])', "before: list[str] = []")),
    _bug("an unknown transport taken for TLS", "server.coordinator",
         "tests/server/test_coordinator.py::test_a_checkpoint_that_does_not_say_how_it_was_carried_counts_as_plaintext",
         ('header.get("not_covered", ["insecure-transport"])', 'header.get("not_covered", [])')),
    _bug("counted classes that a resume forgets", "simulation.simulate",
         "tests/simulation/test_secure.py::test_classes_counted_before_a_stop_are_told_of_after_it",
         ('earlier.get("not_covered", ())', "()")),
    _bug("terms of today told of the past", "client.ledger",
         "tests/client/test_ledger.py::test_terms_tightened_after_a_release_are_not_told_of_the_past",
         ("for policy in (statement.policy, statement.promised)", "for policy in (statement.policy, statement.policy)")),
    _bug("a δ held against the first records only", "client.ledger",
         "tests/client/test_ledger.py::test_more_records_can_make_delta_too_large",
         ("guarantee=replace(vault.promised, samples=most_samples).guarantee(*also)", "guarantee=vault.promised.guarantee(*also)")),
    _bug("terms of sums certified before they are final", "client.ledger",
         "tests/client/test_ledger.py::test_before_the_first_release_the_terms_of_sums_are_not_certified_as_final",
         ("    if statement.spent:\n        return \"\"\n", "    if statement:\n        return \"\"\n")),
    _bug("terms of today in a certificate's data", "client.ledger",
         "tests/client/test_ledger.py::test_terms_tightened_after_a_release_are_not_told_of_the_past",
         ('"promised": cast("PolicyEntry", self.promised.to_json())', '"promised": cast("PolicyEntry", self.policy.to_json())')),
    _bug("a claim of samples that owns the model", "schedules.aggregate", "tests/hostile/test_clients.py::test_a_client_counts_for_at_most_twice_the_median_whatever_it_declares",
         ("largest = max(TIMES_MEDIAN * median, planned)", "largest = 2**40")),
    _bug("what a hidden client counts for in the record", "server.coordinator",
         "tests/hostile/test_clients.py::test_a_client_that_keeps_its_numbers_is_not_told_by_what_it_counts_for",
         ("if member.samples > most and member.account is not None", "if member.samples > most")),
    _bug("hidden samples in the record", "server.coordinator", "tests/hostile/test_clients.py::test_a_budget_may_be_hidden_or_tightened_in_mid_run",
         ('"counted": None if member.name in hide else most,', '"counted": most,')),
    _bug("twice a median of hidden samples in the record", "server.coordinator",
         "tests/hostile/test_clients.py::test_what_a_cut_client_counts_for_does_not_tell_of_one_that_hides",
         ("hide |= reasons.keys() if hide else set()", "hide |= set()")),
    _bug("a vault id that evicts its client", "server.members", "tests/hostile/test_clients.py::test_whoever_knows_a_vault_id_cannot_evict_its_client",
         ("if self.routes.get(member.identity, route) != route and not movable:", "if False:")),
    _bug("what holds alone of the loosest promise", "server.federation", "tests/server/test_federation_guarantee.py::test_what_holds_alone_is_stated_for_the_client_with_the_most_capacity",
         ("np.nanmax(np.maximum(self.terms.honest, honest) * self.capacity)",
          "(np.maximum(self.terms.honest, honest) * self.capacity)[loosest]")),
    _bug("terms of earlier sums forgotten", "server.federation", "tests/server/test_sum_round.py::test_a_record_states_no_more_than_a_vault_promised_under_its_first_terms",
         ("np.maximum(self.terms.honest, honest) * ", "self.terms.honest * ")),
    _bug("sums of the same budget unsaid", "server.federation", "tests/server/test_sum_round.py::test_a_run_that_was_asked_for_uploads_gets_them_from_the_same_budget",
         ("any(honest > 1 for honest, _ in self.sum_promises)", "False")),
    _bug("a name that stands for a key", "server.members", "tests/hostile/test_clients.py::test_who_calls_itself_by_the_key_of_another_is_not_admitted_in_its_place",
         ('is_own = entry == member.key or not entry.startswith("SHA256:")', "is_own = True")),
    _bug("a fingerprint that forgets twins", "client.vault.chain", "twins_count_in_a_fingerprint",
         ('b"".join(sorted(hashes))', 'b"".join(sorted(set(hashes)))')),
    _bug("negative losses uncut", "privacy.grid", "losses_are_bounded",
         ("np.minimum(np.maximum(np.trunc(scaled * REPLACED), 0), REPLACED)",
          "np.minimum(np.trunc(scaled * REPLACED), REPLACED)"),
         ("int(whole.astype(np.uint64).sum())", "int(whole.astype(np.int64).sum())")),
    _bug("a signal with the model's key", "simulation.compiled", "a_signal_has_noise_of_its_own",
         ("jax.random.normal(jax.random.fold_in(key, np.uint32(2**32 - 1)), (), mean.dtype)",
          "jax.random.normal(key, (), mean.dtype)")),
    _bug("a refusal in its own words", "client.device", "refusals_keep_to_public_words",
         ("return log_and_refuse(\"policy\", \"the client's own terms do not allow this release\")",
          "return log_and_refuse(\"policy\", str(error))")),
    # Written by reviewers who had not seen the tests.
    _bug("a step rounded to float32 before its noise", "client.release", "uploads_lie_on_the_public_grid",
         ("        now = _apply_sum(now, _sum_clipped(form, now, x, y, recipe, own) + drawn, recipe, samples)\n",
          "        now = _apply_sum(now, _sum_clipped(form, now, x, y, recipe, own), recipe, samples)\n"
          "        now = {k: v.astype(np.float32).astype(np.float64) for k, v in now.items()}\n"
          "        now = _apply_sum(now, drawn, recipe, samples)\n")),
    _bug("a loss rounded before its noise", "client.release", "uploads_lie_on_the_public_grid",
         ("noised_loss[\"loss\"] = loss_bound * (total / grid.REPLACED) / samples",
          "noised_loss[\"loss\"] = float(np.float32(loss_bound * ((total - loss_noise) / grid.REPLACED) / samples))"
          " + loss_bound * (loss_noise / grid.REPLACED) / samples")),
    _bug("columns less their mean", "client.node",
         "tests/client/test_node_tables.py::test_replacing_a_row_changes_no_other_row_that_a_node_reads",
         ("rows = Rows(read.x, y, classes", "rows = Rows(read.x - read.x.mean(axis=0), y, classes")),
    _bug("a node that infers its columns", "client.node",
         "tests/client/test_node_tables.py::test_frozen_noise_and_equal_rows_give_equal_bytes",
         ("**table, person", "**table, infer=True, person")),
    _bug("features less their mean", "client.node",
         "tests/client/test_node_tables.py::test_what_a_row_contributes_does_not_depend_on_the_others",
         ("return apply_to_rows(apply, self.x, self.rows_per_person)",
          "return lens.apply(self.x) - lens.apply(self.x).mean(axis=0)")),
    _bug("a client's loss with a record's Δ in simulation", "server.federation",
         "losses_have_their_whole_sensitivity",
         ('whole = self.plan.local.unit == "client"', 'whole = self.plan.local.unit == "nobody"')),
    _bug("a client's loss with a record's Δ at the server", "server.checks",
         "losses_have_their_whole_sensitivity",
         ('share = 1 if self.asked.recipe.unit == "client" else self.member.samples',
          "share = self.member.samples")),
    _bug("the words of an error to the server", "flower.worker",
         "tests/flower/test_worker.py::test_no_word_of_an_error_leaves_the_worker",
         ("return Message(Error(code=FAILED, reason=SORRY), reply_to=message)",
          "return Message(Error(code=FAILED, reason=str(error)), reply_to=message)")),
    _bug("the words of an error from the app", "flower.client_app",
         "tests/flower/test_worker.py::test_no_word_of_an_error_leaves_the_app",
         ("return Message(Error(code=FAILED, reason=SORRY), reply_to=message)",
          "return Message(Error(code=FAILED, reason=str(error)), reply_to=message)")),
    _bug("a key of half its bytes", "privacy.secure_noise", "every_byte_of_entropy_counts",
         ("algorithms.AES(os.urandom(32))", "algorithms.AES(2 * os.urandom(16))")),
    _bug("entropy that is thrown away", "privacy.secure_noise", "every_byte_of_entropy_counts",
         ("modes.CTR(os.urandom(16))", "modes.CTR(os.urandom(16)[:4] + bytes(12))")),
    # What is said of rows that the server evaluates on, and of δ.
    _bug("a release that evaluates on what it protects", "plan.plan", "tests/server/test_federation_guarantee.py::test_a_release_does_not_evaluate_on_what_it_protects",
         ("if self.evaluates_on_unit:", "if False:")),
    _bug("one file is taken for two", "plan.data", "tests/server/test_federation_guarantee.py::test_a_release_does_not_evaluate_on_what_it_protects",
         ("isinstance(self.validation, str) and isinstance(self.test, str)",
          "isinstance(self.validation, str) or isinstance(self.test, str)")),
    _bug("clients' evaluation rows go unnamed", "server.federation", "tests/server/test_federation_guarantee.py::test_tables_that_differ_in_one_client_are_told_apart_only_where_the_leak_is_named",
         ("declared_public=declared): self.evaluates_on_clients,", "declared_public=declared): False,")),
    _bug("a unit without its evaluation rows", "privacy.budget", "tests/server/test_federation_guarantee.py::test_tables_that_differ_in_one_client_are_told_apart_only_where_the_leak_is_named",
         ('"evaluation-in-unit" if unit in LARGER_UNITS else ', "")),
    _bug("a leak that leaves the claim as it was", "privacy.budget", "tests/server/test_federation_guarantee.py::test_tables_that_differ_in_one_client_are_told_apart_only_where_the_leak_is_named",
         ('"counted-classes", "evaluation-in-unit")', '"counted-classes")')),
    _bug("a record's promise that includes evaluation rows", "privacy.budget", "tests/server/test_federation_guarantee.py::test_the_card_of_single_records_names_the_clients_own_rows",
         ('kind = "training " if {*TRAINING_ONLY} & {*self.not_covered} else ""', 'kind = ""')),
    _bug("clients' own rows instead of a file's", "data.federated", "tests/server/test_federation_guarantee.py::test_a_release_may_evaluate_on_rows_from_elsewhere",
         ('rows = tables.read_rows(file, layout, labels=True, key=f"data.{key}")\n            public[key] = Samples(rows.x, rows.y, rows.cut)',
          "continue"), ("0 if given is not None else wanted", "0.2 if isinstance(wanted, str) else 0 if given is not None else wanted")),
    _bug("a checkpoint that confirms a guessed record", "simulation.simulate", "tests/simulation/test_secure.py::test_the_checkpoint_of_a_release_confirms_no_guessed_record",
         ("fingerprint(rows=not secure)", "fingerprint()")),
    _bug("public numbers that hash the rows", "data.federated", "tests/simulation/test_secure.py::test_the_checkpoint_of_a_release_confirms_no_guessed_record",
         ("if not rows and array is not self.samples:", "if not rows and array.ndim > 2:")),
    _bug("a loose δ goes uncertified", "client.vault.policy", "tests/client/test_ledger.py::test_a_delta_that_would_allow_a_record_to_be_published_is_warned_of_and_certified",
         ('*(["loose-delta"] if self.delta * self.units >= 1 else [])', "*[]")),
    _bug("a loose δ goes unsaid in a run", "server.federation", "tests/server/test_federation_guarantee.py::test_a_run_says_where_its_delta_would_allow_a_unit_to_be_published",
         ('"loose-delta": np.any(self.delta * units >= 1),', '"loose-delta": False,')),
    _bug("a run led outside its folder", "flower.server_worker", "tests/flower/test_server_worker.py::test_a_run_is_led_inside_its_folder_and_by_known_keys",
         ("if not Path(value).resolve().is_relative_to(runs.resolve()):", "if not value.startswith(str(runs)):")),
    _bug("an authority's key in the clear", "flower.certificates", "tests/flower/test_server_worker.py::test_the_authoritys_key_is_encrypted",
         ('write_new(folder / "ca.key", _encode_key(key, passphrase))', 'write_new(folder / "ca.key", _encode_key(key))')),
    _bug("a reply read before its size is looked at", "flower.server_worker", "tests/flower/test_server_worker.py::test_a_reply_is_refused_before_it_is_read",
         ('if int(response.headers.get("content-length", limit + 1)) > limit:', "if len(response.read()) > limit:")),
    # What the number of rounds is forecast from.
    _bug("a forecast on clients' raw rows and losses", "server.forecast", "tests/server/test_forecast.py::test_no_row_of_a_client_is_read",
         ("public = federation.held.validation", "public = federation.held.train")),
    _bug("a horizon that tells a hidden budget", "server.forecast", "tests/server/test_forecast.py::test_the_numbers_of_clients_that_hide_them_do_not_show",
         ("disclosed = offer.granted & ~np.isnan(federation.capacity)", "disclosed = offer.granted")),
    _bug("a forecast that announces more rounds than the plan", "schedules.algorithms", "tests/server/test_forecast.py::test_no_candidate_lengthens_a_run",
         ("max(min(FEWEST, self.rounds), T)", "max(FEWEST, T)")),
    _bug("a step of the server that changes what clients book", "server.rounds", "tests/server/test_forecast.py::test_the_books_do_not_depend_on_the_step",
         ("sensitivity = stack_rows([federation.sensitivity for federation in federations])", "sensitivity = stack_rows([run.federation.sensitivity * run.state.marks.step for run in runs])")),
]  # fmt: skip
MUTANTS += [
    Mutant(name, module, killer, changes)
    for name, module, _, killer, changes in REVIEWED + AUTHORED
]
