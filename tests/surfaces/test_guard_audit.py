"""The audit log: whole under several writers and kill -9, and honest about what was done to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from websockets.sync.client import connect

from guarded import served
from statefork.errors import NotFound, StoreError
from statefork.server.guard.audit import AuditLog
from statefork.server.guard.verify import verify

WRITER = """
import sys
from pathlib import Path
from statefork.server.guard.audit import AuditLog
log = AuditLog(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    log.append(action="exec", principal="p", name=sys.argv[3], outcome="ok", environment="e1", facts={"number": number})
    if number == 20:
        print("going", flush=True)
log.close()
"""


@contextmanager
def opened(directory: Path) -> Iterator[AuditLog]:
    log = AuditLog(directory)
    try:
        yield log
    finally:
        log.close()


def write(directory: Path, count: int) -> None:
    with opened(directory) as log:
        for number in range(count):
            log.append(action="exec", principal="p", name="n", outcome="ok", environment="e1", facts={"number": number})


def lines(directory: Path) -> list[bytes]:
    return (directory / "audit.jsonl").read_bytes().splitlines(keepends=True)


def rewrite(directory: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    (directory / "audit.jsonl").write_bytes(b"".join(change(lines(directory))))


def kinds(directory: Path) -> set[str]:
    return {finding.kind for finding in verify(directory).findings}


def test_a_log_that_nobody_touched_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 5)
    write(tmp_path, 5)  # opened again it goes on where it was
    verdict = verify(tmp_path)
    assert verdict.ok and verdict.lines == verdict.seq == 10 and verdict.healed == 0
    assert verify(tmp_path, known=(10, verdict.hash)).ok
    records = [json.loads(line) for line in lines(tmp_path)]
    assert [record["prev"] for record in records[1:]] == [record["hash"] for record in records[:-1]]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        pytest.param(lambda ls: [*ls[:3], ls[3].replace(b'"e1"', b'"e2"'), *ls[4:]], "changed", id="changed"),
        pytest.param(lambda ls: [*ls[:-1], ls[-1].replace(b'"e1"', b'"e2"')], "changed", id="changed-last"),
        pytest.param(lambda ls: [*ls[:3], *ls[4:]], "missing", id="removed"),
        pytest.param(lambda ls: ls[1:], "missing", id="removed-first"),
        pytest.param(lambda ls: ls[:-1], "missing", id="removed-last"),
        pytest.param(lambda ls: [], "missing", id="emptied"),
        pytest.param(lambda ls: [*ls[:3], ls[4], ls[3], *ls[5:]], "missing", id="swapped"),
        pytest.param(lambda ls: [*ls[:3], ls[2], *ls[3:]], "missing", id="doubled"),
        pytest.param(lambda ls: [*ls[:3], b"{}\n", *ls[3:]], "damaged", id="put-in"),
        pytest.param(lambda ls: [*ls[:3], b'{"seq":9,' + ls[3][1:], *ls[4:]], "changed", id="doubled-member"),
    ],
)
def test_what_was_done_to_it_is_found_before_and_after_the_daemon_goes_on(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], kind: str
) -> None:
    write(tmp_path, 8)
    rewrite(tmp_path, change)
    assert kind in kinds(tmp_path)
    write(tmp_path, 3)
    assert not verify(tmp_path).ok, "going on hid it"


def test_a_line_hash_that_was_made_anew_too_breaks_the_next_line(tmp_path: Path) -> None:
    from statefork.server.guard.audit import canonical, line_hash

    def forge(ls: list[bytes]) -> list[bytes]:
        record = json.loads(ls[3])
        record["environment"] = "e2"
        record["hash"] = line_hash(record)
        return [*ls[:3], canonical(record) + b"\n", *ls[4:]]

    write(tmp_path, 8)
    noted = verify(tmp_path)
    rewrite(tmp_path, forge)
    assert kinds(tmp_path) == {"missing"}
    assert not verify(tmp_path, known=(noted.seq, "0" * 64)).ok


def test_a_torn_last_line_is_cut_off_and_told(tmp_path: Path) -> None:
    write(tmp_path, 4)
    whole = (tmp_path / "audit.jsonl").read_bytes()
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b'{"seq":5,"time":"20')
    assert verify(tmp_path).ok and verify(tmp_path).lines == 4
    write(tmp_path, 1)
    verdict = verify(tmp_path)
    assert verdict.ok and verdict.healed == 1 and verdict.lines == 6
    assert (tmp_path / "audit.jsonl").read_bytes().startswith(whole)
    assert json.loads(lines(tmp_path)[4])["facts"]["torn_bytes"] == 19


def test_a_removed_line_does_not_pass_for_a_torn_one(tmp_path: Path) -> None:
    write(tmp_path, 4)
    rewrite(tmp_path, lambda ls: [*ls[:-1], ls[-1][:30]])  # the last line, which was whole, is cut
    assert not verify(tmp_path).ok
    write(tmp_path, 2)
    assert not verify(tmp_path).ok


def test_a_writer_killed_between_line_and_head_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path, 3)
    head = (tmp_path / "audit.head").read_bytes()
    write(tmp_path, 1)
    (tmp_path / "audit.head").write_bytes(head)
    assert verify(tmp_path).ok and verify(tmp_path).lines == 4
    write(tmp_path, 1)
    verdict = verify(tmp_path)
    assert verdict.ok and verdict.lines == 5


def test_that_the_head_is_gone_stays_visible(tmp_path: Path) -> None:
    write(tmp_path, 4)
    (tmp_path / "audit.head").unlink()
    assert kinds(tmp_path) == {"head"}
    write(tmp_path, 2)
    assert kinds(tmp_path) == {"head"}


def test_a_damaged_head_stops_the_daemon_with_the_next_step(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (tmp_path / "audit.head").write_bytes(b"nonsense")
    assert kinds(tmp_path) == {"head"}
    with pytest.raises(StoreError, match="audit verify"):
        AuditLog(tmp_path)


def test_there_is_no_log_before_the_first_line(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        verify(tmp_path)


def test_threads_and_processes_write_one_chain(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), "200", f"w{n}"], stdout=subprocess.DEVNULL)
        for n in range(3)
    ]
    with opened(tmp_path) as log, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: log.append(action="a", principal="p", name=str(n), outcome="ok"), range(200)))
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    verdict = verify(tmp_path)
    assert verdict.ok and verdict.lines == 800
    names = [json.loads(line)["name"] for line in lines(tmp_path)]
    assert {names.count(f"w{n}") for n in range(3)} == {200}


def test_kill_9_of_writers_leaves_a_whole_log(tmp_path: Path) -> None:
    """Several are killed at whatever instruction they are at, while one goes on."""
    for attempt in range(4):
        victims = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), "1000000", "victim"], stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for victim in victims:
            assert victim.stdout is not None and victim.stdout.readline() == b"going\n"
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait(30)
            assert victim.stdout is not None
            victim.stdout.close()
        write(tmp_path, 1)
        verdict = verify(tmp_path)
        assert verdict.ok, (attempt, verdict.findings)
    assert verdict.lines > 100


def test_verify_may_run_beside_writers(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), "3000", "w"], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"going\n"
    while writer.poll() is None:
        verdict = verify(tmp_path)
        assert verdict.ok, verdict.findings
    writer.stdout.close()
    assert verify(tmp_path).lines == 3000


def test_requests_are_told_with_who_what_where_outcome_and_duration(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        runner = server.token("exec", name="ann")
        server.post("/v1/exec", runner, json={"command": "export PASSWORD=hunter2"})
        server.post("/v1/exec", {"Authorization": "Bearer wrong"}, json={"command": "x"})
        server.get("/v1/environments/none", runner)  # a read that no route named: not told
        server.get("/v1/events", runner)
        with connect(f"ws://127.0.0.1:{server.port}/v1/talk", additional_headers=runner) as socket:
            socket.send("x")
            socket.recv(timeout=30)
        deadline = time.monotonic() + 30
        while len(told := server.audit()) < 6:
            assert time.monotonic() < deadline, told
            time.sleep(0.02)
    assert [(line["action"], line["outcome"]) for line in told] == [
        ("exec", "ok"),
        ("request", "unauthenticated"),
        ("watch", "begun"),
        ("watch", "ok"),
        ("terminal", "begun"),
        ("terminal", "ok"),
    ]
    first = told[0]
    assert (
        first["name"] == "ann" and first["environment"] == "e1" and first["status"] == 200 and first["duration_ms"] > 0
    )
    assert first["facts"]["command"]["bytes"] == len("export PASSWORD=hunter2")
    text = (tmp_path / "audit.jsonl").read_text()
    assert "hunter2" not in text and runner["Authorization"].split("_", 2)[2] not in text
    assert verify(tmp_path).ok


def test_the_answer_is_complete_only_when_its_line_is_written(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        runner = server.token("exec")
        for number in range(1, 30):
            server.post("/v1/exec", runner, json={"command": "true"})
            assert len(server.audit()) == number


def test_facts_carry_no_token_and_no_long_text(tmp_path: Path) -> None:
    secret = "sft_0123456789ab_" + "S" * 43
    with opened(tmp_path) as log:
        log.append(
            action="a", principal="p", name=secret, outcome="ok", facts={"text": f"x {secret} y", "long": ["z" * 9000]}
        )
        assert log.fingerprint("ls") == log.fingerprint(b"ls") != log.fingerprint("ls ")
    assert "SSS" not in (tmp_path / "audit.jsonl").read_text() and len(lines(tmp_path)[0]) < 2000
