"""The MCP server over stdio, with the SDK's own client, on real Waypoint sessions."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from mcp_sessions import PROGRAM, Place, Tools

pytestmark = pytest.mark.timeout(180)  # each starts several Pythons, and a busy machine takes seconds for one


@pytest.fixture(scope="module")
def place(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("mcp"), home)
    yield made

    async def clear(tools: Tools) -> None:
        for one in (await tools("list_environments"))["environments"]:
            await tools("destroy", environment=one["environment"])

    run(made, clear)


def run(place: Place, story: Callable[[Tools], Awaitable[None]], **more: object) -> None:
    async def whole() -> None:
        async with place.stdio(**more) as tools:
            await story(tools)

    asyncio.run(whole())


def test_tools_say_what_they_do_and_what_they_may_harm(place: Place) -> None:
    async def story(tools: Tools) -> None:
        assert "Snapshot often" in (tools.client.instructions or "")
        found = {tool.name: tool for tool in (await tools.client.list_tools()).tools}
        assert set(found) == {
            "create_environment", "list_environments", "exec", "run_in_background", "wait_for_text", "read_output", "read_file",
            "write_file", "list_files", "snapshot", "restore", "fork", "diff", "tree", "pause", "resume", "destroy",
        }  # fmt: skip
        for tool in found.values():
            assert tool.description and len(tool.description) > 60 and tool.output_schema and tool.annotations, (
                tool.name
            )
            for name, schema in tool.input_schema["properties"].items():
                assert schema.get("description"), f"{tool.name}.{name}"
        hints = {name: tool.annotations for name, tool in found.items()}
        reading = {name for name, hint in hints.items() if hint.read_only_hint}
        assert reading == {
            "list_environments",
            "wait_for_text",
            "read_output",
            "read_file",
            "list_files",
            "diff",
            "tree",
        }
        harming = {name for name, hint in hints.items() if hint.destructive_hint}
        assert harming == {"exec", "run_in_background", "write_file", "restore", "destroy"}
        assert hints["restore"].idempotent_hint and not hints["snapshot"].idempotent_hint
        assert hints["exec"].open_world_hint and not hints["restore"].open_world_hint
        read_by_a_model = [(tool.name, tool.description, tool.input_schema) for tool in found.values()]
        assert len(json.dumps(read_by_a_model)) < 20_000

    run(place, story)


def test_save_break_restore_fork_and_compare(place: Place) -> None:
    async def story(tools: Tools) -> None:
        made = await tools("create_environment", name="story")
        first = made["environment"]
        assert {"files", "processes", "memory", "shell"} <= set(made["restores"])
        await tools(
            "exec", environment=first, command="mkdir /srv/app && cd /srv/app && export STAGE=one && echo 1 > value"
        )
        job = await tools(
            "run_in_background", environment=first, job="clock", command="while echo now $STAGE; do sleep 0.2; done"
        )
        up = await tools("wait_for_text", environment=first, job="clock", text="now one")
        assert up["found"] and up["state"] == "running" and job["pid"] > 1
        good = await tools("snapshot", environment=first, name="good")
        assert "memory" in good["captured"]

        await tools(
            "exec",
            environment=first,
            command=f"kill -- -{job['pid']} || kill {job['pid']}; rm -rf /srv/app; cd /; unset STAGE",
        )
        gone = await tools("wait_for_text", environment=first, job="clock", timeout=20)
        assert gone["state"] in ("exited", "lost")
        changes = await tools("diff", environment=first, a="good")
        assert "- /srv/app/value" in changes["changes"] and changes["removed"] >= 1

        back = await tools("restore", environment=first, snapshot="good")
        assert back["snapshot"] == good["snapshot"] and not back["shell_restarted"]
        seen = await tools("exec", environment=first, command="cat value; echo $STAGE; pwd")
        assert seen["output"].split() == ["1", "one", "/srv/app"] and seen["cwd"] == "/srv/app"
        alive = await tools("wait_for_text", environment=first, job="clock", text="now one")
        assert alive["state"] == "running", "the background job of the snapshot is running again"

        forks = await tools("fork", environment=first, n=2)
        left, right = forks["environments"]
        for name, value in ((left, "left"), (right, "right")):
            await tools("write_file", environment=name, path="/srv/app/value", content=value)
            assert (await tools("wait_for_text", environment=name, job="clock", text="now one"))["state"] == "running"
        contents = [
            (await tools("read_file", environment=one, path="/srv/app/value"))["text"] for one in (first, left, right)
        ]
        assert contents == ["1\n", "left", "right"]
        a, b = [(await tools("snapshot", environment=one))["snapshot"] for one in (left, right)]
        both = await tools("diff", environment=left, a=a, b=b)
        assert "~ /srv/app/value" in both["changes"] and both["changed"] >= 1
        drawn = (await tools("tree", environment=first))["tree"]
        assert all(name in drawn for name in ("good", first, left, right, a, b))

        assert (await tools("pause", environment=right))["state"] == "paused"
        assert (await tools("pause", environment=right))["state"] == "paused"
        assert "wrong_state" in await tools.error("exec", environment=right, command="true")
        assert (await tools("resume", environment=right))["state"] == "live"
        assert (await tools("exec", environment=right, command="cat value"))["output"] == "right"
        for one in (left, right, first):
            assert (await tools("destroy", environment=one))["state"] == "destroyed"
        assert (await tools("list_environments"))["environments"] == []

    run(place, story)


def test_long_answers_come_in_pages_and_nothing_is_lost(place: Place) -> None:
    async def story(tools: Tools) -> None:
        made = (await tools("create_environment"))["environment"]
        long = await tools(
            "exec", environment=made, command="for i in {1..20000}; do echo line $i; done", max_characters=4000
        )
        whole = "".join(f"line {number}\n" for number in range(1, 20001))
        head, _, rest = long["output"].partition("\n[… ")
        tail = rest.partition(" …]\n")[2]
        assert (
            len(long["output"]) < 4200 and whole.startswith(head) and whole.endswith(tail) and len(tail) > 2 * len(head)
        )
        middle, cursor, pages = "", long["cursor"], 0
        while cursor:
            page = await tools("read_output", cursor=cursor, max_characters=40_000)
            middle, cursor, pages = middle + page["text"], page["cursor"], pages + 1
        assert head + middle + tail == whole and pages > 3

        text = "zeile äöü\n" * 3000
        await tools("write_file", environment=made, path="/srv/deep/down/text", content=text)
        read, cursor = "", ""
        while True:
            page = await tools(
                "read_file", environment=made, path="/srv/deep/down/text", cursor=cursor, max_characters=10_000
            )
            read, cursor = read + page["text"], page["cursor"]
            if not cursor:
                break
        assert read == text and page["size_bytes"] == len(text.encode())
        await tools("write_file", environment=made, path="/srv/bytes", content="AAEC/w==", encoding="base64")
        binary = await tools("read_file", environment=made, path="/srv/bytes")
        assert (binary["encoding"], binary["text"]) == ("base64", "AAEC/w==")

        await tools(
            "exec", environment=made, command="mkdir /srv/many; cd /srv/many; for i in {1..450}; do : > $i; done"
        )
        names, cursor = [], ""
        while True:
            page = await tools("list_files", environment=made, path="/srv/many", cursor=cursor)
            names += [entry["name"] for entry in page["entries"]]
            cursor = page["cursor"]
            if not cursor:
                break
        assert sorted(names, key=int) == [str(number) for number in range(1, 451)] and page["total"] == 450

        await tools(
            "run_in_background", environment=made, job="noisy", command="for i in {1..5000}; do echo noise $i; done"
        )
        done = await tools("wait_for_text", environment=made, job="noisy", max_characters=500)
        assert done["state"] == "exited" and done["exit_code"] == 0 and len(done["output"]) <= 500
        read, cursor = "", done["cursor"]
        while cursor:
            page = await tools("read_output", cursor=cursor, max_characters=20_000)
            read, cursor = read + page["text"], page["cursor"]
        assert read == "".join(f"noise {number}\n" for number in range(1, 5001))
        await tools("destroy", environment=made)

    run(place, story)


def test_what_goes_wrong_is_told_so_that_a_model_can_go_on(place: Place) -> None:
    async def story(tools: Tools) -> None:
        made = (await tools("create_environment"))["environment"]
        slow = await tools("exec", environment=made, command="echo began; sleep 60", timeout=0.5)
        assert slow["timed_out"] and "began" in slow["output"] and "run_in_background" in slow["advice"]
        failed = await tools("exec", environment=made, command="cat; echo oops >&2; exit 7", stdin="read this")
        assert failed["exit_code"] == 7 and "read this" in failed["output"] and "oops" in failed["output"]
        assert "not_found" in await tools.error("exec", environment="e-nobody", command="true")
        assert "not_found" in await tools.error("restore", environment=made, snapshot="never-taken")
        assert "not_found" in await tools.error("read_file", environment=made, path="/no/such/file")
        assert "not_found" in await tools.error("read_output", cursor="abc.1")
        assert "not_found" in await tools.error("wait_for_text", environment=made, job="nobody", text="x")
        assert "usage" in await tools.error("wait_for_text", environment=made, job="nobody", text="(", regex=True)
        assert "usage" in await tools.error("run_in_background", environment=made, job="../../etc", command="true")
        assert "usage" in await tools.error("create_environment", dockerfile="FROM x", rootfs="/")
        await tools.error("read_file", environment=made, path="relative")
        await tools("run_in_background", environment=made, job="once", command="sleep 30")
        assert "running already" in await tools.error("run_in_background", environment=made, job="once", command="true")
        early = await tools("wait_for_text", environment=made, job="once", text="never", timeout=0.5)
        assert not early["found"] and early["state"] == "running"
        await tools("destroy", environment=made)

    run(place, story)


def test_environments_are_there_again_when_the_host_starts_the_server_anew(place: Place) -> None:
    async def first(tools: Tools) -> None:
        made = (await tools("create_environment", name="kept"))["environment"]
        await tools("exec", environment=made, command="export KEPT=yes; cd /srv")
        await tools("run_in_background", environment=made, job="beat", command="while echo beat; do sleep 0.2; done")
        await tools("snapshot", environment=made, name="before-restart")

    async def second(tools: Tools) -> None:
        (one,) = [one for one in (await tools("list_environments"))["environments"] if one["name"] == "kept"]
        assert one["state"] == "live"
        seen = await tools("exec", environment=one["environment"], command="echo $KEPT; pwd")
        assert seen["output"].split() == ["yes", "/srv"] and not seen["shell_restarted"]
        assert (await tools("wait_for_text", environment=one["environment"], job="beat", text="beat"))[
            "state"
        ] == "running"
        await tools("restore", environment=one["environment"], snapshot="before-restart")
        await tools("destroy", environment=one["environment"])

    run(place, first)
    run(place, second, mode="legacy")  # as hosts that speak the older protocol do


def test_two_hosts_share_one_directory_and_one_takes_over_from_the_other(place: Place) -> None:
    async def story() -> None:
        async with place.stdio() as second:
            async with place.stdio() as first:
                made = (await first("create_environment", name="shared"))["environment"]
                await first("exec", environment=made, command="cd /srv; X=7")
                assert (await second("exec", environment=made, command="echo $X"))["output"] == "7\n"
            # The first was the daemon and is gone.
            assert (await second("exec", environment=made, command="echo $X; pwd"))["output"].split() == ["7", "/srv"]
            await second("destroy", environment=made)

    asyncio.run(story())


def test_a_server_that_is_killed_loses_nothing(place: Place) -> None:
    def ask(server: subprocess.Popen[bytes], number: int, method: str, **params: object) -> dict[str, object]:
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(message).encode() + b"\n")
        server.stdin.flush()
        answer: dict[str, object] = json.loads(server.stdout.readline())  # nothing but the protocol is on stdout
        assert answer["id"] == number and "result" in answer, answer
        return answer["result"]  # type: ignore[return-value]

    server = subprocess.Popen(
        [sys.executable, *PROGRAM, "mcp"],
        env={**os.environ, **place.variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        ask(server, 1, "initialize", **hello)
        assert server.stdin is not None
        server.stdin.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
        made = ask(server, 2, "tools/call", name="create_environment", arguments={"name": "survivor"})
        environment = made["structuredContent"]["environment"]  # type: ignore[index]
        ask(server, 3, "tools/call", name="exec", arguments={"environment": environment, "command": "Y=8"})
        os.killpg(server.pid, signal.SIGKILL)
    finally:
        server.kill()
        server.wait(30)
        for pipe in (server.stdin, server.stdout):
            assert pipe is not None
            pipe.close()

    async def after(tools: Tools) -> None:
        assert (await tools("exec", environment=environment, command="echo $Y"))["output"] == "8\n"
        await tools("destroy", environment=environment)

    run(place, after)
    assert '"ok": true' in place.statefork("audit", "verify", "--json")
