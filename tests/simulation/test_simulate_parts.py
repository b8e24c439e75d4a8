"""Parts that are given from Python: schedules, optimisers, partitions, metrics, callbacks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sottovoce.errors import InputError
from sottovoce.models.svm import Svm
from sottovoce.plan import Plan
from sottovoce.runs.record import Record
from sottovoce.schedules.algorithms import DiscountedRounds, FixedRounds, ForecastRounds
from sottovoce.schedules.base import CheckedSchedule, Progress, Round
from sottovoce.schedules.optimizer import Finish, Marks
from sottovoce.server.federation import OptaxStep, Parts, build
from sottovoce.simulation import compiled
from sottovoce.simulation.simulate import resume, simulate, simulate_many
from support import ROOT

SHORT = Plan(rounds={"schedule": "fixed", "rounds": 4})


def test_a_forecast_that_cannot_be_made_is_refused_in_one_sentence():
    """A plan's would become discounted; a schedule that was given is not exchanged."""
    few = SHORT.replace(**{"data.validation": 1})
    with pytest.raises(InputError, match=r"schedule must be .* it needs 40 public rows"):
        simulate(few, seed=1, schedule=ForecastRounds(20))
    module = pytest.importorskip("torch").nn.Linear(64, 10)
    with pytest.raises(InputError, match=r"schedule must be .* only steps of a model in JAX"):
        simulate(SHORT, seed=1, model=module, schedule=ForecastRounds(20))


@dataclass(frozen=True)
class Patience:
    """Stops after two rounds without a better loss."""

    rounds: int = 12

    def round(self, progress):
        if progress.done >= progress.horizon:
            return None
        return Round(progress.done, progress.horizon)

    def advance(self, progress, loss):
        recent = (*progress.recent, loss)
        late = len(recent) > 3 and min(recent[-2:]) >= min(recent[:-2])
        horizon = progress.done + 1 if late else progress.horizon
        return Progress(progress.done + 1, horizon, recent)


class Halves:
    """Has the methods of a schedule, each of which a test replaces."""

    rounds = 4

    def __init__(self, **answers):
        self.answers = answers

    def round(self, progress):
        make = self.answers.get("round") or (lambda p: Round(p.done, p.horizon))
        return make(progress) if progress.done < progress.horizon else None

    def advance(self, progress, loss):
        make = self.answers.get("advance") or (lambda p: replace(p, done=p.done + 1))
        return make(progress)


def digest(run):
    return run.record["result"]["model_sha256"]


def test_a_schedule_of_the_users_own_plays_like_a_built_in_one():
    class Copy:
        rounds = 12

        def start(self, loss):
            return DiscountedRounds(12, window=1).start(loss)

        def round(self, progress):
            return DiscountedRounds(12, window=1).round(progress)

        def advance(self, progress, loss):
            return DiscountedRounds(12, window=1).advance(progress, loss)

    plan = Plan(rounds={"rounds": 12, "window": 1})
    own, built_in = simulate(plan, seed=3, schedule=Copy()), simulate(plan, seed=3)
    assert digest(own) == digest(built_in)
    assert own.record["rounds"] == built_in.record["rounds"]
    [name] = own.record["plan"]["parts"]
    assert name.startswith("schedule: ")
    assert name.endswith("Copy")


def test_a_patient_schedule_stops_early_and_its_noise_is_paid_for():
    run = simulate(Plan(local={"learning_rate": 1e-6}), seed=1, schedule=Patience())
    assert run.rounds_used < 12
    assert run.record["plan"]["rounds"]["rounds"] == 12
    assert all(c["spent"] <= c["capacity"] * (1 + 1e-9) for c in run.record["clients"])


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Halves(round=lambda p: 3), "Halves.round must be None or a Round with t = 0"),
        (Halves(round=lambda p: Round(0, 9)), "horizon of at most 4"),
        (Halves(round=lambda p: Round(1, 4)), "a Round with t = 0"),
        (Halves(round=lambda p: Round(0, 4, scale=0.0)), "a Round with t = 0"),
        (Halves(round=lambda p: Round(0, 4, np.random.default_rng().uniform())), "same answer"),
        (Halves(advance=lambda p: None), "Halves.advance must be a Progress with done = 1"),
        (Halves(advance=lambda p: p), "a Progress with done = 1"),
        (Halves(advance=lambda p: Progress(p.done + 1, 99)), "a horizon never grows"),
        (Halves(advance=lambda p: Progress(p.done + 1, 4, ("x",))), "a Progress with done = 1"),
    ],
)
def test_a_schedule_that_answers_nonsense_is_refused(schedule, words):
    with pytest.raises(InputError, match=words):
        simulate(SHORT, seed=1, schedule=schedule)


@pytest.mark.parametrize("bad", [Patience, object(), "fixed", Patience(rounds=0)])
def test_what_is_no_schedule_is_refused_before_data_are_read(bad):
    with pytest.raises(InputError, match=r"schedule must be an object with rounds|rounds must be"):
        simulate(Plan(data={"path": "absent.csv", "label": "y", "infer": True}), schedule=bad)


def test_a_schedule_sees_progress_and_losses_only():
    seen = []

    class Watching(Halves):
        def advance(self, progress, loss):
            seen.append((progress, loss))
            return super().advance(progress, loss)

    simulate(SHORT, seed=1, schedule=Watching())
    assert {type(value) for pair in seen for value in pair} == {Progress, float}


def test_built_in_schedules_can_be_passed_too():
    run = simulate(Plan(), seed=1, schedule=FixedRounds(3))
    assert digest(run) == digest(simulate(SHORT.replace("rounds.rounds=3"), seed=1))


@pytest.mark.parametrize("noise", ["simulated", "secure"])
def test_plain_descent_by_optax_is_the_averaged_upload(noise):
    plan = SHORT.replace("rounds.rounds=2", f"noise={noise}", "data.samples=8")
    seed = {"seed": 1} if noise == "simulated" else {}
    run = simulate(plan, **seed, optimizer=optax.sgd(1.0))
    assert "steps are taken by optax" in run.record["result"]["finish"]
    if noise == "simulated":
        plain = simulate(plan, seed=1)
        for name, leaf in plain.params.items():
            np.testing.assert_allclose(run.params[name], leaf, atol=1e-6)
        assert run.record["clients"] == plain.record["clients"]


def test_momentum_by_optax_is_the_servers_momentum():
    ours = simulate(SHORT.replace("server.momentum=0.5"), seed=1)
    theirs = simulate(SHORT, seed=1, optimizer=optax.sgd(1.0, momentum=0.5))
    for name, leaf in ours.params.items():
        np.testing.assert_allclose(theirs.params[name], leaf, atol=1e-5)


@pytest.mark.parametrize("kind", [None, jnp.bfloat16])
def test_an_optimizer_with_a_state_resumes_to_the_same_model(kind, tmp_path):
    """Adam has counters and two moments; an average is kept on top of it.

    Moments in bfloat16 were written as bytes of no type, and no run could go on from them.
    """
    adam = optax.adam(0.05, mu_dtype=kind)
    plan = SHORT.replace("server.average=tail", "rounds.rounds=5")
    whole = simulate(plan, seed=1, optimizer=adam)

    def stop(done):
        if done.t == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(plan, seed=1, optimizer=adam, on_round=stop, out=tmp_path)
    with pytest.raises(InputError, match=r"got optimizer: optax.* pass the same schedule"):
        resume(tmp_path)
    assert digest(resume(tmp_path, optimizer=adam)) == digest(whole)


def test_compiled_and_numpy_engines_take_the_same_optax_step():
    finish, svm = Finish(transformation=OptaxStep(optax.adam(0.05))), Svm(3)
    before, averaged = ({"b": np.float32([b])[0], "w": np.float32([b, 1, -b])} for b in (1, 3))
    before, averaged = (jax.tree.map(np.asarray, tree) for tree in (before, averaged))
    memory = {"numpy": finish.begin(before), "jax": finish.begin(before)}
    models = {"numpy": before, "jax": jax.tree.map(jnp.asarray, before)}
    valid = jnp.zeros((1, 3)), jnp.zeros(1, int)
    for t in range(3):
        kept, inputs = (memory["numpy"], models["numpy"]), finish.step_inputs(Marks(), t, 3)
        closed = finish.close(Marks(), t, 3, *kept, averaged, loss=lambda _: 0.0)
        models["numpy"], memory["numpy"] = closed.params, closed.memory
        models["jax"], memory["jax"], _ = compiled.finish_step(
            svm, models["jax"], averaged, memory["jax"], inputs, valid, None
        )
    assert all(isinstance(leaf, np.ndarray) for leaf in models["numpy"].values())
    for name, leaf in models["jax"].items():
        np.testing.assert_allclose(models["numpy"][name], leaf, rtol=1e-6)


@pytest.mark.parametrize("bad", ["adam", optax.adam, 3])
def test_what_is_no_transformation_is_refused(bad):
    with pytest.raises(InputError, match=r"optimizer must be an optax\.GradientTransformation"):
        simulate(SHORT, seed=1, optimizer=bad)


def test_an_optimizer_replaces_momentum_and_decay():
    with pytest.raises(InputError, match=r"optimizer takes the place of server\.momentum"):
        simulate(SHORT.replace("server.momentum=0.5"), seed=1, optimizer=optax.sgd(1.0))


def deal_by_label(labels, clients, rng):
    """Client i has the rows of class i."""
    return labels % clients


def test_a_partition_decides_who_holds_what():
    run = simulate(SHORT, seed=1, partition=deal_by_label)
    plan = SHORT.replace(parts=("partition: simulation.test_simulate_parts.deal_by_label",))
    assert run.record["plan"]["parts"][0].endswith("deal_by_label")
    federation = build(Plan(**run.record["plan"]), seed=1, parts=Parts(partition=deal_by_label))
    held = federation.held
    assert all(set(held.client(i).y.tolist()) == {i} for i in range(10))
    before = build(SHORT, seed=1).held
    rows = [np.sort(np.concatenate(h.split.clients)).tolist() for h in (held, before)]
    assert rows[0] == rows[1]
    assert held.test.y.tolist() == before.test.y.tolist()
    assert federation.divergence > 0
    assert plan.needs_python


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (lambda labels, clients, rng: labels[:3], "1430 whole numbers from -1 to 9"),
        (lambda labels, clients, rng: labels * 1.0, "got 'float64 of shape"),
        (lambda labels, clients, rng: labels + 1, "got 10"),
        (lambda labels, clients, rng: labels * 0, "leaves client 1 .* without a row"),
        (7, "partition must be a function"),
    ],
)
def test_a_partition_that_deals_badly_is_refused(partition, words):
    with pytest.raises(InputError, match=words):
        simulate(SHORT, seed=1, partition=partition)


def test_a_partition_deals_no_rows_of_persons_who_are_protected():
    data = np.zeros((300, 4), np.float32), np.arange(300) % 2
    plan = Plan(data={"name": "arrays", "clients": 3, "validation": 9, "test": 9})
    for unit in ("record", "person"):
        with pytest.raises(InputError, match="partition deals rows that are in memory"):
            simulate(
                plan.replace(f"local.unit={unit}"),
                data=data,
                person=np.arange(300) // 3,
                partition=deal_by_label,
            )


def test_a_partition_never_moves_private_rows_by_their_labels_with_secure_noise():
    rng = np.random.default_rng(1)
    data = rng.normal(size=(300, 4)), rng.permutation(300) % 10  # a client for each label
    public = {"validation": data, "test": data}  # from which the classes are counted
    with pytest.raises(InputError, match="absent with noise = secure"):
        simulate(SHORT.replace("noise=secure"), data=data, **public, partition=deal_by_label)
    with pytest.raises(InputError, match="iid with a partition"):
        simulate(SHORT.replace("data.split=labels"), seed=1, partition=deal_by_label)


def top_probability(labels, scores):
    assert labels.dtype.kind == "i"
    np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-6)
    return scores.max(axis=1).mean()


def test_metrics_are_computed_on_public_rows_and_recorded():
    run = simulate(SHORT, seed=1, metrics={"confidence": top_probability})
    entry = run.record["result"]["metrics"]["confidence"]
    x = build(SHORT, seed=1).held.test.x
    assert entry["value"] == pytest.approx(run.predict_proba(x).max(axis=1).mean(), abs=1e-6)
    assert "confidence" in Record.parse(json.loads(json.dumps(run.record))).result["metrics"]


@pytest.mark.parametrize("bad", [{"accuracy": top_probability}, [top_probability], {"mine": 3}])
def test_what_are_no_metrics_is_refused(bad):
    with pytest.raises(InputError, match=r"metrics must be functions of \(labels, scores\)"):
        simulate(SHORT, metrics=bad)


def test_a_metric_that_is_no_number_is_refused_before_the_first_round():
    rounds = []
    with pytest.raises(InputError, match=r"metrics\['mine'\] must be one number"):
        simulate(SHORT, seed=1, metrics={"mine": lambda y, s: s}, on_round=rounds.append)
    assert rounds == []


def test_callbacks_hear_of_rounds_and_of_the_end():
    class Both:
        def __init__(self):
            self.rounds, self.ends = [], []

        def on_round(self, done):
            self.rounds.append(done.t)

        def on_end(self, run):
            self.ends.append(run.record["status"])

    both, ends = Both(), []
    simulate(SHORT, seed=1, callbacks=[both], on_end=ends.append)
    assert both.rounds == [0, 1, 2, 3]
    assert both.ends == ["finished"]
    assert ends[0].rounds_used == 4

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(SHORT, seed=1, callbacks=[both], on_round=stop)
    assert both.ends == ["finished", "interrupted"]
    with pytest.raises(InputError, match="callbacks must be objects with on_round"):
        simulate(SHORT, callbacks=[object()])
    for callbacks in (both, Both, "wandb", None):
        with pytest.raises(InputError, match="callbacks must be a list of objects with on_round"):
            simulate(SHORT, callbacks=callbacks)
    with pytest.raises(
        InputError, match=r"callbacks must be .*; make an object of it, as Both\(\)"
    ):
        simulate(SHORT, callbacks=[Both])


def test_a_plan_may_be_a_path_or_a_dictionary(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(SHORT.to_toml())
    runs = [simulate(plan, seed=1) for plan in (SHORT, str(path), path, SHORT.to_dict())]
    assert len({digest(run) for run in runs}) == 1
    with pytest.raises(InputError, match="plan must be a Plan, the path of a TOML file"):
        simulate(3)


def test_a_record_with_parts_is_no_plan_that_reproduces_itself():
    record = simulate(SHORT, seed=1, schedule=Patience(2)).record
    plan = Plan(**record["plan"])
    assert Plan.from_toml(plan.to_toml()) == plan
    for again in (lambda: simulate(plan, seed=1), lambda: simulate_many([plan], seeds=[1])):
        with pytest.raises(InputError, match=r"got schedule: .*Patience; pass the same schedule"):
            again()
    same = simulate(plan, seed=1, schedule=Patience(2))
    assert same.record["result"] == record["result"]


def test_checked_schedules_of_the_same_object_are_equal():
    assert CheckedSchedule(Patience()) == CheckedSchedule(Patience())


def test_the_code_of_the_python_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(SHORT.to_toml())
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 4)).astype(np.float32)
    names = {"x": x, "y": (x[:, 0] > 0).astype(int), "optax": optax, "plan": SHORT}
    text = (ROOT / "docs" / "python.md").read_text("utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/python.md", "exec"), names)
    assert names["upload"].sigma[0] > 0
