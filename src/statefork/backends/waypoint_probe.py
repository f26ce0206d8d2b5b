"""Whether Waypoint brings sessions back on this host: by doing it."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from statefork.backends.probe_cache import remembered
from statefork.errors import HostUnsupported, WaypointError
from statefork.model import Capabilities, Capability
from waypoint.engine import Engine
from waypoint.kernel import tools

__all__ = ["probe"]

_SETTING = "cd /tmp && echo {mark} >probe && probe={mark} && stty -F /dev/tty rows 43 cols 97 && {{ sleep 1000 & }}"
_ASKING = "cat /tmp/probe; echo $probe; kill -0 $! && echo runs; stty -F /dev/tty size; pwd"


def probe() -> Capabilities:
    try:
        used = [tools.engine_criu().argv[-1], str(tools.launch_path()), str(tools.init_path())]
        return remembered("waypoint", used, _try)
    except HostUnsupported as error:
        raise HostUnsupported(error.message, **{"fix": "waypoint doctor", **error.details}) from error


def _try() -> Capabilities:
    """Snapshot a session, change everything in it, and look what a fork of the snapshot still knows."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="statefork-probe-") as scratch, Engine(Path(scratch) / "store") as engine:
        try:
            session = engine.new()
            session.exec(_SETTING.format(mark=mark), timeout=20)
            taken = session.snapshot()
            session.exec("rm probe; probe=; kill $!; wait; stty -F /dev/tty rows 24 cols 80; cd /", timeout=20)
            (fork,) = engine.fork(taken, 1)
            said = fork.exec(_ASKING, timeout=20).text.splitlines()
        except WaypointError as error:
            if isinstance(error, HostUnsupported):
                raise
            raise HostUnsupported(
                f"Waypoint cannot bring a session back here: {error}", fix="waypoint doctor"
            ) from error
        finally:
            for record in engine.sessions():
                engine.session(record.id).remove()
    expected = {
        Capability.FILES: mark,
        Capability.MEMORY: mark,
        Capability.PROCESSES: "runs",
        Capability.TERMINAL: "43 97",
        Capability.SHELL: "/tmp",
    }
    found = [capability for (capability, word), line in zip(expected.items(), said, strict=False) if word == line]
    if len(found) < len(expected):
        raise HostUnsupported(f"a restored session answers {said}, not as it should", fix="waypoint doctor")
    return Capabilities(
        backend="waypoint",
        restores=frozenset(found),
        pause_releases_memory=True,
        snapshot_during_exec=True,
        versions={"criu": tools.criu_version()},
    )
