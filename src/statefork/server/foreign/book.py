"""Which attended programs run in which environment, found by process id or tag; and found again where they come back.

A fork, a restore and a new environment from a snapshot bring programs along that this process never started there, and so
does its own start after an earlier one's end. What lived for a moment is remembered by tree, with the number under which its
environment knows it; where such a number turns up again, and is the same program, it is taken up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from statefork.errors import NotFound, WaypointError
from statefork.server.foreign.attendant import Attended, Listener, Wish, start
from statefork.server.service.held import Held
from statefork.server.service.service import Service

__all__ = ["Book"]

log = logging.getLogger(__name__)

_REMEMBERED_AFTER = 0.3
_MOST_PER_TREE = 64
_TAKEN_UP_SECONDS = 10.0


@dataclass(slots=True)
class _Shelf:
    place: str = ""
    """What was live when it was last looked for programs that came along."""
    programs: dict[str, Attended] = field(default_factory=dict)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Book:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._shelves: dict[str, _Shelf] = {}
        self._path: Path = service.settings.directory / "attended.json"
        self._trees: dict[str, OrderedDict[str, dict[str, Any]]] = {}
        self._pids = 1 << 20
        with contextlib.suppress(OSError, ValueError):
            for tree, entries in json.loads(self._path.read_text()).items():
                self._trees[tree] = OrderedDict(entries)

    async def start(self, held: Held, wish: Wish, *listeners: Listener) -> Attended:
        shelf = await self._looked(held)
        made = await start(self.service, held, wish, *listeners)
        self._put(held, shelf, made)
        delay = _REMEMBERED_AFTER if wish.size is None else 0.0  # who opens a terminal means to stay
        asyncio.get_running_loop().call_later(delay, self._remember, held, made)
        return made

    async def running(self, held: Held) -> list[Attended]:
        shelf = await self._looked(held)
        return [one for one in shelf.programs.values() if one.alive and _is_in(one, shelf.place)]

    async def find(self, held: Held, *, pid: int | None = None, tag: str | None = None) -> Attended:
        for one in await self.running(held):
            if (pid is not None and one.pid == pid) or (tag is not None and one.wish.tag == tag):
                return one
        what = f"pid {pid}" if pid is not None else f"tag {tag!r}"
        raise NotFound(f"process with {what} not found")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _put(self, held: Held, shelf: _Shelf, made: Attended) -> None:
        shelf.programs[made.name] = made
        if not made.pid:  # taken up from its middle: the number that it said at its beginning is forgotten
            self._pids += 1
            made.pid = self._pids

        async def gone() -> None:
            await made.over.wait()
            if shelf.programs.get(made.name) is made:  # in another state it may have been taken up meanwhile
                del shelf.programs[made.name]

        asyncio.ensure_future(gone())  # noqa: RUF006  it ends with the program

    async def _looked(self, held: Held) -> _Shelf:
        """Programs that came with a state, once for each that it stands on."""
        if len(self._shelves) > 2 * len(self.service.held) + 64:
            self._shelves = {key: one for key, one in self._shelves.items() if key in self.service.held}
        shelf = self._shelves.setdefault(held.id, _Shelf())
        async with self.service.use(held) as live:
            place = live.place
        if shelf.place == place:
            return shelf
        async with shelf.looking:
            if shelf.place != place:
                known: Mapping[str, dict[str, Any]] = self._trees.get(held.row.tree, {})
                here = {name for name, one in shelf.programs.items() if _is_in(one, place)}
                entries = [(name, one) for name, one in known.items() if name not in here]
                await asyncio.gather(*(self._take_up(held, shelf, name, one) for name, one in entries))
                shelf.place = place
        return shelf

    async def _take_up(self, held: Held, shelf: _Shelf, name: str, entry: dict[str, Any]) -> None:
        wish = _wish(entry["wish"])
        try:
            command = await self.service.running.take_up(held, entry["number"])
            command.dozes = wish.size is not None
            found = Attended(held, command, name, wish)
            async with asyncio.timeout(_TAKEN_UP_SECONDS):
                await found.began()
        except (WaypointError, TimeoutError) as error:
            log.debug("environment %s: program %s did not come along: %s", held.id, name, error)
            return
        found.pid = found.pid or int(entry["pid"])
        if found.alive:
            self._put(held, shelf, found)

    def _remember(self, held: Held, made: Attended) -> None:
        number = made.command.number
        if not made.alive or number is None or held.gone or self.service.ending:
            return
        entries = self._trees.setdefault(held.row.tree, OrderedDict())
        entries[made.name] = {"number": number, "pid": made.pid, "wish": asdict(made.wish)}
        while len(entries) > _MOST_PER_TREE:
            entries.popitem(last=False)
        for tree in [key for key in self._trees if key not in self.service.trees]:
            del self._trees[tree]
        text = json.dumps(self._trees)
        self.service.books.start(lambda: self._write(text))

    def _write(self, text: str) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_text(text)
        fresh.replace(self._path)


def _is_in(one: Attended, place: str) -> bool:
    """One that runs in what was live before a restore may not have heard yet that it has ended."""
    return one.command.place in ("", place)


def _wish(values: dict[str, Any]) -> Wish:
    size = values["size"]
    return Wish(**{**values, "argv": tuple(values["argv"]), "size": tuple(size) if size else None})
