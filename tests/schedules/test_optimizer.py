"""What the server does after the noise: the same in every engine, and free."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce import Plan, load, reports, resume, simulate
from sottovoce.client.messages import Request
from sottovoce.errors import PlanError, RunError
from sottovoce.models.base import flatten_parameters
from sottovoce.schedules import optimizer
from sottovoce.schedules.aggregate import weigh_by_samples
from sottovoce.schedules.optimizer import Finish, Marks
from sottovoce.server.coordinator import Patience, conduct
from sottovoce.server.federation import score_model
from sottovoce.simulation import secure as released
from sottovoce.simulation import simulate as running
from sottovoce.simulation.compiled import play_round
from sottovoce.simulation.simulate import simulate_many
from support.federations import replayed, same
from support.in_process import Direct, clients, draw, plan, public
from support.samples import MODELS, SIZES, orders, rows_of, samples

EVERY = {
    "momentum": {"server.momentum": 0.6},
    "decay": {"server.decay": "cosine"},
    "exponential": {"server.average": "exponential", "server.keep": 0.7},
    "tail": {"server.average": "tail", "server.tail": 0.5},
    "best": {"server.choose": "best"},
    "all": {"server.momentum": 0.3, "server.decay": "linear", "server.average": "tail",
            "server.tail": 0.6, "server.choose": "best"},
}  # fmt: skip
SHORT = Plan(rounds={"schedule": "fixed", "rounds": 6})


def naive(own: Finish, first, averaged, losses=()):
    """The models sent and the one handed out, from the definitions and without any memory.

    `averaged[t](w)` is what clients make of w; a slow second implementation in float64.
    """
    sent, steps, horizon = [np.float64(first)], [], len(averaged)
    for t, uploads in enumerate(averaged):
        steps.append(uploads(sent[-1]) - sent[-1])
        beta = 0.0 if own.momentum is None else own.momentum
        v = sum(beta ** (t - s) * step for s, step in enumerate(steps))
        scale = {"linear": 1 - t / horizon, "cosine": math.cos(math.pi * t / horizon / 2) ** 2,
                 "root": (1 + t) ** -0.5}  # fmt: skip
        sent.append(sent[-1] + (1.0 if own.decay is None else scale[own.decay]) * v)
    offers = sent[1:]
    if own.tail is not None:
        begin = math.floor((1 - own.tail) * horizon)
        offers = [np.mean(sent[min(begin, t) + 1 : t + 2], axis=0) if t >= begin else w
                  for t, w in enumerate(offers)]  # fmt: skip
    if own.keep is not None:
        kept, offers = 0.0, []
        for t, w in enumerate(sent[1:]):
            share = max(1 - own.keep, 1 / (t + 1))
            kept = (1 - share) * kept + share * w
            offers.append(kept)
    return sent, offers[int(np.argmin(losses)) if own.best else -1]


@pytest.mark.parametrize("own", [
    Finish(), Finish(0.9), Finish(decay="linear"), Finish(decay="cosine"), Finish(decay="root"),
    Finish(keep=0.8), Finish(tail=0.3), Finish(tail=1.0), Finish(best=True),
    Finish(0.5, "root", tail=0.7, best=True),
])  # fmt: skip
def test_the_parts_are_what_their_formulas_say(own):
    """Against the naive sums, for random uploads and losses."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        horizon = int(rng.integers(1, 12))
        shifts, losses = rng.normal(size=(horizon, 3)), rng.random(horizon)
        averaged = [lambda w, s=s: 0.7 * w + s for s in shifts]
        params, marks = {"w": rng.normal(size=3)}, Marks()
        want, final = naive(own, params["w"], averaged, losses)
        memory = own.begin(params)
        for t in range(horizon):
            new = {"w": averaged[t](params["w"])}
            done = own.close(marks, t, horizon, memory, params, new, lambda _, v=losses[t]: v)
            marks = own.update_marks(marks, t, horizon, done.offered)
            params, memory = done.params, done.memory
            np.testing.assert_allclose(params["w"], want[t + 1], rtol=1e-12)
        np.testing.assert_allclose(optimizer.choose_model(memory, params)["w"], final, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "svm"])
def test_the_compiled_round_does_what_numpy_does(name):
    """Same uploads, same numbers: the same next model, average and best, to rounding."""
    model = MODELS[name]
    x, y = samples(model)
    rows, p = rows_of(x.astype(np.float32), y), weigh_by_samples(SIZES, np.ones(len(SIZES), bool))
    batch = jax.tree.map(lambda w: w[None], model.init(jax.random.key(1)))
    own = Finish(0.5, "linear", keep=0.6, best=True)
    first = flatten_parameters(jax.tree.map(lambda w: w[0], batch))
    memory, order = own.begin(first), orders(p, 0.5)
    stacked = {part: jax.tree.map(lambda w: jnp.asarray(w)[None], model.unflatten(dict(kept)))
               for part, kept in memory.items()}  # fmt: skip
    params, marks = first, Marks()
    for t in range(5):
        here = jax.tree.map(lambda w: jnp.asarray(w)[None], model.unflatten(dict(params)))
        mean = flatten_parameters(
            jax.tree.map(lambda w: w[0], play_round(model, rows, here, order, t).params)
        )
        numbers = own.step_inputs(marks, t, 8)
        arrays = [None if value is None else np.array([value], np.float32) for value in numbers]
        told = optimizer.StepInputs(*arrays)
        out = play_round(model, rows, here, order._replace(finish=told), t, memory=stacked)
        offered = float(out.score[0, 3])
        done = own.close(marks, t, 8, memory, params, mean, lambda _, loss=offered: loss)
        marks = own.update_marks(marks, t, 8, offered)
        memory, stacked, params = done.memory, out.memory, done.params
        for part, tree in (stacked | {"newest": out.params}).items():
            mine = flatten_parameters(jax.tree.map(lambda w: w[0], tree))
            for key, leaf in mine.items():
                wanted = (memory | {"newest": params})[part][key]
                np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-6)
    assert marks.chosen is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_it_is_free(name):
    """Tanks, σ, μ² and the guarantee are what they are without it, to the last bit."""
    without = running.start_run(running.build(SHORT, seed=3), 3)
    with_it = running.start_run(running.build(SHORT.replace(**EVERY[name]), seed=3), 3)
    for run in (without, with_it):
        for _ in running.play_batch([run]):
            pass
    one, two = without.state, with_it.state
    assert one.tank.spent.tolist() == two.tank.spent.tolist()
    assert np.array_equal(one.sigma, two.sigma)
    assert np.array_equal(one.mu2, two.mu2)
    assert without.federation.guarantee() == with_it.federation.guarantee()
    models = [flatten_parameters(run.final_model) for run in (without, with_it)]
    if name != "best":  # which may well be the last
        assert not same(*models)


@pytest.mark.slow
def test_many_runs_together_are_the_runs_alone():
    plans = [SHORT.replace(**own) for own in EVERY.values()] + [SHORT]
    plans.append(plans[5].replace(**{"rounds.rounds": 4, "server.momentum": 0.8}))
    together = simulate_many(plans, seeds=[1, 2], together=True)
    alone = simulate_many(plans, seeds=[1, 2], together=False)
    for one, two in zip(together, alone, strict=True):
        for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "exponential"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_stopped_run_goes_on_to_the_same_model_bit_for_bit(name, at, tmp_path):
    own = SHORT.replace(**EVERY[name])
    whole = simulate(own, seed=9)

    def stop(done):
        if done.t == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(own, seed=9, out=tmp_path / "run", on_round=stop)
    again = resume(tmp_path / "run")
    assert again.record["result"] == whole.record["result"]
    assert load(tmp_path / "run").record["result"]["finish"] == own.server.finish().describe(
        Marks(4 if name == "all" else 6, chosen=_chosen(again))
    )


def _chosen(run):
    said = run.record["result"]["finish"].rpartition("(")[2].rstrip(")")
    return int(said) if said.isdigit() else None


@pytest.mark.slow
def test_the_record_and_the_page_say_what_was_done(tmp_path):
    simulate(SHORT.replace(**EVERY["tail"]), seed=1, out=tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text("utf-8"))
    assert record["result"]["finish"] == "the model is the mean of the last 3 iterates"
    page = reports.write_report(tmp_path / "run").read_text("utf-8")
    assert "the mean of the last 3 iterates" in page
    assert "costs no privacy" in page
    simulate(SHORT, seed=1, out=tmp_path / "plain")
    assert "After the noise" not in reports.write_report(tmp_path / "plain").read_text("utf-8")


def retraced(own: Plan, federation_first, rounds, loss):
    """What a server makes of these averaged uploads: the models it sends, and the last word."""
    made, marks, params = own.server.finish(), Marks(), federation_first
    memory, sent, horizon = made.begin(params), [params], len(rounds)
    for t, averaged in enumerate(rounds):
        done = made.close(marks, t, horizon, memory, params, averaged, loss)
        marks = made.update_marks(marks, t, horizon, done.offered)
        params, memory = done.params, done.memory
        sent.append(params)
    return sent, optimizer.choose_model(memory, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "tail", "all"])
def test_a_federation_finishes_as_the_simulation_does(name, tmp_path, monkeypatch):
    """Both send and hand out what the server's optimiser makes of their uploads, bit for bit.

    The federation is stopped once and goes on; its vaults have debited what the plan without a
    finish debits.
    """
    own = plan(**EVERY[name])
    transport, patience = Direct(clients(tmp_path)), Patience(3, gathering=0.5)
    where = {"transport": transport, "patience": patience, "keep_uploads": True}

    def stop(done):
        if done.t == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conduct(own, public(), out=tmp_path / "run", on_round=stop, **where)
    transport.greeted.clear()
    done = conduct(own, public(), out=tmp_path / "run", resume=True, **where)
    told = [Request.from_blob(next(iter(blobs.values()))) for blobs in transport.requests]
    asked = {request.round.t: request.params for request in told}

    def loss(leaves):
        tree = done.model.unflatten(dict(leaves))
        return score_model(done.model, tree, public().validation)[0]

    models = replayed(tmp_path / "run")
    sent, final = retraced(own, asked[0], [models[t] for t in range(4)], loss)
    for t in range(4):
        assert same(asked[t], sent[t])
    assert same(flatten_parameters(done.params), final)

    plain = Direct(clients(tmp_path / "plain"))
    other = conduct(plan(), public(), plain, patience, out=tmp_path / "other")
    assert [c["spent"] for c in done.record["clients"]] == [
        c["spent"] for c in other.record["clients"]
    ]

    seen, real = [], released.average_uploads

    def watched(federation, before, prepared, params):
        made = real(federation, before, prepared, params)
        seen.append((params, made[0]))
        return made

    monkeypatch.setattr(released, "average_uploads", watched)
    rows = {"data": [draw(40, 100 + i) for i in range(3)], "validation": draw(60, 1)}
    run = simulate(own.replace(noise="secure"), test=draw(60, 2), **rows)
    sent, final = retraced(own, seen[0][0], [mean for _, mean in seen], loss)
    for (params, _), wanted in zip(seen, sent, strict=False):
        assert same(params, wanted)
    assert same(flatten_parameters(run.params), final)


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"server.momentum": 1.0}, "server.momentum must be above 0 and below 1"),
    ({"server.momentum": 0.0}, "server.momentum must be above 0 and below 1"),
    ({"server.average": "tail", "server.tail": 1.5}, "server.tail must be above 0 and at most 1"),
    ({"server.average": "tail", "server.keep": 0.5}, "server.keep has no effect with"),
    ({"server.average": "exponential", "server.keep": 1.0}, "server.keep must be above 0"),
    ({"server.tail": 0.5}, "server.tail has no effect without server.average"),
    ({"server.decay": "quick"}, "server.decay"),
    ({"server.choose": "best", "data.name": "mnist", "data.validation": 0},
     "server.choose must be last with data.validation = 0"),
])  # fmt: skip
def test_what_is_no_finish_is_refused(changes, sentence):
    with pytest.raises(PlanError, match=sentence):
        Plan().replace(**changes)


@pytest.mark.slow
def test_a_damaged_memory_is_no_run(tmp_path):
    own = SHORT.replace(**EVERY["tail"])

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(own, seed=9, out=tmp_path / "run", on_round=stop)
    path = tmp_path / "run" / "checkpoint.npz"
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files if not name.startswith("average:")}
    np.savez(path, **arrays)
    with pytest.raises(RunError, match="damaged"):
        resume(tmp_path / "run")


def test_a_run_that_ends_before_its_tail_says_so():
    assert Finish(tail=0.5).describe(Marks(0)) == "the model is the newest iterate"


@pytest.mark.slow
def test_the_card_does_not_call_the_clients_own_rows_public():
    """Validation rows may be clients' own, and raw losses may have steered: then it says so."""
    from sottovoce.reports import render_report
    from support.example_record import example

    record, trace = example()
    record["result"]["finish"] = "the model is the mean of the last 3 iterates"
    page = render_report(record, trace)
    assert "the validation records, which the guarantee does not cover" in " ".join(page.split())
    assert "public rows" not in page
    record["guarantee"]["not_covered"].append("raw-signal")
    page = " ".join(render_report(record, trace).split())
    assert "raw losses steered, which the guarantee does not cover" in page
    assert "costs no privacy" not in page
