"""One restore by CRIU. It reads the images, and its root is mounted, while its caller has other things to do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from waypoint.errors import CriuError, DiskFull
from waypoint.kernel import criu_rpc_pb2 as rpc
from waypoint.kernel import netlock, netns, processes, processors, tools
from waypoint.kernel.criu import base_options, failure, started
from waypoint.kernel.criu_worker import Hook, Worker
from waypoint.kernel.launch import ID_BASE, STAGE, Overlay
from waypoint.kernel.template import Template
from waypoint.outcomes import Process

__all__ = ["Restorer", "end_half_restored"]

_LOOPBACK = "waypoint[loopback]"
"""Our own makes the network namespace beside the tree's first process, and brings up loopback in it (netns.py)."""
_UNWANTED = "waypoint[no-{}]"
"""Our own does not ask this question."""


class Restorer:
    """A CRIU worker that reads the images of a tree as soon as this is made, and waits before it makes anything of it until `restore`.

    When it is closed without that, nothing has been made.
    """

    def __init__(
        self,
        images: Path,
        *,
        log_dir: Path,
        own_network: bool,
        outside: bool,
        checked: bool,
        merge: bool,
        hold: Sequence[int],
        cgroups: Sequence[Path] = (),
        template: Template | None = None,
    ) -> None:
        """`outside`: its network has more than loopback, see `with_network` below. `checked`: it is restored with a `check`.

        `hold`: see Started. `merge`: its memory may be merged with others'.
        `template`: by which to have the worker, if it is our own CRIU and is to have no cgroups of its own; else it is started
        when its root is there.
        """
        self._log = log_dir / "restore.log"
        self._own_network = own_network
        self._connected = own_network and netlock.saved_connections(images)
        self._outside = outside
        self._checked = checked
        self._merge = merge
        self._hold = hold
        self._cgroups = cgroups
        criu = tools.engine_criu()
        self._template = template if not cgroups and tools.is_quick(criu) else None
        self._options = base_options(images, "restore.log", own_network)
        self._options.root = STAGE
        self._worker: Worker | None = None
        self._overlay: Overlay | None = None
        self._mounted: Callable[[], None] | None = None
        self._work = os.open(log_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._options.work_dir_fd = self._work
            if self._template is not None:
                self._begin(self._template.worker(criu, merge=merge, hold=hold))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Restorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._mounted is not None:
            with contextlib.suppress(CriuError, DiskFull):
                self._wait_for_root()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._work >= 0:
            os.close(self._work)
            self._work = -1

    def _begin(self, worker: Worker) -> Worker:
        self._worker = worker
        if worker.own:
            networked = self._outside or self._connected
            self._options.external.extend(_spared(self._checked, self._connected, networked))
            if self._own_network and not networked:
                self._options.external.append(_LOOPBACK)
        # one that was forked has noted before where its tree may run
        with contextlib.nullcontext() if self._template is None else processors.woken_elsewhere(worker.pid):
            worker.begin(rpc.RESTORE, self._options)
        return worker

    def mount(self, overlay: Overlay) -> None:
        """What it is restored over; whoever uses this does not wait for it."""
        self._overlay = overlay
        if self._template is not None and self._worker is not None:
            self._mounted = self._template.mount(self._worker.pid, overlay)

    def _wait_for_root(self) -> None:
        mounted, self._mounted = self._mounted, None
        assert mounted is not None
        mounted()

    def _rooted(self) -> Worker:
        assert self._overlay is not None
        if self._worker is None:
            merge = ["--merge"] if self._merge else []
            return self._begin(started([*self._overlay.options(), *merge], self._cgroups, self._hold, {}))
        worker = self._worker
        try:
            self._wait_for_root()
        except CriuError:
            early = worker.answer_until("pre-restore", {})
            if early is None:
                raise
            # it has looked at the images and given up: that is the reason, not that it is gone
            raise failure("restore", self._log, early, worker.stderr()) from None
        return worker

    def restore(
        self,
        *,
        with_network: Callable[[int], None] | None,
        beside: Callable[[], None],
        check: Hook | None = None,
        guarded: bool = False,
    ) -> Generator[int, bool, Process]:
        """Bring the tree back over what was mounted; returns its PID 1. On failure nothing of the tree is left.

        With `check` it yields that pid when all is restored and nothing runs yet. The caller takes its time, goes on from whichever
        thread it likes and says whether to check, or throws something in: then the tree ends without having run. If `guarded`, it
        also does if this process is killed meanwhile.
        `with_network` is called with the pid when its namespaces exist, and has returned before any socket is restored; without it
        a network of its own has loopback alone.
        `beside` is done while CRIU is at work.
        """
        begun: list[Process] = []
        unasked: list[Process] = []

        def namespaces_exist(pid: int) -> Callable[[], None]:
            begun.append(processes.identify(pid))
            return lambda: network_up(pid)

        def network_up(pid: int) -> None:  # CRIU mounts meanwhile, and asks once more before it makes processes and sockets
            if with_network is not None:
                with_network(pid)
            elif self._own_network:
                netns.loopback_up(f"/proc/{pid}/ns/net")
            if self._connected:
                held.callback(netlock.lock_network(pid))

        try:
            with contextlib.ExitStack() as held, contextlib.ExitStack() as used:
                used.enter_context(self)
                used.push(lambda failed, *_: unasked.extend(_begun(self._worker)) if failed else None)
                worker = self._rooted()
                hooks: dict[str, Hook] = {
                    "pre-restore": lambda _: beside,
                    "setup-namespaces": namespaces_exist,
                    "network-unlock": lambda _: held.close(),
                }
                answer = worker.answer_until("post-resume" if check is None else "pre-resume", hooks)
                if answer is None and not begun:
                    begun.append(processes.identify(worker.told_pid))
                if answer is None and check is not None:
                    with _held(worker, begun[0], guarded):
                        if (yield begun[0].pid):
                            check(begun[0].pid)
                    answer = worker.go_on("post-resume", hooks)
                if answer is not None:  # it ended before the tree ran
                    raise failure("restore", self._log, answer, worker.stderr())
                worker.leave()
                return begun[0]
        except BaseException:
            end_half_restored(begun or unasked)
            raise


@contextlib.contextmanager
def _held(worker: Worker, init: Process, guarded: bool) -> Iterator[None]:
    """CRIU lets the tree run whatever it hears here: one that must not is ended before CRIU hears of it, and CRIU with it.

    A PID 1 that dies waits until its processes are reaped, which CRIU traces; and CRIU waits for that PID 1. Each process is
    killed for itself: one that is only about to be would run when its tracer dies.
    """
    tree = processes.namespace_pids(init.pid)
    with worker.guarded(tree) if guarded else contextlib.nullcontext():
        try:
            yield
        except BaseException:
            processes.kill_each(tree)
            worker.abandon()
            raise


def _begun(worker: Worker | None) -> list[Process]:
    """The PID 1 that it has made, which may run the session's own program by now: nobody could know it by CRIU's."""
    if worker is None:
        return []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        pid = worker.begun_pid()
        if pid and processes.is_sessions(pid, ID_BASE):
            return [processes.identify(pid)]
    return []


def _spared(checked: bool, connected: bool, networked: bool) -> list[str]:
    """What our own CRIU need not ask in a restore, as nobody listens for it."""
    questions = {"pre-resume": checked, "network-unlock": connected, "setup-namespaces": networked, "post-setup-namespaces": networked}
    return [_UNWANTED.format(question) for question in ("post-restore", *(one for one, heard in questions.items() if not heard))]


def end_half_restored(known: Sequence[Process] = ()) -> int:
    """CRIU ends what it began, unless it was killed itself; how many were left."""
    left = [*known, *processes.half_restored(tools.is_criu(), ID_BASE)]
    for process in left:
        processes.kill(process)
    for process in left:
        processes.wait_gone(process, 10)
    return len(left)
