"""What `diff` says beside files: processes, variables, directory, ports; and how it is shown."""

from __future__ import annotations

import json
import threading
import time

import pytest

from waypoint.diff import Difference, FileChange, compare, render, to_json
from waypoint.engine import Engine
from waypoint.errors import Ambiguous, NotFound
from waypoint.session import Session

SERVER = "import socket, time; s = socket.create_server(('127.0.0.1', 8123)); time.sleep(1000)"


def do(session: Session, command: str) -> None:
    said = session.exec(command, timeout=60)
    assert said.exit_code == 0, said.stderr


def wait_for_port(session: Session) -> None:
    deadline = time.monotonic() + 30
    while session.exec("grep -q :1FBB /proc/net/tcp").exit_code != 0:
        assert time.monotonic() < deadline, "the server does not listen"


@pytest.mark.parametrize("taken", [False, True], ids=["live", "snapshot"])
def test_processes_variables_directory_and_ports(engine: Engine, host_session: Session, taken: bool) -> None:
    do(host_session, "cd /; export STAYS=1 CHANGES=1 GOES=1; sleep 1001 & sleep 1002 & sleep 1003 &")
    before = host_session.snapshot()
    do(
        host_session,
        f'/usr/bin/python3 -c "{SERVER}" & kill %2; wait %2; export CHANGES=2 COMES="a b"; unset GOES; cd /usr; true',
    )
    wait_for_port(host_session)
    after = host_session.snapshot().id if taken else host_session.id
    found = compare(engine, before.id, after)
    assert found.files == ()
    assert [(c.status, c.name, c.before, c.after) for c in found.environment] == [
        ("changed", "CHANGES", "1", "2"),
        ("added", "COMES", None, "a b"),
        ("removed", "GOES", "1", None),
    ]
    assert found.cwd == ("/", "/usr")
    assert [(c.status, c.address) for c in found.listening] == [("added", "tcp 127.0.0.1:8123")]
    assert found.shell == "differs"
    processes = {(c.status, c.argv[0:2]) for c in found.processes if c.status != "changed"}
    assert processes == {("removed", ("sleep", "1002")), ("added", ("/usr/bin/python3", "-c"))}
    changed = [c for c in found.processes if c.status == "changed"]
    assert [c.detail for c in changed] == ["cwd / → /usr"]
    back = compare(engine, after, before.id)
    assert {c.status for c in back.processes if c.argv[0] == "/usr/bin/python3"} == {"removed"}


def test_a_process_that_became_another(engine: Engine, session: Session) -> None:
    do(session, "mkfifo /tmp/go; bash -c 'read < /tmp/go; exec sleep 1004' & true")
    before = session.snapshot()
    do(session, "echo > /tmp/go; until grep -qs 1004 /proc/$!/cmdline; do :; done")
    (change,) = compare(engine, before.id, session.id).processes
    assert (change.status, change.argv) == ("changed", ("sleep", "1004"))
    assert change.detail.startswith("was bash -c read")


def test_state_of_the_shell_that_is_not_exported(engine: Engine, session: Session) -> None:
    before = session.snapshot()
    assert compare(engine, before.id, session.id).shell == "same"
    do(session, "secret() { echo 1; }")
    found = compare(engine, before.id, session.id)
    assert found.shell == "differs"
    assert found
    assert "functions" in render(found)


def test_a_busy_shell_is_said_not_guessed(engine: Engine, session: Session) -> None:
    do(session, "export A=1")
    before = session.snapshot()
    started: list[int] = []
    worker = threading.Thread(
        target=lambda: session.exec("export A=2; touch /tmp/up; sleep 1000", on_start=started.append)
    )
    worker.start()
    try:
        deadline = time.monotonic() + 30
        while session.run(["test", "-e", "/tmp/up"]).exit_code != 0:
            assert time.monotonic() < deadline
        found = compare(engine, before.id, session.id)
        assert (found.shell, found.environment, found.cwd) == ("unknown", (), None)
        assert any("busy" in note for note in found.notes)
        assert ("added", ("sleep", "1000")) in {(c.status, c.argv) for c in found.processes}
    finally:
        session.signal(2)
        worker.join()


def test_names_are_looked_up_in_the_other_ones_tree(engine: Engine, session: Session, small_base: object) -> None:
    other = engine.new(base=session.base)
    first, second = session.snapshot("same-name"), other.snapshot("same-name")
    assert compare(engine, session.id, "same-name").after == first.id
    assert compare(engine, "same-name", other.id).before == second.id
    with pytest.raises(Ambiguous):
        compare(engine, "same-name", "same-name")
    with pytest.raises(NotFound, match="waypoint ls"):
        compare(engine, session.id, "nothing-of-that-name")


def test_text_and_json(engine: Engine, session: Session) -> None:
    before = session.snapshot()
    assert render(compare(engine, before.id, session.id)) == "no difference\n"
    do(
        session,
        "mkdir /opt/new; echo > /opt/new/f; echo x > $'/opt/bad\\e[31m\\n\\xff'; rm /etc/hosts; export V=$'\\e]0;x'; cd /opt",
    )
    found = compare(engine, before.id, session.id)
    text = render(found)
    lines = text.splitlines()
    assert text.isprintable() or all(line.isprintable() for line in lines)
    assert lines[0] == "files"
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["-", "/etc/hosts"],
        ["+", "/opt/bad\\x1b[31m\\n\\udcff"],
        ["+", "/opt/new/"],
    ]
    document = json.loads(json.dumps(to_json(found)))
    assert document["different"] is True
    assert document["before"] == before.id
    assert {
        "status": "added",
        "path": "/opt/new",
        "kind": "directory",
        "detail": "directory, 1 entry",
        "entries": 1,
    } in document["files"]
    assert document["cwd"] == {"before": "/", "after": "/opt"}


def test_nothing_private_is_shown(engine: Engine, session: Session) -> None:
    before = session.snapshot()
    do(session, "echo x > /.waypoint/mine; ls /.waypoint/mine")
    assert compare(engine, before.id, session.id).files == ()


def test_an_empty_difference_is_false() -> None:
    nothing = Difference("a", "b", (), (), (), None, (), "unknown", ("a note",))
    assert not nothing
    assert Difference("a", "b", (FileChange("added", "/f", "file", "1 bytes"),), (), (), None, (), "same", ())
