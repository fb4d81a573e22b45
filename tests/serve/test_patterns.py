"""Patterns that clients send: bounded on every transport, whatever they are."""

import http.client
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from headrace.change.glob import LONGEST_GLOB, MOST_GLOBS
from headrace.serve import ServerSettings
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.serve.conftest import Site, Sites
from tests.serve.ws import Talk

ROUTES = ["/v1/changes", "/v1/changes/stream", "/v1/cursors/billing/lease"]
LONG = "x" * (LONGEST_GLOB + 1)
MANY = ["x"] * (MOST_GLOBS + 1)


@pytest.fixture
def site(sites: Sites) -> Site:
    """A server with gRPC and one change."""
    site = sites(ServerSettings(port=0, grpc_port=0))
    site.writer.put("users", "1")
    return site


def ask(site: Site, route: str, **parameters: str) -> tuple[int, str]:
    method = "POST" if route.endswith("lease") else "GET"
    reply = site.http.request(method, route, params=parameters)
    return reply.status_code, reply.json().get("parameter", "")


@pytest.mark.requirement("P-16")
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_refuses_long_patterns_and_many(site: Site, route: str) -> None:
    for name in ("tables", "event_type", "trigger", "changed_fields"):
        assert ask(site, route, **{name: LONG}) == (400, name)
    for name in ("tables", "changed_fields"):
        assert ask(site, route, **{name: ",".join(MANY)}) == (400, name)


@pytest.mark.requirement("P-16")
def test_grpc_refuses_long_patterns_and_many(site: Site) -> None:
    with grpc.insecure_channel(site.server.grpc_target) as channel:
        stub = ChangeFeedStub(channel)
        for given in (
            {"tables": [LONG]},
            {"tables": MANY},
            {"tables": [""]},
            {"event_type": LONG},
            {"trigger": LONG},
            {"changed_fields": [LONG]},
            {"changed_fields": MANY},
        ):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Poll(v1.PollRequest(**given), timeout=30)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert next(iter(given)) in str(refused.value.details())
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.Subscribe(v1.SubscribeRequest(limit=1, **given), timeout=30))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.requirement("P-16")
def test_a_compressed_call_is_not_unpacked(site: Site) -> None:
    with grpc.insecure_channel(
        site.server.grpc_target, compression=grpc.Compression.Gzip
    ) as channel:
        bomb = v1.PollRequest(tables=["x" * 30_000_000])
        with pytest.raises(grpc.RpcError) as refused:
            ChangeFeedStub(channel).Poll(bomb, timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.requirement("P-16")
def test_a_websocket_refuses_long_names_and_many(site: Site) -> None:
    with Talk(site.url) as talk:
        talk.auth()
        for tables in (["x" * 257], [f"t{number}" for number in range(101)]):
            assert talk.ask(type="subscribe", tables=tables)["error"] == "invalid_message"


@pytest.mark.requirement("P-16")
def test_keys_have_a_bounded_number_of_patterns(site: Site) -> None:
    refused = site.http.post("/v1/keys", json={"tables": MANY})
    assert refused.status_code == 400
    assert str(MOST_GLOBS) in refused.json()["message"]
    assert site.http.post("/v1/keys", json={"tables": [LONG]}).status_code == 400
    assert site.http.post("/v1/keys", json={"tables": MANY[1:]}).status_code == 201


@contextmanager
def polling(site: Site) -> Iterator[list[float]]:
    """Seconds that each poll of another client took meanwhile."""
    took: list[float] = []
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            begun = time.monotonic()
            site.get("/v1/changes")
            took.append(time.monotonic() - begun)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield took
    finally:
        done.set()
        thread.join()


@pytest.mark.requirement("P-16")
def test_no_pattern_keeps_other_clients_waiting(shared: Site) -> None:
    with polling(shared) as took:
        for name, text in itertools.product(("event_type", "trigger", "tables"), "[*,?"):
            # As it is: other clients percent-encode it, and a request's head has a bound.
            attacker = http.client.HTTPConnection(*shared.address, timeout=600)
            attacker.request("GET", f"/v1/changes?{name}={text * 60_000}")
            assert attacker.getresponse().status == 400
            attacker.close()
    assert max(took) < 30  # the first alone took 258 s
