"""Who gets in, and what they see."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from guarded import Served, served
from statefork.errors import UsageError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("guard") / "server") as running:
        yield running


def statefork(home: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", "from statefork.cli.main import main; main()", *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "STATEFORK_HOME": str(home)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Basic cm9vdDpyb290",
        "Bearer nonsense",
        "Bearer sft_000000000000_" + "A" * 43,
        "Bearer sft_000000000000_" + "A" * 4300,
        "Bearer ' OR 1=1 --",
    ],
)
def test_without_a_good_token_nothing_is_served(server: Served, header: str | None) -> None:
    answer = server.get("/v1/environments/e-foreign", None if header is None else {"Authorization": header})
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["code"] == "unauthenticated"


def test_a_token_with_one_character_changed_is_refused(server: Served) -> None:
    good = server.token("read")["Authorization"]
    assert server.get("/v1/environments/none", {"Authorization": good}).status_code == 404
    for position in (len("Bearer sft_"), -1, -20):  # in the id, in the secret
        letters = list(good)
        letters[position] = "0" if letters[position] != "0" else "1"
        assert server.get("/v1/environments/none", {"Authorization": "".join(letters)}).status_code == 401


def test_an_expired_token_is_refused(server: Served) -> None:
    token, secret = server.guard.tokens.create(["read"], expires_in=3600)
    header = {"Authorization": f"Bearer {secret}"}
    assert server.get("/v1/environments/none", header).status_code == 404
    with server.guard.tokens._using() as db:
        db.execute("UPDATE tokens SET expires_at = created_at WHERE id = ?", (token.id,))
    answer = server.get("/v1/environments/none", header)
    assert answer.status_code == 401 and "expired" in answer.json()["detail"]


def test_a_token_that_another_process_makes_and_revokes_counts_at_once(server: Served) -> None:
    home = server.directory.parent
    secret = statefork(home, "token", "create", "--scope", "read", "--name", "visitor").strip()
    assert len(secret.splitlines()) == 1
    header = {"Authorization": f"Bearer {secret}"}
    assert server.get("/v1/environments/none", header).status_code == 404
    statefork(home, "token", "revoke", "visitor")
    answer = server.get("/v1/environments/none", header)
    assert answer.status_code == 401 and "revoked" in answer.json()["detail"]
    listed = statefork(home, "token", "list", "--json")
    assert secret.split("_", 2)[2] not in listed and '"state": "revoked"' in listed


def test_the_database_holds_no_secret(server: Served) -> None:
    secret = server.token("admin")["Authorization"].split("_", 2)[2].encode()
    for file in server.directory.iterdir():
        assert secret not in file.read_bytes(), file
        assert file.stat().st_mode & 0o077 == 0, f"{file} can be read by others"


def test_scopes_imply_the_lesser_ones_and_no_more(server: Served) -> None:
    reader, runner, scraper = server.token("read"), server.token("exec"), server.token("metrics")
    command = {"command": "true"}
    assert server.post("/v1/exec", reader, json=command).status_code == 403
    assert server.post("/v1/exec", runner, json=command).status_code == 200
    assert server.get("/v1/environments/none", runner).status_code == 404
    assert server.get("/metrics", runner).status_code == 403
    assert server.get("/metrics", scraper).status_code == 200
    assert server.get("/v1/environments/none", scraper).status_code == 403
    assert server.get("/metrics", server.token("admin")).status_code == 200
    problem = server.post("/v1/exec", reader, json=command).json()
    assert problem["code"] == "forbidden" and problem["scope"] == "exec"


def test_an_environment_of_another_looks_like_none(server: Served) -> None:
    stranger = server.token("exec", environments=["e-listed"])
    foreign, none = (server.get(f"/v1/environments/{name}", stranger) for name in ("e-foreign", "e-absent"))
    assert foreign.status_code == none.status_code == 404
    hidden = {"detail", "request_id"}
    assert {k: v for k, v in foreign.json().items() if k not in hidden} == {
        k: v for k, v in none.json().items() if k not in hidden
    }
    assert foreign.json()["detail"].replace("e-foreign", "") == none.json()["detail"].replace("e-absent", "")
    assert server.get("/v1/environments/e-listed", stranger).status_code == 200
    assert server.get("/v1/environments/e-foreign", server.token("admin")).status_code == 200


def test_a_token_owns_as_many_environments_as_it_may(server: Served) -> None:
    two = server.token("exec", max_environments=2)
    assert server.post("/v1/environments?count=1", two).status_code == 200
    answer = server.post("/v1/environments?count=2", two)
    assert answer.status_code == 429 and answer.json()["code"] == "too_many_environments"
    assert server.post("/v1/environments?count=2", server.token("exec")).status_code == 200


def test_a_websocket_needs_a_token_and_its_scope_too(server: Served) -> None:
    address = f"ws://127.0.0.1:{server.port}/v1/talk"
    for header, status in ((None, 401), (server.token("read"), 403)):
        with pytest.raises(InvalidStatus) as refused:
            connect(address, additional_headers=header)
        assert refused.value.response.status_code == status
        assert b'"code"' in refused.value.response.body
    with connect(address, additional_headers=server.token("exec", name="ann")) as socket:
        socket.send("you")
        assert socket.recv(timeout=30) == "hello ann: you"


def test_who_may_open_the_unix_socket_needs_no_token_but_a_wrong_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with served(tmp_path / "server", socket=path) as running:
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://local", timeout=30) as client:
            assert client.get("/v1/environments/e-foreign").status_code == 200  # admin: sees all
            assert client.get("/metrics").status_code == 200
            assert client.get("/v1/environments/e-foreign", headers=running.token("read")).status_code == 404
            assert client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_what_makes_no_sense_is_not_made_a_token(server: Served) -> None:
    for scopes, more in (
        (["root"], {}),
        ([], {}),
        (["read"], {"expires_in": -1}),
        (["read"], {"max_environments": -1}),
    ):
        with pytest.raises(UsageError):
            server.guard.tokens.create(scopes, **more)  # type: ignore[arg-type]
