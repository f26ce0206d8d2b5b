"""The snapshot tree that an environment shares with its forks: who came from whom, and which live ones stand where."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from statefork.driver import Captured, Place
from statefork.errors import Ambiguous, Exists, HasChildren, NotFound, UsageError, WrongState
from statefork.model import Snapshot

__all__ = ["Node", "SnapshotTree", "TreeNode", "TreeView", "check_name", "mint"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def mint(kind: str) -> str:
    """A new id: `e` for an environment, `s` for a snapshot. Random, so that two processes cannot meet."""
    return f"{kind}-{secrets.token_hex(5)}"


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or ".." in name:
        raise UsageError(f"{name!r} cannot name a snapshot: use 1 to 64 letters, digits, `.`, `_`, `-`, no `..`")
    return name


@dataclass(frozen=True, slots=True)
class Node:
    """A snapshot together with what its driver needs to bring it back."""

    snapshot: Snapshot
    captured: Captured
    place: Place


@dataclass(frozen=True, slots=True)
class TreeNode:
    snapshot: Snapshot
    children: tuple[TreeNode, ...]
    environments: tuple[str, ...]
    """Live environments whose present state grew from this snapshot."""


@dataclass(frozen=True, slots=True)
class TreeView:
    """The tree as it was when asked for; `str()` draws it."""

    roots: tuple[TreeNode, ...]
    environments: tuple[str, ...]
    """Live environments that have no snapshot yet."""

    def __str__(self) -> str:
        lines = [f"* {environment}" for environment in self.environments]
        waiting = [(root, "", "") for root in reversed(self.roots)]
        while waiting:
            node, first, rest = waiting.pop()
            lines.append(first + _label(node))
            branches = [("├── ", "│   ")] * (len(node.children) - 1) + [("└── ", "    ")]
            below = [(c, rest + arm, rest + gap) for c, (arm, gap) in zip(node.children, branches, strict=False)]
            waiting.extend(reversed(below))
        return "\n".join(lines)

    def __iter__(self) -> Iterator[TreeNode]:
        """Every node, parents first."""
        waiting = list(reversed(self.roots))
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


def _label(node: TreeNode) -> str:
    snapshot = node.snapshot
    name = f"{snapshot.id} ({snapshot.name})" if snapshot.name else snapshot.id
    live = "".join(f"  * {environment}" for environment in node.environments)
    return f"{name}  {_bytes(snapshot.files_bytes + snapshot.memory_bytes)}  {snapshot.duration_ms:.0f} ms{live}"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


class SnapshotTree:
    """All methods may be called from several threads."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._reserved: set[str] = set()
        self._stands: dict[str, tuple[str | None, str | None]] = {}
        self._pinned: set[str] = set()
        self._lock = threading.RLock()

    def reserve(self, name: str | None) -> None:
        """Take a name before the work begins, so that two snapshots under way cannot both get it."""
        if name is None:
            return
        check_name(name)
        with self._lock:
            if name in self._reserved or any(node.snapshot.name == name for node in self._nodes.values()):
                raise Exists(f"a snapshot named {name!r} exists already; choose another name")
            self._reserved.add(name)

    def release(self, name: str | None) -> None:
        with self._lock:
            self._reserved.discard(name or "")

    def add(self, node: Node) -> None:
        with self._lock:
            self._nodes[node.snapshot.id] = node

    def find(self, reference: str) -> Node:
        """By id, by name, or by a prefix of an id that fits only one."""
        with self._lock:
            if reference in self._nodes:
                return self._nodes[reference]
            nodes = list(self._nodes.values())
        if not reference:
            raise UsageError("name a snapshot by its id or its name")
        for node in nodes:
            if node.snapshot.name == reference:
                return node
        fits = [node for node in nodes if node.snapshot.id.startswith(reference)]
        if len(fits) > 1:
            raise Ambiguous(f"{reference!r} fits {', '.join(n.snapshot.id for n in fits)}; write more of it")
        if not fits:
            known = ", ".join(n.snapshot.name or n.snapshot.id for n in nodes) or "none"
            raise NotFound(f"no snapshot {reference!r} in this tree; it has: {known}")
        return fits[0]

    def branch(self, reference: str, recursive: bool) -> list[Node]:
        """The node and all below it, children first; refuses what others still need."""
        with self._lock:
            node = self.find(reference)
            doomed = self._below([node])
            if len(doomed) > 1 and not recursive:
                raise HasChildren(f"snapshot {node.snapshot.id} has children; pass recursive=True to remove them too")
            ids = {n.snapshot.id for n in doomed}
            if pinned := ids & self._pinned:
                raise WrongState(f"snapshot {min(pinned)} is pinned; unpin it first")
            users = [e for e, (origin, latest) in self._stands.items() if origin in ids or latest in ids]
            if users:
                raise WrongState(
                    f"snapshot {node.snapshot.id} carries the live environment {users[0]}; destroy that first"
                )
            return doomed

    def drop(self, node: Node) -> None:
        with self._lock:
            self._nodes.pop(node.snapshot.id, None)
            self._pinned.discard(node.snapshot.id)

    def rename(self, reference: str, name: str | None) -> Node:
        """None takes the name away. Raises: Exists."""
        with self._lock:
            node = self.find(reference)
            if name == node.snapshot.name:
                return node
            self.reserve(name)
            self.release(name)
            renamed = replace(node, snapshot=replace(node.snapshot, name=name))
            self._nodes[node.snapshot.id] = renamed
            return renamed

    def pin(self, reference: str, pinned: bool) -> Node:
        """A pinned snapshot is not removed, and its tree stays when the last environment has left."""
        with self._lock:
            node = self.find(reference)
            (self._pinned.add if pinned else self._pinned.discard)(node.snapshot.id)
            return node

    def is_pinned(self, snapshot: str) -> bool:
        return snapshot in self._pinned

    @property
    def needed(self) -> bool:
        """Somebody lives in it, or wants something of it to stay."""
        with self._lock:
            return bool(self._stands or self._pinned)

    def children_first(self) -> list[Node]:
        with self._lock:
            return self._below(self._grouped().get(None, []))

    def _below(self, nodes: list[Node]) -> list[Node]:
        """These and all their descendants, each child before its parent. A chain may be deep: no recursion."""
        grouped = self._grouped()
        order = list(nodes)
        for node in order:
            order.extend(grouped.get(node.snapshot.id, ()))
        return order[::-1]

    def _grouped(self) -> dict[str | None, list[Node]]:
        """Children by parent, oldest first; under None the roots, those whose parent was removed included."""
        grouped: dict[str | None, list[Node]] = {}
        for node in self._nodes.values():
            parent = node.snapshot.parent
            grouped.setdefault(parent if parent in self._nodes else None, []).append(node)
        return grouped

    # -- live environments --------------------------------------------------------------------------------------------

    def revived(self, environment: str, origin: str | None) -> None:
        """A live environment was made from this snapshot, and can't be without it."""
        with self._lock:
            self._stands[environment] = (origin, origin)

    def advanced(self, environment: str, snapshot: str) -> None:
        """A snapshot of a live environment was taken: its next one is a child of that."""
        with self._lock:
            self._stands[environment] = (self._stands[environment][0], snapshot)

    def leave(self, environment: str) -> bool:
        """The environment is gone; True if it was the last and nothing is pinned."""
        with self._lock:
            self._stands.pop(environment, None)
            return not self.needed

    def stands(self, environment: str) -> tuple[str | None, str | None]:
        """The snapshot that it was made from, and the parent of its next one."""
        with self._lock:
            return self._stands[environment]

    def latest(self, environment: str) -> str | None:
        """The parent of its next snapshot; None if it has none, or is gone."""
        with self._lock:
            return self._stands.get(environment, (None, None))[1]

    def stood(self, environment: str, origin: str | None, latest: str | None) -> None:
        """It was there already, when another process looked after the tree."""
        with self._lock:
            self._stands[environment] = (origin, latest)

    def parent_of(self, environment: str) -> Node | None:
        with self._lock:
            return self._nodes.get(self._stands[environment][1] or "")

    @property
    def environments(self) -> int:
        with self._lock:
            return len(self._stands)

    # -- looking ------------------------------------------------------------------------------------------------------

    def snapshots(self) -> list[Snapshot]:
        """Oldest first."""
        with self._lock:
            return [node.snapshot for node in self._nodes.values()]

    def view(self) -> TreeView:
        with self._lock:
            made: dict[str, TreeNode] = {}
            grouped = self._grouped()
            for node in self.children_first():
                key = node.snapshot.id
                live = tuple(e for e, (_, latest) in self._stands.items() if latest == key)
                children = tuple(made[child.snapshot.id] for child in grouped.get(key, ()))
                made[key] = TreeNode(node.snapshot, children, live)
            rootless = tuple(e for e, (_, latest) in self._stands.items() if latest not in self._nodes)
            return TreeView(tuple(made[node.snapshot.id] for node in grouped.get(None, ())), rootless)
