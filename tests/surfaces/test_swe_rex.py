"""SWE-ReX's `RemoteRuntime`, unmodified, with an environment of the daemon as its host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pexpect
import pytest
from swerex.deployment.config import RemoteDeploymentConfig
from swerex.deployment.remote import RemoteDeployment
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    NoExitCodeError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SwerexException,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

from daemon import TcpDaemon, running
from rootfs import python_rootfs

pytestmark = pytest.mark.timeout(180)

T = TypeVar("T")


def wait(doing: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(doing)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TcpDaemon]:
    with running(tmp_path_factory.mktemp("rex") / "home", tcp=True) as started:
        yield started


@pytest.fixture(scope="module")
def environment(daemon: TcpDaemon, tmp_path_factory: pytest.TempPathFactory) -> str:
    rootfs = python_rootfs(tmp_path_factory.mktemp("rootfs") / "root")
    return daemon.create(method="waypoint_build", arguments={"rootfs": str(rootfs)})


def client(daemon: TcpDaemon, environment: str, token: str | None = None) -> RemoteRuntime:
    return RemoteRuntime(host=f"{daemon.url}/swerex/{environment}", port=None, auth_token=token or daemon.token)


@pytest.fixture(scope="module")
def runtime(daemon: TcpDaemon, environment: str) -> RemoteRuntime:
    made = client(daemon, environment)
    wait(made.create_session(CreateBashSessionRequest()))
    return made


class Session:
    """One session, in fewer words."""

    def __init__(self, runtime: RemoteRuntime, name: str) -> None:
        self.runtime, self.name = runtime, name

    def __call__(self, command: str, **more: Any) -> Any:
        action = BashAction(command=command, session=self.name, **{"timeout": 30, **more})
        return wait(self.runtime.run_in_session(action))

    def interrupt(self, **more: Any) -> Any:
        action = BashInterruptAction(session=self.name, **{"timeout": 2, **more})
        return wait(self.runtime.run_in_session(action))


@pytest.fixture
def session(runtime: RemoteRuntime) -> Iterator[Session]:
    made = Session(runtime, f"s-{uuid.uuid4()}")
    wait(runtime.create_session(CreateBashSessionRequest(session=made.name)))
    yield made
    with contextlib.suppress(SessionDoesNotExistError):  # the test ended it
        wait(runtime.close_session(CloseBashSessionRequest(session=made.name)))


def test_a_session_keeps_its_state(session: Session) -> None:
    assert session("echo 'hello world'").output == "hello world\n"
    session('cd /tmp; export WORD=kept; shout() { echo "$1!"; }')
    done = session("pwd; shout $WORD")
    assert (done.output, done.exit_code, done.expect_string) == ("/tmp\nkept!\n", 0, "SHELLPS1PREFIX")


def test_exit_codes_are_checked_as_asked(session: Session) -> None:
    assert session("(exit 7)", check="silent").exit_code == 7
    assert session("(exit 7)", check="ignore").exit_code is None
    with pytest.raises(NonZeroExitCodeError, match=r"no good: .*exit code 7.*\n.*words"):
        session("echo words; (exit 7)", error_msg="no good")
    with pytest.raises(NoExitCodeError):
        session("echo before; sleep 20", expect=["before"])
    session.interrupt()


def test_any_text_is_one_command(session: Session) -> None:
    assert session("echo a\necho b\ncat <<'EOF'\n$x \"'`\nEOF\n").output == "a\nb\n$x \"'`\n"
    assert session("").output == ""
    assert session("# only a remark\n\n").output == ""
    assert session(f"echo {'x' * 30000} | wc -c").output == "30001\n"
    assert session("echo häß\N{SNOWMAN}").output == "häß\N{SNOWMAN}\n"
    assert len(session("seq 1 200000").output) == 1_288_895
    with pytest.raises(BashIncorrectSyntaxError) as wrong:
        session("echo 'open")
    assert "unexpected EOF" in wrong.value.extra_info["bash_stderr"]
    session("PS1='own> '; PS2=; set +o history")
    assert session("echo still").output == "still\n"


def test_a_command_out_of_time_is_interrupted(session: Session) -> None:
    with pytest.raises(CommandTimeoutError, match=r"0\.5 seconds"):
        session("echo begun; sleep 60", timeout=0.5)
    assert "begun" in session.interrupt().output
    assert session("echo usable").output == "usable\n"
    with pytest.raises(CommandTimeoutError):
        session("(trap '' INT; sleep 60; sleep 60)", timeout=0.5)
    session.interrupt(timeout=0.3)
    assert session("echo usable").output == "usable\n"


def test_a_command_is_interrupted_while_its_caller_waits(session: Session) -> None:
    async def both() -> tuple[Any, Any]:
        command = BashAction(command="sleep 600", session=session.name, check="silent")
        waiting = asyncio.ensure_future(session.runtime.run_in_session(command))
        while not waiting.done():
            with contextlib.suppress(pexpect.TIMEOUT):  # it has not begun yet
                await session.runtime.run_in_session(BashInterruptAction(session=session.name, timeout=1))
        return await waiting, None

    assert wait(both())[0].exit_code == 130


def test_what_jobs_print_between_commands_holds_nothing_up(session: Session) -> None:
    session("(for n in $(seq 300); do echo $n; sleep 0.005; done; touch /tmp/jobs-done) &")
    for _ in range(600):
        if session("test -e /tmp/jobs-done", check="silent").exit_code == 0:
            break
    assert session("cd /tmp; echo free").output.endswith("free\n")


def test_interactive_programs_are_talked_to(session: Session) -> None:
    begun = session("python3 -q", is_interactive_command=True, expect=[">>> "])
    assert begun.expect_string == ">>> "
    assert session("print(6 * 7)", is_interactive_command=True, expect=[">>> "]).output == "42"
    assert session("1/0", is_interactive_command=True, expect=[r"Error: .*\n"]).expect_string == r"Error: .*\n"
    session("quit()", is_interactive_quit=True)
    assert session("echo back").output == "back\n"
    with pytest.raises(ValueError, match="too complicated"):
        session("true", expect=["(a+)+$"])


def test_sessions_are_apart_and_have_ends(runtime: RemoteRuntime, session: Session) -> None:
    wait(runtime.write_file(WriteFileRequest(path="/etc/rex.sh", content="PS1=mine; SOURCED=yes; echo loaded")))
    with pytest.raises(SessionExistsError):
        wait(runtime.create_session(CreateBashSessionRequest(session=session.name)))
    other = Session(runtime, "other")
    made = wait(runtime.create_session(CreateBashSessionRequest(session="other", startup_source=["/etc/rex.sh"])))
    assert made.output == "loaded\n"
    session("cd /tmp")
    assert other("pwd; echo $SOURCED").output == "/root\nyes\n"
    with pytest.raises(pexpect.EOF):
        other("exit")
    with pytest.raises(SessionDoesNotExistError):
        other("echo")


def test_programs_run_beside_the_sessions(runtime: RemoteRuntime) -> None:
    def run(command: str | list[str], **more: Any) -> Any:
        return wait(runtime.execute(Command(command=command, **more)))

    done = run(["sh", "-c", 'echo "$0"; echo bad >&2; exit 3', "a b"])
    assert (done.stdout, done.stderr, done.exit_code) == ("a b\n", "bad\n", 3)
    done = run("echo $ONLY; pwd; echo ${HOME-none}", shell=True, env={"ONLY": "this"}, cwd="/tmp")
    assert done.stdout == "this\n/tmp\nnone\n"
    assert run("echo a; echo b >&2", shell=True, merge_output_streams=True).stdout == "a\nb\n"
    with pytest.raises(NonZeroExitCodeError, match="sorry"):
        run("false", shell=True, check=True, error_msg="sorry")
    with pytest.raises(CommandTimeoutError):
        run(["sleep", "60"], timeout=0.3)
    with pytest.raises(FileNotFoundError):
        run(["no-such-program"])


def test_files_go_in_and_out(runtime: RemoteRuntime, tmp_path: Path) -> None:
    wait(runtime.write_file(WriteFileRequest(path="/srv/new/f.txt", content="häß\n")))
    assert wait(runtime.read_file(ReadFileRequest(path="/srv/new/f.txt"))).content == "häß\n"
    lossy = wait(runtime.read_file(ReadFileRequest(path="/srv/new/f.txt", encoding="ascii", errors="ignore")))
    assert lossy.content == "h\n"
    with pytest.raises(FileNotFoundError):
        wait(runtime.read_file(ReadFileRequest(path="/srv/nope")))
    with pytest.raises(ValueError, match="ascii"):
        wait(runtime.read_file(ReadFileRequest(path="/srv/new/f.txt", encoding="ascii")))
    (tmp_path / "tree" / "below").mkdir(parents=True)
    (tmp_path / "tree" / "below" / "one").write_text("1")
    (tmp_path / "tree" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "tree" / "run.sh").chmod(0o755)
    wait(runtime.upload(UploadRequest(source_path=str(tmp_path / "tree"), target_path="/srv/tree")))
    wait(runtime.upload(UploadRequest(source_path=str(tmp_path / "tree/below/one"), target_path="/srv/single/two")))
    done = wait(
        runtime.execute(Command(command="/srv/tree/run.sh; cat /srv/tree/below/one /srv/single/two", shell=True))
    )
    assert done.stdout == "ran\n11"


def test_forks_and_restores_bring_sessions_along(daemon: TcpDaemon, environment: str, session: Session) -> None:
    session("cd /tmp; STATE=before; told() { echo $STATE in $PWD; }")
    snapshot = daemon.snapshot(environment)
    forked = daemon.call("POST", f"/v1/environments/{environment}/fork", 201, json={"n": 1})["environments"][0]["id"]
    session("STATE=after; cd /")
    assert Session(client(daemon, forked), session.name)("told").output == "before in /tmp\n"
    assert session("told").output == "after in /\n"
    daemon.call("POST", f"/v1/environments/{environment}/restore", json={"snapshot": snapshot})
    assert session("told").output == "before in /tmp\n"
    daemon.delete(forked)


def test_a_deployment_is_started_and_stopped(daemon: TcpDaemon, environment: str) -> None:
    async def use() -> None:
        config = RemoteDeploymentConfig(host=f"{daemon.url}/swerex/{environment}", port=None, auth_token=daemon.token)
        deployment = RemoteDeployment.from_config(config)
        await deployment.start()
        assert await deployment.is_alive()
        await deployment.runtime.create_session(CreateBashSessionRequest(session="deployed"))
        await deployment.stop()
        with pytest.raises(SessionDoesNotExistError):
            await client(daemon, environment).close_session(CloseBashSessionRequest(session="deployed"))

    wait(use())
    assert daemon.state(environment) == "live"


def test_strangers_are_refused(daemon: TcpDaemon, environment: str) -> None:
    refused = client(daemon, environment, "wrong")
    assert "401" in wait(refused.is_alive()).message
    stranger = client(daemon, environment, daemon.make_token("exec"))
    alive = wait(stranger.is_alive())
    assert not alive.is_alive
    assert "no environment" in alive.message
    with pytest.raises(SwerexException, match="no environment"):
        wait(stranger.execute(Command(command=["true"])))


def test_a_repeated_request_is_done_once(daemon: TcpDaemon, environment: str) -> None:
    url, headers = (
        f"{daemon.url}/swerex/{environment}/execute",
        {"X-API-Key": daemon.token, "X-Request-ID": uuid.uuid4().hex},
    )
    body = {"command": "echo x >> /srv/count; wc -l < /srv/count", "shell": True}
    first, second = (httpx.post(url, headers=headers, json=body, timeout=30) for _ in range(2))
    assert first.json() == second.json()
    assert first.json()["stdout"] == "1\n"
    lines = [json.loads(line) for line in (daemon.home / "server" / "audit.jsonl").read_text().splitlines()]
    assert any(line["action"] == "run" and line["environment"] == environment for line in lines)
