"""Signals and timers of a process."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import time

from .probe import Probe, state_of, wait_until

_libc = ctypes.CDLL(None, use_errno=True)


def _masks() -> dict[str, str]:
    with open("/proc/self/status") as status:
        return {line.split(":")[0]: line.split()[1] for line in status if line.startswith(("SigP", "SigB", "SigI", "SigC", "ShdPnd"))}


def _disposition(number: int) -> str:
    """As the kernel has it: not every kernel shows it in /proc."""
    action = (ctypes.c_void_p * 32)()
    assert _libc.sigaction(int(number), None, action) == 0
    return {None: "default", 1: "ignored"}.get(action[0], "caught")


class SignalHandlers(Probe):
    """Signal handlers and ignored signals."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: self.caught.append(number))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGRTMIN + 3, lambda number, _: self.caught.append(number))

    def observe(self) -> object:
        return _masks(), [_disposition(number) for number in range(1, 32)], self.caught

    def perturb(self) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def works(self) -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGRTMIN + 3):
            os.kill(os.getpid(), number)
        assert self.caught == [signal.SIGUSR1, signal.SIGRTMIN + 3], self.caught


class PendingSignals(Probe):
    """Blocked signals that are pending: for the process, for one thread, and queued with values."""

    def __init__(self) -> None:
        self.blocked = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN}
        signal.pthread_sigmask(signal.SIG_BLOCK, self.blocked)
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.pthread_kill(__import__("threading").get_ident(), signal.SIGUSR2)
        for value in (7, 8, 9):
            self._queue(value)

    def _queue(self, value: int) -> None:
        assert _libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), ctypes.c_void_p(value)) == 0

    def observe(self) -> object:
        return _masks(), sorted(signal.sigpending())

    def perturb(self) -> None:
        signal.sigtimedwait({signal.SIGUSR1}, 0)

    def works(self) -> None:
        values = []
        info = (ctypes.c_byte * 128)()
        chosen = (ctypes.c_ulong * 16)(1 << (int(signal.SIGRTMIN) - 1))
        for _ in range(3):
            assert _libc.sigwaitinfo(chosen, info) == signal.SIGRTMIN
            values.append(struct.unpack_from("q", bytes(info), 24)[0])
        assert values == [7, 8, 9], values
        found = signal.sigwaitinfo({signal.SIGUSR1})
        assert found.si_pid == os.getpid(), found
        assert signal.sigwaitinfo({signal.SIGUSR2}).si_signo == signal.SIGUSR2


class SignalFd(Probe):
    """A signalfd with a signal in it."""

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGCHLD})
        mask = struct.pack("Q", 1 << (signal.SIGUSR1 - 1))
        self.fd = _libc.signalfd(-1, mask, os.O_NONBLOCK)
        assert self.fd >= 0
        os.kill(os.getpid(), signal.SIGUSR1)

    def observe(self) -> object:
        with open(f"/proc/self/fdinfo/{self.fd}") as info:
            return [line for line in info if line.startswith("sigmask")], sorted(signal.sigpending())

    def perturb(self) -> None:
        os.read(self.fd, 128)

    def works(self) -> None:
        assert struct.unpack_from("I", os.read(self.fd, 128))[0] == signal.SIGUSR1
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(os.read(self.fd, 128)) == 128


class IntervalTimers(Probe):
    """setitimer, with the time that was left."""

    def __init__(self) -> None:
        self.ticks = 0
        signal.signal(signal.SIGALRM, self.tick)
        signal.setitimer(signal.ITIMER_REAL, 5000, 60)
        signal.setitimer(signal.ITIMER_VIRTUAL, 3000, 30)

    def tick(self, *_: object) -> None:
        self.ticks += 1

    def observe(self) -> object:
        left, every = signal.getitimer(signal.ITIMER_REAL)
        used, each = signal.getitimer(signal.ITIMER_VIRTUAL)
        return 4000 < left <= 5000, every, 2900 < used <= 3001, each, self.ticks

    def perturb(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def works(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        wait_until(lambda: self.ticks >= 3, "the timer ticks")
        signal.setitimer(signal.ITIMER_REAL, 0)


class PosixTimers(Probe):
    """timer_create: one that is far, one that has ticked while its signal was blocked."""

    def __init__(self) -> None:
        self.far = self._make(signal.SIGUSR1, 5000, 70)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        self.near = self._make(signal.SIGUSR2, 1_000_000, 0)

    def _make(self, number: int, seconds: int, interval: int) -> ctypes.c_void_p:
        event = struct.pack("qii", 42, number, 0) + bytes(48)
        timer = ctypes.c_void_p()
        assert _libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0
        self._set(timer, seconds, interval)
        return timer

    def _set(self, timer: ctypes.c_void_p, seconds: float, interval: int) -> None:
        whole, part = int(seconds), int(seconds % 1 * 1e9)
        assert _libc.timer_settime(timer, 0, struct.pack("qqqq", interval, 0, whole, part), None) == 0

    def _get(self, timer: ctypes.c_void_p) -> tuple[int, int]:
        value = ctypes.create_string_buffer(32)
        assert _libc.timer_gettime(timer, value) == 0
        interval, _, left, _ = struct.unpack("qqqq", value.raw)
        return interval, left

    def observe(self) -> object:
        (every, left), (once, near) = self._get(self.far), self._get(self.near)
        return every, 4000 < left <= 5000, once, near > 900_000

    def perturb(self) -> None:
        self._set(self.far, 0, 0)

    def works(self) -> None:
        self._set(self.near, 0.01, 0)
        assert signal.sigtimedwait({signal.SIGUSR2}, 20) is not None, "the timer does not fire"


class TimerFd(Probe):
    """timerfd: one that is far, one with expirations that nobody has read."""

    def __init__(self) -> None:
        self.far = self._make(5000, 0, 30)
        self.near = self._make(0, 1_000_000, 0)
        wait_until(lambda: self._fired(self.near), "the timer fires")

    def _make(self, seconds: int, nanoseconds: int, interval: int) -> int:
        fd = int(_libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK))
        assert fd >= 0
        assert _libc.timerfd_settime(fd, 0, struct.pack("qqqq", interval, 0, seconds, nanoseconds), None) == 0
        return fd

    def _fired(self, fd: int) -> bool:
        return bool(select.select([fd], [], [], 0)[0])

    def observe(self) -> object:
        value = ctypes.create_string_buffer(32)
        assert _libc.timerfd_gettime(self.far, value) == 0
        interval, _, left, _ = struct.unpack("qqqq", value.raw)
        return interval, 4000 < left <= 5000, self._fired(self.near), self._fired(self.far)

    def perturb(self) -> None:
        os.read(self.near, 8)

    def works(self) -> None:
        assert struct.unpack("Q", os.read(self.near, 8)) == (1,)
        assert _libc.timerfd_settime(self.far, 0, struct.pack("qqqq", 0, 0, 0, 1000), None) == 0
        wait_until(lambda: self._fired(self.far), "the timer fires again")


class SleepingProcess(Probe):
    """A process in the middle of a sleep sleeps on, and no longer than it had to."""

    def __init__(self) -> None:
        self.read, write = os.pipe()
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            time.sleep(1)
            os.write(write, b"awake")
            signal.pause()
        wait_until(lambda: self.observe() == "S", "it sleeps")

    def observe(self) -> object:
        return state_of(self.pid)

    def perturb(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def works(self) -> None:
        assert os.read(self.read, 9) == b"awake"
        assert time.monotonic() - self.began >= 0.95, "it woke too early"


class PidFd(Probe):
    """A descriptor of another process (pidfd)."""

    def __init__(self) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            while True:
                signal.pause()
        self.fd = os.pidfd_open(self.pid)

    def observe(self) -> object:
        with open(f"/proc/self/fdinfo/{self.fd}") as info:
            return next(line for line in info if line.startswith("Pid:"))

    def perturb(self) -> None:
        os.close(self.fd)
        self.fd = os.pidfd_open(os.getpid())

    def works(self) -> None:
        assert not select.select([self.fd], [], [], 0)[0]
        signal.pidfd_send_signal(self.fd, signal.SIGKILL)
        assert select.select([self.fd], [], [], 30)[0]
        assert os.waitid(os.P_PIDFD, self.fd, os.WEXITED).si_status == signal.SIGKILL  # type: ignore[union-attr]
