"""`statefork bench` measures, says what is missing, and stops a backend whose answer is wrong."""

from __future__ import annotations

import csv
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from statefork.bench import machine, patterns
from statefork.bench.allowance import Allowance
from statefork.bench.figures import Samples
from statefork.bench.machine import merging, until_merged
from statefork.bench.rounds import run_rounds
from statefork.bench.subjects import Subject
from statefork.bench.workloads import Workload, Wrong
from statefork.environment import Environment
from statefork.factory import create_env_manager

RUN = [sys.executable, "-c", "from statefork.cli.main import main; main()"]


def run_bench(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [*RUN, "bench", "--results", str(tmp_path / "out"), *arguments]
    env = {**os.environ, "STATEFORK_HOME": str(tmp_path / "home"), "MPLCONFIGDIR": str(tmp_path)}
    env.pop("WAYPOINT_HOME", None)
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=300, check=False)


def test_figures_tables_and_pictures(tmp_path: Path) -> None:
    done = run_bench(
        tmp_path, "-b", "waypoint", "-b", "firecracker", "-w", "shell and job", "--rounds", "2", "--json",
        "--page", str(tmp_path / "page.md"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert "firecracker" in document["missing"]
    found = {(one["backend"], one["what"]): one for one in document["figures"]}
    for what in ("snapshot", "paused", "restore", "fork"):
        assert found["waypoint", what]["n"] == 2
        assert 0 < found["waypoint", what]["least"] <= found["waypoint", what]["p50"] <= found["waypoint", what]["most"]
    for plain in ("criu (command line)", "criu, the same tree"):
        assert found[plain, "snapshot"]["n"] == found[plain, "restore"]["n"] == 2
    assert document["machine"]["cores"] and "load_mean" in document["watch"]
    with (tmp_path / "out/results.csv").open() as rows:
        assert len(list(csv.DictReader(rows))) == len(document["figures"])
    assert (tmp_path / "out/shell-and-job.png").stat().st_size > 1000
    assert "| waypoint |" in (tmp_path / "page.md").read_text()
    assert "round 2" in done.stderr


def test_an_unknown_workload_is_refused(tmp_path: Path) -> None:
    done = run_bench(tmp_path, "-w", "sorting")
    assert done.returncode != 0
    assert "idle shell" in done.stderr


def test_a_wrong_answer_is_no_figure(tmp_path: Path) -> None:
    workload = Workload("shell", "", setup="sleep 1000 & :")
    claims = frozenset({"files", "shell"})
    with create_env_manager("waypoint_build", home=tmp_path / "home", store=tmp_path / "store") as env:
        workload.prepare(env)
        workload.next_round(env, 7)
        workload.check(env, 7, claims)
        workload.spoil(env)
        with pytest.raises(Wrong):
            workload.check(env, 7, claims)


def test_pages_from_an_earlier_run(tmp_path: Path) -> None:
    def figure(backend: str, what: str, p50: float) -> dict[str, object]:
        size = {"least": p50, "p50": p50, "p95": p50, "most": p50}
        return {"workload": "shell and job", "backend": backend, "what": what, "unit": "ms", "n": 5, **size}

    verbs = ("snapshot", "restore", "fork")
    document = {
        "machine": {"cores": 2, "processor": "some", "kernel": "6"}, "missing": {}, "failures": [],
        "watch": {"load_before": 1, "load_mean": 1, "load_most": 1, "seconds": 3},
        "figures": [figure("waypoint", verb, 20.0) for verb in verbs] + [figure("docker", verb, 500.0) for verb in verbs],
    }  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps(document))
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- bench summary -->\nold\n<!-- end of bench summary -->\nafter\n")
    done = run_bench(tmp_path, "--from", str(tmp_path / "results.json"), "--no-plots", "--summary", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| docker | 500.0 (500.0), 25.0x |" in text


def test_when_the_time_is_used_up_ours_is_measured_and_the_others_are_listed(tmp_path: Path) -> None:
    def make(memory_mib: int = 0) -> Environment:
        return create_env_manager("waypoint_build", home=tmp_path / "home", store=tmp_path / "store")

    claims = frozenset({"files", "shell", "processes", "memory"})
    subjects = [Subject("waypoint", make, claims), Subject("another", make, claims)]
    samples, said = Samples(), list[str]()
    allow = Allowance(0.0, 2)
    workload = Workload("shell", "", setup="sleep 1000 & :")
    run_rounds(
        workload, subjects, samples, rounds=5, disk=tmp_path, raw=None, rootfs=None, allow=allow, on_progress=said.append
    )
    patterns.unchanged(subjects, samples, said.append, allow, quick=True)
    assert not samples.failures and samples.left_out == {"shell": ["another"], "nothing changed": ["another"]}
    found = {(one.workload, one.backend, one.what): one.n for one in samples.figures()}
    assert found["shell", "waypoint", "restore"] == 1 and found["nothing changed", "waypoint", "snapshot"] == 3
    assert {backend for _, backend, _ in found} == {"waypoint"}


def test_what_a_part_does_not_need_is_for_the_others() -> None:
    allow = Allowance(100.0, 2)
    allow.begin_part()
    assert 49 < allow.left() <= 50
    allow.begin_part()
    assert 99 < allow.left() <= 100
    allow.begin_part()  # one more than was said
    assert 99 < allow.left() <= 100


def test_a_part_may_count_as_several() -> None:
    allow = Allowance(100.0, 5)
    allow.begin_part()
    assert 19 < allow.left() <= 20
    allow.begin_part(4)
    assert 99 < allow.left() <= 100


def test_as_much_memory_is_fetched_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    real = mmap.mmap

    def counted(fd: int, size: int, **more: int) -> mmap.mmap:
        used.append(size >> 20)
        return real(fd, size, **more)

    monkeypatch.setattr(machine.mmap, "mmap", counted)
    monkeypatch.setattr(machine, "_meminfo", lambda _: 80 << 20)
    assert machine.use_memory(64) > 0
    assert used == [40]
    used.clear()
    monkeypatch.setattr(machine, "_meminfo", lambda _: 1 << 30)
    machine.use_memory(64)
    assert used == [64, 64]


def test_only_what_is_in_memory_of_big_files_is_forgotten(tmp_path: Path) -> None:
    def held(path: Path) -> bool:
        said = subprocess.run(["fincore", "-nbo", "res", str(path)], capture_output=True, text=True, check=True)
        return int(said.stdout) > 0

    big, small = tmp_path / "of/a/round/pages.img", tmp_path / "small.img"
    big.parent.mkdir(parents=True)
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for path, mib in ((big, 20), (small, 1)):
        path.write_bytes(bytes(mib << 20))
    os.sync()
    assert held(big) and held(small)
    machine.forget_big_files(tmp_path)
    assert not held(big) and held(small)


class _Slow:
    """Memory of which every so many pages take long to read."""

    def __init__(self, every: int) -> None:
        self._every = every

    def __len__(self) -> int:
        return 2048 * mmap.PAGESIZE

    def __getitem__(self, at: int) -> int:
        if at // mmap.PAGESIZE % self._every == 0:
            time.sleep(20e-6)
        return 0


def test_memory_in_use_that_was_taken_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = machine.InUse()
    assert not all(in_use.was_taken() for _ in range(20))
    monkeypatch.setattr(in_use, "_memory", _Slow(every=20))
    assert in_use.was_taken()
    monkeypatch.setattr(in_use, "_memory", _Slow(every=200))
    assert not all(in_use.was_taken() for _ in range(20))


def test_an_interrupted_run_writes_what_it_has(tmp_path: Path) -> None:
    argv = [*RUN, "bench", "--results", str(tmp_path / "out"), "-b", "waypoint", "-w", "idle shell", "--rounds", "100000"]
    env = {**os.environ, "STATEFORK_HOME": str(tmp_path / "home")}
    env.pop("WAYPOINT_HOME", None)
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "round 2" in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 130
    document = json.loads((tmp_path / "out/results.json").read_text())
    assert document["interrupted"]
    assert {one["what"] for one in document["figures"] if one["backend"] == "waypoint"} >= {"snapshot", "restore", "fork"}
    assert "interrupted" in (tmp_path / "out/results.md").read_text()


@pytest.mark.skipif(not Path("/sys/kernel/mm/ksm/run").exists(), reason="this kernel has no KSM")
def test_the_hosts_ksm_is_as_it_was_afterwards() -> None:
    settings = [Path("/sys/kernel/mm/ksm") / name for name in ("run", "pages_to_scan")]
    before = [one.read_text() for one in settings]
    with pytest.raises(KeyboardInterrupt), merging():
        assert settings[0].read_text().strip() == "1"
        until_merged(2.0)
        raise KeyboardInterrupt
    assert [one.read_text() for one in settings] == before
