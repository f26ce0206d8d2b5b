"""Install the system packages that Waypoint uses, on hosts with apt: those that are missing, and only when asked to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from waypoint.errors import HostUnsupported
from waypoint.kernel.programs import Finished, run_program

__all__ = ["install_packages", "listed_packages", "missing_packages"]

_ATTEMPTS = 3
_TIMEOUT_S = 1800.0
_LIST = Path(__file__).with_name("packages.txt")
_SECOND_PART = "# -- "


def listed_packages(*, everything: bool = False) -> list[str]:
    """The one list: scripts/packages.txt in a clone, to which the file here is a symlink; a wheel carries a copy.

    `everything`: not only what Waypoint needs, also what the other backends and the tests do.
    """
    text = _LIST.read_text()
    if not everything:
        text = text.partition(f"\n{_SECOND_PART}")[0]
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def missing_packages(names: Sequence[str]) -> list[str]:
    """Those of `names` that dpkg does not know as installed, in one question to dpkg."""
    if shutil.which("dpkg-query") is None or shutil.which("apt-get") is None:
        raise HostUnsupported(
            "this host has no dpkg and apt-get; install what `waypoint doctor` reports as missing by its own means",
            fix="waypoint doctor",
            feature="apt",
        )
    asked = run_program(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\\n", *names], timeout=60)
    installed = {line.split(" ")[0] for line in asked.text.splitlines() if line.endswith(" installed")}
    return [name for name in names if name not in installed]


def install_packages(names: Sequence[str], progress: Callable[[str], None]) -> list[str]:
    """Install what is missing and return its names; HostUnsupported names what this release's archive does not have."""
    missing = missing_packages(names)
    if not missing:
        return []
    by_hand = f"sudo apt-get install --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0:
        raise HostUnsupported(f"missing packages: {', '.join(missing)}; run `{by_hand}`", fix=by_hand, feature="root")
    progress(f"installing {' '.join(missing)}")
    for attempt in range(_ATTEMPTS):
        if attempt:
            # The lists of a fresh machine are empty, those of an old one name files that are gone.
            progress("reading the package lists")
            _apt_get(["-o", "Acquire::Retries=3", "update"])
        done = _apt_get(["install", "--no-install-recommends", *missing])
        if done.exit_code == 0:
            return missing
    return _install_one_by_one(missing, done, by_hand)


def _install_one_by_one(names: Iterable[str], failed: Finished, by_hand: str) -> list[str]:
    """One package that the archive does not have must not keep the others out."""
    wanted = list(names)
    for name in wanted:
        _apt_get(["install", "--no-install-recommends", name])
    still = missing_packages(wanted)
    if still:
        raise HostUnsupported(
            f"could not install {', '.join(still)}; `waypoint doctor` says what works without:\n{failed.tail()}",
            fix=by_hand,
            missing=still,
        )
    return wanted


def _apt_get(arguments: Sequence[str]) -> Finished:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    argv = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Use-Pty=0", *arguments]
    return run_program(argv, timeout=_TIMEOUT_S, env=env, own_session=False)
