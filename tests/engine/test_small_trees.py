"""A small tree is copied in this process, and the copy is what `cp -a` would have made."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from waypoint.kernel.small_trees import copy_small


def make(root: Path) -> None:
    (root / "sub").mkdir(parents=True)
    (root / "file").write_bytes(b"text")
    (root / "file").chmod(0o4751)
    os.chown(root / "file", 7, 8)
    os.setxattr(root / "file", "user.note", b"kept")
    os.setxattr(root / "file", "trusted.overlay.origin", b"x")
    (root / "sub/link").symlink_to("../file")
    os.lchown(root / "sub/link", 5, 6)
    (root / "sub/twin").hardlink_to(root / "file")
    with (root / "sparse").open("wb") as out:
        out.seek(3 << 20)
        out.write(b"end")
        out.truncate(5 << 20)
    (root / "empty").touch()
    os.mkfifo(root / "pipe")
    os.mknod(root / "whiteout", 0o020000, 0)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
    (root / os.fsdecode(b"odd\xff\nname")).mkdir()
    subprocess.run(["setfacl", "-m", "u:1234:rw", str(root / "file")], check=False)
    for number, path in enumerate(sorted(root.rglob("*"), key=os.fsencode)):
        os.utime(path, ns=(10**18 + number, 10**18 + 1000 + number), follow_symlinks=False)
    os.utime(root, ns=(10**18, 10**18))


def look(root: Path) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    inodes: dict[int, int] = {}
    for path in [root, *sorted(root.rglob("*"), key=os.fsencode)]:
        st = path.lstat()
        names = sorted(os.listxattr(path, follow_symlinks=False))
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found.append((
            os.fsencode(path.relative_to(root)), st.st_mode, st.st_uid, st.st_gid, st.st_nlink, st.st_rdev, st.st_mtime_ns,
            st.st_size if path.is_file() or path.is_symlink() else 0, path.is_symlink() and str(path.readlink()), content,
            [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names],
            inodes.setdefault(st.st_ino, len(inodes)),
        ))  # fmt: skip
    return found


def test_copy_is_what_cp_makes(tmp_path: Path) -> None:
    make(tmp_path / "from")
    before = look(tmp_path / "from")
    copy_small(str(tmp_path / "from"), str(tmp_path / "ours"))
    subprocess.run(["cp", "-a", "-T", str(tmp_path / "from"), str(tmp_path / "theirs")], check=True)
    assert look(tmp_path / "ours") == before
    assert look(tmp_path / "ours") == look(tmp_path / "theirs")
    assert (tmp_path / "ours/sparse").stat().st_blocks <= (tmp_path / "from/sparse").stat().st_blocks
