"""What CRIU forgets about a process without a word: CPU affinity, I/O priority, timer slack, coredump filter.

All four can be read and set from outside, by pid. Only what differs from a fresh process is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

from waypoint.kernel.processes import namespace_pids

__all__ = ["read_forgotten", "write_forgotten"]

_libc = ctypes.CDLL(None, use_errno=True)
_IOPRIO_SET, _IOPRIO_GET = (251, 252) if os.uname().machine == "x86_64" else (30, 31)
_WHO_PROCESS = 1
_DEFAULT_SLACK_NS = 50_000
_GONE = (FileNotFoundError, ProcessLookupError)


def read_forgotten(init_pid: int) -> list[dict[str, Any]]:
    """One entry for each thread (and process) that differs from init, which has what a fresh process has."""
    usual = _of_thread(init_pid, init_pid) | {"coredump_filter": _coredump_filter(init_pid)}
    usual["timer_slack_ns"] = _DEFAULT_SLACK_NS
    found = []
    for pid in namespace_pids(init_pid):
        with contextlib.suppress(*_GONE):
            core = _coredump_filter(pid)
            for tid in _threads(pid):
                with contextlib.suppress(*_GONE):
                    mine = _of_thread(pid, tid)
                    if tid == pid and core:
                        mine["coredump_filter"] = core
                    differs = {key: value for key, value in mine.items() if value != usual[key]}
                    if differs:
                        found.append({"tid": _inside(pid, tid), **differs})
    return found


def write_forgotten(init_pid: int, saved: list[dict[str, Any]]) -> list[str]:
    """Give the threads of a restored tree back what they had; says what could not be given."""
    if not saved:
        return []
    threads = {}
    for pid in namespace_pids(init_pid):
        with contextlib.suppress(*_GONE):
            for tid in _threads(pid):
                with contextlib.suppress(*_GONE):
                    threads[_inside(pid, tid)] = (pid, tid)
    problems = []
    for entry in saved:
        if entry["tid"] not in threads:
            continue  # it has ended in the meantime: the tree runs
        for key in entry.keys() - {"tid"}:
            try:
                _write(*threads[entry["tid"]], key, entry[key])
            except _GONE:
                continue
            except OSError as error:
                problems.append(f"{key.replace('_', ' ')} of thread {entry['tid']}: {error.strerror}")
    return problems


def _threads(pid: int) -> list[int]:
    return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))


def _inside(pid: int, tid: int) -> int:
    with open(f"/proc/{pid}/task/{tid}/status") as lines:
        return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid"))


def _of_thread(pid: int, tid: int) -> dict[str, Any]:
    found: dict[str, Any] = {"affinity": sorted(os.sched_getaffinity(tid))}
    priority = int(_libc.syscall(_IOPRIO_GET, _WHO_PROCESS, tid))
    found["io_priority"] = max(priority, 0)
    try:
        with open(f"/proc/{tid}/timerslack_ns") as slack:
            found["timer_slack_ns"] = int(slack.read())
    except PermissionError:  # without CAP_SYS_NICE it cannot be read, and not be set either
        found["timer_slack_ns"] = _DEFAULT_SLACK_NS
    return found


def _coredump_filter(pid: int) -> str:
    with open(f"/proc/{pid}/coredump_filter") as text:
        return text.read().strip()


def _write(pid: int, tid: int, key: str, value: Any) -> None:
    if key == "affinity":
        os.sched_setaffinity(tid, value)
    elif key == "io_priority":
        if _libc.syscall(_IOPRIO_SET, _WHO_PROCESS, tid, value):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    elif key == "timer_slack_ns":
        with open(f"/proc/{tid}/timerslack_ns", "w") as slack:
            slack.write(str(value))
    elif key == "coredump_filter":
        with open(f"/proc/{pid}/coredump_filter", "w") as text:
            text.write(f"0x{value}")
