"""Threads: where they wait, what each of them owns."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from .probe import Probe, wait_until

_libc = ctypes.CDLL(None, use_errno=True)


def _threads() -> list[tuple[str, str]]:
    found = []
    for name in sorted(os.listdir("/proc/self/task"), key=int):
        with open(f"/proc/self/task/{name}/comm") as comm:
            found.append((name, comm.read().strip()))
    return found


class BlockedThreads(Probe):
    """Threads blocked in a futex: a lock, a condition, an event, a barrier; each with its id and name."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.condition = threading.Condition()
        self.event = threading.Event()
        self.barrier = threading.Barrier(2)
        self.passed: list[str] = []
        self.lock.acquire()
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self.a, self.b, self.c, self.d)]
        for thread in self.threads:
            thread.start()
        wait_until(lambda: len(_threads()) == 5 and self.barrier.n_waiting == 1, "the threads wait")

    def a(self) -> None:
        _libc.prctl(15, b"on-lock", 0, 0, 0)
        with self.lock:
            self.passed.append("lock")

    def b(self) -> None:
        _libc.prctl(15, b"on-condition", 0, 0, 0)
        with self.condition:
            self.condition.wait()
        self.passed.append("condition")

    def c(self) -> None:
        _libc.prctl(15, b"on-event", 0, 0, 0)
        self.event.wait()
        self.passed.append("event")

    def d(self) -> None:
        _libc.prctl(15, b"on-barrier", 0, 0, 0)
        self.barrier.wait()
        self.passed.append("barrier")

    def observe(self) -> object:
        return _threads(), sorted(self.passed), os.getpid()

    def perturb(self) -> None:
        self.event.set()
        self.threads[2].join()

    def works(self) -> None:
        self.lock.release()
        with self.condition:
            self.condition.notify_all()
        self.event.set()
        self.barrier.wait()
        for thread in self.threads:
            thread.join(20)
        assert sorted(self.passed) == ["barrier", "condition", "event", "lock"], self.passed


class RobustMutex(Probe):
    """A robust mutex shared by two processes: if its owner dies, the next one is told so."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, 4096)
        self.mutex = ctypes.byref(ctypes.c_char.from_buffer(self.map))
        attributes = ctypes.create_string_buffer(64)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, 1)
        _libc.pthread_mutexattr_setrobust(attributes, 1)
        assert _libc.pthread_mutex_init(self.mutex, attributes) == 0
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _libc.pthread_mutex_lock(self.mutex)
            os.write(write, b"!")
            threading.Event().wait()
        os.read(read, 1)

    def observe(self) -> object:
        state = _libc.pthread_mutex_trylock(self.mutex)
        if state == 0:
            _libc.pthread_mutex_unlock(self.mutex)
        return os.strerror(state)

    def perturb(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)

    def works(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        state = _libc.pthread_mutex_lock(self.mutex)
        assert state == 130, f"the owner died, and lock says {os.strerror(state)}, not EOWNERDEAD"


class ThreadLocalData(Probe):
    """Thread-local data, the C library's errno, and per-thread signal masks."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.local.name = "main"
        self.seen: dict[str, object] = {}
        self.go = [threading.Semaphore(0) for _ in range(3)]
        self.done = threading.Semaphore(0)
        for number in range(3):
            threading.Thread(target=self.run, args=(number,), daemon=True).start()
            self.done.acquire()

    def run(self, number: int) -> None:
        import signal

        self.local.name = f"thread {number}"
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1 + number})
        ctypes.set_errno(number + 10)
        self.done.release()
        while self.go[number].acquire():
            mask = sorted(int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, []))
            self.seen[str(number)] = (self.local.name, ctypes.get_errno(), mask, threading.get_native_id())
            self.done.release()

    def observe(self) -> object:
        for gate in self.go:
            gate.release()
            self.done.acquire()
        return self.local.name, self.seen

    def perturb(self) -> None:
        self.local.name = "changed"
