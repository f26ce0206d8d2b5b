"""The program around a probe: it makes the probe's state, then answers questions about it through two FIFOs.

    python3 -m guest.probe MODULE CLASS DIRECTORY

A line in DIRECTORY/ask names a method; DIRECTORY/answer gives `+` and its result or `-` and the traceback.
FIFOs, because they need no network, no terminal and no signal: those may be what is being judged.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable


class Probe:
    """`__init__` makes the state. Nothing of a run may be kept outside of the process and the directory."""

    needs: tuple[str, ...] = ("processes", "memory")
    programs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    directory: str

    def observe(self) -> object:
        """The state in words; equal after a restore."""
        raise NotImplementedError

    def perturb(self) -> None:
        raise NotImplementedError

    def works(self) -> None:
        """Use the state; AssertionError when it does not work any more."""


_PATIENCE = float(os.environ.get("FIDELITY_PATIENCE", "1"))


def wait_until(true: Callable[[], object], what: str, seconds: float = 20) -> None:
    seconds *= _PATIENCE
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s in vain: {what}")
        time.sleep(0.005)


def state_of(pid: int, seconds: float = 20) -> str:
    """The letter of its state, as soon as it does not run: on a busy machine a process may take a while to come to rest."""
    deadline = time.monotonic() + seconds * _PATIENCE
    while True:
        with open(f"/proc/{pid}/stat") as stat:
            letter = stat.read().rpartition(") ")[2].split()[0]
        if letter not in ("R", "D") or time.monotonic() > deadline:
            return letter
        time.sleep(0.002)


def main() -> None:
    module, name, directory = sys.argv[1:4]
    ask = os.open(f"{directory}/ask", os.O_RDWR)
    kind: type[Probe] = getattr(importlib.import_module(f"guest.{module}"), name)
    kind.directory = directory
    try:
        probe, broken = kind(), ""
    except Exception:  # noqa: BLE001  nobody would ever answer the first question
        probe, broken = None, traceback.format_exc(limit=4)
    while True:
        word = b""
        while not word.endswith(b"\n"):
            word += os.read(ask, 1)
        try:
            answer = f"-{broken}" if broken else f"+{getattr(probe, word.decode().strip())()}"
        except Exception:  # noqa: BLE001  the suite quotes it
            answer = f"-{traceback.format_exc(limit=4)}"
        with open(f"{directory}/answer", "w") as out:
            out.write(answer)


if __name__ == "__main__":
    main()
