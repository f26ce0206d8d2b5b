"""Forks, and environments side by side."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from statefork.environment import Environment
from statefork.errors import NotFound, UsageError, WaypointError
from statefork.model import Capability, ForkFailure
from statefork.testing.contract.counter import Counter
from statefork.testing.contract.subject import Contract, Subject, brings_back

__all__ = ["ForkContract"]

_SECOND_PROCESS = """
import json, sys
from statefork import create_env_manager
method, home, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with create_env_manager(method, home=home, **arguments) as environment:
    environment.exec_command("who=second")
    snapshot = environment.snapshot("same-name")
    environment.restore(snapshot)
    (fork,) = environment.fork(1)
    print(fork.exec_command("echo fine").stdout, end="")
    fork.destroy()
"""


class ForkContract(Contract):
    def test_forks_are_independent(self, standing: Environment, subject: Subject) -> None:
        counter = Counter(standing, subject.scratch)
        counter.count(standing)
        standing.exec_command("cd /tmp; who=parent")
        forks = standing.fork(3)
        try:
            assert len({fork.id for fork in forks} | {standing.id}) == 4
            for number, fork in enumerate(forks):
                fork.exec_command(f"who=fork{number}")
                if brings_back(fork, Capability.PROCESSES):
                    for _ in range(number):
                        counter.count(fork)
            seen = [fork.exec_command('echo "$who"').stdout for fork in forks]
            assert seen == ["fork0\n", "fork1\n", "fork2\n"]
            assert standing.exec_command('echo "$who"').stdout == "parent\n"
            if brings_back(standing, Capability.PROCESSES):
                assert [counter.count(fork) for fork in forks] == [2, 3, 4]
            assert counter.count(standing) == 2
        finally:
            for fork in forks:
                fork.destroy()

    def test_files_of_forks(self, standing: Environment, subject: Subject) -> None:
        if not brings_back(standing, Capability.FILES):
            pytest.skip("the backend keeps no files")
        path = f"{subject.scratch}/file"
        standing.write_file(path, "parent")
        forks = standing.fork(2)
        try:
            for number, fork in enumerate(forks):
                assert fork.read_file(path) == b"parent"
                fork.write_file(path, f"fork {number}")
            assert [fork.read_file(path) for fork in (*forks, standing)] == [b"fork 0", b"fork 1", b"parent"]
        finally:
            for fork in forks:
                fork.destroy()

    def test_a_fork_says_that_its_shell_is_new(self, standing: Environment) -> None:
        standing.exec_command("inherited=yes")
        (fork,) = standing.fork()
        with fork:
            result = fork.exec_command('echo "inherited=$inherited"')
            if brings_back(fork, Capability.SHELL):
                assert (result.stdout, result.shell_restarted) == ("inherited=yes\n", False)
            else:
                assert (result.stdout, result.shell_restarted) == ("inherited=\n", True)

    def test_fork_from_an_older_snapshot(self, standing: Environment, subject: Subject) -> None:
        counter = Counter(standing, subject.scratch)
        counter.count(standing)
        known = len(standing.snapshots())
        standing.snapshot("old")
        counter.count(standing)
        a, b = standing.fork(2, from_snapshot="old")
        with a, b:
            assert len(standing.snapshots()) == known + 1
            if brings_back(standing, Capability.PROCESSES):
                assert [counter.count(fork) for fork in (a, b)] == [2, 2]
            assert counter.count(standing) == 3

    def test_the_tree_is_shared_and_outlives_its_first_environment(self, subject: Subject, tmp_path: Path) -> None:
        first = subject.create(tmp_path)
        first.snapshot("root")
        (fork,) = first.fork()
        first.destroy()
        with fork:
            fork.snapshot("leaf")
            fork.restore("root")
            assert fork.exec_command("echo alive").stdout == "alive\n"
            (grandchild,) = fork.fork(from_snapshot="leaf")
            grandchild.destroy()
        assert subject.left_behind(tmp_path) == []

    def test_all_or_nothing(self, fresh: Environment, subject: Subject) -> None:
        with pytest.raises(UsageError):
            fresh.fork(0)
        with pytest.raises(NotFound):
            fresh.fork(2, from_snapshot="surely-not")
        if subject.spoil is None:
            return
        snapshot = fresh.snapshot()
        subject.spoil(fresh, snapshot)
        with pytest.raises(WaypointError):
            fresh.fork(2, from_snapshot=snapshot)
        made = fresh.fork(2, from_snapshot=snapshot, return_errors=True)
        assert all(isinstance(one, ForkFailure) for one in made)
        assert fresh.stats.environments == 1

    def test_many_at_once(self, subject: Subject, tmp_path: Path) -> None:
        """Environments of one state directory, each snapshotted, restored and used in a thread of its own."""
        failures: list[Exception] = []

        def live(number: int) -> None:
            try:
                with subject.create(tmp_path) as environment:
                    environment.exec_command(f"me={number}")
                    environment.snapshot("same-name-in-each")
                    assert environment.exec_command("echo $me").stdout == f"{number}\n"
                    environment.restore("same-name-in-each")
                    assert environment.exec_command("echo back").stdout == "back\n"
            except (WaypointError, AssertionError) as error:
                failures.append(error)

        threads = [threading.Thread(target=live, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(250)
        assert failures == []
        assert subject.left_behind(tmp_path) == []

    def test_two_processes_side_by_side(self, fresh: Environment, subject: Subject, tmp_path: Path) -> None:
        import json

        fresh.exec_command("who=first")
        fresh.snapshot("same-name")
        arguments = json.dumps(subject.fresh_arguments(), default=str)
        argv = [sys.executable, "-c", _SECOND_PROCESS, subject.method, str(tmp_path / "home"), arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
        assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr
        assert fresh.exec_command("echo $who").stdout == "first\n"
