"""Get a CRIU that works on a new kernel, from Debian's archive, without touching the host's packages.

A distribution's CRIU is as old as its kernel, and an old CRIU dies on a new one (docs/decisions/criu-from-debian.md).
So apt is run on a private root: its own sources, lists, cache and an *empty* list of installed packages, which makes it
resolve the whole closure down to libc. The packages are unpacked side by side into the prefix and started through
their own loader. Signatures are always checked: what apt cannot verify is not unpacked.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import tools
from waypoint.kernel.programs import Finished, run_program

__all__ = ["Progress", "fetch_criu", "fetch_deb", "fetch_source", "locked_prefix", "mirrors"]

Progress = Callable[[str], None]

DEFAULT_MIRROR = "http://deb.debian.org/debian"
SUITES = (("forky",), ("sid",), ("trixie-backports", "trixie"))
"""Where to look, best first: the suite to install from, and those it builds upon."""

KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
KEYRING_SUITES = ("bullseye", "bookworm", "trixie")
"""Each release is signed with a key that its predecessor's keyring knew, and its own keyring knows the next one's."""

_ROUNDS = 3
_ROUND_PAUSE_S = 4.0
_UPDATE_TIMEOUT_S = 300.0
_DOWNLOAD_TIMEOUT_S = 600.0


@contextmanager
def locked_prefix() -> Iterator[Path]:
    """The prefix, made if need be, held against a second `waypoint setup`; a crashed one's leftovers are removed."""
    where = tools.prefix()
    try:
        where.mkdir(parents=True, exist_ok=True)
        lock = os.open(where / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise HostUnsupported(
            f"cannot write to {where}: {error.strerror}; run `sudo {tools.SETUP}`, or set WAYPOINT_TOOLS",
            fix=f"sudo {tools.SETUP}",
            feature="root",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in where.glob(".staging*"):
            shutil.rmtree(leftover)
        yield where
    finally:
        os.close(lock)


def fetch_criu(where: Path, progress: Progress) -> tools.Criu:
    """Download, unpack, check and move into place; only a CRIU that passed `criu check` is ever at `where`/criu-*.

    The caller holds `locked_prefix`.
    """
    if os.geteuid() != 0:
        raise HostUnsupported(
            f"only root can try CRIU; run `sudo {tools.SETUP}`", fix=f"sudo {tools.SETUP}", feature="root"
        )
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        oldest = ".".join(map(str, tools.OLDEST_CRIU))
        raise HostUnsupported(
            f"this host has no apt-get and dpkg-deb to fetch CRIU with; install CRIU {oldest} or later by other means",
            fix="install criu with the package manager of this host",
            feature="criu",
        )
    staging = where / f".staging-{os.getpid()}"
    staging.mkdir()  # not mkdtemp: apt's downloader drops to the user _apt, who must be able to pass through
    try:
        return _fetch_into(where, staging, progress)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch_into(where: Path, staging: Path, progress: Progress) -> tools.Criu:
    """Ask every mirror for every suite until one gives a CRIU that works here; a network that failed is asked again."""
    keys = _host_keyring(staging, progress)
    archives = mirrors()
    refusals: dict[str, str] = {}
    some_came = False
    for round_number in range(_ROUNDS):
        if round_number:
            progress("nothing could be downloaded; trying again")
            time.sleep(_ROUND_PAUSE_S * round_number)
        for number, (suites, mirror) in enumerate((suites, mirror) for suites in SUITES for mirror in archives):
            root = staging / f"{round_number}-{number}"
            try:
                keys, debs = _download_criu(root, mirror, suites, keys, progress)
                return _unpack(where, root, debs, progress)
            except (KernelError, HostUnsupported) as error:
                refusals[f"Debian {suites[0]} at {mirror}"] = error.message
                some_came = some_came or isinstance(error, HostUnsupported)
        if some_came:
            break
    raise HostUnsupported(
        "no working CRIU could be fetched:\n" + "\n".join(f"- {source}: {why}" for source, why in refusals.items()),
        fix="check the network and the proxy settings of apt, then run `waypoint setup` again",
        feature="criu",
    )


def fetch_deb(
    staging: Path, package: str, wanted: re.Pattern[str], suites: Sequence[tuple[str, ...]], progress: Progress
) -> Path:
    """Of all that `package` would bring along, only the package whose name is `wanted`: a kernel without its tools."""
    keys = _host_keyring(staging, progress)
    refusals = []
    for number, (suite, mirror) in enumerate((suite, mirror) for suite in suites for mirror in mirrors()):
        progress(f"fetching {package} from Debian {suite[0]} ({mirror})")
        try:
            return _download_one(staging / str(number), mirror, suite, keys, package, wanted)
        except KernelError as error:
            refusals.append(f"- Debian {suite[0]} at {mirror}: {error.message}")
    raise HostUnsupported(
        f"{package} could not be fetched:\n" + "\n".join(refusals),
        fix="check the network and the proxy settings of apt, and try again",
    )


def fetch_source(staging: Path, package: str, version: str, progress: Progress) -> Path:
    """The archive that the authors of `package` released as `version`, without what Debian adds to it."""
    keys = _host_keyring(staging, progress)
    refusals = []
    for number, (suites, mirror) in enumerate((suites, mirror) for suites in SUITES for mirror in mirrors()):
        progress(f"fetching the source of {package} {version} from Debian {suites[0]} ({mirror})")
        root = staging / f"source-{number}"
        try:
            try:
                return _download_source(root, mirror, suites, keys, package, version)
            except KernelError as error:
                if not _lacks_key(error.message):
                    raise
            keys = _newer_keyring(root, mirror, keys, progress)
            return _download_source(root, mirror, suites, keys, package, version)
        except KernelError as error:
            refusals.append(f"- Debian {suites[0]} at {mirror}: {error.message}")
    raise HostUnsupported(
        f"the source of {package} {version} could not be fetched:\n" + "\n".join(refusals),
        fix=f"check the network and the proxy settings of apt, then run `{tools.SETUP}` again",
    )


def _download_source(
    root: Path, mirror: str, suites: tuple[str, ...], keyring: Path, package: str, version: str
) -> Path:
    apt = _indexed(root, mirror, suites[:1], keyring, kind="deb-src", target="Sources")
    what = f"downloading the source of {package}"
    _must(apt.get("source", "--tar-only", "--download-only", package, timeout=_DOWNLOAD_TIMEOUT_S), what)
    found = sorted(root.glob(f"{package}_{version}.orig.tar.*"))
    if not found:
        there = ", ".join(path.name for path in root.glob(f"{package}_*.tar.*"))
        raise KernelError(f"Debian {suites[0]} has another version than {version}: {there or 'nothing'}")
    return found[0]


def _download_one(
    root: Path, mirror: str, suites: tuple[str, ...], keyring: Path, package: str, wanted: re.Pattern[str]
) -> Path:
    apt = _indexed(root, mirror, suites, keyring)
    asked = apt.get("install", "--print-uris", "--no-install-recommends", package, timeout=_UPDATE_TIMEOUT_S)
    _must(asked, f"looking for {package} in Debian {suites[0]}")
    names = re.findall(r"^'[^']*' ([^_]+)_\S+ ", asked.text, re.MULTILINE)
    name = next((name for name in names if wanted.fullmatch(name)), None)
    if name is None:
        raise KernelError(f"Debian {suites[0]} has no {wanted.pattern} behind {package}")
    _must(apt.get("download", name, timeout=_DOWNLOAD_TIMEOUT_S), f"downloading {name}")
    return next(root.glob(f"{name}_*.deb"))


def _download_criu(
    root: Path, mirror: str, suites: tuple[str, ...], keys: Path, progress: Progress
) -> tuple[Path, list[Path]]:
    """The packages, and the keyring that verified them: a newer one than was given, if that one was too old."""
    progress(f"fetching criu from Debian {suites[0]} ({mirror})")
    try:
        return keys, _download(root, mirror, suites, keys, "criu")
    except KernelError as error:
        if not _lacks_key(error.message):
            raise
    keys = _newer_keyring(root, mirror, keys, progress)
    return keys, _download(root, mirror, suites, keys, "criu")


def _unpack(where: Path, root: Path, debs: list[Path], progress: Progress) -> tools.Criu:
    size_bytes = sum(deb.stat().st_size for deb in debs)
    progress(f"unpacking {len(debs)} packages ({size_bytes / 1e6:.1f} MB)")
    unpacked = root / "root"
    for deb in debs:
        run_program(["dpkg-deb", "-x", str(deb), str(unpacked)], timeout=120).check(f"unpacking {deb.name}")
    version = next(deb.name.split("_")[1] for deb in debs if deb.name.startswith("criu_"))
    progress(f"trying criu {version} on kernel {os.uname().release}")
    passed = tools.check_criu(tools.own_criu_argv(unpacked))
    os.sync()  # the rename must not reach the disk before the files do
    target = where / f"criu-{version.replace('%3a', '.')}"
    if target.exists():
        target.rename(root / "replaced")
    unpacked.rename(target)
    return replace(passed, argv=tools.own_criu_argv(target))


# -- apt on a private root --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PrivateApt:
    """apt with its own state under `root`. The host's proxy settings stay in force; its hooks and pins do not."""

    root: Path
    sources: str | None
    """Lines of a sources.list; None means the host's own sources, with the host's own trust."""

    def prepare(self) -> None:
        for name in ("state/lists/partial", "cache/archives/partial", "log"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "state/status").touch()
        architecture = run_program(["dpkg", "--print-architecture"], timeout=30).check("asking dpkg").text
        lines = [
            f'Dir::State "{self.root}/state";',
            f'Dir::State::status "{self.root}/state/status";',
            f'Dir::Cache "{self.root}/cache";',
            f'Dir::Log "{self.root}/log";',
            'Dir::Etc::preferences "/dev/null";',
            'Dir::Etc::preferencesparts "/dev/null";',
            'APT::Default-Release "";',
            f'APT::Architecture "{architecture}";',
            "#clear APT::Architectures;",
            f'APT::Architectures {{ "{architecture}"; }};',
            'APT::Install-Recommends "false";',
            'APT::Get::AllowUnauthenticated "false";',
            'Acquire::AllowInsecureRepositories "false";',
            'Acquire::AllowWeakRepositories "false";',
            'Acquire::Languages "none";',
            'Acquire::Retries "2";',
            *(f"#clear {hook};" for hook in _HOOKS),
        ]
        if self.sources is not None:
            (self.root / "sources.list").write_text(self.sources)
            lines += [f'Dir::Etc::sourcelist "{self.root}/sources.list";', 'Dir::Etc::sourceparts "/dev/null";']
        (self.root / "apt.conf").write_text("\n".join(lines) + "\n")

    def get(self, *arguments: str, timeout: float) -> Finished:
        env = {name: value for name, value in os.environ.items() if name != "APT_CONFIG"}
        env |= {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        argv = ["apt-get", "-c", str(self.root / "apt.conf"), "-q", "-y", *arguments]
        return run_program(argv, timeout=timeout, cwd=self.root, env=env, own_session=False)


_STRICT_UPDATE = ("update", "-o", "APT::Update::Error-Mode=any")
"""By default apt calls it a success when an index could not be fetched."""

_HOOKS = (
    "APT::Update::Pre-Invoke",
    "APT::Update::Post-Invoke",
    "APT::Update::Post-Invoke-Success",
    "DPkg::Pre-Invoke",
    "DPkg::Pre-Install-Pkgs",
    "DPkg::Post-Invoke",
)


def _download(root: Path, mirror: str, suites: tuple[str, ...], keyring: Path, package: str) -> list[Path]:
    """The package and everything it depends on, verified against `keyring`; KernelError with apt's words otherwise."""
    apt = _indexed(root, mirror, suites, keyring)
    arguments = ("install", "--download-only", "--no-install-recommends", "-t", suites[0], package)
    _must(apt.get(*arguments, timeout=_DOWNLOAD_TIMEOUT_S), f"downloading {package} from Debian {suites[0]}")
    return sorted((root / "cache/archives").glob("*.deb"))


def _indexed(
    root: Path, mirror: str, suites: tuple[str, ...], keyring: Path, *, kind: str = "deb", target: str = "Packages"
) -> _PrivateApt:
    lines = [f"{kind} [target={target} signed-by={keyring}] {mirror} {suite} main\n" for suite in suites]
    apt = _PrivateApt(root, "".join(lines))
    apt.prepare()
    _must(apt.get(*_STRICT_UPDATE, timeout=_UPDATE_TIMEOUT_S), f"reading the index of Debian {suites[0]}")
    return apt


def _must(done: Finished, what: str) -> None:
    """KernelError with the lines in which apt says what is wrong, and not with its whole report."""
    if done.exit_code == 0:
        return
    lines = done.stderr.decode(errors="replace").splitlines()
    wrong = [line for line in lines if line.startswith(("E: ", "W: GPG error"))]
    raise KernelError(f"{what}: " + ("; ".join(wrong) or done.tail()), argv=list(done.argv))


def mirrors() -> list[str]:
    """Debian mirrors: those of the host's own apt sources (near, and reachable), then the standard one."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN)", "Created-By: Packages"]
    found = []
    for line in run_program(asked, timeout=60).text.splitlines():
        uri, _, origin = line.partition(" ")
        last = urlsplit(uri).path.rstrip("/").rsplit("/", 1)[-1]
        if last in ("debian", "debian.list") or (origin == "Debian" and "security" not in uri):
            found.append(uri.rstrip("/"))
    return list(dict.fromkeys([*found, DEFAULT_MIRROR]))


# -- keys -------------------------------------------------------------------------------------------------------------


def _host_keyring(staging: Path, progress: Progress) -> Path:
    """Debian's archive keys: installed on Debian; Ubuntu's own archive has them in a package, which Ubuntu signs."""
    for keyring in KEYRINGS:
        if keyring.exists():
            return keyring
    progress("fetching Debian's archive keys from this host's own archive")
    apt = _PrivateApt(staging / "host-keyring", sources=None)
    apt.prepare()
    # Third-party sources of the host may be down without harm: only the keyring package has to be found.
    apt.get("update", timeout=_UPDATE_TIMEOUT_S)
    return _unpack_keyring(apt)


def _newer_keyring(root: Path, mirror: str, keys: Path, progress: Progress) -> Path:
    """Follow Debian's chain of keys: old keys verify an older release, whose keyring package has the newer keys."""
    for suite in KEYRING_SUITES:
        progress(f"the archive keys at hand are too old; reading newer ones from Debian {suite}")
        source = f"deb [target=Packages signed-by={keys}] {mirror} {suite} main\n"
        apt = _PrivateApt(root.with_name(f"{root.name}-keys-{suite}"), source)
        apt.prepare()
        if apt.get(*_STRICT_UPDATE, timeout=_UPDATE_TIMEOUT_S).exit_code == 0:
            keys = _unpack_keyring(apt)
    return keys


def _unpack_keyring(apt: _PrivateApt) -> Path:
    package = "debian-archive-keyring"
    _must(apt.get("download", package, timeout=_DOWNLOAD_TIMEOUT_S), f"downloading {package}")
    deb = next(apt.root.glob(f"{package}_*.deb"))
    unpacked = apt.root / "keyring"
    run_program(["dpkg-deb", "-x", str(deb), str(unpacked)], timeout=60).check(f"unpacking {deb.name}")
    for keyring in KEYRINGS:
        inside = unpacked / keyring.relative_to("/")
        if inside.exists():
            return inside
    raise KernelError(f"{deb.name} holds no keyring at {KEYRINGS[0]}")


def _lacks_key(apt_said: str) -> bool:
    """gpgv says NO_PUBKEY, sqv (apt 3) says "Missing key"."""
    return "NO_PUBKEY" in apt_said or "Missing key" in apt_said
