"""Where the programs are that Waypoint starts: a CRIU that works on this kernel, and its own programs.

All live in one prefix for the whole host, shared by every clone, virtualenv and store. Looking one up is on the path of
every command, so it costs a few system calls and starts nothing; what has to be found out by running a program is found
out once and written into a stamp. Making the programs is the work of `waypoint setup` (fetch.py, compile.py).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError

__all__ = [
    "COMPILE_FLAGS",
    "OLDEST_CRIU",
    "PROGRAMS",
    "QUICK",
    "QUICK_VERSION",
    "Criu",
    "Program",
    "binary_path",
    "check_criu",
    "criu_argv",
    "criu_version",
    "current_criu",
    "engine_criu",
    "init_path",
    "is_criu",
    "is_quick",
    "launch_path",
    "own_criu_argv",
    "pages_path",
    "prefix",
    "program_path",
    "quick_criu",
    "remember_criu",
    "survey_path",
    "written_path",
]

SETUP = "waypoint setup"
OLDEST_CRIU = (4, 1)
"""Older releases pass `criu check` on older kernels, but lack what the engine asks of the RPC."""

COMPILE_FLAGS = ("-static", "-O2", "-Wall", "-Wextra")
_LIBRARY_FLAGS = ("-shared", "-fPIC", "-nostdlib", "-O2", "-Wall", "-Wextra")
"""It is loaded into CRIU, which brings its own C library."""
_PYTHON_FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra")
"""It is loaded into the interpreter."""

_PACKAGE = Path(__file__).resolve().parent.parent
_SYSTEM_DIRECTORIES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


@dataclass(frozen=True, slots=True)
class Program:
    """One of our own C programs, made of its source file and all else that lies in its directory (headers, scripts)."""

    name: str
    source: Path
    flags: tuple[str, ...] = COMPILE_FLAGS

    def files(self) -> list[Path]:
        """Everything that can end up in the binary, in a fixed order."""
        directory = self.source.parent
        return [directory / name for name in sorted(entry.name for entry in os.scandir(directory) if entry.is_file())]


PROGRAMS = (
    Program("launch", _PACKAGE / "kernel" / "native" / "launch.c"),
    Program("init", _PACKAGE / "guest" / "native" / "init.c"),
    Program("written.so", _PACKAGE / "kernel" / "quick" / "written.c", _LIBRARY_FLAGS),
    Program("survey", _PACKAGE / "kernel" / "walker" / "survey.c"),
    Program("pages.so", _PACKAGE / "kernel" / "pages" / "pages.c", _PYTHON_FLAGS),
)

QUICK_VERSION = "4.2.1"
QUICK = Program("criu", _PACKAGE / "kernel" / "quick" / "criu.patch", ("-static", QUICK_VERSION))
"""The engine's own CRIU: that of QUICK_VERSION with this patch (build_criu.py)."""


@dataclass(frozen=True, slots=True)
class Criu:
    """A CRIU that passed `criu check`, and all that has to be the same for that to be still true."""

    argv: tuple[str, ...]
    version: str
    kernel: str
    identity: tuple[int, int, int]


def prefix() -> Path:
    """$WAYPOINT_TOOLS, else /opt/waypoint."""
    return Path(os.environ.get("WAYPOINT_TOOLS") or "/opt/waypoint")


# -- CRIU -------------------------------------------------------------------------------------------------------------


def criu_argv() -> list[str]:
    """The argv prefix that starts a CRIU which passes `criu check` on this kernel; HostUnsupported if there is none."""
    return list(current_criu().argv)


def criu_version() -> str:
    """The version of the CRIU that `criu_argv` starts, such as "4.2.1"."""
    return current_criu().version


def current_criu() -> Criu:
    """The stamped CRIU; without one, or if the kernel or the binary changed, the first that passes the check."""
    stamped = _read_stamp()
    if stamped is not None:
        return stamped
    refusals = []
    for argv in _candidates():
        try:
            found = check_criu(argv)
        except HostUnsupported as error:
            refusals.append(error.message)
            continue
        with contextlib.suppress(OSError):  # a read-only prefix: the check is paid again next time, nothing is wrong
            remember_criu(found)
        return found
    why = "; ".join(refusals) or "none is installed"
    raise HostUnsupported(
        f"no CRIU that works on kernel {os.uname().release}: {why}. Run `{SETUP}` as root to get one",
        fix=SETUP,
        feature="criu",
        why=why,
    )


def own_criu_argv(root: Path) -> tuple[str, ...]:
    """How to start the CRIU unpacked at `root`: through the loader and the libraries that came with it."""
    criu = root / "usr/sbin/criu"
    loaders = sorted(root.glob("usr/lib*/ld-linux-*.so.*")) + sorted(root.glob("lib*/ld-linux-*.so.*"))
    if not criu.exists() or not loaders:
        raise HostUnsupported(f"{root} does not hold a whole CRIU; run `{SETUP}`", fix=SETUP, feature="criu")
    libraries = sorted({libc.parent for libc in [*root.glob("usr/lib/*/libc.so.6"), *root.glob("lib/*/libc.so.6")]})
    return (str(loaders[0]), "--library-path", ":".join(map(str, libraries)), str(criu))


def check_criu(argv: Sequence[str]) -> Criu:
    """Run `criu check` and ask its version; HostUnsupported with CRIU's own words when it does not pass."""
    from waypoint.kernel.programs import run_program  # starts programs: not to be loaded by a mere look-up

    shown = argv[-1]
    said = run_program([*argv, "--version"], timeout=30).check(f"{shown} --version").text
    version = next((line.split(":", 1)[1].strip() for line in said.splitlines() if line.startswith("Version:")), "")
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    if numbers < OLDEST_CRIU:
        oldest = ".".join(map(str, OLDEST_CRIU))
        raise HostUnsupported(f"{shown} is {version or 'of no known version'}, not {oldest} or later", fix=SETUP)
    if os.geteuid() != 0:
        raise HostUnsupported(f"{shown} can only be checked by root; use sudo", fix="sudo " + SETUP, feature="root")
    verdict = run_program([*argv, "check"], timeout=30)
    if verdict.exit_code != 0:
        raise HostUnsupported(f"`{shown} check` fails: {verdict.tail()}", fix=SETUP, feature="criu")
    return Criu(tuple(argv), version, _kernel(), _identity(Path(shown)))


_STAMP, _QUICK_STAMP = "criu.json", "quick.json"


def remember_criu(criu: Criu, stamp: str = _STAMP) -> None:
    """Write the stamp that `criu_argv` trusts."""
    target = prefix() / stamp
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{stamp}.{os.getpid()}")
    fresh.write_text(json.dumps(asdict(criu)) + "\n")
    fresh.replace(target)


def _read_stamp(stamp: str = _STAMP) -> Criu | None:
    """The stamp, or None when there is none, it is unreadable, or it speaks of another kernel or another binary."""
    try:
        path = prefix() / stamp
        criu = _stamped(path, _identity(path))
        fresh = criu.kernel == _kernel() and criu.identity == _identity(Path(criu.argv[-1]))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return criu if fresh else None


@lru_cache(2)
def _stamped(path: Path, _: tuple[int, int, int]) -> Criu:
    read = json.loads(path.read_bytes())
    return Criu(tuple(read["argv"]), read["version"], read["kernel"], tuple(read["identity"]))


def engine_criu() -> Criu:
    """The CRIU of Waypoint itself: its own, or the one of `current_criu` where that is not built, or with WAYPOINT_QUICK=0."""
    return (None if os.environ.get("WAYPOINT_QUICK") == "0" else quick_criu()) or current_criu()


def is_criu() -> Callable[[str], bool]:
    """Whether a process that runs the program of this path may be a CRIU of some engine on this host, also of an older version."""
    plain = set()
    with contextlib.suppress(HostUnsupported):
        plain.add(str(Path(current_criu().argv[0]).resolve()))
    own = str(binary_path(QUICK).with_name("criu-"))
    return lambda path: path in plain or path.startswith(own)


def is_quick(criu: Criu) -> bool:
    """It is the engine's own, not the plain one."""
    return criu.argv[0].startswith(f"{prefix()}/bin/{QUICK.name}-")


def quick_criu() -> Criu | None:
    """The engine's own CRIU, if it has been built from the patch that this package carries and works on this kernel."""
    try:
        binary = _ours(QUICK)
        return _tried(str(binary), _identity(binary), _kernel(), prefix())
    except (HostUnsupported, OSError):
        return None


@lru_cache(4)
def _tried(binary: str, _: tuple[int, int, int], __: str, ___: Path) -> Criu | None:
    """For as long as this process lives; where it can be written, for those after it, too."""
    stamped = _read_stamp(_QUICK_STAMP)
    if stamped is None or stamped.argv != (binary,):
        try:
            stamped = check_criu((binary,))
        except (HostUnsupported, KernelError, OSError):
            return None
        with contextlib.suppress(OSError):
            remember_criu(stamped, _QUICK_STAMP)
    return stamped


def _candidates() -> list[tuple[str, ...]]:
    """The system's own CRIU first (its distribution keeps it patched), then those in the prefix, newest first."""
    system = [(str(path),) for path in (Path(where) / "criu" for where in _SYSTEM_DIRECTORIES) if path.exists()]
    unpacked = sorted(prefix().glob("criu-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    own = []
    for root in unpacked:
        with contextlib.suppress(HostUnsupported):
            own.append(own_criu_argv(root))
    return system[:1] + own


def _kernel() -> str:
    """Release and build: a rebuilt kernel of the same release may have lost an option that CRIU needs."""
    return f"{os.uname().release} {os.uname().version}"


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return (found.st_ino, found.st_size, found.st_mtime_ns)


# -- our own programs -------------------------------------------------------------------------------------------------


def launch_path() -> Path:
    """The host-side launcher compiled from the source that this package carries."""
    return _ours(PROGRAMS[0])


def init_path() -> Path:
    """The static PID 1 of a session, compiled from the source that this package carries."""
    return _ours(PROGRAMS[1])


def written_path() -> Path:
    """What makes CRIU dump only the memory that was written to (deltas.py)."""
    return _ours(PROGRAMS[2])


def survey_path() -> Path:
    """What looks at layers of thousands of files."""
    return _ours(PROGRAMS[3])


def pages_path() -> Path:
    """What saves thousands of single pages (regions.py)."""
    return _ours(PROGRAMS[4])


def _ours(program: Program) -> Path:
    """Found once in the life of a process, which goes on with the source that it was loaded from."""
    path = _found(program, prefix())
    if not path.exists():
        _found.cache_clear()
        path = _found(program, prefix())
    return path


@cache
def _found(program: Program, _: Path) -> Path:
    return program_path(program)


def program_path(program: Program) -> Path:
    """The binary of exactly this source; HostUnsupported naming `waypoint setup` if it has not been compiled.

    Binaries are named by a digest of their source, so an upgraded package never starts a stale one. To spare the digest
    on each call, a symlink named by the identity of the source files (inode, change times, sizes) leads to the binary.
    """
    try:
        seen = _seen_link(program)
    except FileNotFoundError as error:
        raise HostUnsupported(
            f"{program.source} is missing: this installation of Waypoint is not whole; install the package again",
            fix="pip install --force-reinstall statefork",
            feature=program.name,
        ) from error
    with contextlib.suppress(OSError):  # never seen, or cleaned away: the digest decides
        known = prefix() / "bin" / seen.readlink().name
        if known.exists():
            return known
    binary = binary_path(program)
    if not binary.exists():
        raise HostUnsupported(
            f"the {program.name} program is not compiled for this version of Waypoint; run `{SETUP}`",
            fix=SETUP,
            feature=program.name,
        )
    with contextlib.suppress(OSError):  # only a memory of the digest
        seen.parent.mkdir(exist_ok=True)
        seen.unlink(missing_ok=True)
        seen.symlink_to(f"../{binary.name}")
    return binary


def binary_path(program: Program) -> Path:
    """Where the binary of this source belongs, whether or not it is there."""
    from hashlib import sha256  # 3 ms to load; not needed once the source has been seen

    digest = sha256("\0".join(program.flags).encode())
    for path in program.files():
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return prefix() / "bin" / f"{program.name}-{digest.hexdigest()[:16]}"


def _seen_link(program: Program) -> Path:
    """Any write, rename or replacement changes a change time, which nobody can set, and so the sum of them."""
    program.source.stat()
    found = [path.stat() for path in (program.source.parent, *program.files())]
    changed = sum(one.st_ctime_ns for one in found)
    size_bytes = sum(one.st_size for one in found)
    identity = f"{found[0].st_dev:x}-{found[0].st_ino:x}-{len(found):x}-{changed:x}-{size_bytes:x}"
    return prefix() / "bin" / "seen" / f"{program.name}-{identity}"
