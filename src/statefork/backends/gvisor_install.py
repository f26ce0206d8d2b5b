"""Find a `runsc`, or get Debian's: one static program, unpacked beside Waypoint's other tools and never installed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from statefork.errors import HostUnsupported
from waypoint.kernel import tools
from waypoint.kernel.fetch import fetch_deb, locked_prefix
from waypoint.kernel.programs import run_program

__all__ = ["SETUP", "fetch_runsc", "find_runsc", "runsc_version"]

SETUP = "statefork setup gvisor"
_SUITES = (("trixie",), ("bookworm-backports", "bookworm"), ("sid",))
"""Where to look, best first: the suite to take it from, and those it builds upon."""


def find_runsc() -> Path:
    """The host's own, or the one that `fetch_runsc` brought. Raises: HostUnsupported."""
    own = sorted(tools.prefix().glob("runsc-*/usr/bin/runsc"))
    if own:
        return own[-1]
    found = shutil.which("runsc")
    if found is None:
        raise HostUnsupported(f"runsc is not installed; `{SETUP}` fetches it", fix=SETUP, program="runsc")
    return Path(found)


def runsc_version(runsc: Path) -> str:
    said = run_program([str(runsc), "--version"], timeout=30).check(f"{runsc} --version").text
    return said.splitlines()[0].removeprefix("runsc version ").strip()


def fetch_runsc(progress: Callable[[str], None]) -> Path:
    """What is there already is used."""
    with locked_prefix() as where:
        try:
            return find_runsc()
        except HostUnsupported:
            progress("no runsc on this host")
        staging = where / f".staging-runsc-{os.getpid()}"
        staging.mkdir()
        try:
            deb = fetch_deb(staging, "runsc", re.compile(r"runsc"), _SUITES, progress)
            unpacked = staging / "unpacked"
            run_program(["dpkg-deb", "-x", str(deb), str(unpacked)], timeout=120).check(f"unpacking {deb.name}")
            version = runsc_version(unpacked / "usr/bin/runsc")
            os.sync()  # the rename must not reach the disk before the files do
            unpacked.rename(where / f"runsc-{version.replace('/', '-')}")
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return find_runsc()
