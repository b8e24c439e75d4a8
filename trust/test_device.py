"""The device under a hostile server and a failing machine, at full size (an hour: `make trust`)."""

from __future__ import annotations

from collections import Counter

import pytest

from support.device_fuzz import heads_with_anything
from support.device_kills import MOMENTS, killed
from support.device_schedules import play_all
from support.device_twins import pair
from support.devices import memory


def test_a_device_that_is_killed_owes_nothing(record_property):
    record_property("size", "10,000 kills")
    counted = Counter[str]()
    for seed in range(10):
        seen = killed(1000, seed=100 + seed)
        assert seen["wrong"] == {}
        counted.update(seen["counted"])
    assert counted["killed"] == 10_000
    assert min(counted[step] for step in MOMENTS) >= 300


def test_no_schedule_exceeds_the_budget(record_property):
    record_property("size", "2,000 schedules")
    with memory() as folder:
        said = play_all(folder, range(1000, 3000))
    assert min(said[kind] for kind in ("upload", "replay", "empty", "policy")) > 500


@pytest.mark.parametrize(
    ("form", "pairs"), [("svm", 200), ("softmax", 150), ("mlp", 150), ("own", 110), ("cnn", 40)]
)
def test_frozen_noise_and_equal_sums_give_equal_bytes(form, pairs, record_property):
    record_property("size", f"{pairs} pairs")
    for seed in range(1000, 1000 + pairs):
        with memory() as folder:
            one, other = pair(folder, form, seed)
        assert one == other


def test_heads_with_anything_anywhere_are_answered(record_property):
    record_property("size", "10,000 requests")
    with memory() as folder:
        heads_with_anything(folder, 10_000, seed=5)
