"""Workers that wait for the next snapshot and restore: used, let go, and never in the way of what they are for."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from waypoint import ahead
from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine
from waypoint.errors import CriuError, NotFound
from waypoint.kernel import criu_rpc_pb2 as rpc
from waypoint.kernel import processes, tools
from waypoint.kernel.criu_start import Forked
from waypoint.model import BaseRecord
from waypoint.session import Session
from waypoint.store import locks


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
    """Workers that wait: what was used is replaced after each operation."""
    engine.stock.refill()
    until(lambda: len(engine.stock.waiting()) >= 2, "workers wait")
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


def test_what_the_workers_are_forked_from_was_killed_and_is_replaced(eager: Engine, eager_session: Session) -> None:
    """So is what mounts their roots; who was waiting goes on."""
    session = eager_session
    session.exec("X=1")
    first = session.snapshot().id
    session.restore(first)
    assert eager.stock.template is not None
    killed = eager.stock.template.servers()
    assert len(killed) == 2
    end(killed)
    for number in range(4):
        session.exec(f"X={number}")
        taken = session.snapshot().id
        session.restore(first)
        assert session.exec("echo $X").stdout == b"1\n"
        session.restore(taken)
        assert session.exec("echo $X").stdout == b"%d\n" % number
    until(lambda: not any(alive(pid) for pid in killed), "they are reaped")
    assert len(eager.stock.template.servers()) == 2 and not set(killed) & set(eager.stock.template.servers())


def test_a_process_that_was_forked_has_workers_of_its_own(eager: Engine, eager_session: Session) -> None:
    eager_session.exec("X=1")
    eager_session.snapshot()
    stocked(eager)
    assert eager.stock.template is not None
    own = tools.engine_criu()
    child = os.fork()
    if child == 0:
        worker = eager.stock.template.worker(own, hold=[])
        os._exit(0 if parent_of(worker.pid) == os.getpid() and worker.there() else 1)
    assert os.waitpid(child, 0)[1] == 0
    worker = eager.stock.template.worker(own, hold=[])
    assert parent_of(worker.pid) == os.getpid()
    worker.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_worker_that_cannot_be_started_says_why(eager: Engine) -> None:
    assert eager.stock.template is not None
    worker = eager.stock.template.worker(tools.engine_criu(), enter=2**22 + 1, hold=[])
    worker.begin(rpc.DUMP, rpc.criu_opts(images_dir_fd=-1))
    with worker, pytest.raises(CriuError, match="ns/cgroup: No such file"):
        worker.answer({})


def test_a_worker_that_nobody_has_forked_is_an_error() -> None:
    """Whoever was to do it has died with the request."""
    with Forked(lambda *_: None) as worker:
        assert not worker.there()
        with pytest.raises(CriuError, match="ended without an answer"):
            worker.begin(rpc.DUMP, rpc.criu_opts(images_dir_fd=-1))


def test_a_restore_sees_what_the_host_has_mounted_since(
    eager: Engine, eager_session: Session, tmp_path: Path, small_rootfs: Path
) -> None:
    """The workers wait in copies of the host's mount namespace."""
    root = tmp_path / "root"
    root.mkdir()
    eager_session.snapshot()
    workers = set(stocked(eager))
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(root)], check=True)
    try:
        shutil.copytree(small_rootfs, root / "there", symlinks=True)
        session = eager.new(base=base_from_rootfs(eager.store, root / "there"))
        session.exec("X=1; sleep 1000 &")
        taken = session.snapshot().id
        session.restore(taken)
        assert session.exec("echo $X; jobs -pr | wc -l").stdout == b"1\n1\n"
        assert len(workers - set(eager.stock.waiting())) >= 2, "they were not used for the snapshot and the restore"
        session.remove()
        eager.remove_snapshot(taken)
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


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


def test_a_worker_that_was_told_of_an_older_incarnation_is_not_used(eager: Engine, eager_session: Session) -> None:
    """Somebody restores the session while a snapshot of it waits for the lock."""
    taken = eager_session.snapshot()
    eager_session.exec("X=new")
    waits = threading.Event()
    with locks.exclusive(eager.store.paths.session_lock(eager_session.id)):
        later = threading.Thread(target=lambda: (waits.set(), eager_session.snapshot("later")))
        later.start()
        waits.wait()
        time.sleep(0.05)
        record = eager_session.record
        live = eager.bring_up(eager.store.db.base(record.base), taken, record.spec, record.id)
        eager_session._take_place(record, taken, live)
    later.join()
    (fork,) = eager_session.fork(1, from_snapshot="later")
    assert fork.exec("echo $X").stdout == b"\n"
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
        monkeypatch.setattr(ahead, "IDLE_SECONDS", 30.0)
        time.sleep(0.5)  # nothing asks for new ones
        assert not eager.stock.waiting()
        session.exec("true")
        until(lambda: len(eager.stock.waiting()) > 0, "a command brings new ones")
        session.remove()


_KILLED = """
import os, sys, time
from pathlib import Path
from waypoint.engine import Engine

engine = Engine(Path(sys.argv[1]), ahead=True)
session = engine.session(sys.argv[2])
session.restore(session.snapshot().id)
while len(engine.stock.waiting()) < 2:
    engine.stock.refill()
    time.sleep(0.01)
print(*engine.stock.waiting(), *engine.stock.template.servers(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_waits_ends_with_a_process_that_is_killed(home: Path, eager_session: Session) -> None:
    argv = [sys.executable, "-c", _KILLED, str(home), eager_session.id]
    said = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=60, check=False).stdout
    pids = [int(word) for word in said.split()]
    assert len(pids) >= 4
    until(lambda: not any(alive(pid) for pid in pids), "they end with it")
    assert eager_session.exec("echo here").stdout == b"here\n"


def alive(pid: int) -> bool:
    try:
        return processes.start_ticks(pid) > 0
    except (FileNotFoundError, ProcessLookupError):
        return False


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


def test_nothing_is_made_beside_a_restore_for_a_while(eager: Engine, eager_session: Session) -> None:
    eager_session.snapshot()
    eager_session.snapshot()
    assert eager.stock.template is not None
    stocked(eager)
    time.sleep(0.3)  # for what the snapshots have asked for
    eager.stock.template.drop()
    with eager.stock.undisturbed():
        began = time.monotonic()
        eager.stock.refill()
        until(lambda: len(eager.stock.waiting()) > 0, "in the end it is")
        assert time.monotonic() - began >= ahead._MOST_PATIENCE


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
    assert eager._recent.get(taken.id) is not None
    eager.fork_one(taken.id, "known").remove()
    eager.remove_snapshot(taken.id)
    with pytest.raises(NotFound):
        eager.fork_one(taken.id, "gone")


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
