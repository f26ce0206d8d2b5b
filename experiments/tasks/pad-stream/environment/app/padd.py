#!/usr/bin/python3
"""Gives out pads of a stream, each once."""

import os
import socketserver
import threading

import random

with open("seed") as file:
    stream = random.Random(int(file.read()))
os.remove("seed")
given = 0


def answer(words):
    global given
    match words:
        case ["ping"]:
            return "pong"
        case ["given"]:
            return str(given)
        case ["next"]:
            given += 1
            return bytes(stream.randrange(256) for _ in range(8)).hex()
    return "error: no such command"


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            with lock:
                said = answer(line.decode().split())
            self.wfile.write((said + "\n").encode())


lock = threading.Lock()
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer.daemon_threads = True
with socketserver.ThreadingTCPServer(("127.0.0.1", 7020), Handler) as server:
    with open("var/starts", "a") as file:
        file.write("started\n")
    server.serve_forever()
