"""Blots out tokens, wherever a log or an audit line would carry one."""

from __future__ import annotations

import re

__all__ = ["redacted"]

_TOKEN = re.compile(r"(sft_[0-9a-f]{4,12})_[A-Za-z0-9_-]{8,}")
_BEARER = re.compile(r"(?i)(bearer\s+)(?!sft_)[^\s\"',;]+")


def redacted(text: str) -> str:
    return _BEARER.sub(r"\1***", _TOKEN.sub(r"\1_***", text))
