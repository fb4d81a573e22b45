"""A history of events: each change in a format, once, exactly as the server would write it."""

import dataclasses
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from pyspark.sql import SparkSession

from headrace.change.arrow.frame import Framing
from headrace.change.event import BeforeKind, Change, Column, Op, Reference, Table
from headrace.change.record import encode
from headrace.config import parse
from headrace.errors import ConfigError, PipelineError
from headrace.formats.catalogue import Formats, names
from headrace.formats.facts import Facts, SourceServer
from headrace.model import Model
from headrace.pipeline.run import PipelineInput, plans
from headrace.run import formats
from headrace.sinks.history import History
from headrace.sinks.lake.shape import FormattedEvents, renderer
from headrace.sinks.status import Progress
from tests.formats import generated
from tests.sinks.archive import Archive, account
from tests.sinks.lake import change, put, remove, schema, truncate

MODEL = Model(tenant="tenant_id")
FORMATS = Formats(Facts(servers=(SourceServer("shop", "db.example"),)), MODEL)
KEPT = tuple(name for name in names() if name != "etl")


@pytest.fixture
def archives(spark: SparkSession, tmp_path: Path) -> Iterator[Any]:
    made: list[Archive] = []

    def archive(**chosen: Any) -> Archive:
        folder = tmp_path / str(len(made))
        made.append(Archive(spark, folder, formats=FORMATS, **chosen))
        return made[-1]

    yield archive
    for each in made:
        each.log.close()


def written(changes: Sequence[Change], epoch: str, name: str) -> list[tuple[int, str]]:
    """What the server of a log makes of its changes, transaction by transaction."""
    render = renderer(FORMATS.of_log(epoch).named(name))
    events: list[tuple[int, str]] = []
    transaction: list[Change] = []
    for each in changes:
        transaction.append(each)
        if each.last:
            events += [(at, event.decode()) for at, event in render(transaction)]
            transaction = []
    return events


def expected(archive: Archive, name: str) -> list[tuple[int, str]]:
    return written(archive.log.read(0, limit=100_000), archive.log.epoch, name)


def stored(archive: Archive) -> list[tuple[int, str]]:
    return [(row["sequence"], row["event"]) for row in archive.stored()]


@pytest.mark.parametrize("name", KEPT)
@given(transaction=generated.transactions())
def test_every_format_writes_what_it_would_write_of_the_log(
    name: str, transaction: list[Change]
) -> None:
    tables = {change.table.version: change.table for change in transaction}
    framing = Framing("epoch-1", tables)
    begin, records = transaction[0].sequence, b"".join(encode(transaction))
    rows = pa.Table.from_batches([framing.batch(begin, len(transaction), records)])
    shape = FormattedEvents(FORMATS, name, "")
    kept = pa.concat_tables(list(shape(rows.to_batches(max_chunksize=2))))
    assert kept.schema == shape.schema
    found = list(zip(kept["sequence"].to_pylist(), kept["event"].to_pylist(), strict=True))
    assert found == written(transaction, "epoch-1", name)
    of_change = {change.sequence: change for change in transaction}
    for row in kept.to_pylist():
        told = of_change[row["sequence"]]
        assert (row["id"], row["op"], row["source"]) == (told.id, told.op, told.table.source)
        assert (row["schema"], row["table"]) == (told.table.schema, told.table.name)
        assert row["epoch"] == "epoch-1"
        assert row["commit_time"].timestamp() == pytest.approx(told.transaction.commit_time / 1e6)
        assert row["day"] == row["commit_time"].date()


@pytest.mark.requirement("S1-40", "S1-41")
def test_changes_in_a_format_are_kept_once_by_tenant_and_day(archives: Any) -> None:
    archive = archives(format="savegress", tenant="tenant_id")
    accounts = archive.table
    archive.commit(schema(accounts))
    archive.commit(put(accounts, **account(1)), put(accounts, **account(2, "other")))
    archive.commit(change(Op.MESSAGE, accounts, after=b'{"text":"savegress does not carry it"}'))
    assert archive.write() == 4
    archive.commit(put(accounts, Op.UPDATE, **account(1, name="b")), remove(accounts, id=2))
    archive.commit(truncate(accounts))
    assert archive.write() == 3
    assert stored(archive) == expected(archive, "savegress")
    assert [row["op"] for row in archive.stored()] == [
        "SCHEMA", "INSERT", "INSERT", "UPDATE", "DELETE", "TRUNCATE"
    ]  # fmt: skip
    assert [row["tenant"] for row in archive.stored()] == [
        None, "acme", "other", "acme", None, None
    ]  # fmt: skip
    kept, version = archive.stored(), archive.version()
    archive.open()  # as after a crash that came before Spark noted the batch as done
    archive.writer.write(archive.changes(4, 7), 1)
    assert (archive.stored(), archive.version()) == (kept, version)
    for at in range(8):
        archive.commit(put(accounts, **account(10 + at)))
        archive.write()
        archive.writer.maintain()
    assert stored(archive) == expected(archive, "savegress")
    files = [uri for uri in DeltaTable(str(archive.path)).file_uris() if "tenant=acme" in uri]
    assert len(files) < 8  # they were joined


def test_a_history_in_another_format_is_refused(archives: Any) -> None:
    archive = archives(format="notification")
    archive.commit(put(archive.table, **account(1)))
    archive.write()
    for format in ("", "savegress"):
        archive.chosen |= {"format": format}
        with pytest.raises(PipelineError, match="made with format: notification") as raised:
            archive.open()
        assert "another path" in raised.value.hint
    archive.chosen |= {"format": "notification"}
    assert archive.open().progress() == Progress(archive.log.epoch, 1, "0")


# --- entities ------------------------------------------------------------------------------------

POSTS = (
    Column("id", "bigint", key=True),
    Column("account", "bigint"),
    Column("tenant_id", "text"),
)


def posts_of(archive: Archive) -> Table:
    """A table that hangs on the archive's other one."""
    bare = Table("shop", "postgres", "postgres:7:shop", "shop", "public", "posts", POSTS)
    reference = Reference(("account",), "public", "accounts", ("id",))
    return archive.log.register(msgspec.structs.replace(bare, references=(reference,)))


def deleted(table: Table, **row: Any) -> Change:
    """A row that is gone, and all of it known."""
    image = msgspec.json.encode(row)
    key = msgspec.json.encode({"id": row["id"]})
    return change(Op.DELETE, table, key=key, before=image, before_kind=BeforeKind.FULL)


def post(number: int, account: int) -> dict[str, Any]:
    return {"id": number, "account": account, "tenant_id": "acme"}


@pytest.mark.requirement("S1-16", "S1-40", "S1-41", "S1-47")
def test_events_of_entities_are_kept_once_by_their_own_tenant(archives: Any) -> None:
    archive = archives(format="entity")
    accounts, posts = archive.table, posts_of(archive)
    archive.commit(schema(accounts), put(accounts, **account(1)), put(accounts, **account(2, "b")))
    archive.commit(*(put(posts, **post(n, 1)) for n in range(3)))
    assert archive.write() == 6
    archive.commit(
        *(deleted(posts, **post(n, 1)) for n in range(3)),
        deleted(accounts, **account(1)),
        put(accounts, Op.UPDATE, **account(2, "b", "new")),
    )
    assert archive.write() == 5
    kept = archive.stored()
    assert stored(archive) == expected(archive, "entity")
    assert [(row["sequence"], row["table"], row["tenant"]) for row in kept[-2:]] == [
        (10, "accounts", "acme"), (11, "accounts", "b")
    ]  # fmt: skip
    assert len(msgspec.json.decode(kept[-2]["event"])["cascade"]["deleted"]) == 3
    assert [row["id"] for row in kept] == [
        msgspec.json.decode(row["event"])["event_id"] for row in kept
    ]
    delta = DeltaTable(str(archive.path))
    assert delta.metadata().partition_columns == ["tenant", "day"]
    version = delta.version()
    archive.open()
    archive.writer.write(archive.changes(6, 11), 1)
    assert (archive.stored(), archive.version()) == (kept, version)


def test_a_transaction_is_whole_in_whatever_ranges_a_batch_is_read(archives: Any) -> None:
    archive = archives(format="entity", tables=("accounts",))
    accounts, posts = archive.table, posts_of(archive)
    for first in range(0, 12_000, 4_000):
        below = [deleted(posts, **post(n, first)) for n in range(first + 1, first + 4_000)]
        archive.commit(*below, deleted(accounts, **account(first)))
    assert archive.changes(0, 12_000).rdd.getNumPartitions() > 1
    assert archive.write() == 12_000
    found = [msgspec.json.decode(row["event"]) for row in archive.stored()]
    assert stored(archive) == expected(archive, "entity")
    assert [len(event["cascade"]["deleted"]) for event in found] == [3_999] * 3


def test_tables_choose_events_and_leave_their_cascades_whole() -> None:
    assert History(name="a", path="a", tables=("accounts",)).whole_transactions is False
    sink = History(name="a", path="a", tables=("accounts",), format="entity")
    assert sink.whole_transactions is True
    accounts = Table(
        "shop", "postgres", "o", "shop", "public", "accounts", (Column("id", "bigint", key=True),),
        version=1,
    )  # fmt: skip
    reference = Reference(("account",), "public", "accounts", ("id",))
    posts = msgspec.structs.replace(
        accounts, name="posts", columns=POSTS, version=2, references=(reference,)
    )
    other = msgspec.structs.replace(posts, name="notes", version=3, references=())
    drafts = [deleted(posts, **post(1, 7)), deleted(accounts, id=7), deleted(other, **post(2, 7))]
    changes = [
        msgspec.structs.replace(each, ordinal=at, sequence=at, last=at == 3)
        for at, each in enumerate(drafts, 1)
    ]
    framing = Framing("e", {1: accounts, 2: posts, 3: other})
    [rows] = sink.shape([framing.batch(1, 3, b"".join(encode(changes)))])
    assert rows["table"].to_pylist() == ["accounts"]
    assert len(msgspec.json.decode(rows["event"][0].as_py())["cascade"]["deleted"]) == 1


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"format": "savegres"}, "format: no format called savegres; did you mean savegress?"),
        ({"format": "etl"}, "format: etl is for streams, in which events may belong to no change"),
        ({"format": "entity", "tenant": "t"}, "tenant: t does not go with format: entity"),
        ({"formats": {}}, "no setting called formats; did you mean format?"),
    ],
)
def test_what_a_history_cannot_keep_is_refused_by_name(
    settings: dict[str, Any], problem: str
) -> None:
    sinks = {"audit": {"type": "history", "path": "audit", **settings}}
    content = {"pipeline": {"url": "http://feed.example", "sinks": sinks}}
    with pytest.raises(ConfigError) as raised:
        parse(content, folder=Path("/srv"), environment={})
    assert str(raised.value).startswith(f"headrace.pipeline.sinks.audit: {problem}")


def test_a_history_is_told_of_servers_and_model(tmp_path: Path) -> None:
    audit = {"type": "history", "path": "a", "format": "entity", "tables": ["public.*"]}
    content = {
        "sources": {"shop": {"type": "postgres", "url": "postgresql://app@db.example/shop"}},
        "model": {"tenant": "tenant_id", "regions": {"shop": "eu"}},
        "cdc": {"exclude_entities": ["Secret"]},
        "pipeline": {"sinks": {"audit": audit}},
    }
    config = parse(content, folder=tmp_path, environment={})
    assert config.pipeline is not None
    feed = PipelineInput(address=config.log_address)
    known = formats(config)
    [plan] = plans(config.pipeline.sinks, feed, checkpoints=tmp_path, formats=known)
    assert isinstance(plan.sink, History)
    assert plan.sink.formats == known
    assert known.facts.server("shop") == SourceServer("shop", host="db.example", region="eu")
    assert known.model.tenant == "tenant_id"
    assert not known.model.selection.includes("Secret")
    assert pickle.loads(pickle.dumps(plan.sink.shape)) == plan.sink.shape
    # Of a transaction it reads what is in other tables as well.
    assert "tables" not in plan._options(None)
    rows = dataclasses.replace(plan, sink=dataclasses.replace(plan.sink, format="canonical"))
    assert rows._options(None)["tables"] == "public.*"
