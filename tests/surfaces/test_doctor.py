"""`waypoint doctor` on this host as it is, and on this host with something taken away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from waypoint.kernel import tools

DOCTOR = [sys.executable, "-c", "from waypoint.cli.doctor import doctor; doctor()"]
OVERLAY_AS_HOME = """
set -e
mkdir "$1/lower" "$1/upper" "$1/work" "$1/home"
mount -t overlay overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work" "$1/home"
export WAYPOINT_HOME="$1/home"
shift
exec "$@"
"""


def examine(*before: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document of `doctor --json`, started through `before`."""
    env = {**os.environ, **environment}
    done = subprocess.run([*before, *DOCTOR, "--json"], env=env, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def features(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {feature["feature"]: feature for feature in document["features"]}


def host_state() -> dict[str, object]:
    """What a probe could leave behind."""
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob("**/waypoint/probe*")]
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "cgroups": groups,
        "scratch": [*Path("/var/lib").glob(".waypoint-doctor-*"), *Path("/tmp").glob(".waypoint-doctor-*")],
        "containers": list(Path("/var/tmp").glob("buildah*")),
        "probe links": list(Path("/sys/class/net").glob("wyp*")),
    }


def test_everything_that_is_required_works_here() -> None:
    exit_code, document = examine()
    wrong = [one for one in document["features"] if one["required"] and one["status"] != "works"]
    assert wrong == []
    assert document["ok"] is True
    assert exit_code == 0


def test_document_says_the_same_of_each_feature() -> None:
    _, document = examine()
    names = [one["feature"] for one in document["features"]]
    assert len(names) == len(set(names)) > 20
    for one in document["features"]:
        assert set(one) == {"feature", "status", "why", "fix", "required"}
        assert one["status"] in ("works", "missing")
        assert one["why"]
        assert bool(one["fix"]) == (one["status"] == "missing"), "a fix for what is missing, and for nothing else"


@pytest.mark.alone
def test_nothing_is_left_behind() -> None:
    before = host_state()
    examine()
    assert host_state() == before


def test_table_has_a_line_for_each_feature() -> None:
    _, document = examine()
    shown = subprocess.run(DOCTOR, capture_output=True, text=True, timeout=120)
    lines = shown.stdout.splitlines()
    for name, feature in features(document).items():
        assert [line for line in lines if line.split()[:2] == [name, feature["status"]]], name
    assert "\x1b" not in shown.stdout, "no colours into a pipe"


def test_without_criu_and_programs_it_names_setup(tmp_path: Path) -> None:
    if any((Path(where) / "criu").exists() for where in ("/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin")):
        pytest.skip("this host has a CRIU of its own")
    exit_code, document = examine(WAYPOINT_TOOLS=str(tmp_path))
    found = features(document)
    assert exit_code == 1
    assert document["ok"] is False
    for name in ("criu-check", "criu-dump-restore", "program-init", "program-launch"):
        assert (found[name]["status"], found[name]["fix"]) == ("missing", tools.SETUP)
    assert found["namespace-user"]["status"] == "works"


def test_broken_criu_is_found_out_by_dumping(tmp_path: Path) -> None:
    """It passes `criu check`, but cannot dump: what a version or a check alone would not tell."""
    real = tools.criu_argv()
    broken = tmp_path / "criu"
    command = " ".join(f"'{word}'" for word in real)
    broken.write_text(f'#!/bin/sh\n[ "$1" = dump ] && echo "Error: cannot" >&2 && exit 1\nexec {command} "$@"\n')
    broken.chmod(0o755)
    code = f"from waypoint.kernel import tools; tools.remember_criu(tools.check_criu([{str(broken)!r}]))"
    env = {**os.environ, "WAYPOINT_TOOLS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    exit_code, document = examine(WAYPOINT_TOOLS=str(tmp_path))
    found = features(document)
    assert exit_code == 1
    assert found["criu-check"]["status"] == "works"
    assert found["criu-dump-restore"]["status"] == "missing"
    assert "cannot" in found["criu-dump-restore"]["why"]


def test_root_of_an_unprivileged_container() -> None:
    exit_code, document = examine("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    found = features(document)
    assert exit_code == 1
    for name in ("root", "namespace-mnt", "overlay"):
        assert found[name]["status"] == "missing"
        assert "privileged" in found[name]["fix"]
    assert found["memfd"]["status"] == "works", "what needs no privilege is not blamed"


def test_store_on_an_overlay_is_told_to_move(tmp_path: Path) -> None:
    """As in a container whose WAYPOINT_HOME is not on a volume."""
    before = ("unshare", "-m", "--propagation", "private", "sh", "-c", OVERLAY_AS_HOME, "sh", str(tmp_path))
    exit_code, document = examine(*before)
    found = features(document)
    assert exit_code == 1
    assert found["overlay"]["status"] == "missing"
    assert "WAYPOINT_HOME" in found["overlay"]["fix"]


def test_missing_optional_program_does_not_fail_it(tmp_path: Path) -> None:
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("sh", "mv", "tar", "ip"):
        if found := shutil.which(name):
            (directory / name).symlink_to(found)
    exit_code, document = examine(PATH=str(directory))
    buildah = features(document)["buildah"]
    assert (buildah["status"], buildah["required"]) == ("missing", False)
    assert "apt-get install" in buildah["fix"]
    assert document["ok"] is True
    assert exit_code == 0
