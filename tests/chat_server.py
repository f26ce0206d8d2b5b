"""A local server that speaks the chat protocol: POST /v1/chat/completions with tool calls, checked as a real one checks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["ChatServer", "call", "chat_server", "words"]

Answer = dict[str, Any]


def call(name: str, number: str = "call_1", **arguments: Any) -> Answer:
    """A message with one tool call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": number, "type": "function", "function": function}]}


def words(text: str) -> Answer:
    return {"role": "assistant", "content": text}


@dataclass
class ChatServer:
    """`answer` gets the request and gives a message, or (status, headers, body) to refuse with."""

    answer: Callable[[dict[str, Any]], Answer | tuple[int, dict[str, str], str]]
    key: str = "secret"
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, path: str, authorization: str | None, data: bytes) -> tuple[int, dict[str, str], str]:
        if path != "/v1/chat/completions":
            return 404, {}, f"no {path}"
        if authorization != f"Bearer {self.key}":
            return 401, {}, json.dumps({"error": {"message": "Incorrect API key provided"}})
        request = json.loads(data)
        if problem := _problem(request):
            return 400, {}, json.dumps({"error": {"message": problem}})
        with self.lock:
            self.requests.append(request)
            found = self.answer(request)
        if isinstance(found, tuple):
            return found
        reason = "tool_calls" if found.get("tool_calls") else "stop"
        document = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": request["model"]}
        return 200, {}, json.dumps({**document, "choices": [{"index": 0, "message": found, "finish_reason": reason}]})


def _problem(request: dict[str, Any]) -> str:
    """What a strict endpoint refuses: every tool call is followed by its outcome, and every outcome follows its call."""
    if not request.get("model") or not request.get("messages"):
        return "model and messages are required"
    for tool in request.get("tools", ()):
        if tool["type"] != "function" or tool["function"]["parameters"]["type"] != "object":
            return "a tool is not well formed"
    waiting: list[str] = []
    for message in request["messages"]:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return f"a tool message without its call: {message['tool_call_id']}"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return f"tool calls without an answer: {waiting}"
        if message["role"] == "assistant":
            waiting = [one["id"] for one in message.get("tool_calls") or ()]
            for one in message.get("tool_calls") or ():
                json.loads(one["function"]["arguments"])
    return f"tool calls without an answer: {waiting}" if waiting else ""


@contextmanager
def chat_server(answer: Callable[[dict[str, Any]], Any], *, key: str = "secret") -> Iterator[ChatServer]:
    server = ChatServer(answer, key)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            status, headers, text = server.reply(self.path, self.headers.get("Authorization"), data)
            body = text.encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}/v1"
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield server
        http.shutdown()
        thread.join()
