"""A web stack of five processes over loopback: a front, three workers that hold connections to a store, and the store.

One line in, one line out: `set N` and `get`. What is set lives in the store's memory alone.
"""

import os
import socket
import socketserver
import sys
import time

FRONT, STORE, WORKERS = 8000, 8001, (8002, 8003, 8004)


def connected(port: int) -> "tuple[socket.socket, object]":
    while True:
        try:
            made = socket.create_connection(("127.0.0.1", port))
            return made, made.makefile("rw")
        except OSError:
            time.sleep(0.02)


def serve(port: int, answer: "callable") -> None:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(f"{answer(line.decode().strip())}\n".encode())

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    Server(("127.0.0.1", port), Handler).serve_forever()


def store() -> None:
    kept = {"value": "0"}

    def answer(line: str) -> str:
        if line.startswith("set "):
            kept["value"] = line.split()[1]
        return kept["value"]

    serve(STORE, answer)


def passing_on(port: int, to: "tuple[int, ...]") -> None:
    lines = [connected(target)[1] for target in to]
    turns = iter(range(10**12))

    def answer(line: str) -> str:
        link = lines[next(turns) % len(lines)]
        link.write(f"{line}\n")
        link.flush()
        return link.readline().strip()

    serve(port, answer)


for port in WORKERS:
    if os.fork() == 0:
        passing_on(port, (STORE,))
if os.fork() == 0:
    store()
connected(WORKERS[0]), connected(WORKERS[1]), connected(WORKERS[2])
print("up", flush=True)
sys.stdout.flush()
passing_on(FRONT, WORKERS)
