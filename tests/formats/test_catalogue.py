"""Every format is found by its name."""

import pickle

import pytest

from headrace.errors import ConfigError
from headrace.event import Op
from headrace.formats import Changefeed
from headrace.formats.catalogue import NAMES, Formats, schemas
from headrace.formats.facts import Facts, Server
from headrace.formats.savegress import Savegress, SavegressTransactions

FACTS = Facts("pipe-1", (Server("shop", host="db.example.com"),))


@pytest.mark.parametrize("name", NAMES)
def test_a_format_has_the_name_it_is_found_by(name: str) -> None:
    assert Formats(FACTS).named(name).name == name


@pytest.mark.parametrize("name", NAMES)
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


def test_schemas_have_the_names_of_formats() -> None:
    assert {f"{name}.json" for name in NAMES} <= schemas().keys()
