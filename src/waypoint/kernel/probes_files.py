"""Probes of the file system features that a session's root is made of."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
from pathlib import Path

from waypoint.errors import KernelError
from waypoint.kernel import probe_calls
from waypoint.kernel.probes import Probe, mapped_child

__all__ = ["PROBES"]

_AT_FDCWD = -100
_OPEN_TREE, _MOUNT_SETATTR = 428, 442
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOUNT_ATTR_IDMAP = 0x100000
_AT_EMPTY_PATH = 0x1000
_SHIFT = 1_000_000

Options = list[tuple[str, str | None]]


def _layers(where: Path, *extra: tuple[str, str | None]) -> tuple[Path, Options]:
    """Two lower layers with a file that differs and one that only the bottom has; a fresh upper; the mount point."""
    for name in ("top", "bottom", "upper", "work", "merged"):
        (where / name).mkdir()
    (where / "top/both").write_text("top")
    (where / "bottom/both").write_text("bottom")
    (where / "bottom/only").write_text("bottom")
    names = [("lowerdir+", "top"), ("lowerdir+", "bottom"), ("upperdir", "upper"), ("workdir", "work")]
    options: Options = [(key, str(where / name)) for key, name in names]
    return where / "merged", [*options, *extra]


def _overlay(where: Path) -> str:
    """The old mount(2) way, with what copy-on-write has to do: shadow, copy up, white out."""
    merged, options = _layers(where)
    path = {key: value for key, value in options if key != "lowerdir+"}
    data = f"lowerdir={where}/top:{where}/bottom,upperdir={path['upperdir']},workdir={path['workdir']}"
    probe_calls.mount("overlay", str(merged), "overlay", 0, data)
    _exercise(where)
    return f"copy-on-write works on {_file_system(where)}"


def _lower_plus(where: Path) -> str:
    """More than a page of option string: the only way to mount hundreds of layers. Linux 6.5 and later."""
    merged, options = _layers(where)
    probe_calls.overlay(merged, options)
    _exercise(where)
    return "layers can be given one by one"


def _volatile(where: Path) -> str:
    merged, options = _layers(where, ("volatile", None))
    probe_calls.overlay(merged, options)
    if not where.joinpath("work", "work", "incompat", "volatile").exists():  # how the option is shown differs between kernels
        raise KernelError("the kernel mounted the overlay without volatile")
    return "the upper layer need not be synced at each step"


def _index_and_handles(where: Path) -> str:
    """The kernel mounts without them if it must; so open a file by its handle, as CRIU does for a watch."""
    merged, options = _layers(where, ("redirect_dir", "on"), ("index", "on"), ("nfs_export", "on"))
    probe_calls.overlay(merged, options)
    _expect_options(merged, "index=on", "nfs_export=on")
    _open_by_handle(merged / "only")
    return "watched files can be found again by their handle"


def _idmapped_layers(where: Path) -> str:
    """Layers whose owners are shifted, so that root inside a session owns nothing of the host's."""
    # The second line lets overlayfs, which acts as the host's root, write through the map.
    with mapped_child(f"0 {_SHIFT} 65536\n{_SHIFT} 0 65536\n", signal.pause) as child:
        user_namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    tree = probe_calls.syscall(
        "open_tree", _OPEN_TREE, _AT_FDCWD, str(where).encode(), _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
    )
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    probe_calls.syscall("mount_setattr", _MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, size)
    merged, _ = _layers(where)
    layer = f"/proc/self/fd/{tree}"
    names = [("lowerdir+", "top"), ("lowerdir+", "bottom"), ("upperdir", "upper"), ("workdir", "work")]
    probe_calls.overlay(merged, [(key, f"{layer}/{name}") for key, name in names])
    owner = (merged / "only").stat().st_uid
    if owner != _SHIFT:
        raise KernelError(f"a file of root appears as owned by {owner} and not {_SHIFT} through an idmapped layer")
    return f"owners can be shifted on {_file_system(where)}"


def _devpts(where: Path) -> str:
    """A private instance: terminal numbers begin at 0 in each session."""
    point = where / "pts"
    point.mkdir()
    probe_calls.mount("devpts", str(point), "devpts", 0, "newinstance,ptmxmode=0666,mode=0620")
    master = os.open(point / "ptmx", os.O_RDWR | os.O_NOCTTY)
    try:
        if not (point / "0").exists():
            raise KernelError("the first terminal of a fresh devpts is not number 0")
    finally:
        os.close(master)
    return "a session has terminals of its own"


def _exercise(where: Path) -> None:
    merged = where / "merged"
    if (merged / "both").read_text() != "top":
        raise KernelError("the overlay shows the lower of two layers")
    (merged / "both").write_text("changed")
    if (where / "top/both").read_text() != "top" or (where / "upper/both").read_text() != "changed":
        raise KernelError("a write through the overlay did not go to the upper layer alone")
    (merged / "only").unlink()
    if (merged / "only").exists() or not stat.S_ISCHR((where / "upper/only").lstat().st_mode):
        raise KernelError("a removal through the overlay left no whiteout in the upper layer")


def _mount_line(point: Path) -> tuple[str, str]:
    """(file system type, super block options) of the mount at `point`."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split(" ")[4] == str(point):
            kind, _, options = after.split(" ", 2)
            return kind, options
    raise KernelError(f"{point} is not in the list of mounts")


def _expect_options(point: Path, *wanted: str) -> None:
    options = _mount_line(point)[1].split(",")
    lacking = [option for option in wanted if option not in options]
    if lacking:
        raise KernelError(f"the kernel mounted the overlay without {', '.join(lacking)}")


def _file_system(where: Path) -> str:
    """The type of the file system that `where` is on, by the longest mount point above it."""
    for point in (where, *where.parents):
        if os.path.ismount(point):
            return f"{_mount_line(point)[0]} at {point}"
    raise KernelError(f"{where} is on no mount")


def _open_by_handle(path: Path) -> None:
    class FileHandle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("handle", ctypes.c_ubyte * 128)]

    handle, mount_id = FileHandle(bytes=128), ctypes.c_int()
    named = probe_calls.libc.name_to_handle_at(
        _AT_FDCWD, str(path).encode(), ctypes.byref(handle), ctypes.byref(mount_id), 0
    )
    probe_calls.checked("name_to_handle_at", named)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    opened = probe_calls.libc.open_by_handle_at(directory, ctypes.byref(handle), os.O_RDONLY)
    os.close(probe_calls.checked("open_by_handle_at", opened))
    os.close(directory)


_KERNEL = "use Linux 6.5 or later"
_PLACE = "put the store on ext4, xfs or btrfs (WAYPOINT_HOME), not on an overlay or a network file system"

PROBES = (
    Probe("overlay", _overlay, f"modprobe overlay; {_PLACE}"),
    Probe("overlay-lowerdir+", _lower_plus, _KERNEL),
    Probe("overlay-volatile", _volatile, "use Linux 5.10 or later"),
    Probe("overlay-index-nfs-export", _index_and_handles, _PLACE, required=False),
    Probe("overlay-idmapped-layers", _idmapped_layers, f"{_KERNEL}; {_PLACE}", required=False),
    Probe("devpts", _devpts, "use a kernel with CONFIG_UNIX98_PTYS"),
)
