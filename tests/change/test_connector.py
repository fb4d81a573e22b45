"""A source of another package has positions, types and names in formats of its own."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pytest

from headrace import plugins
from headrace.change import connector as connectors
from headrace.change.arrow import arrow_type
from headrace.change.arrow.frame import Framing, changes
from headrace.change.arrow.kinds import STRING, Kind, plain
from headrace.change.connector import Connector, DebeziumBlock, position_from_json
from headrace.change.event import Batch, Change, Op, Position, Table
from headrace.change.record import encode, several
from headrace.change.replay import Replay
from headrace.errors import ConfigError
from headrace.formats.canonical import Canonical
from headrace.formats.debezium import Debezium
from headrace.formats.facts import Facts
from headrace.formats.protobuf import Protobuf
from headrace.formats.savegress import Savegress
from headrace.log import Log
from headrace.sources.postgres.position import PostgresPosition
from headrace.sources.sqlite.connector import SqlitePosition
from tests.changes import make_change, make_table


class LedgerPosition(Position, frozen=True, gc=False, tag="ledger"):
    page: int
    line: int = 0

    @property
    def commit(self) -> int:
        return self.page

    @property
    def own(self) -> int:
        return self.line


def kind(type_text: str) -> Kind:
    return Kind(pa.int64(), int, plain) if type_text == "whole" else STRING


LEDGER = Connector(
    name="ledger",
    positions=(LedgerPosition,),
    arrow=f"{__name__}:kind",
    debezium=DebeziumBlock("ledgerdb", members=lambda change: _members(change.position.commit)),
)


def _members(page: int) -> dict[str, int]:
    return {"page": page} if page else {}


class Ledger:
    connector: ClassVar[Connector] = LEDGER


class Books:
    connector: ClassVar[Connector] = Connector(name="library", positions=(LedgerPosition,))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose source is an entry point, and nothing else."""
    entry = EntryPoint("ledger", f"{__name__}:Ledger", plugins.SOURCES)
    found = {group: plugins._installed(group) for group in (plugins.SOURCES, plugins.CONNECTORS)}
    found[plugins.SOURCES] = {**found[plugins.SOURCES], "ledger": [entry]}
    monkeypatch.setattr(plugins, "_installed", found.__getitem__)
    monkeypatch.setattr(connectors, "_known", dict(connectors._known))


def ledger_table(version: int = 0) -> Table:
    return msgspec.structs.replace(make_table(), connector="ledger", version=version)


def ledger_change(**fields: Any) -> Change:
    given: dict[str, Any] = {"table": ledger_table(), "position": LedgerPosition(7, 3)}
    return make_change(Op.INSERT, after={"id": 1}, **given | fields)


@pytest.mark.usefixtures("installed")
class TestInstalled:
    def test_the_log_gives_back_its_changes_among_those_of_others(self, tmp_path: Path) -> None:
        given = [LedgerPosition(7, 3), SqlitePosition(1, 1), PostgresPosition(2, 2, 5)]
        with Log.open(tmp_path / "log") as log:
            for position in given:
                table = log.register(ledger_table())
                change = ledger_change(table=table, position=position)
                log.append("shop", Batch((change,), b"resume"))
            read = list(log.read(0, limit=10))
        assert [change.position for change in read] == given
        records = encode([ledger_change(position=position) for position in given])
        assert [record.position for record in several(b"".join(records), 3)] == given
        assert Replay.of(read).surprises != []  # it is the same row three times

    def test_spark_sees_it_and_gives_it_back(self) -> None:
        table = ledger_table(version=1)
        change = ledger_change(table=table, sequence=1)
        framed = Framing("log", {1: table}).batch(1, 1, encode([change])[0])
        assert framed["position"].to_pylist() == ['{"page":7,"line":3}']
        (back,) = changes(framed)
        assert (back.position, back.id) == (change.position, change.id)
        assert framed["id"].to_pylist() == [change.id]

    def test_every_format_has_it(self) -> None:
        change = ledger_change()
        shown = json.loads(Canonical().encode(change))["position"]
        assert shown == {"page": 7, "line": 3}
        assert position_from_json("ledger", shown) == change.position
        debezium = json.loads(Debezium(Facts()).encode(change) or b"")["source"]
        assert (debezium["connector"], debezium["page"]) == ("ledgerdb", 7)
        assert debezium["sequence"] == '["7","3"]'
        without = ledger_change(position=LedgerPosition(0, 3))
        assert "page" not in json.loads(Debezium(Facts()).encode(without) or b"")["source"]
        assert json.loads(Savegress(Facts()).encode(change) or b"")["position"] == shown
        assert Protobuf(Facts()).encode(change)  # it has no message for this position

    def test_its_types_are_its_own(self) -> None:
        assert arrow_type("whole", "ledger") == pa.int64()
        assert arrow_type("anything else", "ledger") == pa.string()


@pytest.mark.parametrize("type_name", ["ledger", "books"])
def test_a_source_may_have_another_name_than_its_connector_and_its_positions(
    monkeypatch: pytest.MonkeyPatch, type_name: str
) -> None:
    entries = {
        type_name: EntryPoint(type_name, f"{__name__}:Books", plugins.SOURCES),
        "absent": EntryPoint("absent", "nowhere:Absent", plugins.SOURCES),
        "empty": EntryPoint("empty", "builtins:object", plugins.SOURCES),
    }
    found = {group: plugins._installed(group) for group in (plugins.SOURCES, plugins.CONNECTORS)}
    found[plugins.SOURCES] = {name: [entry] for name, entry in entries.items()}
    monkeypatch.setattr(plugins, "_installed", found.__getitem__)
    for name in ("library", "ledger"):
        monkeypatch.setattr(connectors, "_known", {})
        assert connectors.connector(name) is Books.connector
    with pytest.raises(ConfigError, match="no connector called 'books' is installed"):
        connectors.connector("books")


def test_a_connector_that_is_not_installed_is_named() -> None:
    table = ledger_table()
    with pytest.raises(ConfigError, match="no connector called 'ledger' is installed"):
        Debezium(Facts()).encode(ledger_change(table=table))
    record = encode([ledger_change()])[0].replace(b"\xa6ledger", b"\xa6nobody")
    with pytest.raises(ConfigError, match="no connector called 'nobody' is installed"):
        several(record, 1)


@pytest.mark.parametrize("name", ["postgres", "events", "mysql", "sqlite"])
def test_reading_a_log_loads_neither_drivers_nor_arrow(name: str) -> None:
    code = (
        "import sys; from headrace.change.connector import connector; "
        f"connector({name!r}); "
        "print({'psycopg', 'pymysql', 'apsw', 'pyarrow', 'pyspark'} & set(sys.modules) or 'none')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "none"
