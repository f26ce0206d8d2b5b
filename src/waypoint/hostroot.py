"""The host's own root as a base: what it is, and what of it a session never sees.

The store lies inside that root, and overlayfs refuses a lower layer that lies inside another one; so over this base sealed
layers are not stacked but copied into each new upper (`flat`; docs/decisions/host-root.md). A store on another
file system stacks.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path

from waypoint.errors import UsageError
from waypoint.guest.layer import OPAQUE
from waypoint.model import BaseRecord, StartState
from waypoint.store.paths import Paths

__all__ = ["host_base", "mask_host", "masked_paths"]

EMPTIED = (("tmp", 0o1777), ("var/tmp", 0o1777), ("run", 0o755), ("dev", 0o755))
SECRETS = (
    "~/.ssh", "~/.gnupg", "~/.aws", "~/.azure", "~/.config/gcloud", "~/.docker", "~/.kube", "~/.netrc", "~/.git-credentials",
    "~/.npmrc", "~/.pypirc", "~/.password-store", "~/.local/share/keyrings", "/etc/ssh", "/etc/ssl/private", "/var/lib/docker",
    "/var/lib/containers", "/var/lib/statefork",
)  # fmt: skip
"""Hidden from sessions over the host's root; `masked = [...]` in $WAYPOINT_HOME/config.toml replaces the list."""


def host_base(paths: Paths) -> BaseRecord:
    flat = Path("/").stat().st_dev == paths.home.stat().st_dev
    return BaseRecord(
        id="host",
        kind="host",
        source="/",
        layers=("/",),
        start=StartState(workdir="~"),
        digest="",
        flat=flat,
        notes=tuple(f"not part of it: {mount}" for mount in _other_mounts()),
    )


def _other_mounts() -> list[str]:
    """Real file systems mounted below the root: an overlay of the root shows only their empty mount points."""
    root = Path("/").stat().st_dev
    found = []
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            fields = line.split()
            point, kind = fields[4], line.partition(" - ")[2].split()[0]
            if point == "/" or kind not in ("ext4", "ext3", "xfs", "btrfs", "zfs", "f2fs", "nfs", "nfs4", "virtiofs"):
                continue
            if Path(point).stat().st_dev != root:
                found.append(point)
    return sorted(set(found))


def masked_paths(paths: Paths, also: Sequence[Path] = ()) -> list[str]:
    """Absolute paths to hide, the store first, then `also` and what is configured."""
    config = paths.home / "config.toml"
    wanted: list[str] = list(SECRETS)
    if config.exists():
        try:
            wanted = [str(path) for path in tomllib.loads(config.read_text()).get("masked", SECRETS)]
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{config} is not valid TOML: {error}") from error
    homes = [Path("/root"), *(Path("/home").iterdir() if Path("/home").is_dir() else ())]
    found = [str(path.resolve()) for path in (paths.home, *also)]
    for entry in wanted:
        found += [str(home / entry[2:]) for home in homes] if entry.startswith("~/") else [entry]
    return [path for path in dict.fromkeys(found) if os.path.lexists(path)]


def mask_host(root: Path, masks: list[str]) -> None:
    """Into the layer `root`: the directories that begin empty, and a whiteout for each path to hide."""
    for name, mode in EMPTIED:
        target = _same_directory(root, name)
        target.chmod(mode)
        os.setxattr(target, OPAQUE, b"y")
    emptied = tuple(f"/{name}/" for name, _ in EMPTIED)
    for path in masks:
        if path.startswith(emptied):
            continue
        parent = _same_directory(root, str(Path(path).parent).lstrip("/"))
        target = parent / Path(path).name
        if not target.exists():
            os.mknod(target, 0o020000, os.makedev(0, 0))


def _same_directory(root: Path, name: str) -> Path:
    """A directory in the layer that merges with the host's and looks like it."""
    target = root
    for part in Path(name).parts:
        target = target / part
        if not target.exists():
            target.mkdir()
            host = Path("/") / target.relative_to(root)
            if host.exists():
                st = host.stat()
                os.chown(target, st.st_uid, st.st_gid)
                target.chmod(st.st_mode & 0o7777)
    return target
