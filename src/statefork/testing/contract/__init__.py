"""The contract suite: what every backend has to do, as pytest classes. A third party runs it with a dozen lines:

    from statefork.testing.contract import BackendContract, Subject

    class TestMine(BackendContract):
        @pytest.fixture(scope="class")
        @classmethod
        def subject(cls) -> Subject:
            return Subject(method="mine_build", arguments={"image": "small"}, left_behind=containers_of)

The environment must have `sh`, `cat`, `find`, `stat`, `tar`, `mkfifo` and `sleep`. What a backend does not bring back is
checked too: a capability that it does not promise must be missing from `capabilities`, and said after a restore.
"""

from __future__ import annotations

import pytest

# ruff: noqa: E402  rewriting has to be asked for before the modules with the tests are imported; failures then show values
_PARTS = ("commands", "crash", "endings", "files", "forks", "programs", "records", "states")
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from statefork.testing.contract.commands import CommandContract
from statefork.testing.contract.crash import CrashContract
from statefork.testing.contract.endings import EndingContract
from statefork.testing.contract.files import FileContract
from statefork.testing.contract.forks import ForkContract
from statefork.testing.contract.programs import ProgramContract
from statefork.testing.contract.records import RecordContract
from statefork.testing.contract.states import StateContract
from statefork.testing.contract.subject import Subject

__all__ = [
    "BackendContract",
    "CommandContract",
    "CrashContract",
    "EndingContract",
    "FileContract",
    "ForkContract",
    "ProgramContract",
    "RecordContract",
    "StateContract",
    "Subject",
]


class BackendContract(
    CommandContract,
    EndingContract,
    ProgramContract,
    FileContract,
    StateContract,
    ForkContract,
    RecordContract,
    CrashContract,
):
    """All of it."""
