"""Transforms that Spark computes, in a running pipeline, in a history, in `check` and `preview`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import QueryProgressEvent, StreamingQueryListener

from headrace.change.event import Column, Op, Table
from headrace.errors import ConfigError
from headrace.pipeline import shaping
from headrace.pipeline.computed import check_computed
from headrace.pipeline.options import Options
from headrace.pipeline.preview import preview
from headrace.pipeline.remote import reading
from headrace.pipeline.verify import verify
from headrace.sinks import SinkPhase
from headrace.sinks.files.sink import Files
from headrace.sinks.history import History
from headrace.sinks.tables.sink import Tables
from headrace.sources.mysql.position import MysqlPosition
from headrace.testing import wait_until
from headrace.transforms.rules import TableTransform
from tests.changes import make_change
from tests.deltas import stored
from tests.pipeline.sites import Site
from tests.sinks.socket_sink import Courier, opened_office

ITEMS = Table("shop", "mysql", "mysql:1", "shop", "shop", "items", (Column("id", "int", key=True),))
OTHERS = TableTransform(sql="SELECT * FROM changes")
LOUD = "SELECT _sequence, id, upper(name) AS name FROM changes WHERE name <> 'hidden'"


@pytest.fixture
def site(tmp_path: Path, spark: SparkSession) -> Site:
    return Site(tmp_path, spark)


class InputRows(StreamingQueryListener):
    """The changes that batches had, as Spark's progress counts them."""

    def __init__(self, spark: SparkSession) -> None:
        self._streams = spark.streams
        self.counts: list[int] = []

    def __enter__(self) -> "InputRows":
        self._streams.addListener(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.removeListener(self)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        self.counts.append(event.progress.numInputRows)

    def onQueryStarted(self, event: object) -> None:  # noqa: N802
        pass

    def onQueryIdle(self, event: object) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: object) -> None:  # noqa: N802
        pass

    def wait(self, count: int) -> list[int]:
        """The first so many; Spark reports them some time after the batch."""
        wait_until(lambda: len(self.counts) >= count, message="Spark reports its progress")
        return self.counts


def loud(sql: str = LOUD) -> dict[str, TableTransform]:
    return {"public.users": TableTransform(sql=sql)}


def test_a_pipeline_stores_what_the_statement_makes_of_the_log(site: Site) -> None:
    lake = Tables(name="lake", path=str(site.folder / "lake"), transforms=loud())
    with site.writing() as writer:
        writer.put("users", "1", name="ann")
        writer.put("users", "2", name="hidden")
        writer.put("other", "3", name="bob")
    with InputRows(site.spark) as rows:
        site.once(lake)
        with site.writing() as writer:
            writer.put("users", "1", Op.UPDATE, name="eve")
            writer.put("users", "2", Op.UPDATE, name="joe")
        status = site.once(lake)["lake"]
        assert rows.wait(2) == [3, 2]
    assert (status.phase, status.failed_tables) == (SinkPhase.STOPPED, ())
    assert _rows(site, "lake/public/users", "id", "name") == [("1", "EVE"), ("2", "JOE")]
    assert _rows(site, "lake/public/other", "id", "name") == [("3", "bob")]


def test_a_history_keeps_what_the_statement_makes_of_each_change(site: Site) -> None:
    audit = History(name="audit", path=str(site.folder / "audit"), transforms=loud())
    with site.writing() as writer:
        writer.put("users", "1", name="ann")
        writer.put("users", "2", name="hidden")
        writer.put("other", "3", name="bob")
        writer.put("users", "1", Op.UPDATE, name="hidden")
        writer.delete("users", "1")
    with InputRows(site.spark) as rows:
        site.once(audit)
        assert rows.wait(1) == [5]
    shown = _rows(site, "audit", "sequence", "op", "key", "before", "after")
    assert shown == [
        (1, "INSERT", '{"id":"1"}', None, '{"id":"1","name":"ANN"}'),
        (3, "INSERT", '{"id":"3"}', None, '{"id":"3","name":"bob"}'),
        (4, "DELETE", '{"id":"1"}', '{"id":"1"}', None),
        (5, "DELETE", '{"id":"1"}', '{"id":"1"}', None),
    ]


def _rows(site: Site, folder: str, *columns: str) -> list[tuple[Any, ...]]:
    rows = stored(DeltaTable(str(site.folder / folder))).select(list(columns))
    return sorted(tuple(row.values()) for row in rows.to_pylist())


def test_files_have_computed_events_in_the_order_of_the_log(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shaping, "_PART", 4)  # so that several tasks write
    rules = {**loud(), "shop.items": TableTransform(sql="SELECT *, id * 2 AS twice FROM changes")}
    trail = Files(name="trail", path=str(site.folder / "trail"), transforms=rules)
    audit = History(
        name="audit", path=str(site.folder / "audit"), format="debezium", transforms=rules
    )
    with site.writing() as writer:
        for number in range(1, 7):
            writer.put("users", f"{number}", name="hidden" if number == 2 else "ann")
            writer.put("other", f"{number}", name="bob")
        writer.put("users", "1", Op.UPDATE, name="hidden")
        position = MysqlPosition("bin.000001", 120, "", 4)
        items = writer.log.register(ITEMS)
        row: Any = {"table": items, "key": {"id": 1}, "after": {"id": 1}}
        writer.append([make_change(**row, position=position)])
    site.once(trail, audit)

    files = sorted((site.folder / "trail").glob("day=*/*.jsonl"), key=lambda path: path.name)
    assert len(files) > 1
    events = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    shown = [(each["source"], each["operation"], each["after"]) for each in events]
    ann = [("postgres", "INSERT", {"id": f"{number}", "name": "ANN"}) for number in range(1, 7)]
    bob = [("postgres", "INSERT", {"id": f"{number}", "name": "bob"}) for number in range(1, 7)]
    woven = [each for pair in zip(ann, bob, strict=True) for each in pair if each != ann[1]]
    last = ("mysql", "INSERT", {"id": 1, "twice": 2})
    assert shown == [*woven, ("postgres", "DELETE", None), last]
    kept = [json.loads(event) for _, event in _rows(site, "audit", "sequence", "event")]
    assert [each["after"] for each in kept] == [each["after"] for each in events]
    assert (kept[-1]["source"]["connector"], kept[-1]["source"]["file"]) == ("mysql", "bin.000001")

    found = verify(trail, {"path": str(site.log)}, lambda *_: None, session=lambda: opened(site))
    assert (found.expected, found.sent, found.missing, found.surplus) == (13, 13, [], [])


@contextmanager
def opened(site: Site) -> Iterator[SparkSession]:
    yield site.spark


def test_sinks_of_events_halt_where_the_statement_fails(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with site.writing() as writer:
        writer.put("users", "1", name="unspeakable-4711")
        writer.put("other", "1", name="ann")
    rule = {**loud("SELECT *, CAST(name AS INT) AS number FROM changes"), "*": OTHERS}
    with opened_office() as office:
        post = Courier(name="post", port=office.port, transforms=rule)
        trail = Files(name="trail", path=str(site.folder / "trail"), transforms=rule)
        statuses = site.once(post, trail)
    for name, status in statuses.items():
        assert status.phase is SinkPhase.HALTED
        assert status.error == f"{name}.transforms.public.users: sql: CAST_INVALID_INPUT"
        assert status.hint.endswith("then the sink goes on from here.")
    assert not office.tried
    assert not list((site.folder / "trail").glob("day=*"))
    assert "unspeakable" not in caplog.text


@pytest.mark.parametrize(
    "made", [partial(Files, path="f"), partial(History, path="h"), partial(Courier, port=1)]
)
def test_sinks_whose_format_needs_whole_transactions_take_none(made: Any) -> None:
    said = "transforms.public.users: sql and function do not go with format: entity"
    with pytest.raises(ConfigError, match=said):
        made(name="f", format="entity", transforms=loud())


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"sql": "DROP TABLE changes"}, "sql is a query: it begins with SELECT, WITH or FROM"),
        ({"sql": LOUD, "where": "id > 1"}, "a transform is select, mask and where, or sql, or"),
        ({"sql": LOUD, "function": "a:b"}, "a transform is select, mask and where, or sql, or"),
        ({"function": "shop.rules"}, "function must be module:name, not shop.rules"),
    ],
)
def test_what_cannot_be_meant_is_refused(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TableTransform(**rule)


USERS = Table(
    "shop",
    "postgres",
    "origin",
    "shop",
    "public",
    "users",
    (Column("id", "bigint", key=True), Column("name", "text"), Column("at", "timestamptz")),
)


def test_check_shows_the_columns_that_come_out(spark: SparkSession) -> None:
    sinks = [
        Tables(name="good", path="x", transforms=loud()),
        Tables(name="bad", path="x", transforms=loud("SELECT nmae FROM changes")),
        Tables(name="lost", path="x", transforms={"*": TableTransform(function="no_such:rule")}),
        Tables(name="plain", path="x"),
    ]

    @contextmanager
    def session() -> Iterator[SparkSession]:
        yield spark

    good, bad, lost = check_computed(sinks, [USERS], session)
    assert (good.name, good.ok) == ("good: public.users", True)
    assert good.detail == "id bigint, name text"
    assert not bad.ok
    assert bad.detail.startswith("bad.transforms.public.users: sql: [UNRESOLVED_COLUMN")
    assert lost.detail == (
        "lost.transforms.* (public.users): function: no_such:rule cannot be imported: No module "
        "named 'no_such'"
    )
    assert lost.fix.startswith("Install its package")


def test_preview_shows_the_newest_rows_that_come_out(site: Site) -> None:
    lake = Tables(name="lake", path="lake", transforms=loud())
    with site.writing() as writer:
        for number in range(5):
            writer.put("users", f"{number}", name="hidden" if number == 3 else f"n{number}")
    address = {"path": str(site.log)}

    @contextmanager
    def session() -> Iterator[SparkSession]:
        yield site.spark

    found = preview(
        lake,
        reading(Options.read(address)),
        "users",
        limit=2,
        address=address,
        session=session,
    )
    assert found.columns == {"id": "text", "name": "text"}
    assert json.dumps(found.rows) == json.dumps(
        [
            {"op": "INSERT", "sequence": 3, "id": "2", "name": "N2"},
            {"op": "INSERT", "sequence": 5, "id": "4", "name": "N4"},
        ]
    )
