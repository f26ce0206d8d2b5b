"""Programs that are driven through their own libraries."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from typing import Any

from .probe import Probe, wait_until

_NEEDS = ("files", "processes", "memory", "network")


class SqliteWal(Probe):
    """SQLite in WAL mode with an open writer and a reader that sees an older state."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        path = f"{self.directory}/data.db"
        self.writer = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.writer.execute("pragma journal_mode=wal")
        self.writer.execute("create table t (n integer)")
        self.writer.execute("insert into t values (1)")
        self.reader = sqlite3.connect(path, isolation_level=None)
        self.reader.execute("begin")
        self.reader.execute("select count(*) from t").fetchone()
        self.writer.execute("insert into t values (2)")
        self.writer.execute("begin immediate")
        self.writer.execute("insert into t values (3)")
        self.path = path

    def observe(self) -> object:
        """Another process tries to write: SQLite asks the kernel's locks only between processes."""
        code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('begin immediate')"
        tried = subprocess.run([sys.executable, "-c", code, self.path], capture_output=True, text=True, check=False)
        counts = [c.execute("select count(*) from t").fetchone()[0] for c in (self.writer, self.reader)]
        return counts, "database is locked" in tried.stderr

    def perturb(self) -> None:
        self.writer.execute("rollback")

    def works(self) -> None:
        self.writer.execute("commit")
        self.reader.execute("commit")
        assert self.reader.execute("select group_concat(n) from t").fetchone() == ("1,2,3",)
        assert self.writer.execute("pragma integrity_check").fetchone() == ("ok",)
        self.writer.execute("pragma wal_checkpoint(truncate)")


class SqliteRollback(Probe):
    """SQLite in its default journal mode: it refuses to write when the file's inode number is not what it was."""

    needs = ("files", "processes", "memory", "inodes")

    def __init__(self) -> None:
        self.db = sqlite3.connect(f"{self.directory}/data.db", isolation_level=None, check_same_thread=False)
        self.db.execute("create table t (n integer)")
        self.db.execute("insert into t values (1)")

    def observe(self) -> object:
        return self.db.execute("select group_concat(n) from t").fetchone()

    def perturb(self) -> None:
        self.db.execute("delete from t")

    def works(self) -> None:
        self.db.execute("insert into t values (2)")
        assert self.observe() == ("1,2",)


class JupyterKernel(Probe):
    """A Jupyter kernel, driven through its client, with variables and an open iterator."""

    needs = _NEEDS
    modules = ("ipykernel", "jupyter_client")
    packages = ("python3-ipykernel", "python3-jupyter-client")

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        os.environ.update(HOME=self.directory, IPYTHONDIR=self.directory, JUPYTER_RUNTIME_DIR=self.directory)
        # its history is an SQLite file in rollback mode: see SqliteRollback
        history = ["--HistoryManager.hist_file=:memory:"]
        self.manager, self.client = start_new_kernel(kernel_name="python3", startup_timeout=60, extra_arguments=history)
        self.run("import itertools; values = itertools.count(5); first = next(values); data = {'a': [first]}")

    def run(self, code: str) -> str:
        said: list[str] = []

        def output(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                said.append(message["content"]["text"])

        reply = self.client.execute_interactive(code, output_hook=output, timeout=30)
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(said).strip()

    def observe(self) -> object:
        return self.run("print(data, len(In))").rsplit(" ", 1)[0]

    def perturb(self) -> None:
        self.run("data['a'].append(next(values))")

    def works(self) -> None:
        assert self.run("print(next(values))") == "6"
        assert self.manager.is_alive()


class Numpy(Probe):
    """A multi-threaded numpy program in the middle of its work."""

    modules = ("numpy",)
    packages = ("python3-numpy",)

    def __init__(self) -> None:
        import numpy

        self.numpy = numpy
        self.random = numpy.random.default_rng(7)
        self.matrix = self.random.random((400, 400))
        self.rounds = [0, 0]
        self.results: list[list[float]] = [[], []]
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.work, args=(n,), daemon=True) for n in range(2)]
        for thread in self.threads:
            thread.start()
        wait_until(lambda: min(self.rounds) >= 2, "both threads work")

    def work(self, number: int) -> None:
        expected = float((self.matrix @ self.matrix).trace())
        while not self.stop.is_set():
            self.results[number].append(float((self.matrix @ self.matrix).trace()) - expected)
            self.rounds[number] += 1
            self.stop.wait(0.02)

    def observe(self) -> object:
        digest = float(self.matrix.sum()), self.random.bit_generator.state["state"]["state"]
        return digest, [thread.is_alive() for thread in self.threads], any(abs(r) > 1e-6 for results in self.results for r in results)

    def perturb(self) -> None:
        self.matrix[3, 3] += 1

    def works(self) -> None:
        before = list(self.rounds)
        wait_until(lambda: all(now > then for now, then in zip(self.rounds, before, strict=True)), "both threads go on")
        assert self.random.random() == self.numpy.random.default_rng(7).random((400, 400, 2)).flat[160_000]


class Chromium(Probe):
    """Headless Chromium with a page whose JavaScript counter is running."""

    needs = _NEEDS
    programs = ("chromium",)
    packages = ("chromium",)
    page = "<title>0</title><script>n = 0; kept = {a: [1]}; setInterval(() => { document.title = ++n }, 20)</script>"

    def __init__(self) -> None:
        """A browser that does not come up on a busy machine is started again: how it starts is not what is judged."""
        for _ in range(3):
            self._start()
            try:
                wait_until(self._counts, "the counter runs", 35)
                return
            except AssertionError:
                os.killpg(self.browser.pid, signal.SIGKILL)
                self.browser.wait()
                shutil.rmtree(f"{self.directory}/profile", ignore_errors=True)
        raise AssertionError("the browser never came up")

    def _start(self) -> None:
        url = "data:text/html;base64," + base64.b64encode(self.page.encode()).decode()
        self.browser = subprocess.Popen(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=9333", "--no-first-run",
             "--disable-dev-shm-usage", f"--user-data-dir={self.directory}/profile", url],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def _counts(self) -> bool:
        try:
            return bool(self._page()) and int(self._value("n")) > 3
        except (OSError, ValueError, IndexError, KeyError):
            return False

    def _page(self) -> str:
        try:
            with urllib.request.urlopen("http://127.0.0.1:9333/json", timeout=5) as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
        except OSError:
            return ""
        return pages[0]["webSocketDebuggerUrl"].partition("9333")[2] if pages else ""

    def _value(self, expression: str) -> str:
        """Evaluate in the page, over the DevTools socket: one masked frame there, one plain frame back."""
        with socket.create_connection(("127.0.0.1", 9333), 20) as sock:
            head = f"GET {self._page()} HTTP/1.1\r\nHost: 127.0.0.1:9333\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            key = base64.b64encode(os.urandom(16)).decode()
            sock.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
            stream = sock.makefile("rb")
            while stream.readline().strip():
                pass
            call = {"id": 1, "method": "Runtime.evaluate", "params": {"expression": f"JSON.stringify({expression})"}}
            body = json.dumps(call).encode()
            sock.sendall(b"\x81\xfe" + len(body).to_bytes(2, "big") + bytes(4) + body)
            size = stream.read(2)[1] & 127
            size = int.from_bytes(stream.read(2), "big") if size == 126 else size
            return str(json.loads(stream.read(size))["result"]["result"].get("value"))

    def observe(self) -> object:
        return self._value("kept")

    def perturb(self) -> None:
        self._value("kept.a.push(2)")

    def works(self) -> None:
        before = int(self._value("n"))
        wait_until(lambda: int(self._value("n")) > before, "the counter goes on")
        assert self._value("document.createElement('p').tagName") == '"P"'
