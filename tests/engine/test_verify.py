"""A restored session is compared with its snapshot before it runs: equal, or it never takes the old one's place."""

from __future__ import annotations

import pytest

from waypoint.engine import Engine
from waypoint.errors import VerifyFailed, WrongState
from waypoint.model import BaseRecord
from waypoint.session import Session
from waypoint.verify import differences


def prepare(session: Session) -> None:
    """Files, jobs, a deleted open file, a listening server's worth of state."""
    session.exec("export KEY=value; mkdir -p /var/tmp/v && cd /var/tmp/v && echo text >file && ln -s file link && mkfifo pipe")
    session.exec("sleep 1000 & exec 5<>gone; echo held >&5; rm gone; (while :; do echo tick >>ticks; sleep 0.01; done) & :")


def test_a_verified_restore_and_fork_are_equal_though_programs_are_running(session: Session) -> None:
    prepare(session)
    snapshot = session.snapshot()
    session.exec("echo changed >file; kill %1")
    session.restore(snapshot.id, verify=True)
    assert session.exec("cat file; cat <&5; echo $KEY; jobs -pr | wc -l").stdout.split()[-2:] == [b"value", b"2"]
    forks = session.fork(2, from_snapshot=snapshot.id, verify=True)
    for fork in forks:
        assert fork.exec("cat file").stdout == b"text\n"
        fork.remove()


def test_verify_works_over_stacked_layers_too(engine: Engine, small_base: BaseRecord) -> None:
    session = engine.new(base=small_base)
    try:
        session.exec("echo one >/file; sleep 1000 & :")
        snapshot = session.snapshot()
        session.exec("rm /file")
        session.restore(snapshot.id, verify=True)
        assert session.exec("cat /file").stdout == b"one\n"
        session.exec("echo two >/file")
        again = session.snapshot()
        for fork in session.fork(2, from_snapshot=again.id, verify=True):
            assert fork.exec("cat /file").stdout == b"two\n"
            fork.remove()
    finally:
        session.remove()


def test_damaged_files_are_refused_and_the_old_session_goes_on(engine: Engine, session: Session) -> None:
    session.exec("mkdir -p /var/tmp/v && echo text >/var/tmp/v/file; MARK=here")
    snapshot = session.snapshot()
    layer = engine.store.paths.upper(snapshot.layers[0])
    (layer / "var/tmp/v/file").write_text("other and longer\n")
    before = len(engine.sessions())
    with pytest.raises(VerifyFailed, match="files"):
        session.restore(snapshot.id, verify=True)
    assert session.exec("echo $MARK; cat /var/tmp/v/file").stdout == b"here\ntext\n"
    with pytest.raises(VerifyFailed) as failed:
        session.fork(2, from_snapshot=snapshot.id, verify=True)
    assert failed.value.details["differences"]
    assert len(engine.sessions()) == before


def test_a_process_that_is_not_what_it_was_is_refused(engine: Engine, session: Session) -> None:
    session.exec("sleep 1000 & :")
    snapshot = session.snapshot()
    manifest = snapshot.manifest
    sleeper = next(one for one in manifest["processes"] if one["name"] == "sleep")
    sleeper["descriptors"] = {"file": 99}
    engine.store.db.update_snapshot(snapshot.id, manifest=manifest)
    with pytest.raises(VerifyFailed, match=rf"process {sleeper['pid']} \(sleep 1000\): descriptors is"):
        session.restore(snapshot.id, verify=True)
    assert session.exec("echo alive").stdout == b"alive\n"


def test_verify_lists_what_a_session_did_since(session: Session) -> None:
    session.exec("export KEY=value; cd /tmp; sleep 1000 & :")
    session.snapshot()
    assert session.verify() == []
    session.exec("export KEY=other; cd /; kill %1; wait; sleep 1001 & :")
    found = "\n".join(session.verify())
    assert "(sleep 1000) is missing" in found
    assert "(sleep 1001) is new" in found
    assert "the shell's directory is /, was /tmp" in found
    assert "variable KEY is 'other', was 'value'" in found


def test_without_a_snapshot_there_is_nothing_to_compare_with(session: Session) -> None:
    with pytest.raises(WrongState, match="no snapshot"):
        session.verify()


def test_differences_of_ports_and_mounts() -> None:
    empty = {"processes": [], "listening": [], "mounts": []}
    found = {"processes": [], "listening": ["tcp 0.0.0.0:80"], "mounts": ["/ overlay"]}
    assert differences(empty, found) == ["listening on tcp 0.0.0.0:80 is new", "mount / overlay is new"]
    assert differences(found, empty) == ["listening on tcp 0.0.0.0:80 is missing", "mount / overlay is missing"]
