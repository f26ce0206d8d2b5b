"""A directory as a base: what is refused and why, and that links are followed inside the root only."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from rootfs import bash_rootfs, busybox_rootfs
from waypoint.build.lookup import find
from waypoint.build.rootfs import use_rootfs
from waypoint.errors import BuildError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def test_used_in_place(tmp_path: Path, store: Path) -> None:
    root = busybox_rootfs(tmp_path / "root")
    (tmp_path / "alias").symlink_to("root")
    base = use_rootfs(tmp_path / "alias", store=store)
    assert (base.kind, base.layers, base.start.user, base.start.workdir) == ("rootfs", (root,), "root", "/")
    assert base.digest == use_rootfs(root, store=store).digest
    (root / "etc/passwd").write_text("another\n")
    assert base.digest != use_rootfs(root, store=store).digest


def test_a_merged_usr_root_with_a_real_bash_runs(tmp_path: Path, store: Path) -> None:
    base = use_rootfs(bash_rootfs(tmp_path / "root"), store=store)
    said = subprocess.run(
        [
            "chroot",
            str(base.layers[0]),
            "/bin/bash",
            "-c",
            "id -un 1000; ls /bin/sh | grep -c sh; sed --version >/dev/null",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "user\n1\n"


def test_refusals(tmp_path: Path, store: Path) -> None:
    with pytest.raises(BuildError, match="does not exist"):
        use_rootfs(tmp_path / "absent", store=store)
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="not a directory"):
        use_rootfs(tmp_path / "file", store=store)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BuildError):
        use_rootfs(tmp_path / "loop", store=store)
    for name in ("/", "/..", "/proc/self/root"):
        with pytest.raises(BuildError, match="host's own root"):
            use_rootfs(Path(name), store=store)
    with pytest.raises(BuildError, match="inside each other"):
        use_rootfs(busybox_rootfs(store / "inner"), store=store)
    outer = busybox_rootfs(tmp_path / "outer")
    with pytest.raises(BuildError, match="inside each other"):
        use_rootfs(outer, store=outer / "var/lib/store")
    with pytest.raises(BuildError, match="inside each other"):
        use_rootfs(outer, store=outer)


@pytest.mark.parametrize("how", ["absent", "points outside", "not executable", "directory", "loop", "whiteout"])
def test_a_shell_is_needed(how: str, tmp_path: Path, store: Path) -> None:
    root = busybox_rootfs(tmp_path / "root")
    shell = root / "bin/sh"
    shell.unlink()
    if how == "points outside":  # exists on the host, not in this root
        shutil.copy2("/bin/sh", tmp_path / "sh")
        shell.symlink_to(tmp_path / "sh")
        assert shell.exists()
    elif how == "not executable":
        shell.write_text("#!/bin/busybox\n")
    elif how == "directory":
        shell.mkdir()
    elif how == "loop":
        shell.symlink_to("sh")
    elif how == "whiteout":
        os.mknod(shell, stat.S_IFCHR, 0)
    with pytest.raises(BuildError, match="no /bin/bash or /bin/sh"):
        use_rootfs(root, store=store)


def test_absolute_links_start_at_the_root(tmp_path: Path, store: Path) -> None:
    root = busybox_rootfs(tmp_path / "root")
    shutil.move(root / "bin", root / "usr/bin")
    (root / "bin").symlink_to("/usr/../../usr/bin")
    (root / "usr/bin/sh").unlink()
    (root / "usr/bin/sh").symlink_to("/bin/busybox")
    assert use_rootfs(root, store=store).layers == (root,)


def test_lookup_agrees_with_the_kernel(tmp_path: Path) -> None:
    """Every path of three layers full of markers, compared with a real mount of them."""
    top, middle, bottom, view = (tmp_path / name for name in ("top", "middle", "bottom", "view"))
    for layer, names in (
        (bottom, ("a/x", "a/y", "b/x", "c/x", "d/deep/x", "e", "f/x")),
        (middle, ("a/x", "b/z", "c/w", "e/x", "g")),
        (top, ("a/z", "d/deep/y", "h/x")),
    ):
        for name in names:
            (layer / name).parent.mkdir(parents=True, exist_ok=True)
            (layer / name).write_text(f"{layer.name} {name}")
    os.mknod(top / "a/y", stat.S_IFCHR, 0)
    os.mknod(top / "c", stat.S_IFCHR, 0)
    os.setxattr(middle / "b", "trusted.overlay.opaque", b"y")
    os.mknod(middle / "d", stat.S_IFCHR, 0)
    (middle / "f").symlink_to("a")
    (top / "link").symlink_to("/f/../b/z")
    view.mkdir()
    subprocess.run(
        ["mount", "-t", "overlay", "-o", f"lowerdir={top}:{middle}:{bottom}", "overlay", str(view)], check=True
    )
    try:
        tried = {str(path.relative_to(layer)) for layer in (top, middle, bottom) for path in layer.rglob("*")}
        assert len(tried) > 20
        for name in sorted(tried | {"f/x", "f/y", "f/z", "absent", "e/x/y", "g/x", "link"}):
            found = find([top, middle, bottom], name)
            real = view / ("b/z" if name == "link" else name)  # the absolute link leads out of the view for us
            assert (found is not None) == real.exists(), name
            if found is not None and real.is_file():
                assert found.read_text() == real.read_text()
            if found is not None:
                assert found.is_dir() == real.is_dir()
    finally:
        subprocess.run(["umount", str(view)], check=True)
