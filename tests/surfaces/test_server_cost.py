"""What the daemon does to keep costs down: lives end, idle ones stand still, use is counted, too much is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from daemon import Daemon, running, until

pytestmark = pytest.mark.timeout(180)  # a busy machine gets its time


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = ["--set", "tick_seconds=0.1", "--set", "sample_seconds=0.3", "--set", "commands_per_environment=4"]
    with running(tmp_path_factory.mktemp("d"), *options) as daemon:
        yield daemon


def usage(daemon: Daemon, environment: str) -> dict[str, float]:
    found: dict[str, float] = daemon.call("GET", f"/v1/environments/{environment}/usage")
    return found


def test_time_to_live(daemon: Daemon) -> None:
    short, long = daemon.create(ttl_seconds=0.5), daemon.create(ttl_seconds=0.8)
    daemon.call("PATCH", f"/v1/environments/{long}", json={"ttl_seconds": 600})
    until(lambda: short not in daemon.listed())
    time.sleep(0.5)
    assert daemon.exec(long, "echo still")["stdout"] == "still\n"
    daemon.delete(long)


def test_idle_ones_stand_still_and_come_back_with_the_next_call(daemon: Daemon) -> None:
    made = daemon.create(idle_pause_seconds=0.5)
    daemon.exec(made, "cd /srv; X=7; sleep 1000 & echo $! > pid")
    until(lambda: daemon.state(made) == "paused")
    found = daemon.call("GET", f"/v1/environments/{made}")
    assert found["paused_by"] == "idle"
    answers: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(daemon.exec(made, "echo $X $PWD; kill -0 $(cat pid) && echo alive"))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one["stdout"] for one in answers} == {"7 /srv\nalive\n"}
    until(lambda: daemon.state(made) == "paused")
    daemon.call("GET", f"/v1/environments/{made}/files?path=/srv")
    assert daemon.call("GET", f"/v1/environments/{made}")["paused_by"] is None
    assert len(daemon.call("GET", f"/v1/environments/{made}/snapshots")["items"]) == 0  # pausing leaves nothing behind
    daemon.call("POST", f"/v1/environments/{made}/pause")
    assert daemon.exec(made, "true", 409)["code"] == "wrong_state"  # one who paused it by name resumes it by name
    daemon.delete(made)


def test_a_running_command_is_no_idleness(daemon: Daemon) -> None:
    made = daemon.create(idle_pause_seconds=0.3)
    assert daemon.exec(made, "sleep 1.5; echo done")["stdout"] == "done\n"
    started = daemon.exec(made, "sleep 1.5; echo done", 202, background=True)
    assert (
        daemon.call("GET", f"/v1/environments/{made}/commands/{started['id']}?wait=20")["result"]["stdout"] == "done\n"
    )
    until(lambda: daemon.state(made) == "paused")
    daemon.delete(made)


def test_usage_stops_while_paused(daemon: Daemon) -> None:
    made = daemon.create()
    daemon.exec(made, "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done")
    first = usage(daemon, made)
    assert first["cpu_seconds"] > 0.1 and first["memory_byte_seconds"] > 0 and first["live_seconds"] > 0
    daemon.exec(made, "sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'")
    second = usage(daemon, made)
    assert second["cpu_seconds"] > first["cpu_seconds"] + 0.05
    daemon.call("POST", f"/v1/environments/{made}/pause")
    paused = usage(daemon, made)
    time.sleep(0.8)
    assert usage(daemon, made) == paused
    daemon.call("POST", f"/v1/environments/{made}/resume")
    time.sleep(0.2)
    resumed = usage(daemon, made)
    assert resumed["live_seconds"] < paused["live_seconds"] + 0.8 and resumed["cpu_seconds"] >= paused["cpu_seconds"]
    daemon.exec(made, "head -c 3000000 /dev/urandom > /srv/big")
    daemon.snapshot(made)
    stored = usage(daemon, made)
    assert stored["stored_bytes"] >= 3_000_000 and stored["snapshots"] == 1
    before = mine(daemon)
    daemon.delete(made)
    after = mine(daemon)
    assert after["cpu_seconds"] >= stored["cpu_seconds"] and after["environments"] == before["environments"] - 1
    assert after["stored_bytes"] <= before["stored_bytes"] - 3_000_000


def mine(daemon: Daemon) -> dict[str, Any]:
    (found,) = (one for one in daemon.call("GET", "/v1/usage")["items"] if one["owner"] == "local")
    result: dict[str, Any] = found
    return result


def test_a_pool(daemon: Daemon) -> None:
    template = {"method": "waypoint_build", "arguments": {"env": {"POOLED": "yes"}}}
    daemon.call("PUT", "/v1/pools/warm", json={**template, "size": 2})
    until(lambda: daemon.call("GET", "/v1/pools/warm")["ready"] == 2)
    assert daemon.listed() == {}  # they are nobody's yet
    made = daemon.call("POST", "/v1/environments", 201, json={**template, "metadata": {"a": "b"}, "ttl_seconds": 600})
    assert (made["owner"], made["metadata"]) == ("local", {"a": "b"}) and made["expires_at"]
    assert daemon.exec(made["id"], "echo $POOLED")["stdout"] == "yes\n"
    history = daemon.call("GET", f"/v1/environments/{made['id']}/history")["items"]
    assert [one["operation"] for one in history] == ["start", "exec"]
    until(lambda: daemon.call("GET", "/v1/pools/warm")["ready"] == 2)
    daemon.kill()  # what was given away stays its owner's, what waits goes on waiting
    daemon.start()
    until(lambda: daemon.call("GET", "/v1/pools/warm")["ready"] == 2)
    assert list(daemon.listed()) == [made["id"]] and daemon.listed()[made["id"]]["metadata"] == {"a": "b"}
    assert daemon.exec(made["id"], "echo $POOLED")["stdout"] == "yes\n"
    other = daemon.create(method="waypoint_build", arguments={"env": {"POOLED": "no"}})
    assert daemon.exec(other, "echo $POOLED")["stdout"] == "no\n"
    assert daemon.call("GET", "/v1/pools/warm")["ready"] == 2
    daemon.call("PUT", "/v1/pools/warm", json={**template, "size": 1})
    until(lambda: daemon.call("GET", "/v1/pools/warm")["ready"] == 1)
    daemon.call("DELETE", "/v1/pools/warm", 204)
    daemon.call("GET", "/v1/pools/warm", 404)
    daemon.call("PUT", "/v1/pools/none", 400, json={"method": "surely_not"})
    daemon.call("PUT", "/v1/pools/bad", json={"arguments": {"rootfs": "/surely/not"}})
    until(lambda: daemon.call("GET", "/v1/pools/bad")["problem"])
    daemon.call("DELETE", "/v1/pools/bad", 204)
    for key in (made["id"], other):
        daemon.delete(key)


def test_too_many_commands_in_one_environment(daemon: Daemon) -> None:
    made = daemon.create()
    for _ in range(4):
        daemon.exec(made, "sleep 100", 202, background=True)
    answer = daemon.client.post(f"/v1/environments/{made}/exec", json={"command": "true"})
    assert (answer.status_code, answer.json()["code"]) == (429, "overloaded") and int(
        answer.headers["retry-after"]
    ) >= 1
    daemon.delete(made)


def test_too_much_work_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "h", "--set", "work_slots=1", "--set", "work_queue=1") as daemon:
        base = daemon.create()
        answers: list[httpx.Response] = []

        def fork() -> None:
            with httpx.Client(transport=daemon.transport(), base_url="http://d", timeout=60) as client:
                answers.append(client.post(f"/v1/environments/{base}/fork", json={"n": 2}))

        threads = [threading.Thread(target=fork) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {201, 429} and all(a.headers["retry-after"] for a in answers if a.status_code == 429)
        assert "statefork_queue_length" in daemon.call("GET", "/metrics").decode()
        until(lambda: len(daemon.listed()) == 1 + 2 * codes.count(201))


def test_what_a_token_may_make(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    def token(*options: str) -> dict[str, str]:
        argv = [sys.executable, "-c", "from statefork.cli.main import main; main()", "token", "create", *options]
        made = subprocess.run(
            argv, env={**os.environ, "STATEFORK_HOME": str(tmp_path / "h")}, check=True, capture_output=True, text=True
        )
        return {"Authorization": f"Bearer {made.stdout.strip()}"}

    with running(tmp_path / "h") as daemon:
        base = daemon.create()
        plain = token("--scope", "exec", "--max-environments", "2", "--environment", base)
        other, reader = token("--scope", "exec"), token("--scope", "read")
        (fork,) = daemon.call("POST", f"/v1/environments/{base}/fork", 201, json={}, headers=plain)["environments"]
        made = fork["id"]
        for arguments in ({}, {"rootfs": "/"}, {"store": "/x"}, {"dockerfile_dir": "/"}, {"network": "host"}):
            assert (
                daemon.call("POST", "/v1/environments", 403, json={"arguments": arguments}, headers=plain)["code"]
                == "forbidden"
            )
        assert (
            daemon.call(
                "POST", "/v1/environments", 403, json={"method": "criu_attach", "arguments": {}}, headers=plain
            )["code"]
            == "forbidden"
        )
        assert (
            daemon.call("POST", f"/v1/environments/{made}/fork", 429, json={"n": 2}, headers=plain)["code"]
            == "too_many_environments"
        )
        taken = daemon.call("POST", f"/v1/environments/{made}/snapshots", 201, json={}, headers=plain)["id"]
        assert daemon.call("GET", "/v1/environments", headers=other)["items"] == []
        assert daemon.call("GET", "/v1/snapshots", headers=other)["items"] == []
        assert daemon.call("GET", f"/v1/snapshots/{taken}", 404, headers=other)["code"] == "not_found"
        assert (
            daemon.call("POST", "/v1/environments", 404, json={"snapshot": taken}, headers=other)["code"] == "not_found"
        )
        assert daemon.call("GET", "/v1/usage", headers=other)["items"] == []
        assert daemon.call("POST", "/v1/environments", 403, json={}, headers=reader)["code"] == "forbidden"
        (used,) = daemon.call("GET", "/v1/usage", headers=plain)["items"]
        assert used["owner"] == fork["owner"] != "local"
        assert used["environments"] == 1 and used["snapshots"] == 1
