"""Problem details, metrics, health, logs, traces, systemd, TLS: what the guard shows to whom."""

from __future__ import annotations

import io
import json
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import statefork.errors
from certificates import make_certificate
from collector import collecting
from guarded import Served, served
from statefork.errors import UsageError
from statefork.server.guard.listening import TlsFiles
from statefork.server.guard.logs import configure_logs
from statefork.server.guard.notify import notify
from statefork.server.guard.problems import STATUS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("guard") / "server") as running:
        yield running


def test_every_error_of_the_library_has_a_status() -> None:
    codes = {getattr(statefork.errors, name).code for name in statefork.errors.__all__}
    assert codes == set(STATUS)


def test_errors_are_problem_details_with_the_librarys_code(server: Served) -> None:
    answer = server.get("/v1/fail/state", {**server.token("read"), "X-Request-Id": "mine-1"})
    assert answer.status_code == 409 and answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "type": "urn:statefork:error:wrong_state",
        "title": "Conflict",
        "status": 409,
        "detail": "environment e1 is paused; resume it first",
        "code": "wrong_state",
        "request_id": "mine-1",
        "environment": "e1",
    }
    assert answer.headers["x-request-id"] == "mine-1"
    assert server.get("/v1/fail/disk", server.token("read")).status_code == 507


def test_what_does_not_fit_the_schema_is_told_without_the_value(server: Served) -> None:
    answer = server.post("/v1/exec", server.token("exec"), json={"command": "x", "timeout": "my-password"})
    assert answer.status_code == 422 and answer.json()["code"] == "usage"
    assert answer.json()["errors"][0]["in"] == ["body", "timeout"] and "my-password" not in answer.text
    for wrong in (b"{", b"\xff", b""):
        answer = server.post("/v1/exec", {**server.token("exec"), "content-type": "application/json"}, content=wrong)
        assert answer.status_code in (400, 422) and answer.json()["code"] == "usage"


def test_unknown_paths_and_methods_are_problems_too(server: Served) -> None:
    reader = server.token("read")
    assert server.get("/v1/nothing", reader).json()["code"] == "not_found"
    assert server.post("/v1/flood", reader).json()["code"] == "method_not_allowed"


def test_an_error_that_nobody_foresaw_says_only_its_request_id(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    answer = server.get("/v1/fail/other", server.token("read"))
    assert answer.status_code == 500 and answer.json()["code"] == "internal"
    assert "RuntimeError" not in answer.text and answer.json()["request_id"] in answer.json()["detail"]
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("given", ["", "a" * 65, "with space", 'x"y'])
def test_a_request_id_that_would_harm_a_log_is_replaced(server: Served, given: str) -> None:
    answer = server.get("/healthz", {"X-Request-Id": given})
    assert answer.headers["x-request-id"] != given and len(answer.headers["x-request-id"]) == 16


def test_health_needs_no_token_and_readiness_follows_its_checks(server: Served) -> None:
    assert server.get("/healthz").json() == {"status": "ok"}
    ready = False
    server.guard.checks["registry"] = lambda: ready
    try:
        answer = server.get("/readyz")
        assert answer.status_code == 503 and answer.json() == {"status": "waiting", "missing": ["registry"]}
        ready = True
        assert server.get("/readyz").status_code == 200
    finally:
        del server.guard.checks["registry"]


def test_metrics_have_their_names_and_labels(server: Served) -> None:
    metrics = server.guard.metrics
    metrics.operation("waypoint", "snapshot", "ok", 0.02)
    metrics.operation("waypoint", "snapshot", "criu", 0.5)
    metrics.gauge("environments", "Environments by state.", lambda: {("waypoint", "live"): 2.0}, ("backend", "state"))
    metrics.gauge("queue_length", "Waiting.", lambda: 3.0)
    server.get("/v1/environments/secret-name", server.token("read"))
    server.get("/v1/environments/secret-name", {"Authorization": "Bearer wrong"})
    text = server.get("/metrics", server.token("metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for f in families.values()
        for sample in f.samples
    }
    ok = (("backend", "waypoint"), ("outcome", "ok"), ("verb", "snapshot"))
    assert samples["statefork_operations_total", ok] == 1
    assert samples["statefork_operation_seconds_count", (("backend", "waypoint"), ("verb", "snapshot"))] == 2
    assert samples["statefork_environments", (("backend", "waypoint"), ("state", "live"))] == 2
    assert samples["statefork_queue_length", ()] == 3
    route = (("method", "GET"), ("route", "/v1/environments/{identifier}"), ("status", "404"))
    assert samples["statefork_http_requests_total", route] >= 1
    assert samples["statefork_http_refused_total", (("reason", "unauthenticated"),)] >= 1
    assert {"statefork_http_request_seconds", "process_resident_memory_bytes"} <= families.keys()
    assert "secret-name" not in text


def test_logs_are_json_with_request_ids_and_no_secrets(tmp_path: Path) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    before = root.handlers[:], root.level
    try:
        configure_logs(stream)
        with served(tmp_path / "server") as running:
            header = running.token("exec")
            secret = header["Authorization"].split("_", 2)[2]
            running.post(
                f"/v1/exec?token={secret}", {**header, "X-Request-Id": "r-1"}, json={"command": "echo hunter2"}
            )
            running.get(f"/v1/{header['Authorization'].split()[1]}", header)
            running.get("/v1/fail/other", {**header, "X-Request-Id": "r-2"})
    finally:
        root.handlers[:], root.level = before
        logging.getLogger("uvicorn.access").disabled = False
    # The client logs in this process too; what it says is not the daemon's.
    lines = [line for line in map(json.loads, stream.getvalue().splitlines()) if not line["logger"].startswith("http")]
    text = json.dumps(lines)
    requests = [line for line in lines if line["message"] == "request"]
    assert {"method": "POST", "route": "/v1/exec", "status": 200, "request_id": "r-1"}.items() <= requests[0].items()
    failed = [line for line in lines if line["level"] == "error"]
    assert failed and failed[0]["request_id"] == "r-2" and "RuntimeError" in failed[0]["traceback"]
    assert secret not in text and "hunter2" not in text and "SSSS" not in text


def test_traces_go_to_the_endpoint_under_the_callers_trace(tmp_path: Path) -> None:
    with collecting() as (endpoint, got):
        with served(tmp_path / "server", otlp_endpoint=endpoint) as running:
            parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
            running.post("/v1/exec", {**running.token("exec"), "traceparent": parent}, json={"command": "true"})
    spans = b"".join(got)
    assert b"POST /v1/exec" in spans and bytes.fromhex("ab" * 16) in spans and b"statefork" in spans


def test_systemd_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(30)
        assert notify(str(tmp_path / "notify"), "READY=1")
        assert receiver.recv(100) == b"READY=1"
    assert not notify(None, "READY=1") and not notify(str(tmp_path / "nobody"), "READY=1")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1")
def test_tls_is_spoken_with_the_certificate_and_nothing_else(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    with served(tmp_path / "server", tls=files) as running:
        trusting = ssl.create_default_context(cafile=str(files.certificate))
        answer = httpx.get(
            running.base_url + "/v1/environments/none", headers=running.token("read"), verify=trusting, trust_env=False
        )
        assert answer.status_code == 404
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.base_url + "/healthz", trust_env=False)
        with pytest.raises(httpx.HTTPError):
            httpx.get(running.base_url.replace("https", "http") + "/healthz", trust_env=False)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with (
            socket.create_connection(("127.0.0.1", running.port), timeout=30) as plain,
            pytest.raises((ssl.SSLError, OSError)),
        ):
            old.wrap_socket(plain)


def test_a_certificate_that_cannot_work_is_refused_before_listening(tmp_path: Path) -> None:
    first = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    second = make_certificate(tmp_path / "other")
    for files in (TlsFiles(first.certificate, second.key), TlsFiles(tmp_path / "none.pem", first.key)):
        with pytest.raises(UsageError, match="PEM"):
            files.check()


def test_a_slow_answer_is_not_a_slow_client(tmp_path: Path) -> None:
    """The deadlines are for what the client owes, never for what the daemon does in between."""
    from statefork.server.guard.limits import Limits

    limits = Limits(head_seconds=2.0, body_idle_seconds=0.5, write_seconds=0.5)
    with served(tmp_path / "server", limits=limits) as running:
        running.guard.checks["slow"] = lambda: time.sleep(2.5) is None
        assert running.get("/readyz").status_code == 200
