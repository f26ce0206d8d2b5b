#!/usr/bin/python3
"""A service with sessions in memory; SIGHUP reads its configuration anew."""

import os
import socketserver
import threading

import secrets
import signal

limit = 0
session = None
grants = []
committed = False


def reload(*_):
    global limit
    with open("service.conf") as file:
        limit = int(file.read().partition("=")[2])


def answer(words):
    global session, committed
    match words:
        case ["ping"]:
            return "pong"
        case ["limit"]:
            return str(limit)
        case ["login", "operator"] if not os.path.exists("var/login"):
            open("var/login", "x").close()
            session = secrets.token_hex(8)
            return session
        case ["grant", key, name] if session and key == session and not committed:
            grants.append(f"{name}:{limit}")
            return "granted"
        case ["grant" | "commit", *_] if session and words[1:2] != [session]:
            session = None
            return "error: wrong session; the operator is logged out"
        case ["commit", key] if session and key == session:
            committed = True
            return "committed"
        case ["grants"]:
            return " ".join(grants) if committed else "none"
    return "error: not possible now"


reload()
signal.signal(signal.SIGHUP, reload)
with open("var/pid", "w") as file:
    file.write(str(os.getpid()))


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            with lock:
                said = answer(line.decode().split())
            self.wfile.write((said + "\n").encode())


lock = threading.Lock()
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer.daemon_threads = True
with socketserver.ThreadingTCPServer(("127.0.0.1", 7007), Handler) as server:
    with open("var/starts", "a") as file:
        file.write("started\n")
    server.serve_forever()
