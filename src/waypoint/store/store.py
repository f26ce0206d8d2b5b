"""One store: its paths, its database, and the layers that lie in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from waypoint.errors import HostUnsupported
from waypoint.kernel import trees
from waypoint.store import locks
from waypoint.store.database import Database
from waypoint.store.paths import Paths

__all__ = ["Store"]


class Store:
    def __init__(self, home: Path) -> None:
        self.paths = Paths(home.absolute())
        try:
            self.paths.make()
        except PermissionError as error:
            raise HostUnsupported(
                f"{home} cannot be used as a store by this user; Waypoint needs root, or set WAYPOINT_HOME to a directory "
                "that you own",
                fix="sudo waypoint ...",
                feature="root",
            ) from error
        self.db = Database(self.paths.database)
        identity = self.db.meta("id")
        assert identity is not None
        self.tag = identity
        """Marks every process, cgroup and link of this store on the host."""

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Everything that makes layers, images or processes happens inside one; gc waits for all of them."""
        with locks.shared(self.paths.gate):
            yield

    def new_layer(self, purpose: str) -> int:
        """A directory with an empty `d` (and `w` for overlay's work); garbage until a row names it."""
        layer = self.db.new_layer(purpose)
        self.paths.layer(layer).mkdir()
        return layer

    def new_upper(self, seed: int | None) -> int:
        """A private upper for a live session; a copy of layer `seed` where layers cannot be stacked."""
        layer = self.new_layer("upper")
        if seed is None:
            self.paths.upper(layer).mkdir(mode=0o755)
        else:
            trees.copy_tree(self.paths.upper(seed), self.paths.upper(layer))
        self.paths.work(layer).mkdir()
        return layer

    def discard_layers(self, layers: list[int]) -> None:
        """Remove those of `layers` that no row names."""
        used = self.db.layers_in_use()
        for layer in [layer for layer in layers if layer not in used]:
            trees.discard_tree(self.paths.layer(layer))
            self.db.forget_layers([layer])

    def content_layer(self, kind: str, sources: list[Path]) -> tuple[int | None, str]:
        """(layer, purpose) of the layer made of exactly these files, or (None, purpose) when it has to be made."""
        digest = sha256()
        for source in sources:
            digest.update(source.read_bytes())
        purpose = f"{kind}:{digest.hexdigest()[:24]}"
        return self.db.find_layer(purpose), purpose
