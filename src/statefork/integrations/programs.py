"""What async frameworks ask for and an Environment does not have: a program as any user, and one that ends when its caller
is cancelled. Needs anyio, which those frameworks bring along; works on asyncio and on trio."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import TypeVar

import anyio
import anyio.to_thread

from statefork.environment import Environment
from statefork.errors import WaypointError
from statefork.model import OUTPUT_LIMIT_BYTES, ExecResult, OnOutput

__all__ = ["NO_SUCH_USER", "as_user", "dockerfile_user", "in_thread", "run_program"]

T = TypeVar("T")

NO_SUCH_USER = 85

# The programs that change the user are found on a fixed path, never on one that the user could write to; the command
# itself is then looked up on the path that the caller gave. Where util-linux is missing (busybox), `su` does it.
_AS_USER = f"""\
user=$1; shift; theirs=$PATH; PATH=/usr/sbin:/usr/bin:/sbin:/bin
entry=$(while IFS=: read -r name _ uid gid _ home _; do
  if [ "$name" = "$user" ] || [ "$uid" = "$user" ]; then echo "$name:$uid:$gid:$home"; break; fi
done </etc/passwd)
if [ -z "$entry" ]; then
  case $user in *[!0-9]*|'') echo "no such user in the environment: $user" >&2; exit {NO_SUCH_USER};; esac
  entry="$user:$user:$user:/"
  groups=--clear-groups
else
  groups=--init-groups
fi
IFS=: read -r name uid gid home <<END
$entry
END
[ "$uid" = "$(id -u)" ] && {{ PATH=$theirs; export HOME="$home"; exec "$@"; }}
if command -v setpriv >/dev/null && setpriv --help 2>&1 | grep -q -- --init-groups; then
  exec setpriv --reuid "$uid" --regid "$gid" $groups env PATH="$theirs" HOME="$home" USER="$name" LOGNAME="$name" "$@"
fi
export HOME="$home" USER="$name" LOGNAME="$name" THEIRS="$theirs"
exec su -m -s /bin/sh "$name" -c 'PATH=$THEIRS; unset THEIRS; exec "$0" "$@"' -- "$@"
"""


def as_user(argv: Sequence[str], user: str | int | None) -> list[str]:
    """The same program as a user of the environment, by name or number; the environment's own user must be root.

    Ends with NO_SUCH_USER, and says so on stderr, if there is none of that name.
    """
    if user is None:
        return list(argv)
    return ["/bin/sh", "-c", _AS_USER, "sh", str(user), *argv]


def dockerfile_user(dockerfile: Path) -> str | None:
    """The USER of the last stage, as written: frameworks that act as several users need the session itself to be root's,
    and this is then whom commands run as by default."""
    user: str | None = None
    for line in dockerfile.read_text().splitlines() if dockerfile.exists() else ():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            user = None
        elif word.upper() == "USER":
            user = rest.strip().partition(":")[0] or None
    return user


async def in_thread(call: Callable[[], T]) -> T:
    """Engine calls block, and half a snapshot must not be cancellable: they run on a thread of their own, to their end."""
    return await anyio.to_thread.run_sync(call, limiter=anyio.CapacityLimiter(1))


async def run_program(
    environment: Environment,
    argv: Sequence[str],
    *,
    user: str | int | None = None,
    timeout: float | None = None,
    stdin: bytes | str | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    on_output: OnOutput | None = None,
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
) -> ExecResult:
    """`Environment.run` for a caller that may be cancelled: the program is killed then, not left behind."""
    ending = _Ending(environment)
    call = partial(
        environment.run,
        as_user(argv, user),
        timeout=timeout,
        stdin=stdin,
        cwd=cwd,
        env=env,
        on_output=on_output,
        on_start=ending.started,
        output_limit_bytes=output_limit_bytes,
    )
    try:
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
    except anyio.get_cancelled_exc_class():
        ending.wanted()
        raise


class _Ending:
    """Kills a program whether it is cancelled before or after it has a number."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._number: int | None = None
        self._wanted = False

    def started(self, number: int) -> None:
        with self._lock:
            self._number = number
            kill = self._wanted
        if kill:
            self._kill()

    def wanted(self) -> None:
        with self._lock:
            self._wanted = True
            kill = self._number is not None
        if kill:
            self._kill()

    def _kill(self) -> None:
        with suppress(WaypointError):  # it has ended by itself, or its environment has
            self._environment.signal_command(SIGKILL, self._number)
