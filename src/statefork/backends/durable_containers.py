"""Docker and Podman for a daemon that comes and goes: their containers go on without us, and are found again by name.

The shell of a container hangs on our pipes and ends with us; the next process starts another. So does everything that was
started through it in the foreground. What the container does by itself goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statefork.backends.containers import (
    BASE_REPOSITORY,
    HOME_LABEL,
    KEEP_ALIVE,
    SNAPSHOT_REPOSITORY,
    TREE_LABEL,
    ContainerDriver,
    ContainerLive,
    StoredImage,
    remove_container,
    remove_image,
)
from statefork.backends.program_terminal import ProgramTerminal
from statefork.driver import Captured, Live, Place, Terminal
from statefork.errors import Exists, SessionDead, Unsupported
from statefork.model import Usage

__all__ = ["DurableContainerDriver", "DurableContainerLive"]

_SHELL = "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i"
_CGROUPS = Path("/sys/fs/cgroup")


class DurableContainerLive(ContainerLive):
    def note(self) -> dict[str, Any]:
        return {"container": self.description, "owned": self._owned}

    def signal(self, signal: int, number: int | None) -> None:
        if number is not None:
            raise Unsupported(
                "programs that were started with `run` in a container cannot be signalled; kill them inside"
            )
        self._shell.signal(signal)

    def terminal(self, rows: int, columns: int) -> Terminal:
        """On a shell of its own: the one that `exec` talks to has no terminal."""
        argv = self._tool.argv("exec", "-i", "-t", "-e", "TERM=xterm-256color", self.description, "sh", "-c", _SHELL)
        return ProgramTerminal(argv, rows, columns)

    def usage(self) -> Usage | None:
        """By the container's cgroup. Raises SessionDead when its first process is gone."""
        pid = self._facts()[0]
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            raise SessionDead(f"container {self.description} has ended") from None
        groups = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
        with contextlib.suppress(OSError, ValueError, KeyError):
            if "memory" in groups and "cpuacct" in groups:
                cpu = (_CGROUPS / "cpuacct" / groups["cpuacct"].lstrip("/") / "cpuacct.usage").read_text()
                memory = (_CGROUPS / "memory" / groups["memory"].lstrip("/") / "memory.usage_in_bytes").read_text()
                return Usage(int(cpu) / 1e9, int(memory))
            group = _CGROUPS / groups[""].lstrip("/")
            words = (group / "cpu.stat").read_text().split()
            used = int(words[words.index("usage_usec") + 1]) / 1e6
            return Usage(used, int((group / "memory.current").read_text()))
        return None


class DurableContainerDriver(ContainerDriver):
    durable = True

    def adopt(self, note: Mapping[str, Any], place: Place) -> Live:
        name = note["container"]
        found = self._tool.call("container", "inspect", "-f", "{{.State.Running}} {{.State.Paused}}", name)
        # to podman one that is paused does not run
        if found.exit_code != 0 or "true" not in found.text.split():
            state = "is not there any more" if found.exit_code else "is not running any more"
            raise SessionDead(f"container {name} {state}")
        if self.source.dockerfile_dir is not None:
            self._built = f"{BASE_REPOSITORY}:{place.tree}"
        return self._live(name, owned=note["owned"])

    def note_of(self, captured: Captured) -> Any:
        stored: StoredImage = captured.handle
        return {"image": stored.image, "size_bytes": stored.size_bytes}

    def keep(self, captured: Captured, name: str) -> str:
        """Without our marks, which the image has: no collector takes it for ours."""
        stored: StoredImage = captured.handle
        what = f"keeping {stored.image} as {name}"
        marks = [word for label in (HOME_LABEL, TREE_LABEL) for word in ("--label", f"{label}=")]
        options = ["--pull=never", *self.run_options(), *marks, *self.source.extra_args, "--entrypoint", "/bin/sh"]
        done = self._tool.call("run", "-d", "--name", name, *options, stored.image, "-c", KEEP_ALIVE)
        if done.exit_code != 0:
            said = done.stderr.decode(errors="replace")
            if "already in use" in said:
                raise Exists(f"{what}: there is such a container already; choose another name")
            remove_container(self._tool, name)
            raise self._tool.failure(what, said)
        return f"{self._tool.program} exec -it {name} sh"

    def save_image(self, captured: Captured, archive: Path) -> bool:
        stored: StoredImage = captured.handle
        self._tool.ask(f"saving {stored.image}", "save", "-o", str(archive), stored.image)
        return True

    def handle_of(self, note: Any) -> Any:
        return StoredImage(note["image"], note["size_bytes"])

    def abandon(self, place: Place) -> None:
        """Both names: which of the two it was to be is not known."""
        remove_container(self._tool, f"statefork-{place.name}")
        remove_image(self._tool, f"{SNAPSHOT_REPOSITORY}:{place.name}")

    def _live(self, container: str, *, owned: bool) -> ContainerLive:
        return DurableContainerLive(self._tool, container, owned=owned)
