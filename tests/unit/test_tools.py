"""Looking up CRIU and our own programs: cheap, never stale, and an error that names the fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import tools
from waypoint.kernel.compile import compile_program

PROGRAM = '#include "answer.h"\nint main(void) { return ANSWER; }\n'


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty prefix of its own."""
    where = tmp_path / "tools"
    where.mkdir()
    monkeypatch.setenv("WAYPOINT_TOOLS", str(where))
    return where


@pytest.fixture
def program(tmp_path: Path) -> tools.Program:
    source = tmp_path / "native" / "answer.c"
    source.parent.mkdir()
    source.write_text(PROGRAM)
    source.with_name("answer.h").write_text("#define ANSWER 7\n")
    return tools.Program("answer", source)


@pytest.fixture
def own_criu(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The host's real CRIU, as seen from an empty prefix and with no system CRIU."""
    monkeypatch.delenv("WAYPOINT_TOOLS")
    roots = sorted(tools.prefix().glob("criu-*"))
    if not roots:
        pytest.skip("the host's own CRIU is used, none was fetched")
    monkeypatch.setenv("WAYPOINT_TOOLS", str(prefix))
    monkeypatch.setattr(tools, "_SYSTEM_DIRECTORIES", ())
    link = prefix / roots[-1].name
    link.symlink_to(roots[-1])
    return link


def stand_in(tmp_path: Path, version: str, check: str) -> Path:
    """A program that answers as some CRIU would."""
    script = tmp_path / "criu"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Version: {version}" && exit 0\n{check}\n')
    script.chmod(0o755)
    return script


def test_prefix_is_the_hosts_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAYPOINT_TOOLS", raising=False)
    assert tools.prefix() == Path("/opt/waypoint")
    monkeypatch.setenv("WAYPOINT_TOOLS", "/srv/tools")
    assert tools.prefix() == Path("/srv/tools")


class TestPrograms:
    def test_missing_binary_names_setup(self, prefix: Path, program: tools.Program) -> None:
        with pytest.raises(HostUnsupported, match="waypoint setup") as caught:
            tools.program_path(program)
        assert caught.value.details["fix"] == "waypoint setup"

    def test_compiled_binary_is_found_and_runs_without_libraries(self, prefix: Path, program: tools.Program) -> None:
        binary = compile_program(program)
        assert tools.program_path(program) == binary
        assert subprocess.run([binary], env={}).returncode == 7
        assert b"/ld-linux" not in binary.read_bytes()

    @pytest.mark.parametrize("changed", ["answer.c", "answer.h"])
    def test_changed_source_never_gets_the_old_binary(self, prefix: Path, program: tools.Program, changed: str) -> None:
        old = compile_program(program)
        tools.program_path(program)
        path = program.source.with_name(changed)
        times = path.stat()
        path.write_text(path.read_text().replace("7", "8").replace("return", "return 1 +"))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as an unpacked archive may
        with pytest.raises(HostUnsupported):
            tools.program_path(program)
        assert compile_program(program) != old
        assert subprocess.run([tools.program_path(program)]).returncode == 8

    def test_another_clone_of_the_same_source_shares_the_binary(
        self, prefix: Path, program: tools.Program, tmp_path: Path
    ) -> None:
        binary = compile_program(program)
        clone = tools.Program("answer", tmp_path / "clone" / "answer.c")
        clone.source.parent.mkdir()
        for path in program.files():
            (clone.source.parent / path.name).write_bytes(path.read_bytes())
        assert tools.program_path(clone) == binary

    def test_removed_binary_is_noticed(self, prefix: Path, program: tools.Program) -> None:
        compile_program(program)
        tools.program_path(program).unlink()
        with pytest.raises(HostUnsupported):
            tools.program_path(program)

    def test_source_that_does_not_compile_leaves_nothing(self, prefix: Path, program: tools.Program) -> None:
        program.source.write_text("int main(void) { return nothing; }\n")
        with pytest.raises(KernelError, match="nothing"):
            compile_program(program)
        assert list((prefix / "bin").iterdir()) == []

    def test_no_compiler_names_the_package(
        self, prefix: Path, program: tools.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(HostUnsupported, match="apt-get install gcc"):
            compile_program(program)

    def test_package_without_its_sources_says_so(self, prefix: Path, program: tools.Program) -> None:
        program.source.unlink()
        with pytest.raises(HostUnsupported, match="install the package again"):
            tools.program_path(program)

    def test_our_own_programs_compile_without_a_warning(self, prefix: Path, tmp_path: Path) -> None:
        for program in tools.PROGRAMS:
            argv = ["gcc", *program.flags, "-Werror", "-o", str(tmp_path / program.name), program.source.name]
            done = subprocess.run(argv, capture_output=True, text=True, cwd=program.source.parent)
            assert done.returncode == 0, done.stderr


class TestCriu:
    def test_none_at_all_names_setup(self, prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tools, "_SYSTEM_DIRECTORIES", ())
        with pytest.raises(HostUnsupported, match="waypoint setup") as caught:
            tools.criu_argv()
        assert caught.value.details["fix"] == "waypoint setup"

    def test_found_checked_and_stamped(self, own_criu: Path, prefix: Path) -> None:
        argv = tools.criu_argv()
        assert argv[-1] == str(own_criu / "usr/sbin/criu")
        said = subprocess.run([*argv, "--version"], capture_output=True, text=True, check=True).stdout
        assert f"Version: {tools.criu_version()}" in said
        assert json.loads((prefix / "criu.json").read_text())["kernel"].startswith(os.uname().release)

    def test_stamped_look_up_starts_no_program(self, own_criu: Path) -> None:
        tools.criu_argv()
        code = (
            "import sys; from waypoint.kernel import tools; print(tools.criu_argv()[-1]); tools.criu_version();"
            "sys.exit('subprocess' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(own_criu / "usr/sbin/criu")

    def test_other_kernel_is_checked_again(self, own_criu: Path, prefix: Path) -> None:
        tools.criu_argv()
        stamp = prefix / "criu.json"
        good = stamp.read_text()
        stamp.write_text(json.dumps(json.loads(good) | {"kernel": "5.10.0 #1", "version": "0.0"}))
        assert tools.criu_version() != "0.0"
        assert stamp.read_text() == good

    @pytest.mark.parametrize("broken", ["", "{", '{"argv": []}', '{"argv": ["/nowhere"], "version": 1}'])
    def test_damaged_stamp_is_replaced(self, own_criu: Path, prefix: Path, broken: str) -> None:
        (prefix / "criu.json").write_text(broken)
        assert tools.criu_argv()[-1].endswith("/criu")
        assert json.loads((prefix / "criu.json").read_text())["version"] == tools.criu_version()

    def test_replaced_binary_is_checked_again(
        self, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tools, "_SYSTEM_DIRECTORIES", (str(tmp_path),))
        stand_in(tmp_path, "9.1", "exit 0")
        assert tools.criu_version() == "9.1"
        stand_in(tmp_path, "9.12", "exit 0")
        assert tools.criu_version() == "9.12"

    def test_system_criu_that_fails_its_check_is_passed_over(
        self, own_criu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stand_in(tmp_path, "9.9", "echo 'Error: no such kernel' >&2; exit 1")
        monkeypatch.setattr(tools, "_SYSTEM_DIRECTORIES", (str(tmp_path),))
        assert tools.criu_argv()[-1] == str(own_criu / "usr/sbin/criu")

    def test_failed_check_quotes_criu(self, prefix: Path, tmp_path: Path) -> None:
        script = stand_in(tmp_path, "9.9", "echo 'Error: no such kernel' >&2; exit 1")
        with pytest.raises(HostUnsupported, match="no such kernel"):
            tools.check_criu([str(script)])

    def test_too_old_is_refused_though_it_passes(self, prefix: Path, tmp_path: Path) -> None:
        script = stand_in(tmp_path, "3.17.1", "exit 0")
        with pytest.raises(HostUnsupported, match=r"3\.17\.1.*4\.1 or later"):
            tools.check_criu([str(script)])
