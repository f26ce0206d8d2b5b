"""The daemon over other backends: containers go on without it; what cannot is lost, and said to be."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection

from daemon import Daemon, running, until

pytestmark = pytest.mark.timeout(180)  # a busy machine gets its time


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path / "h") as daemon:
        yield daemon


@pytest.fixture(params=["docker", "podman"])
def tool(request: pytest.FixtureRequest) -> str:
    request.getfixturevalue(f"{request.param}_busybox")  # before the daemon, which inherits where the tool is
    name: str = request.param
    return name


def containers(tool: str, home: Path) -> list[str]:
    mark = f"label=statefork.home={home}"
    found = subprocess.run(
        [tool, "ps", "-a", "-q", "--filter", mark], check=True, capture_output=True, text=True
    ).stdout.split()
    images = subprocess.run(
        [tool, "images", "-q", "--filter", mark], check=True, capture_output=True, text=True
    ).stdout.split()
    return found + images


@pytest.mark.timeout(180)
def test_containers_across_a_kill_9(tool: str, daemon: Daemon) -> None:
    arguments = {"base_image": "statefork-busybox:test", "extra_args": ["--network", "none"]}
    made = daemon.create(method=f"{tool}_build", arguments=arguments)
    daemon.exec(made, "cd /tmp; X=1; echo one > file")
    daemon.call(
        "POST",
        f"/v1/environments/{made}/run",
        json={"argv": ["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $! > /tmp/pid"]},
    )
    taken = daemon.snapshot(made, name="files")
    assert (
        daemon.call("POST", f"/v1/environments/{made}/snapshots", 422, json={"mode": "full"})["code"] == "unsupported"
    )
    paused = daemon.create(snapshot=taken)
    daemon.call("POST", f"/v1/environments/{paused}/pause")
    used = daemon.call("GET", f"/v1/environments/{made}/usage")
    assert used["live_seconds"] > 0 and used["memory_byte_seconds"] > 0
    started = daemon.exec(made, "echo begun; sleep 1000; echo not reached", 202, background=True)
    until(lambda: daemon.call("GET", f"/v1/environments/{made}/commands/{started['id']}")["stdout_bytes"])
    daemon.call("POST", f"/v1/environments/{made}/commands/{started['id']}/signal", 204, json={"signal": "INT"})
    ended = daemon.call("GET", f"/v1/environments/{made}/commands/{started['id']}?wait=30")
    assert ended["result"]["stdout"] == "begun\n" and ended["result"]["exit_code"] != 0
    before = daemon.listed()
    daemon.kill()
    daemon.start()
    after = daemon.listed()
    assert {k: (e["state"], e["description"]) for k, e in after.items()} == {
        k: (e["state"], e["description"]) for k, e in before.items()
    }
    answer = daemon.exec(made, "cat /tmp/file; kill -0 $(cat /tmp/pid) && echo runs; echo ${X-gone}")
    assert (answer["stdout"], answer["shell_restarted"]) == ("one\nruns\ngone\n", True)
    daemon.call("POST", f"/v1/environments/{paused}/resume")
    assert daemon.exec(paused, "cat /tmp/file")["stdout"] == "one\n"
    daemon.exec(made, "echo two > /tmp/file")
    daemon.call("POST", f"/v1/environments/{made}/restore", json={"snapshot": "files"})
    assert daemon.exec(made, "cat /tmp/file")["stdout"] == "one\n"
    for key in (made, paused):
        daemon.delete(key)
    assert containers(tool, daemon.home) == []


def test_a_terminal_in_a_container(docker_busybox: str, daemon: Daemon) -> None:
    made = daemon.create(
        method="docker_build", arguments={"base_image": docker_busybox, "extra_args": ["--network", "none"]}
    )
    with daemon.websocket(f"/v1/environments/{made}/terminal?rows=30&columns=90") as socket:
        asked_until_shown(socket, b"30 90")
        socket.send(json.dumps({"type": "resize", "rows": 25, "columns": 70}))
        asked_until_shown(socket, b"25 70")
        socket.send(b"exit\r")
        last: str | bytes = b""
        while isinstance(last, bytes):
            last = socket.recv(timeout=30)
        assert json.loads(last) == {"type": "closed", "reason": "ended"}
    daemon.delete(made)


def asked_until_shown(socket: ClientConnection, wanted: bytes) -> None:
    """How soon the tool tells the container of the size is its own affair."""
    shown, deadline = b"", time.monotonic() + 30
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        socket.send(b"stty size\r")
        with contextlib.suppress(TimeoutError):
            message = socket.recv(timeout=0.3)
            shown += message if isinstance(message, bytes) else b""


def test_a_container_that_dies_is_lost(docker_busybox: str, daemon: Daemon) -> None:
    made = daemon.create(
        method="docker_build", arguments={"base_image": docker_busybox, "extra_args": ["--network", "none"]}
    )
    daemon.exec(made, "echo kept > /kept")
    daemon.snapshot(made, name="kept")
    name = daemon.call("GET", f"/v1/environments/{made}")["description"]
    subprocess.run(["docker", "kill", name], check=True, capture_output=True)
    assert daemon.exec(made, "true", 409)["code"] == "session_dead"
    until(lambda: daemon.state(made) == "lost")
    daemon.call("POST", f"/v1/environments/{made}/restore", json={"snapshot": "kept"})
    assert daemon.exec(made, "cat /kept")["stdout"] == "kept\n"
    daemon.delete(made)


def test_what_ends_with_the_daemon_is_said_to_be_lost(daemon: Daemon) -> None:
    made = daemon.create(method="criu_build", arguments={"command": "sleep 1000"})
    assert not daemon.call("GET", f"/v1/environments/{made}")["capabilities"]["durable"]
    daemon.exec(made, "true")
    daemon.snapshot(made)
    daemon.kill()
    daemon.start()
    found = daemon.call("GET", f"/v1/environments/{made}")
    assert found["state"] == "lost" and "criu" in found["lost"] and "daemon" in found["lost"]
    assert daemon.exec(made, "true", 409)["code"] == "session_dead"
    assert daemon.call("POST", f"/v1/environments/{made}/fork", 409, json={})["code"] == "session_dead"
    assert daemon.call("GET", f"/v1/environments/{made}/tree", 409)["code"] == "session_dead"
    assert daemon.call("GET", f"/v1/environments/{made}/snapshots")["items"] == []
    daemon.delete(made)
    again = daemon.create(method="criu_build", arguments={"command": "sleep 1000"})
    assert daemon.stop() == 0
    daemon.start()
    assert daemon.state(again) == "lost"
