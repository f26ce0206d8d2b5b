"""Connections inside the environment: both ends are in it, so both come back."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import termios
import threading
import time

from .probe import Probe, wait_until

_NEEDS = ("processes", "memory", "network")


def _waiting(sock: socket.socket) -> int:
    size = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, size)
    return size[0]


def _connection(family: int, host: str) -> tuple[socket.socket, socket.socket, socket.socket]:
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, 0))
    server.listen(16)
    client = socket.socket(family, socket.SOCK_STREAM)
    client.connect(server.getsockname())
    return server, client, server.accept()[0]


class TcpServer(Probe):
    """A listening TCP server that counts in memory, with its port, options and backlog."""

    needs = _NEEDS

    def __init__(self) -> None:
        self.server = socket.socket()
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 20_000)
        self.server.bind(("0.0.0.0", 8123))
        self.server.listen(77)
        self.count = 0
        threading.Thread(target=self.serve, daemon=True).start()
        self.ask(b"+")

    def serve(self) -> None:
        while True:
            with self.server.accept()[0] as client:
                self.count += len(client.recv(1))
                client.sendall(str(self.count).encode())

    def ask(self, what: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", 8123), 10) as client:
            client.sendall(what)
            client.shutdown(socket.SHUT_WR)
            return client.recv(99)

    def observe(self) -> object:
        options = [
            self.server.getsockopt(socket.SOL_SOCKET, option)
            for option in (socket.SO_REUSEADDR, socket.SO_KEEPALIVE, socket.SO_RCVBUF, socket.SO_ACCEPTCONN)
        ]
        return self.ask(b""), self.server.getsockname(), options

    def perturb(self) -> None:
        self.ask(b"+")

    def works(self) -> None:
        before = self.count
        assert self.ask(b"+") == str(before + 1).encode()


class TcpTransfer(Probe):
    """An established TCP connection in the middle of a transfer: unread, unsent, and a writer that is blocked."""

    needs = _NEEDS
    total = 8_000_000

    def __init__(self) -> None:
        self.server, self.client, self.peer = _connection(socket.AF_INET, "127.0.0.1")
        self.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer.sendall(b"hello from the server")
        self.writer = threading.Thread(target=self.write, daemon=True)
        self.writer.start()
        wait_until(self._is_full, "the writer is blocked")

    def _is_full(self) -> bool:
        """How much fits is the kernel's business."""
        before = _waiting(self.peer)
        time.sleep(0.1)
        return _waiting(self.peer) == before > 10_000

    def write(self) -> None:
        block = bytes(range(250)) * 4
        for _ in range(self.total // 1000):
            self.client.sendall(block)

    def observe(self) -> object:
        nodelay = self.client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        head = self.peer.recv(300, socket.MSG_PEEK)
        return self.client.recv(99, socket.MSG_PEEK), head[:4], self.writer.is_alive(), nodelay, self.client.getsockname()

    def perturb(self) -> None:
        self.peer.recv(1)

    def works(self) -> None:
        data = bytearray()
        self.peer.settimeout(20)
        while len(data) < self.total:
            part = self.peer.recv(1 << 20)
            assert part, f"the stream ended after {len(data)} bytes"
            data += part
        assert bytes(data) == bytes(range(250)) * (self.total // 250), "bytes were lost, doubled or exchanged"
        self.writer.join(20)
        assert self.client.recv(99) == b"hello from the server"
        self.client.close()
        assert self.peer.recv(1) == b"", "the end of the stream is not seen"


class HalfClosedTcp(Probe):
    """A TCP connection that one end has closed for writing."""

    needs = _NEEDS

    def __init__(self) -> None:
        self.server, self.client, self.peer = _connection(socket.AF_INET, "127.0.0.1")
        self.client.sendall(b"last")
        self.client.shutdown(socket.SHUT_WR)
        wait_until(lambda: _waiting(self.peer) == 4, "the last bytes have come")

    def observe(self) -> object:
        return self.peer.recv(99, socket.MSG_PEEK)

    def perturb(self) -> None:
        self.peer.recv(2)

    def works(self) -> None:
        assert self.peer.recv(99) == b"last"
        assert self.peer.recv(99) == b""
        self.peer.sendall(b"answer")
        assert self.client.recv(99) == b"answer"


class Udp(Probe):
    """UDP sockets, with datagrams that nobody has read."""

    needs = _NEEDS

    def __init__(self) -> None:
        self.receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.receiver.bind(("127.0.0.1", 9123))
        self.sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        self.sender.connect(("127.0.0.1", 9123))

    def observe(self) -> object:
        return self.receiver.getsockname(), self.sender.getpeername(), self.sender.getsockname()

    def perturb(self) -> None:
        self.sender.connect(("127.0.0.1", 9))

    def works(self) -> None:
        self.receiver.settimeout(10)
        self.sender.send(b"after")
        data, address = self.receiver.recvfrom(99)
        assert data == b"after"
        self.receiver.sendto(b"answer", address)
        assert self.sender.recv(99) == b"answer"


class Ipv6(Probe):
    """IPv6: a listening server, an established connection, UDP."""

    needs = _NEEDS

    def __init__(self) -> None:
        self.server, self.client, self.peer = _connection(socket.AF_INET6, "::1")
        self.client.sendall(b"six")
        self.udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        self.udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.udp.bind(("::1", 9124))

    def observe(self) -> object:
        wait_until(lambda: _waiting(self.peer) >= 1, "the bytes have come")
        v6only = self.udp.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return self.peer.recv(99, socket.MSG_PEEK), self.client.getsockname(), self.udp.getsockname(), v6only

    def perturb(self) -> None:
        self.peer.recv(2)

    def works(self) -> None:
        self.peer.sendall(b"back")
        assert self.client.recv(9) == b"back"
        with socket.create_connection(self.server.getsockname()[:2], 10) as late:
            late.sendall(b"late")
            assert self.server.accept()[0].recv(9) == b"late"
        self.udp.settimeout(10)
        self.udp.sendto(b"u", ("::1", 9124))
        assert self.udp.recv(9) == b"u"


class AbstractSockets(Probe):
    """Unix sockets in the abstract namespace: listening, connected, datagram."""

    needs = _NEEDS

    def __init__(self) -> None:
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind("\0fidelity stream")
        self.server.listen()
        self.client = socket.socket(socket.AF_UNIX)
        self.client.connect("\0fidelity stream")
        self.peer = self.server.accept()[0]
        self.client.sendall(b"abstract")
        self.datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagram.bind(b"\0fidelity \xff\x00dgram")

    def observe(self) -> object:
        return self.peer.recv(99, socket.MSG_PEEK), self.server.getsockname(), self.datagram.getsockname()

    def perturb(self) -> None:
        self.peer.recv(3)

    def works(self) -> None:
        self.peer.sendall(b"back")
        assert self.client.recv(9) == b"back"
        with socket.socket(socket.AF_UNIX) as late:
            late.connect("\0fidelity stream")
            late.sendall(b"late")
            assert self.server.accept()[0].recv(9) == b"late"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"d", b"\0fidelity \xff\x00dgram")
            assert self.datagram.recv(9) == b"d"


class KeepAliveClients(Probe):
    """An HTTP server that holds keep-alive clients, each in the middle of its session."""

    needs = _NEEDS

    def __init__(self) -> None:
        import http.client
        import http.server

        counts: dict[str, int] = {}

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                counts[self.path] = counts.get(self.path, 0) + 1
                body = f"{self.path} {counts[self.path]}".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self.counts = counts
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 8124), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.clients = [http.client.HTTPConnection("127.0.0.1", 8124, timeout=15) for _ in range(5)]
        for number, client in enumerate(self.clients):
            self.get(client, f"/{number}")
        self.socks = [client.sock for client in self.clients]

    def get(self, client: object, path: str) -> str:
        client.request("GET", path)  # type: ignore[attr-defined]
        return str(client.getresponse().read().decode())  # type: ignore[attr-defined]

    def observe(self) -> object:
        same = [client.sock is sock for client, sock in zip(self.clients, self.socks, strict=True)]
        return dict(self.counts), same, [client.sock.getsockname() for client in self.clients]

    def perturb(self) -> None:
        self.get(self.clients[0], "/0")

    def works(self) -> None:
        for number, client in enumerate(self.clients):
            assert self.get(client, f"/{number}") == f"/{number} 2"
        assert [client.sock for client in self.clients] == self.socks, "a client had to connect again"


class SamePort(Probe):
    """The same port in every fork: each has its own, and nobody gets another's requests."""

    needs = _NEEDS

    def __init__(self) -> None:
        self.server = socket.socket()
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.server.bind(("127.0.0.1", 80))
        self.server.listen()
        self.word = b"first"
        self.served = 0
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            with self.server.accept()[0] as client:
                self.served += 1
                client.sendall(self.word)

    def _get(self) -> bytes:
        with socket.create_connection(("127.0.0.1", 80), 10) as client:
            return client.recv(99)

    def observe(self) -> object:
        return self._get()

    def perturb(self) -> None:
        self.word = b"other"

    def works(self) -> None:
        before = self.served
        assert self._get() == self.word
        assert self.served == before + 1


class LocalPorts(Probe):
    """A connection through the environment's own address, and a raw view of its interfaces."""

    needs = _NEEDS

    def __init__(self) -> None:
        self.server, self.client, self.peer = _connection(socket.AF_INET, "127.0.0.5")
        self.name = socket.gethostname()

    def observe(self) -> object:
        with open("/proc/net/dev") as lines:
            interfaces = sorted(line.split(":")[0].strip() for line in lines if ":" in line)
        return interfaces, socket.gethostname() == self.name, self.client.getpeername(), os.path.exists("/sys/class/net/lo")

    def perturb(self) -> None:
        self.client.close()

    def works(self) -> None:
        self.client.sendall(b"x")
        assert self.peer.recv(1) == b"x"
