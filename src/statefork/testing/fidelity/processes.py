"""Processes: the tree, its signals, its memory, and everything between two processes."""

from __future__ import annotations

from statefork.testing.fidelity.case import Case, ShellCase
from statefork.testing.fidelity.guest import memory, pipes, signals, threads, tree
from statefork.testing.fidelity.programs_inside import probe_cases
from statefork.testing.fidelity.subject import Options

__all__ = ["CASES"]

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
    use="! python3 -c 'bytearray(400 << 20)' 2>/dev/null; ! (for i in {1..100}; do sleep 2 & done) 2>/dev/null",
)

CASES: tuple[Case, ...] = (
    *probe_cases("processes", tree),
    *probe_cases("processes", signals),
    *probe_cases("processes", pipes),
    *probe_cases("processes", memory),
    *probe_cases("processes", threads),
    _LIMITS,
)
