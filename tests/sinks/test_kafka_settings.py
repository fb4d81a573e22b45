"""What the Kafka sink may be told, and what it makes of names; no broker is needed."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.config import parse
from headrace.errors import ConfigError, SinkUnavailable
from headrace.secret import Secret
from headrace.sinks.kafka import names
from headrace.sinks.kafka.channel import KafkaLink
from headrace.sinks.kafka.sink import Kafka
from headrace.sinks.push import Template

SOURCE = {"shop": {"type": "postgres", "url": "postgresql://shop@db/shop"}}


def configured(tmp_path: Path, **settings: Any) -> Kafka:
    """The sink that a config file with these settings has."""
    sink = {"type": "kafka", "servers": "kafka:9092", **settings}
    content = {"sources": SOURCE, "pipeline": {"sinks": {"events": sink}}}
    config = parse(content, folder=tmp_path, environment={"PASSWORD": "hunter2", "ENV": "test"})
    assert config.pipeline is not None
    [made] = config.pipeline.sinks
    assert isinstance(made, Kafka)
    return made


def test_a_config_file_names_the_brokers_and_the_rest_is_as_it_should_be(tmp_path: Path) -> None:
    sink = configured(tmp_path)
    assert sink.topic == Template("cdc.${schema}.${table}")
    client = sink._client
    assert client["enable.idempotence"] is True
    assert client["partitioner"] == "murmur2_random"
    assert (sink.splits_keys, sink.adds_tombstones) == (True, False)
    assert pickle.loads(pickle.dumps(sink)) == sink


def test_a_topic_has_names_of_its_own_and_variables_of_the_environment(tmp_path: Path) -> None:
    sink = configured(tmp_path, topic="${ENV}.${schema}.${table}")
    assert names.topic(sink.topic, "shop", "public", "orders") == "test.public.orders"


def test_files_begin_at_the_config_files_folder_and_secrets_do_not_print(tmp_path: Path) -> None:
    sink = configured(
        tmp_path,
        security_protocol="sasl_ssl",
        username="alice",
        password="${PASSWORD}",
        ca_file="ca.pem",
        settings={"linger.ms": 20, "ssl.keystore.password": "hunter2"},
    )
    assert sink.ca_file == str(tmp_path / "ca.pem")
    assert sink._client["sasl.password"] == "hunter2"
    assert sink._client["linger.ms"] == 20
    assert "hunter2" not in repr(sink)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"topic": "cdc.$${tabel}"}, "nothing is called tabel; did you mean table?"),
        ({"topic": "cdc/${table}"}, "topic: cdc/${table} has '/' in it"),
        ({"topic": ""}, "topic: an empty text is no topic's name"),
        ({"servers": " "}, "servers: name at least one broker"),
        ({"timeout_seconds": 0}, "timeout_seconds must be above 0"),
        ({"partitions": 0}, "partitions must be 1 or more, or -1"),
        ({"key": "pk"}, "key: "),
        ({"username": "alice"}, "username and password are not used with security_protocol"),
        ({"security_protocol": "sasl_ssl"}, "sasl_ssl needs username and password"),
        ({"ca_file": "x.pem"}, "ca_file is not used with security_protocol: plaintext"),
        ({"settings": {"acks": "secret"}}, "settings: acks cannot be set here: an event counts"),
        ({"settings": {"enable.idempotence": "secret"}}, "enable.idempotence cannot be set here"),
        ({"settings": {"message.timeout.ms": "secret"}}, "set timeout_seconds"),
        ({"settings": {"transactional.id": "secret"}}, "transactional.id cannot be set here"),
        (
            {"settings": {"sasl.password": "secret"}},
            "sasl.password cannot be set here: set password",
        ),
        ({"settings": {"partitioner": "secret"}}, "partitioner must choose by the key"),
        ({"settings": {"lingre.ms": "secret"}}, "librdkafka has no setting called lingre.ms"),
        ({"settings": {"retry.backoff.ms": "secret"}}, "the value of retry.backoff.ms does not do"),
        ({"settings": {"error_cb": "secret"}}, "librdkafka takes text, numbers"),
        ({"settings": {"linger.ms": {"a": "secret"}}}, "expected"),
        ({"format": "etl"}, "format: etl is for streams"),
    ],
)
def test_a_setting_that_does_not_do_is_named_and_its_value_is_kept_back(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, **settings)
    assert told in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_certificate_that_is_not_there_is_told_when_it_is_needed() -> None:
    sink = Kafka(
        name="events", servers="127.0.0.1:1", security_protocol="ssl", ca_file="/nowhere/ca.pem"
    )
    with pytest.raises(SinkUnavailable, match=r"ssl\.ca\.location"):
        sink.connect()


def test_no_value_of_settings_shows_in_a_reason_or_a_repr() -> None:
    told = {
        "sasl.oauthbearer.client.secret": "hunter2",
        "sasl.oauthbearer.config": "principal=alice password=hunter3",
        "debug": "all",
    }
    sink = Kafka(
        name="events", servers="127.0.0.1:1", settings=told, key_password=Secret("hunter4")
    )
    link = KafkaLink(
        client=sink._client,
        template=sink.topic,
        with_schema=False,
        timeout=1.0,
        creation=None,
        secrets=sink._secrets,
    )
    error = KafkaError(KafkaError._AUTHENTICATION, "no hunter2, hunter3 or hunter4 at all")
    assert link.reason(error) == "no ***, *** or *** at all"
    assert "hunter" not in repr(link)


def test_no_reason_has_a_secret_in_it() -> None:
    sink = Kafka(
        name="events",
        servers="127.0.0.1:1",
        security_protocol="sasl_plaintext",
        username="alice",
        password=Secret("hunter2"),
        timeout_seconds=0.5,
    )
    with pytest.raises(SinkUnavailable) as refused:
        sink.connect()
    assert "hunter2" not in repr(refused.value)


# --- names ---------------------------------------------------------------------------------------

TEMPLATE = Template("cdc.${schema}.${table}")


@pytest.mark.parametrize(
    ("schema", "table", "topic"),
    [
        ("public", "order_items", "cdc.public.order_items"),
        ("public", "order items", "cdc.public.order-20items"),
        ("shop-eu", "orders", "cdc.shop-eu.orders"),
        ("a.b", "c", "cdc.a-2Eb.c"),
        ("a", "b-20", "cdc.a.b-2D20"),
        ("", "orders", "cdc..orders"),
    ],
)
def test_a_topic_reads_as_the_table_where_it_can(schema: str, table: str, topic: str) -> None:
    assert names.topic(TEMPLATE, "pg", schema, table) == topic


any_name = st.text(st.characters(codec="utf-8"), min_size=1, max_size=80) | st.text(
    "aA2DEF-._ ", min_size=1, max_size=6
)


@pytest.mark.requirement("C-15")
@given(any_name, any_name, any_name, any_name)
def test_two_tables_never_share_a_topic(one: str, two: str, three: str, four: str) -> None:
    assume((one, two) != (three, four))
    first = names.topic(TEMPLATE, "pg", one, two)
    second = names.topic(TEMPLATE, "pg", three, four)
    assert first != second
    for topic in (first, second):
        assert len(topic) <= 249
        assert set(topic) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
        )
