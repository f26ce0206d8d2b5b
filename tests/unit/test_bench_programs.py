"""What the benchmark reads before a clock: plain files, each once, and nothing that could keep it waiting."""

from __future__ import annotations

import os
from pathlib import Path

from statefork.bench import programs


def test_only_plain_files_are_read_and_each_once(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"x" * 3_000_000)
    os.link(tmp_path / "program", tmp_path / "other-name")
    os.mkfifo(tmp_path / "pipe")
    paths = [*sorted(tmp_path.iterdir()), tmp_path / "gone", Path("/dev/zero"), tmp_path]
    assert programs.fetch_programs(paths) == 1


def test_the_programs_of_this_process_are_among_them() -> None:
    with open("/proc/self/maps") as maps:
        own = {line.split(maxsplit=5)[5].strip() for line in maps if " r-xp " in line and "/" in line}
    found = {os.path.realpath(path) for path in programs._paths() if "/root/" not in str(path)}
    found |= {f"/{str(path).partition('/root/')[2]}" for path in programs._paths() if "/root/" in str(path)}
    assert own <= found
