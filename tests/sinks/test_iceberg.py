"""The Iceberg history: every change once, in a table for each table of the source."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.types import LongType
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from headrace.change.arrow.frame import FIELDS
from headrace.change.arrow.frame import schema as frame_schema
from headrace.change.event import Column, Op
from headrace.errors import (
    ConfigError,
    LogReplaced,
    PipelineError,
    SinkFenced,
    SinkRefused,
    SinkUnavailable,
)
from headrace.pipeline.shaping import shaped_rows
from headrace.secret import Secret
from headrace.sinks import Progress
from headrace.sinks.iceberg import IcebergHistory
from headrace.sinks.iceberg.ledger import IcebergLedger
from headrace.sinks.iceberg.table import IcebergTable
from headrace.sinks.push.routing import Template
from headrace.testing import free_port
from headrace.testing.iceberg import IcebergServer
from headrace.transforms import TableTransform
from tests.sinks.archive import ACCOUNTS, account
from tests.sinks.icebergs import Glacier, LocalRows
from tests.sinks.lake import change, put, remove, schema, truncate


@pytest.fixture
def glacier(tmp_path: Path, iceberg_server: IcebergServer) -> Iterator[Glacier]:
    made = Glacier(tmp_path, iceberg_server)
    yield made
    made.log.close()


def settings(**chosen: Any) -> IcebergHistory:
    return IcebergHistory(**{"name": "audit", "uri": "http://c", "namespace": "n"} | chosen)


# --- what is kept --------------------------------------------------------------------------------


def test_every_change_is_kept_as_in_a_delta_history_and_with_typed_columns(
    glacier: Glacier,
) -> None:
    accounts = glacier.table
    glacier.commit(schema(accounts))
    glacier.commit(put(accounts, **account(1)), put(accounts, **account(2)))
    assert glacier.write() == 3
    glacier.commit(put(accounts, Op.UPDATE, **account(1, name="b")), remove(accounts, id=2))
    glacier.commit(change(Op.MESSAGE, accounts, after=b'{"error":"bad bytes"}'))
    glacier.commit(truncate(accounts))
    assert glacier.write() == 4
    given = glacier.given()
    found = glacier.rows()
    assert [{name: row[name] for name in FIELDS} for row in found] == given
    assert [row["commit_time"] for row in found] == [
        row["transaction"]["commit_time"] for row in given
    ]
    assert [row["row"] for row in found] == [
        None,
        account(1),
        account(2),
        account(1, name="b"),
        {"id": 2, "tenant_id": None, "name": None},
        None,
        None,
    ]
    assert glacier.snapshots() == 2


def test_each_table_has_a_history_of_its_own(glacier: Glacier) -> None:
    first, second = glacier.table, glacier.other("order items", ACCOUNTS)
    glacier.commit(put(first, **account(1)), put(second, **account(7)))
    glacier.write()
    names = {name for _, name in glacier.catalog.list_tables(glacier.namespace)}
    assert names == {"public_accounts", "public_order-20items", "headrace_audit"}
    assert glacier.sequences("public_order-20items") == [2]
    assert glacier.iceberg("headrace_audit").scan().count() == 0


def test_the_ledger_is_saved_once_for_all_new_tables_of_a_batch(glacier: Glacier) -> None:
    names = [f"t{number}" for number in range(10)]
    for name in names:
        glacier.commit(put(glacier.other(name, ACCOUNTS), **account(1)))
    glacier.write()
    assert [len(glacier.sequences(f"public_{name}")) for name in names] == [1] * 10
    # It is made with the names, and changed once, when the batch is stored.
    assert len(glacier.iceberg("headrace_audit").metadata.metadata_log) == 1


def test_rows_that_spark_computes_are_kept_with_the_types_that_come_out(
    tmp_path: Path, iceberg_server: IcebergServer, spark: SparkSession
) -> None:
    statement = "SELECT _sequence, id, length(name) AS long FROM changes WHERE name <> 'hidden'"
    rule = TableTransform(sql=statement)
    glacier = Glacier(tmp_path, iceberg_server, transforms={"public.accounts": rule})
    accounts = glacier.table
    glacier.commit(put(accounts, **account(1, name="abc")), put(accounts, **account(2)))
    glacier.commit(put(accounts, Op.UPDATE, **account(2, name="hidden")))
    changes = spark.read.format("headrace").option("path", str(glacier.log.path)).load()
    with shaped_rows(changes, glacier.sink_with()) as rows:
        assert glacier.open().write(rows, 0) == 3
    found = [(row["op"], row["row"]) for row in glacier.rows()]
    assert found == [
        ("INSERT", {"id": 1, "long": 3}),
        ("INSERT", {"id": 2, "long": len(account(2)["name"])}),
        ("DELETE", {"id": 2, "long": None}),
    ]


def test_a_tenant_is_a_column_that_tables_can_be_partitioned_by(
    tmp_path: Path, iceberg_server: IcebergServer
) -> None:
    glacier = Glacier(
        tmp_path, iceberg_server, tenant="tenant_id", partition_by=("tenant", "day(commit_time)")
    )
    glacier.commit(put(glacier.table, **account(1)), put(glacier.table, **account(2, "a/b ü")))
    glacier.commit(put(glacier.table, **account(3, None)))
    glacier.write()
    assert [row["tenant"] for row in glacier.rows()] == ["acme", "a/b ü", None]
    assert len(list(glacier.iceberg().scan(row_filter="tenant = 'acme'").plan_files())) == 1
    glacier.log.close()


# --- exactly once --------------------------------------------------------------------------------


def test_a_batch_that_comes_again_changes_nothing(glacier: Glacier) -> None:
    glacier.commit(put(glacier.table, **account(1)), put(glacier.table, **account(2)))
    glacier.write()
    before, files = glacier.iceberg().metadata, glacier.files()
    # The commit is there, but the ledger was not told: as when the driver is killed in between.
    ledger = glacier.iceberg("headrace_audit").transaction()
    ledger.set_properties({"headrace.sequence": "0", "headrace.epoch": ""})
    ledger.commit_transaction()
    glacier.open()
    assert glacier.writer.progress() is None
    glacier.writer.write(glacier.changes(0, 2), 0)
    assert glacier.iceberg().metadata == before
    assert glacier.files() == files
    assert glacier.writer.progress() == Progress(glacier.log.epoch, 2)
    glacier.commit(put(glacier.table, **account(3)))
    glacier.writer.write(glacier.changes(1, 3), 1)  # some of it is there, some is not
    assert glacier.sequences() == [1, 2, 3]


def test_a_snapshot_says_which_changes_the_table_has(glacier: Glacier) -> None:
    glacier.commit(put(glacier.table, **account(1)), put(glacier.table, **account(2)))
    glacier.write()
    snapshot = glacier.iceberg().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    found = snapshot.summary.additional_properties
    assert {name: value for name, value in found.items() if name.startswith("headrace.")} == {
        "headrace.writer": "query-1",
        "headrace.batch": "0",
        "headrace.epoch": glacier.log.epoch,
        "headrace.sequence": "2",
    }


def test_an_attempt_that_goes_on_after_its_batch_was_committed_harms_no_file(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    glacier.commit(put(glacier.table, **account(2)))
    real = LocalRows.mapInArrow
    late: list[Callable[[], object]] = []

    def attempts(self: LocalRows, task: Any, schema: str) -> LocalRows:
        late.append(lambda: real(self, task, schema))
        return real(self, task, schema)

    with monkeypatch.context() as patched:
        patched.setattr(LocalRows, "mapInArrow", attempts)
        glacier.write()
    before = {path: path.stat().st_mtime_ns for path in glacier.files()}
    [again] = late
    again()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(glacier.files()) == len(before) + 1  # and is in no snapshot
    assert glacier.sequences() == [1, 2]


def test_files_that_cannot_be_committed_are_deleted(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = (Column("id", "integer", key=True),)
    glacier.commit(put(glacier.other("t", old), id=1))
    glacier.write()
    # The first half of the batch is written before the other shows that a column is missing.
    glacier.commit(put(glacier.other("t", old), id=2))
    glacier.commit(put(glacier.other("t", (*old, Column("tags", "text"))), id=3, tags="a"))
    glacier.write()
    assert glacier.sequences("public_t") == [1, 2, 3]
    assert len(glacier.files()) == len(list(glacier.iceberg("public_t").scan().plan_files()))
    first, real = glacier.writer, IcebergTable._add

    def too_late(self: IcebergTable, *arguments: Any) -> None:
        monkeypatch.undo()
        glacier.open("query-2", adopt=True)
        real(self, *arguments)

    files = glacier.files()
    glacier.commit(put(glacier.other("t", old), id=4))
    monkeypatch.setattr(IcebergTable, "_add", too_late)
    with pytest.raises(SinkFenced):
        first.write(glacier.changes(3, 4), 2)
    assert glacier.files() == files


def test_another_writer_s_commit_in_between_is_kept_and_ours_tried_again(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    real = IcebergTable._add
    tries: list[int] = []

    def first_another(self: IcebergTable, *arguments: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            table = glacier.iceberg()
            table.append(table.scan().to_arrow().slice(0, 1))
        real(self, *arguments)

    monkeypatch.setattr(IcebergTable, "_add", first_another)
    glacier.commit(put(glacier.table, **account(2)))
    glacier.write()
    assert len(tries) == 2
    assert glacier.sequences() == [1, 1, 2]  # the other one's row among them


def test_a_part_of_a_batch_that_a_copy_of_the_query_has_committed_is_not_added_again(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    for number in (2, 3):
        glacier.commit(put(glacier.table, **account(number)))
    first, real = glacier.writer, IcebergTable._add
    copies: list[int] = []

    def too_late(self: IcebergTable, *arguments: Any) -> None:
        if not copies:  # while the first one's tasks have written
            copies.append(1)
            glacier.open().write(glacier.changes(1, 2), 1)
        real(self, *arguments)

    monkeypatch.setattr(IcebergTable, "_add", too_late)
    with pytest.raises(SinkUnavailable, match="a part of the batch"):
        first.write(glacier.changes(1, 3), 1)
    assert glacier.sequences() == [1, 2]
    glacier.open().write(glacier.changes(1, 3), 1)
    assert glacier.sequences() == [1, 2, 3]


def test_a_commit_whose_answer_was_lost_is_not_repeated(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    real = IcebergTable._add

    def deaf(self: IcebergTable, *arguments: Any) -> None:
        real(self, *arguments)
        raise ConnectionResetError("no answer")

    monkeypatch.setattr(IcebergTable, "_add", deaf)
    glacier.write()
    assert glacier.sequences() == [1]
    assert glacier.snapshots() == 1


def test_a_commit_that_a_proxy_has_sent_twice_keeps_its_manifests(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    real = RestCatalog.commit_table

    def twice(self: RestCatalog, *arguments: Any, **named: Any) -> Any:
        real(self, *arguments, **named)
        return real(self, *arguments, **named)  # refused: the first was done

    glacier.commit(put(glacier.table, **account(2)))
    with monkeypatch.context() as patched:
        patched.setattr(RestCatalog, "commit_table", twice)
        glacier.writer.write(glacier.changes(1, 2), 1)
    assert glacier.sequences() == [1, 2]
    assert glacier.snapshots() == 2


def test_a_query_that_another_has_taken_over_from_commits_nothing(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    first = glacier.writer
    real = IcebergTable._add
    taken: list[int] = []

    def too_late(self: IcebergTable, *arguments: Any) -> None:
        if not taken:  # while its tasks have written, and just before it commits
            taken.append(1)
            glacier.open("query-2", adopt=True)
        real(self, *arguments)

    monkeypatch.setattr(IcebergTable, "_add", too_late)
    glacier.commit(put(glacier.table, **account(2)))
    with pytest.raises(SinkFenced, match="another pipeline"):
        first.write(glacier.changes(1, 2), 1)
    assert glacier.sequences() == [1]
    glacier.writer.write(glacier.changes(0, 2), 0)
    assert glacier.sequences() == [1, 2]
    with pytest.raises(SinkFenced):
        first.write(glacier.changes(1, 2), 1)


def test_a_query_that_was_taken_over_from_neither_adds_columns_nor_appends_as_the_other(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (
        (Column("id", "integer", key=True),),
        (
            Column("id", "integer", key=True),
            Column("tags", "text"),
        ),
    )
    glacier.commit(put(glacier.other("t", old), id=1))
    glacier.write()
    first = glacier.writer
    real = IcebergTable.follow

    def late(self: IcebergTable, *arguments: Any) -> None:
        glacier.open("query-2", adopt=True)  # while the first one's tasks have read its batch
        real(self, *arguments)

    glacier.commit(put(glacier.other("t", new), id=2, tags="a"))
    with monkeypatch.context() as patched:
        patched.setattr(IcebergTable, "follow", late)
        with pytest.raises(SinkFenced, match="another pipeline"):
            first.write(glacier.changes(1, 2), 1)
    assert glacier.sequences("public_t") == [1]
    assert "row.tags" not in glacier.iceberg("public_t").schema().column_names
    glacier.writer.write(glacier.changes(0, 2), 0)
    assert glacier.sequences("public_t") == [1, 2]


def test_the_tables_of_a_history_without_its_ledger_are_adopted_with_it(glacier: Glacier) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    first = glacier.writer
    glacier.catalog.drop_table((glacier.namespace, "headrace_audit"))
    glacier.commit(put(glacier.table, **account(2)))
    glacier.open("query-2")
    with pytest.raises(SinkFenced, match="another pipeline"):
        glacier.writer.write(glacier.changes(0, 2), 0)
    glacier.catalog.drop_table((glacier.namespace, "headrace_audit"))
    glacier.open("query-2", adopt=True)
    glacier.writer.write(glacier.changes(0, 2), 0)
    assert glacier.iceberg().properties["headrace.writer"] == "query-2"
    assert glacier.sequences() == [1, 2]
    with pytest.raises(SinkFenced):
        first.write(glacier.changes(1, 2), 1)


def test_a_query_that_was_taken_over_from_cannot_save_its_progress(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    first, real = glacier.writer, RestCatalog.load_table
    appended: list[object] = []

    def late(self: RestCatalog, name: Any) -> Any:
        loaded = real(self, name)
        if appended and name[-1] == "headrace_audit":
            appended.clear()
            glacier.open("query-2", adopt=True)  # after the first one has read the ledger
        return loaded

    glacier.commit(put(glacier.table, **account(2)))
    with monkeypatch.context() as patched:
        patched.setattr(RestCatalog, "load_table", late)
        patched.setattr(IcebergTable, "append", lambda *_: appended.append(1))
        with pytest.raises(SinkUnavailable):
            first.write(glacier.changes(1, 2), 1)
    assert glacier.iceberg("headrace_audit").properties["headrace.writer"] == "query-2"
    assert glacier.iceberg("headrace_audit").properties["headrace.sequence"] == "1"
    assert glacier.iceberg("headrace_audit").scan().count() == 0
    with pytest.raises(SinkFenced):
        glacier.open("query-1")


def test_what_a_query_notes_while_another_takes_over_is_kept(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    first, real = glacier.writer, IcebergLedger.take_over
    glacier.commit(put(glacier.other("t", ACCOUNTS), **account(2)))

    def late(self: IcebergLedger, writer: str) -> None:
        first.write(glacier.changes(1, 2), 1)  # after the second one has read the ledger
        real(self, writer)

    with monkeypatch.context() as patched:
        patched.setattr(IcebergLedger, "take_over", late)
        second = glacier.open("query-2", adopt=True)
    assert second.progress() == Progress(glacier.log.epoch, 2)
    assert glacier.iceberg("public_t").properties["headrace.writer"] == "query-2"


def test_of_two_queries_that_begin_at_once_one_is_refused(glacier: Glacier) -> None:
    first, second = glacier.open("query-1"), glacier.open("query-2")
    glacier.commit(put(glacier.table, **account(1)))
    real = IcebergLedger.save

    def late(self: IcebergLedger) -> None:
        patched.undo()
        first.write(glacier.changes(0, 1), 0)
        real(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(IcebergLedger, "save", late)
        with pytest.raises(SinkUnavailable, match="another pipeline has just begun"):
            second.write(glacier.changes(0, 1), 0)
    with pytest.raises(SinkFenced):
        glacier.open("query-2")
    assert glacier.sequences() == [1]


def test_the_history_of_two_logs_is_told_apart_by_epoch(glacier: Glacier) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    first = glacier.log.epoch
    glacier.replace_log("log-2")
    glacier.commit(put(glacier.table, **account(1)))
    with pytest.raises(LogReplaced, match="another log"):
        glacier.write()
    glacier.open("query-2", adopt=True)
    glacier.batches = 0
    glacier.write()
    second = glacier.log.epoch
    glacier.replace_log("log")  # and back again
    glacier.commit(put(glacier.table, **account(5)))
    glacier.open("query-3", adopt=True)
    glacier.write()
    found = sorted((row["epoch"], row["sequence"]) for row in glacier.rows())
    assert found == sorted([(first, 1), (first, 2), (second, 1)])


def test_a_restored_log_goes_on_where_the_tables_are(glacier: Glacier) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    glacier.writer.continue_in("restored", 5)
    assert glacier.open().progress() == Progress("restored", 1)
    with pytest.raises(LogReplaced, match="beyond 0"):
        glacier.writer.continue_in("another", 0)


def test_a_restored_log_that_ends_before_a_table_does_is_refused_and_nothing_marked(
    glacier: Glacier,
) -> None:
    other = glacier.other("t", ACCOUNTS)
    glacier.commit(put(glacier.table, **account(1)), put(other, **account(2)))
    glacier.write()
    ledger = glacier.iceberg("headrace_audit").transaction()
    ledger.set_properties({"headrace.sequence": "1"})  # as if killed before the ledger was saved
    ledger.commit_transaction()
    before = glacier.iceberg().metadata
    glacier.open()
    with pytest.raises(LogReplaced, match="beyond 1"):
        glacier.writer.continue_in("restored", 1)
    assert glacier.iceberg().metadata == before
    glacier.writer.continue_in("restored", 2)
    assert glacier.iceberg("public_t").properties["headrace.epoch"] == "restored"


def test_a_history_that_is_deleted_is_not_begun_anew_in_silence(glacier: Glacier) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    for name in glacier.catalog.list_tables(glacier.namespace):
        glacier.catalog.drop_table(name)
    glacier.commit(put(glacier.table, **account(2)))
    glacier.open()
    with pytest.raises(PipelineError, match="gone") as raised:
        glacier.write()
    assert "--adopt audit" in raised.value.hint


def test_one_table_that_is_dropped_is_not_begun_anew_in_silence(glacier: Glacier) -> None:
    other = glacier.other("t", ACCOUNTS)
    glacier.commit(put(glacier.table, **account(1)), put(other, **account(2)))
    glacier.write()
    glacier.catalog.drop_table((glacier.namespace, "public_t"))
    for number in (3, 4):
        glacier.open()
        glacier.commit(put(glacier.table, **account(number)), put(other, **account(number)))
        glacier.write()
        [failed] = glacier.writer.failed_tables()
        assert (failed.table, failed.sequence) == ("public.t", 3)
        assert f"{glacier.namespace}.public_t is gone" in failed.reason
        assert "--adopt audit" in failed.hint
    assert glacier.sequences() == [1, 3, 5]
    names = {name for _, name in glacier.catalog.list_tables(glacier.namespace)}
    assert "public_t" not in names
    glacier.open("query-2", adopt=True)
    assert glacier.writer.failed_tables() == []
    glacier.commit(put(other, **account(5)))
    glacier.write()
    assert glacier.sequences("public_t") == [7]


def test_a_table_that_was_noted_but_not_made_is_made_with_the_next_try(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()

    def dies(*_: object) -> None:
        raise SinkUnavailable("killed before the table is made")

    glacier.commit(put(glacier.other("t", ACCOUNTS), **account(2)))
    with monkeypatch.context() as patched:
        patched.setattr(IcebergTable, "create", dies)
        with pytest.raises(SinkUnavailable):
            glacier.write()
    glacier.open().write(glacier.changes(1, 2), 1)
    assert glacier.writer.failed_tables() == []
    assert glacier.sequences("public_t") == [2]


def test_a_table_that_is_dropped_before_a_reset_begins_anew(glacier: Glacier) -> None:
    other = glacier.other("t", ACCOUNTS)
    glacier.commit(put(glacier.table, **account(1)), put(other, **account(2)))
    glacier.write()
    glacier.catalog.drop_table((glacier.namespace, "public_t"))
    glacier.sink_with().reset("query-2")
    glacier.open("query-2").write(glacier.changes(0, 1), 0)
    glacier.open("query-2").write(glacier.changes(1, 2), 1)
    assert glacier.writer.failed_tables() == []
    assert glacier.sequences("public_t") == [2]


def test_a_reset_empties_the_tables_and_they_are_filled_again(glacier: Glacier) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    sink = glacier.sink_with()
    assert "empties the Iceberg tables of audit" in sink.reset_effect()
    for _ in range(2):  # one that was interrupted comes again
        sink.reset("query-2")
        assert glacier.sequences() == []
    glacier.open("query-2")
    glacier.written = glacier.batches = 0
    glacier.write()
    assert glacier.sequences() == [1]


# --- columns that change -------------------------------------------------------------------------


def test_columns_are_added_and_types_promoted_and_old_rows_stay(glacier: Glacier) -> None:
    old = (Column("id", "integer", key=True), Column("price", "numeric(6,2)"), Column("x", "real"))
    new = (
        Column("id", "bigint", key=True),
        Column("price", "numeric(12,2)"),
        Column("tags", "integer[]"),
        Column("x", "double precision"),
    )
    glacier.commit(put(glacier.other("t", old), id=1, price="1.50", x=0.5))
    glacier.write()
    ids = {each.name: each.field_id for each in glacier.iceberg("public_t").schema().fields}
    table = glacier.other("t", new)
    glacier.commit(schema(table), put(table, id=2**40, price="1234567890.12", tags=[1], x=0.1))
    # A column that the source does not have any more stays, and is null.
    glacier.commit(put(glacier.other("t", new[:1]), id=3))
    glacier.write()
    found = glacier.iceberg("public_t")
    assert isinstance(found.schema().find_type("row.id"), LongType)
    assert {each.name: each.field_id for each in found.schema().fields} == ids
    assert [row["row"] and row["row"]["id"] for row in glacier.rows("public_t")] == [
        1, None, 2**40, 3
    ]  # fmt: skip
    rows = [row["row"] for row in glacier.rows("public_t")]
    assert [row and str(row["price"]) for row in rows] == ["1.50", None, "1234567890.12", "None"]
    assert rows[2]["tags"] == [1]
    assert rows[0]["tags"] is None
    assert glacier.writer.failed_tables() == []


def test_a_type_that_iceberg_does_not_promote_fails_its_table_alone(glacier: Glacier) -> None:
    before = (Column("id", "bigint", key=True), Column("v", "integer"))
    after = (Column("id", "bigint", key=True), Column("v", "text"))
    glacier.commit(put(glacier.other("t", before), id=1, v=1))
    glacier.write()
    glacier.commit(put(glacier.other("t", before), id=2, v=2))
    glacier.commit(put(glacier.other("t", after), id=3, v="x"), put(glacier.table, **account(1)))
    glacier.write()
    [failed] = glacier.writer.failed_tables()
    assert (failed.table, failed.sequence) == ("public.t", 3)
    assert "column 'v' is int in the Iceberg table and becomes string" in failed.reason
    assert f"Rename or drop {glacier.namespace}.public_t" in failed.hint
    assert glacier.sequences("public_t") == [1, 2]
    assert glacier.sequences() == [4]
    glacier.open()
    glacier.commit(put(glacier.other("t", after), id=4, v="y"))
    glacier.write()
    assert glacier.sequences("public_t") == [1, 2]
    assert [each.table for each in glacier.writer.failed_tables()] == ["public.t"]
    glacier.catalog.rename_table(
        (glacier.namespace, "public_t"), (glacier.namespace, "public_t_until_now")
    )
    glacier.commit(put(glacier.other("t", after), id=5, v="z"))
    glacier.write()
    assert glacier.sequences("public_t") == [6]
    assert glacier.writer.failed_tables() == []


@pytest.mark.requirement("P-05")
def test_a_value_that_its_type_cannot_hold_is_null_and_its_image_has_it(glacier: Glacier) -> None:
    days = (Column("id", "bigint", key=True), Column("day", "date"))
    table = glacier.other("t", days)
    glacier.commit(put(table, id=1, day="2026-01-01"))
    glacier.commit(put(table, id=2, day="infinity"))
    glacier.write()
    assert glacier.writer.failed_tables() == []
    [_, odd] = sorted(glacier.rows("public_t"), key=itemgetter("sequence"))
    assert odd["row"] == {"id": 2, "day": None}
    assert odd["after"] == '{"id":2,"day":"infinity"}'
    glacier.chosen = {"as_text": ("public.u.day",)}
    glacier.open()
    glacier.commit(put(glacier.other("u", days), id=2, day="infinity"))
    glacier.write()
    assert [row["row"]["day"] for row in glacier.rows("public_u")] == ["infinity"]


def test_a_table_of_somebody_else_is_left_alone(glacier: Glacier) -> None:
    foreign = glacier.catalog.create_table((glacier.namespace, "public_accounts"), frame_schema())
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    [failed] = glacier.writer.failed_tables()
    assert "a table that is no history" in failed.reason
    assert glacier.iceberg().metadata == foreign.metadata


def test_two_tables_never_share_a_history(tmp_path: Path, iceberg_server: IcebergServer) -> None:
    glacier = Glacier(tmp_path, iceberg_server, table=Template("all_${table}"))
    elsewhere = glacier.other("accounts", ACCOUNTS, schema="sales")
    glacier.commit(put(glacier.table, **account(1)), put(elsewhere, **account(2)))
    glacier.write()
    [failed] = glacier.writer.failed_tables()
    assert "is the history of" in failed.reason
    assert failed.hint == "Set `table` of the sink so that each table has a name of its own."
    assert len(glacier.sequences("all_accounts")) == 1
    glacier.log.close()


def test_a_table_that_was_rolled_back_is_not_appended_to(glacier: Glacier) -> None:
    for number in (1, 2):
        glacier.commit(put(glacier.table, **account(number)))
        glacier.write()
    table = glacier.iceberg()
    newest = table.metadata.current_snapshot_id
    parent = table.current_snapshot()
    assert parent is not None
    assert parent.parent_snapshot_id is not None
    table.manage_snapshots().set_current_snapshot(parent.parent_snapshot_id).commit()
    glacier.open()
    [failed] = glacier.writer.failed_tables()
    assert "was rolled back to a snapshot that ends at sequence 1" in failed.reason
    assert newest != glacier.iceberg().metadata.current_snapshot_id


def test_a_table_that_was_rolled_back_into_another_log_is_not_appended_to(
    glacier: Glacier,
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    first = glacier.iceberg().metadata.current_snapshot_id
    assert first is not None
    glacier.replace_log("log-2")
    glacier.commit(put(glacier.table, **account(1)))
    glacier.open("query-2", adopt=True)
    glacier.batches = 0
    glacier.write()
    glacier.iceberg().manage_snapshots().set_current_snapshot(first).commit()
    glacier.open("query-2")
    [failed] = glacier.writer.failed_tables()
    assert "was rolled back to a snapshot that ends at sequence 1 of another log" in failed.reason


def test_a_table_without_rows_that_is_reset_was_not_rolled_back(glacier: Glacier) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    glacier.iceberg().delete()
    glacier.sink_with().reset("query-1")
    glacier.open()
    assert glacier.writer.failed_tables() == []
    glacier.writer.write(glacier.changes(0, 1), 0)
    assert glacier.sequences() == [1]


def test_files_on_a_disk_that_the_driver_does_not_have_are_not_committed(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    seen, real = glacier.files(), LocalRows.mapInArrow

    def elsewhere(self: LocalRows, task: Any, schema: str) -> LocalRows:
        rows = real(self, task, schema)
        for file in glacier.files() - seen:
            file.unlink()
        return rows

    glacier.commit(put(glacier.table, **account(2)))
    with monkeypatch.context() as patched:
        patched.setattr(LocalRows, "mapInArrow", elsewhere)
        with pytest.raises(SinkRefused, match="the driver does not see this file") as raised:
            glacier.write()
    assert "object storage" in raised.value.hint
    assert glacier.sequences() == [1]


# --- partitions and snapshots --------------------------------------------------------------------


def test_partitions_change_with_the_settings_and_files_stay(glacier: Glacier) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    assert [str(each) for each in glacier.iceberg().spec().fields] == [
        "1000: commit_time_day: day(23)"
    ]
    glacier.chosen = {"partition_by": ("hour(commit_time)", "bucket(4, key)")}
    glacier.open()
    glacier.commit(put(glacier.table, **account(2)))
    glacier.write()
    names = [each.name for each in glacier.iceberg().spec().fields]
    assert names == ["commit_time_hour", "key_bucket"]
    assert glacier.sequences() == [1, 2]
    glacier.chosen = {"partition_by": ()}
    glacier.open()
    glacier.commit(put(glacier.table, **account(3)))
    glacier.write()
    assert glacier.iceberg().spec().is_unpartitioned()
    assert sorted(file["record-count"] for file in glacier.planned_by_java()) == [1, 1, 1]


def test_old_snapshots_are_expired_with_their_files(
    tmp_path: Path, iceberg_server: IcebergServer
) -> None:
    glacier = Glacier(tmp_path, iceberg_server, keep_snapshots_hours=0)
    for number in range(3):
        glacier.commit(put(glacier.table, **account(number)))
        glacier.write()
    data = glacier.files()
    assert len(glacier.files("snap-*.avro")) == 3
    glacier.writer.maintain()
    assert glacier.snapshots() == 1
    assert len(glacier.files("snap-*.avro")) == 1
    assert glacier.files() == data  # all rows are still there
    assert glacier.sequences() == [1, 2, 3]
    glacier.sink_with().reset("query-1")
    glacier.open()
    glacier.writer.maintain()
    assert glacier.files() == set()  # what only an expired snapshot had
    glacier.log.close()


def test_a_table_whose_snapshots_cannot_be_expired_is_logged_and_the_others_go_on(
    glacier: Glacier, caplog: pytest.LogCaptureFixture
) -> None:
    other = glacier.other("t", ACCOUNTS)
    for number in (1, 2):
        glacier.commit(put(glacier.table, **account(number)), put(other, **account(number)))
        glacier.write()
    glacier.chosen = {"keep_snapshots_hours": 0}
    glacier.open()
    glacier.catalog.drop_table((glacier.namespace, "public_accounts"))
    glacier.writer.maintain()
    assert glacier.snapshots("public_t") == 1
    assert "snapshots are not expired table=public.accounts" in caplog.text


def test_snapshots_that_are_young_or_tagged_stay(glacier: Glacier) -> None:
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    first = glacier.iceberg().metadata.current_snapshot_id
    assert first is not None
    glacier.iceberg().manage_snapshots().create_tag(first, "audited").commit()
    for number in (2, 3):
        glacier.commit(put(glacier.table, **account(number)))
        glacier.write()
    glacier.writer.maintain()
    assert glacier.snapshots() == 3
    glacier.chosen = {"keep_snapshots_hours": 0}
    glacier.open().maintain()
    assert {each.snapshot_id for each in glacier.iceberg().metadata.snapshots} == {
        first, glacier.iceberg().metadata.current_snapshot_id
    }  # fmt: skip
    assert glacier.iceberg().scan(snapshot_id=first).count() == 1


def test_manifests_are_merged_and_the_old_ones_deleted(glacier: Glacier) -> None:
    glacier.chosen = {"keep_snapshots_hours": 0}
    glacier.commit(put(glacier.table, **account(0)))
    glacier.write()
    table = glacier.iceberg().transaction()
    table.set_properties({"commit.manifest.min-count-to-merge": "3"})
    table.commit_transaction()
    glacier.open()
    known = set(glacier.manifests())
    for number in range(1, 5):
        glacier.commit(put(glacier.table, **account(number)))
        glacier.write()
        known |= set(glacier.manifests())
    kept = set(glacier.manifests())
    assert len(kept) < len(known) == 5  # two of them of merged ones
    glacier.writer.maintain()
    assert {each.name for each in glacier.files("*-m*.avro")} & known == kept
    assert glacier.sequences() == [1, 2, 3, 4, 5]


# --- readers -------------------------------------------------------------------------------------


def test_iceberg_s_own_library_reads_manifests_partitions_and_metrics(glacier: Glacier) -> None:
    for number in (1, 2, 3):
        glacier.commit(put(glacier.table, **account(number)))
        glacier.write()
    assert sum(file["record-count"] for file in glacier.planned_by_java()) == 3
    # It leaves out files by the bounds that tasks have written.
    wanted = {"type": "eq", "term": "sequence", "value": 2}
    [file] = glacier.planned_by_java(filter=wanted)
    assert file["record-count"] == 1
    past = {"type": "lt", "term": "commit_time", "value": "2020-01-01T00:00:00+00:00"}
    assert glacier.planned_by_java(filter=past) == []


def test_polars_reads_the_history(glacier: Glacier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")  # it reads the files by itself
    glacier.commit(put(glacier.table, **account(1)), put(glacier.table, **account(2)))
    glacier.write()
    location = glacier.iceberg().metadata_location
    frame = pl.scan_iceberg(location, reader_override="native").filter(pl.col("sequence") > 1)
    rows = frame.select("op", pl.col("row").struct.field("id")).collect()
    assert rows.rows() == [("INSERT", 2)]


# --- settings, failures --------------------------------------------------------------------------


def test_settings_that_cannot_be_are_refused() -> None:
    for chosen, message in (
        ({"uri": "thrift://c"}, "uri"),
        ({"uri": "https://ann:s3cret@c"}, "set token or credential"),
        ({"namespace": "a..b"}, "namespace"),
        ({"keep_snapshots_hours": -1}, "keep_snapshots_hours"),
        ({"batch_seconds": 0}, "batch_seconds"),
        ({"options": {"token": "x"}}, "options: token"),
        ({"partition_by": ("day(commit_tim)",)}, "did you mean commit_time"),
        ({"partition_by": ("day(op)",)}, "day cannot take"),
        ({"partition_by": ("week(commit_time)",)}, "none of Iceberg's transforms"),
        ({"partition_by": ("hour(commit_time)", "day(commit_time)")}, "twice"),
        ({"partition_by": ("tenant",)}, "tenant is null everywhere"),
    ):
        with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
            settings(**chosen)


def test_tables_whose_names_differ_in_underscores_have_a_history_each() -> None:
    sink = settings()
    tables = ("public.orders", "public.orders_", "public._orders", ".orders", "._orders", ".")
    assert [sink.identifier("shop", each)[-1] for each in tables] == [
        "public_orders", "public_orders_", "public__orders", "orders", "_orders", "messages"
    ]  # fmt: skip
    plain = settings(table=Template("${table}"))
    assert plain.identifier("shop", "._orders")[-1] == "_orders"


def test_secrets_show_nowhere(iceberg_server: IcebergServer) -> None:
    sink = settings(
        uri=f"http://127.0.0.1:{free_port()}",
        token=Secret("t0k3n-of-mine"),
        credential=Secret("me:s3cr3t-of-mine"),
        options={"s3.secret-access-key": "k3y-of-mine"},
    )
    [finding] = sink.check()
    shown = f"{sink!r} {sink.link!r} {finding}"
    assert "of-mine" not in shown
    assert not finding.ok
    [reached] = settings(uri=iceberg_server.uri, namespace="nowhere").check()
    assert (reached.ok, "will be made" in reached.detail) == (True, True)


def test_tasks_get_the_keys_of_the_storage_and_not_the_login_of_the_catalog(
    glacier: Glacier, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.chosen = {
        "token": Secret("t0k3n-of-mine"),
        "options": {"s3.secret-access-key": "k3y", "header.X-Api-Key": "h34d3r-of-mine"},
    }
    sent: list[bytes] = []
    real = LocalRows.mapInArrow

    def watched(self: LocalRows, task: Any, schema: str) -> LocalRows:
        pickler: Any = cloudpickle
        sent.append(pickler.dumps(task))
        return real(self, task, schema)

    monkeypatch.setattr(LocalRows, "mapInArrow", watched)
    glacier.open()
    glacier.commit(put(glacier.table, **account(1)))
    glacier.write()
    assert glacier.sequences() == [1]
    assert b"k3y" in sent[-1]
    assert not [each for each in sent if b"of-mine" in each]


def test_a_catalog_that_does_not_answer_is_tried_again_and_a_refusal_halts(
    iceberg_server: IcebergServer,
) -> None:
    with pytest.raises(SinkUnavailable, match="Connection refused"):
        settings(uri=f"http://127.0.0.1:{free_port()}").open("query-1")
    with pytest.raises(SinkRefused):
        settings(uri=f"{iceberg_server.uri}/nothing/here").open("query-1")
