"""Snapshot, restore, fork, pause and resume: what comes back is what was saved, and nothing else moves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from waypoint import sealing
from waypoint.engine import Engine
from waypoint.errors import Exists, HasChildren, NotCapturable, NotFound, UsageError, WrongState
from waypoint.model import BaseRecord
from waypoint.session import Session


def out(session: Session, command: str) -> str:
    return session.exec(command, timeout=30).stdout.decode()


def break_everything(session: Session) -> None:
    session.exec("cd /; unset FOO f; rm -rf /task; kill %1 %2 2>/dev/null; exec 5>&- 2>/dev/null; umask 0; trap - USR1")


@pytest.fixture
def rich(session: Session) -> Session:
    """A session with state of every kind."""
    session.exec(
        "mkdir /task; cd /task; FOO=bar; export EXPORTED=1; f() { echo f$1; }; arr=(a b); umask 027; trap 'echo usr' USR1;"
        "echo v1 > file; ln file hard; ln -s file soft; mkfifo fifo; exec 5>log; echo first >&5"
    )
    session.exec("sleep 1000 &")
    session.exec("(i=0; while :; do i=$((i+1)); echo $i > /task/next; mv /task/next /task/count; sleep 0.02; done) &")
    return session


def check_rich(session: Session) -> None:
    assert out(session, "echo $PWD $FOO $EXPORTED $(f 1) ${arr[1]} $(umask)") == "/task bar 1 f1 b 0027\n"
    assert out(session, "jobs | grep -c Running") == "2\n"
    assert out(
        session, "cat file; readlink soft; [ file -ef hard ] && echo same; [ -p fifo ] && echo fifo"
    ).split() == [
        "v1",
        "file",
        "same",
        "fifo",
    ]
    session.exec("echo second >&5")
    assert out(session, "cat log") == "first\nsecond\n"
    first = int(out(session, "cat count"))
    assert int(out(session, "sleep 0.2; cat count")) > first, "the background loop stands still"
    session.exec("kill -USR1 $$")


@pytest.mark.parametrize("kind", ["small", "host"])
def test_restore_brings_everything_back(
    engine: Engine, small_base: BaseRecord, sessions: list[Session], kind: str
) -> None:
    session = engine.new(base=small_base if kind == "small" else None)
    session.exec("mkdir -p /task; cd /task; FOO=bar; echo v1 > file; sleep 1000 &")
    taken = session.snapshot("good")
    assert taken.paused_ms > 0 and taken.memory_bytes > 0 and "processes" in taken.capture.captured
    assert out(session, "echo $FOO; cat file") == "bar\nv1\n", "the session did not run on"
    session.exec("cd /; FOO=no; rm -rf /task; kill %1")
    session.restore("good")
    assert out(session, "echo $FOO $PWD; cat file; jobs | grep -c Running") == "bar /task\nv1\n1\n"


def test_rich_state_in_place_and_in_forks(rich: Session) -> None:
    rich.snapshot("rich")
    break_everything(rich)
    rich.restore("rich")
    check_rich(rich)
    forks = rich.fork(2, from_snapshot="rich")
    for fork in forks:
        check_rich(fork)
    forks[0].exec("echo other > file; FOO=other")
    assert out(forks[1], "cat file; echo $FOO") == "v1\nbar\n"
    assert out(rich, "cat file; echo $FOO") == "v1\nbar\n"


def test_a_command_in_flight_goes_on_everywhere(session: Session) -> None:
    session.exec("mkdir /w; cd /w")
    started = threading.Event()
    results = []

    def work() -> None:
        results.append(
            session.exec(
                "for i in $(seq 40); do echo $i; echo $i > n; sleep 0.05; done; (exit 9)",
                on_stdout=lambda _: started.set(),
            )
        )

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    taken = session.snapshot()
    (fork,) = session.fork(1, from_snapshot=taken.id)
    assert fork.wait(timeout=30).exit_code == 9
    assert out(fork, "cat n") == "40\n"
    thread.join(30)
    assert results[0].exit_code == 9
    assert results[0].stdout == b"".join(b"%d\n" % i for i in range(1, 41)), (
        "output was lost or doubled by the snapshot"
    )


def test_server_with_memory(host_session: Session) -> None:
    server = (
        "import http.server\nn=0\nclass H(http.server.BaseHTTPRequestHandler):\n"
        " def do_GET(self):\n  global n; n+=1\n  b=str(n).encode()\n  self.send_response(200); self.send_header('Content-Length',len(b));"
        " self.end_headers(); self.wfile.write(b)\n def log_message(self,*a): pass\n"
        "http.server.ThreadingHTTPServer(('127.0.0.1',8765),H).serve_forever()\n"
    )
    get = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8765',timeout=10).read().decode())\""
    host_session.exec("cat > /tmp/s.py", stdin=server.encode())
    host_session.exec(
        "python3 /tmp/s.py & for i in $(seq 200); do (echo > /dev/tcp/127.0.0.1/8765) 2>/dev/null && break; sleep 0.05; done"
    )
    base = int(out(host_session, get))
    host_session.snapshot("three")
    assert int(out(host_session, get)) == base + 1
    host_session.restore("three")
    forks = host_session.fork(2, from_snapshot="three")
    assert [int(out(one, get)) for one in (host_session, *forks)] == [base + 1] * 3
    assert int(out(forks[0], get)) == base + 2 and int(out(forks[1], get)) == base + 2


def test_pause_frees_everything_and_resume_brings_it_back(engine: Engine, rich: Session) -> None:
    from waypoint.kernel import processes

    pid = rich.record.init_pid
    rich.pause()
    assert rich.record.state == "paused"
    assert processes.namespace_pids(pid) in ([pid], []) or not processes.alive(processes.Process(pid, 0))
    with pytest.raises(WrongState):
        rich.exec("true")
    Engine(engine.store.paths.home).session(rich.id).resume()
    check_rich(rich)


def test_many_small_files_are_sealed_by_rehoming(session: Session) -> None:
    session.exec("mkdir /many; for i in $(seq 3500); do echo $i > /many/$i; done; FOO=kept; sleep 1000 &", timeout=60)
    before = session.record
    session.snapshot("many")
    after = session.record
    assert before.init_pid != after.init_pid and len(after.layers) == len(before.layers) + 1
    assert out(session, "ls /many | wc -l; echo $FOO; jobs | grep -c Running") == "3500\nkept\n1\n"
    session.exec("rm -rf /many")
    session.restore("many")
    assert out(session, "ls /many | wc -l; cat /many/777") == "3500\n777\n"


def test_nothing_changed_makes_no_layer(session: Session) -> None:
    session.exec("echo x > /x")
    first, second = session.snapshot(), session.snapshot()
    assert second.layers == first.layers and second.files_bytes == 0
    session.exec("echo y > /x")
    third = session.snapshot()
    assert third.layers != first.layers
    session.restore(second.id)
    assert out(session, "cat /x") == "x\n"


def test_chain_of_sixty(session: Session) -> None:
    ids = []
    for i in range(60):
        session.exec(f"echo {i} > /step; n{i}={i}")
        ids.append(session.snapshot().id)
    for i in (0, 30, 59):
        session.restore(ids[i])
        assert out(session, f"cat /step; echo $n{i} ${{n{i + 1}-none}}") == f"{i}\n{i} none\n"


def test_restore_fifty_times(session: Session) -> None:
    session.exec("echo 0 > /n; X=0; sleep 1000 &")
    session.snapshot("zero")
    for i in range(50):
        session.exec(f"echo {i} >> /n; X={i}")
        session.restore("zero")
    assert out(session, "cat /n; echo $X; jobs | grep -c Running") == "0\n0\n1\n"


def test_hundred_forks_diverge(session: Session) -> None:
    session.exec("echo base > /f; V=base; sleep 1000 &")
    taken = session.snapshot()
    forks = session.fork(100, from_snapshot=taken.id)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda pair: pair[1].exec(f"echo {pair[0]} > /f; V={pair[0]}"), enumerate(forks)))
        said = list(pool.map(lambda fork: out(fork, "echo $(cat /f) $V $(jobs | grep -c Running)"), forks))
    assert said == [f"{i} {i} 1\n" for i in range(100)]
    assert out(session, "cat /f; echo $V") == "base\nbase\n"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda fork: fork.remove(), forks))


def test_twenty_sessions_from_threads(engine: Engine, small_base: BaseRecord, sessions: list[Session]) -> None:
    def work(i: int) -> str:
        one = engine.new(base=small_base, name=f"thread-{i}")
        one.exec(f"V={i}; echo {i} > /f")
        taken = one.snapshot("s")
        one.exec("V=gone; rm /f")
        one.restore(taken.id)
        said = out(one, "echo $V $(cat /f)")
        one.remove()
        engine.store.db.close()
        return said

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(work, range(20))) == [f"{i} {i}\n" for i in range(20)]


def test_undo_goes_back_command_by_command(engine: Engine, small_base: BaseRecord, sessions: list[Session]) -> None:
    session = engine.new(base=small_base, auto_snapshot=True)
    for i in range(3):
        session.exec(f"X={i}; echo {i} > /f")
    session.undo()
    assert session.state()["current"] == "0"
    assert session.run(["cat", "/f"]).stdout == b"1\n"
    session.undo()
    assert session.run(["cat", "/f"]).stdout == b"0\n"


def test_names_and_refusals(engine: Engine, session: Session) -> None:
    first = session.snapshot("first")
    second = session.snapshot()
    for bad in ("a/b", "..", "a:b", "x" * 64, "", "-x", "a b"):
        with pytest.raises(UsageError):
            session.snapshot(bad)
    with pytest.raises((Exists, UsageError)):
        session.snapshot("first")
    with pytest.raises(NotFound):
        session.restore("nothing")
    with pytest.raises(HasChildren):
        engine.remove_snapshot(first.id)
    assert session.restore(first.id[:7]).id == first.id
    assert engine.remove_snapshot(first.id, recursive=True) == [first.id, second.id]
    assert out(session, "echo alive") == "alive\n"


def test_failed_restore_leaves_the_session_running(engine: Engine, session: Session) -> None:
    session.exec("V=live")
    taken = session.snapshot()
    core = next(engine.store.paths.image(taken.id).glob("core-*.img"))
    core.write_bytes(b"damaged")
    with pytest.raises(Exception, match="restore"):
        session.restore(taken.id)
    assert out(session, "echo $V") == "live\n"


def test_files_only_session(engine: Engine, small_base: BaseRecord, sessions: list[Session]) -> None:
    session = engine.new(base=small_base, files_only=True)
    session.exec("echo one > /f; V=1; sleep 1000 &")
    taken = session.snapshot("one")
    assert taken.capture.captured == ("files",) and not taken.full
    session.exec("rm /f")
    session.restore("one")
    assert out(session, "jobs; cat /f; echo [$V]") == "one\n[]\n"
    (fork,) = session.fork(1, from_snapshot="one")
    assert out(fork, "cat /f") == "one\n"
    session.pause()
    session.resume()
    assert out(session, "cat /f") == "one\n"


def test_many_changed_files_are_described_beside_the_rest(engine: Engine, session: Session) -> None:
    session.exec("mkdir /many; cd /many; for i in $(seq 1500); do echo $i > $i; done", timeout=60)
    record = session.snapshot()
    assert record.layers[0] != session.record.upper
    assert record.files_bytes >= 1500 * 4096
    assert engine.store.db.snapshot(record.id).manifest["files"] == record.manifest["files"]
    (fork,) = engine.fork(record, 1, verify=True)
    try:
        assert fork.exec("cat /many/1500; ls /many | wc -l").stdout.split() == [b"1500", b"1500"]
    finally:
        fork.remove()


def test_a_session_with_connections_to_the_outside_is_never_ended_for_a_snapshot(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    upper = Path("/")  # far more than is copied
    assert sealing.is_big(session.record, upper, draft=False)
    outside = replace(session.record, spec=replace(session.record.spec, network="nat"))
    assert sealing.is_big(outside, upper, draft=False)
    monkeypatch.setattr(sealing.netlock, "has_connections", lambda _: True)
    assert not sealing.is_big(outside, upper, draft=False)
    assert sealing.is_big(session.record, upper, draft=False), "those on its loopback come back"


def test_files_are_copied_before_criu_begins_where_it_may_change_them(engine: Engine, small_base: BaseRecord) -> None:
    """For mounts inside each other CRIU makes a directory in the session's /tmp: it is in no snapshot."""
    session = engine.new(base=small_base, extra_capabilities=["+SYS_ADMIN"], seccomp=False)
    try:
        made = session.exec(
            "mkdir -p /tmp /a && mount -t tmpfs a /a && mkdir /a/b && mount -t tmpfs b /a/b && echo in >/a/b/file && touch -d @1000000000 /tmp"
        )
        assert made.exit_code == 0, made.stderr
        saved = session.snapshot()
        sealed = engine.store.paths.upper(saved.layers[0])
        assert list((sealed / "tmp").iterdir()) == []
        assert (sealed / "tmp").stat().st_mtime == 1000000000
        session.restore(saved.id)
        assert session.exec("cat /a/b/file; stat -c %Y /tmp").stdout.split() == [b"in", b"1000000000"]
    finally:
        session.remove()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_message_queue_is_refused_before_anything_is_touched(
    engine: Engine, eager: Engine, session: Session, ahead: bool
) -> None:
    one = (eager if ahead else engine).session(session.id)
    one.exec("V=1; touch /dev/mqueue/letters")
    with pytest.raises(NotCapturable, match="/dev/mqueue/letters"):
        one.snapshot()
    assert one.exec("echo $V; rm /dev/mqueue/letters").stdout == b"1\n"
    taken = one.snapshot()
    assert taken.manifest["shell"]["env"], "the shell was asked"


def test_a_shell_that_says_more_of_itself_than_a_pipe_holds(session: Session) -> None:
    """Nobody reads its answer line by line: what does not fit is read all the same."""
    session.exec("export BIG=$(head -c 300000 /dev/zero | tr '\\0' x) LAST=there")
    taken = session.snapshot()
    told = taken.manifest["shell"]
    assert told["env"]["LAST"] == "there" and len(told["env"]["BIG"]) == 300000
    session.restore(taken.id, verify=True)
    assert session.exec("echo ${#BIG} $LAST").stdout == b"300000 there\n"
