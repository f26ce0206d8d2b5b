"""What a suite has to know of a backend, and the fixtures that all its parts share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from statefork.environment import Environment
from statefork.errors import WaypointError
from statefork.factory import create_env_manager
from statefork.model import Capability

__all__ = ["Contract", "Subject", "brings_back", "eventually"]

DEADLINE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Subject:
    """How to make environments of one backend for tests."""

    method: str
    arguments: Mapping[str, Any]
    left_behind: Callable[[Path], list[str]]
    """Everything on this host, beside the state directory, that still belongs to environments of a state directory."""
    named: bool = False
    """True if the method takes a container_name: each environment is given a fresh one."""
    attach: Callable[[Path], AbstractContextManager[Environment]] | None = None
    """Makes something, attaches to it, and afterwards checks that it is still there and removes it."""
    spoil: Callable[[Environment, str], None] | None = None
    """Damages the stored state of a snapshot, so that it cannot be brought back."""
    scratch: str = "/tmp/contract"
    """A directory inside that tests may write to; need not exist."""
    notes: tuple[str, ...] = field(default=())

    def traces(self, home: Path) -> list[str]:
        """What is left of environments that are gone: on the host, and in the state directory."""
        return [*self.left_behind(home), *(f"tree {entry.name}" for entry in (home / "trees").iterdir())]

    def create(self, home: Path) -> Environment:
        return create_env_manager(self.method, home=home, **self.fresh_arguments())

    def fresh_arguments(self) -> dict[str, Any]:
        extra = {"container_name": f"contract-{secrets.token_hex(5)}"} if self.named else {}
        return {**self.arguments, **extra}


class _Stage:
    """The environment that `standing` hands out."""

    def __init__(self, subject: Subject, home: Path) -> None:
        self._subject, self._home = subject, home
        self._current: Environment | None = None

    def environment(self) -> Environment:
        if self._current is None:
            self._current = self._subject.create(self._home)
        return self._current

    def tidy(self) -> None:
        """End the counter of the test that was (counter.py), or, if nothing answers any more, all of it."""
        assert self._current is not None
        try:
            self._current.exec_command("[ -z $counter ] || kill $counter 2>/dev/null; counter=", timeout=60)
        except WaypointError:
            self.clear()

    def clear(self) -> None:
        if self._current is not None:
            current, self._current = self._current, None
            current.destroy()


class Contract:
    """The base of the suite's parts: a subclass has a fixture `subject`."""

    pytestmark = pytest.mark.timeout(180)

    @pytest.fixture(scope="class")
    @classmethod
    def home(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("statefork")

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, subject: Subject, home: Path) -> Iterator[Environment]:
        """One environment for all tests that leave its shell usable."""
        with subject.create(home) as environment:
            environment.run(["mkdir", "-p", subject.scratch])
            yield environment

    @pytest.fixture(scope="class")
    @classmethod
    def _stage(cls, subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Stage]:
        home = tmp_path_factory.mktemp("standing")
        stage = _Stage(subject, home)
        yield stage
        stage.clear()
        assert subject.left_behind(home) == []
        assert not (home / "trees").exists() or list((home / "trees").iterdir()) == []

    @pytest.fixture
    def standing(self, _stage: _Stage, subject: Subject) -> Iterator[Environment]:
        """An environment with a past, for tests that may find snapshots of others in its tree: to make one costs time.

        Its scratch directory is empty and nothing of an earlier test runs in it. If one has left it unusable, it is a new one.
        """
        environment = _stage.environment()
        environment.exec_command(f"cd /; rm -rf {subject.scratch}; mkdir -p {subject.scratch}")
        yield environment
        _stage.tidy()

    @pytest.fixture
    def fresh(self, subject: Subject, tmp_path: Path) -> Iterator[Environment]:
        """An environment for one test; afterwards it and all its forks must be gone without a trace."""
        home = tmp_path / "home"
        environment = subject.create(home)
        try:
            environment.exec_command(f"rm -rf {subject.scratch}; mkdir -p {subject.scratch}")
            yield environment
        finally:
            environment.destroy()
        assert subject.traces(home) == []


def brings_back(environment: Environment, capability: Capability) -> bool:
    return capability in environment.capabilities.restores


def eventually(what: str, check: Callable[[], bool]) -> None:
    """Poll until it is so."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not check():
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS:g} s: {what}"
        time.sleep(0.02)
