"""The `e2b` package, unmodified, pointed at the daemon."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import e2b
import httpx
import pytest
from e2b import AsyncSandbox, Sandbox, SandboxQuery
from e2b.sandbox.commands.command_handle import CommandExitException, PtySize

from daemon import TcpDaemon, running, until

pytestmark = pytest.mark.timeout(180)

Opts = dict[str, Any]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, small_rootfs: Path) -> Iterator[TcpDaemon]:
    home = tmp_path_factory.mktemp("e2b") / "home"
    (home / "templates").mkdir(parents=True)
    small = {"method": "waypoint_build", "arguments": {"rootfs": str(small_rootfs)}}
    (home / "templates" / "small.json").write_text(json.dumps(small))
    with running(home, "--set", "tick_seconds=0.1", tcp=True) as started:
        yield started


@pytest.fixture(scope="module")
def opts(daemon: TcpDaemon) -> Opts:
    """What $E2B_API_KEY, $E2B_API_URL and $E2B_SANDBOX_URL would say."""
    return {"api_key": daemon.token, "api_url": daemon.url, "sandbox_url": daemon.url}


@pytest.fixture(scope="module")
def sandbox(opts: Opts) -> Sandbox:
    return Sandbox.create("small", timeout=900, metadata={"for": "all tests"}, envs={"GIVEN": "at birth"}, **opts)


@pytest.fixture
def own(opts: Opts) -> Iterator[Callable[..., Sandbox]]:
    """Sandboxes for one test."""
    made: list[Sandbox] = []

    def make(template: str = "small", **more: Any) -> Sandbox:
        made.append(Sandbox.create(template, **{"timeout": 900, **more}, **opts))
        return made[-1]

    yield make
    for one in made:
        one.kill()


# -- commands ---------------------------------------------------------------------------------------------------------


def test_a_command_has_output_code_and_surroundings(sandbox: Sandbox) -> None:
    streamed: list[str] = []
    done = sandbox.commands.run(
        'echo "$GIVEN, $HERE"; pwd; echo wrong >&2', envs={"HERE": "now"}, cwd="/tmp", on_stdout=streamed.append
    )
    assert (done.stdout, done.stderr, done.exit_code) == ("at birth, now\n/tmp\n", "wrong\n", 0)
    assert "".join(streamed) == done.stdout
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo out; exit 7")
    assert (failed.value.exit_code, failed.value.stdout) == (7, "out\n")


def test_a_command_runs_as_a_user_who_is_there(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("id -u; echo $HOME", user="user").stdout == "1000\n/home/user\n"
    with pytest.raises(e2b.AuthenticationException, match="nosuch"):
        sandbox.commands.run("true", user="nosuch")
    with pytest.raises(e2b.InvalidArgumentException, match="/nope"):
        sandbox.commands.run("true", cwd="/nope")


def test_a_command_in_the_background_is_fed_and_listed(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("cat; echo end", background=True, stdin=True)
    listed = [process for process in sandbox.commands.list() if process.pid == handle.pid]
    assert listed[0].cmd == "/bin/bash"
    assert listed[0].args[-1] == "cat; echo end"
    sandbox.commands.send_stdin(handle.pid, "one\n")
    sandbox.commands.stream_input(handle.pid, (f"{n}\n" for n in range(3)))
    handle.close_stdin()
    assert handle.wait().stdout == "one\n0\n1\n2\nend\n"
    assert handle.pid not in [process.pid for process in sandbox.commands.list()]


def test_a_command_goes_on_without_its_caller_and_is_killed(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("n=0; while :; do echo $((n+=1)); sleep 0.05; done", background=True, timeout=0)
    next(iter(handle))
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    numbers = [next(again_out) for again_out in [iter(again)] for _ in range(3)]
    assert all(int(out.strip()) > 0 for out, _, _ in numbers if out)
    assert sandbox.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException) as killed:
        again.wait()
    assert killed.value.exit_code == -1
    assert "killed" in str(killed.value.error)
    assert sandbox.commands.kill(handle.pid) is False
    with pytest.raises(e2b.NotFoundException):
        sandbox.commands.connect(handle.pid)


def test_a_command_beyond_its_time_is_ended(sandbox: Sandbox) -> None:
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("echo begun; sleep 987.25", timeout=1)
    until(lambda: "987.25" not in sandbox.commands.run("ps axo args").stdout.replace("ps axo args", ""))


def test_output_of_every_kind_comes_whole(sandbox: Sandbox) -> None:
    assert len(sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x").stdout) == 3_000_000
    assert sandbox.commands.run("sleep 30 & echo at once").stdout == "at once\n"
    assert sandbox.commands.run("printf 'h\\303\\244\\377'").stdout == "hä\N{REPLACEMENT CHARACTER}"


def test_a_terminal_is_typed_on_resized_and_killed(sandbox: Sandbox) -> None:
    screen: list[bytes] = []
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), envs={"PS1": "> "}, timeout=60)
    sandbox.pty.resize(terminal.pid, PtySize(rows=31, cols=97))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; test -t 0 && exit 4\n")
    with pytest.raises(CommandExitException) as ended:
        terminal.wait(on_pty=screen.append)
    assert ended.value.exit_code == 4
    assert b"31 97" in b"".join(screen)
    other = sandbox.pty.create(PtySize(rows=24, cols=80))
    assert other.kill() is True


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_are_written_read_and_looked_at(sandbox: Sandbox) -> None:
    written = sandbox.files.write("/srv/deep/a.txt", "hällo")
    assert (written.path, written.name) == ("/srv/deep/a.txt", "a.txt")
    assert sandbox.files.read("/srv/deep/a.txt") == "hällo"
    assert bytes(sandbox.files.read("/srv/deep/a.txt", format="bytes")) == "hällo".encode()
    assert b"".join(sandbox.files.read("/srv/deep/a.txt", format="stream")) == "hällo".encode()
    sandbox.files.write_files([{"path": "/srv/deep/b", "data": b"\0\xff"}, {"path": "rel", "data": "home"}])
    assert sandbox.files.read("/root/rel") == "home"
    sandbox.files.write("/srv/deep/zipped", "z" * 5000, gzip=True)
    sandbox.files.write("/srv/deep/large", io.BytesIO(bytes(20 << 20)))
    sandbox.commands.run("ln -s a.txt /srv/deep/link")
    found = {entry.name: entry for entry in sandbox.files.list("/srv/deep")}
    assert {name: entry.size for name, entry in found.items() if name != "link"} == {
        "a.txt": 6,
        "b": 2,
        "zipped": 5000,
        "large": 20 << 20,
    }
    assert (found["link"].type, found["link"].symlink_target) == (e2b.FileType.SYMLINK, "a.txt")
    info = sandbox.files.get_info("/srv/deep/a.txt")
    assert (info.owner, info.permissions, info.mode) == ("root", "rw-r--r--", 0o644)
    assert sandbox.files.write("/srv/deep/theirs", "x", user="user").path == "/srv/deep/theirs"
    assert sandbox.files.get_info("/srv/deep/theirs").owner == "user"
    assert [entry.path for entry in sandbox.files.list("/srv", depth=2)][:2] == ["/srv/deep", "/srv/deep/a.txt"]


def test_files_are_made_moved_and_removed(sandbox: Sandbox) -> None:
    assert sandbox.files.make_dir("/srv/dir/below") is True
    assert sandbox.files.make_dir("/srv/dir/below") is False
    sandbox.files.write("/srv/dir/old", "1")
    assert sandbox.files.rename("/srv/dir/old", "/srv/dir/made/new").path == "/srv/dir/made/new"
    assert [sandbox.files.exists(f"/srv/dir/{name}") for name in ("old", "made/new")] == [False, True]
    sandbox.files.remove("/srv/dir")
    assert not sandbox.files.exists("/srv/dir")


def test_what_is_wrong_with_a_file_is_told(sandbox: Sandbox) -> None:
    for call in (sandbox.files.read, sandbox.files.list, sandbox.files.get_info, sandbox.files.watch_dir):
        with pytest.raises(e2b.FileNotFoundException):
            call("/nope")
    for call in (sandbox.files.read, lambda path: sandbox.files.write(path, "x")):
        with pytest.raises(e2b.InvalidArgumentException, match="directory"):
            call("/tmp")
    with pytest.raises(e2b.InvalidArgumentException, match="directory"):
        sandbox.files.list("/etc/passwd")
    with pytest.raises(e2b.TemplateException):  # the SDK knows by the version that it cannot be done
        sandbox.files.write("/tmp/x", "x", metadata={"a": "b"})


def test_a_directory_is_watched(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("/srv/watched")
    handle = sandbox.files.watch_dir("/srv/watched", recursive=True)
    sandbox.files.make_dir("/srv/watched/new")
    sandbox.files.write("/srv/watched/new/file", "1")
    sandbox.files.rename("/srv/watched/new/file", "/srv/watched/moved")
    sandbox.files.remove("/srv/watched/moved")
    seen: list[tuple[str, str]] = []

    def complete() -> bool:
        seen.extend((event.type.value, event.name) for event in handle.get_new_events())
        return ("remove", "moved") in seen

    until(complete)
    assert {("create", "new"), ("create", "new/file"), ("rename", "new/file"), ("create", "moved")} <= set(seen)
    handle.stop()


def test_links_are_signed(sandbox: Sandbox) -> None:
    sandbox.files.write("/srv/linked", "by a link")
    link = sandbox.download_url("/srv/linked", use_signature_expiration=60)
    assert httpx.get(link).text == "by a link"
    assert httpx.get(link.replace("linked", "other")).status_code == 401
    expired = sandbox.download_url("/srv/linked", use_signature_expiration=-5)
    assert httpx.get(expired).status_code == 401
    assert httpx.post(sandbox.upload_url("/srv/up"), files={"file": ("x", b"up")}).status_code == 200
    assert sandbox.files.read("/srv/up") == "up"


# -- sandboxes --------------------------------------------------------------------------------------------------------


def test_sandboxes_are_listed_with_what_was_said_of_them(
    sandbox: Sandbox, opts: Opts, own: Callable[..., Sandbox]
) -> None:
    other = own(metadata={"for": "another & more"})
    query = SandboxQuery(metadata={"for": "another & more"})
    assert [one.sandbox_id for one in Sandbox.list(query=query, **opts).next_items()] == [other.sandbox_id]
    paged = Sandbox.list(limit=1, order="desc", **opts)
    pages = []
    while paged.has_next:
        pages += [one.sandbox_id for one in paged.next_items()]
    assert pages.index(other.sandbox_id) < pages.index(sandbox.sandbox_id)
    info = sandbox.get_info()
    assert (info.template_id, info.metadata, info.state.value) == ("small", {"for": "all tests"}, "running")
    other.set_timeout(50)
    left = other.get_info().end_at.timestamp() - time.time()
    assert 0 < left <= 50
    assert sandbox.get_metrics()[0].mem_used > 0


def test_a_sandbox_ends_or_sleeps_when_its_time_is_over(own: Callable[..., Sandbox]) -> None:
    ends, sleeps = own(timeout=1), own(timeout=1, lifecycle={"on_timeout": "pause", "auto_resume": True})
    until(lambda: not ends.is_running())
    with pytest.raises(e2b.TimeoutException):
        ends.commands.run("true")
    with pytest.raises(e2b.SandboxNotFoundException):
        ends.get_info()
    until(lambda: sleeps.get_info().state.value == "paused")
    sleeps.set_timeout(900)
    assert sleeps.commands.run("echo awake").stdout == "awake\n"


def test_a_paused_sandbox_goes_on_where_it_was(own: Callable[..., Sandbox], opts: Opts) -> None:
    sandbox = own()
    handle = sandbox.commands.run("n=0; while :; do echo $((n+=1)); sleep 0.1; done", background=True, timeout=0)
    next(iter(handle))
    handle.disconnect()
    assert sandbox.pause() is True
    assert sandbox.pause() is False
    assert not sandbox.is_running()
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("true")
    again = Sandbox.connect(sandbox.sandbox_id, **opts)
    out, _, _ = next(iter(again.commands.connect(handle.pid)))
    assert int((out or "").split()[0]) > 1


def test_a_sandbox_that_keeps_only_its_files_starts_anew(own: Callable[..., Sandbox], opts: Opts) -> None:
    sandbox = own()
    sandbox.files.write("/srv/kept", "1")
    for pause, connect in (({"mode": "filesystem"}, {}), ({}, {"on_resume": "reboot"})):
        handle = sandbox.commands.run("sleep 1000", background=True, timeout=0)
        assert sandbox.pause(**pause) is True
        again = Sandbox.connect(sandbox.sandbox_id, **connect, **opts)
        assert again.files.read("/srv/kept") == "1"
        assert again.commands.list() == []
        assert again.commands.kill(handle.pid) is False


def test_forks_carry_files_and_running_commands(daemon: TcpDaemon, own: Callable[..., Sandbox]) -> None:
    sandbox = own(metadata={"kind": "origin"})
    sandbox.files.write("/srv/state", "shared")
    handle = sandbox.commands.run("read line; echo forked $line", background=True, stdin=True, timeout=0)
    book = daemon.home / "server" / "attended.json"
    until(lambda: book.exists() and "echo forked" in book.read_text())  # younger programs are not remembered for forks
    forks = sandbox.fork(count=2)
    try:
        for number, fork in enumerate(forks):
            assert isinstance(fork, Sandbox)
            assert fork.files.read("/srv/state") == "shared"
            assert fork.get_info().metadata == {"kind": "origin"}
            connected = fork.commands.connect(handle.pid)
            connected.send_stdin(f"{number}\n")
            assert connected.wait().stdout == f"forked {number}\n"
    finally:
        for fork in forks:
            if isinstance(fork, Sandbox):
                fork.kill()
    handle.send_stdin("origin\n")
    assert handle.wait().stdout == "forked origin\n"


def test_snapshots_outlive_their_sandbox(own: Callable[..., Sandbox], opts: Opts) -> None:
    sandbox = own()
    sandbox.files.write("/srv/kept", "for later")
    taken = sandbox.create_snapshot()
    sandbox.files.write("/srv/kept", "for later")
    old = sandbox.create_snapshot(name="with-a-name")
    named = sandbox.create_snapshot(name="with-a-name")
    listed = [one.snapshot_id for one in sandbox.list_snapshots().next_items()]
    assert listed == [taken.snapshot_id, old.snapshot_id, named.snapshot_id]
    assert e2b.Template.exists("with-a-name", **opts)
    assert not e2b.Template.exists("no-such", **opts)
    sandbox.kill()
    for reference in (taken.snapshot_id, "with-a-name"):
        assert own(reference).files.read("/srv/kept") == "for later"
    assert Sandbox.delete_snapshot(taken.snapshot_id, **opts) is True
    assert Sandbox.delete_snapshot(taken.snapshot_id, **opts) is False
    with pytest.raises(e2b.SandboxException, match="not found"):
        own(taken.snapshot_id)
    for reference in ("with-a-name", old.snapshot_id):
        assert Sandbox.delete_snapshot(reference, **opts) is True


def test_what_is_not_served_says_so(sandbox: Sandbox, own: Callable[..., Sandbox], opts: Opts) -> None:
    with pytest.raises(e2b.SandboxException, match="'nowhere' not found"):
        own("nowhere")
    with pytest.raises(e2b.SandboxException, match=r"501.*network"):
        own(network={"deny_out": ["192.0.2.1"]})
    with pytest.raises(e2b.VolumeException, match="501"):
        e2b.Volume.list(**opts)


def test_the_async_sdk_works_too(sandbox: Sandbox, opts: Opts) -> None:
    async def talk() -> None:
        connected = await AsyncSandbox.connect(sandbox.sandbox_id, **opts)
        await connected.files.make_dir("/srv/async")
        seen: list[str] = []
        handle = await connected.files.watch_dir("/srv/async", on_event=lambda event: seen.append(event.name))
        await connected.files.write("/srv/async/new", "1")
        async with asyncio.timeout(30):
            while "new" not in seen:
                await asyncio.sleep(0.05)
        await handle.stop()
        fed = await connected.commands.run("cat", background=True, stdin=True)
        await fed.send_stdin("fed\n")
        await fed.close_stdin()
        assert (await fed.wait()).stdout == "fed\n"

    asyncio.run(talk())


# -- the guard --------------------------------------------------------------------------------------------------------


def test_keys_open_what_they_are_for(
    daemon: TcpDaemon, sandbox: Sandbox, own: Callable[..., Sandbox], opts: Opts
) -> None:
    with pytest.raises(e2b.AuthenticationException):
        Sandbox.create("small", **{**opts, "api_key": "e2b_wrong"})
    stranger = {**opts, "api_key": daemon.make_token("exec")}
    assert Sandbox.list(**stranger).next_items() == []
    with pytest.raises(e2b.SandboxNotFoundException):
        Sandbox.connect(sandbox.sandbox_id, **stranger)
    with pytest.raises(e2b.SandboxException, match="403"):
        Sandbox.create("base", **stranger)  # the host's own root is for admins
    theirs = Sandbox.create("small", timeout=600, **stranger)
    key = {"X-Access-Token": theirs._envd_access_token or ""}
    own_health = httpx.get(f"{daemon.url}/health", headers=key)
    others = httpx.get(f"{daemon.url}/health", headers={**key, "E2b-Sandbox-Id": sandbox.sandbox_id})
    api = httpx.get(f"{daemon.url}/v2/sandboxes", headers={"X-API-Key": key["X-Access-Token"]})
    forged = httpx.get(f"{daemon.url}/health", headers={"X-Access-Token": key["X-Access-Token"][:-1] + "x"})
    assert [one.status_code for one in (own_health, others, api, forged)] == [204, 401, 401, 401]
    assert others.json()["code"] == 401
    hosts = [f"49983-{one.sandbox_id}.example.org" for one in (theirs, sandbox)]  # as with $E2B_DOMAIN
    by_host = [httpx.get(f"{daemon.url}/health", headers={**key, "Host": host}).status_code for host in hosts]
    assert by_host == [204, 401]
    theirs.kill()


def test_the_audit_log_knows_what_was_done(daemon: TcpDaemon, sandbox: Sandbox) -> None:
    sandbox.commands.run("echo a-secret-word")
    lines = [json.loads(line) for line in (daemon.home / "server" / "audit.jsonl").read_text().splitlines()]
    ours = [line for line in lines if line.get("environment") == sandbox.sandbox_id]
    assert {"create", "run"} <= {line["action"] for line in ours}
    assert "a-secret-word" not in (daemon.home / "server" / "audit.jsonl").read_text()


def test_commands_are_found_again_after_the_daemons_death(daemon: TcpDaemon, own: Callable[..., Sandbox]) -> None:
    sandbox, book = own(), daemon.home / "server" / "attended.json"
    handle = sandbox.commands.run("read line; echo survived $line", background=True, stdin=True, timeout=0)
    until(lambda: book.exists() and "echo survived" in book.read_text())
    daemon.kill()
    daemon.start()
    again = sandbox.commands.connect(handle.pid)
    again.send_stdin("on\n")
    assert again.wait().stdout == "survived on\n"


def test_containers_are_sandboxes_too(docker_busybox: str, tmp_path: Path) -> None:
    """Another backend, and an image without bash."""
    template = tmp_path / "h" / "templates" / "box.json"
    template.parent.mkdir(parents=True)
    arguments = {"base_image": docker_busybox, "extra_args": ["--network", "none"]}
    template.write_text(json.dumps({"method": "docker_build", "arguments": arguments}))
    with running(tmp_path / "h", tcp=True) as daemon:
        opts: Opts = {"api_key": daemon.token, "api_url": daemon.url, "sandbox_url": daemon.url}
        sandbox = Sandbox.create("box", timeout=900, **opts)
        assert sandbox.commands.run("echo out; echo err >&2; pwd", cwd="/tmp").stdout == "out\n/tmp\n"
        fed = sandbox.commands.run("cat", background=True, stdin=True)
        fed.send_stdin("fed\n")
        fed.close_stdin()
        assert fed.wait().stdout == "fed\n"
        long = sandbox.commands.run("sleep 1000", background=True, timeout=0)
        assert long.kill() is True
        with pytest.raises(CommandExitException):
            long.wait()
        screen: list[bytes] = []
        terminal = sandbox.pty.create(PtySize(rows=29, cols=77), timeout=60)
        sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
        terminal.wait(on_pty=screen.append)
        assert b"29 77" in b"".join(screen)
        sandbox.files.write("/srv/kept", "1")
        assert [entry.name for entry in sandbox.files.list("/srv")] == ["kept"]
        taken = sandbox.create_snapshot()
        assert Sandbox.create(taken.snapshot_id, **opts).files.read("/srv/kept") == "1"


def test_nonsense_is_refused_in_their_own_words(daemon: TcpDaemon, sandbox: Sandbox) -> None:
    key = {
        "X-Access-Token": sandbox._envd_access_token or "",
        "Connect-Timeout-Ms": "\N{SUPERSCRIPT TWO}",
    }
    nonsense: list[Any] = [
        [],
        "x",
        {},
        {"process": "x"},
        {"process": {"cmd": 1}},
        {"process": {"cmd": "x", "args": {}}},
    ]
    nonsense += [{"process": {"pid": "x", "tag": []}}, {"path": 1}, {"path": "/a\0b"}, {"path": "/nope", "depth": -1}]
    nonsense += [
        {"process": {"pid": 1}, "input": {"stdin": "%"}},
        {"source": "/", "destination": []},
        {"watcherId": {}},
    ]
    calls = [
        "process.Process/List",
        "process.Process/SendInput",
        "process.Process/SendSignal",
        "process.Process/Update",
    ]
    calls += [
        "process.Process/CloseStdin",
        *(f"filesystem.Filesystem/{name}" for name in ("Stat", "ListDir", "Move", "MakeDir", "Remove")),
    ]
    calls += [f"filesystem.Filesystem/{name}" for name in ("CreateWatcher", "GetWatcherEvents", "RemoveWatcher")]
    streams = [
        "process.Process/Start",
        "process.Process/Connect",
        "process.Process/StreamInput",
        "filesystem.Filesystem/WatchDir",
    ]
    with httpx.Client(
        base_url=daemon.url, headers=[(name, value.encode("latin-1")) for name, value in key.items()]
    ) as client:
        for body in nonsense:
            for call in calls:
                found = client.post(f"/{call}", json=body)
                assert found.status_code < 500, (call, body, found.text)
                assert found.status_code == 200 or isinstance(found.json()["code"], str)
            data = json.dumps(body).encode()
            for call in streams:
                content = b"\0" + len(data).to_bytes(4, "big") + data
                found = client.post(f"/{call}", content=content, headers={"Content-Type": "application/connect+json"})
                assert found.status_code == 200
                assert b"internal" not in found.content, (call, body)
        assert (
            client.post(
                "/process.Process/List", content=b"\1", headers={"Content-Type": "application/proto"}
            ).status_code
            == 415
        )
        assert (
            client.post(
                "/filesystem.Filesystem/Stat", json={"path": "/"}, headers={"Authorization": "Basic %"}
            ).status_code
            == 400
        )
        assert client.post("/files?path=/srv/x", content=b"x", headers={"Content-Encoding": "gzip"}).status_code == 400
    admin = {"X-API-Key": daemon.token}
    for path in ("/sandboxes", f"/sandboxes/{sandbox.sandbox_id}/fork", f"/sandboxes/{sandbox.sandbox_id}/timeout"):
        found = httpx.post(f"{daemon.url}{path}", headers=admin, json={"templateID": [], "count": -1, "timeout": "x"})
        assert (found.status_code, found.json()["code"]) == (400, 400)
