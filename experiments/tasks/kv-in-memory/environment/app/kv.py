#!/usr/bin/python3
"""A key-value server that keeps everything in memory."""

import os
import socketserver
import threading

values = {}
scaled = []


def answer(words):
    match words:
        case ["ping"]:
            return "pong"
        case ["load", path] if os.path.exists(path):
            with open(path) as file:
                values.update((key, int(value)) for key, value in map(str.split, file))
            os.remove(path)
            return f"{len(values)} keys"
        case ["scale", factor] if not scaled:
            scaled.append(int(factor))
            values.update((key, value * scaled[0]) for key, value in values.items())
            return "scaled"
        case ["drop", key] if key in values:
            return f"dropped {values.pop(key)}"
        case ["get", key] if key in values:
            return str(values[key])
        case ["sum"]:
            return str(sum(values.values()))
    return "error: no such command, key or file, or done before"


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            with lock:
                said = answer(line.decode().split())
            self.wfile.write((said + "\n").encode())


lock = threading.Lock()
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer.daemon_threads = True
with socketserver.ThreadingTCPServer(("127.0.0.1", 7001), Handler) as server:
    with open("var/starts", "a") as file:
        file.write("started\n")
    server.serve_forever()
