"""Files of an environment by their names, as tar streams; with any tar that knows `--no-recursion`, busybox's included."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import IO

from statefork.environment import Environment
from statefork.errors import KernelError
from statefork.manifest import KERNEL_DIRECTORIES
from statefork.model import Stream

__all__ = ["tar_of", "tar_of_root"]

_MOST_NAMES, _MOST_BYTES = 500, 60_000
_SPOOL = 8 << 20
_OURS = ".waypoint"
_ROOT = (
    'cd / && set -- && for f in ./* ./.[!.]*; do [ -e "$f" ] || [ -L "$f" ] || continue; case $f in '
    + "|".join(f"./{name}" for name in (*KERNEL_DIRECTORIES, _OURS))
    + ') ;; *) set -- "$@" "$f";; esac; done; exec tar -c -f - "$@"'
)


def tar_of(environment: Environment, path: str, names: Sequence[str]) -> Iterator[IO[bytes]]:
    """Archives of these names below a directory, as many as it takes; each is closed when the next is asked for."""
    for chunk in _chunks(names):
        argv = ["tar", "-C", path, "-c", "-f", "-", "--no-recursion", "--", *(f"./{name}" for name in chunk)]
        with _output(environment, argv) as archive:
            yield archive


def tar_of_root(environment: Environment) -> IO[bytes]:
    """All files, but for what the kernel or we put there. The caller closes it."""
    return _output(environment, ["sh", "-c", _ROOT])


def _output(environment: Environment, argv: list[str]) -> IO[bytes]:
    spool = tempfile.SpooledTemporaryFile(_SPOOL)  # noqa: SIM115  the caller's

    def keep(stream: Stream, data: bytes) -> None:
        if stream == "stdout":
            spool.write(data)

    try:
        done = environment.run(argv, on_output=keep)
        if done.exit_code not in (0, 1):  # 1: a file changed while it was read, which on a live system is no failure
            raise KernelError(f"tar in environment {environment.id} failed: {done.stderr.strip()[-500:]}")
    except BaseException:
        spool.close()
        raise
    spool.seek(0)
    return spool


def _chunks(names: Sequence[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for name in names:
        length = len(name.encode(errors="surrogateescape"))
        if chunk and (len(chunk) >= _MOST_NAMES or size + length > _MOST_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(name)
        size += length
    if chunk:
        yield chunk
