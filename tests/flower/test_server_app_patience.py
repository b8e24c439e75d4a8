"""Whom a server still asks: the silent less and less, those who come back, and nobody in a hurry.

The transport is Flower's roll on a grid of functions; the devices and their vaults are real.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sottovoce.client.messages import make_refusal
from sottovoce.errors import RunError
from sottovoce.flower import client_app
from sottovoce.flower.server_app import read_client_id
from sottovoce.flower.transport import NodeDirectory
from sottovoce.server import coordinator
from sottovoce.server.coordinator import Patience, conduct
from sottovoce.server.members import SILENT, Roll
from support.federations import go, settled
from support.grids import FakeGrid, identity, said  # noqa: F401 - for every test of a grid
from support.in_process import Direct, clients, plan, public

DEVICE = client_app.build_app(client_app.Installed())


class Grid(FakeGrid):
    """Three nodes of Flower, each with a real device; `instead` may answer a request for it."""

    def __init__(self, folder):
        clients(folder)
        files = {number: folder / f"client-{number - 1}.toml" for number in (1, 2, 3)}
        super().__init__({number: self._node(number, path) for number, path in files.items()})
        self.round, self.asked = 0, {number: [] for number in files}
        self.instead = {}  # node → a function of the message; ... lets the device answer
        self.replies = {}  # each message is answered once, however often the server looks

    def _node(self, number, path):
        context = SimpleNamespace(node_config={"node": str(path)})

        def reply(message):
            key = message.metadata.message_id
            if key not in self.replies:
                told = ...
                if message.metadata.message_type == "train":
                    self.asked[number].append(self.round)
                    told = self.instead.get(number, lambda _: ...)(message)
                self.replies[key] = DEVICE(message, context) if told is ... else told
            return self.replies[key]

        return reply

    def lead(self, out, *, rounds, deadline):
        """A run over this grid, which knows which round it is."""

        def told(done):
            self.round = done.t + 1

        return conduct(
            plan(**{"rounds.rounds": rounds}),
            public(),
            NodeDirectory(self, read_client_id, limit=2**20),
            Patience(3, gathering=900.0, deadline=deadline),
            out=out,
            on_round=told,
        )


@pytest.mark.slow
def test_one_that_greets_and_never_answers_is_asked_less_and_less(tmp_path):
    """Each time costs the whole deadline: after three in a row it sits out 1, 2, 4, … rounds."""
    grid = Grid(tmp_path)
    grid.instead[2] = lambda message: None
    done = grid.lead(tmp_path / "run", rounds=9, deadline=6.0)
    assert grid.asked == {1: list(range(9)), 2: [0, 1, 2, 4, 7], 3: list(range(9))}
    assert [entry["uploads"] for entry in done.record["rounds"]] == [2] * 9


@pytest.mark.slow
def test_one_that_refused_for_a_while_comes_back(tmp_path):
    """Its files could not be read for three rounds: it answered, so nobody greets it anew."""
    grid = Grid(tmp_path)
    grid.instead[2] = lambda message: (
        said(message, make_refusal("data", "no")) if grid.round < 3 else ...
    )
    done = grid.lead(tmp_path / "run", rounds=7, deadline=900.0)
    assert grid.asked[2] == [0, 1, 2, 4, 5, 6]
    assert [entry["uploads"] for entry in done.record["rounds"]] == [2] * 4 + [3] * 3
    assert done.record["rounds"][0]["refused"] == {"data": 1}


class TestRoll:
    """Three members are 0, 1 and 2; nothing is carried."""

    def after(self, *rounds):
        roll = Roll([None] * 3)
        for missing in rounds:
            roll.close_round(missing)
        return roll

    def test_one_try_for_the_silent_that_greet_and_none_for_the_others(self):
        roll = self.after(*[{1: SILENT}] * 3)
        roll.heard.add(1)
        roll.retry_silent()
        assert roll.gone == {1: SILENT}  # it sits out a round
        roll.close_round({})
        roll.retry_silent()
        assert roll.gone == {}
        roll.close_round({1: SILENT})
        assert roll.gone == {1: SILENT}  # one try
        for _ in range(9):
            roll.close_round({})
            roll.retry_silent()
        assert roll.gone == {1: SILENT}  # of whom nothing is heard: nothing is wasted on it

    def test_a_round_that_is_short_of_clients_calls_all_that_were_heard(self):
        roll = self.after(*[{0: "data", 1: SILENT}] * 3)
        roll.retry_silent()
        assert set(roll.gone) == {0, 1}
        roll.retry_silent(at_once=True)
        assert set(roll.gone) == {1}

    def test_an_upload_clears_the_slate(self):
        roll = self.after({1: SILENT}, {1: SILENT})
        roll.missed.pop(1)
        roll.close_round({1: SILENT})
        assert roll.gone == {}

    def test_who_declined_for_good_is_not_recalled(self):
        roll = self.after(*[{1: "data"}] * 3)
        roll.gone[1] = "empty"
        roll.retry_silent(at_once=True)
        assert roll.gone == {1: "empty"}


@pytest.mark.slow
def test_the_last_clients_are_called_back_rather_than_the_run_given_up(tmp_path):
    """Two have rested for a round when the third says goodbye."""
    transport, rounds = Direct(clients(tmp_path)), []

    def answers(route, asked, told):
        if route == "route-0":
            return told if len(rounds) < 3 else make_refusal("empty", "")
        return make_refusal("internal", "") if len(rounds) < 3 else told

    transport.on_answer = answers
    done = go(transport, tmp_path / "run", on_round=rounds.append)
    assert [entry["cohort"] for entry in done.record["rounds"]] == [[0]] * 3 + [[1, 2]]
    settled(done, transport)


def run_on_a_clock(monkeypatch):
    """Let the server's pauses take no time: return the clock that they move."""
    clock = [0.0]

    def sleep(seconds):
        clock[0] += seconds

    monkeypatch.setattr(
        coordinator, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    )
    return clock


@pytest.mark.slow
def test_a_refusal_that_may_pass_is_given_time_to(tmp_path, monkeypatch):
    """Every vault is in use for a second; without a pause three tries would be over before that."""
    transport, clock = Direct(clients(tmp_path)), run_on_a_clock(monkeypatch)
    transport.on_answer = lambda route, asked, told: (
        make_refusal("vault", "") if clock[0] < 1 else told
    )
    patience = Patience(3, gathering=0.5, pause=0.3, tries=3)
    done = go(transport, tmp_path / "run", patience=patience)
    assert [entry["uploads"] for entry in done.record["rounds"]] == [3] * 4
    assert len(transport.asked) - 3 == 3  # at 0, 0.3 and 1.5 s, and the other rounds
    settled(done, transport)


@pytest.mark.slow
def test_a_pause_is_no_longer_than_the_deadline(tmp_path, monkeypatch):
    transport = Direct(clients(tmp_path))
    transport.on_answer = lambda route, asked, told: make_refusal("data", "")
    clock = run_on_a_clock(monkeypatch)
    with pytest.raises(RunError, match="round 1 got 0 uploads of 3 asked"):
        go(
            transport,
            tmp_path / "run",
            patience=Patience(3, gathering=0.5, deadline=0.2, pause=60.0),
        )
    assert 0 < clock[0] <= 2 * 0.2 + 1e-9  # between three tries
