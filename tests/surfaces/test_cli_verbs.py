"""Every other command of `waypoint`, to the letter of its contract: documents, ids on stdout, errors, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from cli_runner import Cli
from terminal_screen import CLI, SOURCE, Screen
from waypoint import __version__
from waypoint.engine import Engine
from waypoint.model import BaseRecord
from waypoint.session import Session

SESSION, SNAPSHOT = re.compile(r"s[0-9a-f]{8}\n"), re.compile(r"p[0-9a-f]{8}\n")


@pytest.fixture(scope="module")
def cli(home: Path) -> Cli:
    return Cli(home)


@pytest.fixture
def named(engine: Engine, small_base: BaseRecord, sessions: list[Session]) -> Session:
    return engine.new(base=small_base, name="named")


# -- new, ls, rm --------------------------------------------------------------------------------------------------------


def test_new_prints_just_the_id(cli: Cli, small_rootfs: Path, sessions: list[Session]) -> None:
    said = cli.ok("new", "--rootfs", str(small_rootfs))
    assert SESSION.fullmatch(said.out) and said.err == ""
    assert cli.ok("exec", said.out.strip(), "echo alive").out == "alive\n"


def test_new_over_the_host(cli: Cli, sessions: list[Session]) -> None:
    document = cli.ok("new", "--name", "over-host", "--json").json
    assert (document["name"], document["base"], document["state"]) == ("over-host", "host", "live")
    machine = Path("/etc/os-release").read_text()
    assert cli.ok("exec", "over-host", "cat /etc/os-release").out == machine
    (listed,) = [one for one in cli.ok("ls", "--json").json["sessions"] if one["session"] == document["session"]]
    assert listed == {
        "session": document["session"], "name": "over-host", "state": "live", "base": "host", "snapshot": None,
    }  # fmt: skip


def test_new_with_everything(cli: Cli, small_rootfs: Path, sessions: list[Session]) -> None:
    words = ("--env", "A=b c", "--env", "EMPTY=", "--user", "user", "--workdir", "/home/user", "--memory", "64M", "--pids", "50")
    document = cli.ok("new", "--rootfs", str(small_rootfs), "--name", "all", *words, "--cpus", "1.5", "--json").json
    assert document["base_kind"] == "rootfs"
    said = cli.ok("exec", "all", 'echo "$A|$EMPTY|$(id -un)|$PWD"')
    assert said.out == "b c||user|/home/user\n"
    assert cli("exec", "all", "tail /dev/zero").code == 137, "the memory limit ends it"


def test_new_from_a_tarball_and_again_from_its_base(cli: Cli, small_rootfs: Path, tmp_path: Path, sessions: list[Session]) -> None:
    packed = tmp_path / "root.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(small_rootfs, ".")
    document = cli.ok("new", "--rootfs", str(packed), "--json").json
    assert document["base_kind"] == "tarball"
    again = cli.ok("new", "--base", document["base"], "--json").json
    assert again["base"] == document["base"]
    assert cli.ok("exec", again["session"], "echo alive").out == "alive\n"


def test_files_only_session(cli: Cli, small_rootfs: Path, sessions: list[Session]) -> None:
    session = cli.ok("new", "--rootfs", str(small_rootfs), "--files-only").out.strip()
    cli.ok("exec", session, "echo kept >/opt/file; VARIABLE=1")
    taken = cli.ok("snapshot", session, "--json").json
    assert taken["captured"] == ["files"]
    cli.ok("exec", session, "rm /opt/file")
    cli.ok("restore", session, taken["snapshot"])
    assert cli.ok("exec", session, "cat /opt/file; echo [$VARIABLE]").out == "kept\n[]\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--memory", "lots"), "usage"), (("--memory", "0"), "usage"), (("--cpus", "-1"), "usage"), (("--network", "wifi"), "usage"),
        (("--name", "a/b"), "usage"), (("--name", ".."), "usage"), (("--name", "a:b"), "usage"), (("--name", "x" * 64), "usage"),
        (("--env", "1=2"), "usage"), (("--rootfs", "/nonexistent"), "usage"), (("--rootfs", "/tmp", "--base", "x"), "usage"),
        (("--base", "nonexistent"), "not_found"), (("--cap-add", "CAP_NOTHING"), "usage"), (("extra",), "usage"),
    ],
)  # fmt: skip
def test_new_refuses(cli: Cli, words: tuple[str, ...], code: str, engine: Engine) -> None:
    before = [record.id for record in engine.sessions()]
    said = cli("new", *words, "--json")
    assert said.error["code"] == code, said.error
    assert said.code == (2 if code == "usage" else 125)
    assert [record.id for record in engine.sessions()] == before


def test_names_are_unique(cli: Cli, named: Session, small_rootfs: Path) -> None:
    said = cli("new", "--name", "named", "--rootfs", str(small_rootfs), "--json")
    assert (said.code, said.error["code"]) == (125, "exists")


def test_prefixes(cli: Cli, named: Session, engine: Engine, small_base: BaseRecord) -> None:
    assert cli.ok("exec", "nam", "echo hi").out == "hi\n"
    assert cli.ok("exec", named.id[:7], "echo hi").out == "hi\n"
    engine.new(base=small_base, name="namesake")
    for words in (("exec", "nam", "true"), ("exec", "s", "true"), ("snapshot", "nam")):
        said = cli(*words, "--json")
        assert (said.code, said.error["code"]) == (125, "ambiguous")
    assert cli.ok("exec", "named", "echo the whole name").code == 0


def test_ls_for_people(cli: Cli, named: Session) -> None:
    (line,) = [line for line in cli.ok("ls").lines if line.startswith(named.id)]
    assert line.split()[1:3] == ["named", "live"]
    with Screen([*CLI, "ls"], columns=120) as screen:
        shown = screen.wait_for("ended with 0")
        assert shown.splitlines()[0].split() == ["SESSION", "NAME", "STATE", "BASE", "SNAPSHOT", "AGE"]
        assert "\x1b[1mSESSION" in screen.coloured


def test_rm(cli: Cli, named: Session, engine: Engine) -> None:
    parent = cli.ok("snapshot", "named", "parent").out.strip()
    child = cli.ok("snapshot", "named").out.strip()
    said = cli("rm", "parent", "--json")
    assert (said.code, said.error["code"]) == (125, "has_children")
    assert said.error["details"]["descendants"] == [child]
    said = cli("rm", "named", "nonexistent", "--json")
    assert (said.code, said.error["code"]) == (125, "not_found")
    assert cli.ok("exec", "named", "echo still here").out == "still here\n", "nothing goes unless all names are right"
    assert cli.ok("rm", "named", parent, "--recursive", "--json").json == {"removed": [named.id, parent, child]}
    left = {record.id for record in engine.sessions()} | {record.id for record in engine.snapshots()}
    assert not left & {named.id, parent, child}
    assert cli("rm").code == 2


def test_rm_prints_ids_and_takes_a_chain_in_any_order(cli: Cli, named: Session) -> None:
    chain = [cli.ok("snapshot", "named").out.strip() for _ in range(2)]
    assert cli.ok("rm", *chain).lines == chain[::-1]


# -- snapshots ----------------------------------------------------------------------------------------------------------


def test_snapshot_restore_fork(cli: Cli, named: Session, engine: Engine) -> None:
    cli.ok("exec", "named", "cd /opt; X=before; echo file >a; sleep 1000 & ")
    said = cli.ok("snapshot", "named", "first", "--json").json
    keys = {
        "snapshot", "name", "parent", "duration_ms", "paused_ms", "files_bytes", "memory_bytes", "captured", "not_captured",
    }  # fmt: skip
    assert set(said) == keys
    assert (said["name"], said["parent"]) == ("first", None)
    assert 0 < said["paused_ms"] <= said["duration_ms"]
    assert said["memory_bytes"] > 0 and "processes" in said["captured"] and isinstance(said["not_captured"], list)
    second = cli.ok("snapshot", "named")
    assert SNAPSHOT.fullmatch(second.out)

    cli.ok("exec", "named", "cd /; X=after; rm /opt/a; kill %1")
    back = cli.ok("restore", "named", "first", "--json").json
    assert set(back) == {"session", "snapshot", "duration_ms"}
    assert (back["session"], back["snapshot"]) == (named.id, said["snapshot"]) and back["duration_ms"] > 0
    assert cli.ok("exec", "named", "pwd; echo $X; cat a; jobs -r | wc -l").out == "/opt\nbefore\nfile\n1\n"
    quiet = cli.ok("restore", "named", "first")
    assert (quiet.raw, quiet.raw_errors) == (b"", b"")

    forks = cli.ok("fork", "named", "-n", "3", "--from", "first", "--json").json
    assert set(forks) == {"snapshot", "sessions", "duration_ms"}
    assert forks["snapshot"] == said["snapshot"] and len(set(forks["sessions"])) == 3
    for number, fork in enumerate(forks["sessions"]):
        assert cli.ok("exec", fork, f"echo $X; X={number}").out == "before\n"
    assert [cli.ok("exec", fork, "echo $X").out for fork in forks["sessions"]] == ["0\n", "1\n", "2\n"]
    one = cli.ok("fork", "named", "--name", "twin")
    assert SESSION.fullmatch(one.out)
    assert cli.ok("exec", "twin", "echo $X").out == "before\n"


def test_snapshot_errors(cli: Cli, named: Session) -> None:
    cli.ok("snapshot", "named", "taken")
    for words, code in (
        (("snapshot", "named", "taken"), ("usage", "exists")),
        (("snapshot", "named", "a/b"), ("usage",)),
        (("restore", "named", "nonexistent"), ("not_found",)),
        (("fork", "named", "--from", "nonexistent"), ("not_found",)),
        (("fork", "named", "-n", "0"), ("usage",)),
        (("fork", "named", "-n", "2", "--name", "one"), ("usage",)),
        (("resume", "nonexistent"), ("not_found",)),
        (("undo", "named"), ("wrong_state",)),
    ):
        said = cli(*words, "--json")
        assert said.error["code"] in code, words
        assert said.code == (2 if said.error["code"] == "usage" else 125)
    assert cli.ok("exec", "named", "echo unharmed").out == "unharmed\n"


def test_pause_and_resume(cli: Cli, named: Session) -> None:
    cli.ok("exec", "named", "X=kept; sleep 1000 &")
    document = cli.ok("pause", "named", "--json").json
    assert (document["session"], document["state"]) == (named.id, "paused") and document["duration_ms"] > 0
    (listed,) = [one for one in cli.ok("ls", "--json").json["sessions"] if one["session"] == named.id]
    assert listed["state"] == "paused"
    said = cli("exec", "named", "true", "--json")
    assert (said.code, said.error["code"]) == (125, "wrong_state")
    assert "waypoint resume" in said.error["message"]
    document = cli.ok("resume", "named", "--json").json
    assert (document["session"], document["state"]) == (named.id, "live")
    assert cli.ok("exec", "named", "echo $X; jobs -r | wc -l").out == "kept\n1\n"


def test_undo(cli: Cli, small_rootfs: Path, sessions: list[Session]) -> None:
    session = cli.ok("new", "--auto-snapshot", "--rootfs", str(small_rootfs)).out.strip()
    cli.ok("exec", session, "cd /opt; echo one >file")
    cli.ok("exec", session, "echo two >>file; X=1")
    cli.ok("exec", session, "rm file; cd /")
    document = cli.ok("undo", session, "--json").json
    assert set(document) == {"session", "snapshot", "duration_ms"} and document["session"] == session
    assert cli.ok("run", session, "--", "cat", "/opt/file").out == "one\ntwo\n"
    cli.ok("undo", session)
    assert cli.ok("run", session, "--", "cat", "/opt/file").out == "one\n"


def test_wait_in_a_fork(cli: Cli, named: Session) -> None:
    """A command in flight goes on in the fork, and its outcome can be had there."""
    running = cli.start("exec", "named", "echo begun; until [ -e /tmp/go ]; do sleep 0.02; done; echo ended; (exit 6)")
    assert running.stdout is not None and running.stdout.readline() == b"begun\n"
    fork = cli.ok("fork", "named").out.strip()
    waiting = cli.start("wait", fork)
    cli.ok("run", fork, "--", "touch", "/tmp/go")
    out, _ = waiting.communicate(timeout=30)
    assert (waiting.returncode, out) == (6, b"begun\nended\n")
    assert cli("wait", fork).code == 6, "also when it has ended"
    assert running.poll() is None, "the original has not been told to go"
    cli.ok("run", "named", "--", "touch", "/tmp/go")
    assert running.communicate(timeout=30)[0] == b"ended\n"
    assert running.returncode == 6


def test_wait_by_number(cli: Cli, named: Session) -> None:
    cli.ok("exec", "named", "true")
    cli("exec", "named", "echo two; (exit 5)")
    number = int(named.state()["next"]) - 1
    said = cli("wait", "named", str(number), "--json")
    assert (said.code, said.json["exit_code"], said.json["stdout"]) == (5, 5, "two\n")
    assert cli("wait", "named", "9999", "--json").code == 125


# -- tree, diff, cp, gc ---------------------------------------------------------------------------------------------------


def test_tree(cli: Cli, named: Session) -> None:
    root = cli.ok("snapshot", "named", "root").out.strip()
    left, right = (cli.ok("fork", "named", "--from", "root").out.strip() for _ in range(2))
    leaf = cli.ok("snapshot", left, "leaf").out.strip()
    found = {one["snapshot"]: one for one in cli.ok("tree", "named", "--json").json["snapshots"]}
    assert set(found) == {root, leaf}
    assert {"snapshot", "name", "parent", "children", "sessions"} <= set(found[root])
    assert (found[root]["name"], found[root]["parent"], found[root]["children"]) == ("root", None, [leaf])
    assert set(found[root]["sessions"]) == {named.id, right}
    assert (found[leaf]["parent"], found[leaf]["sessions"]) == (root, [left])
    assert found == {one["snapshot"]: one for one in cli.ok("tree", "leaf", "--json").json["snapshots"]}
    assert set(found) <= {one["snapshot"] for one in cli.ok("tree", "--json").json["snapshots"]}

    lines = cli.ok("tree", "named").lines
    assert lines[0].startswith(f"● {root} root  ") and "taken in" in lines[0]
    assert [line for line in lines if line.startswith(f"├─ ● {leaf} leaf") or line.startswith(f"└─ ● {leaf} leaf")]
    assert [line for line in lines if line.endswith(f"▶ {left}  live") and line[0] in "│ "]
    plain = cli.with_env(PYTHONIOENCODING="ascii").ok("tree", "named")
    assert plain.lines[0].startswith(f"o {root} root")


def test_paused_session_in_the_tree(cli: Cli, named: Session) -> None:
    root = cli.ok("snapshot", "named").out.strip()
    cli.ok("pause", "named")
    (one,) = cli.ok("tree", "named", "--json").json["snapshots"]
    assert (one["snapshot"], one["sessions"], one["children"]) == (root, [named.id], [])
    assert [line for line in cli.ok("tree", "named").lines if line.endswith("▶ " + f"{named.id} named  paused")]


def test_diff(cli: Cli, named: Session) -> None:
    cli.ok("exec", "named", "cd /opt; echo a >a; echo b >b; export X=1")
    cli.ok("snapshot", "named", "one")
    cli.ok("exec", "named", "echo more >>a; rm b; echo c >c; export X=2; cd /home; sleep 1000 &")
    document = cli.ok("diff", "one", "named", "--json").json
    files = {(one["status"], one["path"]) for one in document["files"]}
    assert {("changed", "/opt/a"), ("removed", "/opt/b"), ("added", "/opt/c")} <= files
    assert document["cwd"] == {"before": "/opt", "after": "/home"}
    assert [(one["name"], one["before"], one["after"]) for one in document["environment"]] == [("X", "1", "2")]
    assert ["sleep", "1000"] in [one["argv"] for one in document["processes"] if one["status"] == "added"]
    assert document["listening"] == []
    shown = cli.ok("diff", "one", "named").out
    assert "~ /opt/a" in shown and "- /opt/b" in shown and "+ /opt/c" in shown


def test_cp(cli: Cli, named: Session, tmp_path: Path) -> None:
    tree = tmp_path / "in"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/file").write_bytes(bytes(range(256)))
    assert cli.ok("cp", str(tree), "named:/opt/in").raw == b""
    assert cli.ok("exec", "named", "cat /opt/in/sub/file").raw == bytes(range(256))
    cli.ok("snapshot", "named", "with-files")
    cli.ok("exec", "named", "rm -r /opt/in")
    document = cli.ok("cp", "with-files:/opt/in", "back", "--json", cwd=tmp_path).json
    assert (document["files"], document["size_bytes"]) == (1, 256)
    assert (tmp_path / "back/sub/file").read_bytes() == bytes(range(256))
    said = cli("cp", "named:/nonexistent", str(tmp_path), "--json")
    assert (said.code, said.error["code"]) == (125, "not_found")
    assert cli("cp", "a", "b", "--json").code == 2


def test_gc(cli: Cli, engine: Engine) -> None:
    cli.ok("gc")
    stray = engine.store.paths.layers / "no-row-names-this"
    stray.mkdir()
    counts = cli.ok("gc", "--json").json
    assert counts["layers"] == 1 and not stray.exists()
    assert cli.ok("gc").out == "nothing to free\n"


# -- build --------------------------------------------------------------------------------------------------------------


def test_build(cli: Cli, tmp_path: Path, small_rootfs: Path, sessions: list[Session]) -> None:
    context = tmp_path / "context"
    context.mkdir()
    with tarfile.open(context / "root.tar", "w") as archive:
        archive.add(small_rootfs, ".")
    dockerfile = "FROM scratch\nADD root.tar /\nENV COLOUR=blue\nWORKDIR /srv/app\nUSER user\n"
    (context / "Dockerfile").write_text(dockerfile)
    said = cli.ok("build", str(context), "--name", "image", "--json", timeout=200)
    document = said.json
    assert (document["name"], document["base_kind"]) == ("image", "dockerfile")
    assert said.raw_errors == b"", "the builder's words are for a terminal, or for --verbose"
    assert cli.ok("exec", "image", 'echo "$COLOUR|$PWD|$(id -un)"').out == "blue|/srv/app|user\n"
    again = cli.ok("new", "--base", "image")
    assert cli.ok("exec", again.out.strip(), "echo $COLOUR").out == "blue\n"
    said = cli("build", str(context), "--name", "image", "--json")
    assert said.error["code"] == "exists", "told before anything is built"

    (context / "Dockerfile").write_text(dockerfile + "RUN echo builder says this; exit 9\n")
    said = cli("build", str(context), timeout=200)
    assert (said.code, said.out) == (125, "")
    assert "builder says this" in said.err
    said = cli("build", str(tmp_path), "--json")
    assert (said.code, said.error["code"]) == (125, "build")


# -- the command line itself ----------------------------------------------------------------------------------------------


def test_version_and_help(cli: Cli) -> None:
    assert cli.ok("--version").out == f"waypoint, version {__version__}\n"
    shown = cli.ok("--help").out
    commands = "new build exec run shell snapshot restore fork pause resume undo wait logs tree diff cp ls rm gc doctor setup demo"
    for command in commands.split():
        assert re.search(rf"^  {command} ", shown, re.MULTILINE), command
        assert "--json" in cli.ok(command, "--help").out, command
    assert cli("no-such-command").code == 2
    assert cli("no-such-command", "--json").error["code"] == "usage"
    assert cli().code == 2


@pytest.mark.parametrize("words", [("exec",), ("exec", "s"), ("run", "s"), ("run", "s", "--"), ("exec", "s", "x", "--timeout", "soon"),
    ("exec", "s", "x", "--timeout", "-1"), ("exec", "s", "x", "--bogus"), ("snapshot",), ("restore", "s"), ("diff", "s"), ("cp", "s"),
    ("wait", "s", "x"), ("completion", "csh")])  # fmt: skip
def test_bad_usage(cli: Cli, words: tuple[str, ...]) -> None:
    said = cli(*words)
    assert said.code == 2
    assert said.raw == b"" and said.err.startswith("Usage: waypoint ")
    said = cli(words[0], "--json", *words[1:])
    assert (said.code, said.error["code"]) == (2, "usage")


def test_errors_name_the_next_step(cli: Cli) -> None:
    said = cli("exec", "nonexistent", "true")
    assert (said.code, said.out) == (125, "")
    assert said.err == "waypoint: no session nonexistent; `waypoint ls` lists them\n"
    error = cli("exec", "nonexistent", "true", "--json").error
    assert (error["code"], error["details"]) == ("not_found", {"session": "nonexistent"})


def test_colours(cli: Cli) -> None:
    with Screen([*CLI, "exec", "nonexistent", "true"]) as screen:
        screen.wait_for("ended with 125")
        assert "\x1b[31mwaypoint:" in screen.coloured
    with Screen([*CLI, "exec", "nonexistent", "true"], NO_COLOR="1") as screen:
        screen.wait_for("ended with 125")
        assert "\x1b[3" not in screen.coloured


def test_store_that_is_not_ours_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"not a database at all, but long enough to be read as one" * 40)
    for words in (("ls",), ("exec", "x", "true")):
        said = Cli(tmp_path)(*words, "--json")
        assert (said.code, said.error["code"]) == (125, "store")


def test_without_root(cli: Cli) -> None:
    """The system's Python, since ours may lie where only root can look; what it imports is the same."""
    path = ":".join([str(SOURCE), *(entry for entry in sys.path if entry.endswith("site-packages"))])
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-m", "waypoint.cli.main"]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chown(directory, 65534, 65534)
        for home, words in ((f"{directory}/own", ("new",)), ("/var/lib/not-theirs", ("ls",))):
            env = {**os.environ, "PYTHONPATH": path, "WAYPOINT_HOME": home}
            done = subprocess.run([*command, *words, "--json"], env=env, capture_output=True, timeout=60)
            error = json.loads(done.stderr)["error"]
            assert (done.returncode, error["code"]) == (125, "host_unsupported"), error
            assert "sudo" in error["details"]["fix"]


def test_closed_output(cli: Cli, named: Session) -> None:
    """`waypoint tree | head -0`: no traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    running = cli.start("ls", stdout=writing)
    os.close(writing)
    assert running.stderr is not None
    assert (running.wait(30), running.stderr.read()) == (141, b"")


def test_ages_and_sizes() -> None:
    from waypoint.cli.show import age, size

    assert [size(count) for count in (0, 999, 1000, 10 << 10, 3 << 20, 5 << 30, 2 << 40)] == [
        "0B", "999B", "1.0K", "10K", "3.0M", "5.0G", "2.0T",
    ]  # fmt: skip
    assert [age(seconds) for seconds in (-1, 5, 89, 120, 7200, 300_000)] == ["0 s", "5 s", "89 s", "2 min", "2 h", "3 d"]
