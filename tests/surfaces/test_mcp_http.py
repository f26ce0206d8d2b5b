"""The MCP server over streamable HTTP: the same tools, for bearers of a token and nobody else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from mcp import Client, StdioServerParameters

from daemon import until
from mcp_sessions import PROGRAM, Place, Tools, over_http

LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}

pytestmark = pytest.mark.timeout(180)  # each starts several Pythons, and a busy machine takes seconds for one


@pytest.fixture(scope="module")
def place(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("mcp-http"), home)


@pytest.fixture(scope="module")
def admin(place: Place) -> str:
    return place.statefork("token", "create", "--scope", "admin", "--name", "admin")


@pytest.fixture(scope="module")
def url(place: Place, admin: str) -> Iterator[str]:
    with place.http() as address:
        yield address

        async def clear() -> None:
            async with over_http(address, admin) as tools:
                for one in (await tools("list_environments"))["environments"]:
                    await tools("destroy", environment=one["environment"])

        asyncio.run(clear())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_same_story_over_http(url: str, admin: str, mode: str) -> None:
    async def story() -> None:
        async with over_http(url, admin, mode=mode) as tools:
            assert len((await tools.client.list_tools()).tools) == 17
            made = (await tools("create_environment", name=mode))["environment"]
            await tools("exec", environment=made, command="cd /srv; V=1")
            await tools("snapshot", environment=made, name="one")
            await tools("exec", environment=made, command="V=2; touch mark")
            await tools("restore", environment=made, snapshot="one")
            assert (await tools("exec", environment=made, command="echo $V; ls mark; pwd"))["output"].split()[0] == "1"
            (fork,) = (await tools("fork", environment=made))["environments"]
            assert (await tools("exec", environment=fork, command="echo $V"))["output"] == "1\n"
            for one in (fork, made):
                await tools("destroy", environment=one)

    asyncio.run(story())


def test_calls_of_one_client_go_on_side_by_side(url: str, admin: str) -> None:
    async def story() -> None:
        async with over_http(url, admin) as tools:
            made = (await tools("create_environment"))["environment"]
            forks = (await tools("fork", environment=made, n=3))["environments"]
            outputs = await asyncio.gather(*(tools("exec", environment=one, command=f"echo {one}") for one in forks))
            assert [one["output"].strip() for one in outputs] == forks
            for one in (*forks, made):
                await tools("destroy", environment=one)

    asyncio.run(story())


def post(url: str, **headers: str) -> httpx.Response:
    return httpx.post(url, json=LIST, headers={**HEADERS, **headers}, timeout=30, trust_env=False)


def test_without_a_token_nothing_is_told(url: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = post(url, **headers)
        assert answer.status_code == 401 and answer.json()["code"] == "unauthenticated"


def test_a_name_that_is_not_ours_is_not_answered(url: str, admin: str) -> None:
    """DNS rebinding: the page is the attacker's, the address is ours, and Host and Origin still name the attacker."""
    bearer = {"authorization": f"Bearer {admin}"}
    assert post(url, **bearer, host="evil.example").status_code == 421
    assert post(url, **bearer, origin="http://evil.example").status_code == 403
    port = url.split(":")[2].split("/")[0]
    assert post(url, **bearer, origin=f"http://localhost:{port}", host=f"localhost:{port}").status_code not in (
        401,
        403,
        421,
    )


def test_a_large_body_is_refused(url: str, admin: str) -> None:
    content = json.dumps({**LIST, "params": {"x": "y" * (17 << 20)}}).encode()
    answer = httpx.post(
        url, content=content, headers={**HEADERS, "authorization": f"Bearer {admin}"}, timeout=30, trust_env=False
    )
    assert answer.status_code == 413


def test_tokens_see_their_own_and_may_what_their_scope_says(place: Place, url: str, admin: str) -> None:
    ann = place.statefork("token", "create", "--scope", "admin", "--name", "ann")
    bob = place.statefork("token", "create", "--scope", "exec", "--name", "bob")
    reader = place.statefork("token", "create", "--scope", "read", "--name", "reader")

    async def story() -> None:
        async with over_http(url, ann) as hers, over_http(url, bob) as his, over_http(url, reader) as looking:
            made = (await hers("create_environment", name="hers"))["environment"]
            long = await hers("exec", environment=made, command="for i in {1..5000}; do echo secret $i; done")
            assert (await his("list_environments"))["environments"] == []
            assert "not_found" in await his.error("exec", environment=made, command="true")
            assert "not_found" in await his.error("read_output", cursor=long["cursor"])
            assert (await hers("read_output", cursor=long["cursor"]))["text"].startswith("secret")
            assert "forbidden" in await looking.error("create_environment")
            assert "forbidden" in await his.error("create_environment", rootfs="/")
            assert "host's own root" in await his.error("create_environment")
            async with over_http(url, admin) as all_seeing:
                assert [one["name"] for one in (await all_seeing("list_environments"))["environments"]] == ["hers"]
            await hers("destroy", environment=made)
            place.statefork("token", "revoke", "bob")

    asyncio.run(story())
    assert post(url, authorization=f"Bearer {bob}").status_code == 401
    log = (place.home / "server" / "audit.jsonl").read_text()
    assert "secret" not in log and ann.split("_", 2)[2] not in log
    assert '"name":"ann","action":"create"' in log and '"action":"token.revoke"' in log
    assert '"ok": true' in place.statefork("audit", "verify", "--json")


def test_a_stdio_server_may_use_a_daemon_elsewhere(place: Place, admin: str, tmp_path: Path) -> None:
    """`--url`, with a token: nothing is started or written on this side."""
    log = tmp_path / "log"
    command = [sys.executable, *PROGRAM, "serve", "--host", "127.0.0.1", "--port", "0"]
    far = Place(tmp_path / "far", place.store)
    token = far.statefork("token", "create", "--scope", "admin")
    with log.open("wb") as sink:
        server = subprocess.Popen(command, env={**os.environ, **far.variables}, stderr=sink)
    try:
        address = until(lambda: re.search(r"ready on (http://\S+)", log.read_text()), 60, "the daemon's readiness")[1]

        async def story(bearer: str) -> None:
            variables = {"STATEFORK_HOME": str(tmp_path / "near"), "STATEFORK_TOKEN": bearer}
            parameters = StdioServerParameters(
                command=sys.executable, args=[*PROGRAM, "mcp", "--url", address], env=variables
            )
            async with Client(parameters) as client:
                tools = Tools(client)
                if bearer != token:
                    assert "unauthenticated" in await tools.error("list_environments")
                    return
                made = (await tools("create_environment", name="far"))["environment"]
                assert (await tools("exec", environment=made, command="echo far"))["output"] == "far\n"
                await tools("destroy", environment=made)

        asyncio.run(story(token))
        asyncio.run(story(admin))  # of another daemon
        assert not (tmp_path / "near").exists()
    finally:
        server.terminate()
        assert server.wait(60) == 0
