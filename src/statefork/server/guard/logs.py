"""Structured logs: one JSON object a line, with the request's id on every line that belongs to a request."""

from __future__ import annotations

import json
import logging
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Any

from statefork.server.guard.redact import redacted

__all__ = ["JsonFormatter", "configure_logs", "request_id_var"]

request_id_var: ContextVar[str] = ContextVar("statefork_request_id", default="")
"""Copied into worker threads along with the rest of the context."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class JsonFormatter(logging.Formatter):
    """What is passed as `extra` becomes members of the object; tokens are blotted out everywhere."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := request_id_var.get():
            line["request_id"] = request_id
        line.update((name, value) for name, value in vars(record).items() if name not in _STANDARD)
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return redacted(json.dumps(line, default=str))


def configure_logs(stream: IO[str], level: str = "info") -> None:
    """For the daemon's own process only: takes the root logger over, uvicorn's included."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in ("httpx", "httpcore", "mcp"):  # a line per request that we send ourselves
        logging.getLogger(name).setLevel("WARNING")
    logging.getLogger("uvicorn.access").disabled = True  # the guard writes its own line per request
