"""A real terminal for tests: tmux draws what a program writes, types what a test says, and tells what is on the screen."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["CLI", "SOURCE", "Screen"]

CLI = [sys.executable, "-m", "waypoint.cli.main"]
SOURCE = Path(__file__).resolve().parent.parent / "src"


class Screen:
    """One terminal with one program in it. The program's exit code is shown when it has ended."""

    def __init__(self, argv: list[str], *, rows: int = 30, columns: int = 100, **environment: str) -> None:
        self._socket = f"waypoint-test-{secrets.token_hex(4)}"
        env = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
        env.pop("TMUX", None)
        script = f"trap : INT; {shlex.join(argv)}; echo ended with $?; read -r _"
        command = ["-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(rows), "sh", "-c", script]
        subprocess.run(["tmux", "-L", self._socket, *command], check=True, env=env, timeout=30)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["tmux", "-L", self._socket, "kill-server"], capture_output=True, timeout=30)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-L", self._socket, *words], check=True, capture_output=True, text=True, timeout=30)
        return done.stdout

    def type(self, text: str) -> None:
        """Literally, byte for byte."""
        self._tmux("send-keys", "-l", "--", text)

    def press(self, *keys: str) -> None:
        """By tmux's names: Enter, C-c, Escape, Up."""
        self._tmux("send-keys", *keys)

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    @property
    def text(self) -> str:
        """What is on the screen now."""
        return self._tmux("capture-pane", "-p").rstrip("\n")

    @property
    def coloured(self) -> str:
        return self._tmux("capture-pane", "-p", "-e").rstrip("\n")

    def fact(self, name: str) -> str:
        """A tmux format, such as cursor_x, alternate_on, keypad_cursor_flag."""
        return self._tmux("display-message", "-p", f"#{{{name}}}").strip()

    def wait_for(self, wanted: str | Callable[[str], object], timeout: float = 20) -> str:
        """The screen once it holds the text, or once the judge is content; AssertionError past the deadline."""
        deadline = time.monotonic() + timeout
        while True:
            shown = self.text
            if wanted in shown if isinstance(wanted, str) else wanted(shown):
                return shown
            assert time.monotonic() < deadline, f"{wanted!r} did not come; the screen was:\n{shown}"
            time.sleep(0.02)

    def settled(self, timeout: float = 20) -> str:
        """The screen once it has not changed for a while: what a program draws last has no mark of its own."""
        deadline = time.monotonic() + timeout
        before, since = "", time.monotonic()
        while True:
            shown = f"{self.text}\n{self.fact('cursor_x')},{self.fact('cursor_y')}"
            now = time.monotonic()
            if shown != before:
                before, since = shown, now
            elif now - since > 0.4:
                return shown
            assert now < deadline, f"the screen does not come to rest:\n{shown}"
            time.sleep(0.02)
