"""The history sink: every change once, by tenant and day, in the log's order."""

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import duckdb
import msgspec
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headrace.change.arrow.frame import FIELDS
from headrace.change.arrow.frame import schema as frame_schema
from headrace.change.event import Op
from headrace.errors import ConfigError, LogReplaced, PipelineError, SinkFenced, SinkUnavailable
from headrace.sinks import Progress, Sink
from headrace.sinks.history import History
from headrace.sinks.lake.append import Append, Appended, Join, Joined, due
from headrace.sinks.lake.delta import Delta
from headrace.sinks.lake.deltalog import DataFile
from headrace.sinks.lake.shape import WholeChanges
from headrace.sinks.lake.storage import Folder
from tests.sinks.archive import Archive, account, fill
from tests.sinks.lake import Lake, Row, change, put, remove, schema, truncate


@pytest.fixture
def archive(spark: SparkSession, tmp_path: Path) -> Iterator[Archive]:
    made = Archive(spark, tmp_path, tenant="tenant_id")
    yield made
    made.log.close()


def test_history_is_a_sink() -> None:
    sink = History(name="audit", path="audit")
    assert isinstance(sink, Sink)
    assert sink.fields == ()  # all
    with pytest.raises(ConfigError):
        History(name="audit", path="audit", vacuum_hours=-1)


@pytest.mark.requirement("S1-40", "S1-42")
def test_every_change_of_every_kind_is_kept_as_the_source_gives_it(archive: Archive) -> None:
    accounts = archive.table
    archive.commit(schema(accounts))
    archive.commit(put(accounts, **account(1)), put(accounts, **account(2)))
    assert archive.write() == 3
    archive.commit(put(accounts, Op.UPDATE, **account(1, name="b")), remove(accounts, id=2))
    archive.commit(change(Op.MESSAGE, accounts, after=b'{"error":"bad bytes"}'))
    archive.commit(truncate(accounts))
    assert archive.write() == 4
    stored = archive.stored()
    given = archive.changes(0, archive.log.latest_sequence).toArrow().to_pylist()
    assert [{name: row[name] for name in FIELDS} for row in stored] == given
    assert [row["op"] for row in stored] == [
        "SCHEMA", "INSERT", "INSERT", "UPDATE", "DELETE", "MESSAGE", "TRUNCATE"
    ]  # fmt: skip
    assert [row["transaction"]["ordinal"] for row in stored] == [1, 1, 2, 1, 2, 1, 1]
    assert {row["day"] for row in stored} == {
        row["transaction"]["commit_time"].date() for row in given
    }
    assert archive.writer.failed_tables() == []


@pytest.mark.requirement("S1-41")
def test_a_change_that_comes_again_is_skipped_by_its_id(archive: Archive) -> None:
    accounts = archive.table
    archive.commit(put(accounts, **account(1)), put(accounts, **account(2)))
    archive.write()
    archive.commit(put(accounts, **account(3)))
    archive.write()
    stored, version = archive.stored(), archive.version()
    archive.open()  # as after a crash that came before Spark noted the batch as done
    archive.writer.write(archive.changes(0, 2), 0)
    archive.writer.write(archive.changes(2, 3), 1)
    assert (archive.stored(), archive.version()) == (stored, version)
    archive.commit(put(accounts, **account(4)))
    archive.writer.write(archive.changes(1, 4), 2)  # some of it is there, some is not
    ids = [row["id"] for row in archive.stored()]
    assert [row["sequence"] for row in archive.stored()] == [1, 2, 3, 4]
    assert len(set(ids)) == 4
    assert ids[:3] == [row["id"] for row in stored]


@pytest.mark.requirement("S1-16")
def test_a_tenant_has_folders_of_its_own(archive: Archive) -> None:
    accounts = archive.table
    odd = "a/b =ü%20'"
    archive.commit(put(accounts, **account(1)), put(accounts, **account(2, odd)))
    archive.commit(put(accounts, **account(3, None)), put(accounts, **account(4, "")))
    archive.commit(
        # The tenant was not sent, but the old row has it.
        change(Op.UPDATE, accounts, key=b'{"id":1}', after=b'{"id":1}', unchanged=("tenant_id",),
               before=b'{"id":1,"tenant_id":"acme"}'),
        change(Op.DELETE, accounts, key=b'{"id":7,"tenant_id":7}', before=b'{"id":7}'),
        remove(accounts, id=3),
    )  # fmt: skip
    archive.commit(change(Op.MESSAGE, accounts, after=b'{"tenant_id":"no row"}'))
    archive.write()
    tenants = [row["tenant"] for row in archive.stored()]
    assert tenants == ["acme", odd, None, None, "acme", "7", None, None]
    delta = DeltaTable(str(archive.path))
    assert delta.metadata().partition_columns == ["tenant", "day"]
    of_one = delta.to_pyarrow_table(filters=[("tenant", "=", odd)])
    assert of_one["sequence"].to_pylist() == [2]


def test_without_tenants_there_are_days(spark: SparkSession, tmp_path: Path) -> None:
    archive = Archive(spark, tmp_path)
    fill(archive, 1)
    assert DeltaTable(str(archive.path)).metadata().partition_columns == ["day"]
    assert [row["tenant"] for row in archive.stored()] == [None]
    archive.log.close()


def test_a_batch_without_changes_costs_no_commit(archive: Archive) -> None:
    nothing = archive.spark.createDataFrame([], archive.changes(0, 1).schema)
    assert archive.writer.write(nothing, 0) == 0
    assert archive.writer.progress() is None
    archive.open()
    archive.batches = 1
    fill(archive, 1)
    version = archive.version()
    assert archive.writer.write(nothing, 2) == 0
    assert archive.version() == version


def test_progress_is_what_the_table_has(archive: Archive) -> None:
    assert archive.writer.progress() is None
    fill(archive, 2)
    assert archive.writer.progress() == Progress(archive.log.epoch, 2)
    assert archive.open().progress() == Progress(archive.log.epoch, 2, "0")


def test_small_files_are_joined_and_old_ones_deleted(spark: SparkSession, tmp_path: Path) -> None:
    archive = Archive(spark, tmp_path, tenant="tenant_id", vacuum_hours=0)
    fill(archive, 8, "a/b ü%20")
    archive.commit(put(archive.table, **account(99)))
    archive.write()
    # What delta-rs leaves of a writer that was killed, and its own vacuum does not list.
    unfinished = next(archive.path.rglob("*.parquet")).with_suffix(".parquet#1")
    unfinished.write_bytes(b"PAR1")
    archive.writer.maintain()
    archive.writer.maintain()  # what the first has found unused
    assert not unfinished.exists()
    assert [row["sequence"] for row in archive.stored()] == list(range(1, 10))
    files = [Path(uri) for uri in DeltaTable(str(archive.path)).file_uris()]
    assert len(files) == 2
    assert sorted(files) == sorted(archive.path.rglob("*.parquet"))
    archive.open()
    fill(archive, 1)
    assert len(archive.stored()) == 10
    archive.log.close()


def test_files_wait_for_others_of_their_size() -> None:
    def files(size: int, count: int, day: str = "2026-01-01") -> list[DataFile]:
        return [DataFile(f"{size}-{at}", size, 1, partition=(("day", day),)) for at in range(count)]

    assert due(files(1000, 7) + files(100_000, 7) + files(1000, 7, "2026-01-02")) == []
    assert due(files(1000, 9)) == [files(1000, 9)[:8]]
    assert len(due(files(1000, 17))) == 2
    assert due(files(30_000_000, 20)) == []


def test_a_day_is_one_of_utc_wherever_spark_runs(tmp_path: Path) -> None:
    def changes(*sequences: int) -> pa.RecordBatch:
        rows = [
            {
                "sequence": sequence,
                "op": "INSERT",
                "epoch": "e",
                "after": b'{"tenant_id":"acme"}',
                "transaction": {"commit_time": late + dt.timedelta(minutes=sequence)},
            }
            for sequence in sequences
        ]
        return pa.RecordBatch.from_pylist(rows, session)

    late = dt.datetime(2026, 1, 1, 23, 57, tzinfo=dt.UTC)
    tokyo = pa.timestamp("us", tz="Asia/Tokyo")
    inner = [each for each in FIELDS["transaction"] if each.name != "commit_time"]
    transaction = pa.struct([*inner, pa.field("commit_time", tokyo)])
    session = pa.schema(list((FIELDS | {"transaction": transaction}).items()))
    folder = Folder.of(str(tmp_path), {})
    task = Append(folder, ("tenant", "day"), WholeChanges("tenant_id"), "e", 0)
    (rows,) = task(iter([changes(4, 3), changes(2, 1)]))
    told = msgspec.json.decode(rows["result"][0].as_py(), type=Appended)
    files = {file.partition["day"]: folder.read(file.path) for file in told.added}
    assert {day: rows["sequence"].to_pylist() for day, rows in files.items()} == {
        "2026-01-01": [1, 2],
        "2026-01-02": [3, 4],
    }
    assert files["2026-01-01"].schema.field("transaction").type == FIELDS["transaction"]
    assert (told.changes, told.last, told.epochs) == (4, 4, {"e"})


def test_a_large_part_of_a_batch_is_written_as_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sinks.lake.append.HELD_BYTES", 1)
    rows = [{"sequence": n, "op": "MESSAGE", "epoch": "e", "unchanged": []} for n in range(1, 5)]
    batches = pa.Table.from_pylist(rows, frame_schema()).to_batches(max_chunksize=1)
    task = Append(Folder.of(str(tmp_path), {}), ("day",), WholeChanges(""), "e", 1)
    (rows,) = task(iter(batches))
    told = msgspec.json.decode(rows["result"][0].as_py(), type=Appended)
    assert [file.rows for file in told.added] == [1, 1, 1]  # the first one is there already
    assert [file.partition for file in told.added] == [{"day": None}] * 3


def test_a_history_of_an_earlier_time_gets_the_fields_that_changes_have_now(tmp_path: Path) -> None:
    shape, folder = WholeChanges(""), Folder.of(str(tmp_path), {})
    row: Row = {"sequence": 1, "op": "MESSAGE", "epoch": "e", "unchanged": []}
    now = pa.Table.from_pylist([row, row], frame_schema())
    then = now.drop_columns(["origin"])
    earlier = pa.schema([each for each in shape.schema if each.name != "origin"])
    noted = {"headrace.keep": "changes", "headrace.tenant": ""}
    Delta.create(folder, earlier, noted, writer="query-1", partition_by=("day",))
    History(name="audit", path=str(tmp_path)).open("query-1")
    assert DeltaTable(str(tmp_path)).to_pyarrow_table().schema.field("origin").type == pa.string()
    files = [folder.write(each, "changes", {"day": None}) for each in (then, now)]
    parts = [DataFile(file.path, file.size, file.rows) for file in files]
    (rows,) = Join(folder, [parts])(iter([pa.record_batch({"id": [0]})]))
    joined = msgspec.json.decode(rows["result"][0].as_py(), type=Joined)
    assert folder.read(joined.added[0].path)["origin"].to_pylist() == [None] * 4


def test_another_pipeline_is_kept_out_until_it_takes_over(archive: Archive) -> None:
    fill(archive, 1)
    first = archive.writer
    with pytest.raises(SinkFenced, match="another pipeline"):
        archive.open("query-2")
    archive.chosen |= {"vacuum_hours": 0}
    archive.open("query-2", adopt=True)
    archive.commit(put(archive.table, **account(2)))
    with pytest.raises(SinkFenced, match="not committed"):
        first.write(archive.changes(1, 2), 1)
    archive.writer.write(archive.changes(0, 2), 0)
    assert [row["sequence"] for row in archive.stored()] == [1, 2]
    known = set(DeltaTable(str(archive.path)).file_uris())
    assert len(list(archive.path.rglob("*.parquet"))) > len(known)
    archive.writer.maintain()
    archive.writer.maintain()  # what the first one wrote in vain is deleted
    assert set(map(str, archive.path.rglob("*.parquet"))) == known


def test_the_history_of_two_logs_is_told_apart_by_epoch(archive: Archive) -> None:
    fill(archive, 2)
    first = archive.log.epoch
    archive.replace_log("log-2")
    archive.commit(put(archive.table, **account(1)))
    version = archive.version()
    with pytest.raises(LogReplaced, match="another log"):
        archive.write()
    assert archive.version() == version
    archive.open("query-2", adopt=True)
    archive.batches = 0
    archive.write()
    second = archive.log.epoch
    assert archive.open("query-2").progress() == Progress(second, 1, "0")
    archive.replace_log("log")  # and back again
    archive.commit(put(archive.table, **account(5)))
    archive.open("query-3", adopt=True)
    archive.write()
    found = sorted((row["epoch"], row["sequence"]) for row in archive.stored())
    assert found == sorted([(first, 1), (first, 2), (first, 3), (second, 1)])


def test_a_history_that_is_deleted_is_not_begun_anew_in_silence(archive: Archive) -> None:
    fill(archive, 2)
    archive.path.rename(archive.folder / "aside")
    archive.commit(put(archive.table, **account(3)))
    with pytest.raises(SinkUnavailable):
        archive.write()
    archive.open()
    with pytest.raises(PipelineError, match="gone") as raised:
        archive.write()
    assert "--adopt audit" in raised.value.hint
    archive.written = archive.batches = 0  # with a new checkpoint
    archive.write()
    assert [row["sequence"] for row in archive.stored()] == [1, 2, 3]


def test_a_table_made_another_way_is_refused(spark: SparkSession, archive: Archive) -> None:
    fill(archive, 1)
    archive.chosen = {"tenant": "other"}
    with pytest.raises(PipelineError, match="tenant: tenant_id"):
        archive.open()
    lake = Lake(spark, archive.folder / "other")
    lake.commit(put(lake.table("orders"), id=1, status="s", amount="1", note=""))
    lake.write()
    sink = History(name="audit", path=str(lake.path / "public" / "orders"))
    with pytest.raises(PipelineError, match="no history"):
        sink.open("query-1")
    lake.log.close()


@pytest.mark.requirement("S1-40")
def test_others_read_the_history(archive: Archive) -> None:
    fill(archive, 2, "a/b ü%20")
    archive.commit(put(archive.table, **account(9, None)))
    archive.write()
    frame = pl.scan_delta(str(archive.path)).select("sequence", "tenant", "op").collect()
    assert sorted(frame.rows()) == [
        (1, "a/b ü%20", "INSERT"), (2, "a/b ü%20", "INSERT"), (3, None, "INSERT")
    ]  # fmt: skip
    history = DeltaTable(str(archive.path)).to_pyarrow_dataset()
    assert isinstance(history.schema, pa.Schema)
    question = (
        "select tenant, count(*), max(transaction.ordinal) from history group by 1 order by 2"
    )
    assert duckdb.connect().execute(question).fetchall() == [(None, 1, 1), ("a/b ü%20", 2, 1)]
