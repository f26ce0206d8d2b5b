"""One `criu swrk` process: a request, the questions that CRIU asks on the way, and an answer.

Either side may be killed at any instant. When the caller dies, CRIU finds its socket closed at the next question, undoes
what it was doing to a tree, and ends; until then it keeps the caller's locks, so that nobody else touches that tree. When CRIU
dies, the kernel lets the tree go on, and what CRIU had forked goes with its process group.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

from waypoint.errors import CriuError, DiskFull
from waypoint.kernel import criu_rpc_pb2 as rpc
from waypoint.kernel import later

__all__ = ["Hook", "Worker"]

Hook = Callable[[int], Callable[[], None] | None]
"""What to do when CRIU asks; what it returns is done when CRIU has its answer and goes on."""

_GUARD = 'free=$1; shift; read -r word; [ -s "/proc/self/fd/$free" ] || kill -9 "$@"'
"""Waits for the end of its input, and looks then whether it was set free. To be told would wake it, at a time when others want to run."""


def _readable(fd: int) -> bool:
    """A pidfd is when its process has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class Worker:
    """It ends with the answer to its one request, or when it is closed. There are two ways to have one (criu_start.py)."""

    def __init__(self, ours: socket.socket, errors: int, begun: int, *, own: bool) -> None:
        """`own`: it is our own CRIU, and understands more."""
        self._asked = self._answered = False
        self.own = own
        self._abandoned = False
        self.told_pid = 0
        """The tree's PID 1, from the last question that named it."""
        self._facts: list[str] = []
        self._socket = ours
        self._errors = os.fdopen(errors, "rb")
        self._begun = begun
        self._met: tuple[later.Child, int] | None = None

    def _meet(self) -> tuple[later.Child, int]:
        """Its process, a child of ours, and a pidfd of that; CriuError if there is none."""
        raise NotImplementedError

    @property
    def _process(self) -> later.Child:
        self._met = self._met or self._meet()
        return self._met[0]

    @property
    def _pidfd(self) -> int:
        self._met = self._met or self._meet()
        return self._met[1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def there(self) -> bool:
        try:
            return not _readable(self._pidfd)
        except CriuError:
            return False

    def begun_pid(self) -> int:
        """Of the tree that it has begun to restore, if it is our own and has: without a question, for whoever has to end that tree."""
        with contextlib.suppress(BlockingIOError):
            return int(os.read(self._begun, 16) or 0)
        return 0

    def has_asked(self) -> bool:
        """It waits for an answer, or has ended."""
        return _readable(self._socket.fileno())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, wait: bool = False) -> None:
        """Closing the socket ends the worker; what it was doing to a tree, it undoes.

        One that has answered, or was never asked, has nothing left to do but to end, which takes it 3 ms: nobody waits for that
        unless asked to.
        """
        if self._begun < 0:
            return
        with contextlib.suppress(CriuError):  # then nobody was there
            process = self._process
        self._socket.close()
        self._errors.close()
        os.close(self._begun)
        self._begun = -1
        if self._met is None:
            return
        os.close(self._pidfd)
        if (self._answered or not self._asked) and not wait:
            later.reap(process)
        else:
            process.wait()

    @contextlib.contextmanager
    def guarded(self, tree: Sequence[int]) -> Iterator[None]:
        """While CRIU waits for an answer: if this process is killed, `tree` is killed before CRIU can notice, and CRIU after it.

        CRIU would take the end of its socket for an answer, and let the tree run that nobody owns. So a child holds our end of the
        socket too, and kills them when it finds that we are gone.
        """
        free = os.memfd_create("free", os.MFD_CLOEXEC)
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(free), *map(str, [*tree, self.pid])],
            pass_fds=(self._socket.fileno(), free),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        assert guard.stdin is not None
        try:
            yield
        finally:
            os.write(free, b"1")
            os.close(free)
            later.reap(guard, guard.stdin.close)

    def abandon(self) -> None:
        """In a hook that raises: CRIU is ended where it is, and its answer is not waited for."""
        self._abandoned = True
        self._kill_group()

    def begin(self, kind: rpc.criu_req_type, options: rpc.criu_opts) -> None:
        """Send the request. CRIU reads it, looks at its kernel and waits with its first question until somebody listens."""
        self._asked = True
        self._send(rpc.criu_req(type=kind, opts=options))

    def tell(self, fact: str) -> None:
        """In the hook of `query-ext-files`: goes with the answer, and spares CRIU a question if it is one of ours."""
        self._facts.append(fact)

    def answer(self, hooks: Mapping[str, Hook]) -> rpc.criu_resp:
        answer = self.answer_until("", hooks)
        assert answer is not None
        return answer

    def go_on(self, question: str, hooks: Mapping[str, Hook]) -> rpc.criu_resp | None:
        """After `answer_until`, until the next question, or the end."""
        self._send(rpc.criu_req(type=rpc.NOTIFY, notify_success=True))
        return self.answer_until(question, hooks)

    def leave(self) -> None:
        """After `answer_until`: all is done that it was asked for. What it still has open keeps mounts of the session busy, so it
        is ended at once."""
        self._answered = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def answer_until(self, question: str, hooks: Mapping[str, Hook]) -> rpc.criu_resp | None:
        """None: CRIU has asked this question and waits for `go_on`, from any thread; else it has ended before that."""
        failed: BaseException | None = None
        knows = False
        while True:
            answer = rpc.criu_resp.FromString(self._receive())
            if answer.type != rpc.NOTIFY:
                self._answered = True
                if failed is not None and (knows or answer.success):
                    raise failed
                return answer  # why CRIU gave up by itself is the reason, not what came of that
            self.told_pid = answer.notify.pid or self.told_pid
            if question and answer.notify.script == question and failed is None:
                return None
            meanwhile = None
            try:
                hook = hooks.get(answer.notify.script)
                if hook is not None and failed is None:
                    meanwhile = hook(answer.notify.pid)
            except BaseException as error:
                failed = error
                if self._abandoned:
                    raise
            knows = failed is not None
            told, self._facts = self._facts, []
            facts = rpc.criu_opts(images_dir_fd=-1, external=told) if told else None
            self._send(rpc.criu_req(type=rpc.NOTIFY, notify_success=failed is None, opts=facts))
            if meanwhile is not None:
                try:
                    meanwhile()
                except BaseException as error:  # noqa: BLE001 - raised when CRIU has said how it ended
                    failed = error

    def _receive(self) -> bytes:
        """The end of the socket alone does not tell of the worker's death: a child that it forked may hold it open."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        data = b""
        if self._socket.fileno() in ready:
            with contextlib.suppress(ConnectionResetError):
                data = self._socket.recv(1 << 16)
        if data:
            return data
        self._kill_group()
        raise self._no_answer("no output")

    def _kill_group(self) -> None:
        """The worker has ended and is not reaped yet, so the number of its group is still its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def stderr(self) -> str:
        """What the launcher or the loader complained about; only after the worker has ended or refused."""
        self._socket.close()
        return self._errors.read().decode(errors="replace").strip()

    def _send(self, request: rpc.criu_req) -> None:
        try:
            self._socket.send(request.SerializeToString())
        except OSError as error:
            self._kill_group()
            raise self._no_answer(str(error)) from error

    def _no_answer(self, cause: str) -> CriuError | DiskFull:
        said = self.stderr()
        if os.strerror(errno.ENOSPC) in said:
            return DiskFull(f"no space left on the store's disk; nothing was lost: {said}")
        return CriuError(f"criu ended without an answer: {said or cause}")
