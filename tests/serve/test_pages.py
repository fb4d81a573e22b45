"""docs/http.md and docs/deployment.md say what the server does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.change.event import Op
from headrace.formats.canonical import CanonicalChange
from headrace.formats.changefeed import TYPES
from headrace.serve._http import LARGEST_HEAD, REQUEST_SECONDS, STALLED_SECONDS
from headrace.serve.run import GRACE_SECONDS, KEEP_ALIVE_SECONDS
from tests.serve.conftest import Site

DOCS = Path(__file__).parents[2] / "docs"
HTTP = (DOCS / "http.md").read_text()
DEPLOYMENT = (DOCS / "deployment.md").read_text()


@pytest.fixture
def operations(shared: Site) -> list[tuple[str, dict[str, Any]]]:
    """Every operation of /openapi.json, as `GET /path` and its description."""
    paths = shared.get("/openapi.json").json()["paths"]
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]


def section(operation: str) -> str:
    """What http.md says of an operation."""
    match = re.search(rf"^## {re.escape(operation)}\n(.*?)(?=^## |\Z)", HTTP, re.M | re.S)
    assert match, f"docs/http.md has no section {operation!r}"
    return match[1]


def test_every_route_is_described_and_every_section_is_a_route(
    operations: list[tuple[str, dict[str, Any]]],
) -> None:
    described = re.findall(r"^## ((?:GET|POST|PUT|DELETE) .*)$", HTTP, re.M)
    assert sorted(described) == sorted(name for name, _ in operations)
    for name, _ in operations:
        assert f"[`{name}`]" in HTTP


def test_every_parameter_is_described_where_its_route_is(
    operations: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, operation in operations:
        text = section(name)
        for parameter in operation.get("parameters", []):
            if parameter["in"] == "path":
                continue
            assert f"`{parameter['name']}`" in text, (name, parameter["name"])


def test_every_default_and_bound_is_described_as_it_is(
    operations: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, operation in operations:
        for parameter in operation.get("parameters", []):
            row = re.search(rf"^\| `{parameter['name']}` \|(.*)$", section(name), re.M)
            default = parameter["schema"].get("default")
            if row is None or default in (None, "", False):
                continue
            assert f"`{default}`" in row[1], (name, parameter["name"])
            high = parameter["schema"].get("maximum", 0)
            if 1 < high <= 60_000:
                assert f"to {high}" in row[1], (name, parameter["name"])


def test_every_operation_and_every_field_is_described() -> None:
    for op in Op:
        assert f"`{TYPES[op]}`" in HTTP
        assert f"`{op.value}`" in HTTP
    for field in CanonicalChange.__struct_fields__:
        assert f'"{field}"' in HTTP


def test_every_example_of_an_answer_is_json() -> None:
    examples = re.findall(r"^```json\n(.*?)^```", HTTP, re.M | re.S)
    assert len(examples) > 5
    for example in examples:
        json.loads(example.replace("[...]", "[]"))


@pytest.mark.requirement("S4-23")
def test_deployment_covers_server_sent_events_behind_proxies() -> None:
    notes = DEPLOYMENT.partition("## Reverse proxy and SSE/keep-alive notes")[2]
    parts = dict(re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", notes, re.M | re.S))
    assert re.search(r"proxy_buffering\s+off;", parts["nginx"])
    assert re.search(r"proxy_read_timeout\s+75s;", parts["nginx"])
    assert re.search(r"proxy_http_version\s+1\.1;", parts["nginx"])
    assert "flush_interval -1" in parts["Caddy"]
    assert "read_timeout 75s" in parts["Caddy"]
    assert "flushInterval" in parts["Traefik"]
    assert "respondingTimeouts.writeTimeout" in parts["Traefik"]
    for words in ("X-Accel-Buffering: no", "heartbeat_ms", "long_poll_ms", "max_seconds"):
        assert words in notes


@pytest.mark.requirement("S4-23")
def test_what_deployment_says_of_the_server_is_so(shared: Site) -> None:
    assert f"cut off after {GRACE_SECONDS} seconds" in DEPLOYMENT
    assert f"keeps idle connections for {KEEP_ALIVE_SECONDS} s" in DEPLOYMENT
    assert f"gives a request {REQUEST_SECONDS:g} s to come whole" in DEPLOYMENT
    assert f"takes nothing of its answer for {STALLED_SECONDS:g} s" in DEPLOYMENT
    assert f"come whole within {REQUEST_SECONDS:g} s" in HTTP
    assert f"headers may have {LARGEST_HEAD >> 10} KiB" in HTTP
    headers = shared.get("/changefeed/stream").headers
    assert headers["x-accel-buffering"] == "no"
    assert headers["cache-control"] == "no-cache"
    # What the proxies in the examples send.
    for host in ("127.0.0.1", "127.0.0.1:3000"):
        assert shared.http.get("/health", headers={"Host": host}).status_code == 200
