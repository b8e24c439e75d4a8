"""Privacy properties, each a function that fails if the package at hand does not have it.

They are held against the package as it is (all pass) and against each of its mutants
(`privacy_mutants`): what a killer asserts is a promise to a client, never a golden number. Oracles
are written out here, from the formulas, and not taken from the package. Statistical ones say their
false-alarm rate; the noise is the operating system's.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from fractions import Fraction
from math import ceil

import numpy as np

from mutants.ledger_killers import LEDGER, chance, folder
from mutants.run_killers import RUNS
from sottovoce.client import device, release
from sottovoce.client.release import Price
from sottovoce.errors import InputError, NoSensitivity, TankEmpty
from sottovoce.models import base
from sottovoce.models.base import Form
from sottovoce.privacy import calibration, grid, secure_noise
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.schedules.base import Round
from sottovoce.schedules.pricing import Terms, pick_cohort
from support.devices import ask, kind, make_node, told
from support.support_attack import attack_upload

MOVED = 2**31  # grid units by which one record may move a sum: twice the clipped norm
ONE = Terms(clients=1, per_round=1)
WIDE = Form("svm", (20_000,), 2, {"kappa": 0.0})
SMALL = Form("mlp", (4,), 3, {"hidden": 3})
BESIDE = (  # what prints or carries on what training has made, and models that it does not train
    "schedules.calibrate", "flower.", "client.ledger", "studies.", "reports.certificate",
    "reports.pages", "reports.run", "simulation.estimators", "models.torch_model", "models.cnn",
)  # fmt: skip


def _sum_clipped(form, params, x, y, clip):
    count = sum(leaf.size for leaf in params.values())
    return grid.clipped_sum(base.gradient_blocks(form, params, x, y), clip, count)


def _norm2(difference):
    return sum(int(v) ** 2 for v in difference)


def sums_stay_within_sensitivity():
    """Replacing one record, by anything at all, moves the exact sum by at most 2³¹ units."""
    rng = np.random.default_rng(0)
    odd = np.array([[1e6, -1e6, 3.0, 0.0], [np.nan] * 4, [np.inf, 1, 1, 1], [1e300] * 4])
    for form, scale in ((SMALL, 1.0), (SMALL, 50.0), (Form("svm", (4,), 2, {"kappa": 0.05}), 3.0)):
        params = {name: scale * rng.normal(size=s) for name, s in form.shapes().items()}
        for n in (1, 2, 7):
            x, y = scale * rng.normal(size=(n, 4)), rng.integers(0, form.classes, n)
            for new in (*odd, -x[0], 9 * scale * rng.normal(size=4)):
                for clip in (1e-3, 0.7, 1e3):
                    other, labels = x.copy(), y.copy()
                    other[0], labels[0] = new, (y[0] + 1) % form.classes
                    one = _sum_clipped(form, params, x, y, clip)
                    two = _sum_clipped(form, params, other, labels, clip)
                    assert _norm2(one - two) <= MOVED**2


def sensitivity_covers_every_recipe():
    """Δ is at least what the theory says of each recipe; what has no bound is refused."""
    for n in (1, 5, 800):
        for steps in (1, 4):
            for group in (1, 3):
                part = min(group, n) / n
                record = Recipe(0.5, 3.0, steps=steps, group=group)
                assert record.sensitivity(n) >= 2 * 0.5 * 3.0 * part
                assert record.releases >= steps  # noise at every step: each is a release
                last = Recipe(0.5, 3.0, steps=steps, group=group, noise_at="last-step")
                assert last.sensitivity(n) >= 2 * 0.5 * 3.0 * (steps - 1 + part)
        assert Recipe(0.5, 3.0, unit="client").sensitivity(n) >= 2 * 0.5 * 3.0
        assert grid.grid_sensitivity("record", n) >= MOVED
        assert grid.grid_sensitivity("client", n) >= n * MOVED
    for wrong in ({"batch": 32}, {"clip": float("inf")}):
        try:
            Recipe(**{"learning_rate": 1.0, "clip": 1.0, **wrong}).sensitivity(100)
        except NoSensitivity:
            continue
        raise AssertionError("a recipe without a bound was given one")
    for weights in ((1.0, 1.01), (2.0,), (float("inf"), 1.0), (float("nan"), 1.0)):
        try:
            Recipe(1.0, 1.0, class_weights=weights)
        except InputError:
            continue
        raise AssertionError("a weight lets a clipped gradient grow beyond C")


def capacity_keeps_its_promise():
    """The μ² that a budget is worth is (ε, δ)-DP, whoever is sampled: the server sees who."""
    for epsilon in (0.1, 1.0, 4.0, 8.0, 20.0):
        for delta in (1e-3, 1e-5, 1e-9):
            for name in ("exact", "zcdp"):
                for sampling in (1.0, 0.3):
                    worth = calibration.capacity(
                        epsilon, delta, calibration=name, sampling=sampling
                    )
                    assert chance(epsilon, float(worth) ** 0.5) <= delta * (1 + 1e-6)
                worth = calibration.vault_capacity(epsilon, delta, calibration=name)
                assert chance(epsilon, float(worth) ** 0.5) <= delta * (1 + 1e-6)
    try:
        calibration.vault_capacity(20.0, 1e-3, calibration="paper")
    except InputError:
        return
    raise AssertionError("a vault took the paper's calibration")


def _mu2(paid, change):
    """Σ μ² of the noise of a price, exact."""
    noises = [*paid.noise, *([] if paid.loss_noise is None else [paid.loss_noise])]
    return sum(Fraction(change, noise) ** 2 for noise in noises)


def noise_is_worth_no_more_than_its_debit():
    """(Δ/σ)² ≤ what is booked, exactly: a record or twelve, several releases, a loss or none."""
    for capacity in (0.3, 2.0, 30.0):
        for horizon in (1, 7, 120):
            for loss in (False, True):
                for releases, change in ((1, MOVED), (3, MOVED), (1, 12 * MOVED)):
                    terms = Terms(clients=1, per_round=1, releases=releases)
                    tank = Tank.full(capacity)
                    paid = release.price(tank, Round(0, horizon), terms, change=change, loss=loss)
                    booked = Fraction(capacity) * sum(paid.units) / FULL
                    assert _mu2(paid, change) <= booked
                    assert sum(paid.units) <= FULL
    late = Tank.full(2.0)
    for _ in range(5):
        late = late.spend(1)
    steps = Terms(clients=1, per_round=1, releases=3)
    try:  # more turns than planned: all steps together cost no more than is left, or nothing
        paid = release.price(late, Round(0, 1), steps, change=MOVED)
    except TankEmpty:
        return
    assert sum(paid.units) <= int(late.left)


def offers_are_worth_their_units():
    """Whatever is offered, to the last unit of a tank: (Δ/σ)² ≤ what would be booked."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        tank = Tank.full(float(rng.uniform(0.1, 30)))
        tank = tank.spend(FULL - int(rng.integers(1, FULL >> int(rng.integers(0, 45)))))
        remaining = int(rng.integers(1, 50))
        for offer in (
            tank.offer(1.0, remaining),
            tank.offer_scaled(1.0, remaining, float(rng.uniform(0.2, 2))),
            tank.start_run().offer_scaled(1.0, 1, float(rng.uniform(0.2, 2))),
        ):
            if not offer.granted:
                continue
            booked = Fraction(float(tank.capacity)) * int(offer.units) / FULL
            assert 1 / Fraction(float(offer.sigma)) ** 2 <= booked
            assert int(offer.units) <= int(tank.left)


def no_release_is_below_the_floor():
    """σ/Δ is at least what the client asked for, whatever the server announces."""
    for floor in (0.5, 3.0):
        for horizon in (1, 2, 50):
            paid = release.price(Tank.full(30.0), Round(0, horizon), ONE, change=MOVED, floor=floor)
            assert min(paid.noise) >= floor * MOVED


def budgets_are_never_overspent():
    """A server that announces what it likes: Σ μ² of all releases stays within the capacity."""
    for seed in range(20):
        rng, tank, spent = np.random.default_rng(seed), Tank.full(2.5), Fraction(0)
        for t in range(40):
            spread = int(rng.choice([1, 3, 30])) if seed % 2 else None
            turn = Round(t, int(rng.choice([1, t + 1, 2 * t + 3, 1000])),
                         float(rng.choice([0.3, 1.0])), spread)  # fmt: skip
            try:
                paid = release.price(tank, turn, ONE, change=MOVED)
                tank = tank.spend(sum(paid.units))
            except TankEmpty:
                continue
            spent += _mu2(paid, MOVED)
        assert 0 < spent <= Fraction(2.5)


def _released(paid, *, steps=1, x=None, y=None, form=WIDE, loss_bound=None):
    start = {name: np.zeros(shape) for name, shape in form.shapes().items()}
    x = np.zeros((1, form.features)) if x is None else x
    y = np.zeros(len(x), dtype=int) if y is None else y
    return release.release(
        form, start, x, y, recipe=Recipe(1.0, 1.0, steps=steps), paid=paid,
        head={"kind": "upload"}, loss_bound=loss_bound,
    )  # fmt: skip


def _drawn(paid, **more):
    """The noise in an upload of nothing, in units of the σ paid for."""
    upload = _released(paid, **more)
    return upload.params["w"].astype(np.float64) / upload.sigma[0]


def the_noise_paid_for_is_there():
    """20,000 coordinates: σ within 4 % (false alarm < 1e-14), at every step and in the loss."""
    units = 2**33
    noise = _drawn(Price((1,), (units,)))
    assert abs(noise.std() - 1) < 0.04
    useless = _drawn(Price((1,), (units,)), x=np.full((1, WIDE.features), np.nan))
    assert abs(useless.std() - 1) < 0.04  # also where no record has a gradient
    twice = _drawn(Price((1, 1), (units, units)), steps=2)
    assert abs(twice.std() - 2**0.5) < 0.06
    upload = _released(Price((1,), (units,)))
    assert abs(upload.sigma[0] / (units / 2**30) - 1) < 1e-6
    many = [_released(Price((1,), (units,), 2**31), form=SMALL, loss_bound=1.0) for _ in range(200)]
    for name in SMALL.shapes():  # every coordinate for itself
        each = np.std([one.params[name] / one.sigma[0] for one in many], axis=0)
        assert np.all((each > 0.6) & (each < 1.5))  # 8 sd
    told = [one.loss for one in many]
    assert 0.7 < np.std(told) < 1.4  # σ_V = B·2³¹/2³¹/n = 1; false alarm < 1e-9


def a_loss_has_noise_of_its_own():
    """400 releases: the noise of the loss has nothing in common with that of any weight."""
    paid = Price((1,), (2**33,), 2**32)
    many = [_released(paid, form=SMALL, loss_bound=1.0) for _ in range(400)]
    told = [one.loss for one in many]
    for name in SMALL.shapes():
        each = np.array([one.params[name].ravel() for one in many])
        for noise in each.T:
            assert abs(np.corrcoef(noise, told)[0, 1]) < 0.4  # 8 sd


def noise_is_fresh():
    """Two messages, two steps, two halves of a message, two processes: nothing is used again."""
    paid = Price((1,), (2**33,))
    one, two = _drawn(paid), _drawn(paid)
    half = len(one) // 2
    for a, b in ((one, two), (one[:half], one[half:]), (one[:-1], one[1:])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.08  # 8 sd at least
        assert np.mean(a == b) < 0.01
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # JAX warns of forks where a test before this one loaded it
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os.write(writer, _drawn(paid)[:100].tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(reader, 800))
    assert np.mean(theirs == _drawn(paid)[:100]) < 0.5


def noise_has_its_shape():
    """200,000 draws: mean, σ, bell and the lowest bits (each false alarm < 1e-8)."""
    from scipy import stats  # a second to import, and a process a mutant

    drawn = secure_noise.draw(200_000, 2**33)
    scaled = drawn / 2**33
    assert abs(scaled.mean()) < 6 / 200_000**0.5
    assert abs(scaled.std() - 1) < 0.01
    assert stats.kstest(scaled, "norm").pvalue > 1e-8
    for bit in (0, 1, 9, 19):
        assert abs(np.mean((drawn >> bit) & 1) - 0.5) < 0.007
    small = secure_noise.draw(50_000, 2)
    values = np.arange(-4, 5)
    chance = np.exp(-(values**2) / 8)
    chance /= np.exp(-(np.arange(-60, 61) ** 2) / 8).sum()
    seen = np.array([np.sum(small == v) for v in values])
    assert np.all(np.abs(seen - 50_000 * chance) < 7 * np.sqrt(50_000 * chance) + 7)


def uploads_keep_mu():
    """The audit of messages, 600 runs a side at ε = 20: not refuted (false alarm < 1e-3)."""
    from sottovoce.studies.audit.messages import AuditSetting, measure

    assert not measure(AuditSetting(20.0, 1e-5, Recipe(2.0, 1.0)), 600).contradicts


def heads_say_nothing_private():
    """Neighbours write the same head, whatever a record holds; only public words are taken."""
    paid = Price((1,), (2**33,))
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, 4))
    heads = []
    for first in (x[0], 50 * x[0], np.full(4, np.nan), np.full(4, 1e300)):
        data = x.copy()
        data[0] = first
        try:
            upload = _released(paid, x=data, y=np.arange(5) % 3, form=SMALL)
        except Exception as error:
            raise AssertionError("an error would tell of a record") from error
        head = told(upload.blob)
        assert set(head) <= {*release.PUBLIC, "sigma"}
        heads.append((repr(sorted(head.items())), len(upload.blob)))
    assert len(set(heads)) == 1
    for word in ("loss", "gradient_norm", "accuracy", "seed"):
        try:
            release.release(
                SMALL, {k: np.zeros(s) for k, s in SMALL.shapes().items()}, x, np.zeros(5, int),
                recipe=Recipe(1.0, 1.0), paid=paid, head={word: 1.0},
            )  # fmt: skip
        except InputError:
            continue
        raise AssertionError(f"{word} would leave the client")


def one_record_moves_an_upload_by_its_sensitivity():
    """With the same noise, replacing a record by anything moves an upload by at most 2ηC/n."""
    paid, real = Price((1,), (2**33,)), secure_noise.draw
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(5, 4)), np.arange(5) % 3
    count = sum(int(np.prod(shape)) for shape in SMALL.shapes().values())
    frozen = real(count, 2**33)
    sent = []
    try:
        secure_noise.draw = lambda count, sigma: frozen
        for first in (x[0], -50 * x[0], np.zeros(4), np.full(4, np.nan), np.full(4, 1e300)):
            data = x.copy()
            data[0] = first
            sent.append(_released(paid, x=data, y=y, form=SMALL).params)
    finally:
        secure_noise.draw = real
    flat = np.array([np.concatenate([one[k].ravel() for k in sorted(one)]) for one in sent])
    assert np.all(np.linalg.norm(flat - flat[0], axis=1) <= 2 / 5 + 1e-5)  # float32 in the upload


def uploads_lie_on_the_public_grid():
    """Every uploaded value is float32(w − one·k) for a whole k: none rules out a data set."""
    rng = np.random.default_rng(7)
    for form in (SMALL, Form("softmax", (4,), 3), Form("svm", (4,), 2, {"kappa": 0.05})):
        for steps in (1, 2):
            start = {
                name: rng.normal(size=shape).astype(np.float32).astype(np.float64)
                for name, shape in form.shapes().items()
            }
            x, y = rng.normal(size=(7, 4)), np.arange(7) % form.classes
            assert attack_upload(release, form, start, x, y, Recipe(0.7, 1.3, steps=steps)).all()
    paid = Price((1,), (2**33,), 2**33)
    upload = _released(paid, x=x, y=np.arange(7) % 3, form=SMALL, loss_bound=0.3)
    k = round(upload.loss * 7 / 0.3 * 2**31)
    assert upload.loss == 0.3 * (k / 2**31) / 7


def every_byte_of_entropy_counts():
    """A message's noise rests on 48 bytes of the system's: any of them changes all of it."""
    real, text = os.urandom, bytes(range(48))

    def drawn(place, flip=0):
        left = bytearray(text)
        left[place] ^= flip

        def urandom(count):
            assert len(left) >= count, "a message takes 48 bytes of entropy, and no more"
            taken = bytes(left[:count])
            del left[:count]
            return taken

        os.urandom = urandom
        try:
            noise = secure_noise.draw(50, 2**33)
        finally:
            os.urandom = real
        assert not left, "a message takes 48 bytes of entropy, and no less"
        return noise

    first = drawn(0)
    assert np.array_equal(first, drawn(0))
    for place in range(48):
        for flip in (1, 128):
            assert not np.any(first == drawn(place, flip))  # by chance: 4800 · 2⁻³⁴


def only_release_makes_uploads():
    """Nothing else can make bytes that may leave."""
    try:
        release.Upload(object(), b"raw", {}, (1.0,), None)
    except TypeError:
        return
    raise AssertionError("an upload was made of raw values")


def what_was_not_paid_for_is_refused():
    """Every step and the loss want a price of their own."""
    for paid, steps, bound in (
        (Price((1,), (2**33,)), 2, None),
        (Price((1,), (2**33,)), 1, 1.0),
    ):
        try:
            _released(paid, steps=steps, form=SMALL, loss_bound=bound)
        except InputError:
            continue
        raise AssertionError("something was released that nobody paid for")


def losses_are_bounded():
    """Replacing one loss, by anything, moves the sum by at most 2³¹ units."""
    rng = np.random.default_rng(2)
    for _ in range(50):
        values = rng.normal(size=6) * 5
        for odd in (np.nan, np.inf, -np.inf, -7.0, 1e9, 0.3):
            other = values.copy()
            other[0] = odd
            moved = grid.bounded_sum(values, 2.0) - grid.bounded_sum(other, 2.0)
            assert abs(moved) <= MOVED


def nobody_is_asked_more_than_planned():
    """Balanced cohorts: after T rounds everyone had ⌊KT/U⌋ or ⌈KT/U⌉ turns."""
    rng, asked = np.random.default_rng(3), np.zeros(11, np.int64)
    for t in range(1, 60):
        asked[pick_cohort("balanced", asked=asked, size=4, rng=rng)] += 1
        assert asked.max() <= ceil(4 * t / 11)


def trains(module="simulation.round"):
    """Not a killer: whether the package still trains to a finite loss, as a mutant must.

    A client's turns are played; where they do not load the module that is mutated, so are rounds of
    the simulator and of a server. A module that no training loads (`BESIDE`) is loaded; one of
    Flower's answers a message, one of the ledger's states what a vault has.
    """
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(30, 4)), rng.integers(0, 3, 30)
    now = {name: 0.3 * rng.normal(size=shape) for name, shape in SMALL.shapes().items()}
    tank = Tank.full(4.0)
    for t in range(4):
        paid = release.price(tank, Round(t, 4), ONE, change=grid.grid_sensitivity("record", len(y)))
        tank = tank.spend(sum(paid.units))
        sent = release.release(
            SMALL, now, x, y, recipe=Recipe(0.5, 1.0), paid=paid, head={"kind": "upload"}
        )
        now = {name: leaf.astype(np.float64) for name, leaf in sent.params.items()}
    loss = float(np.mean(base.sample_losses(SMALL, now, x, y)))
    node = make_node(folder())
    first = kind(device.answer_request(ask().to_blob(), node))
    if module.startswith("flower."):  # what no round in one process loads must still load
        importlib.import_module(f"sottovoce.{module}")
    return (
        bool(np.isfinite(loss))
        and first == "upload"
        and (not module.startswith("flower.") or answers(node))
        and (module != "client.ledger" or states(node))
        and (module.startswith(BESIDE) or f"sottovoce.{module}" in sys.modules or runs(module))
        and importlib.import_module(f"sottovoce.{module}") is not None
    )


def states(node):
    """Whether the statement of the node's vault has the upload that it has made."""
    from sottovoce.client import ledger

    return ledger.read_statement(node.vault).answered == 1


def runs(module):
    """Whether it simulates two runs and coordinates a third, to finite losses, by this module.

    Once with simulated noise and once with secure noise, whose engine is loaded for it.
    """
    from sottovoce import simulate
    from sottovoce.server.coordinator import Patience, conduct
    from support.in_process import Direct, clients, draw, plan, public

    short = plan(**{"rounds.rounds": 2, "data.validation": 20, "data.test": 20})
    records = [simulate(short, data=draw(200, 3), seed=1).record]
    rows = {"data": [draw(40, 100 + i) for i in range(3)], "validation": draw(60, 1)}
    secure_plan = plan(**{"rounds.rounds": 2}).replace(noise="secure")
    records.append(simulate(secure_plan, test=draw(60, 2), **rows).record)
    own, where = plan(**{"rounds.rounds": 1, "data.clients": 2}), folder()
    nodes = Direct(clients(where, 2))
    done = conduct(own, public(), nodes, Patience(2, gathering=0.5), out=where / "run")
    records.append(done.record)
    losses = [entry["validation_loss"] for record in records for entry in record["rounds"]]
    finite = all(loss is not None and np.isfinite(loss) for loss in losses)
    return len(losses) == 5 and finite and f"sottovoce.{module}" in sys.modules


def answers(node):
    """Whether the worker beside a SuperNode answers a round of training with an upload."""
    from types import SimpleNamespace

    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from sottovoce.flower import client_app, transport, worker

    for name in ("_run_id", "_node_id", "_task_id"):  # who sends: Flower tells it before a run
        setattr(TaskIdentity, name, 1)
    asked = RecordDict({transport.RECORD: ConfigRecord({"request": ask(t=1).to_blob()})})
    context = SimpleNamespace(node_config={"node": str(node.vault.with_suffix(".toml"))})
    reply = worker._answer(client_app.app, Message(asked, 1, "train"), context)
    blob = transport.read_record(reply, "answer", client_app.LIMIT)
    return blob is not None and kind(blob) == "upload"


KILLERS = [
    sums_stay_within_sensitivity, sensitivity_covers_every_recipe, capacity_keeps_its_promise,
    noise_is_worth_no_more_than_its_debit, offers_are_worth_their_units,
    no_release_is_below_the_floor, budgets_are_never_overspent, the_noise_paid_for_is_there,
    a_loss_has_noise_of_its_own, noise_is_fresh, noise_has_its_shape, uploads_keep_mu,
    heads_say_nothing_private, one_record_moves_an_upload_by_its_sensitivity,
    uploads_lie_on_the_public_grid, every_byte_of_entropy_counts,
    only_release_makes_uploads, what_was_not_paid_for_is_refused,
    losses_are_bounded, nobody_is_asked_more_than_planned, *LEDGER, *RUNS,
]  # fmt: skip
