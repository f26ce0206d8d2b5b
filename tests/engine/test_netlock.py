"""A session's network stands still while its connections are saved, and never longer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from waypoint.kernel.netlock import has_connections, lock_network
from waypoint.session import Session

CONNECT = (
    "python3 -c 'import socket; s = socket.socket(); s.bind((\"127.0.0.1\", 0)); s.listen(); "
    "socket.create_connection(s.getsockname(), 1)' 2>/dev/null"
)


@pytest.fixture
def init_pid(host_session: Session) -> int:
    return host_session.record.init_pid


def test_no_packet_moves_until_it_is_released(host_session: Session, init_pid: int) -> None:
    release = lock_network(init_pid)
    assert host_session.exec(CONNECT).exit_code == 1
    release()
    assert host_session.exec(CONNECT).exit_code == 0


def test_it_ends_with_the_process_that_made_it(host_session: Session, init_pid: int) -> None:
    """kill -9 in the middle of a snapshot must not leave a session without its network."""
    code = f"from waypoint.kernel.netlock import lock_network; r = lock_network({init_pid}); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert host_session.exec(CONNECT).exit_code == 1
        holder.kill()
        holder.wait()
    assert host_session.exec(CONNECT).exit_code == 0


def test_only_connections_call_for_it(host_session: Session, init_pid: int) -> None:
    assert not has_connections(init_pid)
    host_session.exec("python3 -m http.server 8000 >/dev/null 2>&1 & until curl -so /dev/null localhost:8000; do sleep 0.05; done")
    host_session.exec(
        "coproc python3 -c 'import socket, time; s = socket.create_connection((\"localhost\", 8000)); print(1, flush=True); "
        "time.sleep(100)'; read -r _ <&${COPROC[0]}"
    )
    assert has_connections(init_pid)
    snapshot = host_session.snapshot()
    assert host_session.exec("curl -so /dev/null localhost:8000").exit_code == 0
    host_session.restore(snapshot.id)
    assert host_session.exec("curl -so /dev/null localhost:8000").exit_code == 0
