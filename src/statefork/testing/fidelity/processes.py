"""Processes: the tree, its signals, its memory, and everything between two processes."""

from __future__ import annotations

from statefork.testing.fidelity.case import Case, ShellCase
from statefork.testing.fidelity.guest import memory, pipes, signals, threads, tree
from statefork.testing.fidelity.programs_inside import probe_cases
from statefork.testing.fidelity.subject import Options

__all__ = ["CASES"]

# Not by the shell: it waits and tries again, and on a slow machine it would get there.
_MANY = """
import os, signal, time
os.setpgrp()
failed = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)
except OSError:
    failed = 1
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.killpg(0, signal.SIGTERM)
os._exit(failed)
"""

_LIMITS = ShellCase(
    "cgroup-limits",
    "limits on memory and on the number of processes still bite",
    kind="processes",
    needs=frozenset({"processes", "memory"}),
    programs=("python3",),
    packages=("python3",),
    options=Options(memory_bytes=256 << 20, pids=64),
    make="sleep 1000 & echo here >/tmp/limits",
    same="cat /tmp/limits; jobs -pr",
    spoil="echo gone >/tmp/limits; kill %1",
    use=f"! python3 -c 'bytearray(400 << 20)' 2>/dev/null && ! python3 -c '{_MANY}'",
)

CASES: tuple[Case, ...] = (
    *probe_cases("processes", tree),
    *probe_cases("processes", signals),
    *probe_cases("processes", pipes),
    *probe_cases("processes", memory),
    *probe_cases("processes", threads),
    _LIMITS,
)
