"""Disks of a QEMU machine: a read-only root image at the bottom, qcow2 files over it, the top one being written to.

What lies over what is told to QEMU by us and not read from the files: they hold no path, so that they can be moved, and
a blank one is the same for all and is copied without starting a program.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statefork.errors import DiskFull, KernelError
from waypoint.kernel.programs import run_program

__all__ = ["DEEPEST", "blank", "flatten", "node"]

DEEPEST = 24
"""Every read looks through the layers, and each costs two descriptors: a snapshot of a deeper chain is made flat."""

_TIMEOUT = 600.0
_blanks: dict[int, bytes] = {}
_blanks_lock = threading.Lock()


def node(disks: Sequence[Path], name: str, *, read_only: bool = False, shared: bool = False) -> dict[str, Any]:
    """The block node for a chain, its layers called `name`, `name`.1, `name`.2 and so on."""
    found: dict[str, Any] | None = None
    for number, path in reversed(list(enumerate(disks))):
        layer: dict[str, Any] = {
            "driver": "qcow2" if path.suffix == ".qcow2" else "raw",
            "node-name": f"{name}.{number}" if number else name,
            "file": {"driver": "file", "filename": str(path)},
            "read-only": read_only or number > 0,
        }
        if shared:
            layer["force-share"] = True
        if layer["driver"] == "qcow2":
            layer["backing"] = found
        found = layer
    assert found is not None
    return found


def blank(path: Path, size_bytes: int) -> None:
    """A qcow2 file of that size with nothing in it."""
    with _blanks_lock:
        if size_bytes not in _blanks:
            with tempfile.TemporaryDirectory(prefix="statefork-disk-") as scratch:
                made = Path(scratch, "blank.qcow2")
                argv = ["qemu-img", "create", "-q", "-f", "qcow2", str(made), str(size_bytes)]
                run_program(argv, timeout=60).check("making a disk")
                _blanks[size_bytes] = made.read_bytes()
    path.write_bytes(_blanks[size_bytes])


def size_of(disks: Sequence[Path]) -> int:
    """As the guest sees it."""
    bottom = disks[-1]
    if bottom.suffix != ".qcow2":
        return bottom.stat().st_size
    with open(bottom, "rb") as file:
        file.seek(24)  # the header's field `size`, big-endian
        return int.from_bytes(file.read(8), "big")


def flatten(disks: Sequence[Path], target: Path) -> None:
    """One file that holds what the whole chain holds. A machine may have it open, if it stands still."""
    source = "json:" + json.dumps(_nameless(node(disks, "x", read_only=True, shared=True)))
    argv = ["qemu-img", "convert", "-U", "-O", "qcow2", source, str(target)]
    done = run_program(argv, timeout=_TIMEOUT)
    if done.exit_code != 0:
        target.unlink(missing_ok=True)
        said = done.stderr.decode(errors="replace").strip()
        if "No space left" in said:
            raise DiskFull(f"copying the machine's disk: {said}; free some space, nothing was lost")
        raise KernelError(f"copying the machine's disk: {said}")


def _nameless(layer: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in layer.items() if key != "node-name"}
    if kept.get("backing") is not None:
        kept["backing"] = _nameless(kept["backing"])
    return kept
