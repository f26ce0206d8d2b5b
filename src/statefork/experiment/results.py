"""Results as JSON lines: settings first, then one line for each trial, written when it ends. A run goes on where another was ended.

    {"event": "settings", "think_seconds": 0.5, ...}          the same for all trials of a file
    {"event": "run", "machine": {...}, "restores": {...}}     each time that somebody runs or goes on
    {"event": "trial", "task": ..., "way": ..., "backend": ..., "seed": 0, "solved": true, "seconds": 4.2, ...}
    {"event": "load", "load_before": ..., "load_mean": ...}   what else the machine did, when a run ends

A torn last line, of a process that was killed, is cut off; its trial is played again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from statefork.errors import NotFound, StoreError, UsageError
from statefork.experiment.trials import Settings, Trial

__all__ = ["FILE", "Recorder", "Results", "read_results"]

FILE = "results.jsonl"


@dataclass(slots=True)
class Results:
    settings: Settings
    runs: list[dict[str, Any]] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    @property
    def keys(self) -> set[tuple[str, str, str, int]]:
        return {trial.key for trial in self.trials}


def read_results(directory: Path) -> Results:
    path = directory / FILE
    if not path.exists():
        raise NotFound(
            f"there are no results in {directory}; `statefork experiment run --results {directory}` makes some"
        )
    found: Results | None = None
    names = {one.name for one in fields(Trial)}
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            event = json.loads(line)
            kind = event.pop("event")
            if kind == "settings":
                found = Results(Settings(**event))
            elif found is None:
                raise StoreError(f"{path}: its first line must hold the settings")
            elif kind == "trial":
                found.trials.append(Trial(**{name: value for name, value in event.items() if name in names}))
            elif kind in ("run", "load"):
                (found.runs if kind == "run" else found.loads).append(event)
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path}: line {number} is no result: {error}") from error
    if found is None:
        raise StoreError(f"{path} is empty; remove it")
    return found


class Recorder:
    """Add to the results of a directory, or begin them; from any thread."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE
        self._lock = threading.Lock()
        begun = path.exists() and path.stat().st_size > 0
        if begun:
            _cut_torn_line(path)
            self.known = read_results(directory)
            if self.known.settings != settings:
                raise UsageError(
                    f"{path} was made with {self.known.settings}, not with {settings}: choose another --results directory"
                )
        else:
            self.known = Results(settings)
        self._file = path.open("a", encoding="utf-8")
        if not begun:
            self.write("settings", settings.to_json())

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def trial(self, trial: Trial) -> None:
        self.write("trial", trial.to_json())

    def write(self, event: str, facts: Mapping[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps({"event": event, **facts}) + "\n")
            self._file.flush()


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
