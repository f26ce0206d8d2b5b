"""What a session's files are, told from inside it: the truth that looking from outside is judged by."""

from __future__ import annotations

from waypoint.session import Session

__all__ = ["Facts", "expected_changes", "listing"]

Facts = dict[str, tuple[str, ...]]

_SCRIPT = r"""
export LC_ALL=C
find "$@" -xdev \( -path /.waypoint -o -path /proc -o -path /sys -o -path /dev/pts -o -path /dev/mqueue \) -prune -o \
  \( -type d -printf '%p\0%y\0%m\0%U:%G\0\0\0' -o -printf '%p\0%y\0%m\0%U:%G\0%s\0%l\0' \)
printf '\0'
find "$@" -xdev \( -path /.waypoint -o -path /proc -o -path /sys \) -prune -o -type f -print0 | xargs -0 md5sum -z
"""


def listing(session: Session, *roots: str) -> Facts:
    """Every path with its type, mode, owner, size, link target and checksum, by `find` and `md5sum` in the session."""
    said = session.run(["bash", "-c", _SCRIPT, "listing", *(roots or ("/",))], timeout=120, limit=256 << 20)
    assert said.exit_code == 0, said.stderr
    assert not said.truncated
    words = said.stdout.decode(errors="surrogateescape").split("\0")
    facts: Facts = {}
    at = 0
    while words[at]:
        facts[words[at]] = tuple(words[at + 1 : at + 6])
        at += 6
    for line in words[at + 1 : -1]:
        checksum, path = line[:32], line[34:]
        facts[path] = (*facts[path], checksum)
    return facts


def expected_changes(before: Facts, after: Facts) -> set[tuple[str, str]]:
    """(status, path) of everything that is not the same."""
    found = {("added", path) for path in after.keys() - before.keys()}
    found |= {("removed", path) for path in before.keys() - after.keys()}
    return found | {("changed", path) for path in before.keys() & after.keys() if before[path] != after[path]}
