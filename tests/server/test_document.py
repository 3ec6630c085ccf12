"""What the OpenAPI document promises, checked by schemathesis: no request of its own making, right or wrong, gets an
answer that is not in the document, or takes the server down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headwater.server.limits import Limits
from headwater.server.service import Service
from tests.server.served import over_a_socket, service

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


ENDPOINTS = [
    ("get", "/healthz"),
    ("get", "/readyz"),
    ("get", "/metrics"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model}"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("post", "/v1/embeddings"),
    ("post", "/v1/responses"),
    ("get", "/v1/responses/{response}"),
    ("get", "/api/sessions"),
    ("get", "/api/sessions/{name}"),
    ("patch", "/api/sessions/{name}"),
    ("delete", "/api/sessions/{name}"),
    ("get", "/api/sessions/{name}/export"),
    ("get", "/api/settings"),
    ("put", "/api/settings"),
]
SOME = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    served = service(tmp_path_factory.mktemp("document"), max_tokens=8, limits=Limits(requests_per_minute=10**9))
    with over_a_socket(served) as address:
        yield served, address


@pytest.fixture(scope="module")
def document(server: tuple[Service, str]) -> Any:
    return schemathesis.openapi.from_url(f"{server[1]}/openapi.json")


@pytest.mark.parametrize(("method", "path"), ENDPOINTS, ids=[" ".join(each) for each in ENDPOINTS])
def test_every_answer_is_in_the_document(document: Any, server: tuple[Service, str], method: str, path: str):
    @settings(SOME)
    @given(case=document[path][method].as_strategy())
    def check(case: Any) -> None:
        case.call_and_validate(base_url=server[1], checks=CHECKS, timeout=20)

    check()
    assert server[0].worker.alive


def test_every_endpoint_is_checked(document: Any):
    assert {(method, path) for path, methods in document.raw_schema["paths"].items() for method in methods} == set(
        ENDPOINTS
    )
