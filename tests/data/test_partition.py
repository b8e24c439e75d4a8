"""A split is a promise: nobody's row is anybody else's, and every client gets what was asked."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.data.datasets import load
from sottovoce.data.federated import load_holdings
from sottovoce.data.partition import Split, choose_class_sets, split_by_column, split_rows
from sottovoce.errors import InputError, PlanError
from sottovoce.plan import Plan
from sottovoce.plan.data import SplitKind

KINDS = [kind for kind in get_args(SplitKind) if kind != "column"]  # what a plan may say
exact = settings(derandomize=True, deadline=None, max_examples=60)


def all_rows(s: Split) -> np.ndarray:
    mine = [s.test] if s.test_from == "train" else []
    return np.concatenate([*s.clients, s.validation, *mine])


def mix(labels: np.ndarray, rows: np.ndarray) -> Counter[int]:
    return Counter(labels[rows].tolist())


@exact
@given(
    kind=st.sampled_from(["iid", "dirichlet"]),
    clients=st.integers(1, 12),
    samples=st.integers(1, 15),
    validation=st.integers(0, 20),
    test=st.integers(0, 20),
    alpha=st.sampled_from([1e-8, 1e-3, 0.1, 1.0, 1e6]),
    seed=st.integers(0, 2**32),
)
def test_rows_are_disjoint_sizes_exact_and_the_rng_decides(
    kind: str, clients: int, samples: int, validation: int, test: int, alpha: float, seed: int
) -> None:
    labels = np.arange(220) % 7

    def once(seed: int) -> Split:
        return split_rows(
            labels,
            kind=kind,
            clients=clients,
            samples=samples,
            validation=validation,
            test=test,
            alpha=alpha,
            rng=np.random.default_rng(seed),
        )

    s = once(seed)
    assert [len(rows) for rows in s.clients] == [samples] * clients
    assert (len(s.validation), len(s.test)) == (validation, test)
    rows = all_rows(s)
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < 220
    np.testing.assert_array_equal(rows, all_rows(once(seed)))
    if len(rows) > 20:
        assert not np.array_equal(rows, all_rows(once(seed + 1)))


@exact
@given(
    classes=st.integers(1, 9),
    data=st.data(),
    clients=st.integers(1, 40),
    per_class=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_labels_split_gives_k_classes_in_equal_amounts(
    classes: int, data: st.DataObject, clients: int, per_class: int, seed: int
) -> None:
    k = data.draw(st.integers(1, classes))
    odd = data.draw(st.integers(0, k - 1))
    samples = k * per_class + odd
    uses = math.ceil(clients * k / classes)
    labels = np.repeat(np.arange(classes) * 3, uses * (per_class + 1))  # enough of every class
    s = split_rows(
        labels,
        kind="labels",
        clients=clients,
        samples=samples,
        validation=0,
        test=0,
        labels_per_client=k,
        rng=np.random.default_rng(seed),
    )
    rows = all_rows(s)
    assert len(np.unique(rows)) == len(rows) == clients * samples
    mixes = [mix(labels, rows) for rows in s.clients]
    for m in mixes:
        assert len(m) == k
        assert set(m.values()) <= {per_class, per_class + 1}
        assert sum(m.values()) == samples
    used = Counter(c for m in mixes for c in m)
    counts = [used[c * 3] for c in range(classes)]
    assert max(counts) - min(counts) <= 1
    repeated = Counter(frozenset(m) for m in mixes)
    assert max(repeated.values()) <= math.ceil(clients / math.comb(classes, k))


@exact
@given(
    classes=st.integers(1, 7),
    data=st.data(),
    clients=st.integers(1, 80),
    seed=st.integers(0, 2**32),
)
def test_class_sets_are_balanced_distinct_and_favour_stock(
    classes: int, data: st.DataObject, clients: int, seed: int
) -> None:
    k = data.draw(st.integers(1, classes))
    stock = data.draw(st.permutations(range(10, 10 + classes)))
    sets = choose_class_sets(stock, clients=clients, k=k, rng=np.random.default_rng(seed))
    assert {len(s) for s in sets} == {k}
    used = Counter(c for s in sets for c in s)
    order = sorted(range(classes), key=lambda c: stock[c])
    counts = [used[c] for c in order]
    assert counts == sorted(counts)  # who has more is used at least as often
    assert counts[-1] - counts[0] <= 1
    repeats = Counter(sets)
    every = [repeats[frozenset(s)] for s in itertools.combinations(range(classes), k)]
    assert max(every) - min(every) <= 1


def test_class_sets_differ_from_seed_to_seed() -> None:
    once, again = (
        choose_class_sets([5] * 10, clients=12, k=3, rng=np.random.default_rng(seed))
        for seed in (0, 1)
    )
    assert once != again


def test_labels_split_can_use_every_last_row() -> None:
    # 6 clients × 5 rows of 2 of 4 classes take all 30 rows: the odd rows must fall exactly right.
    labels = np.repeat([0, 1, 2, 3], [8, 8, 7, 7])
    for seed in range(50):
        s = split_rows(
            labels,
            kind="labels",
            clients=6,
            samples=5,
            validation=0,
            test=0,
            labels_per_client=2,
            rng=np.random.default_rng(seed),
        )
        assert sorted(all_rows(s).tolist()) == list(range(30))
        assert all(sorted(mix(labels, rows).values()) == [2, 3] for rows in s.clients)


def test_labels_split_unbalances_the_uses_only_for_want_of_rows() -> None:
    # Balanced, class 0 would serve 2 of the 4 clients; it has rows for one.
    labels = np.repeat([0, 1, 2, 3], [10, 100, 100, 100])
    for seed in range(50):
        s = split_rows(
            labels,
            kind="labels",
            clients=4,
            samples=20,
            validation=0,
            test=0,
            labels_per_client=2,
            rng=np.random.default_rng(seed),
        )
        sets = [frozenset(mix(labels, rows)) for rows in s.clients]
        assert sum(0 in m for m in sets) == 1
        assert len(set(sets)) == 4
        assert all(set(mix(labels, rows).values()) == {10} for rows in s.clients)


def test_labels_split_unbalances_repeated_sets_too() -> None:
    # One class each for 6 clients: class 0 has rows for one of its two, class 2 for three.
    labels = np.repeat([0, 1, 2], [15, 20, 30])
    s = split_rows(
        labels,
        kind="labels",
        clients=6,
        samples=10,
        validation=0,
        test=0,
        labels_per_client=1,
        rng=np.random.default_rng(0),
    )
    assert Counter(int(labels[rows[0]]) for rows in s.clients) == {0: 1, 1: 2, 2: 3}


def test_labels_split_with_unequal_sizes() -> None:
    labels = np.arange(60_000) % 10
    sizes = np.repeat([400, 600, 800, 1000, 1200], 10).tolist()
    s = split_rows(
        labels,
        kind="labels",
        clients=50,
        samples=sizes,
        validation=5000,
        test=0,
        labels_per_client=2,
        own_test=10_000,
        rng=np.random.default_rng(0),
    )
    assert [len(rows) for rows in s.clients] == sizes
    for rows, n in zip(s.clients, sizes, strict=True):
        assert list(mix(labels, rows).values()) == [n // 2, n // 2]
    assert s.test_from == "test"
    np.testing.assert_array_equal(s.test, np.arange(10_000))


def test_a_class_that_runs_out_is_named_with_its_numbers() -> None:
    labels = np.repeat([4, 7, 9], [10, 300, 300])
    with pytest.raises(InputError) as caught:
        split_rows(
            labels,
            kind="labels",
            clients=3,
            samples=40,
            validation=0,
            test=0,
            labels_per_client=2,
            rng=np.random.default_rng(0),
        )
    assert str(caught.value) == (
        "data.samples must be small enough for the rows of every class, got 40; class 4 runs out, "
        "its clients need 40 rows and 10 are left: lower data.clients or data.samples "
        "(10 each is possible)"
    )


def test_the_size_named_as_possible_is_possible() -> None:
    labels = np.repeat([4, 7, 9], [10, 300, 300])
    s = split_rows(
        labels,
        kind="labels",
        clients=3,
        samples=10,
        validation=0,
        test=0,
        labels_per_client=2,
        rng=np.random.default_rng(0),
    )
    assert [len(rows) for rows in s.clients] == [10, 10, 10]


def test_as_many_as_possible_equally() -> None:
    labels = np.arange(1003) % 10
    rng = np.random.default_rng(3)
    common = {"clients": 10, "samples": None, "validation": 90, "test": 10, "rng": rng}
    for kind in ("iid", "dirichlet"):
        s = split_rows(labels, kind=kind, alpha=0.3, **common)
        assert [len(rows) for rows in s.clients] == [90] * 10
    s = split_rows(labels, kind="labels", labels_per_client=3, **common)
    sizes = {len(rows) for rows in s.clients}
    assert len(sizes) == 1
    assert 60 <= sizes.pop() <= 90
    assert all(len(set(mix(labels, rows).values())) == 1 for rows in s.clients)


def test_sizes_are_spread_over_equal_consecutive_parts() -> None:
    s = split_rows(
        np.zeros(60_000, int),
        kind="sizes",
        clients=50,
        samples=[400, 600, 800, 1000, 1200],
        validation=0,
        test=0,
        rng=np.random.default_rng(0),
    )
    sizes = [len(rows) for rows in s.clients]
    assert sizes == [400] * 10 + [600] * 10 + [800] * 10 + [1000] * 10 + [1200] * 10
    assert len(np.unique(all_rows(s))) == 40_000
    explicit = split_rows(
        np.zeros(9, int),
        kind="sizes",
        clients=3,
        samples=[2, 3, 4],
        validation=0,
        test=0,
        rng=np.random.default_rng(0),
    )
    assert [len(rows) for rows in explicit.clients] == [2, 3, 4]


def test_dirichlet_goes_from_one_sided_to_even() -> None:
    labels = np.arange(40_000) % 10

    def largest_share(alpha: float) -> float:
        s = split_rows(
            labels,
            kind="dirichlet",
            clients=40,
            samples=500,
            validation=0,
            test=0,
            alpha=alpha,
            rng=np.random.default_rng(0),
        )
        return float(np.mean([max(mix(labels, r).values()) / 500 for r in s.clients]))

    # E[max of Dirichlet(α)] is 0.1 as α → ∞ and 1 as α → 0; at α = 1 it is H₁₀/10 = 0.293.
    assert largest_share(1000.0) < 0.15
    assert largest_share(1.0) == pytest.approx(0.293, abs=0.05)  # sd of the mean of 40: 0.015
    assert largest_share(0.01) > 0.85


def test_iid_clients_look_like_the_whole() -> None:
    labels = np.arange(50_000) % 10
    s = split_rows(
        labels,
        kind="iid",
        clients=5,
        samples=5000,
        validation=1000,
        test=1000,
        rng=np.random.default_rng(0),
    )
    for rows in (*s.clients, s.validation, s.test):
        share = np.bincount(labels[rows], minlength=10) / len(rows)
        # sd ≤ 0.0095 for 1,000 rows: five of them leave a false alarm rate below 1e-4
        assert np.abs(share - 0.1).max() < 0.0475


def test_ids_name_the_rows() -> None:
    ids = np.array([50, 7, 12, 99])
    s = split_rows(
        [0, 0, 1, 1],
        kind="labels",
        clients=2,
        samples=2,
        validation=0,
        test=0,
        labels_per_client=1,
        ids=ids,
        rng=np.random.default_rng(0),
    )
    assert sorted(sorted(rows.tolist()) for rows in s.clients) == [[7, 50], [12, 99]]


def test_the_embedded_default_uses_every_digit() -> None:
    labels = load("digits").train_y
    s = split_rows(
        labels,
        kind="iid",
        clients=10,
        samples=143,
        validation=183,
        test=184,
        rng=np.random.default_rng(0),
    )
    assert sorted(all_rows(s).tolist()) == list(range(1797))
    assert s.test_from == "train"


@pytest.mark.slow
def test_a_million_clients() -> None:
    s = split_rows(
        np.zeros(2_000_000, np.int32),
        kind="iid",
        clients=1_000_000,
        samples=2,
        validation=0,
        test=0,
        rng=np.random.default_rng(0),
    )
    assert len(s.clients) == 1_000_000
    assert len(np.unique(np.concatenate(s.clients))) == 2_000_000


GOOD = {
    "kind": "iid",
    "clients": 10,
    "samples": 5,
    "validation": 5,
    "test": 5,
    "labels_per_client": 2,
    "alpha": 1.0,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_known(kind: str) -> None:
    samples = [5] * 10 if kind == "sizes" else 5
    change = {"kind": kind, "samples": samples}
    s = split_rows(np.arange(100) % 4, rng=np.random.default_rng(0), **(GOOD | change))
    assert [len(rows) for rows in s.clients] == [5] * 10


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"samples": 10}, "data.samples must be at most 90 rows for all 10 clients together"),
        ({"samples": [9] * 9 + [10]}, "these are 91: lower data.samples"),
        ({"samples": None, "clients": 91}, "must leave 91 rows or more for data.clients = 91"),
        ({"validation": 200}, "data.samples must be at most 0 rows"),
    ],
)
def test_nonsense_is_refused_in_one_sentence_before_drawing(
    change: dict[str, object], named: str
) -> None:
    rng = np.random.default_rng(0)
    untouched = rng.bit_generator.state
    with pytest.raises(InputError) as caught:
        split_rows(np.arange(100) % 4, rng=rng, **(GOOD | change))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert rng.bit_generator.state == untouched


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"split": "other"}, "data.split must be"),
        ({"clients": 0}, "data.clients must be a whole number"),
        ({"clients": 2.5}, "data.clients must be a whole number"),
        ({"clients": True}, "data.clients must be a whole number"),
        ({"validation": -1}, "data.validation must be"),
        ({"samples": 1.5}, "data.samples must be a whole number"),
        ({"samples": "many"}, "data.samples must be a whole number"),
        ({"samples": 0}, "data.samples must be a whole number from 1"),
        ({"samples": [5, 5]}, "data.samples is a list of 2 and data.clients is 10; list one"),
        ({"split": "sizes"}, "data.samples must be a list with data.split = sizes, got None"),
        ({"split": "sizes", "samples": 5}, "data.samples must be a list with data.split = sizes"),
        ({"split": "sizes", "samples": [1, 2, 3]}, "or as many as divide them evenly"),
        ({"split": "sizes", "samples": []}, "data.samples is a list of 0 and data.clients is 10"),
        ({"split": "labels", "samples": 1}, "data.samples must be ≥ 2, got 1"),
        ({"split": "labels", "labels_per_client": 0}, "data.labels_per_client must be a whole"),
        ({"split": "labels", "labels_per_client": 11}, "data.labels_per_client must be at most 10"),
        ({"split": "dirichlet", "alpha": 0}, "data.alpha must be a number from"),
        ({"split": "dirichlet", "alpha": math.nan}, "data.alpha must be a number from"),
        ({"split": "dirichlet", "alpha": math.inf}, "data.alpha must be a number from"),
        ({"split": "dirichlet", "alpha": "big"}, "data.alpha must be a number from"),
    ],
)
def test_the_plan_refuses_numbers_that_no_split_can_have(change, named):
    with pytest.raises(PlanError, match=named):
        Plan(data=change)


def test_more_classes_a_client_than_there_are_is_refused():
    how = GOOD | {"kind": "labels", "labels_per_client": 5}
    with pytest.raises(InputError, match="labels_per_client must be at most 4"):
        split_rows(np.arange(100) % 4, rng=np.random.default_rng(0), **how)


def test_public_rows_are_nobodys_whatever_the_seed():
    """`data.public = N`: validation is drawn from the first N rows, clients never get one."""
    plan = Plan(data={"clients": 10, "samples": 100, "public": 400, "validation": 50})
    drawn = []
    for seed in range(5):
        dealt = load_holdings(plan, seed=seed).split
        assert dealt is not None
        assert len(np.unique(all_rows(dealt))) == len(all_rows(dealt)) == 1000 + 50 + 184
        assert dealt.validation.max() < 400 <= min(rows.min() for rows in dealt.clients)
        assert dealt.test.min() >= 400
        drawn.append(dealt.validation)
    assert not np.array_equal(drawn[0], drawn[1])
    without = load_holdings(plan.replace(**{"data.public": None}), seed=0).split
    assert without is not None
    assert min(rows.min() for rows in without.clients) < 400  # the test can fail


@pytest.mark.parametrize(("own", "sentence"), [
    ({"public": 40, "validation": 50}, "data.validation must be from 1 to data.public = 40"),
    ({"public": 1000, "samples": 100}, "data.samples must be at most 613"),
    ({"public": 1610}, "beside data.public = 1610"),
])  # fmt: skip
def test_public_rows_that_do_not_fit_are_refused(own, sentence):
    with pytest.raises(PlanError, match=sentence):
        Plan(data={"clients": 10, **own})


@pytest.mark.parametrize(
    ("sizes", "share", "taken"), [([2] * 200, 0.1, 40), ([2] * 10, 0.1, 2), ([1, 1, 9, 9], 0.1, 2)]
)
def test_clients_of_few_rows_give_validation_and_test_rows_with_every_seed(sizes, share, taken):
    """Both sets are rounded; where both want the one spare row of a client, others give theirs."""
    owner = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        dealt = split_by_column(owner, validation=share, test=share, rng=rng)
        for rows in (dealt.validation, dealt.test):
            assert taken - 1 <= len(rows) <= taken + 1
        assert all(map(len, dealt.clients))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.floats(0.01, 0.5) | st.integers(1, 40),
    st.floats(0.01, 0.49) | st.integers(0, 40),
    st.integers(0, 99),
)
def test_every_client_keeps_a_row(
    sizes: list[int], validation: float, test: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.repeat(np.arange(len(sizes)), sizes)).astype(np.int32)
    own_test = 7 if test == 0 else 0
    try:
        dealt = split_by_column(owner, validation=validation, test=test, rng=rng, own_test=own_test)
    except InputError:
        spare = len(owner) - len(sizes)
        assert validation + test > spare or validation < 1 or 0 < test < 1
        return
    aside = [dealt.validation, dealt.test if dealt.test_from == "train" else []]
    for i, rows in enumerate(dealt.clients):
        assert len(rows) >= 1
        assert set(owner[rows]) == {i}
        for wanted, taken in zip((validation, test), aside, strict=True):
            mine = int((owner[np.asarray(taken, int)] == i).sum())
            if 0 < wanted < 1:
                assert mine <= math.ceil(wanted * sizes[i])
    used = np.concatenate([*dealt.clients, *aside]).astype(int)
    assert sorted(used.tolist()) == list(range(len(owner)))
    for wanted, taken in zip((validation, test), aside, strict=True):
        if wanted >= 1:
            assert len(taken) == wanted
