"""The plain `criu` command line: on an equal tree (bash, a job, and the process with memory, in no namespace of its own), and on a
session's own tree, with its namespaces, mounts and terminal.

What an engine adds to it (files, first command, bookkeeping) or takes off it shows beside it. It is given what it needs to be fast:
its knowledge of the kernel is cached, no network namespace is dumped, nothing is logged.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from statefork.errors import WaypointError
from waypoint.bases import base_from_rootfs
from waypoint.bringup import overlay_for
from waypoint.engine import Engine
from waypoint.kernel.criu import cached_kernel_options
from waypoint.kernel.launch import STAGE, launch_argv
from waypoint.kernel.processes import identify, kill, namespace_pids, wait_gone
from waypoint.kernel.tools import criu_argv, current_criu

__all__ = ["RawTree", "SameTree"]

_libc = ctypes.CDLL(None, use_errno=True)
_HOLD = "b = bytearray(__import__('os').urandom(1 << 20)) * %d; __import__('time').sleep(10**6)"
_LIKE_THE_ENGINE = (
    "--tcp-established", "--file-locks", "--link-remap", "--empty-ns", "net", "--network-lock", "skip",
)  # fmt: skip


class _Room:
    """A mount namespace for CRIU, with a `/run` of its own that has its knowledge of the kernel, and a root where one is wanted."""

    def __init__(self, root: Sequence[str] = ()) -> None:
        """`root`: an overlay's options."""
        options = [*cached_kernel_options(current_criu()), *root]
        self._keeper = subprocess.Popen(
            launch_argv("criu", options, (), ["/bin/sh", "-c", "echo; exec cat >/dev/null"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        self._keeper.stdout.read(1)
        self._namespaces = [
            os.open(f"/proc/{self._keeper.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("mnt", "cgroup")
        ]

    def enter(self) -> None:
        """In a child, before it becomes another program."""
        for namespace in self._namespaces:
            if _libc.setns(namespace, 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.chdir("/")

    def close(self) -> None:
        for namespace in self._namespaces:
            os.close(namespace)
        self._keeper.communicate()

    def criu(self, images: Path, verb: str, *arguments: str) -> float:
        """Milliseconds of the command alone."""
        argv = [*criu_argv(), verb, "-D", str(images), "-v1", "-o", "log", "--manage-cgroups=ignore", *arguments]
        null = subprocess.DEVNULL
        began = time.perf_counter()
        done = subprocess.run(argv, stdin=null, stdout=null, stderr=null, check=False, preexec_fn=self.enter)
        if done.returncode != 0:
            raise WaypointError(f"criu {verb} failed: {(images / 'log').read_text(errors='replace')[-500:]}")
        return (time.perf_counter() - began) * 1000


class SameTree:
    """The tree of a session: each `dump` leaves it running, each `restore` brings up another one beside it, which is ended."""

    def __init__(self, home: Path, rootfs: Path, setup: str) -> None:
        self._directory = home / "same"
        self._dumps = 0
        with ExitStack() as undo:
            self._engine = undo.enter_context(Engine(home / "waypoint"))
            self._base = base_from_rootfs(self._engine.store, rootfs)
            self._session = self._engine.new(base=self._base)
            undo.callback(self._session.remove)
            self._session.exec(setup)
            self._files = self._session.snapshot()
            undo.callback(self._engine.drop_snapshots, [self._files.id])
            undo.callback(shutil.rmtree, self._directory, ignore_errors=True)
            self._room = _Room()
            undo.callback(self._room.close)
            self._undo = undo.pop_all()

    def __enter__(self) -> SameTree:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def dump(self) -> float:
        self._dumps += 1
        images = self._directory / str(self._dumps)
        images.mkdir(parents=True)
        pid = self._session.record.init_pid
        return self._room.criu(images, "dump", "-t", str(pid), "--leave-running", *_LIKE_THE_ENGINE)

    def restore(self) -> float:
        """Over a root that is mounted already; without a first command."""
        images, store = self._directory / str(self._dumps), self._engine.store
        upper = store.make_upper(store.new_uppers(1)[0], None)
        overlay = overlay_for(store, self._base, self._files.layers, upper, self._files.spec.idmap)
        room = _Room(overlay.options())
        try:
            took = room.criu(images, "restore", "-d", "--pidfile", "pid", "--root", STAGE, *_LIKE_THE_ENGINE)
            init = identify(int((images / "pid").read_text()))
            try:
                (images / "pid").unlink()
                came, wanted = len(namespace_pids(init.pid)), len(namespace_pids(self._session.record.init_pid))
            finally:
                kill(init)
                wait_gone(init, 30)
            if came != wanted:
                raise WaypointError(f"criu restore brought {came} processes back, not {wanted}")
            return took
        finally:
            room.close()
            store.discard_layers([upper])


class RawTree:
    """One tree; each `dump` leaves it running, each `restore` brings it back after it was ended."""

    def __init__(self, directory: Path, memory_mib: int) -> None:
        self._directory = directory / "raw"
        self._dumps = 0
        self._memory_mib = memory_mib
        self._pid = 0
        self._room = _Room()

    def __enter__(self) -> RawTree:
        holder = f'python3 -c "{_HOLD % self._memory_mib}" & ' if self._memory_mib else ""
        script = f"sleep 1000000 & {holder}wait"
        null = subprocess.DEVNULL
        self._starter = subprocess.Popen(
            ["bash", "-c", f"exec </dev/null >/dev/null 2>&1; {script}"],
            stdin=null, stdout=null, stderr=null, cwd="/", start_new_session=True, preexec_fn=self._room.enter,
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
        self._room.close()
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
        return self._room.criu(self._images, "dump", "-t", str(self._pid), "--leave-running")

    def restore(self) -> float:
        """Milliseconds of the command alone; the old tree is ended before."""
        self._end()
        took = self._room.criu(self._images, "restore", "-d", "--pidfile", "pid")
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


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0
