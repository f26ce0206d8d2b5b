"""Memory and what processes share of it."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import struct
import threading
import time

from .probe import Probe, state_of, wait_until

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmat.restype = ctypes.c_void_p
_libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_IPC_CREAT = 0o1000


class BigMemory(Probe):
    """1 GiB of memory, every page different, with a checksum."""

    size = 1 << 30

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = bytearray(os.urandom(1 << 20))
        for at in range(0, self.size, 1 << 20):
            for page in range(0, 1 << 20, 4096):
                struct.pack_into("Q", block, page, at + page)
            self.map[at : at + (1 << 20)] = bytes(block)

    def observe(self) -> object:
        """blake2 of a page in every 64 KiB and every page's number: quick, and any exchanged or lost page shows."""
        digest = hashlib.blake2b()
        view = memoryview(self.map)
        for at in range(0, self.size, 1 << 16):
            digest.update(view[at : at + 4096])
        numbers = sum(struct.unpack_from("Q", view, at)[0] != at for at in range(0, self.size, 4096))
        return digest.hexdigest(), numbers

    def perturb(self) -> None:
        self.map[5 << 20 : (5 << 20) + 8] = b"modified"


class SharedAnonymous(Probe):
    """Anonymous memory shared between parent and child."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, 1 << 16)
        self.map[:5] = b"begin"
        self.pid = os.fork()
        if self.pid == 0:
            while True:
                if self.map[100:101] == b"?":
                    self.map[200:205] = self.map[:5]
                    self.map[100:101] = b"."
                time.sleep(0.002)

    def child_sees(self) -> bytes:
        self.map[100:101] = b"?"
        wait_until(lambda: self.map[100:101] == b".", "the child answers")
        return self.map[200:205]

    def observe(self) -> object:
        return self.map[:5], self.child_sees()

    def perturb(self) -> None:
        self.map[:5] = b"other"

    def works(self) -> None:
        self.map[:5] = b"after"
        assert self.child_sees() == b"after", "parent and child do not share the memory any more"


class SysvSharedMemory(Probe):
    """System V shared memory, attached and not attached."""

    needs = ("processes", "memory", "ipc")

    def __init__(self) -> None:
        self.key = 0x5F1D
        self.id = _libc.shmget(self.key, 8192, _IPC_CREAT | 0o640)
        assert self.id >= 0
        self.address = _libc.shmat(self.id, None, 0)
        ctypes.memmove(self.address, b"attached", 8)
        self.loose = _libc.shmget(self.key + 1, 4096, _IPC_CREAT | 0o600)
        address = _libc.shmat(self.loose, None, 0)
        ctypes.memmove(address, b"detached", 8)
        _libc.shmdt(ctypes.c_void_p(address))

    def _detached(self) -> bytes:
        found = _libc.shmget(self.key + 1, 0, 0)
        if found < 0:
            return b"none"
        address = _libc.shmat(found, None, 0)
        try:
            return ctypes.string_at(address, 8)
        finally:
            _libc.shmdt(ctypes.c_void_p(address))

    def observe(self) -> object:
        same = _libc.shmget(self.key, 0, 0) == self.id
        return ctypes.string_at(self.address, 8), self._detached(), same

    def perturb(self) -> None:
        ctypes.memmove(self.address, b"spoiled.", 8)
        _libc.shmctl(self.loose, 0, None)

    def works(self) -> None:
        again = _libc.shmat(_libc.shmget(self.key, 0, 0), None, 0)
        ctypes.memmove(again, b"through2", 8)
        assert ctypes.string_at(self.address, 8) == b"through2"


class SysvSemaphores(Probe):
    """System V semaphores, with one process waiting."""

    needs = ("processes", "memory", "ipc")

    def __init__(self) -> None:
        self.id = _libc.semget(0x5F2D, 3, _IPC_CREAT | 0o600)
        assert self.id >= 0
        for index, value in enumerate((4, 0, 9)):
            _libc.semctl(self.id, index, 16, value)
        self.read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            done = self._op(1, -1)
            os.write(write, f"through {done}".encode())
            signal_pause()
        wait_until(lambda: _libc.semctl(self.id, 1, 14, 0) == 1, "the child waits")

    def _op(self, index: int, change: int) -> int:
        while True:
            done = int(_libc.semop(self.id, struct.pack("Hhh", index, change, 0), 1))
            if done == 0 or ctypes.get_errno() != 4:
                return done

    def observe(self) -> object:
        wait_until(lambda: _libc.semctl(self.id, 1, 14, 0) == 1, "the child waits")
        return [_libc.semctl(self.id, index, 12, 0) for index in range(3)], _libc.semget(0x5F2D, 0, 0) == self.id

    def perturb(self) -> None:
        _libc.semctl(self.id, 0, 16, 1)

    def works(self) -> None:
        assert self._op(1, 1) == 0
        assert os.read(self.read, 99) == b"through 0"


class SysvMessages(Probe):
    """System V message queues with unread messages."""

    needs = ("processes", "memory", "ipc")

    def __init__(self) -> None:
        self.id = _libc.msgget(0x5F3D, _IPC_CREAT | 0o600)
        assert self.id >= 0
        for kind, text in ((1, b"one"), (7, b"seven"), (1, b"again")):
            assert _libc.msgsnd(self.id, struct.pack("l", kind) + text, len(text), 0) == 0

    def observe(self) -> object:
        info = ctypes.create_string_buffer(128)
        assert _libc.msgctl(self.id, 2, info) == 0
        return struct.unpack_from("QQ", info.raw, 72 + 8), _libc.msgget(0x5F3D, 0) == self.id

    def perturb(self) -> None:
        self._receive(7)

    def _receive(self, kind: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        size = _libc.msgrcv(self.id, buffer, 56, ctypes.c_long(kind), 0o4000)
        assert size >= 0, f"no message of kind {kind}"
        return buffer.raw[8 : 8 + size]

    def works(self) -> None:
        assert [self._receive(7), self._receive(0), self._receive(0)] == [b"seven", b"one", b"again"]


class PosixSharedMemory(Probe):
    """POSIX shared memory: named, and unlinked but mapped."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        self.maps = []
        for name in ("/dev/shm/kept", "/dev/shm/unlinked"):
            fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(fd, 65536)
            mapped = mmap.mmap(fd, 65536)
            mapped[:6] = b"posix!"
            self.maps.append(mapped)
            os.close(fd)
        os.unlink("/dev/shm/unlinked")

    def observe(self) -> object:
        with open("/dev/shm/kept", "rb") as kept:
            return [mapped[:6] for mapped in self.maps], kept.read(6), os.listdir("/dev/shm")

    def perturb(self) -> None:
        for mapped in self.maps:
            mapped[:6] = b"gone.."

    def works(self) -> None:
        self.maps[0][:6] = b"newest"
        with open("/dev/shm/kept", "rb") as kept:
            assert kept.read(6) == b"newest"


class MemFd(Probe):
    """memfd: content, offset, seals, and a mapping."""

    def __init__(self) -> None:
        import fcntl

        self.sealed = os.memfd_create("sealed", 3)
        os.write(self.sealed, b"sealed content")
        fcntl.fcntl(self.sealed, 1033, 0x8 | 0x4)
        self.open = os.memfd_create("open")
        os.ftruncate(self.open, 1 << 20)
        self.map = mmap.mmap(self.open, 1 << 20)
        self.map[70_000:70_005] = b"memfd"

    def observe(self) -> object:
        import fcntl

        seals = fcntl.fcntl(self.sealed, 1034)
        where = os.lseek(self.sealed, 0, os.SEEK_CUR)
        return os.pread(self.sealed, 99, 0), seals, where, os.pread(self.open, 5, 70_000), os.readlink(f"/proc/self/fd/{self.open}")

    def perturb(self) -> None:
        self.map[70_000:70_005] = b"other"

    def works(self) -> None:
        self.map[70_000:70_005] = b"newer"
        assert os.pread(self.open, 5, 70_000) == b"newer", "descriptor and mapping are not one any more"
        try:
            os.pwrite(self.sealed, b"x", 0)
            raise AssertionError("the seal is gone")
        except PermissionError:
            pass


class PosixSemaphore(Probe):
    """A POSIX semaphore shared by two processes, one of them waiting."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, 4096)
        self.sem = ctypes.c_char.from_buffer(self.map)
        assert _libc.sem_init(ctypes.byref(self.sem), 1, 0) == 0
        self.read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            while _libc.sem_wait(ctypes.byref(self.sem)) != 0:
                pass
            os.write(write, b"through")
            signal_pause()
        wait_until(lambda: self._state() == "S", "the child waits")

    def observe(self) -> object:
        value = ctypes.c_int()
        _libc.sem_getvalue(ctypes.byref(self.sem), ctypes.byref(value))
        return value.value, os.path.exists(f"/proc/{self.pid}/status") and self._state()

    def _state(self) -> str:
        return state_of(self.pid)

    def perturb(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)

    def works(self) -> None:
        assert _libc.sem_post(ctypes.byref(self.sem)) == 0
        assert os.read(self.read, 9) == b"through"


class MemoryRights(Probe):
    """Mappings with every protection, locked memory, a guard page, a growing stack."""

    def __init__(self) -> None:
        _libc.mmap.restype = ctypes.c_void_p
        size = 4096 * 8
        self.base = _libc.mmap(None, ctypes.c_size_t(size), 3, 0x22, -1, ctypes.c_long(0))
        ctypes.memmove(self.base, b"page" * 8192, size)
        for page, rights in enumerate((0, 1, 3, 5, 7)):
            assert _libc.mprotect(ctypes.c_void_p(self.base + page * 4096), ctypes.c_size_t(4096), rights) == 0
        _libc.mlock(ctypes.c_void_p(self.base + 4096 * 5), ctypes.c_size_t(4096))
        _libc.madvise(ctypes.c_void_p(self.base + 4096 * 6), ctypes.c_size_t(4096), 16)

    def observe(self) -> object:
        found, at = [], 0
        with open("/proc/self/smaps") as maps:
            for line in maps:
                words = line.split()
                if "-" in words[0] and len(words) >= 5 and not words[0].endswith(":"):
                    at = int(words[0].split("-")[0], 16)
                    if self.base <= at < self.base + 4096 * 8:
                        found.append((at - self.base, words[1]))
                elif words[0] == "VmFlags:" and self.base <= at < self.base + 4096 * 8:
                    found.append((at - self.base, " ".join(sorted(set(words[1:]) & {"lo", "dd", "rd", "wr", "ex"}))))
        return found, ctypes.string_at(self.base + 4096, 8)

    def perturb(self) -> None:
        _libc.mprotect(ctypes.c_void_p(self.base), ctypes.c_size_t(4096 * 8), 3)
        ctypes.memmove(self.base + 4096, b"spoil", 5)


def signal_pause() -> None:
    while True:
        threading.Event().wait()
