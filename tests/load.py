"""Many clients at once against a daemon: exec, snapshot, fork, restore. No error but 429, nothing left, memory flat.

python tests/load.py --clients 200 --seconds 120
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from daemon import Daemon, running

__all__ = ["Report", "load"]


@dataclass
class Report:
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    errors: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{verb:<10} {self.counts[verb]:>7}  {_spread(times)}" for verb, times in sorted(self.seconds.items())]
        lines.append(f"429: {self.counts['429']}, errors: {len(self.errors)}")
        lines.append("daemon's memory, MiB: " + " ".join(f"{value:.0f}" for value in self.memory_mib))
        return "\n".join([*lines, *self.errors[:10]])


def _spread(times: list[float]) -> str:
    found = sorted(times)
    return "  ".join(f"p{p} {found[min(len(found) - 1, len(found) * p // 100)] * 1000:.1f} ms" for p in (50, 95, 99))


async def load(daemon: Daemon, clients: int, seconds: float) -> Report:
    report = Report()
    transport = httpx.AsyncHTTPTransport(uds=str(daemon.socket), limits=httpx.Limits(max_connections=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://d", timeout=120) as client:
        base = (await client.post("/v1/environments", json={})).json()["id"]
        environments: list[str] = []
        while len(environments) < clients:
            n = min(32, clients - len(environments))
            made = await client.post(f"/v1/environments/{base}/fork", json={"n": n})
            assert made.status_code == 201, made.text
            environments += [one["id"] for one in made.json()["environments"]]
        until = time.monotonic() + seconds
        watching = asyncio.create_task(_watch(daemon, report, until))
        await asyncio.gather(*(_Client(client, report, one, until).run() for one in environments))
        await watching
    return report


async def _watch(daemon: Daemon, report: Report, until: float) -> None:
    step = (until - time.monotonic()) / 8
    while time.monotonic() < until:
        await asyncio.sleep(step)
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        report.memory_mib.append(int(line.split()[1]) / 1024)


class _Client:
    """One of them, with an environment of its own."""

    def __init__(self, client: httpx.AsyncClient, report: Report, environment: str, until: float) -> None:
        self._client, self._report, self._until = client, report, until
        self._path = f"/v1/environments/{environment}"
        self._taken: str | None = None
        self._number = 0

    async def run(self) -> None:
        draw = random.Random(self._path)
        while time.monotonic() < self._until:
            dice = draw.random()
            if dice < 0.86:
                await self._exec()
            elif dice < 0.92:
                done = await self._ask("snapshot", "POST", f"{self._path}/snapshots", 201, json={})
                self._taken = done["id"] if done else self._taken
            elif dice < 0.97:
                await self._fork()
            elif self._taken is not None:
                await self._ask("restore", "POST", f"{self._path}/restore", 200, json={"snapshot": self._taken})

    async def _exec(self) -> None:
        self._number += 1
        done = await self._ask("exec", "POST", f"{self._path}/exec", 200, json={"command": f"echo {self._number}"})
        if done and done["stdout"] != f"{self._number}\n":
            self._report.errors.append(f"exec: {done}")

    async def _fork(self) -> None:
        made = await self._ask("fork", "POST", f"{self._path}/fork", 201, json={"n": 1})
        for one in made["environments"] if made else ():
            path = f"/v1/environments/{one['id']}"
            await self._ask("exec", "POST", f"{path}/exec", 200, json={"command": "true"})
            while await self._ask("delete", "DELETE", path, 204) is None:
                await asyncio.sleep(0.5)

    async def _ask(self, verb: str, method: str, path: str, expect: int, **more: Any) -> Any:
        """What was answered; None when there was no room, or it went wrong (which is noted)."""
        began = time.perf_counter()
        try:
            answer = await self._client.request(method, path, **more)
        except httpx.HTTPError as error:
            self._report.errors.append(f"{verb}: {error!r}")
            return {}
        self._report.seconds[verb].append(time.perf_counter() - began)
        if answer.status_code == 429:
            self._report.counts["429"] += 1
            await asyncio.sleep(float(answer.headers["retry-after"]) * random.random())
            return None
        self._report.counts[verb] += 1
        if answer.status_code != expect:
            self._report.errors.append(f"{verb}: {answer.status_code} {answer.text[:500]}")
            return {}
        return json.loads(answer.content) if answer.content else {"done": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="statefork-load-") as directory, running(Path(directory) / "h") as daemon:
        report = asyncio.run(load(daemon, given.clients, given.seconds))
        print(report)
    print("nothing was left behind")
    sys.exit(1 if report.errors else 0)


if __name__ == "__main__":
    main()
