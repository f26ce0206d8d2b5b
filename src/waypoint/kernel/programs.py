"""Start a helper program, with one deadline, and give back everything it said.

Programs that live on (a session's init, CRIU's worker) are not started here.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError

__all__ = ["Finished", "run_program"]

_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that ended by itself; a non-zero exit is a result here, the caller judges it."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace").strip()

    def tail(self) -> str:
        """The last lines it printed, stderr after stdout: where programs put the reason."""
        lines = (self.stdout + b"\n" + self.stderr).decode(errors="replace").split("\n")
        return "\n".join([line for line in lines if line.strip()][-_TAIL_LINES:])

    def check(self, what: str) -> Finished:
        """Raise KernelError, quoting the program's own words, unless it ended in 0."""
        if self.exit_code == 0:
            return self
        raise KernelError(
            f"{what}: `{shlex.join(self.argv)}` ended in {self.exit_code}:\n{self.tail()}",
            argv=list(self.argv),
            exit_code=self.exit_code,
        )


def run_program(
    argv: Sequence[str],
    *,
    timeout: float,
    stdin: bytes = b"",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    own_session: bool = True,
) -> Finished:
    """Run to the end. Past `timeout` the whole process group is killed and KernelError says what it had printed.

    `own_session=False` keeps the child on the caller's terminal, so that Ctrl-C reaches it (apt-get, pip).
    """
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=env,
            start_new_session=own_session,
        )
    except FileNotFoundError as error:
        raise HostUnsupported(f"{argv[0]} is not installed", program=argv[0]) from error
    except PermissionError as error:
        raise HostUnsupported(f"{argv[0]} may not be executed: {error.strerror}", program=argv[0]) from error
    try:
        stdout, stderr = child.communicate(stdin, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        _kill(child, own_session)
        stdout, stderr = child.communicate()
        said = Finished(tuple(argv), -signal.SIGKILL, stdout, stderr).tail()
        raise KernelError(f"`{shlex.join(argv)}` did not end within {timeout:g} s; it had said:\n{said}") from error
    except BaseException:
        _kill(child, own_session)
        child.wait()
        raise
    return Finished(tuple(argv), child.returncode, stdout, stderr)


def _kill(child: subprocess.Popen[bytes], own_session: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if own_session:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
