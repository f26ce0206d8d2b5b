"""What a session cannot see or do, and the limits that it is given: in the session, after a restore and in a fork."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from waypoint.engine import Engine
from waypoint.model import BaseRecord, Limits
from waypoint.session import Session

NAMESPACES = ("user", "pid", "mnt", "ipc", "uts", "net", "cgroup")


def copies(session: Session) -> list[Session]:
    """The session itself, and what a restore and a fork make of it."""
    taken = session.snapshot()
    session.restore(taken.id)
    return [session, *session.fork(1, from_snapshot=taken.id)]


def out(session: Session, command: str) -> str:
    return session.exec(command, timeout=60).output.decode()


def test_confined_everywhere(engine: Engine, host_session: Session) -> None:
    host = {name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in NAMESPACES}
    for one in copies(host_session):
        inside = out(one, f"for n in {' '.join(NAMESPACES)}; do readlink /proc/self/ns/$n; done").split()
        assert not set(inside) & set(host.values())
        assert out(one, "grep -E 'Seccomp:|CapEff' /proc/self/status").split() == ["CapEff:", "00000000a80425fb", "Seccomp:", "2"]
        assert one.record.spec.idmap == int(out(one, "cat /proc/self/uid_map").split()[1]) != 0
        assert "Read-only" in out(one, "echo 1 > /proc/sys/vm/swappiness")
        assert out(one, "head -c 1 /proc/kcore 2>/dev/null | wc -c") == "0\n"
        assert one.exec("mknod /tmp/disk b 8 0 || mount -t tmpfs t /mnt || unshare -U true").exit_code != 0
        assert set(out(one, "ls /dev").split()) <= {"fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"}
        assert out(one, "ps ax -o args | grep -c [p]ytest") == "0\n"
        assert "No such file" in out(one, f"ls {engine.store.paths.home}")
        assert out(one, "ls -A /sys/class/net") == "lo\n"


def test_limits_hold_everywhere(engine: Engine, small_base: BaseRecord, sessions: list[Session]) -> None:
    session = engine.new(base=small_base, limits=Limits(memory_bytes=96 << 20, cpus=0.5, pids=40))
    session.exec("V=kept; sleep 1000 &")
    for one in copies(session):
        assert one.exec("head -c 200000000 /dev/zero | tail -c 150000000 | wc -c", timeout=60).stdout != b"150000000\n"
        assert "fork" in out(one, "for i in $(seq 60); do sleep 3 & done; true")
        out(one, "sleep 4")
        assert out(one, "echo $V") == "kept\n"


@pytest.mark.parametrize("network", ["nat", "host"])
def test_networks(engine: Engine, small_base: BaseRecord, sessions: list[Session], network: str) -> None:
    session = engine.new(base=small_base, network=network)  # type: ignore[arg-type]
    session.exec("V=kept; sleep 1000 &")
    for one in copies(session):
        shown = out(one, "cat /proc/net/fib_trie; echo $V")
        assert "127.0.0.1" in shown and shown.endswith("kept\n")
        assert ("10.77.0.2" in shown) == (network == "nat")


def test_what_is_hidden_of_the_host_is_not_there(engine: Engine, sessions: list[Session]) -> None:
    with tempfile.TemporaryDirectory(prefix="waypoint-test-", dir="/opt") as secret:
        Path(secret, "key").write_text("secret")
        seen = engine.new()
        assert seen.exec(f"cat {secret}/key").stdout == b"secret"
        blind = engine.new(hide=[Path(secret)])
        assert blind.exec(f"cat {secret}/key").exit_code != 0
        blind.exec("X=1")
        (fork,) = blind.fork(1)
        assert fork.exec(f"ls {secret}").exit_code != 0
