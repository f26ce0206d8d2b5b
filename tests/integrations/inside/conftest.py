"""An environment for each check, in the state directory that the outer test gave; gone afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from statefork import Environment, create_env_manager


@pytest.fixture(scope="session")
def home() -> str:
    return os.environ["CHECK_HOME"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def environment(home: str) -> Iterator[Environment]:
    """This machine's own root, copy-on-write: it has Python, git and tmux."""
    with create_env_manager("waypoint_build", home=home, workdir="/tmp") as made:
        yield made
