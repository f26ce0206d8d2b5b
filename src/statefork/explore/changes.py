"""The files that a winner changed, side by side with what they were: to apply to a directory, or to export as a patch."""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from statefork.environment import Environment
from statefork.errors import Exists, HostUnsupported, KernelError, NotFound, UsageError
from statefork.explore.guest_tar import tar_of
from statefork.files import absolute, unpack_into
from waypoint.kernel.programs import run_program

__all__ = ["Changes", "changed_files"]

_GIT_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Changes:
    """Names are relative to the directory that was looked at. Only what differs is in the two directories."""

    path: str
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    before: Path
    after: Path

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def apply(self, directory: Path, *, force: bool = False) -> None:
        """Make the directory what the winner's is. All or nothing: first everything is compared.

        Raises Exists, with the names, if the directory has something else where something was changed; `force`
        overwrites it. Owners are those of the caller.
        """
        if not directory.is_dir():
            raise NotFound(f"{directory} is not a directory; the changes of {self.path} are applied to one that exists")
        root = directory.resolve()
        for name in (*self.added, *self.changed, *self.removed):
            parent = (root / name).parent.resolve()
            if parent != root and root not in parent.parents:
                raise UsageError(f"{directory}/{name} leads out of the directory, by a link; nothing was applied")
        clashes = [] if force else [name for name in self._names() if not self._expected(root, name)]
        if clashes:
            listed = ", ".join(clashes[:5]) + (f" and {len(clashes) - 5} more" if len(clashes) > 5 else "")
            raise Exists(
                f"{directory} differs from what the search began with: {listed}; nothing was applied", names=clashes
            )
        for name in sorted(self.removed, reverse=True):
            _remove(root / name)
        for name in (*self.added, *self.changed):  # parents come before what is in them
            _put(self.after / name, root / name)

    def patch(self) -> bytes:
        """For `git apply` in the directory. What is in `.git` is left out, and so are empty directories and owners."""
        with tempfile.TemporaryDirectory(prefix="statefork-patch-") as scratch:
            for side, source in (("a", self.before), ("b", self.after)):
                ignore = shutil.ignore_patterns(".git")
                shutil.copytree(source, Path(scratch, side), symlinks=True, ignore=ignore)
            return _git_diff(Path(scratch))

    def _names(self) -> list[str]:
        return sorted({*self.added, *self.changed, *self.removed})

    def _expected(self, root: Path, name: str) -> bool:
        """It is as it was before, or already as it shall be."""
        return _same(root / name, self.before / name) or _same(root / name, self.after / name)


@contextmanager
def changed_files(environment: Environment, began: str, path: str) -> Iterator[Changes]:
    """What differs below `path` between a snapshot and the environment now."""
    path = absolute(path)
    found = environment.diff(began)
    added, changed, removed = (_below(path, names) for names in (found.added, found.changed, found.removed))
    with tempfile.TemporaryDirectory(prefix="statefork-changes-") as scratch:
        before, after = Path(scratch, "before"), Path(scratch, "after")
        before.mkdir()
        after.mkdir()
        if changed or removed:
            (earlier,) = environment.fork(1, from_snapshot=began)
            with earlier:
                _fetch(earlier, path, (*changed, *removed), before)
        if added or changed:
            _fetch(environment, path, (*added, *changed), after)
        yield Changes(path, added, changed, removed, before, after)


def _below(path: str, names: Sequence[str]) -> tuple[str, ...]:
    base = path.rstrip("/") + "/"
    return tuple(name[len(base) :] for name in names if name.startswith(base))


def _fetch(environment: Environment, path: str, names: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryFile() as spool:
        for piece in tar_of(environment, path, names):
            spool.seek(0)
            spool.truncate()
            shutil.copyfileobj(piece, spool)
            spool.seek(0)
            unpack_into(spool, ".", target)


def _same(one: Path, other: Path) -> bool:
    """Two that are not there are the same. Modes count by whether a file can be executed, as for git."""
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    if one.is_dir() or other.is_dir():
        return one.is_dir() and other.is_dir()
    if not one.exists() or not other.exists():
        return not one.exists() and not other.exists()
    executable = [bool(file.stat().st_mode & 0o100) for file in (one, other)]
    return executable[0] == executable[1] and filecmp.cmp(one, other, shallow=False)


def _remove(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        if not any(target.iterdir()):  # else something is in it that the search never saw
            target.rmdir()
    else:
        target.unlink(missing_ok=True)


def _put(source: Path, target: Path) -> None:
    if not source.exists() and not source.is_symlink():
        return  # a device or a socket
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            target.unlink()
        target.mkdir(exist_ok=True)
        shutil.copymode(source, target)
        return
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    fresh = target.with_name(f".{target.name}.statefork")
    shutil.copy2(source, fresh, follow_symlinks=False)
    fresh.replace(target)


def _git_diff(directory: Path) -> bytes:
    """Nobody's configuration has a say in it."""
    options = ["--no-index", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames"]
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "HOME": str(directory),
    }
    try:
        done = run_program(
            ["git", "diff", *options, "--no-prefix", "a", "b"],
            timeout=_GIT_TIMEOUT,
            cwd=directory,
            env=env,
            keep_bytes=1 << 32,
        )
    except HostUnsupported as error:
        raise HostUnsupported("git is not installed; apt-get install git", fix="apt-get install git") from error
    if done.exit_code not in (0, 1):
        raise KernelError(f"git diff failed: {done.tail()}")
    return done.stdout
