"""What our own backends are known not to bring back, though the capability as a whole is theirs: case -> why.

Found by running the suite, and shown in the table as not claimed. A case that begins to pass should leave this list.
"""

from __future__ import annotations

__all__ = ["NOT_CLAIMED"]

_IMAGE = {
    "files/hard-links": "the names of a file in an image part ways when it is written to",
    "files/sparse-files": "images are archives without holes",
    "files/times": "images keep whole seconds",
    "files/special-files": "images have no sockets",
    "files/dev-shm": "/dev/shm is not in an image",
}

NOT_CLAIMED: dict[str, dict[str, str]] = {
    "docker": _IMAGE,
    "podman": _IMAGE,
}
