"""A collector of OpenTelemetry spans: keeps what is sent to it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


@contextmanager
def collecting() -> Iterator[tuple[str, list[bytes]]]:
    """Its address, and the bodies that it got; all of them when the block has ended."""
    got: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{collector.server_port}", got
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
