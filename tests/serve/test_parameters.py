"""Bad input gets a 4xx with a JSON body that says which and why; nothing gets a 500."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.effort import times
from tests.serve.conftest import Site

GETS = [
    "/changefeed",
    "/changefeed/stream",
    "/changefeed/stats",
    "/v1/changes",
    "/v1/changes/stream",
    "/v1/sources",
    "/schemas",
    "/schemas/canonical.json",
    "/health",
    "/metrics",
    "/openapi.json",
]
POSTS = ["/changefeed/retention", "/v1/sources/shop/snapshot"]

NUMBERS = {
    "/changefeed": ["from_seq", "limit", "long_poll_ms"],
    "/changefeed/stream": ["from_seq", "max_seconds", "heartbeat_ms"],
    "/v1/changes": ["after", "upto", "limit", "wait_ms"],
    "/v1/changes/stream": ["after", "upto", "heartbeat_ms"],
}
BAD_NUMBERS = [
    "abc",
    "",
    "-1",
    "+1",
    " 1",
    "1 ",
    "1.0",
    "1e3",
    "0x10",
    "1_0",
    "٣",
    "9" * 21,
    "9" * 9999,
]


@pytest.mark.parametrize("bad", BAD_NUMBERS, ids=lambda bad: repr(bad)[:12])
@pytest.mark.parametrize("path", NUMBERS)
def test_a_bad_number_is_named_with_its_value_and_the_reason(
    shared: Site, path: str, bad: str
) -> None:
    for name in NUMBERS[path]:
        refused = shared.http.get(path, params={name: bad})
        assert refused.status_code == 400
        problem = refused.json()
        assert problem.keys() == {"error", "parameter", "value", "message"}
        assert (problem["error"], problem["parameter"]) == ("invalid_parameter", name)
        assert problem["value"][:200] == bad[:200]
        assert name in problem["message"]
        assert "whole number from" in problem["message"]


@pytest.mark.requirement("S4-04", "S4-06", "S4-10", "S4-11")
@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/changefeed", "limit", 0),
        ("/changefeed", "limit", 10_001),
        ("/changefeed", "long_poll_ms", 60_001),
        ("/changefeed", "from_seq", 2**64),
        ("/changefeed/stream", "max_seconds", 0),
        ("/changefeed/stream", "max_seconds", 61),
        ("/changefeed/stream", "heartbeat_ms", 99),
        ("/v1/changes", "limit", 0),
        ("/v1/changes", "wait_ms", 60_001),
    ],
)
def test_a_number_out_of_range_is_refused(shared: Site, path: str, name: str, value: int) -> None:
    refused = shared.http.get(path, params={name: value})
    assert (refused.status_code, refused.json()["parameter"]) == (400, name)


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/changefeed/stream", "keep_alive=maybe"),
        ("/changefeed/stream", "keep_alive="),
        ("/changefeed", "include=insert"),
        ("/changefeed", "include=truncate,"),
        ("/v1/changes", "operations=upsert"),
        ("/v1/changes", "operations="),
        ("/v1/changes", "tables="),
        ("/v1/changes", "tables=a,,b"),
        ("/v1/changes", "format=avro"),
        ("/v1/changes", "preserve_transactions=maybe"),
        ("/v1/changes/stream", "format=Etl"),
        ("/changefeed", "limit=1&limit=2"),
        ("/changefeed", "key_prefix=a&key_prefix=a"),
    ],
)
def test_a_bad_word_is_refused_by_name(shared: Site, path: str, query: str) -> None:
    refused = shared.http.get(f"{path}?{query}")
    assert refused.status_code == 400
    assert refused.json()["parameter"] == query.partition("=")[0]


@pytest.mark.parametrize("path", GETS)
def test_an_unknown_parameter_is_refused_by_name(shared: Site, path: str) -> None:
    refused = shared.http.get(path, params={"form_seq": 1})
    assert refused.status_code == 400
    assert refused.json()["parameter"] == "form_seq"


@pytest.mark.parametrize("path", POSTS)
def test_a_post_takes_no_parameters(shared: Site, path: str) -> None:
    assert shared.http.post(path, params={"x": 1}, json={}).json()["parameter"] == "x"


@pytest.mark.parametrize(
    "query", ["key_prefix=%ff", "key_prefix=%c3", "%ff=1", "&".join("a=1" * 40)]
)
def test_a_query_that_is_not_utf8_or_too_long_is_refused(shared: Site, query: str) -> None:
    refused = shared.http.get(f"/changefeed?{query}")
    assert (refused.status_code, refused.json()["error"]) == (400, "invalid_parameter")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"nul", b"[]", b'"x"', b"3", b"[" * 60_000])
@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_is_no_json_object_is_refused(shared: Site, path: str, body: bytes) -> None:
    refused = shared.http.post(path, content=body)
    assert (refused.status_code, refused.json()["error"]) == (400, "invalid_body")


@pytest.mark.parametrize("path", POSTS)
def test_a_body_may_have_64_kib(shared: Site, path: str) -> None:
    refused = shared.http.post(path, content=b" " * ((64 << 10) + 1))
    assert (refused.status_code, refused.json()["error"]) == (413, "body_too_large")

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1024

    assert shared.http.post(path, content=pieces()).status_code == 413
    assert shared.http.post(path, content=b" " * (64 << 10)).status_code == 400


@pytest.mark.parametrize("path", GETS)
def test_a_get_takes_no_body(shared: Site, path: str) -> None:
    refused = shared.http.request("GET", path, content=b"x")
    assert (refused.status_code, refused.json()["error"]) == (400, "unexpected_body")


@pytest.mark.parametrize(
    "path", ["/", "/nope", "/changefeed/nope", "/v1", "/openapi.json/x", "/openapi.yaml", "/%00"]
)
def test_a_path_that_is_not_there_gets_json_too(shared: Site, path: str) -> None:
    refused = shared.http.get(path)
    assert (refused.status_code, refused.json()["error"]) == (404, "not_found")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD"])
def test_a_method_that_is_not_taken_gets_json_and_the_ones_that_are(
    shared: Site, method: str
) -> None:
    refused = shared.http.request(method, "/changefeed")
    assert refused.status_code == 405
    assert "GET" in refused.headers["allow"]
    if method != "HEAD":
        assert refused.json()["error"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/v1/cursors/x", "/v1/keys", "/changefeed"])
def test_options_names_every_method_that_a_path_takes(shared: Site, path: str) -> None:
    described = shared.get("/openapi.json").json()["paths"][path.replace("/x", "/{name}")]
    answer = shared.http.options(path)
    allowed = answer.headers["allow"].split(", ")
    assert (answer.status_code, set(allowed)) == (204, {*map(str.upper, described), "OPTIONS"})


# --- whatever is sent ---------------------------------------------------------------------------

WORDS = [
    *["key_prefix", "keep_alive", "include", "tables", "operations"],
    *["format", "preserve_transactions"],
]
NAMES = sorted({*WORDS, *(name for names in NUMBERS.values() for name in names)})
VALUES = st.one_of(
    st.binary(max_size=20),
    st.text(max_size=20).map(str.encode),
    st.sampled_from(
        [b"0", b"1", b"-1", b"%ff", b"%00", b"true", b"etl", b"18446744073709551615", b"9" * 30]
    ),
)
QUERIES = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.tuples(
            st.sampled_from([name.encode() for name in NAMES]) | st.binary(max_size=8), VALUES
        ),
        max_size=4,
    ).map(lambda pairs: b"&".join(name + b"=" + value for name, value in pairs)),
)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"Last-Event-ID", b"Accept", b"Origin", b"Host", b"Content-Type"]),
        st.binary(max_size=30),
    ),
    max_size=3,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["before_sequence", "force", "tables", "x"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


def ask(site: Site, start: bytes, headers: list[tuple[bytes, bytes]], body: bytes = b"") -> int:
    """The status of a request made of any bytes; 0 when the server hangs up on it."""
    lines = [start, b"Host: localhost", b"Connection: close"]
    lines += [name + b": " + _clean(value) for name, value in headers]
    if body:
        lines.append(b"Content-Length: %d" % len(body))
    with socket.create_connection(site.address, timeout=20) as connection:
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        answer = connection.makefile("rb").readline()
    return int(answer.split()[1]) if answer else 0


def _clean(value: bytes) -> bytes:
    """What may stand in a request line or a header: anything but line ends, blanks and NUL."""
    return bytes(byte for byte in value if byte not in b"\r\n\0 \t\x0b\x0c")


fuzzing = settings(
    max_examples=times(18, nightly=180),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@fuzzing
@given(path=st.sampled_from(GETS), query=QUERIES, headers=HEADERS)
def test_no_query_and_no_header_gets_a_500(
    shared: Site, path: str, query: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    start = b"GET " + path.encode() + b"?" + _clean(query) + b" HTTP/1.1"
    assert ask(shared, start, headers) < 500


@fuzzing
@given(
    path=st.sampled_from(POSTS), body=st.binary(max_size=100) | JSON.map(json.dumps).map(str.encode)
)
def test_no_body_gets_a_500(shared: Site, path: str, body: bytes) -> None:
    start = b"POST " + path.encode() + b" HTTP/1.1"
    assert ask(shared, start, [], body) < 500


@fuzzing
@given(name=st.text(max_size=20).map(str.encode) | st.binary(max_size=20))
def test_no_source_name_gets_a_500(shared: Site, name: bytes) -> None:
    start = b"POST /v1/sources/" + _clean(name) + b"/snapshot HTTP/1.1"
    assert ask(shared, start, [], b"{}") < 500


def test_the_server_still_answers_after_all_that(shared: Site) -> None:
    stats: dict[str, Any] = shared.get("/changefeed/stats").json()
    assert stats["latest_sequence"] == 5
