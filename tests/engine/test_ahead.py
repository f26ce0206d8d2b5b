"""Workers that wait for the next snapshot and restore: used, let go, and never in the way of what they are for."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from waypoint import ahead
from waypoint.engine import Engine
from waypoint.errors import CriuError, NotFound
from waypoint.kernel import processes
from waypoint.model import BaseRecord, Process
from waypoint.session import Session


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


@pytest.fixture
def eager_session(eager: Engine, small_base: BaseRecord) -> Iterator[Session]:
    session = eager.new(base=small_base)
    yield session
    session.remove()


def stocked(engine: Engine) -> list[int]:
    until(lambda: len(engine.stock.waiting()) >= 2, "a worker for each way")
    return engine.stock.waiting()


def end(pids: list[int]) -> None:
    """Killed, and dead: whether somebody has reaped them or not."""
    watched = [os.pidfd_open(pid) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for descriptor in watched:
        assert select.select([descriptor], [], [], 30)[0]
        os.close(descriptor)


def test_snapshots_and_restores_use_the_workers_that_wait(eager: Engine, eager_session: Session) -> None:
    session = eager_session
    used: set[int] = set()
    snapshots = []
    session.exec("sleep 1000 & N=0")
    for number in range(5):
        session.exec(f"N={number}; echo {number} >/file")
        snapshots.append(session.snapshot().id)
        before = set(stocked(eager))
        (fork,) = session.fork(1, from_snapshot=snapshots[-1])
        assert fork.exec("echo $N; cat /file; jobs -pr | wc -l").stdout.split() == [b"%d" % number] * 2 + [b"1"]
        fork.remove()
        used |= before - set(eager.stock.waiting())
    for number in (3, 0, 4):
        stocked(eager)
        session.restore(snapshots[number], verify=True)
        assert session.exec("echo $N; cat /file").stdout.split() == [b"%d" % number] * 2
    assert used, "no worker was ever taken"


def test_a_worker_that_was_killed_is_replaced(eager: Engine, eager_session: Session) -> None:
    session = eager_session
    session.exec("X=1")
    first = session.snapshot().id
    end(stocked(eager))
    session.exec("X=2")
    second = session.snapshot().id
    session.restore(first)
    assert session.exec("echo $X").stdout == b"1\n"
    session.restore(second)
    assert session.exec("echo $X").stdout == b"2\n"


def test_what_mounts_the_root_was_killed_and_is_replaced(eager: Engine, eager_session: Session) -> None:
    session = eager_session
    session.exec("X=1")
    first = session.snapshot().id
    stocked(eager)
    killed = [one.waiting.stager.pid for one in eager.stock._restorers]
    end(killed)
    session.exec("X=2")
    session.restore(first)
    assert session.exec("echo $X").stdout == b"1\n"
    until(lambda: not any(alive(pid) for pid in killed), "they are reaped")
    assert killed


def test_a_worker_for_an_older_incarnation_is_not_used(eager: Engine, engine: Engine, eager_session: Session) -> None:
    session = eager_session
    session.exec("X=old")
    snapshot = session.snapshot().id
    stocked(eager)
    engine.session(session.id).restore(snapshot)  # somebody else's restore: other processes, another network namespace
    session.exec("X=new")
    again = session.snapshot().id
    (fork,) = session.fork(1, from_snapshot=again)
    assert fork.exec("echo $X").stdout == b"new\n"
    fork.remove()


def test_workers_end_with_their_engine_and_after_a_while(
    home: Path, small_base: BaseRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(home, ahead=True) as eager:
        session = eager.new(base=small_base)
        session.snapshot()
        workers = stocked(eager)
        session.remove()
    until(lambda: not any(alive(pid) for pid in workers), "the workers end with the engine")
    monkeypatch.setattr(ahead, "IDLE_SECONDS", 0.2)
    with Engine(home, ahead=True) as eager:
        session = eager.new(base=small_base)
        session.snapshot()
        until(lambda: len(eager.stock.waiting()) > 0, "a worker waits")
        until(lambda: not eager.stock.waiting(), "workers that nobody needs are let go")
        session.remove()


def alive(pid: int) -> bool:
    try:
        return processes.start_ticks(pid) > 0
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_removed_session_leaves_no_worker_in_its_network(eager: Engine, small_base: BaseRecord) -> None:
    session = eager.new(base=small_base)
    session.snapshot()
    until(lambda: len(eager.stock.waiting()) >= 2, "workers wait")
    network = network_of(session.record.init_pid)
    assert any(network_of(pid) == network for pid in eager.stock.waiting())
    session.remove()
    assert not any(network_of(pid) == network for pid in eager.stock.waiting())


def network_of(pid: int) -> Path:
    return Path(f"/proc/{pid}/ns/net").readlink()


def test_a_damaged_image_is_named_as_the_reason(eager: Engine, eager_session: Session) -> None:
    """CRIU looks at the image while the root is still being mounted for it."""
    session = eager_session
    session.exec("V=kept")
    taken = session.snapshot().id
    stocked(eager)
    image = eager.store.paths.image(taken) / "inventory.img"
    whole = image.read_bytes()
    image.write_bytes(b"\0" * len(whole))
    with pytest.raises(CriuError, match="criu restore failed"):
        session.restore(taken)
    assert session.exec("echo $V").stdout == b"kept\n"
    image.write_bytes(whole)
    session.restore(taken)
    assert session.exec("echo $V").stdout == b"kept\n"


def with_spares(engine: Engine) -> list[int]:
    until(lambda: len(engine.stock.spares.waiting()) > 0, "an upper is made ahead")
    return engine.stock.spares.waiting()


def test_a_restore_and_a_fork_take_uppers_that_are_made(eager: Engine, eager_session: Session) -> None:
    session = eager_session
    session.exec("echo first >/file")
    taken = session.snapshot().id
    spare = with_spares(eager)
    session.exec("echo second >/file; echo more >/other")
    session.restore(taken)
    assert session.record.upper in spare
    assert session.exec("cat /file; ls /other 2>&1 | wc -l").stdout == b"first\n1\n"
    spare = with_spares(eager)
    forks = session.fork(3, from_snapshot=taken)
    assert len({fork.record.upper for fork in forks}) == 3 and any(fork.record.upper in spare for fork in forks)
    for number, fork in enumerate(forks):
        fork.exec(f"echo {number} >/file")
    assert [fork.exec("cat /file").stdout for fork in forks] == [b"0\n", b"1\n", b"2\n"]
    for fork in forks:
        fork.remove()


def test_a_fork_takes_a_directory_that_is_made(eager: Engine, engine: Engine, eager_session: Session) -> None:
    taken = eager_session.snapshot().id
    until(lambda: len(eager.stock.spares.waiting_sessions()) > 0, "a session's directory is made ahead")
    spare = eager.stock.spares.waiting_sessions()
    (fork,) = eager_session.fork(1, from_snapshot=taken)
    assert fork.id == spare[0] and fork.exec("echo up").stdout == b"up\n"
    fork.remove()
    until(lambda: len(eager.stock.spares.waiting_sessions()) > 0, "another one is made")
    stocked(eager)
    gone = eager.stock.spares.waiting_sessions()
    engine.gc()  # of another process, as far as it knows
    assert not any(eager.store.paths.session(session).exists() for session in gone)
    (fork,) = eager_session.fork(1, from_snapshot=taken)
    assert fork.id not in gone and fork.exec("echo up").stdout == b"up\n"
    fork.remove()


def test_what_gc_takes_is_made_anew(eager: Engine, engine: Engine, eager_session: Session) -> None:
    session = eager_session
    session.exec("echo first >/file")
    taken = session.snapshot().id
    spare = with_spares(eager)
    stocked(eager)
    engine.gc()  # of another process, as far as it knows
    assert not any(eager.store.is_made(upper) for upper in spare)
    session.exec("echo second >/file")
    again = session.snapshot().id
    session.restore(taken)
    assert session.record.upper not in spare and session.exec("cat /file").stdout == b"first\n"
    session.restore(again)
    assert session.exec("cat /file").stdout == b"second\n"


def test_what_was_made_ahead_and_not_used_is_removed(home: Path, small_base: BaseRecord) -> None:
    with Engine(home, ahead=True) as eager:
        session = eager.new(base=small_base)
        session.snapshot()
        spare = with_spares(eager)
        until(lambda: len(eager.stock.spares.waiting_sessions()) > 0, "a session's directory is made ahead")
        stocked(eager)
        directories = eager.stock.spares.waiting_sessions()
        assert any(path.name.startswith(".") for path in eager.store.paths.images.iterdir()), "for the next image"
        session.remove()
    with Engine(home) as engine:
        assert not any(path.name.startswith(".") for path in engine.store.paths.images.iterdir())
        assert not any(engine.store.paths.layer(upper).exists() for upper in spare)
        assert not set(spare) & set(engine.store.db.layers())
        assert directories and not any(engine.store.paths.session(session).exists() for session in directories)


def test_one_fork_has_a_worker_for_its_first_snapshot(eager: Engine, eager_session: Session) -> None:
    """As a session that was restored has: an agent that goes back through StateFork gets a new session each time."""
    taken = eager_session.snapshot()
    (fork,) = eager_session.fork(1, from_snapshot=taken.id)
    try:
        until(lambda: fork.id in eager.stock._dumpers, "a worker for the fork")
        worker = eager.stock._dumpers[fork.id].pid
        fork.exec("X=2")
        fork.snapshot()
        assert fork.id not in eager.stock._dumpers or eager.stock._dumpers[fork.id].pid != worker
    finally:
        fork.remove()


def test_no_worker_is_kept_for_a_session_that_is_removed_meanwhile(eager: Engine, eager_session: Session) -> None:
    taken = eager_session.snapshot()
    (fork,) = eager_session.fork(1, from_snapshot=taken.id)
    record = fork.record
    fork.remove()
    with pytest.raises(NotFound):
        eager.stock._keep_ready(record.id)
    assert fork.id not in eager.stock._dumpers
    record = eager_session.record
    eager_session.restore(taken.id)
    eager.stock._keep_ready(record.id)  # of what it was before
    assert eager.stock._dumpers[eager_session.id].init.pid == eager_session.record.init_pid


def test_no_worker_is_started_beside_a_restore_for_a_while(eager: Engine, eager_session: Session) -> None:
    eager_session.snapshot()
    eager.stock.refill(None)

    def all_wait() -> bool:
        there = list(eager.stock._restorers)
        return len(there) == ahead.MOST_RESTORERS and all(one.waiting.waits() for one in there)

    until(all_wait, "one more with each operation")
    restorer = eager.stock.restorer()
    assert restorer is not None
    restorer.close()
    with eager.stock.undisturbed():
        began = time.monotonic()
        eager.stock.refill(None)
        until(lambda: len(eager.stock._restorers) == ahead.MOST_RESTORERS, "in the end it is")
        assert time.monotonic() - began >= ahead._MOST_PATIENCE
    eager.stock.refill(None)


def test_the_first_command_has_the_connection_of_the_handshake(eager: Engine, eager_session: Session) -> None:
    taken = eager_session.snapshot()
    (fork,) = eager_session.fork(1, from_snapshot=taken.id)
    assert fork.id in eager.links._kept
    assert fork.exec("echo here").stdout == b"here\n"
    eager_session.restore(taken.id)
    assert eager_session.id in eager.links._kept
    assert eager_session.exec("echo there").stdout == b"there\n"
    fork.remove()
    assert fork.id not in eager.links._kept


def test_a_snapshot_that_is_known_is_looked_for_all_the_same(eager: Engine, eager_session: Session) -> None:
    taken = eager_session.snapshot()
    assert taken.id in eager._recent
    eager.fork_one(taken.id, "known").remove()
    eager.remove_snapshot(taken.id)
    with pytest.raises(NotFound):
        eager.fork_one(taken.id, "gone")


def test_no_worker_is_started_for_a_session_that_has_ended(eager: Engine, eager_session: Session) -> None:
    taken = eager_session.snapshot()
    (fork,) = eager_session.fork(1, from_snapshot=taken.id)
    until(lambda: fork.id in eager.stock._dumpers, "no worker was started while it lived")
    init = Process(fork.record.init_pid, fork.record.init_start)
    fork.halt()
    assert processes.wait_gone(init, 10)
    eager.stock.drop(fork.id)
    eager.stock._keep_ready(fork.id)
    assert fork.id not in eager.stock._dumpers
    fork.remove()


@pytest.mark.parametrize("files", [0, 2000])
def test_no_layer_has_the_socket_of_init(eager: Engine, small_base: BaseRecord, files: int) -> None:
    """Copied, or brought back over: a restore would have to hide it."""
    session = eager.new(base=small_base)
    try:
        session.exec(f"mkdir /many; for n in $(seq {files}); do echo $n >/many/$n; done; echo done >/file", timeout=60)
        taken = session.snapshot()
        private = eager.store.paths.upper(taken.layers[0]) / ".waypoint" / "run"
        assert (private / "c").exists() and not (private / "sock").exists()
        session.restore(taken.id)
        assert session.exec("ls /many | wc -l; cat /file").stdout.split() == [str(files).encode(), b"done"]
    finally:
        session.remove()
