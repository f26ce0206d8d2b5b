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
}
_PLAIN_CRIU = {
    "lost/*": "what CRIU forgets is not looked after",
    "refused/*": "refused in CRIU's own words, which name no process and no remedy",
    "files/posix-lock-on-mapping": "CRIU loses record locks on files that their owner has mapped",
    "programs/sqlite-wal": "CRIU loses record locks on files that their owner has mapped",
    "processes/identity": "without a user namespace CRIU cannot ask for another user's limits",
    "network/tcp-transfer": "packets are not held back, and what a full queue holds does not come back",
}
_WAITING = {
    "shell/foreground-command": "a snapshot waits for the command",
}
_OWN_KERNEL = "gVisor's kernel has none"
_SKIPPED_OPTIONS = {
    "files/tmpfs-mount": "environments may not mount",
    "files/bind-mount": "environments may not mount",
    "processes/cgroup-limits": "environments have no limits of their own",
    "network/outbound-connection": "environments have no way out",
}

NOT_CLAIMED: dict[str, dict[str, str]] = {
    "docker": {**_IMAGE, "files/xattrs": "images keep no user attributes"},
    "podman": _IMAGE,
    "hybrid": {
        **_ARCHIVE,
        **_PLAIN_CRIU,
        **_WAITING,
        **_SKIPPED_OPTIONS,
        "files/delete-and-make-again": "podman cannot export a file that became a directory",
        "files/deleted-but-open": "podman's archive lacks the names that CRIU gives such files for a while",
        "files/inotify": "podman's overlay has no file handles for watches",
        "programs/node": "podman's overlay has no file handles for watches",
        "programs/postgresql": "without a user namespace CRIU cannot ask for another user's limits",
        "programs/process-manager": "CRIU loses the names of sockets that were renamed after they were bound",
        "processes/stopped-process": "the freezer waits for stopped processes for ever",
    },
    "criu": {
        **_PLAIN_CRIU,
        **_WAITING,
        **_SKIPPED_OPTIONS,
        "processes/daemon": "comes back below PID 1 and not below the tree's root; the next snapshot names it as beside the tree",
    },
    "gvisor": {
        **_SKIPPED_OPTIONS,
        "files/file-capabilities": _OWN_KERNEL,
        "files/file-lease": _OWN_KERNEL,
        "processes/pid-fd": _OWN_KERNEL,
        "processes/priorities": "gVisor's kernel has one scheduling policy",
        "lost/io-priority": _OWN_KERNEL,
        "lost/timer-slack": _OWN_KERNEL,
        "lost/coredump-filter": _OWN_KERNEL,
        "lost/semaphore-eventfd": "not lost, so there is nothing to name",
        "lost/open-database": "not lost, so there is nothing to name",
        "lost/personality": "gVisor's kernel has one personality",
        "lost/memory-seal": _OWN_KERNEL,
        "lost/keyring": "environments are made with gVisor's own filter of system calls",
        "refused/*": "a list of what CRIU cannot store; gVisor stores its own kernel's state",
    },
    "qemu": {
        **_SKIPPED_OPTIONS,
        "shell/foreground-command": "it goes on, but $? is not its status afterwards",
        "lost/semaphore-eventfd": "a machine forgets nothing, so there is nothing to name",
        "lost/open-database": "a machine forgets nothing, so there is nothing to name",
        "lost/personality": "a machine forgets nothing, so there is nothing to name",
        "lost/memory-seal": "a machine forgets nothing, so there is nothing to name",
        "lost/keyring": "a machine forgets nothing, so there is nothing to name",
        "refused/*": "a list of what CRIU cannot store; a machine has to refuse nothing",
    },
}

CLAIMED: dict[str, tuple[str, ...]] = {
    "gvisor": ("network", "ipc"),
    "criu": ("network",),
    "hybrid": ("network", "ipc"),
}
"""What they bring back beside the capabilities that StateFork has a word for."""
