"""The guard around the real daemon: what tokens see on every path, what is written down, how it comes up."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from certificates import make_certificate
from collector import collecting
from daemon import Daemon, running, until

PROGRAM = [sys.executable, "-c", "from statefork.cli.main import main; main()"]

pytestmark = pytest.mark.timeout(180)  # each starts several Pythons, and a busy machine takes seconds for one


def statefork(home: Path, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "STATEFORK_HOME": str(home)},
        check=False,
    )
    assert done.returncode == expect, f"{arguments}: {done.returncode} {done.stdout} {done.stderr}"
    return done


def token(home: Path, *options: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {statefork(home, 'token', 'create', *options).stdout.strip()}"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("g"), "--set", "open_host_root=1") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def owner(daemon: Daemon) -> dict[str, str]:
    return token(daemon.home, "--scope", "exec", "--name", "owner")


@pytest.fixture(scope="module")
def owned(daemon: Daemon, owner: dict[str, str]) -> tuple[str, str]:
    """An environment of `owner`, and a snapshot of it."""
    made: str = daemon.call("POST", "/v1/environments", 201, json={}, headers=owner)["id"]
    taken: str = daemon.call("POST", f"/v1/environments/{made}/snapshots", 201, json={}, headers=owner)["id"]
    return made, taken


def sample(schema: dict[str, Any], whole: dict[str, Any]) -> Any:
    """The least that fits a schema of the OpenAPI document."""
    if "$ref" in schema:
        return sample(whole["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], whole)
    for member in ("anyOf", "oneOf", "allOf"):
        if member in schema:
            return sample(schema[member][0], whole)
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type")
    if kind == "object":
        needed = schema.get("required", [])
        return {name: sample(schema["properties"][name], whole) for name in needed}
    if kind == "array":
        return [sample(schema["items"], whole)]
    return {"string": "x", "integer": 1, "number": 1, "boolean": False}.get(str(kind))


def requests_of(document: dict[str, Any], environment: str, snapshot: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each operation that names an environment or a snapshot, with values that fit."""
    known = {"environment": environment, "snapshot": snapshot, "a": snapshot, "command": "c-1", "path": "/srv"}
    for path, operations in document["paths"].items():
        if "{environment}" not in path and "{snapshot}" not in path:
            continue
        for method, operation in operations.items():
            more: dict[str, Any] = {"params": {}}
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "query" and parameter.get("required"):
                    more["params"][parameter["name"]] = known.get(parameter["name"], "x")
            body = operation.get("requestBody", {}).get("content", {})
            if "application/json" in body:
                more["json"] = sample(body["application/json"]["schema"], document)
                if isinstance(more["json"], dict) and "snapshot" in more["json"]:
                    more["json"]["snapshot"] = snapshot
            elif body:
                more["content"] = b"data"
            filled = re.sub(r"{(\w+)}", lambda match: known.get(match[1], "x"), path)
            yield method.upper(), filled, more


def test_on_every_path_a_foreign_environment_looks_like_none(
    daemon: Daemon, owner: dict[str, str], owned: tuple[str, str]
) -> None:
    stranger = token(daemon.home, "--scope", "exec", "--name", "stranger")
    document = daemon.call("GET", "/openapi.json")
    asked = list(requests_of(document, *owned))
    assert len(asked) > 25
    for method, path, more in asked:
        answer = daemon.client.request(method, path, headers=stranger, **more)
        assert answer.status_code == 404, f"{method} {path}: {answer.status_code} {answer.text[:300]}"
        assert answer.json()["code"] == "not_found"
    for path in ("/v1/environments", "/v1/snapshots", "/v1/usage"):
        assert daemon.call("GET", path, headers=stranger)["items"] == [], path
    problem = daemon.call("POST", "/v1/environments", 404, json={"snapshot": owned[1]}, headers=stranger)
    assert problem["code"] == "not_found"
    assert daemon.call("GET", f"/v1/environments/{owned[0]}", headers=owner)["state"] == "live", (
        "nothing was done to it"
    )


def test_a_prefix_does_not_tell_of_foreign_ones(daemon: Daemon, owned: tuple[str, str]) -> None:
    stranger = token(daemon.home, "--scope", "exec")
    own: str = daemon.call("POST", "/v1/environments", 201, json={}, headers=stranger)["id"]
    assert daemon.call("GET", "/v1/environments/e-", headers=stranger)["id"] == own
    daemon.call("DELETE", f"/v1/environments/{own}", 204, headers=stranger)


def test_a_token_reaches_those_that_it_lists(daemon: Daemon, owned: tuple[str, str]) -> None:
    guest = token(daemon.home, "--scope", "read", "--environment", owned[0])
    assert daemon.call("GET", f"/v1/environments/{owned[0]}", headers=guest)["id"] == owned[0]
    assert [one["id"] for one in daemon.call("GET", "/v1/environments", headers=guest)["items"]] == [owned[0]]
    assert daemon.call("POST", f"/v1/environments/{owned[0]}/exec", 403, json={"command": "id"}, headers=guest)


def test_a_token_cannot_own_more_than_it_may(daemon: Daemon) -> None:
    small = token(daemon.home, "--scope", "exec", "--max-environments", "2")
    made = daemon.call("POST", "/v1/environments", 201, json={}, headers=small)["id"]
    problem = daemon.call("POST", f"/v1/environments/{made}/fork", 429, json={"n": 2}, headers=small)
    assert problem["code"] == "too_many_environments"
    (fork,) = daemon.call("POST", f"/v1/environments/{made}/fork", 201, json={"n": 1}, headers=small)["environments"]
    daemon.call("POST", "/v1/environments", 429, json={}, headers=small)
    for one in (fork["id"], made):
        daemon.call("DELETE", f"/v1/environments/{one}", 204, headers=small)


def test_only_admins_reach_into_the_host(daemon: Daemon, owner: dict[str, str]) -> None:
    for body in ({"arguments": {"rootfs": "/"}}, {"arguments": {"network": "host"}}, {"method": "waypoint_attach"}):
        assert daemon.call("POST", "/v1/environments", 403, json=body, headers=owner)["code"] == "forbidden"


def test_no_secret_is_in_the_logs_and_all_that_was_done_is(
    daemon: Daemon, owner: dict[str, str], owned: tuple[str, str]
) -> None:
    at = f"/v1/environments/{owned[0]}"
    daemon.call("POST", f"{at}/exec", json={"command": "export KEY=tr0ub4dor", "stdin": "st4ple"}, headers=owner)
    daemon.call("POST", f"{at}/run", json={"argv": ["echo", "b4ttery"], "env": {"A": "h0rse"}}, headers=owner)
    daemon.call("PUT", f"{at}/files/content?path=/srv/c0rrect", 204, content=b"tr0ub4dor", headers=owner)
    text = (daemon.home / "server/audit.jsonl").read_text() + daemon.log.read_text()
    for secret in ("tr0ub4dor", "st4ple", "b4ttery", "h0rse", owner["Authorization"].split("_", 2)[2]):
        assert secret not in text
    done = [json.loads(line) for line in (daemon.home / "server/audit.jsonl").read_text().splitlines()]
    mine = [line["action"] for line in done if line["name"] == "owner" and line["environment"] == owned[0]]
    assert mine[:2] == ["create", "snapshot"] and mine[-3:] == ["exec", "run", "write_file"]


def test_metrics_tell_of_operations_and_environments(daemon: Daemon, owned: tuple[str, str]) -> None:
    text = daemon.call("GET", "/metrics", headers=token(daemon.home, "--scope", "metrics")).decode()
    for name in (
        'statefork_operations_total{backend="waypoint",outcome="ok",verb="snapshot"}',
        'statefork_operation_seconds_bucket{backend="waypoint"',
        'statefork_environments{backend="waypoint",state="live"}',
        "statefork_snapshot_bytes",
        "statefork_memory_bytes",
        "statefork_queue_length{",
    ):
        assert name in text, name
    assert owned[0] not in text


def test_a_second_daemon_leaves_the_first_alone(daemon: Daemon) -> None:
    refused = statefork(daemon.home, "serve", "--socket", str(daemon.home / "other.sock"), expect=125)
    assert "daemon" in refused.stderr
    assert daemon.call("GET", "/readyz")["status"] == "ready"


def test_killed_in_the_middle_the_audit_log_is_whole(tmp_path: Path) -> None:
    with running(tmp_path / "d") as daemon:
        made = daemon.create()
        for _ in range(2):
            noise = subprocess.Popen(
                [*PROGRAM, "token", "create", "--scope", "read"],
                env={**os.environ, "STATEFORK_HOME": str(daemon.home)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for number in range(20):
                daemon.exec(made, f"echo {number}")
            daemon.kill()
            assert noise.wait(60) == 0
            daemon.start()
        verdict = json.loads(statefork(daemon.home, "audit", "verify", "--json").stdout)
        assert verdict["ok"] and verdict["lines"] >= 43
        assert daemon.exec(made, "echo still here")["stdout"] == "still here\n"


def test_systemd_hears_when_it_is_ready_and_a_collector_what_it_does(tmp_path: Path) -> None:
    with collecting() as (endpoint, got), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        with running(tmp_path / "d", env=told) as daemon:
            assert b"READY=1" in systemd.recv(100)
            assert daemon.call("GET", "/readyz")["status"] == "ready"
            # Over the host's root all of its files can be read: not for everybody, unless the operator says so.
            runner = token(daemon.home, "--scope", "exec")
            problem = daemon.call("POST", "/v1/environments", 403, json={}, headers=runner)
            assert problem["code"] == "forbidden" and "host's own root" in problem["detail"]
            daemon.call("POST", "/v1/environments", 403, json={"arguments": {"dockerfile": ""}}, headers=runner)
            daemon.snapshot(daemon.create())
    spans = b"".join(got)
    assert b"POST /v1/environments/{environment}/snapshots" in spans and b"snapshot" in spans and b"waypoint" in spans


def test_over_tcp_a_token_is_needed_and_tls_is_spoken(tmp_path: Path) -> None:
    refused = statefork(tmp_path, "serve", "--host", "127.0.0.1", "--port", "0", expect=2)
    assert "statefork token create" in refused.stderr
    reader = token(tmp_path, "--scope", "read")
    files = make_certificate(tmp_path)
    options = ["--host", "127.0.0.1", "--port", "0", "--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
    log = tmp_path / "log"
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [*PROGRAM, "serve", *options], env={**os.environ, "STATEFORK_HOME": str(tmp_path)}, stderr=sink
        )
    try:
        url = until(lambda: re.search(r"ready on (https://\S+)", log.read_text()), 60, "the daemon's readiness")[1]
        trust = ssl.create_default_context(cafile=str(files.certificate))
        with httpx.Client(base_url=url, verify=trust, timeout=30, trust_env=False) as client:
            assert client.get("/v1/environments").status_code == 401
            assert client.get("/v1/environments", headers=reader).json()["items"] == []
            assert client.get("/readyz").status_code == 200
    finally:
        server.terminate()
        assert server.wait(60) == 0
