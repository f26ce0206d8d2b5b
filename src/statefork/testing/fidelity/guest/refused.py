"""What no snapshot can carry. Each probe goes on working after the refusal, and lets go of it when asked."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct

from .probe import Probe, wait_until

_libc = ctypes.CDLL(None, use_errno=True)
_F_SETPIPE_SZ = 1031


def _call(number: int, *words: object) -> int:
    result = int(_libc.syscall(number, *words))
    assert result >= 0, f"system call {number}: {os.strerror(ctypes.get_errno())}"
    return result


class _Held(Probe):
    """A descriptor that cannot be saved."""

    says = ("",)
    seccomp = True
    capabilities: tuple[str, ...] = ()
    fd: int

    def observe(self) -> object:
        return os.readlink(f"/proc/self/fd/{self.fd}")

    def perturb(self) -> None:
        os.close(self.fd)


class IoUring(_Held):
    """An io_uring."""

    says = (r"process \d+ \(\S*python3 .*\) has an io_uring \(descriptor \d+\)", "UV_USE_IO_URING=0")
    seccomp = False

    def __init__(self) -> None:
        self.fd = _call(425, 8, bytes(120))

    def works(self) -> None:
        _call(426, self.fd, 0, 0, 0, None, 0)


class PerfEvent(_Held):
    """A perf event counter."""

    says = (r"process \d+ \(\S*python3 .*\) has a perf event counter", "stop the profiler")
    seccomp = False

    def __init__(self) -> None:
        software, task_clock, exclude_kernel = 1, 1, 1 << 5 | 1 << 6
        attributes = struct.pack("IIQQQQQ", software, 112, task_clock, 0, 0, 0, exclude_kernel) + bytes(64)
        self.fd = _call(298, attributes, 0, -1, -1, 0)

    def works(self) -> None:
        assert len(os.read(self.fd, 8)) == 8


class SecretMemory(_Held):
    """Memory that the kernel itself cannot read (memfd_secret)."""

    says = (r"process \d+ \(\S*python3 .*\) has secret memory", "memfd_secret")
    seccomp = False

    def __init__(self) -> None:
        self.fd = _call(447, 0)


class Vsock(_Held):
    """A socket to the hypervisor."""

    says = (r"process \d+ \(\S*python3 .*\) has a vsock socket", "close it")
    seccomp = False

    def __init__(self) -> None:
        self.fd = socket.socket(40, socket.SOCK_STREAM).detach()


class ExternalSocket(_Held):
    """A unix socket whose other end is outside the environment."""

    says = (
        r"process \d+ \(\S*python3 .*\) has a unix socket connected to process \d+ \(.*\) of the host",
        "close it",
    )

    def __init__(self) -> None:
        with open("address") as address:
            name = address.read()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect("\0" + name)
        self.fd = self.socket.fileno()

    def works(self) -> None:
        self.socket.sendall(b"still here")
        assert self.socket.recv(64) == b"still here"

    def perturb(self) -> None:
        self.socket.close()


class PacketPipe(_Held):
    """A pipe in packet mode."""

    says = (r"process \d+ \(\S*python3 .*\) has a pipe in packet mode", "O_DIRECT")

    def __init__(self) -> None:
        self.fd, self.write = os.pipe2(os.O_DIRECT)
        os.write(self.write, b"one")

    def works(self) -> None:
        os.write(self.write, b"two")
        assert [os.read(self.fd, 9), os.read(self.fd, 9)] == [b"one", b"two"]

    def perturb(self) -> None:
        os.close(self.fd)
        os.close(self.write)


class ManyPipes(_Held):
    """More pipes than CRIU counts."""

    says = (r"the session has \d+ pipes", "at most 1024")

    def __init__(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        self.pipes = []
        for _ in range(1100):
            self.pipes.append(os.pipe())
            fcntl.fcntl(self.pipes[-1][0], _F_SETPIPE_SZ, 4096)  # all users' pipes together have a limit, which others need too

    def observe(self) -> object:
        return len(self.pipes)

    def perturb(self) -> None:
        for pair in self.pipes[100:]:
            os.close(pair[0])
            os.close(pair[1])


class MessageQueue(_Held):
    """A POSIX message queue."""

    says = ("POSIX message queues", "/dev/mqueue/fidelity")

    def __init__(self) -> None:
        self.libc = ctypes.CDLL("librt.so.1", use_errno=True)
        attributes = struct.pack("llll", 0, 5, 64, 0) + bytes(32)
        self.fd = self.libc.mq_open(b"/fidelity", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600, attributes)
        assert self.fd >= 0, os.strerror(ctypes.get_errno())

    def works(self) -> None:
        buffer = ctypes.create_string_buffer(64)
        assert self.libc.mq_send(self.fd, b"text", 4, 0) == 0
        assert self.libc.mq_receive(self.fd, buffer, 64, None) == 4

    def perturb(self) -> None:
        os.close(self.fd)
        self.libc.mq_unlink(b"/fidelity")


class Traced(_Held):
    """A process that another one debugs."""

    says = (r"process \d+ \(\S*python3 .*\) is being debugged by process \d+ \(\S*python3", "detach the debugger")

    def __init__(self) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            while True:
                signal.pause()
        assert _libc.ptrace(0x4206, self.pid, None, None) == 0, "PTRACE_SEIZE"

    def observe(self) -> object:
        with open(f"/proc/{self.pid}/status") as status:
            return next(line for line in status if line.startswith("TracerPid")).split()[1] == str(os.getpid())

    def works(self) -> None:
        assert _libc.ptrace(0x4207, self.pid, None, None) == 0, "PTRACE_INTERRUPT"
        assert os.WIFSTOPPED(os.waitpid(self.pid, 0)[1])
        assert _libc.ptrace(7, self.pid, None, None) == 0, "PTRACE_CONT"

    def perturb(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class _Nested(_Held):
    """A child in a namespace of its own."""

    seccomp = False
    flag = 0
    name = ""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            assert _libc.unshare(self.flag) == 0, "unshare"
            if os.fork() == 0 and self.flag != 0x20000000:
                signal.pause()
            os.write(write, b"!")
            while True:
                signal.pause()
        os.close(write)
        assert os.read(read, 1) == b"!", "the child could not leave its namespace"

    def observe(self) -> object:
        link = f"{self.name}_for_children" if self.name == "pid" else self.name
        return os.readlink(f"/proc/{self.pid}/ns/{link}") != os.readlink(f"/proc/self/ns/{self.name}")

    def perturb(self) -> None:
        with open(f"/proc/{self.pid}/task/{self.pid}/children") as children:
            below = [int(word) for word in children.read().split()]
        for pid in (*below, self.pid):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in below), "all are gone")


class NestedUserNamespace(_Nested):
    """A process in a user namespace of its own."""

    says = (r"process \d+ \(\S*python3 .*\) is in a user namespace of its own",)
    flag = 0x10000000
    name = "user"


class NestedPidNamespace(_Nested):
    """A process in a pid namespace of its own, as nested containers have it."""

    says = (r"process \d+ \(\S*python3 .*\) is in a pid namespace of its own",)
    capabilities = ("+SYS_ADMIN",)
    flag = 0x20000000
    name = "pid"
