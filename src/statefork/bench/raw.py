"""The plain `criu` command line on an equal tree: bash, a job, and the process with memory, in no namespace of its own.

What an engine adds to it (files, terminal, first command, bookkeeping) or takes off it shows beside it. It is given what it
needs to be fast: its knowledge of the kernel is cached, no network namespace is dumped, nothing is logged.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from statefork.errors import WaypointError
from waypoint.kernel.criu import cached_kernel_options
from waypoint.kernel.processes import namespace_pids
from waypoint.kernel.tools import criu_argv, current_criu

__all__ = ["RawTree"]

_ROOM = 'mount -t tmpfs tmpfs /run && cp -- "$1" /run/criu.kdat; echo; exec cat >/dev/null'
_libc = ctypes.CDLL(None, use_errno=True)
_HOLD = "b = bytearray(__import__('os').urandom(1 << 20)) * %d; __import__('time').sleep(10**6)"


class RawTree:
    """One tree; each `dump` leaves it running, each `restore` brings it back after it was ended."""

    def __init__(self, directory: Path, memory_mib: int) -> None:
        self._directory = directory / "raw"
        self._dumps = 0
        self._memory_mib = memory_mib
        self._pid = 0
        self._room = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", _ROOM, "sh", *cached_kernel_options(current_criu())[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._room.stdout is not None
        self._room.stdout.read(1)
        self._namespace = os.open(f"/proc/{self._room.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def _enter(self) -> None:
        """In a child, before it becomes another program: CRIU and the tree share one mount namespace, with a `/run` of its own."""
        if _libc.setns(self._namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")

    def __enter__(self) -> RawTree:
        holder = f'python3 -c "{_HOLD % self._memory_mib}" & ' if self._memory_mib else ""
        script = f"sleep 1000000 & {holder}wait"
        null = subprocess.DEVNULL
        self._starter = subprocess.Popen(
            ["bash", "-c", f"exec </dev/null >/dev/null 2>&1; {script}"],
            stdin=null, stdout=null, stderr=null, cwd="/", start_new_session=True, preexec_fn=self._enter,
        )  # fmt: skip
        self._pid = self._starter.pid
        wanted = 3 if self._memory_mib else 2
        deadline = time.monotonic() + 60
        while len(namespace_pids(self._pid)) < wanted or not self._filled():
            if time.monotonic() > deadline:
                self.__exit__()
                raise WaypointError("the tree for the plain criu command line does not come up")
            time.sleep(0.05)
        return self

    def _filled(self) -> bool:
        return max(_resident(pid) for pid in namespace_pids(self._pid)) >= self._memory_mib << 20

    def __exit__(self, *_: object) -> None:
        self._end()
        os.close(self._namespace)
        self._room.communicate()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _images(self) -> Path:
        return self._directory / str(self._dumps)

    def _end(self) -> None:
        """All of the tree is gone, so that its numbers are free for the one that is restored."""
        tree = namespace_pids(self._pid)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._starter.poll()
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in tree) and time.monotonic() < deadline:
            self._starter.poll()
            time.sleep(0.002)

    def dump(self) -> float:
        """Milliseconds of the command alone. All images are kept, as the others' are: what is deleted leaves warm memory to write to."""
        self._dumps += 1
        self._images.mkdir(parents=True)
        return self._criu("dump", "-t", str(self._pid), "--leave-running", "--manage-cgroups=ignore")

    def restore(self) -> float:
        """Milliseconds of the command alone; the old tree is ended before."""
        self._end()
        took = self._criu("restore", "-d", "--pidfile", "pid", "--manage-cgroups=ignore")
        self._pid = int((self._images / "pid").read_text())
        (self._images / "pid").unlink()
        return took

    def copier(self) -> Callable[[], None]:
        """Copies as much memory as the tree's process holds into a file beside the images: what no dump can be faster than."""
        memory = memoryview(bytearray(os.urandom(1 << 20)) * self._memory_mib)

        def copy() -> None:
            with (self._images / "written").open("wb", buffering=0) as file:
                for begin in range(0, len(memory), 1 << 20):
                    file.write(memory[begin : begin + (1 << 20)])

        return copy

    def _criu(self, verb: str, *arguments: str) -> float:
        began = time.perf_counter()
        argv = [*criu_argv(), verb, "-D", str(self._images), "-v1", "-o", "log", *arguments]
        null = subprocess.DEVNULL
        done = subprocess.run(argv, stdin=null, stdout=null, stderr=null, check=False, preexec_fn=self._enter)
        if done.returncode != 0:
            raise WaypointError(f"criu {verb} failed: {(self._images / 'log').read_text(errors='replace')[-500:]}")
        return (time.perf_counter() - began) * 1000


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0
