#!/usr/bin/python3
"""A queue of jobs in memory."""

import os
import socketserver
import threading

queue = []
running = []
results = []
paused = False


def answer(words):
    global paused
    match words:
        case ["ping"]:
            return "pong"
        case ["submit", name] if os.path.exists(f"batches/{name}"):
            with open(f"batches/{name}") as file:
                queue.extend(int(line) for line in file)
            os.remove(f"batches/{name}")
            return f"{len(queue)} queued"
        case ["take"] if queue and not paused:
            running.append(queue.pop(0))
            return f"job {running[0]}"
        case ["take"]:
            return "nothing"
        case ["done", result]:
            running.clear()
            results.append(result)
            return "ok"
        case ["left"]:
            return str(len(queue) + len(running))
        case ["count"]:
            return str(len(results))
        case ["pause"]:
            paused = True
            return "paused"
        case ["paused"]:
            return str(paused)
        case ["resume"]:
            paused = False
            return "resumed"
        case ["reverse"] if paused:
            queue.reverse()
            return "reversed"
        case ["drain"] if not queue and not running and not os.path.exists("var/results"):
            with open("var/results", "x") as file:
                file.write(" ".join(results) + "\n")
            return "drained"
        case ["drop"]:
            dropped = len(queue)
            queue.clear()
            return f"dropped {dropped}"
    return "error: not possible now"


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            with lock:
                said = answer(line.decode().split())
            self.wfile.write((said + "\n").encode())


lock = threading.Lock()
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer.daemon_threads = True
with socketserver.ThreadingTCPServer(("127.0.0.1", 7024), Handler) as server:
    with open("var/starts", "a") as file:
        file.write("started\n")
    server.serve_forever()
