"""Tree, diff, history, statistics."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from statefork.environment import Environment
from statefork.errors import HasChildren, NotFound, Unsupported, WrongState
from statefork.model import Capability
from statefork.testing.contract.subject import Contract, Subject, brings_back

__all__ = ["RecordContract"]


class RecordContract(Contract):
    def test_tree(self, fresh: Environment) -> None:
        assert fresh.tree().environments == (fresh.id,)
        root = fresh.snapshot("root")
        left = fresh.snapshot("left")
        (fork,) = fresh.fork(from_snapshot="root")
        with fork:
            right = fork.snapshot("right")
            view = fresh.tree()
            (top,) = view.roots
            assert (top.snapshot.id, [child.snapshot.id for child in top.children]) == (root, [left, right])
            assert [child.environments for child in top.children] == [(fresh.id,), (fork.id,)]
            drawn = str(view).splitlines()
            assert [line.strip("├└─ ").split()[1] for line in drawn] == ["(root)", "(left)", "(right)"]
            assert drawn[1].startswith("├── ")
            assert drawn[2].startswith("└── ")
            assert f"* {fork.id}" in drawn[2]

    def test_removing_snapshots(self, fresh: Environment) -> None:
        fresh.snapshot("a")
        fresh.snapshot("b")
        fresh.snapshot("c")
        with pytest.raises(HasChildren):
            fresh.remove_snapshot("b")
        with pytest.raises(WrongState):
            fresh.remove_snapshot("b", recursive=True)
        fresh.restore("a")
        with pytest.raises(WrongState):
            fresh.remove_snapshot("a", recursive=True)
        fresh.remove_snapshot("b", recursive=True)
        assert [snapshot.name for snapshot in fresh.snapshots()] == ["a"]
        with pytest.raises(NotFound):
            fresh.restore("c")
        assert fresh.restore("a").snapshot == fresh.snapshots()[0].id

    def test_diff(self, standing: Environment, subject: Subject) -> None:
        where = subject.scratch
        standing.exec_command(
            f"cd {where}; echo 1 >same; echo 1 >changed; echo 1 >mode; echo 1 >gone; mkdir dir; echo 1 >dir/x"
        )
        standing.snapshot("a")
        if not brings_back(standing, Capability.FILES):
            with pytest.raises(Unsupported):
                standing.diff("a")
            return
        assert not standing.diff("a")
        standing.exec_command(
            f"cd {where}; touch -d @1000000000 same; echo 2 >changed; chmod 600 mode; rm -r gone dir; echo 1 >new"
        )
        live = standing.diff("a")
        standing.snapshot("b")
        stored = standing.diff("a", "b")
        for found in (live, stored):
            assert found.added == (f"{where}/new",)
            assert found.changed == (f"{where}/changed", f"{where}/mode")
            assert found.removed == (f"{where}/dir", f"{where}/dir/x", f"{where}/gone")
        back = standing.diff("b", "a")
        assert (back.added, back.removed) == (stored.removed, stored.added)
        with pytest.raises(NotFound):
            standing.diff("a", "surely-not")

    def test_history(self, fresh: Environment, tmp_path: Path) -> None:
        fresh.exec_command("true")
        snapshot = fresh.snapshot("one")
        with pytest.raises(NotFound):
            fresh.restore("surely-not")
        fresh.restore("one")
        fresh.history.export(tmp_path / "history.jsonl")
        rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
        assert [row["number"] for row in rows] == list(range(1, len(rows) + 1))
        assert [row["operation"] for row in rows[-4:]] == ["exec", "snapshot", "restore", "restore"]
        assert [row["error"] for row in rows[-4:]] == [None, None, "not_found", None]
        assert rows[-1]["snapshot"] == rows[-3]["snapshot"] == snapshot
        assert {row["environment"] for row in rows} == {fresh.id}
        assert {row["backend"] for row in rows} == {fresh.backend}
        assert all(datetime.fromisoformat(row["started_at"]).tzinfo and row["duration_ms"] > 0 for row in rows)

    def test_stats(self, fresh: Environment, subject: Subject) -> None:
        fresh.run(["sh", "-c", f"head -c 300000 /dev/urandom >{subject.scratch}/blob"])
        fresh.snapshot()
        stats = fresh.stats
        assert (stats.snapshots, stats.environments) == (1, 1)
        assert stats.operations["snapshot"].count == 1
        assert stats.operations["snapshot"].total_ms >= fresh.snapshots()[0].duration_ms
        if brings_back(fresh, Capability.FILES):
            assert stats.files_bytes >= 300000
        if brings_back(fresh, Capability.MEMORY):
            assert stats.memory_bytes > 0
        assert stats.storage_bytes == stats.files_bytes + stats.memory_bytes
        assert stats.operations["snapshot"].files_bytes == stats.files_bytes
        assert stats.operations["snapshot"].memory_bytes == stats.memory_bytes
