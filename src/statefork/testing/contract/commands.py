"""`exec_command`: one shell, evaluated in place, byte for byte."""

from __future__ import annotations

import threading

import pytest

from statefork.environment import Environment
from statefork.errors import Busy, UsageError
from statefork.testing.contract.subject import Contract, Subject, eventually

__all__ = ["CommandContract"]

MEBIBYTE = 1 << 20


class CommandContract(Contract):
    def test_state_stays_in_the_shell(self, shared: Environment) -> None:
        shared.exec_command('cd /; MODE=debug; export PUBLIC=yes; greet() { echo "hello $1"; }; cd /tmp')
        result = shared.exec_command('echo "$MODE $PUBLIC"; greet you; pwd; sh -c "echo \\$MODE-\\$PUBLIC"')
        assert result.stdout == "debug yes\nhello you\n/tmp\n-yes\n"
        assert (result.exit_code, result.cwd) == (0, "/tmp")

    def test_exit_code_and_last_status(self, shared: Environment) -> None:
        assert shared.exec_command("(exit 7)").exit_code == 7
        assert shared.exec_command("echo $?").stdout == "7\n"
        assert shared.exec_command("true").ok

    def test_streams_are_apart_and_together(self, shared: Environment) -> None:
        result = shared.exec_command("echo one; echo two >&2; printf three")
        assert (result.stdout, result.stderr) == ("one\nthree", "two\n")
        assert sorted(result.output_bytes) == sorted(b"one\ntwo\nthree")

    def test_every_byte_arrives(self, shared: Environment) -> None:
        every = bytes(code for code in range(1, 256) if code != ord("'"))
        result = shared.exec_command(b"printf %s '" + every + b"'")
        assert result.stdout_bytes == every

    def test_output_may_hold_nul_and_look_like_a_protocol(self, shared: Environment) -> None:
        result = shared.exec_command(r"printf 'a\0b\0%s:0 /\0\0c' 0123456789abcdef0123456789abcdef")
        assert result.stdout_bytes == b"a\0b\0000123456789abcdef0123456789abcdef:0 /\0\0c"

    def test_several_lines_quotes_and_here_documents(self, shared: Environment) -> None:
        command = "cat <<'END'\nit's $HOME \\ \"quoted\"\n\n  END\nEND\nif true\nthen\n  echo done # not ' closed\nfi"
        assert shared.exec_command(command).stdout == 'it\'s $HOME \\ "quoted"\n\n  END\ndone\n'

    def test_newlines_at_the_end_of_a_command_stay(self, shared: Environment) -> None:
        assert shared.exec_command("printf '%s' 'a\n\n'\n\n").stdout == "a\n\n"

    def test_a_nul_in_the_command_is_refused(self, shared: Environment) -> None:
        with pytest.raises(UsageError):
            shared.exec_command("echo a\0b")

    def test_a_long_command(self, shared: Environment) -> None:
        text = "0123456789abcdef" * (MEBIBYTE // 16)
        result = shared.exec_command(f"LONG='{text}'; echo ${{#LONG}}; unset LONG")
        assert result.stdout == f"{MEBIBYTE}\n"

    def test_stdin(self, shared: Environment) -> None:
        data = bytes(range(256)) * 40
        assert shared.exec_command("cat", stdin=data).stdout_bytes == data
        assert shared.exec_command("read -r a; read -r b; echo $b-$a", stdin="x\ny\n").stdout == "y-x\n"
        assert shared.exec_command("cat").stdout == ""

    def test_a_background_job_does_not_hold_the_result(self, shared: Environment) -> None:
        first = shared.exec_command("sleep 600 & job=$!; echo started")
        assert first.stdout == "started\n"
        assert shared.exec_command("kill -0 $job && echo alive").stdout == "alive\n"
        shared.exec_command("kill $job; wait $job")

    def test_a_background_job_may_print_when_nobody_listens(self, shared: Environment, subject: Subject) -> None:
        """It would block, once the pipe is full, if its output were not read between commands."""
        mark = f"{subject.scratch}/printed"
        shared.exec_command(f"rm -f {mark}; (head -c 1000000 /dev/zero; echo over >{mark}) &")
        eventually("the job has printed", lambda: shared.run(["test", "-s", mark]).exit_code == 0)
        assert shared.exec_command("echo clean").stdout_bytes.endswith(b"clean\n")

    def test_more_output_than_is_kept(self, shared: Environment) -> None:
        size = 48 * MEBIBYTE
        result = shared.exec_command(f"echo first; head -c {size} /dev/zero; echo last")
        assert result.truncated
        assert result.stdout_bytes.startswith(b"first\n")
        assert result.stdout_bytes.endswith(b"\0last\n")
        assert b"bytes left out" in result.stdout_bytes
        assert len(result.stdout_bytes) < size // 2

    def test_streaming_is_live(self, shared: Environment, subject: Subject) -> None:
        """The command waits for a file that is made only after its first line has been seen."""
        path = f"{subject.scratch}/seen"
        shared.run(["rm", "-f", path])
        stream = shared.stream_command(f"echo first; while ! [ -e {path} ]; do sleep 0.05; done; echo second >&2")
        seen: list[tuple[str, bytes]] = []
        for name, data in stream:
            if not seen:
                shared.run(["touch", path])
            seen.append((name, data))
        assert seen == [("stdout", b"first\n"), ("stderr", b"second\n")]
        assert stream.result.exit_code == 0

    def test_a_callback_that_raises_is_heard(self, shared: Environment) -> None:
        def fail(_stream: str, _data: bytes) -> None:
            raise ValueError("not mine")

        with pytest.raises(ValueError, match="not mine"):
            shared.exec_command("echo one; echo two", on_output=fail)
        assert shared.exec_command("echo still here").stdout == "still here\n"

    def test_commands_take_turns_or_say_busy(self, shared: Environment, subject: Subject) -> None:
        gate, begun = f"{subject.scratch}/gate", threading.Event()
        shared.run(["rm", "-f", gate])
        results: list[str] = []

        def hold() -> None:
            command = f"turn=1; echo begun; while ! [ -e {gate} ]; do sleep 0.05; done; echo $turn"
            results.append(shared.exec_command(command, on_output=lambda *_: begun.set()).stdout)

        holder = threading.Thread(target=hold)
        holder.start()
        assert begun.wait(30)
        with pytest.raises(Busy):
            shared.exec_command("true", wait=False)
        waiter = threading.Thread(target=lambda: results.append(shared.exec_command("turn=2; echo $turn").stdout))
        waiter.start()
        shared.run(["touch", gate])
        for thread in (holder, waiter):
            thread.join(30)
        assert results == ["begun\n1\n", "2\n"]

    def test_a_wrong_timeout_is_refused(self, shared: Environment) -> None:
        for timeout in (0, -1.5):
            with pytest.raises(UsageError):
                shared.exec_command("true", timeout=timeout)
