"""Evaluate an expression in the page of a Chromium that listens on port 9222, and print its JSON.

page.py EXPRESSION

DevTools speaks WebSocket: one masked frame there, one plain frame back; the standard library is enough for that.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
import urllib.request

PORT = 9222


def main() -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/json", timeout=20) as answer:
        pages = [one for one in json.load(answer) if one["type"] == "page"]
    path = pages[0]["webSocketDebuggerUrl"].partition(str(PORT))[2]
    with socket.create_connection(("127.0.0.1", PORT), 20) as connection:
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{PORT}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        connection.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        stream = connection.makefile("rb")
        while stream.readline().strip():
            pass
        call = {"id": 1, "method": "Runtime.evaluate", "params": {"expression": f"JSON.stringify({sys.argv[1]})"}}
        body = json.dumps(call).encode()
        connection.sendall(b"\x81\xfe" + len(body).to_bytes(2, "big") + bytes(4) + body)
        size = stream.read(2)[1] & 127
        size = int.from_bytes(stream.read(2), "big") if size == 126 else size
        result = json.loads(stream.read(size))["result"]["result"]
        print(result.get("value"))


if __name__ == "__main__":
    main()
