"""What every source of a session's root comes down to: read-only layers and the state that its shell starts in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from waypoint.build.lookup import find
from waypoint.errors import BuildError
from waypoint.model import StartState

__all__ = ["Base", "StartState", "require_shell", "start_of"]

SHELLS = ("/bin/bash", "/bin/sh")


@dataclass(frozen=True, slots=True)
class Base:
    """The lowest layers of a session. They are shared by all sessions over them, and nobody writes to them."""

    kind: str
    """`rootfs`, `tarball`, `image-archive` or `dockerfile`."""
    source: str
    layers: tuple[Path, ...]
    """Top-most first, absolute directories, usable in place as overlay lowers."""
    start: StartState
    digest: str
    """Of what was read: the archive's bytes, the image's configuration; for a directory only its identity."""
    notes: tuple[str, ...] = ()
    """What a user should know: device nodes left out, warnings of the tools."""

    def moved(self, old: Path, new: Path) -> Base:
        """The same base after the caller renamed the directory `old`, which holds the layers, to `new`."""
        return replace(self, layers=tuple(new / layer.relative_to(old) for layer in self.layers))


def start_of(config: Mapping[str, Any]) -> StartState:
    """Read the `config` object of a Docker or OCI image; both spell these five keys alike, and any may be null."""
    env = []
    for item in config.get("Env") or ():
        name, _, value = str(item).partition("=")
        env.append((name, value))
    return StartState(
        env=tuple(env),
        workdir=config.get("WorkingDir") or "/",
        user=config.get("User") or "root",
        argv=tuple(config.get("Entrypoint") or ()) + tuple(config.get("Cmd") or ()),
    )


def require_shell(layers: Sequence[Path], source: str) -> None:
    """A session is a shell on a terminal: a root without one cannot become a session, so say it before it is kept."""
    for shell in SHELLS:
        found = find(layers, shell)
        if found is not None and found.is_file() and found.stat().st_mode & 0o111:
            return
    top = sorted({entry.name for layer in layers for entry in layer.iterdir()})
    hint = f"; at its top it has: {', '.join(top[:12])}" if top else "; it is empty"
    if len(top) == 1 and (layers[0] / top[0]).is_dir():
        hint += f". Is {top[0]}/ the root? Then use that directory, or pack it with `tar -C {top[0]} -cf root.tar .`"
    raise BuildError(f"{source} has no {' or '.join(SHELLS)} that can be executed{hint}")
