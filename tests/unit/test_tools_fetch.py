"""Fetching CRIU for real: from Debian's archive, verified, and without a write to the host's package state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from waypoint.errors import HostUnsupported
from waypoint.kernel import fetch, packages, tools

NO_NETWORK = ("Temporary failure resolving", "Could not resolve", "Could not connect", "Network is unreachable")

# Writing to any of these fails in the child, so that a fetch that touches the host's packages fails too.
READ_ONLY = ("/var/lib/apt", "/var/cache/apt", "/var/lib/dpkg", "/etc/apt", "/var/log")
GUARDED = 'set -e; for d in {}; do mount --bind $d $d; mount -o remount,bind,ro $d; done; exec "$@"'.format(
    " ".join(READ_ONLY)
)

FETCH = """
import json, sys
from waypoint.errors import HostUnsupported
from waypoint.kernel import fetch, tools
said = []
try:
    with fetch.locked_prefix() as where:
        criu = fetch.fetch_criu(where, said.append)
        tools.remember_criu(criu)
except HostUnsupported as error:
    print(json.dumps({"error": error.message}))
else:
    print(json.dumps({"argv": criu.argv, "version": criu.version, "said": said}))
"""


def test_fetched_criu_works_and_the_host_is_untouched(tmp_path: Path) -> None:
    argv = ["unshare", "-m", "--propagation", "private", "sh", "-c", GUARDED, "sh", sys.executable, "-c", FETCH]
    env = {**os.environ, "WAYPOINT_TOOLS": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if any(words in answer.get("error", "") for words in NO_NETWORK):
        pytest.skip("Debian's archive cannot be reached from here")
    assert "error" not in answer, answer
    subprocess.run([*answer["argv"], "check"], check=True, capture_output=True)
    assert answer["argv"][0].startswith(str(tmp_path)), "its own loader, not the host's"
    unpacked = Path(answer["argv"][-1]).relative_to(tmp_path).parts[0]
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "criu.json", unpacked}, (
        "nothing but the result is left"
    )


def test_unverified_packages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = tmp_path / "stranger.gpg"
    stranger.write_bytes(b"")
    monkeypatch.setenv("WAYPOINT_TOOLS", str(tmp_path / "tools"))
    monkeypatch.setattr(fetch, "KEYRINGS", (stranger,))
    monkeypatch.setattr(fetch, "KEYRING_SUITES", ("bookworm",))
    monkeypatch.setattr(fetch, "SUITES", (("forky",),))
    monkeypatch.setattr(fetch, "_ROUNDS", 1)
    with fetch.locked_prefix() as where, pytest.raises(HostUnsupported) as caught:
        fetch.fetch_criu(where, lambda _: None)
    if any(words in caught.value.message for words in NO_NETWORK):
        pytest.skip("Debian's archive cannot be reached from here")
    assert "NO_PUBKEY" in caught.value.message or "not signed" in caught.value.message
    assert [path.name for path in where.iterdir()] == [".lock"]


def test_leftovers_of_a_crashed_setup_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYPOINT_TOOLS", str(tmp_path))
    (tmp_path / ".staging-1/apt").mkdir(parents=True)
    with fetch.locked_prefix():
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_prefix_that_cannot_be_made_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYPOINT_TOOLS", "/proc/nowhere")
    with pytest.raises(HostUnsupported, match="WAYPOINT_TOOLS"), fetch.locked_prefix():
        pytest.fail("a directory was made in /proc")


def test_mirrors_end_with_the_standard_one_and_leave_out_security() -> None:
    found = fetch.mirrors()
    assert found[-1] == fetch.DEFAULT_MIRROR or fetch.DEFAULT_MIRROR in found
    assert not [mirror for mirror in found if "security" in mirror]


def test_unpacked_criu_without_its_loader_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "usr/sbin").mkdir(parents=True)
    (tmp_path / "usr/sbin/criu").write_text("")
    with pytest.raises(HostUnsupported, match="whole"):
        tools.own_criu_argv(tmp_path)


def test_missing_packages_are_those_that_dpkg_does_not_have() -> None:
    assert packages.missing_packages(["dpkg", "no-such-package-anywhere"]) == ["no-such-package-anywhere"]


def test_package_list_holds_names_only() -> None:
    listed = packages.listed_packages(everything=True)
    assert {"gcc", "libc6-dev", "podman"} <= set(listed)
    assert all(name.replace("-", "").replace("+", "").replace(".", "").isalnum() for name in listed)


def test_the_demo_needs_only_the_first_part_of_the_list() -> None:
    first = packages.listed_packages()
    assert {"gcc", "libc6-dev"} <= set(first) < set(packages.listed_packages(everything=True))
    assert not {"podman", "chromium"} & set(first)
