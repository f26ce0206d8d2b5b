"""CRIU with the libraries in it that make it quicker: the same tree comes back, also without them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from waypoint.engine import Engine
from waypoint.kernel import tools
from waypoint.model import BaseRecord
from waypoint.session import Session

NAMES = ("quick.so", "gnutls.so", "nftables.so")


def loaded(pid: int) -> set[str]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        maps = Path(f"/proc/{pid}/maps").read_text()
        if "libnet.so" in maps:  # the last of CRIU's own
            return {line.split("/")[-1] for line in maps.splitlines() if "/" in line}
        time.sleep(0.01)
    raise AssertionError("CRIU never came up")


def workers(engine: Engine) -> list[int]:
    deadline = time.monotonic() + 30
    while len(engine.stock.waiting()) < 2:
        assert time.monotonic() < deadline, "no workers are started ahead"
        time.sleep(0.01)
    return engine.stock.waiting()


@pytest.fixture(params=["1", "0"])
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("WAYPOINT_QUICK", request.param)
    return bool(request.param == "1")


@pytest.fixture
def session(quick: bool, eager: Engine, small_base: BaseRecord) -> Iterator[Session]:
    made = eager.new(base=small_base)
    yield made
    made.remove()


def test_a_session_comes_back_with_and_without_them(quick: bool, eager: Engine, session: Session) -> None:
    session.exec("N=1; sleep 1000 & echo one >/file")
    first = session.snapshot().id
    for pid in workers(eager):
        names = loaded(pid)
        assert any(name.startswith(NAMES) for name in names) == quick
        assert any(name.startswith("libgnutls") for name in names) != quick
    session.exec("N=2; echo two >/file; kill %1")
    session.restore(first)
    assert session.exec("echo $N; cat /file; jobs -pr | wc -l").stdout.split() == [b"1", b"one", b"1"]
    (fork,) = session.fork(1, from_snapshot=first)
    assert fork.exec("echo $N; cat /file; jobs -pr | wc -l").stdout.split() == [b"1", b"one", b"1"]
    assert fork.verify() == []
    fork.remove()


def test_the_programs_that_criu_starts_get_none_of_it(quick: bool, eager: Engine, small_base: BaseRecord) -> None:
    """CRIU saves a tmpfs with tar, which must end as tar ends."""
    session = eager.new(base=small_base, extra_capabilities=["+SYS_ADMIN"], seccomp=False)
    try:
        made = session.exec(
            "mkdir /small && mount -t tmpfs none /small && seq 100000 >/small/numbers && tail -n1 /small/numbers"
        )
        assert made.stdout == b"100000\n", made.stderr
        saved = session.snapshot().id
        session.exec("echo gone >/small/numbers")
        session.restore(saved)
        assert session.exec("tail -n1 /small/numbers; wc -l </small/numbers").stdout.split() == [b"100000", b"100000"]
    finally:
        session.remove()


def test_a_criu_that_does_not_start_with_them_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out by starting it, once."""
    criu = tools.current_criu()
    good = tools.quick_environment()
    assert good
    bad = good | {"LD_PRELOAD": f"{good['LD_PRELOAD']} {tmp_path}/absent.so"}
    monkeypatch.setattr(tools, "prefix", lambda: tmp_path)
    assert not tools._starts_quickly(criu, ("a", "b"), bad)
    assert not tools._starts_quickly(criu, ("a", "b"), good), "what was found out is not tried again"
    assert tools._starts_quickly(criu, ("a", "c"), good), "but for other libraries it is"
