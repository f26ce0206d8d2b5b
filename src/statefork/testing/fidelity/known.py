"""What our own backends are known not to bring back, though the capability as a whole is theirs: case or pattern -> why.

Found by running the suite, and shown in the table as not claimed. A case that begins to pass should leave this list;
`statefork fidelity --all` judges them too.
"""

from __future__ import annotations

__all__ = ["CLAIMED", "NOT_CLAIMED"]

_ARCHIVE = {
    "files/sparse-files": "its archives have no holes",
    "files/times": "its archives keep whole seconds",
    "files/special-files": "its archives have no sockets",
}
_IMAGE = {
    **_ARCHIVE,
    "files/hard-links": "the names of a file in an image part ways when it is written to",
    "files/dev-shm": "/dev/shm is not in an image",
    "files/xattrs": "images keep no user attributes",
}
_PLAIN_CRIU = {
    "lost/*": "what CRIU forgets is not looked after",
    "refused/*": "refused in CRIU's own words, which name no process and no remedy",
    "files/posix-lock-on-mapping": "CRIU loses record locks on files that their owner has mapped",
    "programs/sqlite-wal": "CRIU loses record locks on files that their owner has mapped",
}
_WAITING = {
    "shell/last-status": "$? is the snapshot's own afterwards",
    "shell/foreground-command": "a snapshot waits for the command",
}

NOT_CLAIMED: dict[str, dict[str, str]] = {
    "docker": _IMAGE,
    "podman": _IMAGE,
    "hybrid": {
        **_ARCHIVE,
        **_PLAIN_CRIU,
        **_WAITING,
        "files/delete-and-make-again": "podman cannot export a file that became a directory",
        "files/deleted-but-open": "podman's archive lacks the names that CRIU gives such files for a while",
        "files/inotify": "podman's overlay has no file handles for watches",
        "processes/stopped-process": "the freezer waits for stopped processes for ever",
        "processes/identity": "without a user namespace CRIU cannot ask for another user's limits",
    },
}

CLAIMED: dict[str, tuple[str, ...]] = {
    "gvisor": ("network", "ipc"),
    "criu": ("network", "ipc"),
}
"""What they bring back beside the capabilities that StateFork has a word for."""
