"""Completion: the scripts that shells load, and what they are told, up to a real Tab in a real bash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli_runner import Cli
from terminal_screen import CLI, SOURCE, Screen
from waypoint.engine import Engine
from waypoint.model import BaseRecord
from waypoint.session import Session


@pytest.fixture
def cli(home: Path, engine: Engine, small_base: BaseRecord, sessions: list[Session]) -> Cli:
    session = engine.new(base=small_base, name="completed")
    session.snapshot("marked")
    engine.new(base=small_base)
    return Cli(home)


def complete(cli: Cli, line: str) -> list[str]:
    """What bash is told for the last word of the line."""
    words = line.split(" ")
    env = {"_WAYPOINT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = cli.with_env(**env).ok()
    return [item.partition(",")[2] for item in done.lines if item]


def test_names_complete(cli: Cli, engine: Engine) -> None:
    (unnamed,) = [record.id for record in engine.sessions() if record.name is None]
    (snapshot,) = [record.id for record in engine.snapshots() if record.name == "marked"]
    assert complete(cli, "waypoint sna") == ["snapshot"]
    assert set(complete(cli, "waypoint exec ")) == {"completed", unnamed}
    assert complete(cli, "waypoint exec comp") == ["completed"]
    assert complete(cli, f"waypoint exec {unnamed[:4]}") == [unnamed]
    assert "marked" in complete(cli, "waypoint restore completed ")
    assert "completed" not in complete(cli, "waypoint restore completed ")
    assert complete(cli, f"waypoint fork completed --from {snapshot[:6]}") == [snapshot]
    assert complete(cli, "waypoint diff mark") == ["marked"]
    assert complete(cli, "waypoint rm completed mark") == ["marked"]
    assert complete(cli, "waypoint cp comp") == ["completed:/"]
    assert complete(cli, "waypoint exec completed --tim") == ["--timeout"]
    assert complete(cli, "waypoint completion z") == ["zsh"]


def test_completion_makes_no_store(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "not-there")
    assert complete(cli, "waypoint exec ") == []
    assert not (tmp_path / "not-there").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(cli: Cli, shell: str) -> None:
    script = cli.ok("completion", shell).out
    assert "_WAYPOINT_COMPLETE" in script and f"{shell}_complete" in script
    assert cli.ok("completion", shell, "--json").json == {"shell": shell, "script": script.removesuffix("\n")}


def test_tab_in_bash(cli: Cli, tmp_path: Path, home: Path) -> None:
    program = tmp_path / "waypoint"
    program.write_text(f"#!/bin/sh\nPYTHONPATH={SOURCE} exec {' '.join(CLI)} \"$@\"\n")
    program.chmod(0o755)
    start = tmp_path / "bashrc"
    start.write_text(f"PATH={tmp_path}:$PATH; export WAYPOINT_HOME={home}; PS1='ready> '; source <(waypoint completion bash)\n")
    with Screen(["bash", "--rcfile", str(start), "-i"]) as screen:
        screen.wait_for("ready>")
        screen.type("waypoint exec com\t")
        screen.wait_for("waypoint exec completed")
        screen.type("'echo it-$((1 + 1))'\r")
        screen.wait_for("it-2")


def test_light_imports() -> None:
    """`waypoint exec` is mostly its imports: none of these may creep back onto its path."""
    heavy = ("click", "dataclasses", "inspect", "json", "pathlib", "subprocess", "google", "waypoint.model", "waypoint.engine")
    code = f"import sys, waypoint.cli.main, waypoint.cli.quick; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("name", ["exec", "run"])
def test_quick_form_knows_only_options_of_the_whole(name: str) -> None:
    import importlib

    from waypoint.cli import quick

    command = getattr(importlib.import_module(f"waypoint.cli.{name}"), name)
    known = {option for parameter in command.params for option in parameter.opts}
    for option in ("--json", "--timeout", "-i", "--stdin", "-n", "--no-stdin"):
        assert option in known
        assert quick._parse(["s", option, "1", "true"]) is not None
    for option in known - {"--json", "--timeout", "-i", "--stdin", "-n", "--no-stdin", "--no-wait"}:
        if option.startswith("-"):
            assert quick._parse(["s", "true", option]) is None, option
    for words in (["--help"], ["s", "--timeout", "x"], ["s", "--timeout"], ["s", "--timeout=-1"], ["s", "--timeout", "nan"], ["-x"]):
        assert quick._parse(words) is None, words
