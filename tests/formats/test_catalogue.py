"""Every format is found by its name."""

import json
import pickle
from typing import Any

import pytest

from headrace.change.event import Op
from headrace.errors import ConfigError
from headrace.formats import Changefeed
from headrace.formats.catalogue import Formats, names, schemas
from headrace.formats.cloudevents import CloudEvents
from headrace.formats.facts import Facts, SourceServer
from headrace.formats.savegress import Savegress, SavegressTransactions
from headrace.formats.timestamps import iso, second
from tests.changes import make_change

FACTS = Facts("1", (SourceServer("shop", host="db.example.com"),))


@pytest.mark.parametrize("name", names())
def test_a_format_has_the_name_it_is_found_by(name: str) -> None:
    assert Formats(FACTS).named(name).name == name


@pytest.mark.parametrize("name", names())
def test_a_format_is_made_once_and_equals_that_of_another_process(name: str) -> None:
    formats = Formats(FACTS)
    assert formats.named(name) is formats.named(name)
    there = pickle.loads(pickle.dumps(formats))
    assert there == formats
    assert there.named(name) == formats.named(name)
    assert hash(there.named(name)) == hash(formats.named(name))


def test_wishes_reach_the_formats_that_know_them() -> None:
    formats, include = Formats(FACTS), frozenset({Op.TRUNCATE})
    assert formats.named("changefeed", include=include) == Changefeed(include)
    assert formats.named("changefeed") == Changefeed()
    assert formats.named("savegress") == Savegress(FACTS)
    assert formats.named("savegress", markers=True) == SavegressTransactions(FACTS)


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"no format called 'avro'; there are: canonical, .*etl"):
        Formats().named("avro")


def test_a_log_has_one_id_in_every_format() -> None:
    formats = Formats().of_log("6f1c2a9d04be4f0c8e1d5a7b93c2e6f4")
    change = make_change(after={"id": "1"})

    def event(name: str) -> Any:
        format = formats.named(name)
        assert isinstance(format, CloudEvents | Savegress)
        return json.loads(format.encode(change) or b"")

    assert event("cloudevents")["source"] == "/headrace/6f1c2a9d04be/shop"
    assert event("savegress")["metadata"]["pipeline_id"] == "pipe-6f1c2a9d04be"


def test_streams_with_marks_share_what_they_have_worked_out() -> None:
    format = Formats(FACTS).named("savegress", markers=True)
    assert isinstance(format, SavegressTransactions)
    assert format.open().format is format.open().format
    again = pickle.loads(pickle.dumps(format))
    assert again.open().format == format.open().format


def test_a_second_is_worked_out_once() -> None:
    second.cache_clear()
    times = [iso(1_736_937_000_000_000 + rest) for rest in (0, 1, 999_999)]
    assert times == [f"2025-01-15T10:30:00.{rest}Z" for rest in ("000000", "000001", "999999")]
    assert iso(-1) == "1969-12-31T23:59:59.999999Z"
    assert second.cache_info().misses == 2


def test_schemas_have_the_names_of_formats() -> None:
    assert {f"{name}.json" for name in names()} <= schemas().keys()
