"""Namespaces of their own for process trees that share the host's files: what the `criu` backend lives in.

A pod has its own pids, mounts, network (loopback only), ipc and host name. CRIU runs *inside* it, in all of its
namespaces, so that it finds only processes to store and no namespaces; to bring a tree back a fresh pod is made first.
That is also what lets a copy have the same pids and ports as the original while that still runs.

One directory of the place is mounted over one fixed path, `here`, which therefore is another one in each pod: the FIFOs
of the shell and the command's log lie there, and what else the tree wants to have for itself (STATEFORK_DIR). It is
stored with the tree. All other files are the host's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from statefork.errors import HostUnsupported, KernelError
from waypoint.kernel.programs import Finished, run_program

__all__ = ["Pod", "as_root_of_a_tree", "kill_noted_pod", "make_pod"]

_START_TIMEOUT = 30.0
_CALL_TIMEOUT = 300.0

# PID 1 of a pod. The first thing that it does, before it starts any other, is to say where pids go on.
_INIT = r"""
echo "$3" >/proc/sys/kernel/ns_last_pid && mount --bind "$1" "$2" && ip link set lo up && : >"$4" || exit
trap "exit 0" TERM
while :; do sleep 86400 & wait "$!"; done
"""

_ROOT = """
import ctypes, os, sys
pid = os.fork()
if pid:
    print(pid)
    sys.exit()
os.setsid()
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: it outlives the execve
os.dup2(0, 1)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def as_root_of_a_tree(argv: Sequence[str]) -> list[str]:
    """Start a process that leads its own session, adopts what its children leave behind, and has nothing open that
    belongs to the outside (CRIU could not find it again). Prints its pid, and returns at once."""
    return ["sh", "-c", 'exec </dev/null 2>/dev/null; exec "$@"', "sh", sys.executable, "-I", "-S", "-c", _ROOT, *argv]


class Pod:
    """A running pod, known by the host's pid of its PID 1."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def argv(self, *argv: str) -> list[str]:
        """A command line for the host that runs a program in here."""
        return ["nsenter", "-t", str(self.pid), "-a", "--", *argv]

    def call(self, *argv: str) -> Finished:
        return run_program(self.argv(*argv), timeout=_CALL_TIMEOUT)

    def alive(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rsplit(") ", 1)[1][0]
        except OSError:
            return False
        return state not in "ZX"

    def kill(self) -> None:
        """Its PID 1, and so everything in it; returns when the kernel has ended them all."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _START_TIMEOUT
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.002)


def make_pod(directory: Path, here: Path, note: Path, *, last_pid: int) -> Pod:
    """`directory` appears at `here` inside, processes get pids after `last_pid`; the pod's own pid is written to
    `note`, for a clean-up after a crash."""
    here.mkdir(parents=True, exist_ok=True)
    spaces = ["--pid", "--fork", "--mount", "--propagation", "private", "--mount-proc", "--net", "--ipc", "--uts"]
    up, log = note.with_name("pod.up"), note.with_name("pod.log")
    script = ["sh", "-c", _INIT, "sh", str(directory), str(here), str(last_pid), str(up)]
    try:
        with open(log, "wb") as errors:
            outer = subprocess.Popen(
                ["unshare", *spaces, "--", *script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                start_new_session=True,
            )
    except FileNotFoundError as error:
        fix = "apt-get install util-linux"
        raise HostUnsupported(f"unshare is not installed: {fix}", fix=fix) from error
    deadline = time.monotonic() + _START_TIMEOUT
    while not up.exists():
        if outer.poll() is not None or time.monotonic() > deadline:
            outer.kill()
            outer.wait()
            said = log.read_text(errors="replace").strip()
            raise KernelError(f"namespaces could not be made: {said or 'no answer'}; root is needed, and iproute2")
        time.sleep(0.002)
    pid = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
    note.write_text(f"{pid} {_born(pid)}\n")
    # `unshare` waits for its child and ends with it; somebody has to wait for `unshare`.
    threading.Thread(target=outer.wait, name="statefork-pod", daemon=True).start()
    return Pod(pid)


def kill_noted_pod(note: Path) -> bool:
    """True if the pod was still there. A pid may belong to somebody else by now: its birth tells."""
    pid, born = (int(word) for word in note.read_text().split())
    if _born(pid) != born:
        return False
    Pod(pid).kill()
    return True


def _born(pid: int) -> int:
    """When it began, in ticks since boot; -1 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[19])
    except OSError:
        return -1
