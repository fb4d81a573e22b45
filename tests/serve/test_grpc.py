"""The changefeed over gRPC, asked by grpcio's own clients."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from headrace.change.event import Op
from headrace.config import parse
from headrace.errors import ConfigError
from headrace.formats.catalogue import Formats
from headrace.formats.facts import Facts
from headrace.formats.protobuf import Protobuf
from headrace.log import Log
from headrace.log.keys import KeyLimits, KeyRequest
from headrace.model import Model
from headrace.run import server_settings
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.serve import grpc as rpcs
from headrace.serve.service import Service
from headrace.serve.subscription import Subscription
from headrace.testing import wait_until
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.changes import Writer, make_change, opened_writer

OPEN = ServerSettings(port=0, grpc_port=0)
KEYED = ServerSettings(port=0, grpc_port=0, require_key=True)
NOT_READING = """
import sys, time, grpc
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
call = ChangeFeedStub(grpc.insecure_channel(sys.argv[1])).Subscribe(v1.SubscribeRequest())
call.initial_metadata()
time.sleep(1)
print("subscribed", flush=True)
time.sleep(60)
"""
LIMIT = ("grpc.max_receive_message_length", -1)


class Place:
    """A server with gRPC, the log behind it, and a client."""

    def __init__(
        self, log: Log, stack: ExitStack, settings: ServerSettings, formats: Formats | None
    ) -> None:
        self.log = log
        app = create_app(log, statuses=list, copy_again=None, settings=settings, formats=formats)
        self.service: Service = app.state.service
        self.server = stack.enter_context(BackgroundServer(app, settings))
        self.target = self.server.grpc_target
        self.channel = stack.enter_context(grpc.insecure_channel(self.target))
        self.stub = ChangeFeedStub(self.channel)

    def subscribe(self, *metadata: tuple[str, str], **asked: Any) -> Any:
        """A stream; without an end it is given up after half a minute."""
        return self.stub.Subscribe(v1.SubscribeRequest(**asked), timeout=30, metadata=metadata)

    def poll(self, *metadata: tuple[str, str], **asked: Any) -> Any:
        return self.stub.Poll(v1.PollRequest(**asked), timeout=30, metadata=metadata)

    def key(self, **wanted: Any) -> tuple[tuple[str, str], str]:
        """A new key as metadata, and its id."""
        made = self.service.keyring.create(KeyRequest(**wanted))
        return ("x-api-key", made.secret), made.key.id


@contextmanager
def serving(
    log: Log, settings: ServerSettings = OPEN, formats: Formats | None = None
) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(log, stack, settings, formats)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    with opened_writer(tmp_path / "log") as writer:
        yield writer


@pytest.fixture
def place(writer: Writer) -> Iterator[Place]:
    with serving(writer.log) as place:
        yield place


@pytest.fixture
def keyed(writer: Writer) -> Iterator[Place]:
    with serving(writer.log, KEYED) as place:
        yield place


def sequences(responses: Any) -> list[int]:
    return [response.event.sequence for response in responses]


def take(call: Any, count: int) -> list[int]:
    return sequences(next(call) for _ in range(count))


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """What a call is refused with."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call()) if callable(call) else next(call)
    error: Any = caught.value
    return error.code(), error.details()


# --- what is told --------------------------------------------------------------------------------


@pytest.mark.requirement("S0-43", "S0-44")
def test_a_subscriber_gets_every_change_as_an_event(place: Place, writer: Writer) -> None:
    writer.put("users", "alice", name="Alice", big=12345678901234567890)
    writer.put("users", "alice", Op.UPDATE, name="Bob")
    writer.delete("users", "alice")
    events = [response.event for response in place.subscribe(limit=3)]
    format = Protobuf(Facts())
    expected = [
        v1.CDCEvent.FromString(format.encode(change) or b"")
        for change in writer.log.read(0, limit=10)
    ]
    assert events == expected
    assert [event.operation for event in events] == [v1.INSERT, v1.UPDATE, v1.DELETE]
    assert list(place.poll().events) == expected


def test_a_stream_stays_and_follows(place: Place, writer: Writer) -> None:
    call = place.subscribe()
    assert dict(call.initial_metadata())["x-headrace-epoch"] == writer.log.epoch
    for sequence in (1, 2, 3):
        writer.put("users", str(sequence))
        assert take(call, 1) == [sequence]


def test_an_asynchronous_client_reads_the_same(place: Place, writer: Writer) -> None:
    async def read() -> list[int]:
        async with grpc.aio.insecure_channel(place.target) as channel:
            call: Any = ChangeFeedStub(channel).Subscribe(v1.SubscribeRequest(after=10, limit=600))
            return [response.event.sequence async for response in call]

    writer.put_many("users", 1000)
    assert asyncio.run(read()) == list(range(11, 611))


def test_events_are_encoded_once_for_all(place: Place, writer: Writer, monkeypatch: Any) -> None:
    encoded: list[int] = []
    encode = Protobuf.encode

    def counting(self: Protobuf, change: Any) -> Any:
        encoded.append(change.sequence)
        return encode(self, change)

    monkeypatch.setattr(Protobuf, "encode", counting)
    writer.put_many("users", 5)
    for _ in range(3):
        assert sequences(place.subscribe(limit=5)) == [1, 2, 3, 4, 5]
        assert len(place.poll().events) == 5
    assert encoded == [1, 2, 3, 4, 5]


def test_filters_hold_and_the_reader_hears_how_far_it_was_scanned(
    place: Place, writer: Writer, monkeypatch: Any
) -> None:
    monkeypatch.setattr(rpcs, "IDLE_SECONDS", 0.05)
    writer.put("orders", "1")
    writer.put("users", "alice")
    writer.put("orders", "1", Op.UPDATE)
    writer.put("users", "bob")
    call = place.subscribe(tables=["ord*"], operations=[v1.UPDATE])
    assert next(call).event.sequence == 3
    assert next(call).scanned == 4
    answer = place.poll(tables=["public.orders"])
    assert ([event.sequence for event in answer.events], answer.scanned) == ([1, 3], 4)
    assert [e.sequence for e in place.poll(key_prefix="users:b").events] == [4]
    assert [e.sequence for e in place.poll(entity_type="User").events] == [2, 4]
    assert [e.sequence for e in place.poll(event_type="entity:upd*").events] == [3]


def test_one_source_alone_can_be_asked_for(place: Place, writer: Writer) -> None:
    writer.put("orders", "1")
    writer.put_from("crm", "orders", "1")
    writer.put("orders", "2")
    assert [e.sequence for e in place.poll(source="crm").events] == [2]
    assert [e.sequence for e in place.poll(source="shop", tables=["orders"]).events] == [1, 3]
    assert take(place.subscribe(source="crm"), 1) == [2]
    assert place.poll(source="cr*").events == []  # a name, no pattern


def test_rows_read_by_a_copy_are_inserts(place: Place, writer: Writer) -> None:
    writer.put("users", "alice", Op.READ)
    assert len(place.poll(operations=[v1.INSERT]).events) == 1
    assert len(place.poll(operations=[v1.UPDATE]).events) == 0


def test_events_come_together_for_who_wants_that(place: Place, writer: Writer) -> None:
    writer.put_many("users", 600)
    responses = list(place.subscribe(limit=600, together=True))
    alone = [response.event for response in place.subscribe(limit=600)]
    assert [event for response in responses for event in response.events] == alone
    assert len(responses) < 10
    for number in range(12):
        writer.put("users", str(number), photo="x" * 1_000_000)
    responses = list(place.subscribe(after=600, limit=12, together=True))
    assert [len(response.events) for response in responses] == [1] * 12  # each below 4 MiB


@pytest.mark.requirement("C-05")
def test_what_was_trimmed_is_announced(place: Place, writer: Writer) -> None:
    writer.put_many("users", 10)
    writer.log.trim(6)
    first, *rest = place.subscribe(after=2, limit=5)
    assert first.gap == v1.Gap(first=3, last=5, reason="trim")
    assert sequences(rest) == [6, 7, 8, 9, 10]
    assert place.poll(after=2).gap == v1.Gap(first=3, last=5, reason="trim")
    assert not place.poll(after=5).HasField("gap")


# --- poll ----------------------------------------------------------------------------------------


@pytest.mark.requirement("P-06")
def test_a_place_that_is_not_in_the_log_is_refused(place: Place, writer: Writer) -> None:
    writer.put_many("users", 3)
    page = place.poll(after=0)
    seen = {"epoch": page.epoch, "generation": page.generation}
    assert page.generation == writer.log.generation
    assert list(place.poll(after=3, **seen).events) == []
    for asked in ({"after": 4}, {"after": 3, **seen, "generation": "abc"}):
        code, words = refusal(lambda asked=asked: place.poll(**asked))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "go on after 3, the newest sequence" in words


def test_polling_on_reaches_everything(place: Place, writer: Writer) -> None:
    writer.put_many("users", 250)
    seen, after = [], 0
    while (answer := place.poll(after=after, limit=70)).events:
        seen += [event.sequence for event in answer.events]
        after = answer.scanned
        assert (answer.latest_sequence, answer.epoch) == (250, writer.log.epoch)
    assert seen == list(range(1, 251))
    assert len(place.poll().events) == place.service.settings.batch_size


def test_a_poll_waits_for_a_first_event(place: Place, writer: Writer) -> None:
    answer = place.stub.Poll.future(v1.PollRequest(wait_ms=30_000), timeout=30)
    wait_until(lambda: place.service.feed.waiting == 1, message="the poll waits")
    writer.put("users", "alice")
    assert [event.sequence for event in answer.result().events] == [1]


def test_a_page_fits_into_what_clients_take(place: Place, writer: Writer) -> None:
    for number in range(12):
        writer.put("users", str(number), photo="x" * 400_000)
    seen, after = [], 0
    while (answer := place.poll(after=after)).events:
        assert answer.ByteSize() < 4 << 20
        seen += [event.sequence for event in answer.events]
        after = answer.scanned
    assert seen == list(range(1, 13))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"operations": [v1.BEGIN]}, "operations"),
        ({"operations": [v1.OPERATION_UNSPECIFIED]}, "operations"),
        ({"operations": [99]}, "operations"),
        ({"tables": [""]}, "tables"),
        ({"limit": 10_001}, "limit"),
        ({"wait_ms": 60_001}, "wait_ms"),
    ],
)
def test_a_wrong_request_is_refused_by_name(place: Place, asked: Any, named: str) -> None:
    code, words = refusal(lambda: place.poll(**asked))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words.startswith(f"{named} must be")
    if named in ("operations", "tables"):
        assert refusal(place.subscribe(**asked)) == (code, words)


def test_a_request_of_megabytes_or_of_garbage_is_refused(place: Place) -> None:
    code, _ = refusal(place.subscribe(tables=["x" * (1 << 20)]))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    poll: Any = place.channel.unary_unary("/headrace.v1.ChangeFeed/Poll")
    code, _ = refusal(lambda: poll(b"\xff" * 100, timeout=30))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert place.poll().latest_sequence == 0


# --- coming and going ----------------------------------------------------------------------------


def test_a_reader_resumes_after_a_restart_without_loss_or_repeat(writer: Writer) -> None:
    writer.put_many("users", 700)
    seen: list[int] = []
    for _ in range(3):
        with serving(writer.log) as place:
            call = place.subscribe(after=seen[-1] if seen else 0)
            seen += take(call, 400)
            place.server.stop()  # some hundreds are on their way
            with pytest.raises(grpc.RpcError) as caught:
                seen += take(call, 10_000)
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        writer.put_many("users", 700)
    with serving(writer.log) as place:
        seen += sequences(place.subscribe(after=seen[-1], limit=2800 - seen[-1]))
    assert seen == list(range(1, 2801))


def test_open_streams_end_promptly_when_the_server_stops(place: Place) -> None:
    call = place.subscribe()
    call.initial_metadata()
    poll = place.stub.Poll.future(v1.PollRequest(wait_ms=60_000), timeout=60)
    wait_until(lambda: place.service.feed.waiting == 2, message="both wait")
    began = time.monotonic()
    place.server.stop()
    assert time.monotonic() - began < 10
    assert refusal(call)[0] is grpc.StatusCode.UNAVAILABLE
    assert list(poll.result().events) == []


def test_a_client_that_cancels_leaves_nothing_behind(place: Place, writer: Writer) -> None:
    calls = [place.subscribe() for _ in range(20)]
    wait_until(lambda: place.service.feed.waiting == 20, message="all wait")
    for call in calls:
        call.cancel()
    wait_until(lambda: place.service.feed.waiting == 0, message="nobody waits any more")
    writer.put("users", "alice")
    assert take(place.subscribe(), 1) == [1]


def test_a_reader_that_does_not_read_costs_little_and_delays_nobody(
    place: Place, writer: Writer, monkeypatch: Any
) -> None:
    opened: list[Subscription] = []
    subscription = rpcs.ChangeFeed._subscription

    def noting(self: Any, *asked: Any) -> Subscription:
        opened.append(subscription(self, *asked))
        return opened[-1]

    monkeypatch.setattr(rpcs.ChangeFeed, "_subscription", noting)
    with grpc.insecure_channel(place.target, options=[LIMIT]) as other:
        slow = place.subscribe()
        slow.initial_metadata()
        for number in range(300):
            writer.put("users", str(number), photo="x" * 100_000)
        request = v1.SubscribeRequest(limit=300)
        fast = ChangeFeedStub(other).Subscribe(request, timeout=60)
        assert sequences(fast) == list(range(1, 301))
        # A page, what gRPC holds for it, and what its own side took in: 100 KB each.
        assert opened[0].scanned < 60
        slow.cancel()


def test_a_reader_that_vanishes_is_let_go_and_is_no_failure(
    place: Place, writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(200):
        writer.put("users", str(number), photo="x" * 100_000)
    with subprocess.Popen(
        [sys.executable, "-c", NOT_READING, place.target], stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"subscribed\n"
        client.kill()  # while the server waits to write
    assert len(place.poll(after=198).events) == 2
    place.server.stop()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_the_server_stops_although_a_client_does_not_read(place: Place, writer: Writer) -> None:
    slow = place.subscribe()
    slow.initial_metadata()
    for number in range(200):
        writer.put("users", str(number), photo="x" * 100_000)
    began = time.monotonic()
    place.server.stop()
    assert time.monotonic() - began < 10
    slow.cancel()


def test_a_port_in_use_is_named_with_the_fix(place: Place, writer: Writer) -> None:
    port = int(place.target.rpartition(":")[2])
    settings = ServerSettings(port=0, grpc_port=port)
    with (
        pytest.raises(ConfigError, match=rf"server\.grpc_port {port}") as caught,
        serving(writer.log, settings),
    ):
        pytest.fail("it must not start")
    assert "server.grpc_port" in caught.value.hint


def test_without_the_setting_there_is_no_grpc(writer: Writer) -> None:
    app = create_app(
        writer.log, statuses=list, copy_again=None, settings=(settings := ServerSettings(port=0))
    )
    with BackgroundServer(app, settings) as server:
        assert server.grpc_target == ""


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.requirement("C-27")
def test_a_key_opens_it_in_either_place(keyed: Place, writer: Writer) -> None:
    writer.put("users", "alice")
    key, _ = keyed.key()
    assert len(keyed.poll(key).events) == 1
    assert len(keyed.poll(("authorization", f"Bearer {key[1]}")).events) == 1
    assert take(keyed.subscribe(key), 1) == [1]
    twice = [key, ("authorization", f"Bearer {key[1]}")]
    assert refusal(lambda: keyed.poll(*twice))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_missing_unknown_expired_and_revoked_keys_are_answered_alike(keyed: Place) -> None:
    revoked, name = keyed.key()
    keyed.service.keyring.revoke(name)
    expired, _ = keyed.key(seconds=0.001)
    unknown = ("x-api-key", "cdc_" + "0" * 64)
    answers = {refusal(lambda key=key: keyed.poll(*key)) for key in ((), (unknown,), (expired,))}
    answers |= {refusal(keyed.subscribe(revoked)), refusal(keyed.subscribe())}
    [(code, words)] = answers
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "cdc_" not in words


def test_revocation_ends_a_live_stream_within_a_second(keyed: Place, writer: Writer) -> None:
    key, name = keyed.key()
    call = keyed.subscribe(key)
    writer.put("users", "alice")
    assert take(call, 1) == [1]
    wait_until(lambda: keyed.service.feed.waiting == 1, message="it waits for more")
    began = time.monotonic()
    keyed.service.keyring.revoke(name)
    assert refusal(call)[0] is grpc.StatusCode.UNAUTHENTICATED
    assert time.monotonic() - began < 5  # a second, and some for a busy machine


def test_a_key_of_some_tables_sees_no_others(keyed: Place, writer: Writer) -> None:
    writer.put("users", "alice")
    writer.put("orders", "1")
    key, _ = keyed.key(tables=("orders",))
    answer = keyed.poll(key)
    assert ([event.sequence for event in answer.events], answer.scanned) == ([2], 2)
    assert [event.sequence for event in keyed.poll(key, tables=["*"]).events] == [2]
    for table in ("users", "public.users", "nothing"):
        code, words = refusal(keyed.subscribe(key, tables=["orders", table]))
        assert (code, table in words) == (grpc.StatusCode.PERMISSION_DENIED, True)


def test_limits_of_a_key_hold(keyed: Place) -> None:
    key, _ = keyed.key(limits=KeyLimits(connections=2))
    calls = [keyed.subscribe(key) for _ in range(2)]
    for call in calls:
        call.initial_metadata()
    assert refusal(keyed.subscribe(key))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    calls[0].cancel()
    wait_until(lambda: keyed.service.feed.waiting == 1, message="one has gone")
    keyed.subscribe(key).initial_metadata()
    often, _ = keyed.key(limits=KeyLimits(requests_per_second=0.01))
    keyed.poll(often)
    assert refusal(lambda: keyed.poll(often))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_events_come_no_faster_than_the_key_may_have_them(keyed: Place, writer: Writer) -> None:
    key, name = keyed.key(limits=KeyLimits(events_per_second=60.0))
    writer.put_many("users", 256)
    began = time.monotonic()
    call = keyed.subscribe(key)
    take(call, 256)
    writer.put("users", "late")
    assert refusal(lambda: keyed.poll(key))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert take(call, 1) == [257]
    assert time.monotonic() - began > 3
    keyed.service.keyring.revoke(name)
    assert refusal(call)[0] is grpc.StatusCode.UNAUTHENTICATED


def test_a_tenants_key_sees_its_own_rows_alone(writer: Writer) -> None:
    formats = Formats(model=Model(tenant="name"))
    with serving(writer.log, KEYED, formats) as place:
        for tenant in ("t1", "t2"):
            writer.put("users", tenant, name=tenant)
            row = {"id": tenant, "name": tenant}
            gone = make_change(Op.DELETE, table=writer.table("users"), key=row, before=row)
            writer.append([gone])
        key, _ = place.key(tenant="t1")
        asked: list[dict[str, Any]] = [{}, {"tenant_id": "t2"}, {"tables": ["*"]}]
        told = [[event.sequence for event in place.poll(key, **each).events] for each in asked]
        assert told == [[1, 2], [], [1, 2]]
        assert take(place.subscribe(key, limit=2), 2) == [1, 2]


def test_the_config_says_where_it_listens(tmp_path: Path) -> None:
    source = {"type": "postgres", "url": "postgresql://localhost/shop"}
    content = {"sources": {"shop": source}, "server": {"grpc_port": 50051}}
    assert server_settings(parse(content, folder=tmp_path, environment={})).grpc_port == 50051
    del content["server"]
    assert server_settings(parse(content, folder=tmp_path, environment={})).grpc_port is None


# --- what tools ask for --------------------------------------------------------------------------


def test_a_tool_can_find_and_call_the_service_by_reflection(place: Place, writer: Writer) -> None:
    writer.put("users", "alice")
    database = ProtoReflectionDescriptorDatabase(place.channel)
    assert "headrace.v1.ChangeFeed" in database.get_services()
    service = DescriptorPool(database).FindServiceByName("headrace.v1.ChangeFeed")
    poll = service.methods_by_name["Poll"]
    call = place.channel.unary_unary(
        f"/{service.full_name}/{poll.name}",
        request_serializer=GetMessageClass(poll.input_type).SerializeToString,
        response_deserializer=GetMessageClass(poll.output_type).FromString,
    )
    answer: Any = call(GetMessageClass(poll.input_type)(after=0), timeout=30)
    assert [event.table for event in answer.events] == ["users"]


@pytest.mark.parametrize("service", ["", "headrace.v1.ChangeFeed"])
def test_health_is_told_without_a_key(keyed: Place, service: str) -> None:
    stub: Any = health_pb2_grpc.HealthStub(keyed.channel)
    request = health_pb2.HealthCheckRequest(service=service)
    serving = health_pb2.HealthCheckResponse.SERVING
    assert stub.Check(request, timeout=30).status == serving
    watch = stub.Watch(request, timeout=30)
    assert next(watch).status == serving
    stopping = threading.Thread(target=keyed.server.stop)
    stopping.start()
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    stopping.join()


def test_calls_are_counted_by_their_status_and_events_by_how_long_they_took(
    writer: Writer, keyed: Place
) -> None:
    key, _ = keyed.key()
    with pytest.raises(grpc.RpcError):
        keyed.poll()
    with pytest.raises(grpc.RpcError):
        keyed.poll(key, limit=10_001)
    keyed.poll(key)
    call = keyed.subscribe(key)
    call.initial_metadata()
    wait_until(lambda: keyed.service.feed.waiting == 1)
    writer.put("users", "1")
    assert sequences([next(call)]) == [1]
    call.cancel()
    counts = keyed.service.requests
    wait_until(lambda: counts.grpc["Subscribe", "CANCELLED"] == 1)
    assert counts.grpc["Poll", "UNAUTHENTICATED"] == 1
    assert counts.grpc["Poll", "INVALID_ARGUMENT"] == 1
    assert counts.grpc["Poll", "OK"] == 1
    assert dict(counts.grpc_seconds["Poll"].buckets())["+Inf"] == 3
    assert dict(keyed.service.feed.delivered.buckets())["+Inf"] == 1
