"""A Python that keeps its variables, inside an environment: run there by `python3 -c`, so nothing but the standard library,
and nothing newer than Python 3.8.

    serve SOCKET      start a background process that runs code sent to it, in one namespace; print its pid
    ask SOCKET PID    send stdin to it, and print its answer: JSON with logs, result, error

It is a process of the environment like any other: snapshots hold its variables, and forks go on with them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from typing import Any

NAMESPACE: dict[str, Any] = {"__name__": "__main__"}


def run(code: str) -> dict[str, Any]:
    """As a notebook's cell: what is printed, the value of a last line that is an expression, or the error."""
    logs, result, error = io.StringIO(), None, None
    with contextlib.redirect_stdout(logs), contextlib.redirect_stderr(logs):
        try:
            if code.startswith("!"):
                ended = subprocess.run(
                    code[1:], shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
                )
                logs.write(ended.stdout.decode(errors="replace"))
            else:
                body = ast.parse(code)
                last = body.body[-1] if body.body else None
                if isinstance(last, ast.Expr):
                    body.body.pop()
                exec(compile(body, "<code>", "exec"), NAMESPACE)
                if isinstance(last, ast.Expr):
                    value = eval(compile(ast.Expression(last.value), "<code>", "eval"), NAMESPACE)
                    result = None if value is None else repr(value)
        except BaseException as raised:  # noqa: BLE001  also SystemExit and KeyboardInterrupt: the code's, not ours
            value = getattr(raised, "value", None)
            said = value if isinstance(value, str) else str(raised)
            error = {"name": type(raised).__name__, "value": said, "traceback": traceback.format_exc()}
    return {"logs": logs.getvalue(), "result": result, "error": error}


def serve(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    child = os.fork()
    if child:
        print(child)
        return
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    sys.argv = [""]
    while True:
        try:
            connection = listener.accept()[0]
            with connection:
                code = connection.makefile("rb").read().decode()
                connection.sendall(json.dumps(run(code)).encode())
        except (KeyboardInterrupt, OSError):  # whoever asked is gone, or had it ended
            continue


def ask(path: str, pid: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(sys.stdin.buffer.read())
    connection.shutdown(socket.SHUT_WR)
    answer = connection.makefile("rb")
    try:
        sys.stdout.buffer.write(answer.read())
    except KeyboardInterrupt:  # our caller's timeout: it is the code that has to end
        os.kill(int(pid), signal.SIGINT)
        sys.stdout.buffer.write(answer.read())


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1] == "serve" else ask(*sys.argv[2:])
