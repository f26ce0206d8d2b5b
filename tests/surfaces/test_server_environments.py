"""The daemon over its socket: environments and snapshots, on Waypoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from daemon import Daemon, running, until

pytestmark = pytest.mark.timeout(180)  # a busy machine gets its time


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("d")) as daemon:
        yield daemon


@pytest.fixture
def environment(daemon: Daemon) -> Iterator[str]:
    made = daemon.create()
    yield made
    if made in daemon.listed():
        daemon.delete(made)


def test_made_found_changed_and_deleted(daemon: Daemon) -> None:
    made = daemon.call("POST", "/v1/environments", 201, json={"metadata": {"task": "7"}, "ttl_seconds": 600})
    assert (made["state"], made["backend"], made["owner"], made["metadata"]) == (
        "live",
        "waypoint",
        "local",
        {"task": "7"},
    )
    assert {"files", "processes", "memory", "shell"} <= set(made["capabilities"]["restores"])
    key = made["id"]
    assert daemon.call("GET", f"/v1/environments/{key[:-2]}")["id"] == key
    patched = daemon.call("PATCH", f"/v1/environments/{key}", json={"metadata": {"task": "8"}, "ttl_seconds": None})
    assert (patched["metadata"], patched["expires_at"]) == ({"task": "8"}, None)
    assert [e["id"] for e in daemon.call("GET", "/v1/environments?metadata=task%3D8")["items"]] == [key]
    assert daemon.call("GET", "/v1/environments?metadata=task%3D7")["items"] == []
    daemon.delete(key)
    problem = daemon.call("GET", f"/v1/environments/{key}", 404)
    assert problem["code"] == "not_found" and problem["request_id"]


def test_pages(daemon: Daemon, environment: str) -> None:
    forks = daemon.call("POST", f"/v1/environments/{environment}/fork", 201, json={"n": 4})["environments"]
    seen: list[str] = []
    cursor = ""
    while True:
        found = daemon.call("GET", f"/v1/environments?limit=2{cursor}")
        seen += [one["id"] for one in found["items"]]
        if found["next_cursor"] is None:
            break
        assert len(found["items"]) == 2
        cursor = f"&cursor={found['next_cursor']}"
    assert seen == list(daemon.listed()) and {one["id"] for one in forks} <= set(seen)
    assert daemon.call("GET", "/v1/environments?cursor=nonsense", 400)["code"] == "usage"
    assert daemon.call("GET", "/v1/environments/e-", 409)["code"] == "ambiguous"
    for one in forks:
        daemon.delete(one["id"])


def test_snapshot_break_restore(daemon: Daemon, environment: str) -> None:
    daemon.exec(environment, "cd /srv; NAME=before; echo one > /srv/file; sleep 1000 &")
    first = daemon.snapshot(environment, name="good")
    daemon.exec(environment, "NAME=after; rm /srv/file; kill %1; cd /")
    second = daemon.snapshot(environment)
    restored = daemon.call("POST", f"/v1/environments/{environment}/restore", json={"snapshot": "good"})
    assert (restored["snapshot"], restored["shell_restarted"]) == (first, False)
    assert daemon.exec(environment, "echo $NAME; cat file; jobs -r | wc -l")["stdout"] == "before\none\n1\n"
    diff = daemon.call("GET", f"/v1/environments/{environment}/diff?a={first}&b={second}")
    assert diff["removed"] == ["/srv/file"] and "sleep 1000" in diff["processes_removed"]
    tree = daemon.call("GET", f"/v1/environments/{environment}/tree")
    assert tree["roots"] == [first]
    assert {node["snapshot"]["id"]: node["children"] for node in tree["nodes"]} == {first: [second], second: []}
    assert tree["nodes"][0]["environments"] == [environment] and "good" in tree["text"]
    detail = daemon.call("GET", f"/v1/environments/{environment}/snapshots/good")
    assert any("sleep" in process["argv"] for process in detail["manifest"]["processes"])
    assert (
        daemon.call("POST", f"/v1/environments/{environment}/restore", 404, json={"snapshot": "none"})["code"]
        == "not_found"
    )


def test_files_only_and_what_cannot_be(daemon: Daemon, environment: str) -> None:
    daemon.exec(environment, "X=1; echo kept > /srv/kept")
    taken = daemon.call("POST", f"/v1/environments/{environment}/snapshots", 201, json={"mode": "files"})
    assert taken["captured"] == ["files"] and taken["memory_bytes"] == 0
    restored = daemon.call("POST", f"/v1/environments/{environment}/restore", json={"snapshot": taken["id"]})
    assert restored["shell_restarted"]
    answer = daemon.exec(environment, "cat /srv/kept; echo ${X-gone}")
    assert (answer["stdout"], answer["shell_restarted"]) == ("kept\ngone\n", True)
    path = f"/v1/environments/{environment}/snapshots"
    assert daemon.call("POST", path, 400, json={"name": "no/slash"})["code"] == "usage"
    assert daemon.call("POST", path, 422, json={"mode": "half"})["code"] == "usage"
    daemon.snapshot(environment, name="taken")
    assert daemon.call("POST", path, 409, json={"name": "taken"})["code"] == "exists"


def test_rename_pin_delete_cascade(daemon: Daemon, environment: str) -> None:
    a = daemon.snapshot(environment, name="a")
    b, c = daemon.snapshot(environment), daemon.snapshot(environment)
    path = f"/v1/environments/{environment}/snapshots"
    assert daemon.call("PATCH", f"{path}/{b}", json={"name": "middle"})["name"] == "middle"
    assert daemon.call("PATCH", f"{path}/{b}", 409, json={"name": "a"})["code"] == "exists"
    assert daemon.call("DELETE", f"{path}/middle", 409)["code"] == "has_children"
    assert daemon.call("DELETE", f"{path}/{c}", 409)["code"] == "wrong_state"  # it carries the environment
    daemon.call("POST", f"/v1/environments/{environment}/restore", json={"snapshot": a})
    assert daemon.call("PATCH", f"{path}/{c}", json={"pinned": True})["pinned"]
    assert daemon.call("DELETE", f"{path}/middle?cascade=true", 409)["code"] == "wrong_state"
    daemon.call("PATCH", f"{path}/{c}", json={"pinned": False})
    daemon.call("DELETE", f"{path}/middle?cascade=true", 204)
    assert [one["id"] for one in daemon.call("GET", path)["items"]] == [a]


def test_a_pinned_snapshot_outlives_its_environment(daemon: Daemon) -> None:
    made = daemon.create()
    daemon.exec(made, "echo still here > /srv/x; X=5")
    taken = daemon.snapshot(made, name="base")
    daemon.call("PATCH", f"/v1/snapshots/{taken}", json={"pinned": True})
    daemon.delete(made)
    assert daemon.call("GET", f"/v1/snapshots/{taken}")["pinned"]
    again = daemon.create(snapshot=taken[:-1])
    assert daemon.exec(again, "cat /srv/x; echo $X")["stdout"] == "still here\n5\n"
    daemon.delete(again)
    daemon.call("PATCH", f"/v1/snapshots/{taken}", json={"pinned": False})
    daemon.call("GET", f"/v1/snapshots/{taken}", 404)


def test_forks_are_apart(daemon: Daemon, environment: str) -> None:
    daemon.exec(environment, "cd /srv; N=0")
    made = daemon.call(
        "POST", f"/v1/environments/{environment}/fork", 201, json={"n": 3, "ttl_seconds": 900, "return_errors": True}
    )
    forks = [one["id"] for one in made["environments"]]
    assert len(set(forks)) == 3 and made["errors"] == [] and made["environments"][0]["expires_at"]
    for index, fork in enumerate(forks):
        daemon.exec(fork, f"N={index + 1}; echo $N > who")
    assert [daemon.exec(fork, "cat who; echo $N")["stdout"] for fork in forks] == [f"{i}\n{i}\n" for i in (1, 2, 3)]
    assert daemon.exec(environment, "ls; echo $N")["stdout"] == "0\n"
    for fork in forks:
        daemon.delete(fork)
    assert daemon.call("POST", f"/v1/environments/{environment}/fork", 422, json={"n": 0})["code"] == "usage"


def test_pause_and_resume(daemon: Daemon, environment: str) -> None:
    daemon.exec(environment, "X=7; cd /srv")
    assert daemon.call("POST", f"/v1/environments/{environment}/pause")["state"] == "paused"
    assert daemon.exec(environment, "echo", 409)["code"] == "wrong_state"
    assert daemon.call("POST", f"/v1/environments/{environment}/pause", 409)["code"] == "wrong_state"
    assert daemon.call("POST", f"/v1/environments/{environment}/resume")["state"] == "live"
    assert daemon.exec(environment, "echo $X; pwd")["stdout"] == "7\n/srv\n"
    assert daemon.call("POST", f"/v1/environments/{environment}/resume", 409)["code"] == "wrong_state"


def test_the_same_key_is_done_once(daemon: Daemon) -> None:
    headers = {"Idempotency-Key": "make-1"}
    first = daemon.client.post("/v1/environments", json={}, headers=headers)
    second = daemon.client.post("/v1/environments", json={}, headers=headers)
    assert first.status_code == second.status_code == 201 and first.json() == second.json()
    assert second.headers["idempotency-replayed"] == "true" and "idempotency-replayed" not in first.headers
    key = first.json()["id"]
    other = daemon.client.post("/v1/environments", json={"ttl_seconds": 5}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    path, body = f"/v1/environments/{key}/exec", {"command": "echo x >> /srv/count; sleep 0.3; wc -l < /srv/count"}
    answers: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                daemon.client.post(path, json=body, headers={"Idempotency-Key": "run-1"}).json()
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one["stdout"] for one in answers} == {"1\n"} and len({one["command"] for one in answers}) == 1
    wrong = {"command": "exit 3", "timeout": 5}
    assert daemon.exec(key, **wrong)["exit_code"] == 3
    forked = [
        daemon.client.post(f"/v1/environments/{key}/fork", json={}, headers={"Idempotency-Key": "fork-1"}).json()
        for _ in range(2)
    ]
    assert forked[0] == forked[1]
    daemon.delete(forked[0]["environments"][0]["id"])
    daemon.delete(key)


def test_what_failed_may_be_tried_again_with_its_key(daemon: Daemon) -> None:
    headers = {"Idempotency-Key": "failing"}
    for _ in range(2):
        answer = daemon.client.post("/v1/environments", json={"method": "surely_not"}, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (400, "usage")


@pytest.mark.parametrize(
    "body",
    [
        {"arguments": {"colour": "red"}},
        {"arguments": {"rootfs": 5}},
        {"arguments": {"network": "wide"}},
        {"arguments": {"env": "x"}},
        {"snapshot": "s-0", "method": "waypoint_build"},
    ],
)
def test_arguments_that_make_no_sense(daemon: Daemon, body: dict[str, Any]) -> None:
    answer = daemon.client.post("/v1/environments", json=body)
    assert answer.status_code in (400, 404, 422) and answer.json()["code"] in ("usage", "not_found"), answer.text
    assert daemon.client.post("/v1/environments", json={"colour": 1}).status_code == 422


def test_history_and_backends(daemon: Daemon, environment: str) -> None:
    daemon.exec(environment, "true")
    done = daemon.call("GET", f"/v1/environments/{environment}/history")["items"]
    assert [one["operation"] for one in done] == ["start", "exec"]
    found = {one["name"]: one for one in daemon.call("GET", "/v1/backends")["items"]}
    assert found["waypoint"]["durable"] and "rootfs" in found["waypoint"]["methods"]["waypoint_build"]


def test_a_session_that_dies_is_said_to_be(daemon: Daemon) -> None:
    made = daemon.create()
    daemon.exec(made, "echo x > /srv/x")
    taken = daemon.snapshot(made)
    session = daemon.call("GET", f"/v1/environments/{made}")["description"]
    from waypoint.engine import Engine
    from waypoint.kernel import processes
    from waypoint.outcomes import Process

    with Engine(daemon.home / "waypoint") as engine:
        record = engine.session(session).record
        processes.kill(Process(record.init_pid, record.init_start))
        assert processes.wait_gone(Process(record.init_pid, record.init_start), 30)
    assert daemon.exec(made, "true", 409)["code"] == "session_dead"
    until(lambda: daemon.state(made) == "lost", what="that its death is noticed")
    daemon.call("POST", f"/v1/environments/{made}/restore", json={"snapshot": taken})
    assert daemon.exec(made, "cat /srv/x")["stdout"] == "x\n"
    daemon.delete(made)
