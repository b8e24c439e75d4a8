"""Uploads that are none: each is refused in a sentence, and no bytes raise anything else.

The honest ones are made by a real device with a real vault. A `Scene` changes one thing of
an honest upload and seals it again, so that only the check in question can notice.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from sottovoce.client import device, messages, release
from sottovoce.client.vault import Policy
from sottovoce.errors import InputError, Malformed, OtherVersion
from sottovoce.models.base import Form
from sottovoce.privacy import calibration
from sottovoce.privacy.calibration import LOOSEST, capacity
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.schedules.pricing import Terms
from sottovoce.server import checks
from sottovoce.server.checks import AcceptedUpload, ExpectedUpload
from sottovoce.server.members import Account, Member
from support.devices import ask, make_node, opened, sealed, written
from support.in_process import CLASSES, FEATURES, HIDDEN, SIX, draw

MLP = Form("mlp", (FEATURES,), CLASSES, {"hidden": HIDDEN})  # 275 parameters
WIDE = Form("mlp", (FEATURES,), CLASSES, {"hidden": 64})  # 2,179
SVM = Form("svm", (FEATURES,), 2, {"kappa": 0.01})
CNN = Form("cnn", (6, 5, 1), CLASSES, {"channels": 2})
CEILING = 100.0


def short(changes):
    return repr(changes)[:40]


def weights(form, seed=3):
    rng = np.random.default_rng(seed)
    return {n: (0.1 * rng.normal(size=s)).astype(np.float32) for n, s in form.shapes().items()}


def request(form=MLP, **changes):
    return ask(params=weights(form), form=form, **changes)


def expected(member, asked):
    return ExpectedUpload(asked, asked.hash(), member, ceiling=CEILING)


class Scene:
    """One client, one request, its honest upload, and what the server expects."""

    def __init__(self, folder, asked=None, **policy):
        form = MLP if asked is None else asked.form
        self.asked = request() if asked is None else asked
        self.node = make_node(folder, self._rows(form), classes=form.classes, **policy)
        self.member = Member.from_hello(device.make_greeting(self.node))
        self.expected = expected(self.member, self.asked)
        self.blob = device.answer_request(self.asked.to_blob(), self.node)
        self.head, self.arrays = messages.unpack(self.blob)

    def _rows(self, form):
        x, y = draw(40, 7)
        return x, y % form.classes

    def read(self, blob):
        return checks.check_answer(blob, self.expected)

    def with_head(self, **changes):
        """The honest upload with other things in its head; a dot reaches into an object."""
        head = copy.deepcopy(self.head)
        for name, value in changes.items():
            *way, last = name.split("__")
            place = head
            for key in way:
                place = place[key]
            if value is ...:
                del place[last]
            else:
                place[last] = value
        return messages.pack(head, self.arrays)

    def with_arrays(self, arrays):
        return messages.pack(self.head, {k: np.asarray(v, np.float32) for k, v in arrays.items()})

    def with_number(self, name, place, value):
        leaf = self.arrays[name].copy()
        leaf.reshape(-1)[place] = value
        return self.with_arrays(self.arrays | {name: leaf})


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("wide"), request(WIDE))


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    asked = ask(params=weights(SIX), form=Form("own", (FEATURES,), CLASSES))
    return Scene(tmp_path_factory.mktemp("six"), asked, own="support.in_process:SIX")


@pytest.fixture(scope="module")
def telling(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("telling"), request(loss_bound=2.0))


PLACES = [("b1", 0), ("b2", 2), ("w1", 0), ("w1", 117), ("w1", 239), ("w2", 0), ("w2", 23)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38, -1e38, 1e20, 50.0])
@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_number_that_no_step_and_noise_gives(scene, name, place, value):
    with pytest.raises(Malformed, match=r"not finite|further from the model"):
        scene.read(scene.with_number(name, place, value))


def of_one(change):
    """The change made to one array after the other, where it changes its shape."""
    return lambda arrays: (
        {**arrays, name: other}
        for name, leaf in arrays.items()
        if (other := change(leaf)).shape != leaf.shape
    )


SHAPES = {
    "turned": of_one(lambda leaf: leaf.T if leaf.ndim > 1 else leaf[:, None]),
    "flat": of_one(lambda leaf: leaf.reshape(-1) if leaf.ndim > 1 else leaf[None]),
    "one more dimension": of_one(lambda leaf: leaf[..., None]),
    "broadcastable": of_one(lambda leaf: leaf[..., :1]),
    "0-d": of_one(lambda leaf: leaf.reshape(-1)[0]),
    "empty": of_one(lambda leaf: leaf[:0]),
    "missing": lambda arrays: ({k: v for k, v in arrays.items() if k != n} for n in arrays),
    "extra": lambda arrays: (
        {**arrays, n: np.ones(3, np.float32)} for n in ("b3", "W1", "w1/0", "__class__", "x")
    ),
    "renamed": lambda arrays: (
        {k if k != n else n + "x": v for k, v in arrays.items()} for n in arrays
    ),
    "another's": lambda arrays: (
        {**arrays, one: arrays[two], two: arrays[one]} for one in arrays for two in arrays
        if arrays[one].shape != arrays[two].shape
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_arrays_that_are_not_those_of_the_model(scene, six, kind):
    """In every array of two models: four of the mlp, and six of up to four dimensions."""
    count = 0
    for own in (scene, six):
        for arrays in SHAPES[kind](own.arrays):
            with pytest.raises(Malformed, match=r"arrays do not have|bytes, and at most"):
                own.read(own.with_arrays(arrays))
            count += 1
        with pytest.raises(Malformed, match="arrays do not have"):
            own.read(own.with_arrays({}))
    assert count >= 10


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int64, np.int8, np.complex128, bool])
def test_numbers_of_another_type(scene, six, kind):
    """There is no way to say a type: other bytes have another length, and are refused for it."""
    for own in (scene, six):
        text, _ = opened(own.blob)
        for name in own.arrays:  # one array of another type, in each of ten places
            body = b"".join(
                leaf.astype(kind if other == name else np.float32).tobytes()
                for other, leaf in sorted(own.arrays.items())
            )
            with pytest.raises(Malformed, match="do not have the sizes"):
                own.read(written(text, body))
        with pytest.raises(Malformed):
            own.read(written({**text, "dtype": np.dtype(kind).name}, b""))


HEADS = [
    *({"samples": n} for n in (-40, 0, 39, 41, 40.0, True, None, "40", 10**400, [40])),
    *({"weight": n} for n in (1, -1.0, 0, 1e30, "1")),
    *({key: ...} for key in ("samples", "sigma", "receipt", "budget", "request", "t", "run")),
    *({"t": t} for t in (1, -1, 7, True, 0.0, "0", None, 10**400)),
    *({"run": run} for run in ("0badc0df", "", "0BADC0DE", None, 7, "0badc0de ")),
    *({"request": h} for h in ("0" * 64, "", None, 0, ["a"])),
    *({"receipt__vault": v} for v in ("ab" * 16, "", None, 7, "../x")),
    *({"receipt__seq": n} for n in (-1, 2**53, 1.0, True, None, 10**400)),
    *({"receipt": r} for r in (None, [], {}, "x", 1)),
    *({"kind": k} for k in ("Upload", "hello", None, 1, ["upload"])),
    *({"schema": s} for s in ("sottovoce.answer/2", "", None, 1, "sottovoce.request/1")),
    *({"loss": 0.5, "loss_sigma": s} for s in (1.0, 1e30, 0, -1.0, "x")),  # nobody asked for one
    *({key: 1.0} for key in ("accuracy", "norm", "gradient", "seed", "")),
]


@pytest.mark.parametrize("changes", HEADS, ids=short)
def test_heads_that_are_not_an_upload_to_this_request(scene, changes):
    with pytest.raises(Malformed):
        scene.read(scene.with_head(**changes))


BUDGETS = [
    *({"spent": n} for n in (-1.0, 0, 1e9, 10**400, "0", True, None)),
    *({"epsilon": n} for n in (0, -8.0, 7.9, 1e-300, 10**400, None)),
    *({"delta": n} for n in (0, 1, 0.9, 1e-6, -1e-5, "x")),
    *({"capacity": n} for n in (0, -1.0, 1e-300, 1e299, 10**400)),
    *({key: ...} for key in ("epsilon", "delta", "capacity", "spent")),
    {"rounds": 1},
]


@pytest.mark.parametrize("changes", BUDGETS, ids=short)
def test_budgets_that_are_not_the_clients(scene, changes):
    with pytest.raises(Malformed):
        scene.read(scene.with_head(**{f"budget__{key}": v for key, v in changes.items()}))


@pytest.mark.parametrize("budget", [[], "x", 1, {}])
def test_a_budget_that_is_none(scene, budget):
    with pytest.raises(Malformed):
        scene.read(scene.with_head(budget=budget))


def test_a_budget_that_is_hidden_in_mid_run(scene):
    blob = scene.with_head(budget=None)
    assert scene.read(blob).account is None
    with pytest.raises(Malformed, match="hides its budget, which its weight is"):
        checks.check_answer(blob, replace(scene.expected, disclosed=True))


def test_a_budget_that_was_hidden_is_not_shown_again(scene):
    """Nor does a vault: what was booked in between is not known."""
    hidden = replace(scene.expected, member=replace(scene.member, account=None))
    assert checks.check_answer(scene.with_head(budget=None), hidden).account is None
    with pytest.raises(Malformed, match="shows a budget that its client has hidden before"):
        checks.check_answer(scene.blob, hidden)


def test_a_budget_that_is_looser_than_the_greeting(scene):
    """16 is worth what it says, and is not what its client greeted with."""
    worth = float(calibration.capacity(16.0, 1e-5))
    loose = {"epsilon": 16.0, "delta": 1e-5, "capacity": worth, "spent": worth / 2}
    with pytest.raises(Malformed, match="looser than the budget of the client's greeting"):
        scene.read(scene.with_head(budget=loose))


@pytest.mark.parametrize("schema", ["sottovoce.answer/2", "sottovoce.answer/10"])
def test_an_answer_in_another_version(scene, schema):
    with pytest.raises(OtherVersion, match=rf"{schema[10:]} and sottovoce \S+ reads answer/1"):
        scene.read(scene.with_head(schema=schema))


SIGMAS = [1e30, 1e200, 1e308, 1e-30, 5e-324, 0, -1.0, 10**400, "1", None, True, [1.0], {}]


@pytest.mark.parametrize("sigma", SIGMAS, ids=short)
def test_a_sigma_that_is_none(scene, sigma):
    for claim in ([sigma], sigma, [scene.head["sigma"][0], sigma], [sigma] * 2, []):
        with pytest.raises(Malformed):
            scene.read(scene.with_head(sigma=claim))


@pytest.mark.parametrize("factor", [1e-6, 0.5, 0.9, 0.999999, 4.0, 100.0, 1e6])
def test_a_sigma_that_was_not_the_noise(scene, factor):
    """Less than was booked for, or more than the upload shows: 275 numbers tell 2σ from σ."""
    with pytest.raises(Malformed):
        scene.read(scene.with_head(sigma=[scene.head["sigma"][0] * factor]))


def test_a_sigma_beyond_floor_and_ceiling_is_named(scene):
    delta = scene.expected.sensitivity
    for sigma in (CEILING * delta * 1.001, scene.member.floor * delta * 0.999):
        with pytest.raises(Malformed, match="below the client's floor or above"):
            scene.read(scene.with_head(sigma=[sigma]))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_client_without_disclosed_budget_has_noise_that_a_vault_could_buy(tmp_path, steps):
    """No vault has more than (1e6, 0.5): a claim of less noise than all of it buys is refused."""
    own = Scene(tmp_path, request(recipe=Recipe(1.0, 1.0, steps=steps)), disclose=False)
    assert own.member.account is own.member.floor is None
    least = own.expected.sensitivity / math.sqrt(capacity(*LOOSEST))
    bare = messages.unpack(own.blob)[0]
    for sigma in (5e-324, 1e-300, 1e-12, 0.999 * least, least * math.sqrt(steps) * 0.999):
        # The model as it was, and the model one float32 further: no noise in either.
        for arrays in (own.asked.params, {n: np.nextafter(a, np.float32(1))
                                          for n, a in own.asked.params.items()}):  # fmt: skip
            with pytest.raises(Malformed, match="than any vault could have paid"):
                own.read(messages.pack(bare | {"sigma": [sigma] * steps}, dict(arrays)))


@pytest.mark.parametrize("calibration", ["exact", "zcdp"])
def test_the_loosest_vault_of_all_is_not_refused(tmp_path, calibration):
    """The largest budget that a vault takes, all of it in one release: the bound refuses nobody."""
    loosest = {"epsilon": LOOSEST[0], "delta": LOOSEST[1], "calibration": calibration}
    for i, steps in enumerate((1, 3)):
        asked = request(recipe=Recipe(1.0, 1.0, steps=steps), horizon=1)
        own = Scene(tmp_path / f"{i}", asked, disclose=False, floor=1e-9, **loosest)
        assert isinstance(own.read(own.blob), AcceptedUpload)
        worth = sum((own.expected.sensitivity / sigma) ** 2 for sigma in own.head["sigma"])
        if calibration == "exact":
            assert worth > 0.999 * capacity(*LOOSEST)  # and it is not far from the bound
    with pytest.raises(InputError, match="epsilon must be"):
        Policy(LOOSEST[0] * 1.001, LOOSEST[1], 40, 1.0)


def test_an_upload_that_nothing_was_booked_for(scene):
    """The next upload with the same account: its noise is right, its books are not."""
    account = scene.member.account
    after = replace(scene.member, account=replace(account, spent=scene.head["budget"]["spent"]))
    with pytest.raises(Malformed, match="less noise than its client has paid for"):
        checks.check_answer(scene.blob, replace(scene.expected, member=after))
    assert scene.head["budget"]["spent"] > account.spent


def test_a_large_budget_buys_no_upload_that_is_not_booked_in_full(scene):
    """A little less in each of many rounds would be more than the run's record allows."""
    worth = capacity(*LOOSEST)
    rich = Account(LOOSEST[0], LOOSEST[1], worth, 0.0)
    known = replace(scene.expected, member=replace(scene.member, account=rich))
    paid = (scene.expected.sensitivity / scene.head["sigma"][0]) ** 2
    for part, counts in ((1.0, True), (1 - 1e-8, False)):
        blob = scene.with_head(budget=asdict(replace(rich, spent=paid * part)))
        if counts:
            assert checks.check_answer(blob, known).account.spent == paid
        else:
            with pytest.raises(Malformed, match="less noise than its client has paid for"):
                checks.check_answer(blob, known)


def test_every_step_of_an_upload_is_paid_for(tmp_path):
    """Three steps with the noise of three, and books that know of fewer."""
    three = Scene(tmp_path, request(recipe=Recipe(1.0, 1.0, steps=3)))
    assert isinstance(three.read(three.blob), AcceptedUpload)
    worth = [(three.expected.sensitivity / sigma) ** 2 for sigma in three.head["sigma"]]
    assert len(worth) == 3
    for paid in (worth[0], worth[0] + worth[1], sum(worth) * (1 - 1e-6)):
        spent = three.member.account.spent + paid
        with pytest.raises(Malformed, match="less noise than its client has paid for"):
            three.read(three.with_head(budget__spent=spent))


@pytest.mark.parametrize("which", ["scene", "wide", "small"])
@pytest.mark.parametrize("seed", range(5))
def test_an_upload_without_its_noise(which, seed, request):
    """The model itself, a step, a third of the noise: nearer than the claimed σ lets it be.

    Of 31 numbers whose step is as long as their noise only the model itself is told at once.
    """
    own = request.getfixturevalue(which)
    form, sigma, rng = own.asked.form, own.head["sigma"][0], np.random.default_rng(seed)
    start = {n: a.astype(np.float64) for n, a in own.asked.params.items()}
    x, y = draw(40, 7 + seed)
    step = release.step(form, start, x, y % form.classes, own.asked.recipe)
    third = {n: a + sigma / 3 * rng.normal(size=a.shape) for n, a in step.items()}
    for arrays in (start,) if which == "small" else (start, step, third):
        with pytest.raises(Malformed, match=r"nearer to the model than|no noise was added"):
            own.read(own.with_arrays(arrays))
    whole = {n: a + sigma * rng.normal(size=a.shape) for n, a in step.items()}
    assert isinstance(own.read(own.with_arrays(whole)), AcceptedUpload)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """31 numbers, so that σ(√d − 8) − ηC is far below 0."""
    asked = request(SVM, recipe=Recipe(1.0, 0.01), horizon=60)
    return Scene(tmp_path_factory.mktemp("small"), asked)


def test_numbers_that_no_noise_was_added_to(scene):
    """A layer that was forgotten: three of 275 numbers came back as they were sent."""
    honest, sent = scene.arrays, scene.asked.params
    for name, some in (("b1", slice(8)), ("b2", slice(3)), ("w2", slice(5, 8))):
        leaf = honest[name].copy()
        leaf.reshape(-1)[some] = sent[name].reshape(-1)[some]
        with pytest.raises(Malformed, match="repeats numbers of the model without any noise"):
            scene.read(scene.with_arrays(honest | {name: leaf}))
    one = honest["b1"].copy()
    one[0] = sent["b1"][0]  # by chance once in 60,000 uploads: no reason to refuse
    assert isinstance(scene.read(scene.with_arrays(honest | {"b1": one})), AcceptedUpload)


def seen_rounds(scene, moved, rounds):
    """After how many uploads a client is refused whose uploads lie at w + moved(t)."""
    shown, flat = (0.0, 0), np.concatenate([a.ravel() for a in scene.asked.params.values()])
    for t in range(rounds):
        far = (flat + moved(t)).astype(np.float32)
        arrays, at = {}, 0
        for name, leaf in scene.asked.params.items():
            arrays[name] = far[at : at + leaf.size].reshape(leaf.shape)
            at += leaf.size
        try:
            read = checks.check_answer(
                scene.with_arrays(arrays), replace(scene.expected, shown=shown)
            )
        except Malformed:
            return t + 1
        shown = read.shown
    return None


@pytest.mark.parametrize(("part", "rounds"), [(0.01, 1), (0.1, 2), (0.3, 5), (0.5, 11), (0.7, 37)])
def test_a_client_that_forgets_its_noise_is_found_in_the_end(small, part, rounds):
    """31 numbers and steps with ‖s‖² = part·σ²d: the rounds follow from Chernoff's bound."""
    sigma, rng = small.head["sigma"][0], np.random.default_rng(3)

    def step(t):
        s = rng.normal(size=31)
        return s * math.sqrt(part * 31) * sigma / np.linalg.norm(s)

    assert seen_rounds(small, step, 100) == rounds
    exact = 2 * math.log(1e-14) / (math.log(part) + 1 - part) / 31
    assert rounds == math.ceil(exact)


@pytest.mark.slow
def test_honest_noise_is_never_found_wanting(small):
    """20,000 uploads of one client that never takes a step, which is the least they can show."""
    sigma, rng = small.head["sigma"][0], np.random.default_rng(4)
    assert seen_rounds(small, lambda t: sigma * rng.normal(size=31), 20_000) is None


@pytest.mark.parametrize("degrees", [1, 2, 3, 10, 31, 100, 1000, 10**5])
def test_the_noise_test_hardly_ever_refuses_an_honest_upload(degrees):
    """Where Chernoff's bound is 1e-14 the exact probability is no larger."""
    low, high = 1e-300, 1.0
    for _ in range(2000):
        x = math.sqrt(low * high)
        if degrees / 2 * (math.log(x) + 1 - x) < checks.RARE:
            low = x
        else:
            high = x
    assert chi2.cdf(low * degrees, degrees) <= 1e-14
    assert math.exp(checks.RARE) <= 1e-14 * (1 + 1e-12)


def push(own, by):
    """The honest upload's model pushed as far as the claimed noise would let it."""
    sigma = own.head["sigma"][0] * by
    far = (1 + sigma * (math.sqrt(275) + 8)) * 0.98 / math.sqrt(275)
    head = copy.deepcopy(own.head)
    head["sigma"] = [sigma]
    return messages.pack(
        head, {n: (w + far).astype(np.float32) for n, w in own.asked.params.items()}
    )


@pytest.mark.parametrize("spread", [None, 8])
def test_a_claim_of_more_noise_than_the_budget_calls_for_goes_no_further(tmp_path, spread):
    asked = request(scale=1.0, spread=spread)
    own = Scene(tmp_path, asked)
    account = own.member.account
    known = replace(own.expected, terms=Terms(3, 3), opened=account.spent)
    assert isinstance(checks.check_answer(own.blob, known), AcceptedUpload)
    assert isinstance(checks.check_answer(push(own, 1.0), known), AcceptedUpload)
    for by in (1.3, 2.0, 4.0, 15.0):
        assert isinstance(
            checks.check_answer(push(own, by), own.expected), AcceptedUpload
        )  # the ceiling alone
        with pytest.raises(Malformed, match="further from the model"):
            checks.check_answer(push(own, by), known)
    silent = replace(known, member=replace(own.member, account=None))
    head = copy.deepcopy(own.head) | {"budget": None}
    assert isinstance(checks.check_answer(messages.pack(head, own.arrays), silent), AcceptedUpload)


LOSSES = [
    *({"loss": n} for n in (1e3, -1e3, 1e300, 10**400, None, "x", True)),
    *({"loss_sigma": n} for n in (0, -1.0, 1e-9, 1e30, 10**400, None, "x")),
    {"loss": 1e30, "loss_sigma": 1e30},  # a loss that would steer the schedule by itself
    {"loss": ...},
    {"loss_sigma": ...},
]


@pytest.mark.parametrize("changes", LOSSES, ids=short)
def test_losses_that_are_none(telling, changes):
    assert isinstance(telling.read(telling.blob), AcceptedUpload)
    with pytest.raises(Malformed):
        telling.read(telling.with_head(**changes))


def test_a_loss_that_nothing_was_booked_for(telling):
    """Books that cover the noise of the model alone: the loss beside it is one release more."""
    own = telling.expected
    model = (own.sensitivity / telling.head["sigma"][0]) ** 2
    loss = (own.loss_sensitivity / telling.head["loss_sigma"]) ** 2
    before = telling.head["budget"]["spent"]
    assert isinstance(telling.read(telling.blob), AcceptedUpload)
    for paid in (model, model + 0.9 * loss):
        known = replace(telling.member.account, spent=before - paid)
        member = replace(telling.member, account=known)
        with pytest.raises(Malformed, match="less noise than its client has paid for"):
            checks.check_answer(telling.blob, replace(own, member=member))


def test_replays_of_other_rounds_and_runs(scene, tmp_path):
    other = make_node(tmp_path, draw(40, 7), classes=CLASSES)
    member = Member.from_hello(device.make_greeting(other))
    for changed in (request(t=1), request(run="0badc0de" * 2), request(horizon=9),
                    ask(form=MLP, params=weights(MLP, seed=4))):  # fmt: skip
        with pytest.raises(Malformed, match="for another"):
            checks.check_answer(scene.blob, expected(scene.member, changed))
    with pytest.raises(Malformed, match=r"receipt belongs to another client"):
        checks.check_answer(scene.blob, expected(member, scene.asked))


def test_bytes_that_are_cut_off_or_too_many(scene):
    size = len(scene.blob)
    for length in (0, 1, 11, 12, 16, 40, size // 2, size - 33, size - 32, size - 1):
        with pytest.raises(Malformed):
            scene.read(scene.blob[:length])
    for more in (b"\0", b"\0" * 32, scene.blob, b"\0" * 10**6):
        with pytest.raises(Malformed):
            scene.read(scene.blob + more)
    with pytest.raises(Malformed, match="bytes, and at most"):
        scene.read(b"\0" * (scene.expected.longest + 1))
    for no_bytes in (None, "text", bytearray(scene.blob), 7, [scene.blob]):
        with pytest.raises(Malformed):
            scene.read(no_bytes)  # type: ignore[arg-type]


def test_heads_that_are_no_json_of_ours(scene):
    text, body = opened(scene.blob)
    plain = written(text, body)
    assert plain == scene.blob
    deep = b"[" * 10**5
    for broken in (b"", b"null", b"{}", deep, b'{"arrays":[],"head":NaN}', b"\xff\xfe", b"1" * 5000,
                   b'{"arrays":[],"head":{"sigma":1e999}}', b'{"arrays":[],"head":{},"head":{}}',
                   b'{"head":{},"arrays":[]}', b' {"arrays":[],"head":{}}'):  # fmt: skip
        with pytest.raises(Malformed):
            scene.read(sealed(broken, body))


def test_two_thousand_random_edits_are_noticed(scene):
    """Bytes changed, dropped, doubled or moved: refused, or the very same arrays."""
    rng, blob = np.random.default_rng(11), scene.blob
    for _ in range(2000):
        edited, place = bytearray(blob), int(rng.integers(len(blob)))
        match rng.integers(4):
            case 0:
                edited[place] ^= int(rng.integers(1, 256))
            case 1:
                del edited[place : place + int(rng.integers(1, 9))]
            case 2:
                edited[place:place] = rng.bytes(int(rng.integers(1, 9)))
            case 3:
                other = int(rng.integers(len(blob)))
                edited[place], edited[other] = edited[other], edited[place]
        try:
            read = scene.read(bytes(edited))
        except Malformed:
            assert bytes(edited) != blob
            continue
        assert isinstance(read, AcceptedUpload)
        assert {k: v.tobytes() for k, v in read.params.items()} == {
            k: v.tobytes() for k, v in scene.arrays.items()
        }


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(place=st.integers(0, 2**32), value=st.integers(1, 255), few=st.integers(1, 4))
def test_edits_with_a_right_checksum_break_nothing(scene, place, value, few):
    """Whoever can edit can also seal: refused, or arrays that an honest client could have sent."""
    body = bytearray(scene.blob[:-32])
    for i in range(few):
        body[12 + (place + 7919 * i) % (len(body) - 12)] ^= value
    start = len(messages.MAGIC) + 4
    length = int.from_bytes(body[12:start], "little")
    blob = sealed(bytes(body[start : start + length]), bytes(body[start + length :]))
    try:
        read = scene.read(blob)
    except Malformed:
        return
    assert isinstance(read, AcceptedUpload)
    moved = [read.params[n].astype(float) - scene.asked.params[n] for n in read.params]
    size = math.sqrt(sum(float(np.sum(m**2)) for m in moved))
    assert size <= 1.001 * (1 + read.sigma[0] * (math.sqrt(275) + 8))


def test_refusals_are_read_and_their_words_are_not_kept(scene):
    for code in ("empty", "policy", "replay", "vault"):
        said = messages.pack({"schema": "sottovoce.answer/1", "kind": "refusal", "code": code,
                          "text": "\x1b[2J<script>"})  # fmt: skip
        assert scene.read(said) == code
    for code in ("\x1b[2J", "", None, 10**400, ["empty"], {"a": 1}):
        said = messages.pack({"schema": "sottovoce.answer/1", "kind": "refusal", "code": code})
        assert scene.read(said) == "internal"


HONEST = [
    *({"asked": request(t=t)} for t in range(6)),
    *({"asked": request(SVM, t=t)} for t in range(3)),
    {"asked": request(CNN)},
    *({"asked": request(recipe=Recipe(0.5, 1.0, steps=n))} for n in (2, 3)),
    *({"asked": request(recipe=Recipe(1.0, 1.0, unit="client"), loss_bound=b)} for b in (None, 1)),
    {"asked": request(loss_bound=3.0, recipe=Recipe(0.1, 0.01, steps=2))},
    {"asked": request(recipe=Recipe(1e-3, 1e-6))},
    {"asked": request(horizon=1)},
    {"disclose": False},
    {"disclose": False, "asked": request(loss_bound=1.0)},
    {"calibration": "zcdp", "unit": "client", "asked": request(recipe=Recipe(1, 1, unit="client"))},
]


@pytest.mark.slow
def test_twenty_honest_uploads_count(tmp_path):
    assert len(HONEST) == 20
    for i, how in enumerate(HONEST):
        own = Scene(tmp_path / f"{i}", **how)
        read = own.read(own.blob)
        assert isinstance(read, AcceptedUpload), how
        assert {k: v.tobytes() for k, v in read.params.items()} == {
            k: v.tobytes() for k, v in own.arrays.items()
        }
        assert (read.account is None) == (how.get("disclose") is False)


@pytest.mark.parametrize("d", [1, 2, 10, 64, 65, 100, 1000, 10**5, 10**7])
def test_the_norm_check_hardly_ever_refuses_an_honest_upload(d):
    """‖Z‖/σ beyond √d ± 8: below 1e-13 together, from the exact distribution of χ²."""
    low = chi2.cdf(max(0.0, math.sqrt(d) - checks.SLACK) ** 2, d)
    assert low + chi2.sf((math.sqrt(d) + checks.SLACK) ** 2, d) < 1e-13


def test_an_own_model_of_many_arrays_fits_into_its_limit(scene):
    """3,000 arrays with long names: naming them takes more than a head has room for."""
    many = {f"layer/{i:05d}/{'x' * 60}": np.zeros(1, np.float32) for i in range(3000)}
    own = replace(scene.expected, asked=replace(scene.asked, params=many))
    assert len(messages.pack(scene.head, many)) < own.longest
