"""What the client does beyond the contract: to await, through broken connections and restarts, with tokens, with errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from certificates import make_certificate
from daemon import Daemon, running, until
from statefork import Environment
from statefork.client import (
    AsyncClient,
    AsyncRemoteEnvironment,
    Client,
    Forbidden,
    Overloaded,
    RemoteEnvironment,
    Unauthenticated,
    Unreachable,
)
from statefork.errors import ExecTimeout, Exists, NotFound, UsageError, WrongState

PROGRAM = [sys.executable, "-c", "from statefork.cli.main import main; main()"]
ONLY_IN_PROCESS = {
    "abandon", "adopt", "create", "family", "from_node", "lost", "place", "settled",  # for those who look after trees: the daemon
    "follow_command", "running_command",  # by the engine's numbers; a client has ids: commands, attach_command
    "pack_archive", "unpack_archive", "scan_files",  # upload and download
    "resize", "terminal",  # WebSockets
    "become",  # for explore.promote; over HTTP a restore is the same
}  # fmt: skip


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("c")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(socket=daemon.socket) as client:
        yield client


@pytest.fixture(scope="module")
def environment(client: Client) -> Iterator[RemoteEnvironment]:
    with client.create_env_manager("waypoint_build") as environment:
        yield environment


def statefork(home: Path, *arguments: str) -> str:
    variables = {**os.environ, "STATEFORK_HOME": str(home)}
    done = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=60, env=variables, check=True)
    return done.stdout.strip()


class Cutter:
    """Between a client and the daemon: passes everything on, but hangs up on the next answers when told to."""

    def __init__(self, path: Path, target: Path) -> None:
        self.cut = 0
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(str(self._target))
                threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if answers and self.cut:
                    self.cut -= 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cutter(daemon: Daemon, tmp_path: Path) -> Iterator[Cutter]:
    cutter = Cutter(tmp_path / "cut.sock", daemon.socket)
    yield cutter
    cutter.close()


class TestSurface:
    @pytest.mark.parametrize("kind", [RemoteEnvironment, AsyncRemoteEnvironment])
    def test_it_has_the_methods_of_the_library(self, kind: type) -> None:
        for name in dir(Environment):
            if name.startswith("_") or name in ONLY_IN_PROCESS:
                continue
            if name in ("backend", "capabilities"):
                continue  # set when it is made
            ours, theirs = getattr(kind, name, None), getattr(Environment, name)
            assert ours is not None, name
            if callable(theirs) and name not in ("signal_command", "usage"):
                wanted = [one for one in inspect.signature(theirs).parameters if one != "on_start"][1:]
                assert list(inspect.signature(ours).parameters)[1:] == wanted, name

    def test_both_kinds_have_the_same(self) -> None:
        def public(kind: type) -> set[str]:
            return {name for name in dir(kind) if not name.startswith("_")}

        assert public(RemoteEnvironment) == public(AsyncRemoteEnvironment)
        assert public(Client) == public(AsyncClient)


class TestAwaiting:
    def test_all_at_once(self, daemon: Daemon, tmp_path: Path) -> None:
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree/file").write_text("up")

        async def work() -> None:
            async with (
                AsyncClient(socket=daemon.socket) as client,
                await client.create_env_manager("waypoint_build") as base,
            ):
                await base.upload(tmp_path / "tree", "/srv/tree")
                start = await base.snapshot("start")
                forks = await base.fork(2, from_snapshot="start")
                commands = (fork.exec_command(f"cat /srv/tree/file; who={n}") for n, fork in enumerate(forks))
                assert [result.stdout for result in await asyncio.gather(*commands)] == ["up", "up"]
                assert [(await fork.exec_command("echo $who")).stdout for fork in forks] == ["0\n", "1\n"]
                await asyncio.gather(*(fork.destroy() for fork in forks))
                stream = await base.stream_command("echo one; echo two >&2; (exit 3)")
                pieces = [piece async for piece in stream]
                assert dict(pieces) == {"stdout": b"one\n", "stderr": b"two\n"}
                assert (await stream.result()).exit_code == 3
                await base.download("/srv/tree", tmp_path / "down")
                assert (tmp_path / "down/file").read_text() == "up"
                assert (await base.state(), (await base.info()).snapshot) == ("live", start)
                assert (await base.stats()).snapshots == 1
                with pytest.raises(ExecTimeout) as caught:
                    await base.exec_command("echo part; sleep 60", timeout=0.5)
                assert caught.value.result.stdout == "part\n"
                with pytest.raises(NotFound):
                    await base.restore("surely-not")
            with pytest.raises(WrongState):
                await base.exec_command("true")

        asyncio.run(work())


class TestBrokenConnections:
    def test_what_makes_something_is_made_once(self, daemon: Daemon, cutter: Cutter, tmp_path: Path) -> None:
        with Client(socket=tmp_path / "cut.sock") as client:
            assert client.backends()
            before = len(daemon.listed())
            cutter.cut = 2
            with client.create_env_manager("waypoint_build") as environment:
                assert cutter.cut == 0
                assert len(daemon.listed()) == before + 1
                cutter.cut = 2
                assert environment.exec_command("count=$((count+1)); echo $count").stdout == "1\n"
                cutter.cut = 1
                environment.snapshot("once")
                assert [one.name for one in environment.snapshots()] == ["once"]
                environment.write_file("/tmp/file", "x")
                cutter.cut = 1
                environment.remove_file("/tmp/file")
                with pytest.raises(NotFound):
                    environment.remove_file("/tmp/file")

    def test_what_may_have_been_done_is_not_done_again(self, environment: RemoteEnvironment, cutter: Cutter, tmp_path: Path) -> None:
        with Client(socket=tmp_path / "cut.sock") as client:
            same = client.environment(environment.id)
            environment.write_file("/tmp/a", "x")
            cutter.cut = 1
            with pytest.raises(Unreachable, match="not known"):
                same.move_file("/tmp/a", "/tmp/b")
            assert environment.read_file("/tmp/b") == b"x"

    def test_a_stream_goes_on_where_it_broke(self, environment: RemoteEnvironment, cutter: Cutter, tmp_path: Path) -> None:
        with Client(socket=tmp_path / "cut.sock") as client:
            stream = client.environment(environment.id).stream_command(
                "seq 100; while ! [ -e /tmp/cut ]; do sleep 0.05; done; seq 101 200; echo end >&2"
            )
            seen = b""
            for name, data in stream:
                if name == "stdout":
                    seen += data
                if seen.endswith(b"\n100\n"):
                    cutter.cut = 1
                    environment.write_file("/tmp/cut", "")
            assert cutter.cut == 0
            assert seen.decode().split() == [str(n) for n in range(1, 201)]
            assert (stream.result.stdout_bytes, stream.result.stderr, stream.result.truncated) == (seen, "end\n", False)

    def test_too_much_at_once_is_waited_for(self, tmp_path: Path) -> None:
        with running(tmp_path / "d", "--set", "commands_per_environment=1") as daemon:
            with Client(socket=daemon.socket) as client, Client(socket=daemon.socket, retry_seconds=0) as hasty:
                environment = client.create_env_manager("waypoint_build")
                stream = environment.stream_command("echo begun; while ! [ -e /tmp/go ]; do sleep 0.05; done")
                assert next(iter(stream)) == ("stdout", b"begun\n")
                with pytest.raises(Overloaded):
                    hasty.environment(environment.id).exec_command("true")
                refused = daemon.log.read_text().count("429")
                results: list[str] = []
                waiter = threading.Thread(target=lambda: results.append(environment.run(["echo", "patient"]).stdout))
                waiter.start()
                until(lambda: daemon.log.read_text().count("429") > refused, what="the other one is refused, too")
                environment.write_file("/tmp/go", "")
                waiter.join(60)
                assert results == ["patient\n"]
                assert stream.result.ok

    def test_no_daemon_is_said_at_once(self, tmp_path: Path) -> None:
        with Client(socket=tmp_path / "none.sock") as client, pytest.raises(Unreachable, match="statefork serve"):
            client.environments()

    def test_the_daemon_is_killed_and_comes_back(self, tmp_path: Path) -> None:
        with running(tmp_path / "d") as daemon, Client(socket=daemon.socket) as client:
            environment = client.create_env_manager("waypoint_build")
            environment.snapshot("before")
            results: list[str] = []
            wait = "while ! [ -e /tmp/{} ]; do sleep 0.05; done; echo {}"

            def call() -> None:
                results.append(environment.exec_command(wait.format("go", "called"), stdin=b"").stdout)

            def follow() -> None:
                argv = ["sh", "-c", "echo begun; " + wait.format("go", "followed")]
                results.append(environment.run(argv, on_output=lambda *_: None).stdout)

            threads = [threading.Thread(target=target) for target in (call, follow)]
            for thread in threads:
                thread.start()
            until(lambda: written_down(daemon) == 2, what="both commands are written down")
            daemon.kill()
            daemon.start()
            assert [one.name for one in environment.snapshots()] == ["before"]
            environment.run(["touch", "/tmp/go"])
            for thread in threads:
                thread.join(60)
            assert sorted(results) == ["begun\nfollowed\n", "called\n"]


def written_down(daemon: Daemon) -> int:
    import sqlite3

    with contextlib.closing(sqlite3.connect(daemon.home / "server/server.db")) as database:
        return int(database.execute("SELECT count(*) FROM commands").fetchone()[0])


class TestCommands:
    def test_another_comes_back_to_a_command(self, client: Client, environment: RemoteEnvironment) -> None:
        stream = environment.stream_command("echo begun; read -r word </dev/null; while ! [ -e /tmp/word ]; do sleep 0.05; done; cat /tmp/word")
        assert next(iter(stream)) == ("stdout", b"begun\n")
        stream.close()
        again = client.environment(environment.id)
        (one,) = [one for one in again.commands() if one.state == "running"]
        assert one.id == stream.command
        followed = again.attach_command(one.id)
        again.write_file("/tmp/word", "magic")
        assert followed.result.stdout == "begun\nmagic"

    def test_signals(self, environment: RemoteEnvironment) -> None:
        stream = environment.stream_command("echo begun; sleep 600")
        assert next(iter(stream)) == ("stdout", b"begun\n")
        environment.signal_command(2)
        assert stream.result.exit_code == 130
        with pytest.raises(NotFound):
            environment.signal_command(2)


class TestLargeThings:
    def test_files(self, environment: RemoteEnvironment, tmp_path: Path) -> None:
        data = os.urandom(1 << 20) * 20
        environment.run(["install", "-m", "750", "/dev/null", "/tmp/large"])
        environment.write_file("/tmp/large", data)
        assert environment.run(["stat", "-c", "%a %s", "/tmp/large"]).stdout == f"750 {len(data)}\n"
        environment.download("/tmp/large", tmp_path / "large")
        assert hashlib.sha256((tmp_path / "large").read_bytes()).digest() == hashlib.sha256(data).digest()
        with pytest.raises(UsageError, match="directory"):
            environment.write_file("/tmp", data)
        with pytest.raises(UsageError, match="directory"):
            environment.upload(tmp_path / "large", "/tmp")

    def test_a_quick_command_loses_nothing(self, environment: RemoteEnvironment) -> None:
        """It prints more than the daemon keeps before anybody can have begun to read."""
        stream = environment.stream_command("head -c 8000000 /dev/zero")
        assert sum(len(data) for _, data in stream) == 8_000_000
        assert not stream.result.truncated


class TestDaemonOnly:
    def test_terms_and_lists(self, client: Client) -> None:
        with client.create("waypoint_build", metadata={"task": "sdk-test"}, ttl_seconds=600) as environment:
            (found,) = client.environments(metadata={"task": "sdk-test"})
            assert (found.id, found.ttl_seconds, found.state) == (environment.id, 600, "live")
            changed = environment.update(ttl_seconds=None, metadata={})
            assert (changed.expires_at, changed.metadata, changed.ttl_seconds) == (None, {}, None)
            snapshot = environment.snapshot("a")
            assert environment.rename_snapshot("a", "b").name == "b"
            environment.pin_snapshot("b")
            with pytest.raises(WrongState):
                environment.remove_snapshot("b")
            assert environment.usage().snapshots == 1
        assert snapshot in [one.id for one in client.snapshots()]
        with client.create(snapshot=snapshot) as again:
            assert again.exec_command("echo back").stdout == "back\n"
            again.pin_snapshot(snapshot, False)
        assert snapshot not in [one.id for one in client.snapshots()]

    def test_tokens(self, daemon: Daemon, environment: RemoteEnvironment) -> None:
        with Client(socket=daemon.socket, token="sft_wrong") as client, pytest.raises(Unauthenticated):
            client.environments()
        reader = statefork(daemon.home, "token", "create", "--scope", "read")
        with Client(socket=daemon.socket, token=reader) as client, pytest.raises(Forbidden) as caught:
            client.create_env_manager("waypoint_build")
        assert (caught.value.code, caught.value.details["status"]) == ("forbidden", 403)
        few = statefork(daemon.home, "token", "create", "--scope", "admin", "--max-environments", "0")
        with Client(socket=daemon.socket, token=few) as client, pytest.raises(Overloaded) as refused:
            client.create_env_manager("waypoint_build")
        assert refused.value.code == "too_many_environments"

    def test_over_tls(self, tmp_path: Path) -> None:
        tls = make_certificate(tmp_path)
        home = tmp_path / "home"
        token = statefork(home, "token", "create", "--scope", "admin")
        argv = [*PROGRAM, "serve", "--host", "127.0.0.1", "--port", "0", "--tls-cert", str(tls.certificate), "--tls-key", str(tls.key)]
        variables = {**os.environ, "STATEFORK_HOME": str(home)}
        with subprocess.Popen(argv, env=variables, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                url = next(found[0] for line in process.stderr if (found := re.search(r"https://\S+:\d+", line)))
                threading.Thread(target=process.stderr.read, daemon=True).start()
                with Client(url, token=token, ca=tls.certificate) as client:
                    assert client.environments() == []
                    with pytest.raises(NotFound):
                        client.environment("e-none")
                with Client(url, token=token) as client, pytest.raises(Unreachable, match="CERTIFICATE"):
                    client.environments()
            finally:
                process.terminate()

    def test_errors_are_the_library_s(self, environment: RemoteEnvironment) -> None:
        environment.snapshot("taken")
        with pytest.raises(Exists) as caught:
            environment.snapshot("taken")
        assert caught.value.code == "exists"
        assert "taken" in caught.value.message
        assert caught.value.details["request_id"]
        with pytest.raises(UsageError):
            Client("ftp://x")
        with pytest.raises(UsageError):
            Client("http://x", socket="/y")


EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/sdk-python.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_documentation_run(example: str, daemon: Daemon) -> None:
    before = set(daemon.listed())
    text = example.replace("/var/lib/statefork/statefork.sock", str(daemon.socket))
    assert text != example
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert set(daemon.listed()) == before
