"""One key, wherever it is shown: HTTP's headers, the WebSocket's message, gRPC's metadata."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import httpx
import pytest

from headrace.log.keys import IssuedKey, KeyLimits, KeyRequest
from headrace.serve import ServerSettings
from headrace.serve.keyring import LOOK_SECONDS
from headrace.serve.subscription import RECHECK_SECONDS
from headrace.testing import wait_until
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.serve.conftest import Site, Sites
from tests.serve.sse import Reader
from tests.serve.ws import Talk


@pytest.fixture
def site(sites: Sites) -> Site:
    """A server that needs keys, on every protocol."""
    site = sites(ServerSettings(port=0, grpc_port=0, require_key=True))
    site.writer.put("orders", "1")
    site.writer.put("users", "1")
    return site


@pytest.fixture
def stub(site: Site) -> Iterator[ChangeFeedStub]:
    with grpc.insecure_channel(site.server.grpc_target) as channel:
        yield ChangeFeedStub(channel)


def by_header(site: Site, stub: ChangeFeedStub, secret: str) -> bool:
    return site.http.get("/changefeed", headers={"X-API-Key": secret}).status_code == 200


def by_bearer(site: Site, stub: ChangeFeedStub, secret: str) -> bool:
    headers = {"Authorization": f"Bearer {secret}"}
    return site.http.get("/v1/changes", headers=headers).status_code == 200


def by_message(site: Site, stub: ChangeFeedStub, secret: str) -> bool:
    with Talk(site.url) as talk:
        return bool(talk.ask(type="auth", apiKey=secret)["type"] == "auth_success")


def by_metadata(site: Site, stub: ChangeFeedStub, secret: str) -> bool:
    try:
        stub.Poll(v1.PollRequest(), timeout=30, metadata=(("x-api-key", secret),))
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
        return False
    return True


WAYS = [by_header, by_bearer, by_message, by_metadata]


@pytest.mark.parametrize("way", WAYS)
def test_one_key_opens_every_protocol_until_it_is_revoked(
    site: Site, stub: ChangeFeedStub, way: Callable[[Site, ChangeFeedStub, str], bool]
) -> None:
    keyring = site.service.keyring
    made = keyring.create(KeyRequest())
    assert way(site, stub, made.secret)
    assert not way(site, stub, "cdc_" + "0" * 64)
    keyring.revoke(made.key.id)
    assert not way(site, stub, made.secret)


def test_whoever_waits_looks_at_its_key_often_enough_to_end_within_a_second() -> None:
    assert max(RECHECK_SECONDS, LOOK_SECONDS) <= 0.5


def test_a_revocation_ends_what_is_live_on_every_protocol(site: Site, stub: ChangeFeedStub) -> None:
    made = site.service.keyring.create(KeyRequest())
    with ExitStack() as stack:
        reader = stack.enter_context(
            Reader(f"{site.url}/v1/changes/stream", {"X-API-Key": made.secret})
        )
        talk = stack.enter_context(Talk(site.url))
        talk.auth(made.secret).subscribe("users")
        call = stub.Subscribe(
            v1.SubscribeRequest(), timeout=30, metadata=(("x-api-key", made.secret),)
        )
        next(iter(call))
        reader.await_events(2)
        ended = [reader.ended, *(_watch(end) for end in (talk.closed, lambda: _drain(call)))]
        site.service.keyring.revoke(made.key.id)
        wait_until(lambda: all(end.is_set() for end in ended), message="all have ended")


def test_a_keys_connections_are_counted_over_all_protocols(
    site: Site, stub: ChangeFeedStub
) -> None:
    made = _limited(site, connections=2)
    metadata = (("x-api-key", made.secret),)
    with (
        Reader(f"{site.url}/v1/changes/stream", {"X-API-Key": made.secret}) as reader,
        Talk(site.url) as talk,
    ):
        reader.await_events(2)
        talk.auth(made.secret)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Poll(v1.PollRequest(), timeout=30, metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        other = httpx.get(f"{site.url}/changefeed", headers={"X-API-Key": made.secret})
        assert other.status_code == 429
    wait_until(lambda: by_header(site, stub, made.secret), message="the connections are given back")


def _limited(site: Site, **limits: int) -> IssuedKey:
    return site.service.keyring.create(KeyRequest(limits=KeyLimits(**limits)))


def _watch(end: Callable[[], object]) -> threading.Event:
    """An event that is set when `end` returns."""
    ended = threading.Event()

    def wait() -> None:
        end()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def _drain(call: Iterator[v1.SubscribeResponse]) -> None:
    with pytest.raises(grpc.RpcError):
        for _ in call:
            pass
