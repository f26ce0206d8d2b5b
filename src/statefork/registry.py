"""Which backends there are, and by which methods and arguments an environment is made with each.

A backend module has one object, `BACKEND`. Others register theirs under the entry point group `statefork.backends`; an entry
point names such an object. Nothing is imported before somebody asks.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from statefork.driver import Driver
from statefork.errors import UsageError
from statefork.model import Capabilities

__all__ = ["GROUP", "Argument", "Backend", "Method", "backends", "find_method", "methods"]

log = logging.getLogger(__name__)

GROUP = "statefork.backends"

_BUILT_IN = {
    "waypoint": ("waypoint", "ckpt"),
    "docker": ("docker",),
    "podman": ("podman",),
    "criu": ("criu",),
    "hybrid": ("hybrid",),
    "gvisor": ("gvisor",),
    "qemu": ("qemu",),
    "firecracker": ("firecracker",),
}
"""Our own modules, and what their methods' names begin with: to make one environment only one of them is imported."""


def directory(value: Any) -> Path:
    path = Path(value)
    if not path.is_dir():
        raise UsageError(f"{value} is not a directory")
    return path.absolute()


def path(value: Any) -> Path:
    return Path(value).absolute()


def words(value: Any) -> tuple[str, ...]:
    """A list, or a line as one would type it."""
    return tuple(shlex.split(value)) if isinstance(value, str) else tuple(map(str, value))


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{value!r} is not a word")
    return value


def number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(f"{value!r} is not a whole number") from None


@dataclass(frozen=True, slots=True)
class Argument:
    name: str
    convert: Callable[[Any], Any]
    help: str


@dataclass(frozen=True, slots=True)
class Method:
    """One way to make an environment: `docker_build`, `criu_attach`."""

    name: str
    make: Callable[..., Driver]
    """Called with the converted arguments that were given, by name."""
    arguments: tuple[Argument, ...]
    required: tuple[tuple[str, ...], ...] = ()
    """Each entry is a choice, of which exactly one has to be given."""
    attach: bool = False

    def driver(self, given: Mapping[str, Any]) -> Driver:
        """Raises UsageError, with all that the method takes, if something is missing or too much."""
        known = {argument.name: argument for argument in self.arguments}
        given = {name: value for name, value in given.items() if value is not None}
        surplus = [name for name in given if name not in known]
        if surplus:
            raise UsageError(f"{self.name} does not take {', '.join(surplus)}; {self.signature}")
        for choice in self.required:
            found = [name for name in choice if name in given]
            if not found:
                raise UsageError(f"{self.name} needs {' or '.join(choice)}; {self.signature}")
            if len(found) > 1:
                raise UsageError(f"{self.name}: give only one of {', '.join(found)}; {self.signature}")
        converted = {}
        for name, value in given.items():
            try:
                converted[name] = known[name].convert(value)
            except UsageError as error:
                raise UsageError(f"{self.name}: {name}: {error.message}; {self.signature}") from error
        return self.make(**converted)

    @property
    def signature(self) -> str:
        needed = [" or ".join(choice) for choice in self.required]
        names = {name for choice in self.required for name in choice}
        optional = [argument.name for argument in self.arguments if argument.name not in names]
        return f"it takes {', '.join(needed) or 'nothing that is required'}" + (
            f"; optional: {', '.join(optional)}" if optional else ""
        )


@dataclass(frozen=True, slots=True)
class Backend:
    name: str
    summary: str
    """What restore brings back, in a few words, for the table."""
    driver: type[Driver]
    probe: Callable[[], Capabilities]
    """As `Driver.probe`, before anybody has said what to make."""
    methods: tuple[Method, ...]


@cache
def backends() -> Mapping[str, Backend]:
    """By name, our own first. One of another's that cannot be loaded is left out, with a warning."""
    found: dict[str, Backend] = {}
    for name in _BUILT_IN:
        backend = _built_in(name)
        if backend is not None:
            found[name] = backend
    for point in entry_points(group=GROUP):
        try:
            backend = point.load()
        except (ImportError, AttributeError) as error:
            log.warning("the backend %s of %s cannot be loaded: %s", point.name, point.value, error)
            continue
        if not isinstance(backend, Backend) or backend.name in found:
            log.warning("the backend %s of %s is not a new statefork Backend; left out", point.name, point.value)
            continue
        found[backend.name] = backend
    return found


def _built_in(name: str) -> Backend | None:
    """None if this installation has no such backend."""
    module = f"statefork.backends.{name}"
    if importlib.util.find_spec(module) is None:
        return None
    backend: Backend | None = getattr(importlib.import_module(module), "BACKEND", None)
    return backend


def methods() -> Iterator[tuple[Backend, Method]]:
    for backend in backends().values():
        for method in backend.methods:
            yield backend, method


def find_method(name: str) -> Method:
    for module, beginnings in _BUILT_IN.items():
        if name.split("_")[0] in beginnings and (backend := _built_in(module)) is not None:
            for method in backend.methods:
                if method.name == name:
                    return method
    for _, method in methods():
        if method.name == name:
            return method
    known: Sequence[str] = [method.name for _, method in methods()]
    raise UsageError(f"there is no method {name!r}; there are: {', '.join(known)}")
