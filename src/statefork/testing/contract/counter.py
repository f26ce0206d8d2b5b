"""A process that counts in its memory, for tests of what comes back. Needs only `sh` and `mkfifo`."""

from __future__ import annotations

import secrets

from statefork.environment import Environment

__all__ = ["Counter"]


class Counter:
    """Runs as a job of the persistent shell. Its number is nowhere but in its memory."""

    def __init__(self, environment: Environment, scratch: str) -> None:
        # Where forks share the host's files, STATEFORK_DIR is a directory that each of them has for itself.
        self._directory = f'"${{STATEFORK_DIR:-{scratch}}}/counter-{secrets.token_hex(4)}"'
        environment.exec_command(
            f"mkdir -p {self._directory} && mkfifo {self._directory}/ask {self._directory}/answer || exit\n"
            f"(n=0; exec 6<>{self._directory}/ask 7<>{self._directory}/answer </dev/null >/dev/null 2>&1\n"
            ' while read -r _ <&6; do n=$((n+1)); echo "$n" >&7; done) &\n'
            "counter=$!"
        )

    def count(self, environment: Environment) -> int:
        """One more, as the process in that environment counts."""
        script = f"echo more >{self._directory}/ask; read -r n <{self._directory}/answer; echo $n"
        return int(environment.run(["sh", "-c", script], timeout=20).stdout)

    def alive(self, environment: Environment) -> bool:
        """By its two ends: a FIFO that no process has open cannot be opened for writing without waiting."""
        script = f"[ -p {self._directory}/ask ] && timeout 1 sh -c 'echo more >{self._directory}/ask'"
        return environment.run(["sh", "-c", script], timeout=30).exit_code == 0
