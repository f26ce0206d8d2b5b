"""The OpenAPI document: it is the one in the repository, it tells of every route, and nothing that fits it makes a 500."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import SkipTest

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import just
from schemathesis import GenerationMode
from schemathesis.core.errors import SerializationNotPossible

from daemon import running
from statefork.server.app import openapi_text

ROOT = Path(__file__).parents[2]
METHODS = ("get", "put", "post", "patch", "delete")


def operations() -> dict[str, Any]:
    document = json.loads(openapi_text())
    return {
        operation["operationId"]: operation
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in METHODS
    }


def test_the_document_in_the_repository_is_that_of_the_code() -> None:
    assert (ROOT / "docs/openapi.json").read_text() == openapi_text(), (
        "run: statefork serve --openapi > docs/openapi.json"
    )


def test_every_operation_has_a_name_and_says_what_goes_wrong() -> None:
    found = operations()
    assert len(found) == sum(
        1 for path in json.loads(openapi_text())["paths"].values() for method in path if method in METHODS
    )
    for name, operation in found.items():
        if name not in ("healthz", "readyz", "metrics"):
            assert {"404", "409", "429"} <= set(operation["responses"]), name


def test_everything_that_makes_something_takes_a_key() -> None:
    keyed = {
        name
        for name, operation in operations().items()
        if any(one["name"] == "Idempotency-Key" for one in operation.get("parameters", ()))
    }
    assert keyed == {"createEnvironment", "forkEnvironment", "createSnapshot", "restore", "exec", "run"}


@pytest.mark.timeout(240)
def test_no_request_that_fits_the_document_makes_a_500(tmp_path: Path) -> None:
    """Requests by schemathesis, right and wrong ones, with a real environment, snapshot and command under the ids.

    What would end those is sent with made-up ids; what never ends (`watchFiles`) is left out. Every answer has to be one that the
    document tells of.
    """
    examples = int(os.environ.get("SCHEMA_EXAMPLES", "2"))
    schema = schemathesis.openapi.from_path(ROOT / "docs/openapi.json")
    with running(tmp_path / "h") as daemon:
        made = daemon.create()
        real = {"environment": made, "snapshot": daemon.snapshot(made, name="snap")}
        real["command"] = daemon.exec(made, "echo hi", 202, background=True)["id"]
        asked = 0

        def ask(case: Any, ids: dict[str, str]) -> None:
            nonlocal asked
            for name in set(ids) & set(case.path_parameters or {}):
                case.path_parameters[name] = ids[name]
            sent = case.as_transport_kwargs(base_url="http://daemon")
            try:
                request = daemon.client.build_request(
                    sent["method"],
                    sent["url"],
                    headers={k: v for k, v in (sent.get("headers") or {}).items() if v is not None},
                    params=sent.get("params"),
                    cookies=sent.get("cookies"),
                    **(
                        {"json": sent["json"]} if sent.get("json") is not None else {"content": sent.get("data") or b""}
                    ),
                )
                answer = daemon.client.send(request)
            except (UnicodeError, TypeError, ValueError, httpx.InvalidURL, httpx.LocalProtocolError):
                return  # no client could send that
            asked += 1
            told = case.operation.definition.raw["responses"]
            assert answer.status_code < 500, f"{request.method} {request.url} {request.content[:300]!r}: {answer.text}"
            assert str(answer.status_code) in told or answer.status_code in (400, 405, 422), (
                f"{request.url}: {answer.status_code}"
            )
            if answer.status_code >= 400 and answer.status_code != 405:
                assert answer.headers["content-type"] == "application/problem+json" and answer.json()["code"], (
                    answer.text
                )

        for found in schema.get_all_operations():
            operation = found.ok()
            name = operation.definition.raw["operationId"]
            if name == "watchFiles":
                continue
            ids = {} if name.startswith(("delete", "pause")) else real
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                asking = given(case=operation.as_strategy(generation_mode=mode), ids=just(ids))(ask)
                with contextlib.suppress(Unsatisfiable, SkipTest, SerializationNotPossible):
                    settings(
                        max_examples=examples,
                        deadline=None,
                        derandomize=True,
                        database=None,
                        suppress_health_check=list(HealthCheck),
                        phases=[Phase.generate],
                    )(asking)()
        assert asked > 40 * examples
