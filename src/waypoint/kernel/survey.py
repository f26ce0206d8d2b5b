"""What a big layer looks like and takes, found out by a program of its own beside whatever else is going on."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from waypoint.kernel import tools, trees

__all__ = ["Survey", "Surveyed"]


@dataclass(frozen=True, slots=True)
class Surveyed:
    digest: str
    """As `trees.digest` says it."""
    size_bytes: int


class Survey:
    """Begun now, asked later; the layer must not change meanwhile."""

    def __init__(self, layer: Path, skip: str) -> None:
        self._layer = layer
        self._skip = skip
        self._told = os.memfd_create("survey", os.MFD_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [str(tools.survey_path()), str(layer), skip], stdin=subprocess.DEVNULL, stdout=self._told, env={}
            )
        except BaseException:
            os.close(self._told)
            raise

    def result(self) -> Surveyed:
        """Once."""
        try:
            if self._process.wait() != 0:  # a name longer than it can hold, or no memory: it can be had more slowly
                return Surveyed(trees.digest(self._layer, self._skip), trees.allocated_bytes(self._layer))
            with open(self._told, "rb", closefd=False) as told:
                told.seek(0)
                listing = told.read()
            (size_bytes,) = struct.unpack("=Q", listing[-8:])
            return Surveyed(hashlib.blake2b(memoryview(listing)[:-8], digest_size=16).hexdigest(), size_bytes)
        finally:
            os.close(self._told)

    def cancel(self) -> None:
        """Nobody will ask."""
        self._process.kill()
        self._process.wait()
        os.close(self._told)
