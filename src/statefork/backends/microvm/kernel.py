"""The guest's kernel, and the archive that it starts from: our agent and the drivers that it needs.

The kernel is Debian's for cloud machines, unpacked beside Waypoint's other tools and never installed. Any other does too,
if it is given with its modules (`boot/vmlinuz-X` and `lib/modules/X` side by side, as a package has them) or has the
drivers built in. The root file system is not touched: the agent comes in the archive and stays in memory as PID 1.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import lzma
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from statefork.errors import HostUnsupported, NotFound
from waypoint.kernel import tools
from waypoint.kernel.compile import compile_program
from waypoint.kernel.fetch import fetch_deb, locked_prefix
from waypoint.kernel.programs import run_program

__all__ = [
    "AGENT",
    "FETCH",
    "Kernel",
    "agent_path",
    "cache_directory",
    "counter_khz",
    "elf_image",
    "fetch_kernel",
    "find_kernel",
    "initramfs",
]

AGENT = tools.Program("microvm-agent", Path(__file__).parent / "native" / "agent.c")
FETCH = "statefork setup microvm"

_PREFIX = "kernel-"
_PACKAGE = "linux-image-cloud-amd64"
_SUITES = (("bookworm",), ("trixie",))
_DRIVERS = {
    "serial": ("virtio_mmio", "virtio_blk", "virtio_console", "virtio_net"),
    "vsock": ("virtio_mmio", "virtio_blk", "vmw_vsock_virtio_transport", "virtio_net"),
}
_PACKED = (
    (b"\x02\x21\x4c\x18", ["lz4", "-dc"]),
    (b"\x28\xb5\x2f\xfd", ["zstd", "-dcq"]),
    (b"\xfd7zXZ\x00", ["xz", "-dcq"]),
    (b"\x1f\x8b\x08", ["gzip", "-dcq"]),
)
"""How a kernel's packed part begins, and what unpacks it."""


@dataclass(frozen=True, slots=True)
class Kernel:
    image: Path
    modules: Path | None
    """None: everything that the guest needs is built in."""

    def __str__(self) -> str:
        return str(self.image)

    @property
    def version(self) -> str:
        return self.image.name.split("-", 1)[-1]


def cache_directory() -> Path:
    """For what can be made again: nothing is lost when it is removed while no environment is alive."""
    return Path("/var/cache/statefork" if os.geteuid() == 0 else Path.home() / ".cache/statefork") / "microvm"


def find_kernel(image: Path | None) -> Kernel:
    """The one that the caller named, or the newest that `fetch_kernel` brought. Raises: NotFound, HostUnsupported."""
    if image is not None:
        if not image.is_file():
            raise NotFound(f"there is no kernel {image}")
        modules = image.parent.parent / "lib/modules" / image.name.split("-", 1)[-1]
        return Kernel(image.absolute(), modules if modules.is_dir() else None)
    fetched = sorted(tools.prefix().glob(f"{_PREFIX}*/boot/vmlinuz-*"), key=lambda path: path.stat().st_mtime)
    if not fetched:
        raise HostUnsupported(f"no kernel for the machines is here: run `{FETCH}`, or give kernel=", fix=FETCH)
    return find_kernel(fetched[-1])


def fetch_kernel(progress: Callable[[str], None]) -> Kernel:
    """Debian's cloud kernel, into the prefix of Waypoint's tools; what is there already is used."""
    with locked_prefix() as where:
        try:
            return find_kernel(None)
        except HostUnsupported:
            pass
        staging = where / f".staging-kernel-{os.getpid()}"
        staging.mkdir()
        try:
            deb = fetch_deb(staging, _PACKAGE, re.compile(r"linux-image-[0-9].*-cloud-amd64"), _SUITES, progress)
            progress(f"unpacking {deb.name}")
            unpacked = staging / "unpacked"
            run_program(["dpkg-deb", "-x", str(deb), str(unpacked)], timeout=300).check(f"unpacking {deb.name}")
            (image,) = (unpacked / "boot").glob("vmlinuz-*")
            os.sync()
            unpacked.rename(where / f"{_PREFIX}{image.name.split('-', 1)[-1]}")
        finally:
            run_program(["rm", "-rf", str(staging)], timeout=300)
    return find_kernel(None)


def agent_path() -> Path:
    """Compiled when it is first asked for."""
    try:
        return tools.program_path(AGENT)
    except HostUnsupported:
        with locked_prefix():
            return compile_program(AGENT)


def counter_khz() -> int:
    said = run_program([str(agent_path()), "measure-counter"], timeout=30).check("measuring the time stamp counter")
    return int(said.text)


def initramfs(kernel: Kernel, transport: str) -> Path:
    """Made once for each kernel and agent."""
    agent = agent_path()
    facts = kernel.image.stat()
    key = f"{agent.name} {kernel.image} {facts.st_size} {facts.st_mtime_ns} {transport}"
    target = cache_directory() / "boot" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.cpio"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent / ".lock"):
        if not target.exists():
            fresh = target.with_suffix(".new")
            fresh.write_bytes(_archive(agent, _drivers(kernel, transport)))
            fresh.replace(target)
    return target


def elf_image(kernel: Kernel) -> Path:
    """As Firecracker wants it: not compressed. A kernel that is gets unpacked, once."""
    head = kernel.image.read_bytes()
    if head.startswith(b"\x7fELF"):
        return kernel.image
    key = hashlib.sha256(head).hexdigest()[:16]
    target = cache_directory() / "boot" / f"vmlinux-{key}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    for magic, argv in _PACKED:
        at = head.find(magic)
        while at >= 0:
            # What follows the packed kernel makes the tool complain; what it wrote until then is whole.
            found = run_program(argv, timeout=120, stdin=head[at:], keep_bytes=1 << 30).stdout
            if found.startswith(b"\x7fELF"):
                fresh = target.with_name(f".{target.name}.{os.getpid()}")
                fresh.write_bytes(found)
                fresh.replace(target)
                return target
            at = head.find(magic, at + 1)
    raise HostUnsupported(f"{kernel.image} holds no kernel that could be unpacked; give an ELF file (vmlinux)")


def _drivers(kernel: Kernel, transport: str) -> list[tuple[str, bytes]]:
    """Names and contents, each after those that it depends on. What is not there as a module is built in."""
    if kernel.modules is None:
        return []
    files: dict[str, Path] = {}
    for path in kernel.modules.rglob("*.ko*"):
        files[path.name.split(".ko")[0].replace("-", "_")] = path
    loaded: dict[str, bytes] = {}

    def load(name: str) -> None:
        if name in loaded or name not in files:
            return
        data = _uncompressed(files[name])
        found = re.search(rb"\0depends=([^\0]*)\0", data)
        for needed in found[1].decode().split(",") if found else ():
            if needed:
                load(needed.replace("-", "_"))
        loaded[name] = data

    for name in _DRIVERS[transport]:
        load(name)
    return [(f"{name}.ko", data) for name, data in loaded.items()]


def _uncompressed(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        return run_program(["zstd", "-dcq", str(path)], timeout=60).check(f"unpacking {path.name}").stdout
    return data


def _archive(agent: Path, drivers: Sequence[tuple[str, bytes]]) -> bytes:
    """In the kernel's own format, "newc": a header of hexadecimal numbers, a name and the content, each aligned to 4."""
    entries: list[tuple[str, int, bytes]] = [(name, stat.S_IFDIR | 0o755, b"") for name in ("dev", "proc", "root", "m")]
    entries.append(("init", stat.S_IFREG | 0o755, agent.read_bytes()))
    entries += [(f"m/{name}", stat.S_IFREG | 0o644, data) for name, data in drivers]
    entries.append(("modules", stat.S_IFREG | 0o644, "".join(f"{name}\n" for name, _ in drivers).encode()))
    entries.append(("TRAILER!!!", 0, b""))
    return b"".join(_entry(number, *entry) for number, entry in enumerate(entries, 1))


def _entry(number: int, name: str, mode: int, data: bytes) -> bytes:
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return _aligned(head) + _aligned(data)


def _aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
