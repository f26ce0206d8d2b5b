"""Commands over HTTP: in one call, as events, in the background, over WebSocket; left and found again; terminals."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection

from daemon import Daemon, running, until

pytestmark = pytest.mark.timeout(180)  # a busy machine gets its time


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("d")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def environment(daemon: Daemon) -> str:
    return daemon.create()


def events(daemon: Daemon, method: str, path: str, **more: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    with daemon.client.stream(method, path, headers={"Accept": "text/event-stream"}, **more) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


def printed(found: list[tuple[str, dict[str, Any]]], stream: str) -> bytes:
    return b"".join(base64.b64decode(data["data"]) for name, data in found if name == stream)


def test_in_one_call(daemon: Daemon, environment: str) -> None:
    answer = daemon.exec(environment, "cd /tmp; f() { echo out; echo err >&2; return 3; }; f")
    assert (answer["exit_code"], answer["stdout"], answer["stderr"], answer["cwd"]) == (3, "out\n", "err\n", "/tmp")
    assert daemon.exec(environment, "f; pwd")["stdout"] == "out\n/tmp\n"
    assert daemon.exec(environment, "cat; wc -c", stdin="héllo")["stdout"] == "héllo0\n"
    every = bytes(range(1, 256)) + b"\0" * 4
    coded = base64.b64encode(every).decode()
    answer = daemon.exec(environment, "cat", stdin_base64=coded, encoding="base64")
    assert base64.b64decode(answer["stdout"]) == every
    assert daemon.exec(environment, "printf '\\xff'")["stdout"] == "�"
    ran = daemon.call(
        "POST",
        f"/v1/environments/{environment}/run",
        json={"argv": ["sh", "-c", "echo $A; pwd"], "env": {"A": "b c"}, "cwd": "/usr"},
    )
    assert ran["stdout"] == "b c\n/usr\n"
    assert daemon.call("POST", f"/v1/environments/{environment}/run", json={"argv": ["surely-not"]})["exit_code"] == 127


def test_limits_and_mistakes(daemon: Daemon, environment: str) -> None:
    answer = daemon.exec(environment, "head -c 100000 /dev/zero | tr '\\0' x", output_limit_bytes=2048)
    assert answer["truncated"] and len(answer["stdout"]) < 4096
    problem = daemon.exec(environment, "echo begun; sleep 100", 422, timeout=0.5)
    assert (problem["code"], problem["result"]["stdout"], problem["result"]["timed_out"]) == (
        "timeout",
        "begun\n",
        True,
    )
    assert daemon.exec(environment, "a\0b", 400)["code"] == "usage"
    assert daemon.exec(environment, "cat", 400, stdin_base64="%%")["code"] == "usage"
    assert daemon.exec(environment, "cat", 422, timeout=-1)["code"] == "usage"
    assert daemon.call("POST", f"/v1/environments/{environment}/run", 422, json={"argv": []})["code"] == "usage"
    assert daemon.exec("e-none", "true", 404)["code"] == "not_found"


def test_busy(daemon: Daemon, environment: str) -> None:
    started = daemon.exec(environment, "sleep 100", 202, background=True)
    path = f"/v1/environments/{environment}/commands/{started['id']}"
    try:
        until(
            lambda: daemon.call("GET", f"/v1/environments/{environment}")["commands"] == 1,
            what="one command runs",
        )
        until(
            lambda: (
                daemon.client.post(f"/v1/environments/{environment}/exec", json={"command": "true", "wait": False})
                .json()
                .get("code")
                == "busy"
            ),
            what="the shell is busy",
        )
    finally:
        daemon.call("POST", f"{path}/signal", 204, json={"signal": "INT"})
    ended = daemon.call("GET", f"{path}?wait=20")
    assert (ended["state"], ended["result"]["exit_code"]) == ("exited", 130)
    assert daemon.call("POST", f"{path}/signal", 400, json={"signal": "NONE"})["code"] == "usage"
    assert daemon.call("GET", f"/v1/environments/{environment}/commands/c-none", 404)["code"] == "not_found"


def test_events(daemon: Daemon, environment: str) -> None:
    found = list(
        events(
            daemon,
            "POST",
            f"/v1/environments/{environment}/exec",
            json={"command": "echo 1; echo e >&2; sleep 0.2; echo 2; exit_with() { return 5; }; exit_with"},
        )
    )
    assert found[0][0] == "started" and found[-1][0] == "exit" and found[-1][1]["exit_code"] == 5
    assert (printed(found, "stdout"), printed(found, "stderr")) == (b"1\n2\n", b"e\n")
    late = list(
        events(
            daemon, "GET", f"/v1/environments/{environment}/commands/{found[0][1]['command']}/output?stdout_offset=2"
        )
    )
    assert printed(late, "stdout") == b"2\n" and printed(late, "stderr") == b"e\n"
    slow = list(
        events(
            daemon, "POST", f"/v1/environments/{environment}/exec", json={"command": "echo x; sleep 50", "timeout": 0.3}
        )
    )
    assert slow[-1][0] == "problem" and slow[-1][1]["code"] == "timeout" and slow[-1][1]["result"]["timed_out"]


def test_much_output_arrives_whole(daemon: Daemon, environment: str) -> None:
    """Eight times what the window keeps: the reader slows the command down, and loses nothing."""
    total, pieces = 0, 0
    command = "i=0; while [ $i -lt 128 ]; do head -c 65536 /dev/zero; i=$((i+1)); done"
    for name, data in events(daemon, "POST", f"/v1/environments/{environment}/exec", json={"command": command}):
        if name == "stdout":
            part = base64.b64decode(data["data"])
            assert data["offset"] == total
            total, pieces = total + len(part), pieces + 1
    assert total == 128 * 65536 and pieces > 8


def test_input_over_rest(daemon: Daemon, environment: str) -> None:
    started = daemon.exec(environment, "read a; echo $a; cat", 202, background=True, interactive=True)
    path = f"/v1/environments/{environment}/commands/{started['id']}"
    daemon.call("POST", f"{path}/stdin", 204, json={"data": "first\nsec"})
    until(lambda: daemon.call("GET", path)["stdout_bytes"] >= 9)
    daemon.call("POST", f"{path}/stdin", 204, json={"data_base64": base64.b64encode(b"\xff\n").decode(), "end": True})
    ended = daemon.call("GET", f"{path}?wait=20&encoding=base64")
    assert base64.b64decode(ended["result"]["stdout"]) == b"first\nsec\xff\n"
    plain = daemon.exec(environment, "sleep 0.3", 202, background=True)
    refused = daemon.call(
        "POST", f"/v1/environments/{environment}/commands/{plain['id']}/stdin", 400, json={"data": "x"}
    )
    assert refused["code"] == "usage"
    daemon.call("GET", f"/v1/environments/{environment}/commands/{plain['id']}?wait=20")


# -- WebSocket --------------------------------------------------------------------------------------------------------


def receive(socket: ClientConnection) -> tuple[dict[str, Any], bytes, bytes]:
    """Until the last document, with all of stdout and stderr before it."""
    out, err = b"", b""
    while True:
        message = socket.recv(timeout=30)
        if isinstance(message, str):
            document = json.loads(message)
            if document["type"] in ("exit", "problem"):
                return document, out, err
        elif message[:1] == b"\x01":
            out += message[1:]
        else:
            err += message[1:]


def until_printed(socket: ClientConnection, wanted: bytes) -> bytes:
    out = b""
    while wanted not in out:
        message = socket.recv(timeout=30)
        out += message[1:] if isinstance(message, bytes) else b""
    return out


def test_websocket_with_input_and_signals(daemon: Daemon, environment: str) -> None:
    with daemon.websocket(f"/v1/environments/{environment}/stream") as socket:
        socket.send(
            json.dumps(
                {
                    "type": "start",
                    "command": "read x; echo got $x; echo err >&2; cat; stty size < /dev/tty",
                    "rows": 33,
                    "columns": 77,
                }
            )
        )
        started = json.loads(socket.recv(timeout=30))
        assert started["type"] == "started" and started["kind"] == "exec"
        socket.send(b"\x00hello\n")
        until_printed(socket, b"got hello")
        socket.send(json.dumps({"type": "resize", "rows": 44, "columns": 99}))
        socket.send(b"\x00tail\n")
        until_printed(socket, b"tail")
        socket.send(json.dumps({"type": "end_of_input"}))
        document, out, _ = receive(socket)
        assert document["result"]["exit_code"] == 0 and out == b"44 99\n"
    with daemon.websocket(f"/v1/environments/{environment}/stream") as socket:
        socket.send(json.dumps({"type": "start", "argv": ["sleep", "100"], "stdin": False}))
        json.loads(socket.recv(timeout=30))
        until(
            lambda: [
                c
                for c in daemon.call("GET", f"/v1/environments/{environment}/commands")["items"]
                if c["state"] == "running"
            ]
        )
        time.sleep(0.1)
        socket.send(json.dumps({"type": "signal", "signal": "TERM"}))
        document, _, _ = receive(socket)
        assert document["result"]["exit_code"] == 143


def test_a_websocket_that_breaks_is_taken_up_again(daemon: Daemon, environment: str) -> None:
    with daemon.websocket(f"/v1/environments/{environment}/stream") as socket:
        socket.send(
            json.dumps({"type": "start", "command": "echo one; read go; echo two; read more; echo three-$more"})
        )
        command = json.loads(socket.recv(timeout=30))["command"]
        until_printed(socket, b"one\n")
    with daemon.websocket(f"/v1/environments/{environment}/commands/{command}/stream?stdout_offset=4") as socket:
        socket.send(b"\x00go\n")
        assert until_printed(socket, b"two") == b"two\n"
        with daemon.websocket(f"/v1/environments/{environment}/commands/{command}/stream") as second:
            assert until_printed(second, b"two") == b"one\ntwo\n"
            socket.send(b"\x00x\n")
            first, second_end = receive(socket), receive(second)
            assert first[1] == second_end[1] == b"three-x\n" and first[0]["result"]["exit_code"] == 0


@pytest.mark.parametrize(
    "first",
    [
        "no json",
        "{}",
        '{"type":"start"}',
        '{"type":"start","command":"x","argv":["y"]}',
        '{"type":"start","command":"a\\u0000b"}',
        b"bytes",
    ],
)
def test_a_conversation_that_begins_wrong(daemon: Daemon, environment: str, first: str | bytes) -> None:
    with daemon.websocket(f"/v1/environments/{environment}/stream") as socket:
        socket.send(first)
        document = json.loads(socket.recv(timeout=30))
        assert document["type"] == "problem" and document["problem"]["code"] == "usage"


def test_a_websocket_to_nothing(daemon: Daemon) -> None:
    with pytest.raises(InvalidStatus) as caught:
        daemon.websocket("/v1/environments/e-none/stream")
    assert caught.value.response.status_code == 404 and b"not_found" in (caught.value.response.body or b"")


def test_commands_outlive_a_pause(daemon: Daemon) -> None:
    made = daemon.create()
    started = daemon.exec(
        made,
        "echo a; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo b; exit_code() { return 9; }; exit_code",
        202,
        background=True,
    )
    path = f"/v1/environments/{made}/commands/{started['id']}"
    until(lambda: daemon.call("GET", path)["stdout_bytes"] == 2)
    daemon.call("POST", f"/v1/environments/{made}/pause")
    until(lambda: daemon.call("GET", path)["state"] == "suspended")
    daemon.call("POST", f"/v1/environments/{made}/resume")
    daemon.call("PUT", f"/v1/environments/{made}/files/content?path=/tmp/go", 204, content=b"")
    ended = daemon.call("GET", f"{path}?wait=30")
    assert (ended["result"]["exit_code"], ended["result"]["stdout"]) == (9, "a\nb\n")
    waiting = daemon.exec(made, "sleep 100", 202, background=True)
    taken = daemon.snapshot(made)
    until(lambda: daemon.call("GET", f"/v1/environments/{made}")["commands"] == 1)
    daemon.call("POST", f"/v1/environments/{made}/restore", json={"snapshot": taken})
    gone = daemon.call("GET", f"/v1/environments/{made}/commands/{waiting['id']}?wait=30")
    assert (gone["state"], gone["problem"]["code"]) == ("failed", "session_dead")
    daemon.delete(made)


def test_a_caller_who_leaves_does_not_end_the_command(daemon: Daemon, environment: str) -> None:
    def leave() -> None:
        for name, _ in events(
            daemon,
            "POST",
            f"/v1/environments/{environment}/exec",
            json={"command": "echo here; sleep 1; echo done > /tmp/done"},
        ):
            if name == "stdout":
                return

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join(30)
    until(lambda: daemon.client.get(f"/v1/environments/{environment}/files/content?path=/tmp/done").status_code == 200)


# -- terminals --------------------------------------------------------------------------------------------------------


def test_terminal(daemon: Daemon, environment: str) -> None:
    with daemon.websocket(f"/v1/environments/{environment}/terminal?rows=31&columns=91") as socket:
        socket.send(b"TERMINAL=yes; stty size\r")
        shown(socket, b"31 91")
        socket.send(json.dumps({"type": "resize", "rows": 20, "columns": 60}))
        socket.send(b"stty size\r")
        shown(socket, b"20 60")
    assert daemon.exec(environment, "echo $TERMINAL")["stdout"] == "yes\n"
    with (
        daemon.websocket(f"/v1/environments/{environment}/terminal") as again,
        daemon.websocket(f"/v1/environments/{environment}/terminal") as watcher,
    ):
        shown(again, b"31 91")  # what was on the screen is drawn again
        again.send(b"echo $((6*7))\r")
        shown(watcher, b"42")
        again.send(json.dumps({"type": "detach"}))
        again.send(json.dumps({"type": "nonsense"}))
    with daemon.websocket(f"/v1/environments/{environment}/terminal") as wrong:
        wrong.send(json.dumps({"type": "nonsense"}))
        while isinstance(message := wrong.recv(timeout=30), bytes):
            pass
        assert json.loads(message)["problem"]["code"] == "usage"


def shown(socket: ClientConnection, wanted: bytes) -> bytes:
    screen = b""
    while wanted not in screen:
        message = socket.recv(timeout=30)
        screen += message if isinstance(message, bytes) else b""
    return screen
