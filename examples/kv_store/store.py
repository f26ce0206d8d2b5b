"""A key-value store on a port of the loopback: committed values are in a journal, an open transaction is in memory.

    store.py serve DIRECTORY            listens; what DIRECTORY/journal holds is there again
    store.py set KEY VALUE              ... get KEY, del KEY, keys, begin, commit, rollback, info
    store.py begin, set a 1, commit     several, one after the other

Standard library only, and little of that: it also runs where Debian's python3-minimal is all there is.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

ADDRESS = ("127.0.0.1", 7379)


class Store:
    def __init__(self, journal: Path) -> None:
        self._committed: dict[str, str] = {}
        self._pending: dict[str, str | None] | None = None
        self._requests = 0
        if journal.exists():
            with open(journal) as file:
                for line in file:
                    key, _, value = line.rstrip("\n").partition("\t")
                    self._apply(key, value or None)
        self._journal = open(journal, "a")  # noqa: SIM115  open as long as the store is

    def answer(self, verb: str, words: list[str]) -> str:
        self._requests += 1
        handler = getattr(self, f"do_{verb}", None)
        try:
            return handler(*words) if handler else f"error: no such request: {verb}"
        except TypeError:
            return f"error: {verb} does not take {len(words)} words"

    def do_set(self, key: str, value: str) -> str:
        self._write({key: value})
        return "ok"

    def do_del(self, key: str) -> str:
        self._write({key: None})
        return "ok"

    def do_get(self, key: str) -> str:
        if self._pending is not None and key in self._pending:
            return self._pending[key] or "(nothing)"
        return self._committed.get(key, "(nothing)")

    def do_keys(self) -> str:
        return " ".join(sorted(self._committed)) or "(nothing)"

    def do_begin(self) -> str:
        if self._pending is not None:
            return "error: there is an open transaction"
        self._pending = {}
        return "ok"

    def do_commit(self) -> str:
        pending, self._pending = self._pending, None
        if pending is None:
            return "error: no open transaction"
        self._write(pending)
        return f"{len(pending)} changes"

    def do_rollback(self) -> str:
        pending, self._pending = self._pending, None
        return "error: no open transaction" if pending is None else f"{len(pending)} changes dropped"

    def do_info(self) -> str:
        open_ = (
            "no open transaction" if self._pending is None else f"{len(self._pending)} changes in an open transaction"
        )
        return f"{len(self._committed)} keys, {open_}, {self._requests} requests"

    def _write(self, changes: dict[str, str | None]) -> None:
        if self._pending is not None:
            self._pending.update(changes)
            return
        for key, value in changes.items():
            self._apply(key, value)
            self._journal.write(f"{key}\t{value or ''}\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _apply(self, key: str, value: str | None) -> None:
        if value is None:
            self._committed.pop(key, None)
        else:
            self._committed[key] = value


def serve(directory: str) -> None:
    store = Store(Path(directory) / "journal")
    listening = socket.create_server(ADDRESS)
    while True:
        connection, _ = listening.accept()
        with connection, connection.makefile("r") as lines:
            verb, *words = lines.readline().split() or [""]
            connection.sendall(store.answer(verb, words).encode() + b"\n")


def request(words: list[str]) -> str:
    with socket.create_connection(ADDRESS) as connection, connection.makefile("r") as lines:
        connection.sendall(" ".join(words).encode() + b"\n")
        return lines.readline().rstrip("\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        answers = [request(one.split()) for one in " ".join(sys.argv[1:]).split(",")]
        print(*answers, sep="\n")
        sys.exit(any(answer.startswith("error") for answer in answers))
