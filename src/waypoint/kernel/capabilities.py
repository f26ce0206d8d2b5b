"""Which of root's powers a session keeps, and which of the kernel's files it does not see: Docker's choices.

The sets follow Docker's defaults (moby, `oci/caps` and `oci/defaults`, 2026). They count for less than in Docker,
because a session has its own user namespace: there CAP_MKNOD makes no device, and CAP_SYS_ADMIN has no power over the
host.
"""

from __future__ import annotations

from collections.abc import Iterable

from waypoint.errors import HostUnsupported, UsageError

__all__ = [
    "ALL_CAPABILITIES",
    "DEFAULT_CAPABILITIES",
    "MASKED_PATHS",
    "READ_ONLY_PATHS",
    "UNMASKING",
    "capability_mask",
    "parse_caps",
    "require_shifted_ids",
]

_IN_BIT_ORDER = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
    NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
    SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE
    MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE
"""

_BITS = {f"CAP_{name}": bit for bit, name in enumerate(_IN_BIT_ORDER.split())}

ALL_CAPABILITIES = frozenset(_BITS)

DEFAULT_CAPABILITIES = frozenset(
    {
        "CAP_AUDIT_WRITE",
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FOWNER",
        "CAP_FSETID",
        "CAP_KILL",
        "CAP_MKNOD",
        "CAP_NET_BIND_SERVICE",
        "CAP_NET_RAW",
        "CAP_SETFCAP",
        "CAP_SETGID",
        "CAP_SETPCAP",
        "CAP_SETUID",
        "CAP_SYS_CHROOT",
    }
)

UNMASKING = frozenset({"CAP_SYS_ADMIN"})
"""With these a session can unmount its masks. Harmless under a shifted uid map; under the identity map it is root on
the host (docs/decisions/proc-masking.md)."""

MASKED_PATHS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)

READ_ONLY_PATHS = (
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
)


def parse_caps(changes: Iterable[str], start: Iterable[str] = DEFAULT_CAPABILITIES) -> frozenset[str]:
    """Apply `+SYS_ADMIN`, `-NET_RAW`, `+ALL`, `-ALL` in order to `start`. Case and the prefix CAP_ do not matter."""
    kept = set(start)
    for change in changes:
        sign, name = change[:1], change[1:].strip().upper()
        if sign not in ("+", "-"):
            raise UsageError(f"capability {change!r}: say +NAME to add or -NAME to drop, e.g. +SYS_PTRACE")
        full = name if name.startswith("CAP_") else f"CAP_{name}"
        if full not in _BITS and full != "CAP_ALL":
            raise UsageError(f"capability {change!r}: no such capability; see `man 7 capabilities` for the names")
        named = ALL_CAPABILITIES if full == "CAP_ALL" else {full}
        kept = kept | named if sign == "+" else kept - named
    return frozenset(kept)


def require_shifted_ids(names: Iterable[str]) -> None:
    """To be called before a session starts whose uid map is not shifted: HostUnsupported if it could undo its masks."""
    asked = sorted(UNMASKING.intersection(names))
    if asked:
        raise HostUnsupported(
            f"{', '.join(asked)} would make this session root on the host: its user ids cannot be shifted, because the "
            "store or the base is on a file system without idmapped mounts; put both on ext4, xfs, btrfs or tmpfs",
            fix="put the store and the base on ext4, xfs, btrfs or tmpfs",
            feature="idmapped mounts",
        )


def capability_mask(names: Iterable[str]) -> int:
    """As the kernel has it: one bit for each."""
    return sum(1 << _BITS[name] for name in set(names))
