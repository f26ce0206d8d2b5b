"""Make another process make a system call, by ptrace: for the few things that can only be done from inside.

The process is stopped for well under a millisecond and does not notice: its registers and its stack are put back, and a system
call that it was blocked in is restarted by the kernel. Its signals wait and its own seccomp filter is suspended meanwhile. Only
for x86-64.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from waypoint.errors import HostUnsupported, KernelError

__all__ = ["Injection", "inside"]

_T = TypeVar("_T")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_SEIZE, _INTERRUPT, _CONT, _SINGLESTEP, _DETACH, _GETREGSET, _SETREGSET = 0x4206, 0x4207, 7, 9, 17, 0x4204, 0x4205
_GETSIGMASK, _SETSIGMASK = 0x420A, 0x420B
_ALL = b"\xff" * 8
_PATIENCE = 1.0
_O_SUSPEND_SECCOMP = 1 << 21
_PRSTATUS = 1
_REGISTERS = struct.Struct("=27Q")
_R10, _R9, _R8, _RAX, _RDX, _RSI, _RDI, _ORIG_RAX, _RIP, _CS, _RSP = 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 19
_64_BIT = 0x33
_ARGUMENTS = (_RDI, _RSI, _RDX, _R10, _R8, _R9)
_SYSCALL = b"\x0f\x05"
_WALL = 0x40000000
_RED_ZONE = 1024


def inside(pid: int, work: Callable[[Injection], _T]) -> _T:
    """Do some work with a process that is held meanwhile.

    In a thread of its own: a process that does not stop when it is asked to would do so later, and for ever, as long as the thread
    lives that asked.
    """

    def held() -> _T:
        with Injection(pid) as process:
            return work(process)

    with ThreadPoolExecutor(1, thread_name_prefix="inject") as thread:
        return thread.submit(held).result()


class Injection:
    """Holds the process while used as a context manager, by `inside`. All calls must come from the thread that entered it."""

    def __init__(self, pid: int) -> None:
        if platform.machine() != "x86_64":
            raise HostUnsupported(f"system calls cannot be injected on {platform.machine()}", feature="ptrace")
        self._pid = pid
        self._saved = b""
        self._mask = b""
        self._code = 0

    def __enter__(self) -> Injection:
        self._ptrace(_SEIZE, 0, _O_SUSPEND_SECCOMP)
        try:
            self._ptrace(_INTERRUPT)
            while (number := self._wait()) >= 0:  # a signal came first: it has that
                self._ptrace(_CONT, 0, number)
            saved = self._registers()
            if _REGISTERS.unpack(saved)[_CS] != _64_BIT:
                raise HostUnsupported(f"process {self._pid} is a 32-bit program", feature="ptrace")
            self._mask = self._signal_mask()
            self._block_signals(_ALL)
            self._saved = saved
            self._code = self._find_code()
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()

    def call(self, number: int, *arguments: int | bytes) -> int:
        """Its result; OSError if it failed. Bytes are put on the stack of the process and passed by address."""
        registers = list(_REGISTERS.unpack(self._saved))
        below = (registers[_RSP] - _RED_ZONE) & ~15
        words, covered = [], []
        for argument in arguments:
            if isinstance(argument, bytes):
                below = (below - len(argument)) & ~15
                covered.append((below, self._read(below, len(argument))))
                self._write(below, argument)
                argument = below
            words.append(argument & (1 << 64) - 1)
        for register, word in zip(_ARGUMENTS, words, strict=False):
            registers[register] = word
        registers[_RAX], registers[_ORIG_RAX] = number, (1 << 64) - 1
        registers[_RIP], registers[_RSP] = self._code, below - 128
        try:
            self._set(_REGISTERS.pack(*registers))
            self._ptrace(_SINGLESTEP)
            while self._wait() != signal.SIGTRAP:  # a second stop, of a process that was stopped already
                self._ptrace(_SINGLESTEP)
            result = ctypes.c_long(_REGISTERS.unpack(self._registers())[_RAX]).value
        finally:
            self._set(self._saved)
            for address, content in covered:
                self._write(address, content)
        if -4096 < result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def _find_code(self) -> int:
        """A system call instruction in the vdso, which every process has."""
        with open(f"/proc/{self._pid}/maps") as lines:
            for line in lines:
                if line.endswith("[vdso]\n"):
                    start, end = (int(word, 16) for word in line.split()[0].split("-"))
                    found = self._read(start, end - start).find(_SYSCALL)
                    if found >= 0:
                        return start + found
        raise KernelError(f"process {self._pid} has no vdso to call the kernel from")

    def _wait(self) -> int:
        """The signal that it stopped for; -1: because it was asked to."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            pid, status = os.waitpid(self._pid, _WALL | os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                raise KernelError(f"process {self._pid} does not stop: it waits for something that cannot be interrupted")
            time.sleep(0.0001)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(self._pid)
        return -1 if status >> 16 else os.WSTOPSIG(status)

    def _signal_mask(self) -> bytes:
        mask = ctypes.create_string_buffer(8)
        self._ptrace(_GETSIGMASK, 8, ctypes.addressof(mask))
        return mask.raw

    def _block_signals(self, mask: bytes) -> None:
        self._ptrace(_SETSIGMASK, 8, ctypes.addressof(ctypes.create_string_buffer(mask, 8)))

    def _detach(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has not stopped
            if self._saved:
                self._set(self._saved)
                self._block_signals(self._mask)
            self._ptrace(_DETACH)

    def _registers(self) -> bytes:
        buffer = ctypes.create_string_buffer(_REGISTERS.size)
        self._regset(_GETREGSET, buffer)
        return buffer.raw

    def _set(self, registers: bytes) -> None:
        self._regset(_SETREGSET, ctypes.create_string_buffer(registers, _REGISTERS.size))

    def _regset(self, request: int, buffer: ctypes.Array[ctypes.c_char]) -> None:
        vector = struct.pack("=QQ", ctypes.addressof(buffer), _REGISTERS.size)
        holder = ctypes.create_string_buffer(vector, len(vector))
        self._ptrace(request, _PRSTATUS, ctypes.addressof(holder))

    def _read(self, address: int, size: int) -> bytes:
        with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(size)

    def _write(self, address: int, data: bytes) -> None:
        with open(f"/proc/{self._pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            memory.write(data)

    def _ptrace(self, request: int, address: int = 0, data: int = 0) -> None:
        if _libc.ptrace(request, self._pid, address, data) < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), f"ptrace of process {self._pid}")
