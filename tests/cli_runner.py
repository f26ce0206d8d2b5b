"""Run `waypoint` as a person or script does: a process of its own, over the store of the test run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import IO, Any

from terminal_screen import CLI, SOURCE

__all__ = ["Cli", "Said"]


class Said:
    """What one run printed, and how it ended."""

    def __init__(self, code: int, stdout: bytes, stderr: bytes) -> None:
        self.code = code
        self.raw = stdout
        self.raw_errors = stderr

    @property
    def out(self) -> str:
        return self.raw.decode()

    @property
    def err(self) -> str:
        return self.raw_errors.decode()

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        assert self.raw.endswith(b"\n") and self.raw.count(b"\n") == 1, self.raw
        return json.loads(self.raw)

    @property
    def error(self) -> Any:
        """The error that stderr tells as JSON; nothing else may be printed then."""
        assert self.raw == b""
        document = json.loads(self.raw_errors)
        assert set(document) == {"error"}
        assert set(document["error"]) == {"code", "message", "details"}
        return document["error"]


class Cli:
    def __init__(self, home: Path, **environment: str) -> None:
        self._env = {**os.environ, "PYTHONPATH": str(SOURCE), "WAYPOINT_HOME": str(home), **environment}

    def with_env(self, **environment: str) -> Cli:
        other = Cli(Path(self._env["WAYPOINT_HOME"]))
        other._env = {**self._env, **environment}
        return other

    def start(self, *words: str | bytes, **options: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*CLI, *words], env=self._env, **{**pipes, **options})

    def __call__(
        self, *words: str | bytes, stdin: bytes | IO[bytes] | None = None, timeout: float = 60, cwd: Path | None = None
    ) -> Said:
        """To its end, whatever that is."""
        given = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin or subprocess.DEVNULL}
        done = subprocess.run([*CLI, *words], env=self._env, capture_output=True, timeout=timeout, cwd=cwd, **given)
        return Said(done.returncode, done.stdout, done.stderr)

    def ok(self, *words: str | bytes, **options: Any) -> Said:
        """It must end in 0."""
        said = self(*words, **options)
        assert said.code == 0, f"{words}: {said.code}: {said.err}"
        return said
