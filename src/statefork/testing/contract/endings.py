"""Commands that do not just end: timeouts, and commands that take the shell with them."""

from __future__ import annotations

import pytest

from statefork.environment import Environment
from statefork.errors import ExecTimeout
from statefork.model import ExecResult
from statefork.testing.contract.subject import Contract, Subject, eventually

__all__ = ["EndingContract"]

ENDLESS = {
    "a loop in the shell itself": "while :; do :; done",
    "a program": "sleep 600; echo never",
    "a loop over programs": "while :; do sleep 1; done",
    "a pipeline": "sleep 600 | cat",
    "a function": "forever() { while :; do sleep 1; done; }; forever",
    "a subshell that ignores SIGINT": "(trap '' INT; sleep 600)",
    "a substitution": "x=$(sleep 600); echo never",
    "endless output": "while :; do echo spam; done",
}


TIMEOUTS = (0.3, 1.5, 6.0, 20.0)
"""A busy machine may not come to a command's first line in time: then once more, with more of it."""


def timed_out(environment: Environment, command: str) -> ExecResult:
    """What is known of a command that was ended by its timeout after it had said `begun`."""
    for timeout in TIMEOUTS:
        with pytest.raises(ExecTimeout) as caught:
            environment.exec_command(f"echo begun; {command}", timeout=timeout)
        if caught.value.result.stdout:
            break
    return caught.value.result


class EndingContract(Contract):
    @pytest.mark.parametrize("command", ENDLESS.values(), ids=ENDLESS.keys())
    def test_timeout_ends_the_command_and_keeps_the_shell(self, shared: Environment, command: str) -> None:
        shared.exec_command("keep='me'; cd /tmp")
        partial = timed_out(shared, command)
        assert partial.timed_out
        assert partial.exit_code == 124
        assert partial.stdout.startswith("begun\n")
        assert "never" not in partial.stdout
        after = shared.exec_command('echo "$keep"')
        assert (after.stdout, after.cwd, after.shell_restarted) == ("me\n", "/tmp", False)

    def test_timeout_ends_what_the_command_started(self, shared: Environment, subject: Subject) -> None:
        pid_file = f"{subject.scratch}/pid"
        shared.run(["rm", "-f", pid_file])
        script = f'trap "" INT TERM; echo $$ >{pid_file}; while :; do sleep 1; done'
        for timeout in TIMEOUTS:
            with pytest.raises(ExecTimeout):
                shared.exec_command(f"sh -c '{script}'", timeout=timeout)
            if shared.run(["test", "-s", pid_file]).ok:
                break
        pid = shared.read_file(pid_file).decode().strip()
        eventually("it is gone", lambda: shared.run(["sh", "-c", f"kill -0 {pid} 2>/dev/null"]).exit_code != 0)

    def test_timeout_spares_earlier_jobs(self, shared: Environment) -> None:
        shared.exec_command("sleep 600 & spared=$!")
        timed_out(shared, "(trap '' INT; sleep 600)")
        assert shared.exec_command("kill -0 $spared && echo spared").stdout == "spared\n"
        shared.exec_command("kill $spared; wait $spared")

    def test_a_syntax_error(self, shared: Environment) -> None:
        shared.exec_command("kept=1")
        result = shared.exec_command("if true; then")
        assert result.exit_code != 0
        assert result.stderr
        assert shared.exec_command("echo $kept").stdout == "1\n"

    def test_an_unset_variable_under_set_u(self, shared: Environment) -> None:
        shared.exec_command("kept=2")
        result = shared.exec_command("set -u; echo $surely_unset; echo never")
        assert result.exit_code != 0
        assert "never" not in result.stdout
        assert shared.exec_command("set +u; echo $kept").stdout == "2\n"

    @pytest.mark.parametrize(
        ("command", "code"),
        [("exit 3", 3), ("set -e; false; echo never", 1), ("exec sh -c 'exit 5'", 5), ("kill -9 $$", 137)],
        ids=["exit", "set -e", "exec", "kill -9"],
    )
    def test_a_command_that_ends_the_shell(self, shared: Environment, command: str, code: int) -> None:
        shared.exec_command("gone=yes")
        result = shared.exec_command(f"echo said; {command}")
        assert result.exit_code == code
        assert result.stdout == "said\n"
        assert result.shell_restarted
        after = shared.exec_command('echo "gone=$gone"')
        assert after.stdout == "gone=\n"
        assert not shared.exec_command("true").shell_restarted

    def test_the_shell_ends_while_a_job_keeps_its_output_open(self, shared: Environment) -> None:
        result = shared.exec_command("sleep 600 & exit 4")
        assert (result.exit_code, result.shell_restarted) == (4, True)
        assert shared.exec_command("echo back").stdout == "back\n"
