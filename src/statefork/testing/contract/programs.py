"""`run`: programs beside the shell."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from statefork.environment import Environment
from statefork.errors import ExecTimeout, UsageError
from statefork.testing.contract.endings import TIMEOUTS
from statefork.testing.contract.subject import Contract, Subject, eventually

__all__ = ["ProgramContract"]


class ProgramContract(Contract):
    def test_arguments_arrive_as_they_are(self, shared: Environment) -> None:
        words = ["", " ", "$HOME", "a'b\"c", "*", "new\nline", "é"]
        result = shared.run(["sh", "-c", 'for word; do printf "%s|" "$word"; done', "sh", *words])
        assert result.stdout == "|".join(words) + "|"

    def test_results(self, shared: Environment) -> None:
        result = shared.run(["sh", "-c", "echo out; echo err >&2; exit 6"])
        assert (result.exit_code, result.stdout, result.stderr) == (6, "out\n", "err\n")
        assert shared.run(["sh", "-c", "kill -9 $$"]).exit_code == 137

    def test_a_program_that_does_not_exist(self, shared: Environment) -> None:
        assert shared.run(["surely-no-such-program"]).exit_code == 127

    def test_stdin_environment_and_directory(self, shared: Environment) -> None:
        result = shared.run(
            ["sh", "-c", 'cat; echo "$COLOUR"; pwd'], stdin=b"\0in\n", env={"COLOUR": "a b"}, cwd="/tmp"
        )
        assert result.stdout_bytes == b"\0in\na b\n/tmp\n"

    def test_it_does_not_touch_the_shell(self, shared: Environment) -> None:
        shared.exec_command("mine=1; cd /tmp")
        shared.run(["sh", "-c", "mine=2; cd /; exit 9"])
        assert shared.exec_command("echo $mine $?; pwd").stdout == "1 0\n/tmp\n"

    def test_timeout_kills_it(self, shared: Environment, subject: Subject) -> None:
        pid_file = f"{subject.scratch}/run-pid"
        script = f"trap '' INT TERM; echo $$ >{pid_file}; echo begun; while :; do sleep 1; done"
        for timeout in TIMEOUTS:
            with pytest.raises(ExecTimeout) as caught:
                shared.run(["sh", "-c", script], timeout=timeout)
            if caught.value.result.stdout:
                break
        assert caught.value.result.stdout == "begun\n"
        pid = shared.read_file(pid_file).decode().strip()
        eventually("it is gone", lambda: shared.run(["sh", "-c", f"kill -0 {pid} 2>/dev/null"]).exit_code != 0)

    def test_what_it_leaves_behind_does_not_hold_the_result(self, shared: Environment) -> None:
        result = shared.run(["sh", "-c", "sleep 60 & echo left"], timeout=30)
        assert result.stdout == "left\n"

    def test_many_at_once_beside_a_command(self, shared: Environment, subject: Subject) -> None:
        gate = f"{subject.scratch}/many"
        shared.run(["rm", "-f", gate])
        results: list[str] = []
        held = threading.Thread(target=lambda: shared.exec_command(f"while ! [ -e {gate} ]; do sleep 0.05; done"))
        held.start()
        threads = [
            threading.Thread(target=lambda n=n: results.append(shared.run(["echo", str(n)]).stdout)) for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(results) == [f"{n}\n" for n in range(6)]
        assert held.is_alive()
        shared.run(["touch", gate])
        held.join(30)
        assert not held.is_alive()

    def test_a_line_instead_of_a_list_is_refused(self, shared: Environment) -> None:
        wrongs: list[Any] = ["ls -l", []]
        for wrong in wrongs:
            with pytest.raises(UsageError):
                shared.run(wrong)

    def test_durations_are_measured(self, shared: Environment) -> None:
        began = time.perf_counter()
        result = shared.run(["sleep", "0.2"])
        whole = (time.perf_counter() - began) * 1000
        assert 200 <= result.duration_ms <= whole
