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
    """Begun now, asked later; the layer must not change meanwhile, but may be moved (`moved.py`) when it is `held`."""

    def __init__(self, layer: Path, skip: str) -> None:
        self._layer = layer
        self._skip = skip
        self._told = os.memfd_create("survey", os.MFD_CLOEXEC)
        self._holds, holding = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [str(tools.survey_path()), str(layer), skip], stdin=holding, stdout=self._told, env={}
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(holding)

    def held(self) -> None:
        """Returns when it has hold of what is in the layer."""
        os.read(self._holds, 1)

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
            self._close()

    def cancel(self) -> None:
        """Nobody will ask."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        os.close(self._told)
        os.close(self._holds)
