"""Tar archives and saved images become layers; hostile and damaged ones leave nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rootfs import busybox_rootfs
from waypoint.build.base import Base, StartState
from waypoint.build.tarball import unpack_tarball
from waypoint.errors import BuildError, DiskFull, UsageError

CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)  # cap_net_bind_service+ep


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


@pytest.fixture(scope="session")
def plain_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with everything that a tar can carry."""
    where = tmp_path_factory.mktemp("plain")
    root = busybox_rootfs(where / "root")
    (root / "bin/busybox").chmod(0o4755)
    os.setxattr(root / "bin/busybox", "security.capability", CAPABILITY)
    os.link(root / "bin/busybox", root / "bin/hard")
    (root / "etc/owned").write_text("x")
    os.chown(root / "etc/owned", 1234, 4321)
    (root / "etc/owned").chmod(0o640)
    os.setxattr(root / "etc/owned", "user.colour", b"red")
    os.setxattr(root / "etc", "trusted.overlay.opaque", b"y")
    with (root / "sparse").open("wb") as sparse:
        sparse.truncate(64 << 20)
        sparse.seek(32 << 20)
        sparse.write(b"middle")
    os.mkfifo(root / "fifo")
    os.mknod(root / "dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "dev/sda", stat.S_IFBLK | 0o660, os.makedev(8, 0))
    os.mknod(root / "dev/mem", stat.S_IFCHR | 0o640, os.makedev(1, 1))
    (root / "locked").mkdir()
    (root / "locked/inside").write_text("in")
    (root / "locked").chmod(0o555)
    os.utime(root / "locked", (1_000_000_000, 1_000_000_000))
    os.utime(root / "dev", (1_000_000_000, 1_000_000_000))
    packed = where / "plain.tar"
    tar = ["tar", "--xattrs", "--xattrs-include=*", "--acls", "--sparse", "-C", str(root), "-cf", str(packed), "."]
    subprocess.run(tar, check=True)
    return packed


def left(into: Path) -> list[Path]:
    return list(into.rglob("*"))


@contextmanager
def mounted(base: Base, tmp_path: Path) -> Iterator[Path]:
    """The layers as a session would see them, through the kernel's own overlay."""
    view = tmp_path / "view"
    view.mkdir()
    lowers = [*map(str, base.layers)]
    if len(lowers) == 1:  # overlay wants two lowers when there is no upper
        (tmp_path / "empty").mkdir()
        lowers.append(str(tmp_path / "empty"))
    subprocess.run(["mount", "-t", "overlay", "-o", f"lowerdir={':'.join(lowers)}", "overlay", str(view)], check=True)
    try:
        yield view
    finally:
        subprocess.run(["umount", str(view)], check=True)


def test_everything_that_tar_keeps_is_kept(plain_tar: Path, into: Path) -> None:
    seen: list[tuple[int, int]] = []
    base = unpack_tarball(plain_tar, into, on_progress=lambda done, total: seen.append((done, total)))
    root = base.layers[0]
    assert base.kind == "tarball" and base.layers == (into / "0",) and [p.name for p in into.iterdir()] == ["0"]
    assert base.digest == f"sha256:{hashlib.sha256(plain_tar.read_bytes()).hexdigest()}"
    assert base.start == StartState(env=(), workdir="/", user="root", argv=())
    busybox = (root / "bin/busybox").stat()
    assert busybox.st_mode & 0o7777 == 0o4755 and busybox.st_nlink == 2
    assert (root / "bin/hard").stat().st_ino == busybox.st_ino
    assert os.getxattr(root / "bin/busybox", "security.capability") == CAPABILITY
    owned = (root / "etc/owned").stat()
    assert (owned.st_uid, owned.st_gid, owned.st_mode & 0o7777) == (1234, 4321, 0o640)
    assert os.getxattr(root / "etc/owned", "user.colour") == b"red"
    sparse = (root / "sparse").stat()
    assert sparse.st_size == 64 << 20 and sparse.st_blocks * 512 < 1 << 20
    assert stat.S_ISFIFO((root / "fifo").lstat().st_mode)
    assert (root / "bin/sh").readlink() == Path("busybox")
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert (root / "locked").stat().st_mode & 0o7777 == 0o555 and (root / "locked").stat().st_mtime == 1_000_000_000
    assert (root / "locked/inside").read_text() == "in"
    assert root.stat().st_mode & 0o7777 == 0o755
    size = plain_tar.stat().st_size
    assert seen[-1] == (size, size) and seen == sorted(seen)


def test_only_harmless_devices_come_through(plain_tar: Path, into: Path) -> None:
    base = unpack_tarball(plain_tar, into)
    null = (base.layers[0] / "dev/null").lstat()
    assert stat.S_ISCHR(null.st_mode) and null.st_rdev == os.makedev(1, 3)
    assert sorted(path.name for path in (base.layers[0] / "dev").iterdir()) == ["null"]
    assert base.notes == ("left out 2 device node(s) that a session may not have: /dev/mem, /dev/sda",)
    assert (base.layers[0] / "dev").stat().st_mtime == 1_000_000_000


def test_an_archive_cannot_bring_marks_of_overlay(plain_tar: Path, into: Path) -> None:
    base = unpack_tarball(plain_tar, into)
    assert not [name for name in os.listxattr(base.layers[0] / "etc") if name.startswith("trusted.")]


@pytest.mark.parametrize("program", ["gzip", "xz -1", "zstd -q", "bzip2"])
def test_compressions_are_known_by_content(plain_tar: Path, into: Path, tmp_path: Path, program: str) -> None:
    packed = tmp_path / "misnamed.tar"
    with plain_tar.open("rb") as source, packed.open("wb") as target:
        subprocess.run([*program.split(), "-c"], stdin=source, stdout=target, check=True)
    base = unpack_tarball(packed, into)
    assert (base.layers[0] / "bin/sh").is_symlink()
    assert base.digest == f"sha256:{hashlib.sha256(packed.read_bytes()).hexdigest()}"
    cut = tmp_path / "cut.tar"
    cut.write_bytes(packed.read_bytes()[:-2000])
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(BuildError, match="could not be unpacked"):
        unpack_tarball(cut, again)
    assert left(again) == []


def test_damaged_archives_leave_nothing(plain_tar: Path, into: Path, tmp_path: Path) -> None:
    whole = plain_tar.read_bytes()
    damaged = tmp_path / "damaged.tar"
    scribbled = bytearray(whole)
    scribbled[100 * 512 : 3000 * 512] = os.urandom(2900 * 512)
    for content in (b"", b"\0" * 10240, b"this is no archive\n" * 1000, whole[: len(whole) // 2], bytes(scribbled)):
        damaged.write_bytes(content)
        with pytest.raises(BuildError):
            unpack_tarball(damaged, into)
        assert left(into) == []


def test_wrong_arguments_are_refused(plain_tar: Path, into: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is not a file"):
        unpack_tarball(tmp_path / "absent.tar", into)
    (into / "mine").write_text("keep me")
    with pytest.raises(UsageError, match="empty directory"):
        unpack_tarball(plain_tar, into)
    assert (into / "mine").read_text() == "keep me"


def test_a_packed_directory_gets_a_hint(plain_tar: Path, into: Path, tmp_path: Path) -> None:
    busybox_rootfs(tmp_path / "rootfs")
    subprocess.run(["tar", "-C", str(tmp_path), "-cf", str(tmp_path / "nested.tar"), "rootfs"], check=True)
    with pytest.raises(BuildError, match="tar -C rootfs -cf"):
        unpack_tarball(tmp_path / "nested.tar", into)
    assert left(into) == []


def test_a_deadline_leaves_nothing(plain_tar: Path, into: Path) -> None:
    with pytest.raises(BuildError, match="did not end within"):
        unpack_tarball(plain_tar, into, timeout=0.001)
    assert left(into) == []


def test_a_full_disk_is_called_so(plain_tar: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=True)
    try:
        (small / "into").mkdir()
        with pytest.raises(DiskFull):
            unpack_tarball(plain_tar, small / "into")
        assert left(small / "into") == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


# -- hostile archives -------------------------------------------------------------------------------------------------


def member(
    name: str, data: bytes = b"pwned", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    info.mode = 0o755
    return info, data


def hostile(target: Path) -> dict[str, list[tuple[tarfile.TarInfo, bytes]]]:
    """Each tries to write `target`/pwned or to change `target`/precious, in absolute and relative ways."""
    up = "../" * 40
    inside = str(target).lstrip("/")
    link, hard = tarfile.SYMTYPE, tarfile.LNKTYPE
    return {
        "absolute name": [member(f"{target}/pwned")],
        "dotdot": [member(f"{up}{inside}/pwned")],
        "dotdot in the middle": [member("etc/", kind=tarfile.DIRTYPE), member(f"etc/{up}{inside}/pwned")],
        "absolute link": [member("way", kind=link, link=str(target)), member("way/pwned")],
        "relative link": [member("way", kind=link, link=f"{up}{inside}"), member("way/pwned")],
        "link chain": [
            member("a", kind=link, link="."),
            member("a/b", kind=link, link=f"{up}{inside}"),
            member("b/pwned"),
        ],
        "link replaced by directory": [
            member("way", kind=link, link=str(target)),
            member("way", kind=tarfile.DIRTYPE),
            member("way/pwned"),
        ],
        "written through a link to a file": [
            member("way", kind=link, link=f"{target}/precious"),
            member("way", b"changed"),
        ],
        "hard link outside": [member("way", kind=hard, link=f"{target}/precious"), member("way", b"changed")],
        "hard link by dotdot": [member("way", kind=hard, link=f"{up}{inside}/precious"), member("way", b"changed")],
        "hard link through a link": [
            member("way", kind=link, link=str(target)),
            member("hard", kind=hard, link="way/precious"),
            member("hard", b"changed"),
        ],
        "owner of a link's target": [member("way", kind=link, link=f"{target}/precious")],
    }


@pytest.mark.parametrize("trick", hostile(Path("/x")))
def test_nothing_is_written_outside(trick: str, plain_tar: Path, into: Path, tmp_path: Path) -> None:
    target = tmp_path / "outside"
    target.mkdir()
    precious = target / "precious"
    precious.write_text("untouched")
    before = precious.stat()
    packed = tmp_path / "hostile.tar"
    packed.write_bytes(plain_tar.read_bytes())
    with tarfile.open(packed, "a") as tar:
        for info, data in hostile(target)[trick]:
            info.uid = 4242
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    refused = False
    try:
        unpack_tarball(packed, into)
    except BuildError:
        refused = True
        assert left(into) == []
    assert [path.name for path in target.iterdir()] == ["precious"]
    after = precious.stat()
    assert precious.read_text() == "untouched"
    assert (after.st_uid, after.st_mode, after.st_nlink) == (before.st_uid, before.st_mode, before.st_nlink)
    if not refused:  # then it must have landed inside
        escaped = [path for path in left(into) if path.is_symlink() and path.name == "way"]
        assert escaped or any(path.name == "pwned" or path.name == "way" for path in left(into))


def test_a_mount_made_for_unpacking_is_seen_by_nobody(plain_tar: Path, into: Path) -> None:
    mounts: set[str] = set()

    def look(done: int, total: int) -> None:
        mounts.update(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())

    unpack_tarball(plain_tar, into, on_progress=look)
    assert not [mount for mount in mounts if mount.startswith(str(into))]


# -- saved images -----------------------------------------------------------------------------------------------------


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    info, _ = member(name, data, kind, link)
    tar.addfile(info, io.BytesIO(data))


def layer_blobs(plain_tar: Path) -> list[bytes]:
    second, third = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=second, mode="w:gz") as tar:
        for name in ("d/", "d/sub/", "e/", "f/"):
            add(tar, name.rstrip("/"), kind=tarfile.DIRTYPE)
        for name in ("d/old", "d/sub/old", "e/old", "f/old", "gone"):
            add(tar, name, b"old")
    with tarfile.open(fileobj=third, mode="w") as tar:
        add(tar, "d", kind=tarfile.DIRTYPE)
        add(tar, "d/.wh..wh..opq")
        add(tar, "d/new", b"new")
        add(tar, "e", kind=tarfile.DIRTYPE)
        add(tar, "e/.wh.old")
        add(tar, ".wh.gone")
        add(tar, ".wh.f")  # both marked and brought: the new one hides the old one
        add(tar, "f", kind=tarfile.DIRTYPE)
        add(tar, "f/new", b"new")
    return [plain_tar.read_bytes(), second.getvalue(), third.getvalue()]


CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "config": {
        "Env": ["PATH=/bin", "EMPTY=", "EQ=a=b"],
        "WorkingDir": "/d",
        "User": "1000:1000",
        "Entrypoint": ["/bin/sh"],
        "Cmd": ["-c", "id"],
    },
}
START = StartState(
    env=(("PATH", "/bin"), ("EMPTY", ""), ("EQ", "a=b")),
    workdir="/d",
    user="1000:1000",
    argv=("/bin/sh", "-c", "id"),
)


def docker_archive(path: Path, blobs: list[bytes]) -> Path:
    names = [f"{number}/layer.tar" for number in range(len(blobs))]
    with tarfile.open(path, "w") as tar:
        add(tar, "first.tar", blobs[0])
        add(tar, "0", kind=tarfile.DIRTYPE)
        add(tar, "0/layer.tar", kind=tarfile.SYMTYPE, link="../first.tar")  # as older dockers share layers
        for name, blob in list(zip(names, blobs, strict=True))[1:]:
            add(tar, name, blob)
        add(tar, "config.json", json.dumps(CONFIG).encode())
        manifest = [{"Config": "config.json", "RepoTags": ["x:latest"], "Layers": names}]
        add(tar, "manifest.json", json.dumps(manifest).encode())
    return path


def oci_archive(path: Path, blobs: list[bytes], *, spoil: bool = False) -> Path:
    with tarfile.open(path, "w") as tar:

        def blob(data: bytes) -> dict[str, object]:
            digest = hashlib.sha256(data).hexdigest()
            add(tar, f"blobs/sha256/{digest}", data)
            return {"digest": f"sha256:{digest}", "size": len(data)}

        layers = [blob(data) for data in blobs]
        if spoil:
            add(tar, f"blobs/sha256/{hashlib.sha256(blobs[1]).hexdigest()}", blobs[2])
        manifest = blob(json.dumps({"config": blob(json.dumps(CONFIG).encode()), "layers": layers}).encode())
        here = {"os": "linux", "architecture": {"x86_64": "amd64"}.get(os.uname().machine, "arm64")}
        other = {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "s390x"}}
        index = blob(json.dumps({"manifests": [other, {**manifest, "platform": here}]}).encode())
        add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        add(tar, "index.json", json.dumps({"manifests": [index]}).encode())
    return path


@pytest.mark.parametrize("make", [docker_archive, oci_archive])
def test_saved_images_become_overlay_layers(make, plain_tar: Path, into: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    seen: list[tuple[int, int]] = []
    archive = make(tmp_path / "image.tar", layer_blobs(plain_tar))
    base = unpack_tarball(archive, into, on_progress=lambda done, total: seen.append((done, total)))
    assert base.kind == "image-archive" and base.start == START
    assert base.layers == (into / "2", into / "1", into / "0")
    assert sorted(path.name for path in into.iterdir()) == ["0", "1", "2"]
    assert seen[-1][0] == seen[-1][1] > archive.stat().st_size
    with mounted(base, tmp_path) as view:
        assert sorted(path.name for path in (view / "d").iterdir()) == ["new"]
        assert list((view / "e").iterdir()) == []
        assert sorted(path.name for path in (view / "f").iterdir()) == ["new"]
        assert not (view / "gone").exists()
        assert (view / "bin/busybox").stat().st_mode & 0o7777 == 0o4755
        assert not list(view.rglob(".wh.*"))
    moved = base.moved(into, into.rename(tmp_path / "kept"))
    assert all(layer.is_dir() for layer in moved.layers) and moved.layers[0] == tmp_path / "kept/2"


def test_damaged_and_hostile_images_are_refused(plain_tar: Path, into: Path, tmp_path: Path) -> None:
    blobs = layer_blobs(plain_tar)
    oci_archive(tmp_path / "spoilt.tar", blobs, spoil=True)
    with pytest.raises(BuildError, match="another digest"):
        unpack_tarball(tmp_path / "spoilt.tar", into)
    outside = tmp_path / "outside.tar"
    outside.write_bytes(plain_tar.read_bytes())
    cases = {
        "no such layer": {"Config": "config.json", "Layers": ["absent"]},
        "layer outside": {"Config": "config.json", "Layers": ["../" * 20 + str(outside).lstrip("/")]},
        "config outside": {"Config": "/etc/passwd", "Layers": ["layer"]},
        "no layers": {"Config": "config.json", "Layers": None},
        "nonsense": {"Layers": 3},
    }
    for manifest in ([], [{}, {}], "text", {}, *([case] for case in cases.values())):
        with tarfile.open(tmp_path / "bad.tar", "w") as tar:
            add(tar, "layer", blobs[0])
            add(tar, "config.json", b"{}")
            add(tar, "manifest.json", json.dumps(manifest).encode())
        with pytest.raises(BuildError):
            unpack_tarball(tmp_path / "bad.tar", into)
        assert left(into) == []
