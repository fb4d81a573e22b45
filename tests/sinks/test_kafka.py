"""The Kafka channel on a real broker: topics, keys, headers, order, and what is refused."""

from collections import defaultdict
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import NewTopic

from headrace.sinks.push import ACCEPTED, UNSENT, DeliveryOutcome, Template
from headrace.testing import free_port, wait_until
from headrace.testing.kafka import KafkaServer
from tests.sinks.brokers import channel, event, expect_kafka, read, table_name


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaServer]:
    """The broker that these tests share."""
    expect_kafka()
    with KafkaServer() as server:
        yield server


@pytest.mark.requirement("S0-41", "S0-42", "S1-37")
def test_a_message_has_the_event_as_its_value_and_says_in_headers_what_it_is(
    kafka: KafkaServer,
) -> None:
    table = table_name()
    with channel(kafka) as open_channel:
        sent = event(table, 1, 7, op="UPDATE", payload=b'{"id":1}')
        assert list(open_channel.send([sent])) == [ACCEPTED]
    [record] = read(kafka, f"cdc.public.{table}")
    assert record.key == f"{table}:1"
    assert record.value == b'{"id":1}'
    assert record.headers == {
        "savegress-event-id": sent.id,
        "savegress-operation": "UPDATE",
        "savegress-table": table,
        "savegress-timestamp": "1731683402123",
    }


def test_one_broker_that_answers_is_enough(kafka: KafkaServer) -> None:
    table = table_name()
    servers = f"127.0.0.1:{free_port()},{kafka.address},127.0.0.1:{free_port()}"
    for at in range(4):  # the client begins with any of them
        with channel(kafka, servers=servers) as open_channel:
            assert list(open_channel.send([event(table, 1, at)])) == [ACCEPTED]


def test_a_snapshot_row_is_an_insert_and_a_truncate_is_ddl_as_in_the_event(
    kafka: KafkaServer,
) -> None:
    table = table_name()
    with channel(kafka) as open_channel:
        open_channel.send([event(table, 1, 1, op="READ"), event(table, "", 2, op="TRUNCATE")])
    records = {record.key: record for record in read(kafka, f"cdc.public.{table}")}
    assert records[f"{table}:1"].headers["savegress-operation"] == "INSERT"
    assert records[f"{table}:"].headers["savegress-operation"] == "DDL"


@pytest.mark.requirement("C-15")
def test_a_composite_key_stays_escaped_and_the_schema_may_be_part_of_the_key(
    kafka: KafkaServer,
) -> None:
    table = table_name()
    with channel(kafka, key="schema.table:pk") as open_channel:
        open_channel.send([event(table, "7:a%3Ab", 1)])
    [record] = read(kafka, f"cdc.public.{table}")
    assert record.key == f"public.{table}:7:a%3Ab"


@pytest.mark.requirement("C-15")
def test_a_tombstone_has_a_key_and_no_value(kafka: KafkaServer) -> None:
    table = table_name()
    gone = event(table, 1, 1, op="DELETE", payload=b"{}")
    with channel(kafka, tombstones=True) as open_channel:
        open_channel.send([gone, gone._replace(at=2, id=f"{gone.id}-tombstone", payload=None)])
    first, second = read(kafka, f"cdc.public.{table}")
    assert (first.key, first.value) == (second.key, b"{}")
    assert (second.key, second.value) == (f"{table}:1", None)


def test_events_of_a_row_stay_in_order_while_rows_spread_over_partitions(
    kafka: KafkaServer,
) -> None:
    table = table_name()
    events = [event(table, at % 40, at) for at in range(4000)]
    with channel(kafka, settings={"batch.num.messages": 50}) as open_channel:
        for begin in range(0, len(events), 1000):
            assert set(open_channel.send(events[begin : begin + 1000])) == {ACCEPTED}
    records = read(kafka, f"cdc.public.{table}")
    rows: dict[str | None, list[str]] = defaultdict(list)
    partitions: dict[str | None, set[int]] = defaultdict(set)
    for record in records:
        rows[record.key].append(record.id)
        partitions[record.key].add(record.partition)
    assert rows == {f"{table}:{row}": [each.id for each in events[row::40]] for row in range(40)}
    assert all(len(each) == 1 for each in partitions.values())
    assert len(set.union(*partitions.values())) == 4


def test_a_key_goes_to_the_partition_that_a_java_producer_chooses(kafka: KafkaServer) -> None:
    table = "users"
    keys = ["1", "2", "alice", "42", "7:2"]
    with channel(kafka, topic=Template(f"{table_name()}.${{table}}")) as open_channel:
        open_channel.send([event(table, key, at) for at, key in enumerate(keys)])
        topic = open_channel._route(event(table, "1", 0)).topic
    found = {record.key: record.partition for record in read(kafka, topic)}
    assert found == {f"{table}:{key}": _murmur2(f"{table}:{key}".encode()) % 4 for key in keys}


def _murmur2(data: bytes) -> int:
    """The hash that Kafka's Java clients use, without its sign."""
    mixer, mask = 0x5BD1E995, 0xFFFFFFFF
    state = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for at in range(0, whole, 4):
        piece = int.from_bytes(data[at : at + 4], "little") * mixer & mask
        piece = (piece ^ piece >> 24) * mixer & mask
        state = state * mixer & mask ^ piece
    if rest := data[whole:]:
        state = (state ^ int.from_bytes(rest, "little")) * mixer & mask
    state = (state ^ state >> 13) * mixer & mask
    return (state ^ state >> 15) & 0x7FFFFFFF


def test_a_name_that_kafka_refuses_is_escaped_in_the_topic(kafka: KafkaServer) -> None:
    table = f"{table_name()} Größe/1"
    with channel(kafka) as open_channel:
        assert list(open_channel.send([event(table, 1, 1)])) == [ACCEPTED]
    name = table.partition(" ")[0]
    [record] = read(kafka, f"cdc.public.{name}-20Gr-C3-B6-C3-9Fe-2F1")
    assert record.key == f"{table}:1"
    assert record.headers["savegress-table"] == table


def test_an_event_that_is_too_large_for_the_client_holds_up_its_own_row_only(
    kafka: KafkaServer,
) -> None:
    table = table_name()
    with channel(kafka) as open_channel:
        large = event(table, 1, 2, payload=b"x" * 5_000_000)
        sent = [event(table, 1, 1), large, event(table, 2, 3), event(table, 1, 4)]
        first, second, third, fourth = open_channel.send(sent)
    assert (first, third, fourth) == (ACCEPTED, ACCEPTED, UNSENT)
    assert second.outcome is DeliveryOutcome.REFUSED
    assert "too large" in second.reason
    assert len(read(kafka, f"cdc.public.{table}")) == 2


def test_a_batch_that_is_larger_than_a_segment_is_sent_in_parts(kafka: KafkaServer) -> None:
    """RECORD_LIST_TOO_LARGE is said of the batch: each of its events fits."""
    table = table_name()
    topic = f"cdc.public.{table}"
    config = {"segment.bytes": "1048576", "max.message.bytes": "8000000"}
    _create(kafka, NewTopic(topic, 1, 1, config=config))
    sent = [event(table, at % 3, at, payload=b"x" * 300_000) for at in range(8)]
    settings = {"batch.size": 6_000_000}
    with channel(kafka, max_event_bytes=8_000_000, settings=settings) as open_channel:
        assert list(open_channel.send(sent)) == [ACCEPTED] * 8
        assert open_channel._batch_size < 6_000_000
    found = list(dict.fromkeys(record.id for record in read(kafka, topic)))
    for row in {each.row for each in sent}:
        ids = [each.id for each in sent if each.row == row]
        assert [each for each in found if each in ids] == ids


@pytest.mark.parametrize("batch", [30_000, 50_000])
def test_a_row_stays_in_order_where_batches_fit_the_topic_and_else_ends_with_its_last_event(
    kafka: KafkaServer, batch: int
) -> None:
    """Of batches that are too large for the topic the last may fit, and is taken too early."""
    table = table_name()
    topic = f"cdc.public.{table}"
    _create(kafka, NewTopic(topic, 1, 1, config={"max.message.bytes": "40000"}))
    sent = [event(table, 1, at, payload=b"x" * 1000) for at in range(120)]
    with channel(kafka, settings={"batch.size": batch}) as open_channel:
        assert set(open_channel.send(sent)) == {ACCEPTED}
    stored = [record.id for record in read(kafka, topic)]
    wanted = [each.id for each in sent]
    assert stored[-1] == wanted[-1]
    assert set(stored) == set(wanted)
    if batch < 40_000:
        assert stored == wanted


def test_an_event_that_is_too_large_for_the_topic_is_found_within_its_batch(
    kafka: KafkaServer,
) -> None:
    table = table_name()
    topic = f"cdc.public.{table}"
    _create(kafka, NewTopic(topic, 1, 1, config={"max.message.bytes": "20000"}))
    with channel(kafka, settings={"linger.ms": 100}) as open_channel:
        sent = [event(table, at, at, payload=b"x" * 1000) for at in range(100)]
        sent[50] = event(table, 50, 50, payload=b"x" * 50_000)
        sent.append(event(table, 50, 100))
        replies = list(open_channel.send(sent))
        refused = [at for at, each in enumerate(replies) if each.outcome is DeliveryOutcome.REFUSED]
        assert refused == [50]
        assert topic in replies[50].reason
        assert replies[100] is UNSENT
        assert replies.count(ACCEPTED) == 99
        # It has learned to make smaller batches.
        later = [event(table, at, 200 + at, payload=b"x" * 1000) for at in range(100)]
        while open_channel._batch_size > 20_000:
            assert set(open_channel.send(later)) == {ACCEPTED}
    found = {record.id for record in read(kafka, topic)}
    assert {each.id for each in later} <= found
    assert sent[50].id not in found


def test_a_topic_that_nobody_makes_fails_with_what_to_do(kafka: KafkaServer) -> None:
    expect = "cdc.public.absent"
    settings = {"topic.metadata.propagation.max.ms": 500}
    with KafkaServer(settings={"auto.create.topics.enable": "false"}) as strict:
        with channel(strict, settings=settings) as open_channel:
            [reply] = open_channel.send([event("absent", 1, 1)])
            assert reply.outcome is DeliveryOutcome.FAILED
            assert expect in reply.reason
            assert "create_topics" in reply.reason
            # It is tried again on the same channel once somebody has made the topic.
            _create(strict, NewTopic(expect, 1, 1))
            wait_until(lambda: list(open_channel.send([event("absent", 1, 1)])) == [ACCEPTED])
        made = channel(
            strict, create_topics=True, partitions=3, topic_settings={"cleanup.policy": "compact"}
        )
        with made as open_channel:
            assert list(open_channel.send([event("made", 1, 1)])) == [ACCEPTED]
            assert list(open_channel.send([event("absent", 1, 2)])) == [ACCEPTED]
        assert len({*range(3)} - {r.partition for r in read(strict, "cdc.public.made")}) == 2
        assert _config(strict, "cdc.public.made")["cleanup.policy"] == "compact"


def test_a_topic_that_cannot_be_made_fails_with_the_brokers_reason(kafka: KafkaServer) -> None:
    with channel(kafka, create_topics=True, replication=3) as open_channel:
        table = table_name()
        replies = open_channel.send([event(table, 1, 1), event(table, 1, 2), event(table, 2, 3)])
    first, second, third = replies
    assert first.outcome is third.outcome is DeliveryOutcome.FAILED
    assert "replication" in first.reason.lower()
    assert second is UNSENT


def test_a_topic_that_kafka_takes_for_another_is_refused_or_not_made(kafka: KafkaServer) -> None:
    name = table_name()
    with channel(kafka, topic=Template(f"a.{name}")) as open_channel:
        assert list(open_channel.send([event("one", 1, 1)])) == [ACCEPTED]
    beside = Template(f"a_{name}")
    with channel(kafka, topic=beside, create_topics=True) as open_channel:
        [reply] = open_channel.send([event("other", 1, 2)])
    assert reply.outcome is DeliveryOutcome.REFUSED
    assert f"a.{name}" in reply.reason
    with channel(kafka, topic=beside) as open_channel:
        [reply] = open_channel.send([event("other", 1, 2)])
    assert reply.outcome is DeliveryOutcome.FAILED
    assert "there is no topic" in reply.reason


def _create(server: KafkaServer, topic: NewTopic) -> None:
    admin = AdminClient({"bootstrap.servers": server.address})
    for future in admin.create_topics([topic]).values():
        future.result()


def _config(server: KafkaServer, topic: str) -> dict[str, str | None]:
    admin = AdminClient({"bootstrap.servers": server.address})
    [future] = admin.describe_configs([ConfigResource("topic", topic)]).values()
    return {name: entry.value for name, entry in future.result().items()}
