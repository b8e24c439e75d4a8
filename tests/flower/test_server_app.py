"""What `flwr run` hands over is checked before anyone is greeted: types, seconds, encryption."""

from __future__ import annotations

import shlex
import tomllib
from types import SimpleNamespace

import pytest
from flwr.common.config import parse_config_args
from flwr.superlink.grid.http_grid import HttpGrid

from sottovoce.data import federated
from sottovoce.errors import InputError
from sottovoce.flower import local, server_app
from sottovoce.flower.transport import NodeDirectory
from sottovoce.plan import Plan
from sottovoce.server import coordinator

BAD = {
    "plan": ["", 7, True],
    "public": ["", None],
    "out": ["", 1.5],
    "clients": ["three", "3", 0, -1, 1.0, True],
    "minimum": [0, "1", False, 2.5],
    "gathering": [0, -1.0, "120", True, float("nan"), float("inf")],
    "deadline": [0, 0.0, -3, "soon", float("nan"), float("inf"), 1e9],
    "resume": ["false", "true", 0, 1],
    "keep-uploads": ["no", 0],
    "insecure": ["false", 1],
    "name": [7, "\x1b[2J", "x" * 81, "Spital Zürich"],
    "progress": [7, False, "/nowhere/at/all/progress.jsonl"],
    "admitted": [7, None, "/nowhere/at/all.csv"],
}


def config(**changes):
    """What the bundle says, and where plan, rows and run are."""
    bundle = tomllib.loads((local.APP / "pyproject.toml").read_text("utf-8"))
    own = bundle["tool"]["flwr"]["app"]["config"]
    assert own.keys() == server_app.KINDS.keys()  # what can be given is what is read
    return {**own, "plan": "plan.toml", "public": "public.npz", "out": "run", **changes}


class NobodyIsAsked:
    """A grid that fails the test when it is used; encrypted or not, as Flower's grid has it."""

    def __init__(self, insecure=False):
        self._insecure = insecure

    def get_nodes(self):
        raise AssertionError("somebody was greeted")


@pytest.mark.parametrize("key", BAD)
def test_a_setting_that_is_none_is_one_sentence(key, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for value in BAD[key]:
        with pytest.raises(InputError, match=rf"^{key} must be .*, got .*; .*\S") as error:
            server_app.lead_run(
                NodeDirectory(NobodyIsAsked(), str, limit=1), config(**{key: value})
            )
        assert "\n" not in str(error.value)
        # What it says to type is what Flower takes for a value of the right kind.
        *_, typed = shlex.split(str(error.value).partition("give it as: ")[2])
        (given,) = parse_config_args([typed]).items()
        types, _, _, _ = server_app.KINDS[key]
        assert (given[0], type(given[1]) in types) == (key, True)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def conducted(monkeypatch, tmp_path):
    """How `conduct` was called, in a folder where a plan lies."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text("[rounds]\nrounds = 3\n")
    monkeypatch.setattr(federated, "load_public", lambda path: path)
    calls = []
    monkeypatch.setattr(coordinator, "conduct", lambda *one, **more: calls.append((one, more)))
    return calls


def test_what_is_given_is_what_is_conducted(conducted):
    given = config(clients=3, gathering=7, deadline=9.5, minimum=2, resume=True, name="st. x: 1")
    server_app.lead_run(NodeDirectory(NobodyIsAsked(), str, limit=1), given)
    (((plan, rows, routes, patience), more),) = conducted
    assert plan == Plan.load("plan.toml")
    assert (rows.name, type(routes)) == ("public.npz", NodeDirectory)
    assert (patience.clients, patience.gathering, patience.deadline, patience.minimum) == (
        3,
        7,
        9.5,
        2,
    )
    assert (more["resume"], more["keep_uploads"], more["server"]) == (True, False, "st. x: 1")


def test_the_table_of_admitted_clients_is_read(conducted, tmp_path):
    table = tmp_path / "admitted.csv"
    table.write_text("client,samples\nward-3,400\n\nSHA256:abc, 1200\n", "utf-8")
    server_app.lead_run(NodeDirectory(NobodyIsAsked(), str, limit=1), config(admitted=str(table)))
    assert conducted[-1][1]["admitted"] == {"ward-3": 400, "SHA256:abc": 1200}
    server_app.lead_run(NodeDirectory(NobodyIsAsked(), str, limit=1), config())
    assert conducted[-1][1]["admitted"] is None
    for text in ("", "ward-3,400\n", "client,samples\nward-3\n", "client,samples\nward-3,-1\n",
                 "client,samples\nward-3,0\n", "client,samples\na,1\na,2\n", "client,samples\n,2\n",
                 "client,samples\na,5000000000\n", "client,samples\na,x\n"):  # fmt: skip
        table.write_text(text, "utf-8")
        with pytest.raises(InputError, match=r"admitted.* must be client,samples, got .*; head"):
            server_app.lead_run(
                NodeDirectory(NobodyIsAsked(), str, limit=1), config(admitted=str(table))
            )


@pytest.mark.parametrize("said", [False, True])
def test_the_record_is_told_what_the_transport_is_not_what_the_submitter_says(conducted, said):
    server_app.lead_run(
        NodeDirectory(NobodyIsAsked(insecure=False), str, limit=1), config(insecure=said)
    )
    assert conducted[-1][1]["insecure"] is False
    for grid in (NobodyIsAsked(insecure=True), SimpleNamespace()):  # plaintext, and who can tell
        if said:
            server_app.lead_run(NodeDirectory(grid, str, limit=1), config(insecure=said))
            assert conducted[-1][1]["insecure"] is True
        else:
            with pytest.raises(
                InputError, match="insecure must be true where nothing is encrypted"
            ):
                server_app.lead_run(NodeDirectory(grid, str, limit=1), config(insecure=said))
    assert len(conducted) == (3 if said else 1)


@pytest.mark.parametrize("insecure", [False, True])
def test_flowers_own_grid_says_whether_it_encrypts(insecure):
    assert server_app.is_encrypted(HttpGrid(insecure=insecure, token="t")) is not insecure
