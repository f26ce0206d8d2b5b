"""Background jobs of an environment, kept inside it: a directory each, with the command, its pid, its output and how it ended.

Nothing of a job is known outside, so that it goes where its environment goes: a snapshot holds it, a fork has it too, and a
restore takes its output back along with its processes. It is started by the persistent shell and inherits its variables
and directory, but it is no job of that shell (`disown`): the shell would speak of it in other commands' output.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from statefork.errors import NotFound, UsageError

__all__ = ["DIRECTORY", "Look", "look_argv", "new_name", "parse_look", "place", "start_command"]

DIRECTORY = "/tmp/.statefork-jobs"
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789-_"

_LOOK = """
cd "$1" 2>/dev/null || { echo absent; exit; }
if [ -s exit ]; then read -r state < exit; elif kill -0 "$(cat pid 2>/dev/null)" 2>/dev/null; then state=running; else state=lost; fi
[ "$state" = lost ] && [ -s exit ] && read -r state < exit
echo "$state"
wc -c < log
tail -c "+$2" log | head -c "$3"
"""


@dataclass(frozen=True, slots=True)
class Look:
    state: str
    """running, exited or lost."""
    exit_code: int | None
    size: int
    """Of its output, in bytes."""
    data: bytes


def new_name(wanted: str | None) -> str:
    if wanted is None:
        return f"job-{secrets.token_hex(3)}"
    if not wanted or len(wanted) > 40 or set(wanted.lower()) - set(_LETTERS):
        raise UsageError(f"{wanted!r} is no name for a job: use letters, digits, - and _, 40 at most")
    return wanted


def place(name: str) -> str:
    return f"{DIRECTORY}/{new_name(name)}"


def start_command(name: str) -> str:
    """For the shell; the command itself is in the file `command`, so no quoting touches it. Prints the pid."""
    at = place(name)
    inner = f". {at}/command"
    return (
        f"rm -f {at}/exit {at}/log; "
        f"{{ ( ( {inner} ); echo $? > {at}/exit.new; mv {at}/exit.new {at}/exit ) > {at}/log 2>&1 < /dev/null & }} 2>/dev/null; "
        f"echo $! > {at}/pid; disown $! 2>/dev/null; cat {at}/pid"
    )


def look_argv(name: str, offset: int, most: int) -> list[str]:
    return ["sh", "-c", _LOOK, "sh", place(name), str(offset + 1), str(most)]


def parse_look(name: str, printed: bytes) -> Look:
    state, _, rest = printed.partition(b"\n")
    if state == b"absent" or not rest:
        raise NotFound(f"there is no background job {name!r} here; run_in_background starts one")
    size, _, data = rest.partition(b"\n")
    code = int(state) if state.isdigit() else None
    return Look("exited" if code is not None else state.decode(), code, int(size), data)
