"""Certificates that hold what they say, and processes that leave none behind."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from sottovoce.errors import FederationError, InputError
from sottovoce.flower import certificates, keeper, local, processes
from sottovoce.flower.processes import Process, Processes


def until(question, seconds=900.0):
    end = time.monotonic() + seconds
    while not question():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def gone(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return stat.rpartition(b")")[2].split()[0] == b"Z"


class TestCertificates:
    def greet(self, server, *, trust, name):
        """One TLS greeting on loopback as `name`; raises what the client's check raises."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server.certificate, server.key)
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer():
                try:
                    with context.wrap_socket(listener.accept()[0], server_side=True) as heard:
                        heard.sendall(b"well")
                except OSError:
                    pass

            thread = threading.Thread(target=answer)
            thread.start()
            try:
                check = ssl.create_default_context(cafile=str(trust))
                check.verify_flags |= ssl.VERIFY_X509_STRICT
                with (
                    socket.create_connection(listener.getsockname(), timeout=900) as plain,
                    check.wrap_socket(plain, server_hostname=name) as said,
                ):
                    return said.recv(16)
            finally:
                thread.join()

    def test_a_client_trusts_the_names_given_and_no_other(self, tmp_path):
        made = certificates.make_authority(tmp_path)
        server = certificates.make_server_keys(
            tmp_path, made, names=["link.example.org", "192.0.2.7"]
        )
        for name in ("localhost", "127.0.0.1", "link.example.org", "192.0.2.7"):
            assert self.greet(server, trust=made.certificate, name=name) == b"well"
        with pytest.raises(ssl.SSLCertVerificationError):
            self.greet(server, trust=made.certificate, name="other.example.org")

    def test_another_authority_vouches_for_nobody_here(self, tmp_path):
        (tmp_path / "other").mkdir()
        server = certificates.make_server_keys(tmp_path, certificates.make_authority(tmp_path))
        other = certificates.make_authority(tmp_path / "other")
        with pytest.raises(ssl.SSLCertVerificationError):
            self.greet(server, trust=other.certificate, name="localhost")

    def test_the_server_cannot_sign_for_others(self, tmp_path):
        server = certificates.make_server_keys(tmp_path, certificates.make_authority(tmp_path))
        read = x509.load_pem_x509_certificate(server.certificate.read_bytes())
        assert not read.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        usage = read.extensions.get_extension_for_class(x509.KeyUsage).value
        assert not usage.key_cert_sign

    def test_files_are_their_owners_alone_and_never_overwritten(self, tmp_path):
        os.umask(before := os.umask(0))  # whatever the umask is
        os.umask(0)
        try:
            certificates.make_server_keys(tmp_path, certificates.make_authority(tmp_path))
            certificates.make_node_key(tmp_path, "node0")
        finally:
            os.umask(before)
        assert len(files := list(tmp_path.iterdir())) == 6
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
        with pytest.raises(InputError, match="never overwritten"):
            certificates.make_node_key(tmp_path, "node0")

    def test_a_node_key_is_a_pair_on_p384(self, tmp_path):
        made = certificates.make_node_key(tmp_path, "node0")
        private = serialization.load_ssh_private_key(made.private.read_bytes(), None)
        public = serialization.load_ssh_public_key(made.public.read_bytes())
        assert private.curve.name == "secp384r1"
        assert private.public_key() == public

    @pytest.mark.parametrize("name", ["", "https://x.org", "a b", "x.org:8000"])
    def test_what_is_no_name_is_refused(self, tmp_path, name):
        with pytest.raises(InputError, match="names must be host names"):
            certificates.make_server_keys(
                tmp_path, certificates.make_authority(tmp_path), names=[name]
            )


class TestRenewal:
    """A certificate ends after a year; the authority that clients trust stays."""

    def made(self, folder, *names):
        return certificates.make_server_keys(
            folder, certificates.make_authority(folder), names=names
        )

    def valid(self, server):
        read = x509.load_pem_x509_certificate(server.certificate.read_bytes())
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return read, [str(name.value) for name in names]

    def test_a_renewed_certificate_is_trusted_like_the_old_and_no_key_changes(self, tmp_path):
        server = self.made(tmp_path, "link.example.org", "192.0.2.7")
        keys = {name: (tmp_path / name).read_bytes() for name in ("ca.crt", "ca.key", "server.key")}
        old, names = self.valid(server)
        assert certificates.renew_certificate(tmp_path) == server
        new, same = self.valid(server)
        assert new.serial_number != old.serial_number
        assert new.not_valid_after_utc >= old.not_valid_after_utc
        assert same == names
        assert keys == {name: (tmp_path / name).read_bytes() for name in keys}
        assert server.certificate.stat().st_mode & 0o777 == 0o600
        greet = TestCertificates().greet
        assert greet(server, trust=server.authority, name="link.example.org") == b"well"
        with pytest.raises(ssl.SSLCertVerificationError):
            greet(server, trust=server.authority, name="other.example.org")
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "ca.crt", "ca.key", "server.crt", "server.key",
        ]  # fmt: skip

    def test_nothing_is_overwritten_unasked(self, tmp_path):
        self.made(tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(InputError, match="never overwritten"):
            self.made(tmp_path, "link.example.org")
        with pytest.raises(InputError, match="never overwritten"):
            certificates.make_server_keys(tmp_path, certificates.find_authority(tmp_path))
        assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def test_an_authority_that_is_there_signs_for_a_new_server(self, tmp_path):
        server = self.made(tmp_path)
        authority = server.authority.read_bytes()
        server.certificate.unlink()
        server.key.unlink()
        again = certificates.find_authority(tmp_path)
        certificates.make_server_keys(tmp_path, again, names=["link.example.org"])
        assert server.authority.read_bytes() == authority
        greet = TestCertificates().greet
        assert greet(server, trust=server.authority, name="link.example.org") == b"well"

    def test_a_renewal_that_cannot_be_signed_is_a_sentence(self, tmp_path):
        with pytest.raises(InputError, match=r"server\.crt"):
            certificates.renew_certificate(tmp_path / "empty")
        server = self.made(tmp_path)
        key = (tmp_path / "ca.key").read_bytes()
        (tmp_path / "ca.key").unlink()
        with pytest.raises(InputError, match=r"ca\.key.*bring it back"):
            certificates.renew_certificate(tmp_path)
        (tmp_path / "ca.key").write_bytes(server.key.read_bytes())
        with pytest.raises(InputError, match="another key"):
            certificates.renew_certificate(tmp_path)
        (tmp_path / "ca.key").write_bytes(b"no key")
        with pytest.raises(InputError, match="cannot be read"):
            certificates.renew_certificate(tmp_path)
        (tmp_path / "ca.key").write_bytes(key)
        certificates.renew_certificate(tmp_path)

    def test_no_certificate_outlives_its_authority(self, tmp_path):
        made = certificates.make_authority(tmp_path, days=100)
        read, _ = self.valid(certificates.make_server_keys(tmp_path, made))
        ca = x509.load_pem_x509_certificate(made.certificate.read_bytes())
        assert read.not_valid_after_utc == ca.not_valid_after_utc

    def test_a_clock_that_is_set_back_by_hours_ends_no_connection(self, tmp_path):
        made = certificates.make_authority(tmp_path)
        for file in (made.certificate, certificates.make_server_keys(tmp_path, made).certificate):
            read = x509.load_pem_x509_certificate(file.read_bytes())
            assert read.not_valid_before_utc < datetime.now(UTC) - timedelta(hours=12)

    @pytest.mark.parametrize(
        ("error", "code", "words"),
        [
            (InputError("keys exist already"), 2, "exist already"),
            (NotADirectoryError(20, "Not a directory", "file"), 1, "file: the system refused"),
        ],
    )
    def test_a_program_ends_in_a_sentence(self, capsys, error, code, words):
        def fail():
            raise error

        with pytest.raises(SystemExit) as ended:
            processes.run_command(fail)
        said = capsys.readouterr().err
        assert (ended.value.code, words in said) == (code, True)
        assert len(said.splitlines()) == 1


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
if sys.argv[1:] == ["top"]:
    # A grandchild in a session of its own, as Flower starts some of its processes.
    child = open(__file__).read()
    pid = subprocess.Popen([sys.executable, __file__], start_new_session=True).pid
else:
    pid = subprocess.Popen([sys.executable, "-c", child], start_new_session=True).pid
print(pid, flush=True)
time.sleep(600)
"""


class TestProcesses:
    def stubborn(self, tmp_path, processes):
        """A process, its child and its grandchild: each in its own session, deaf to SIGTERM."""
        script, log = tmp_path / "stubborn.py", tmp_path / "log"
        script.write_text(STUBBORN)
        top = processes.start("top", [sys.executable, str(script), "top"], log=log)
        assert until(lambda: log.exists() and len(log.read_text().split()) == 2)
        pids = [top.pid, *map(int, log.read_text().split())]
        assert until(lambda: not any(map(gone, pids)))
        return pids

    def test_detached_grandchildren_deaf_to_sigterm_end_with_the_context(self, tmp_path):
        with Processes(grace=0.2) as processes:
            pids = self.stubborn(tmp_path, processes)
        assert all(map(gone, pids))

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_they_end_with_an_exception_too(self, tmp_path, error):
        pids = []

        def fall():
            with Processes(grace=0.2) as processes:
                pids.extend(self.stubborn(tmp_path, processes))
                raise error

        with pytest.raises(error):
            fall()
        assert len(pids) == 3
        assert all(map(gone, pids))

    def test_they_end_when_the_parent_is_killed(self, tmp_path):
        (tmp_path / "stubborn.py").write_text(STUBBORN)
        code = """
            import sys, time
            from pathlib import Path
            from sottovoce.flower.processes import Processes
            with Processes(grace=0.2) as processes:
                argv = [sys.executable, "stubborn.py", "top"]
                top = processes.start("top", argv, log=Path("log"))
                print(top.pid, processes.pid, flush=True)
                time.sleep(600)
        """
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        with parent:
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert until(lambda: len((tmp_path / "log").read_text().split()) == 2)
            pids += map(int, (tmp_path / "log").read_text().split())
            assert not any(map(gone, pids))
            parent.kill()
        assert until(lambda: all(map(gone, pids)))

    def test_what_it_started_ends_when_the_keeper_is_killed(self, tmp_path):
        with Processes() as processes:
            nap = [sys.executable, "-c", "import time; time.sleep(600)"]
            first = processes.start("nap", nap, log=tmp_path / "nap.log")
            os.kill(processes.pid, signal.SIGKILL)
            assert until(lambda: gone(first.pid))
            assert first.wait(900) == -signal.SIGKILL
            with pytest.raises(FederationError, match="has ended"):
                processes.start("more", nap, log=tmp_path / "more.log")

    def test_an_end_is_noticed_with_code_and_last_words(self, tmp_path):
        with Processes() as processes:
            argv = [sys.executable, "-c", "print('one\\n\\ntwo'); raise SystemExit(3)"]
            process = processes.start("p", argv, log=tmp_path / "p.log")
            assert process.wait(900) == 3
            assert not process.alive
            assert process.tail(1) == "two"
            with pytest.raises(FederationError, match=r"could not be started .*absent"):
                processes.start("q", [str(tmp_path / "absent")], log=tmp_path / "q.log")
            with pytest.raises(FederationError, match=r"could not be started .*no folder/q\.log"):
                processes.start("q", argv, log=tmp_path / "no folder" / "q.log")

    def test_one_that_may_finish_its_work_does_before_the_others_are_asked(self, tmp_path):
        """It is told first, and those it works with live until it is done; but not for ever."""
        busy = """
            import signal, sys, time
            stopped = []
            signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
            print("ready", flush=True)
            while not stopped:
                time.sleep(0.02)
            time.sleep(float(sys.argv[1]))
            print("stored", time.time(), flush=True)
        """
        other = """
            import signal, sys, time
            def stop(*_):
                print("told", time.time(), flush=True)
                sys.exit()
            signal.signal(signal.SIGTERM, stop)
            print("ready", flush=True)
            time.sleep(600)
        """

        def started(processes, name, code, *words, **more):
            argv = [sys.executable, "-c", textwrap.dedent(code), *words]
            return processes.start(name, argv, log=tmp_path / name, **more)

        with Processes(grace=5.0) as processes:
            started(processes, "worker", busy, "0.5", grace=900.0)
            started(processes, "stuck", busy, "600", grace=0.8)
            started(processes, "node", other)
            assert until(lambda: all(p.tail() == "ready" for p in processes.all.values()))
            began = time.time()
        stored, told = (processes.all[name].tail(1).split() for name in ("worker", "node"))
        assert (stored[0], told[0]) == ("stored", "told")
        assert began < float(stored[1]) < float(told[1])
        assert processes.all["stuck"].tail() == "ready"  # its time was up

    def test_the_keeper_needs_the_standard_library_alone(self):
        done = subprocess.run(
            [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), "5"],
            input=b"",
            capture_output=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"stopped": True}


class TestLocal:
    def test_a_free_port_is_free(self):
        ports = {local.find_free_ports(1)[0] for _ in range(50)}
        assert len(ports) > 40
        assert ports <= set(local.PORTS)

    def test_ports_differ_from_each_other(self, monkeypatch):
        """Nobody listens on them before all are drawn, so that looking is not enough."""
        monkeypatch.setattr(local, "PORTS", range(21_000, 21_040))
        ports = local.find_free_ports(20)
        assert len(set(ports)) == len(ports) == 20
        with pytest.raises(FederationError, match="41 free ports"):
            local.find_free_ports(41)

    def test_nothing_is_sent_to_anyone(self, tmp_path, monkeypatch):
        monkeypatch.setenv("NO_PROXY", "intranet")
        told = local.make_environment(tmp_path)
        assert told["FLWR_TELEMETRY_ENABLED"] == "0"
        assert told["FLWR_DISABLE_UPDATE_CHECK"] == "1"
        assert told["FLWR_HOME"] == str(tmp_path)
        assert told["NO_PROXY"] == "intranet,127.0.0.1,localhost"

    def test_a_link_that_dies_is_named_with_its_last_words(self, tmp_path, monkeypatch):
        monkeypatch.setattr(local, "_find_tool", lambda name: str(tmp_path / "broken"))
        (tmp_path / "broken").write_text("#!/bin/sh\necho no space left; exit 7\n")
        (tmp_path / "broken").chmod(0o700)
        with (
            pytest.raises(FederationError, match=r"(?s)exit code 7.*no space left"),
            local.start_federation(tmp_path / "f", ["a.toml"]),
        ):
            raise AssertionError("it never starts")

    def fallen(self, tmp_path, words="cannot open the node file", code=3):
        """A federation of one node whose worker has ended with these last words."""
        (tmp_path / "node0.worker.log").write_text(f"{words}\n")
        worker = Process("node0.worker", tmp_path / "node0.worker.log", pid=1, code=code)
        running = local.LocalFederation(
            tmp_path, SimpleNamespace(all={}), local.Link("127.0.0.1:1", None), app="a:b"
        )
        running.nodes.append(local.SuperNodeProcess("node0", "", None, None, 1, worker=worker))
        return running

    def test_a_worker_that_cannot_start_is_named_with_its_last_words(self, tmp_path, monkeypatch):
        monkeypatch.setattr(local, "list_online", lambda link: set())
        with pytest.raises(FederationError, match=r"(?s)worker of node0 .*exit code 3.*node file"):
            local._wait_for_nodes(self.fallen(tmp_path), 5.0)

    def test_a_run_that_failed_tells_of_workers_that_fell(self, tmp_path, monkeypatch):
        state = local.RunState("finished", "failed", "ServerApp failed with exception: 0 of 1")
        monkeypatch.setattr(local, "read_run_state", lambda link, run: state)
        running = self.fallen(tmp_path)
        with pytest.raises(FederationError, match=r"the run failed: 0 of 1$"):
            running.wait(7)
        running.nodes[0].falls = 4
        with pytest.raises(FederationError, match=r"(?s)0 of 1\n.*ended 4 times.*node file"):
            running.wait(7)

    def test_one_that_falls_again_and_again_is_given_time(self, tmp_path, monkeypatch):
        """Four starts at once, then one every RETRY seconds."""
        monkeypatch.setattr(local, "BEAT", 0.01)
        monkeypatch.setattr(local, "RETRY", 0.3)
        running, starts = self.fallen(tmp_path), []

        def start(node):
            starts.append(time.monotonic())
            node.worker = Process("node0.worker", tmp_path / "log", pid=1, code=1)

        running.start_worker = start
        running.supervise()
        assert until(lambda: len(starts) >= local.AT_ONCE + 1)
        running.close()
        gaps = [b - a for a, b in itertools.pairwise(starts)]
        assert min(gaps[local.AT_ONCE - 2 :]) + 0.01 >= 0.3
        assert running.nodes[0].falls >= local.AT_ONCE + 1

    def test_a_start_that_fails_does_not_end_the_watch(self, tmp_path, monkeypatch):
        """The disk is full for a moment: the worker is started again when it is not."""
        monkeypatch.setattr(local, "BEAT", 0.01)
        monkeypatch.setattr(local, "RETRY", 0.01)
        running, tries = self.fallen(tmp_path), []

        def start(node):
            tries.append(node)
            if len(tries) < 4:
                raise [FederationError("no space"), OSError(28, "no space")][len(tries) % 2]
            node.worker = Process("node0.worker", tmp_path / "log", pid=1)

        running.start_worker = start
        running.supervise()
        assert until(lambda: running.nodes[0].worker.alive)
        running.close()
        assert len(tries) == 4

    def test_two_threads_that_ask_leave_the_environment_as_it_was(self, monkeypatch):
        """The one that watches the nodes, and the one that follows the run."""
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        entered, leave, failed = threading.Event(), threading.Event(), []

        def other():
            try:
                with local._bypass_proxy("127.0.0.1:1"):
                    entered.set()
                    leave.wait(900)
            except KeyError as error:
                failed.append(error)

        thread = threading.Thread(target=other)
        with local._bypass_proxy("127.0.0.1:1"):
            thread.start()
            entered.wait(1.0)  # it must not get in; where it does, the first to leave takes all
        leave.set()
        thread.join()
        assert failed == []
        assert not {"NO_PROXY", "no_proxy"} & os.environ.keys()

    def answers(self, monkeypatch, *said):
        """What the SuperLink says of a run, look by look; the last for ever."""
        said = list(said)

        def look(link, run):
            one = said.pop(0) if len(said) > 1 else said[0]
            if isinstance(one, Exception):
                raise one
            return one

        monkeypatch.setattr(local, "read_run_state", look)

    def test_a_slow_answer_does_not_end_a_run(self, tmp_path, monkeypatch):
        running, late = self.fallen(tmp_path), local.NoAnswer("it does not answer")
        goes, ends = (
            local.RunState("running", "", ""),
            local.RunState("finished", "completed", ""),
        )
        self.answers(monkeypatch, goes, late, late, goes, late, ends)
        assert running.wait(7, every=0.01).outcome == "completed"
        monkeypatch.setattr(local, "SLOW", 0.1)
        self.answers(monkeypatch, goes, late)
        with pytest.raises(FederationError, match="does not answer"):
            running.wait(7, every=0.01)
        self.answers(monkeypatch, goes, FederationError("the SuperLink knows no run 7"))
        with pytest.raises(FederationError, match="knows no run"):
            running.wait(7, every=0.01)

    def test_a_link_that_died_is_not_waited_for(self, tmp_path, monkeypatch):
        running = self.fallen(tmp_path)
        running._link_process = Process("superlink", tmp_path / "none", pid=1, code=9)
        self.answers(monkeypatch, local.NoAnswer("it does not answer"))
        with pytest.raises(FederationError, match="the SuperLink ended with exit code 9"):
            running.wait(7, every=0.01)

    @pytest.mark.parametrize("status", [None, 503, 403])
    def test_what_may_pass_is_told_from_what_will_not(self, status, monkeypatch):
        class Client:
            @classmethod
            def from_server_address(cls, *_, **__):
                return cls()

            def ListNodes(self, request):  # noqa: N802 - Flower's name
                asked = httpx.Request("POST", "https://127.0.0.1:1")
                if status is None:
                    raise httpx.ReadTimeout("slow", request=asked)
                answer = httpx.Response(status, text="no", request=asked)
                raise httpx.HTTPStatusError("no", request=asked, response=answer)

            def close(self):
                pass

        monkeypatch.setattr(local, "ControlHttpClient", Client)
        with pytest.raises(FederationError) as error:
            local.list_online(local.Link("127.0.0.1:1", None))
        assert isinstance(error.value, local.NoAnswer) == (status != 403)

    def test_no_nodes_no_federation(self, tmp_path):
        with pytest.raises(InputError, match="at least one"), local.start_federation(tmp_path, []):
            raise AssertionError("it never starts")
        bad = pytest.raises(InputError, match="without '")
        with bad, local.start_federation(tmp_path, ["o'neill.toml"]):
            raise AssertionError("it never starts")


def test_a_pipe_that_is_closed_while_it_is_read_has_ended():
    """Closing it from another thread may surprise the reader in the middle of a line."""

    class Surprised:
        lines = iter([b"one\n"])

        def readline(self):
            for line in self.lines:
                return line
            raise ValueError("PyMemoryView_FromBuffer(): info->buf must not be NULL")

    assert list(processes._read_lines(Surprised())) == [b"one\n"]
    assert list(processes._read_lines(io.BytesIO(b"one\ntwo"))) == [b"one\n", b"two"]
