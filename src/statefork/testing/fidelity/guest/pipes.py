"""Data on its way between processes, and the descriptors that watch for it."""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import select
import socket
import struct
import termios

from .probe import Probe, state_of, wait_until

_libc = ctypes.CDLL(None, use_errno=True)


def _waiting(fd: int) -> int:
    size = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, size)
    return size[0]


class PipeData(Probe):
    """Pipes with unread data, a changed size, and one whose writer is gone."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        fcntl.fcntl(self.write, 1031, 1 << 18)
        os.write(self.write, b"x" * 100_000 + b"end")
        self.last, writer = os.pipe()
        os.write(writer, b"last words")
        os.close(writer)

    def observe(self) -> object:
        return [_waiting(fd) for fd in (self.read, self.last)], fcntl.fcntl(self.write, 1032)

    def perturb(self) -> None:
        os.read(self.read, 10)

    def works(self) -> None:
        data = b""
        while len(data) < 100_003:
            data += os.read(self.read, 1 << 20)
        assert data.endswith(b"xend")
        assert os.read(self.last, 99) == b"last words"
        assert os.read(self.last, 99) == b""
        os.write(self.write, b"again")
        assert os.read(self.read, 9) == b"again"


class NamedPipe(Probe):
    """A FIFO with unread data."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        os.mkfifo(f"{self.directory}/fifo")
        self.fd = os.open(f"{self.directory}/fifo", os.O_RDWR | os.O_NONBLOCK)
        os.write(self.fd, b"unread")

    def observe(self) -> object:
        return _waiting(self.fd)

    def perturb(self) -> None:
        os.read(self.fd, 3)

    def works(self) -> None:
        other = os.open(f"{self.directory}/fifo", os.O_WRONLY | os.O_NONBLOCK)
        os.write(other, b"+more")
        assert os.read(self.fd, 99) == b"unread+more"


class UnixStream(Probe):
    """A unix stream connection with unread data both ways, and one that is half closed."""

    def __init__(self) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{self.directory}/sock")
        server.listen(5)
        self.client = socket.socket(socket.AF_UNIX)
        self.client.connect(f"{self.directory}/sock")
        self.peer = server.accept()[0]
        self.server = server
        self.client.sendall(b"to the server")
        self.peer.sendall(b"to the client")
        self.half, self.other = socket.socketpair()
        self.half.sendall(b"bye")
        self.half.shutdown(socket.SHUT_WR)

    def observe(self) -> object:
        return [end.recv(99, socket.MSG_PEEK) for end in (self.client, self.peer, self.other)]

    def perturb(self) -> None:
        self.peer.recv(3)

    def works(self) -> None:
        assert self.peer.recv(99) == b"to the server"
        assert self.other.recv(9) == b"bye"
        assert self.other.recv(9) == b"", "the end of the stream is lost"
        self.other.sendall(b"answer")
        assert self.half.recv(9) == b"answer"
        with socket.socket(socket.AF_UNIX) as late:
            late.connect(f"{self.directory}/sock")
            self.server.accept()[0].sendall(b"welcome")
            assert late.recv(9) == b"welcome"


class UnixDatagrams(Probe):
    """Unix datagrams and sequenced packets that nobody has read."""

    def __init__(self) -> None:
        self.receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.receiver.bind(f"{self.directory}/dgram")
        self.sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sender.connect(f"{self.directory}/dgram")
        for word in (b"one", b"two", b"three"):
            self.sender.send(word)
        self.a, self.b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.a.send(b"first")
        self.a.send(b"second")

    def observe(self) -> object:
        return self.receiver.recv(99, socket.MSG_PEEK), self.b.recv(99, socket.MSG_PEEK)

    def perturb(self) -> None:
        self.receiver.recv(99)
        self.b.recv(99)

    def works(self) -> None:
        assert [self.receiver.recv(99) for _ in range(3)] == [b"one", b"two", b"three"]
        assert [self.b.recv(99) for _ in range(2)] == [b"first", b"second"]
        self.sender.send(b"more")
        assert self.receiver.recv(99) == b"more"


class PassedDescriptors(Probe):
    """Descriptors that were sent over a socket and not yet received."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        self.a, self.b = socket.socketpair()
        file = os.open(f"{self.directory}/passed", os.O_RDWR | os.O_CREAT)
        os.write(file, b"in flight")
        read, self.write = os.pipe()
        socket.send_fds(self.a, [b"take these"], [file, read])
        os.close(file)
        os.close(read)

    def observe(self) -> object:
        return self.b.recv(99, socket.MSG_PEEK | socket.MSG_DONTWAIT)

    def perturb(self) -> None:
        self.b.recv(99)

    def works(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.b, 99, 2)
        assert data == b"take these"
        assert len(fds) == 2, f"{len(fds)} descriptors came"
        assert os.pread(fds[0], 99, 0) == b"in flight"
        os.write(self.write, b"pipe")
        assert os.read(fds[1], 9) == b"pipe"


class EventFd(Probe):
    """eventfd counters."""

    def __init__(self) -> None:
        self.counter = _libc.eventfd(5, os.O_NONBLOCK)

    def observe(self) -> object:
        """Taken out and put back: not every kernel shows it in /proc."""
        try:
            count = os.read(self.counter, 8)
        except BlockingIOError:
            return 0
        os.write(self.counter, count)
        return struct.unpack("Q", count)[0]

    def perturb(self) -> None:
        os.read(self.counter, 8)

    def works(self) -> None:
        os.write(self.counter, struct.pack("Q", 3))
        assert struct.unpack("Q", os.read(self.counter, 8)) == (8,)


class EpollSet(Probe):
    """An epoll set: level, edge and one-shot members, one of them ready, one duplicated."""

    def __init__(self) -> None:
        self.pairs = [os.pipe() for _ in range(3)]
        self.epoll = select.epoll()
        self.epoll.register(self.pairs[0][0], select.EPOLLIN)
        self.epoll.register(self.pairs[1][0], select.EPOLLIN | select.EPOLLET)
        self.epoll.register(self.pairs[2][0], select.EPOLLIN | select.EPOLLONESHOT)
        os.write(self.pairs[0][1], b"!")

    def observe(self) -> object:
        with open(f"/proc/self/fdinfo/{self.epoll.fileno()}") as info:
            members = sorted(" ".join(line.split()[:4]) for line in info if line.startswith("tfd"))
        return members, self.epoll.poll(0)

    def perturb(self) -> None:
        self.epoll.unregister(self.pairs[1][0])
        os.read(self.pairs[0][0], 1)

    def works(self) -> None:
        os.read(self.pairs[0][0], 1)
        assert self.epoll.poll(0) == []
        for pair in self.pairs[1:]:
            os.write(pair[1], b"!")
        assert sorted(self.epoll.poll(1)) == [(pair[0], select.EPOLLIN) for pair in self.pairs[1:]]
        assert self.epoll.poll(0) == [], "edge or one-shot was lost"


class BlockedReader(Probe):
    """A process that is blocked in read, poll and accept at the moment of the snapshot."""

    def __init__(self) -> None:
        self.gates, self.answers, self.pids = [], [], []
        for blocked in (self._in_read, self._in_poll, self._in_accept):
            gate, answer = socket.socketpair(), os.pipe()
            pid = os.fork()
            if pid == 0:
                blocked(gate[1])
                os.write(answer[1], blocked.__name__.encode())
                select.select([], [], [])
            self.gates.append(gate[0])
            self.answers.append(answer[0])
            self.pids.append(pid)
        wait_until(lambda: self._states() == ["S"] * 3 and self._listening(), "all three are blocked")

    def _states(self) -> list[str]:
        return [state_of(pid) for pid in self.pids]

    def _listening(self) -> bool:
        with open("/proc/net/unix") as lines:
            return any("00010000" in line and f"{self.directory}/accept" in line for line in lines)

    def _in_read(self, gate: socket.socket) -> None:
        os.read(gate.fileno(), 1)

    def _in_poll(self, gate: socket.socket) -> None:
        select.select([gate], [], [])

    def _in_accept(self, gate: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{self.directory}/accept")
        server.listen()
        server.accept()

    def observe(self) -> object:
        return self._states(), self._listening()

    def perturb(self) -> None:
        for pid in self.pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)

    def works(self) -> None:
        for gate in self.gates[:2]:
            gate.sendall(b"!")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{self.directory}/accept")
            names = [os.read(answer, 99) for answer in self.answers]
        assert names == [b"_in_read", b"_in_poll", b"_in_accept"], names
