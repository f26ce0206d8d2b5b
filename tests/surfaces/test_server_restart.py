"""The daemon ends, in order or by kill -9, and its next process finds everything again, or says what is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from daemon import Daemon, running, until
from statefork.home import collect
from statefork.registry import backends
from waypoint.engine import Engine

pytestmark = pytest.mark.timeout(180)  # a busy machine gets its time


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path / "h") as daemon:
        yield daemon


def snapshots(daemon: Daemon) -> dict[str, tuple[str, str, bool]]:
    return {s["id"]: (s["name"], s["parent"], s["pinned"]) for s in daemon.call("GET", "/v1/snapshots")["items"]}


def test_kill_9_in_the_middle_of_it_all(daemon: Daemon) -> None:
    a = daemon.create(metadata={"role": "a"}, idle_pause_seconds=3600)
    daemon.exec(a, "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done")
    used = daemon.call("GET", f"/v1/environments/{a}/usage")["cpu_seconds"]
    daemon.exec(a, "cd /srv; X=here; sleep 1000 & echo $! > pid")
    first = daemon.snapshot(a, name="first")
    (b,) = (
        one["id"]
        for one in daemon.call("POST", f"/v1/environments/{a}/fork", 201, json={"snapshot": "first"})["environments"]
    )
    second = daemon.snapshot(b, mode="files")
    daemon.call("PATCH", f"/v1/snapshots/{first}", json={"pinned": True, "name": "renamed"})
    c = daemon.create()
    daemon.exec(c, "Y=paused")
    daemon.call("POST", f"/v1/environments/{c}/pause")
    shell = daemon.exec(
        a,
        "echo begun; read word; echo the word is $word; exit_with() { return 4; }; exit_with",
        202,
        background=True,
        interactive=True,
    )
    beside = daemon.call(
        "POST",
        f"/v1/environments/{a}/run",
        202,
        json={"argv": ["sh", "-c", "echo aside; cat"], "background": True, "interactive": True},
    )
    path = f"/v1/environments/{a}/commands"
    daemon.call("POST", f"{path}/{shell['id']}/stdin", 204, json={"data": "half "})
    until(lambda: all(one["stdout_bytes"] for one in daemon.call("GET", path)["items"]))
    before, taken = daemon.listed(), snapshots(daemon)
    commands_written_down(daemon, 2)
    daemon.kill()
    daemon.start()
    after = daemon.listed()
    volatile = ("used_at", "state")
    assert {k: {n: v for n, v in e.items() if n not in volatile} for k, e in after.items()} == {
        k: {n: v for n, v in e.items() if n not in volatile} for k, e in before.items()
    }
    assert {k: e["state"] for k, e in after.items()} == {a: "live", b: "live", c: "paused"}
    assert used <= daemon.call("GET", f"/v1/environments/{a}/usage")["cpu_seconds"] < used * 1.6
    assert snapshots(daemon) == taken and taken[first] == ("renamed", None, True) and taken[second][1] == first
    daemon.call("POST", f"{path}/{shell['id']}/stdin", 204, json={"data": "whole\n"})
    ended = daemon.call("GET", f"{path}/{shell['id']}?wait=30")
    assert (ended["result"]["exit_code"], ended["result"]["stdout"]) == (4, "begun\nthe word is half whole\n")
    daemon.call("POST", f"{path}/{beside['id']}/stdin", 204, json={"data": "fed", "end": True})
    assert daemon.call("GET", f"{path}/{beside['id']}?wait=30")["result"]["stdout"] == "aside\nfed"
    assert daemon.exec(a, "echo $X $PWD; kill -0 $(cat pid) && echo alive")["stdout"] == "here /srv\nalive\n"
    daemon.call("POST", f"/v1/environments/{c}/resume")
    assert daemon.exec(c, "echo $Y")["stdout"] == "paused\n"
    daemon.call("POST", f"/v1/environments/{b}/restore", json={"snapshot": second})
    daemon.call("POST", f"/v1/environments/{a}/restore", json={"snapshot": "renamed"})
    assert daemon.exec(a, "echo $X; kill -0 $(cat pid) && echo alive")["stdout"] == "here\nalive\n"


def commands_written_down(daemon: Daemon, count: int) -> None:
    import sqlite3

    def there() -> bool:
        with sqlite3.connect(daemon.home / "server/server.db") as books:
            found: int = books.execute("SELECT count(*) FROM commands").fetchone()[0]
        return found == count

    until(there)


def test_a_key_finds_the_command_that_an_earlier_daemon_started(daemon: Daemon) -> None:
    made = daemon.create()
    path, body = f"/v1/environments/{made}/exec", {"command": "echo x >> /srv/count; sleep 2; wc -l < /srv/count"}
    headers = {"Idempotency-Key": "long"}

    def ask() -> None:
        with (
            pytest.raises(httpx.TransportError),
            httpx.Client(transport=daemon.transport(), base_url="http://d", timeout=60) as client,
        ):
            client.post(path, json=body, headers=headers)

    asking = threading.Thread(target=ask)
    asking.start()
    commands_written_down(daemon, 1)
    daemon.kill()
    asking.join()
    daemon.start()
    answer = daemon.client.post(path, json=body, headers=headers)
    assert (answer.status_code, answer.json()["stdout"]) == (200, "1\n")
    assert answer.headers["idempotency-replayed"] == "true"


def test_stopped_in_order(daemon: Daemon) -> None:
    made = daemon.create()
    daemon.exec(made, "X=5")
    started = daemon.exec(made, "while [ ! -e /srv/go ]; do sleep 0.1; done; echo gone on", 202, background=True)
    commands_written_down(daemon, 1)
    assert daemon.stop() == 0
    assert not daemon.socket.exists()
    assert list(collect(daemon.home, [backend.driver for backend in backends().values()])) == []  # statefork gc
    daemon.start()
    daemon.call("PUT", f"/v1/environments/{made}/files/content?path=/srv/go", 204, content=b"")
    ended = daemon.call("GET", f"/v1/environments/{made}/commands/{started['id']}?wait=30")
    assert ended["result"]["stdout"] == "gone on\n"
    assert daemon.exec(made, "echo $X")["stdout"] == "5\n"


def test_one_daemon_for_a_state_directory(daemon: Daemon) -> None:
    argv = [
        sys.executable,
        "-c",
        "from statefork.cli.main import main; main()",
        "serve",
        "--socket",
        str(daemon.home / "other.sock"),
    ]
    second = subprocess.run(
        argv, env={**os.environ, "STATEFORK_HOME": str(daemon.home)}, capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 125 and "another daemon" in second.stderr


def test_killed_again_and_again_while_it_makes_things(daemon: Daemon) -> None:
    """Whatever it was doing: afterwards all that is listed works, and nothing else is left."""
    base = daemon.create()
    taken = daemon.snapshot(base, name="base")

    def busy(stop: threading.Event, kind: int) -> None:
        with httpx.Client(transport=daemon.transport(), base_url="http://d", timeout=60) as client:
            while not stop.is_set():
                try:
                    if kind == 0:
                        client.post(f"/v1/environments/{base}/snapshots", json={})
                    elif kind == 1:
                        client.post(f"/v1/environments/{base}/restore", json={"snapshot": "base"})
                    else:
                        client.post(f"/v1/environments/{base}/fork", json={"n": 2, "snapshot": "base"})
                        client.post("/v1/environments", json={})
                except httpx.TransportError:
                    return

    for pause in (0.35, 0.6, 0.85):
        stop = threading.Event()
        threads = [threading.Thread(target=busy, args=(stop, kind)) for kind in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(pause)
        daemon.kill()
        stop.set()
        for thread in threads:
            thread.join()
        daemon.start()
        listed = daemon.listed()
        assert base in listed and all(one["state"] == "live" for one in listed.values())
        for key in listed:
            assert daemon.exec(key, "echo fine")["stdout"] == "fine\n"
        for snapshot in daemon.call("GET", "/v1/snapshots?limit=1000")["items"]:
            assert daemon.call("GET", f"/v1/snapshots/{snapshot['id']}")["manifest"]
        with Engine(daemon.home / "waypoint") as engine:
            sessions = {record.id for record in engine.sessions() if record.state == "live"}
            assert sessions == {one["description"] for one in listed.values()}
        for key in set(listed) - {base}:
            daemon.delete(key)
    daemon.call("POST", f"/v1/environments/{base}/restore", json={"snapshot": taken})


def test_a_session_that_died_meanwhile_is_lost_and_can_be_restored(daemon: Daemon) -> None:
    made = daemon.create()
    daemon.exec(made, "echo kept > /srv/kept")
    daemon.snapshot(made, name="kept")
    session = daemon.call("GET", f"/v1/environments/{made}")["description"]
    daemon.kill()
    with Engine(daemon.home / "waypoint") as engine:
        os.kill(engine.session(session).record.init_pid, signal.SIGKILL)
        until(lambda: engine.settle(engine.session(session).record).state == "dead")
    daemon.start()
    found = daemon.call("GET", f"/v1/environments/{made}")
    assert found["state"] == "lost" and session in found["lost"]
    assert daemon.exec(made, "true", 409)["code"] == "session_dead"
    daemon.call("POST", f"/v1/environments/{made}/restore", json={"snapshot": "kept"})
    assert daemon.exec(made, "cat /srv/kept")["stdout"] == "kept\n"
