"""Snapshot, restore, pause, resume: what comes back, and what is said of what does not."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from statefork.environment import Environment
from statefork.errors import (
    Ambiguous,
    Exists,
    NotFound,
    SessionDead,
    Unsupported,
    UsageError,
    WaypointError,
    WrongState,
)
from statefork.model import Capability
from statefork.testing.contract.counter import Counter
from statefork.testing.contract.subject import Contract, Subject, brings_back, eventually

__all__ = ["StateContract"]


class StateContract(Contract):
    def test_files_come_back_or_are_said_not_to(self, standing: Environment, subject: Subject) -> None:
        kept, made = f"{subject.scratch}/kept", f"{subject.scratch}/made"
        standing.write_file(kept, "before")
        snapshot = standing.snapshot()
        standing.write_file(kept, "after")
        standing.write_file(made, "new")
        standing.restore(snapshot)
        if brings_back(standing, Capability.FILES):
            assert standing.read_file(kept) == b"before"
            with pytest.raises(NotFound):
                standing.read_file(made)
        else:
            assert standing.read_file(kept) == b"after"
            assert "files" in standing.snapshots()[-1].not_captured

    def test_the_shell_comes_back_or_is_said_to_be_new(self, standing: Environment) -> None:
        standing.exec_command("cd /tmp; answer=42; double() { echo $(($1 * 2)); }")
        snapshot = standing.snapshot()
        assert standing.exec_command("answer=43; cd /; echo live").stdout == "live\n"
        restored = standing.restore(snapshot)
        result = standing.exec_command('echo "answer=$answer"')
        if brings_back(standing, Capability.SHELL):
            assert (restored.shell_restarted, result.shell_restarted) == (False, False)
            assert (result.stdout, result.cwd) == ("answer=42\n", "/tmp")
            assert standing.exec_command("double 4").stdout == "8\n"
        else:
            assert (restored.shell_restarted, result.shell_restarted) == (True, True)
            assert result.stdout == "answer=\n"
        assert not standing.exec_command("true").shell_restarted

    def test_processes_come_back_or_do_not(self, standing: Environment, subject: Subject) -> None:
        counter = Counter(standing, subject.scratch)
        assert [counter.count(standing) for _ in range(3)] == [1, 2, 3]
        snapshot = standing.snapshot()
        assert counter.count(standing) == 4
        standing.restore(snapshot)
        if brings_back(standing, Capability.PROCESSES):
            assert [counter.count(standing) for _ in range(2)] == [4, 5]
            standing.restore(snapshot)
            assert counter.count(standing) == 4
        else:
            assert not counter.alive(standing)

    def test_a_snapshot_disturbs_nothing(self, standing: Environment, subject: Subject) -> None:
        counter = Counter(standing, subject.scratch)
        counter.count(standing)
        standing.exec_command("cd /tmp; kept=1")
        for _ in range(3):
            standing.snapshot()
        result = standing.exec_command("echo $kept; kill -0 $counter && echo running")
        assert (result.stdout, result.cwd, result.shell_restarted) == ("1\nrunning\n", "/tmp", False)
        assert counter.count(standing) == 2

    def test_what_was_captured_is_what_was_promised(self, fresh: Environment) -> None:
        fresh.snapshot("one")
        snapshot = fresh.snapshots()[0]
        assert set(snapshot.captured) == set(fresh.capabilities.restores)
        assert snapshot.duration_ms > 0
        assert fresh.restore("one").restored == snapshot.captured

    def test_full_is_full_or_refused(self, fresh: Environment) -> None:
        if fresh.capabilities.full:
            assert fresh.snapshot(mode="full")
        else:
            with pytest.raises(Unsupported):
                fresh.snapshot(mode="full")
            assert fresh.snapshots() == []
        if brings_back(fresh, Capability.FILES):
            assert fresh.snapshot(mode="files")
        else:
            with pytest.raises(Unsupported):
                fresh.snapshot(mode="files")
        with pytest.raises(UsageError):
            fresh.snapshot(mode="half")  # type: ignore[arg-type]

    def test_back_and_sideways_and_again(self, fresh: Environment, subject: Subject) -> None:
        if not brings_back(fresh, Capability.FILES):
            pytest.skip("the backend keeps no files")
        place = f"{subject.scratch}/where"
        for name in ("a", "b", "c"):
            fresh.write_file(place, name)
            fresh.snapshot(name)
        fresh.restore("a")
        fresh.write_file(place, "d")
        fresh.snapshot("d")
        for name in ("c", "a", "d", "b", "b"):
            fresh.restore(name)
            assert fresh.read_file(place).decode() == name
        parents = {snapshot.name: snapshot.parent for snapshot in fresh.snapshots()}
        ids = {snapshot.name: snapshot.id for snapshot in fresh.snapshots()}
        assert parents == {"a": None, "b": ids["a"], "c": ids["b"], "d": ids["a"]}

    def test_a_failed_restore_leaves_the_old_one(self, fresh: Environment, subject: Subject) -> None:
        if subject.spoil is None:
            pytest.skip("the backend's stored states cannot be damaged from outside")
        fresh.exec_command("still=here")
        snapshot = fresh.snapshot()
        subject.spoil(fresh, snapshot)
        with pytest.raises(WaypointError):
            fresh.restore(snapshot)
        result = fresh.exec_command('echo "$still"')
        assert (result.stdout, result.shell_restarted) == ("here\n", False)
        assert [record.error is None for record in fresh.history if record.operation == "restore"] == [False]

    def test_names(self, fresh: Environment) -> None:
        first = fresh.snapshot("ready")
        with pytest.raises(Exists):
            fresh.snapshot("ready")
        for wrong in ("", "a/b", "..", "a..b", "x:y", "-x", " ", "n" * 65, "new\nline"):
            with pytest.raises(UsageError):
                fresh.snapshot(wrong)
        assert len(fresh.snapshots()) == 1
        assert fresh.restore("ready").snapshot == first
        assert fresh.restore(first[:-2]).snapshot == first
        with pytest.raises(NotFound):
            fresh.restore("surely-not")
        fresh.snapshot()
        with pytest.raises(Ambiguous):
            fresh.restore("s-")
        assert fresh.exec_command("echo alive").stdout == "alive\n"

    def test_pause_and_resume(self, standing: Environment, subject: Subject) -> None:
        counter = Counter(standing, subject.scratch)
        counter.count(standing)
        standing.exec_command("cd /tmp; paused=no")
        standing.pause()
        assert standing.state == "paused"
        for refused in (
            lambda: standing.exec_command("true"),
            lambda: standing.run(["true"]),
            lambda: standing.read_file("/etc/passwd"),
            lambda: standing.snapshot(),
            lambda: standing.pause(),
        ):
            with pytest.raises(WrongState):
                refused()
        standing.resume()
        with pytest.raises(WrongState):
            standing.resume()
        result = standing.exec_command("echo $paused")
        if brings_back(standing, Capability.SHELL) or not standing.capabilities.pause_releases_memory:
            assert (result.stdout, result.cwd, result.shell_restarted) == ("no\n", "/tmp", False)
            assert counter.count(standing) == 2

    def test_restore_from_a_pause(self, standing: Environment) -> None:
        snapshot = standing.snapshot()
        standing.pause()
        standing.restore(snapshot)
        assert standing.state == "live"
        assert standing.exec_command("echo up").stdout == "up\n"

    def test_a_snapshot_meets_a_running_command(self, standing: Environment, subject: Subject) -> None:
        """Taken beside it, or after it, as the capabilities say; the command does not notice."""
        gate, begun = f"{subject.scratch}/gate", threading.Event()
        outputs: list[str] = []
        known = len(standing.snapshots())

        def command() -> None:
            script = f"echo begun; while ! [ -e {gate} ]; do sleep 0.05; done; echo ended"
            outputs.append(standing.exec_command(script, on_output=lambda *_: begun.set()).stdout)

        running = threading.Thread(target=command)
        running.start()
        assert begun.wait(30)
        taking = threading.Thread(target=standing.snapshot)
        taking.start()
        if standing.capabilities.snapshot_during_exec:
            taking.join(60)
            assert not taking.is_alive()
            assert outputs == []
        standing.run(["touch", gate])
        for thread in (running, taking):
            thread.join(60)
        assert outputs == ["begun\nended\n"]
        assert len(standing.snapshots()) == known + 1

    def test_a_restore_ends_a_running_command(self, standing: Environment) -> None:
        snapshot = standing.snapshot()
        begun, errors = threading.Event(), []

        def command() -> None:
            try:
                standing.exec_command("echo begun; sleep 600", on_output=lambda *_: begun.set())
            except WaypointError as error:
                errors.append(error)

        running = threading.Thread(target=command)
        running.start()
        assert begun.wait(30)
        standing.restore(snapshot)
        running.join(60)
        assert [type(error) for error in errors] == [SessionDead]
        assert standing.exec_command("echo new").stdout == "new\n"

    def test_destroy(self, subject: Subject, tmp_path: Path) -> None:
        with subject.create(tmp_path) as environment:
            environment.snapshot("s")
            environment.exec_command("sleep 600 &")
        environment.destroy()
        environment.cleanup()
        assert environment.state == "destroyed"
        for refused in (
            lambda: environment.exec_command("true"),
            lambda: environment.restore("s"),
            lambda: environment.snapshot(),
            lambda: environment.fork(),
            lambda: environment.resume(),
        ):
            with pytest.raises(WrongState):
                refused()
        assert subject.traces(tmp_path) == []

    def test_destroy_ends_a_running_command(self, subject: Subject, tmp_path: Path) -> None:
        environment = subject.create(tmp_path)
        begun = threading.Event()

        def command() -> None:
            with suppress(SessionDead):
                environment.exec_command("echo begun; sleep 600", on_output=lambda *_: begun.set())

        running = threading.Thread(target=command)
        running.start()
        assert begun.wait(30)
        environment.destroy()
        running.join(60)
        assert not running.is_alive()

    def test_attach(self, subject: Subject, tmp_path: Path) -> None:
        """What was there before stays there afterwards, whatever was done in between."""
        if subject.attach is None:
            pytest.skip("nothing to attach to was offered")
        with subject.attach(tmp_path) as environment:
            assert environment.exec_command("mine=1; echo attached").stdout == "attached\n"
            snapshot = environment.snapshot()
            environment.restore(snapshot)
            assert environment.exec_command("echo restored").stdout == "restored\n"
            (fork,) = environment.fork(1)
            assert fork.exec_command("echo forked").stdout == "forked\n"
            fork.destroy()
            environment.pause()
            environment.resume()
            assert environment.exec_command("echo resumed").stdout == "resumed\n"
        eventually("nothing of ours is left", lambda: subject.left_behind(tmp_path) == [])
