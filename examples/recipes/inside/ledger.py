"""A small service with a database: version 1. It holds the number of today's requests in memory only.

ledger.py serve DIRECTORY, and then: ledger.py DIRECTORY REQUEST
"""

from __future__ import annotations

import os
import socket
import sqlite3
import sys

SUM = "select coalesce(sum(cents), 0) from entry"


def serve(directory: str) -> None:
    os.chdir(directory)
    database = sqlite3.connect("ledger.db", isolation_level=None)
    database.execute("pragma journal_mode=wal")
    database.execute("create table if not exists entry (id integer primary key, cents integer not null)")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    listener.listen()
    requests = 0
    while True:
        client, _ = listener.accept()
        with client:
            words = client.recv(999).decode().split()
            requests += 1
            try:
                if words[0] == "add":
                    database.execute("insert into entry (cents) values (?)", (int(words[1]),))
                (total,) = database.execute(SUM).fetchone()
                client.sendall(f"{total} cents, request {requests} of process {os.getpid()}\n".encode())
            except sqlite3.Error as error:
                client.sendall(f"error: {error}\n".encode())


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(f"{sys.argv[1]}/socket")
            server.sendall(" ".join(sys.argv[2:]).encode())
            sys.stdout.write(server.makefile().read())
