"""A process that is traced from outside the session cannot be saved: said by name, and the session goes on."""

from __future__ import annotations

import ctypes
import os

import pytest

from waypoint.engine import Engine
from waypoint.errors import NotCapturable
from waypoint.kernel.processes import namespace_pids
from waypoint.model import BaseRecord

_SEIZE, _DETACH, _INTERRUPT = 0x4206, 17, 0x4207


def test_a_debugger_on_the_host_is_named(engine: Engine, small_base: BaseRecord) -> None:
    session = engine.new(base=small_base)
    session.exec("sleep 1000 &")
    traced = max(namespace_pids(session.record.init_pid))
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    assert ptrace(_SEIZE, traced, 0, 0) == 0
    try:
        with pytest.raises(NotCapturable, match=rf"debugged by process {os.getpid()} of the host"):
            session.snapshot()
    finally:
        assert ptrace(_INTERRUPT, traced, 0, 0) == 0
        os.waitpid(traced, 0x40000000)
        assert ptrace(_DETACH, traced, 0, 0) == 0
    assert session.exec("echo on; jobs -pr | wc -l").stdout.split() == [b"on", b"1"]
    session.snapshot()
    session.remove()
