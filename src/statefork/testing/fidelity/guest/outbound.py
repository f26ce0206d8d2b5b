"""A connection that leads out of the environment."""

from __future__ import annotations

import socket

from .probe import Probe


class Outbound(Probe):
    """A TCP connection to a machine outside."""

    needs = ("processes", "memory", "network")

    def __init__(self) -> None:
        with open(f"{self.directory}/address") as file:
            host, port = file.read().split()
        self.address = (host, int(port))
        self.socket = socket.create_connection(self.address, 15)

    def observe(self) -> object:
        return self.socket.getpeername()

    def perturb(self) -> None:
        self.socket.close()

    def exchange(self) -> str:
        """How the connection answers: with what was sent, or with the reset that a copy of it must get."""
        self.socket.settimeout(20)
        try:
            self.socket.sendall(b"ping")
            answer = self.socket.recv(99)
        except ConnectionResetError:
            return "reset"
        return answer.decode() or "end"

    def again(self) -> str:
        """A new connection."""
        with socket.create_connection(self.address, 15) as fresh:
            fresh.sendall(b"new")
            return fresh.recv(99).decode()
