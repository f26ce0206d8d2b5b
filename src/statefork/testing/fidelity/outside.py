"""A machine outside: a network namespace of this host that environments reach through their way out, with a TCP server in it.

The server writes down what each connection says and how it ends, so that a case can ask what the other side has seen.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from statefork.testing.fidelity.subject import CaseFailed

__all__ = ["Outside", "outside"]

PORT = 7007
_SERVER = """
import json, socket, sys, threading
server = socket.socket()
server.bind(("0.0.0.0", int(sys.argv[1])))
server.listen()
print(json.dumps(["listening"]), flush=True)

def serve(client, number):
    try:
        while True:
            data = client.recv(4096)
            if not data:
                print(json.dumps([number, "end"]), flush=True)
                return
            print(json.dumps([number, "data", data.decode()]), flush=True)
            client.sendall(b"seen " + data)
    except OSError as error:
        print(json.dumps([number, type(error).__name__]), flush=True)

number = 0
while True:
    client, address = server.accept()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    number += 1
    threading.Thread(target=serve, args=(client, number), daemon=True).start()
"""


@dataclass(frozen=True, slots=True)
class Outside:
    address: str
    port: int
    log: str

    def events(self) -> list[list[object]]:
        with open(self.log) as lines:
            return [json.loads(line) for line in lines]

    def until(self, what: str, *wanted: list[object], timeout: float = 20) -> None:
        """Wait for any of these events."""
        deadline = time.monotonic() + timeout
        while not any(event in wanted for event in self.events()):
            if time.monotonic() > deadline:
                raise CaseFailed(f"outside never saw {what}; it saw {self.events()}")
            time.sleep(0.01)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CaseFailed(f"cannot make a machine outside: ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def outside(log: str) -> Iterator[Outside]:
    """Needs root and iproute2. The addresses are of a range that is set aside for documentation."""
    mark = secrets.token_hex(3)
    name, link = f"fidelity-{mark}", f"fid{mark}"
    block = secrets.randbelow(60) * 4
    here, there = f"203.0.113.{block + 1}", f"203.0.113.{block + 2}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("addr", "add", f"{here}/30", "dev", link)
        _ip("link", "set", link, "up")
        for words in (
            ["addr", "add", f"{there}/30", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
            ["route", "add", "default", "via", here],
        ):
            _ip("-n", name, *words)
        with open(log, "w") as out:
            server = subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-c", _SERVER, str(PORT)],
                stdin=subprocess.DEVNULL,
                stdout=out,
            )
        try:
            found = Outside(there, PORT, log)
            found.until("its own server", ["listening"])
            yield found
        finally:
            server.kill()
            server.wait()
    finally:
        _ip("netns", "del", name)
