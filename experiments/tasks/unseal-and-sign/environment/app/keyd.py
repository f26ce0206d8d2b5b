#!/usr/bin/python3
"""Holds a signing key in memory."""

import os
import socketserver
import threading

import hashlib
import hmac

given = []
wanted = ["a1f0", "77be", "0c2d"]


def answer(words):
    match words:
        case ["ping"]:
            return "pong"
        case ["unseal", share] if len(given) < 3:
            if share != wanted[len(given)]:
                given.clear()
                return "error: wrong share; sealed"
            given.append(share)
            return f"{len(given)} of 3"
        case ["seal"]:
            given.clear()
            return "sealed"
        case ["shares"]:
            return str(len(given))
        case ["sign", path] if len(given) == 3:
            with open(path, "rb") as file:
                return hmac.new("".join(given).encode(), file.read(), hashlib.sha256).hexdigest()
    return "error: sealed, or no such command"


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            with lock:
                said = answer(line.decode().split())
            self.wfile.write((said + "\n").encode())


lock = threading.Lock()
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer.daemon_threads = True
with socketserver.ThreadingTCPServer(("127.0.0.1", 7014), Handler) as server:
    with open("var/starts", "a") as file:
        file.write("started\n")
    server.serve_forever()
