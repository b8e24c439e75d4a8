"""The process beside a SuperNode: what its log says, what its operator is told, one at a time."""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import httpx
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from sottovoce.client import device, release
from sottovoce.client import messages as protocol
from sottovoce.client.node import Node
from sottovoce.client.vault import Vault, chest
from sottovoce.errors import FederationError, VaultRefusal
from sottovoce.flower import client_app, processes, transport, worker
from support.devices import ask, books_hold, kind, make_node, told

TABLE = """
schema = 1
name = "ward"
vault = "ward.vault"
[data]
path = "rows.csv"
label = "ill"
columns = { age = [0, 120], ill = ["no", "yes"] }
[policy]
epsilon = 8.0
delta = 1e-5
clip = 1.0
"""
SECRET = "DIAGNOSIS-HIV"


@pytest.fixture(params=[True, False], ids=["json", "plain"])
def written(request, monkeypatch):
    """What a worker writes while a test lasts, in one of its two ways."""
    stream, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr(logging, "StreamHandler", lambda: handler)
    handler = logging.Handler()
    handler.emit = lambda record: stream.write(handler.format(record) + "\n")
    monkeypatch.setattr(root, "handlers", [])
    level = logging.getLogger("sottovoce").level
    processes.start_logging(as_json=request.param)
    yield stream
    logging.getLogger("sottovoce").setLevel(level)


def table_node(folder, rows):
    (folder / "rows.csv").write_text(rows)
    (folder / "node.toml").write_text(TABLE)
    return Node.load(folder / "node.toml")


@pytest.mark.parametrize("rows", [f"age,ill\n7,no\n{SECRET},no\n", f"age,ill\n7,{SECRET}\n"])
def test_no_cell_of_a_bad_table_is_in_a_log(tmp_path, written, caplog, rows):
    node = table_node(tmp_path, rows)
    assert (
        kind(device.make_greeting(node))
        == kind(device.answer_request(ask().to_blob(), node))
        == "unavailable"
    )
    lines = written.getvalue()
    assert lines.count("DataError") == 2
    assert SECRET not in lines
    assert SECRET not in caplog.text  # whoever else listens


def test_no_word_of_an_error_of_its_own_is_in_a_log(tmp_path, written, caplog, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError(SECRET)

    monkeypatch.setattr(release, "release", fails)
    assert kind(device.answer_request(ask().to_blob(), make_node(tmp_path))) == "unavailable"
    lines = written.getvalue()
    assert "RuntimeError" in lines
    assert "test_worker.py" in lines  # where it happened is no word of a sample
    assert SECRET not in lines + caplog.text


def test_terms_that_are_not_disclosed_are_in_no_log(tmp_path, written):
    make_node(tmp_path, epsilon=4.0371, disclose=False)
    at_odds = make_node(tmp_path, epsilon=5.5123, disclose=False, vault=False)
    assert kind(device.make_greeting(at_odds)) == "policy"
    assert "PolicyRefusal" in written.getvalue()
    assert "4.0371" not in written.getvalue()


@pytest.mark.parametrize(
    ("msg", "args"),
    [
        ("it was %s", (ValueError(SECRET),)),
        ("it was %(what)r of %(all)d", ({"what": KeyError(SECRET), "all": 3},)),
        (OSError(SECRET), ()),
    ],
)
def test_a_formatter_keeps_the_kind_of_an_exception_alone(written, msg, args):
    logging.getLogger("sottovoce").error(msg, *args)
    try:
        raise TypeError(SECRET)
    except TypeError:
        logging.getLogger("sottovoce").exception("so it went: 100 %")
    lines = written.getvalue()
    assert SECRET not in lines
    assert "Error" in lines.splitlines()[0]
    assert "TypeError" in lines.splitlines()[1]
    assert len(lines.splitlines()) == 2


# One message at a time


class SuperNode:
    """Hands out so many messages, then stops the worker; counts the forks that live meanwhile."""

    def __init__(self, monkeypatch, messages, looks=3):
        self.messages, self.looks, self.forks = messages, looks, []
        self.together = 0
        monkeypatch.setattr(worker.RuntimeHttpClient, "from_server_address", lambda **_: self)
        monkeypatch.setattr(worker.os, "fork", self.fork)
        monkeypatch.setattr(worker.os, "waitpid", self.waitpid)
        monkeypatch.setattr(worker.signal, "signal", lambda _, stop: setattr(self, "stop", stop))

    def AcquireTask(self, _):  # noqa: N802
        self.together = max(self.together, len(self.forks))
        if not self.messages:
            self.stop(signal.SIGTERM, None)
            return SimpleNamespace(token="")
        self.messages -= 1
        return SimpleNamespace(token="t")

    def fork(self):
        self.forks.append(self.looks)
        return 4711

    def waitpid(self, _, options):
        if not self.forks:
            raise ChildProcessError
        self.forks[0] -= 1 if options == os.WNOHANG else self.forks[0]
        return (4711, self.forks.pop(0)) if self.forks[0] <= 0 else (0, 0)


def test_a_worker_answers_one_message_before_it_takes_the_next(monkeypatch):
    """A vault has room for one: a second fork would be turned away by the first one's lock."""
    node = SuperNode(monkeypatch, messages=5)
    monkeypatch.setattr(worker, "POLL", 0.01)
    worker.serve_messages("127.0.0.1:9", None, b"s" * 32)
    assert (node.messages, node.together, node.forks) == (0, 0, [])


@pytest.mark.parametrize("status", [401, 403])
def test_a_worker_with_another_secret_says_so(monkeypatch, caplog, status):
    """The first answers are that nobody listens yet, which is logged once."""
    answers = [httpx.ConnectError("closed"), httpx.ConnectError("closed"), status]

    class Closed(SuperNode):
        def AcquireTask(self, _):  # noqa: N802
            if isinstance(found := answers.pop(0), Exception):
                raise found
            asked = httpx.Request("POST", "http://127.0.0.1:9")
            raise httpx.HTTPStatusError("no", request=asked, response=httpx.Response(found))

    Closed(monkeypatch, messages=0)
    monkeypatch.setattr(worker, "AGAIN", 0.01)
    caplog.set_level("INFO", "sottovoce")
    with pytest.raises(FederationError, match=rf"turned away \({status}\); give it .* one secret"):
        worker.serve_messages("127.0.0.1:9", None, b"s" * 32)
    assert caplog.text.count("no answer (ConnectError)") == 1


def test_a_device_waits_a_little_for_a_vault_that_is_looked_at(tmp_path, monkeypatch):
    node = make_node(tmp_path)
    looking = Vault.open(node.vault, dataset=None)
    threading.Timer(0.3, looking.close).start()
    assert told(device.make_greeting(node))["schema"] == protocol.HELLO
    naps = []
    clock = SimpleNamespace(monotonic=lambda: sum(naps), sleep=naps.append)
    monkeypatch.setattr(chest, "time", clock)
    with Vault.open(node.vault, dataset=None):
        assert kind(device.answer_request(ask().to_blob(), node)) == "unavailable"
    assert sum(naps) >= device.PATIENCE


# What its operator is told


def asked_of(config):
    """What the installed app answers on a node with this configuration."""
    message = Message(RecordDict({transport.RECORD: ConfigRecord({"request": b""})}), 1, "query")
    return client_app.app(message, SimpleNamespace(node_config=config))


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Who sends: Flower tells an app before it runs."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr("flwr.supercore.task_identity.TaskIdentity." + name, 1, raising=False)


def test_a_node_file_that_is_none_is_named_in_the_log_and_not_to_the_server(tmp_path, written):
    path = tmp_path / "node.toml"
    path.write_text(TABLE.replace("epsilon", "epsilom"))
    reply = asked_of({"node": str(path)})
    assert transport.read_record(reply, "answer", 1000) == device.refuse_unavailable()
    assert "unknown key policy.epsilom in the node file" in written.getvalue()


@pytest.mark.parametrize("error", [ValueError, KeyError, OSError, MemoryError, AssertionError])
def test_no_word_of_an_error_leaves_the_worker(written, caplog, error):
    """Two apps that fail over different samples: the server reads the same bytes of both."""
    replies = []
    for secret in (SECRET, "", "age 47"):

        def fails(message, context, secret=secret):
            raise error(secret)

        message = Message(RecordDict({}), 1, "train")
        replies.append(worker._answer(fails, message, SimpleNamespace(node_config={})))
    assert {(reply.error.code, reply.error.reason) for reply in replies} == {
        (client_app.FAILED, client_app.SORRY)
    }
    assert not any(reply.has_content() for reply in replies)
    assert error.__name__ in written.getvalue()
    assert SECRET not in written.getvalue() + caplog.text


@pytest.mark.parametrize("kind_of_message", ["train", "query"])
def test_no_word_of_an_error_leaves_the_app(tmp_path, written, monkeypatch, kind_of_message):
    """Whatever a device raises, its words are not in the reply."""

    class Failing:
        def hello(self, node):
            raise RuntimeError(SECRET)

        def answer(self, request, node):
            raise RuntimeError(SECRET)

    record = RecordDict({transport.RECORD: ConfigRecord({"request": b""})})
    message = Message(record, 1, kind_of_message)
    config = SimpleNamespace(node_config={"node": str(tmp_path)})
    reply = client_app.build_app(Failing())(message, config)
    assert (reply.error.code, reply.error.reason) == (client_app.FAILED, client_app.SORRY)
    assert not reply.has_content()
    assert SECRET not in written.getvalue()


class Tasks:
    """A SuperNode's runtime that hands out one task and keeps what is pushed to it."""

    def __init__(self, monkeypatch, pull):
        self.pushed = []
        monkeypatch.setattr(worker.RuntimeHttpClient, "from_server_address", lambda **_: self)
        monkeypatch.setattr(worker, "HeartbeatSender", lambda _: self)
        monkeypatch.setattr(worker, "pull_task_input", pull)
        monkeypatch.setattr(worker, "push_message", lambda _, *sent: self.pushed.append(sent))
        monkeypatch.setattr(worker, "push_task_output", lambda _, *sent: self.pushed.append(sent))

    def start(self):
        pass

    stop = close = start


def test_no_word_of_an_error_is_in_what_a_task_ended_with(monkeypatch, written):
    """A task that fails outside the app ends with constant words, too: the SuperNode sends them."""

    def fails(_):
        raise RuntimeError(SECRET)

    tasks = Tasks(monkeypatch, fails)
    with pytest.raises(RuntimeError):
        worker.answer_message("127.0.0.1:9", None, "t")
    assert tasks.pushed == [(None, "failed", client_app.SORRY)]


def test_a_server_that_stops_its_run_ends_no_answer_in_the_middle(monkeypatch):
    """Flower's heartbeat then interrupts the fork, and a client would stop after two such ends."""
    message = Message(RecordDict({}), 1, "train")
    message.metadata.__dict__["_message_id"] = "m"
    tasks = Tasks(monkeypatch, lambda _: (message, SimpleNamespace(), None, None))
    before = signal.getsignal(signal.SIGINT)

    def answer(message, context):
        signal.raise_signal(signal.SIGINT)
        return "stored"

    try:
        worker.answer_message("127.0.0.1:9", answer, "t")
    finally:
        signal.signal(signal.SIGINT, before)
    assert [sent[0] for sent in tasks.pushed[:1]] == ["stored"]
    assert tasks.pushed[1][1] == "completed"


def test_a_thread_that_fails_leaves_its_kind_in_the_log(monkeypatch, written):
    """Flower's heartbeat, say, when its SuperNode was started again meanwhile."""

    def work(token):
        def fails():
            raise RuntimeError(SECRET)

        thread = threading.Thread(target=fails)
        thread.start()
        thread.join()

    monkeypatch.setattr(worker.os, "_exit", lambda code: None)
    monkeypatch.setattr(worker.keeper, "find_prctl", lambda: lambda *_: None)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    worker._run_child(work, "t")
    lines = written.getvalue()
    assert "a thread ended: RuntimeError" in lines
    assert SECRET not in lines


def test_a_supernode_without_a_node_file_is_told_how_to_name_one(written):
    assert asked_of({}).error.reason == client_app.SORRY
    assert "--node-config" in written.getvalue()


def run(capsys, *words):
    """Exit code, and the one line that a command ends with."""
    with pytest.raises(SystemExit) as end:
        processes.run_command(lambda: worker.main(list(map(str, words))))
    said = capsys.readouterr()
    lines = (said.out + said.err).splitlines()
    assert len(said.err.splitlines()) <= 1, lines
    return end.value.code, "".join(lines[-1:])


def test_check_says_in_words_what_the_log_has_the_kind_of(tmp_path, capsys):
    path = tmp_path / "ward.toml"
    code, said = run(capsys, "--check", path)
    assert (code, "a file that exists" in said) == (2, True)
    node = make_node(tmp_path, epsilon=8.0)
    code, said = run(capsys, "--check", path)
    assert (code, "is in order" in said) == (0, True)
    device.answer_request(ask().to_blob(), node)
    before = books_hold(node)
    make_node(tmp_path, epsilon=4.0, vault=False)
    assert run(capsys, "--check", path)[0] == 0
    assert books_hold(node) == before  # nothing is tightened by looking
    make_node(tmp_path, epsilon=9.0, vault=False)
    assert "epsilon may only be tightened" in run(capsys, "--check", path)[1]
    make_node(tmp_path, own="support.devices:missing", vault=False)
    assert "model.own must be" in run(capsys, "--check", path)[1]
    node.data.unlink()
    code, said = run(capsys, "--check", path)
    assert (code, "cannot be read as arrays" in said) == (1, True)


def test_check_of_a_bad_table_names_the_cell(tmp_path, capsys):
    table_node(tmp_path, f"age,ill\n{SECRET},no\n")
    code, said = run(capsys, "--check", tmp_path / "node.toml")
    assert (code, SECRET in said, "row" in said) == (1, True, True)


def test_a_worker_that_cannot_begin_says_so_in_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(worker, "serve_messages", lambda *_: None)
    monkeypatch.setattr(processes, "start_logging", lambda **_: None)
    secret = tmp_path / "secret"
    at = ("--node", "127.0.0.1:9", "--secret", secret)
    assert "secret must be a file that can be read (No such file" in run(capsys, *at)[1]
    secret.write_bytes(b"short")
    code, said = run(capsys, *at)
    assert (code, "secret must be at least 32 bytes long, got 5; write another" in said) == (
        2,
        True,
    )
    if shutil.which("openssl") is not None:  # what it says to do does help
        words = re.search(r"\((openssl .*?)\)", said).group(1).split()
        secret.write_bytes(subprocess.run(words, capture_output=True, check=True).stdout)
        assert len(worker.read_secret(secret)) >= 32
    secret.write_bytes(b"s" * 32)
    for app in ("", "nowhere:app", "json:none", "json:loads", ".x:y"):
        code, said = run(capsys, *at, "--app", app)
        assert (code, "app must be module:name of a ClientApp" in said) == (2, True)
    code, said = run(capsys, *at, "--warm", "json:none")
    assert (code, "warm must be module:name of a function" in said) == (2, True)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (PermissionError(13, "Permission denied", "x.key"), 1, "x.key: the system refused: Perm"),
        (VaultRefusal("it is in use"), 1, "it is in use"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_of_the_system_and_a_key_pressed_are_sentences(capsys, error, code, words):
    def fails():
        raise error

    with pytest.raises(SystemExit) as end:
        processes.run_command(fails)
    assert end.value.code == code
    assert capsys.readouterr().err.startswith(f"sottovoce: {words}")


@pytest.mark.slow
def test_the_program_itself_ends_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sottovoce.flower.worker", "--node", "x", "--secret", "none"],
        capture_output=True, text=True, timeout=900, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("sottovoce: secret must be a file")
    assert len(done.stderr.splitlines()) == 1
