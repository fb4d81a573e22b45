"""A Delta table written by us: one commit a batch, read rightly by others."""

import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyroaring import BitMap

from headrace.errors import LogReplaced, SinkFenced, SinkUnavailable, TableFailed, TableMoved
from headrace.sinks import Progress
from headrace.sinks.lake.delta import EPOCH, Delta, Marks
from headrace.sinks.lake.deltalog import DeltaCommit, DeltaLog
from headrace.sinks.lake.storage import Folder
from tests.sinks.deltas import SCHEMA, WRITER, Written, ids, query, without

BEFORE = Path(__file__).parents[1] / "compat" / "before.tar.xz"


@pytest.fixture
def table(tmp_path: Path) -> Written:
    return Written(tmp_path / "table")


def actions(table: Written, version: int) -> list[dict[str, dict[str, object]]]:
    lines = (table.path / "_delta_log" / f"{version:020d}.json").read_text().splitlines()
    return [json.loads(line) for line in lines]


# --- rows ----------------------------------------------------------------------------------------


def test_dead_rows_are_read_by_nobody(table: Written) -> None:
    table.kill(0, 0, 5)
    table.kill(0, 5, 6)
    table.commit([table.file([200])], {table.added[1].path: [99]})
    live = without(201, 0, 5, 6, 199)
    assert table.ids() == live
    frame = pl.read_delta(str(table.path))
    assert sorted(frame["id"].to_list()) == live
    assert query(table.path, "select name from t where id = 6").num_rows == 0
    assert list(table.delta.dead(table.added[0].path)) == [0, 5, 6]
    assert sorted(file.live for file in table.delta.files.values()) == [1, 97, 99]


def test_a_file_without_live_rows_is_taken_out(table: Written) -> None:
    table.kill(0, *range(60))
    table.kill(0, *range(60, 100))
    assert table.ids() == list(range(100, 200))
    assert list(table.delta.files) == [table.added[1].path]
    assert DeltaTable(str(table.path)).file_uris() == [str(table.path / table.added[1].path)]


def test_statistics_stay_but_are_no_longer_exact(table: Written) -> None:
    table.kill(0, 0)
    file = table.delta.files[table.added[0].path]
    known = json.loads(file.statistics)
    assert known == json.loads(table.added[0].statistics) | {"tightBounds": False}
    assert (file.rows, file.live, file.bounds("id"), file.bounds("name")) == (
        100,
        99,
        (0, 99),
        ("n0", "n99"),
    )
    assert file.bounds("other") is None


@pytest.mark.parametrize("days", [-719_163, 2_932_897])
def test_times_that_nobody_can_write_have_no_statistics(tmp_path: Path, days: int) -> None:
    moment = pa.array([days * 86_400_000_000], pa.timestamp("us"))
    rows = pa.table({"day": pa.array([days], pa.date32()), "moment": moment})
    known = json.loads(Folder.of(str(tmp_path), {}).write(rows, "part", {}).statistics)
    assert (known["numRecords"], known["minValues"], known["maxValues"]) == (1, {}, {})


def test_a_commit_says_who_made_it_and_what_was_there(table: Written) -> None:
    table.kill(0, 1)
    table.kill(0, 2)
    [info, *rest] = actions(table, 3)
    assert info["commitInfo"]["operation"] == "MERGE"
    assert str(info["commitInfo"]["engineInfo"]).startswith("Headrace/")
    [remove] = [each["remove"] for each in rest if "remove" in each]
    assert remove["deletionVector"] == actions(table, 2)[-2]["add"]["deletionVector"]
    assert remove["extendedFileMetadata"] is True
    assert remove["size"] == table.added[0].size
    assert {each["txn"]["appId"]: each["txn"]["version"] for each in rest if "txn" in each} == {
        WRITER: 3,
        "headrace.sequence:e": 30,
        "headrace.version": 3,
    }


def test_rows_in_other_files_are_no_change_of_data(table: Written) -> None:
    table.kill(0, 1)
    joined = table.file(range(200))
    old = [file.path for file in table.added]
    table.delta.commit([joined], old, dead={joined.path: BitMap([1]).serialize()})
    assert table.ids() == without(200, 1)
    files = [each.get("add") or each.get("remove") for each in actions(table, 3)]
    assert [file["dataChange"] for file in files if file] == [False] * 3


def test_files_can_be_replaced_with_other_columns(table: Written) -> None:
    wider = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us"))])
    moments = pa.table({"id": [7], "at": pa.array([1], pa.timestamp("us"))}, schema=wider)
    added = table.folder.write(moments, "part", {})
    table.delta.commit([added], [], schema=wider, replace=True, marks=table.marks())
    table.delta.note({"headrace.key": "id"})
    assert table.ids() == [7]
    assert table.open().schema.names == ["id", "at"]
    assert table.delta.properties["headrace.key"] == "id"
    assert {"timestampNtz", "deletionVectors"} <= table.delta.features
    table.delta.empty("e")
    assert table.ids() == []
    assert table.open().applied("e") == 0


def test_columns_are_added_without_touching_files(table: Written) -> None:
    table.kill(0, 0)
    table.delta.add_columns([pa.field("more", pa.string())])
    assert query(table.path, "select more from t where id = 1")["more"].to_pylist() == [None]
    assert table.ids() == without(200, 0)
    assert table.open().schema.names == ["id", "name", "more"]


def test_names_that_differ_in_case_alone_make_no_table(tmp_path: Path) -> None:
    columns = pa.schema([("id", pa.int64()), ("ID", pa.int64())])
    with pytest.raises(TableFailed, match="takes no table"):
        Delta.create(Folder.of(str(tmp_path), {}), columns, {}, writer=WRITER)


def test_partitions_keep_odd_values(tmp_path: Path) -> None:
    folder = Folder.of(str(tmp_path), {})
    columns = pa.schema([("tenant", pa.string()), ("id", pa.int64())])
    delta = Delta.create(folder, columns, {}, writer=WRITER, partition_by=["tenant"], vectors=True)
    odd = "a/b =ü%20'#?"
    files = [folder.write(pa.table({"id": [1, 2]}), "part", {"tenant": t}) for t in (odd, None)]
    delta.commit(files, [], marks=Marks(batch_id=0, epoch="e", sequence=1))
    dead = {file.path: BitMap([0]).serialize() for file in files}
    delta.commit([], [], dead=dead, marks=Marks(batch_id=1, epoch="e", sequence=2))
    found = query(tmp_path, "select tenant, id from t order by tenant nulls last").to_pylist()
    assert found == [{"tenant": odd, "id": 2}, {"tenant": None, "id": 2}]
    again = Delta.open(folder, WRITER)
    assert again
    assert again.files == delta.files
    assert [dict(file.partition) for file in again.files.values()] == [
        {"tenant": odd},
        {"tenant": None},
    ]
    DeltaTable(str(tmp_path)).create_checkpoint()
    reopened = Delta.open(folder, WRITER)
    assert reopened
    assert reopened.files == delta.files


# --- opening -------------------------------------------------------------------------------------


def test_a_table_is_opened_as_it_was_left(table: Written) -> None:
    table.kill(0, 3)
    left = table.delta
    assert table.open()._state == left._state
    assert list(table.delta.dead(table.added[0].path)) == [3]
    assert table.delta.applied("e") == 20
    assert table.delta.applied("other") == 0
    assert Delta.open(Folder.of(str(table.path / "nothing"), {}), WRITER) is None


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_checkpoint_stands_for_the_commits_before(table: Written, pieces: int) -> None:
    table.kill(0, 3)
    table.kill(1, 4)
    table.delta.checkpoint()
    log = table.path / "_delta_log"
    if pieces > 1:
        split(log, 3, pieces)
    for version in range(3):
        (log / f"{version:020d}.json").unlink()
    table.kill(0, 5)
    left = table.delta
    assert table.open()._state == left._state
    assert table.ids() == without(200, 3, 5, 104)
    assert list(table.delta.dead(table.added[0].path)) == [3, 5]


def split(log: Path, version: int, pieces: int) -> None:
    """Make a checkpoint one of several parts."""
    whole = log / f"{version:020d}.checkpoint.parquet"
    rows = pq.read_table(whole)
    size = -(-rows.num_rows // pieces)
    for at in range(pieces):
        name = f"{version:020d}.checkpoint.{at + 1:010d}.{pieces:010d}.parquet"
        pq.write_table(rows.slice(at * size, size), log / name)
    whole.unlink()
    hint = {"version": version, "size": rows.num_rows, "parts": pieces}
    (log / "_last_checkpoint").write_text(json.dumps(hint))


def test_a_checkpoint_with_a_missing_part_is_passed_over(table: Written) -> None:
    table.kill(0, 3)
    table.delta.checkpoint()
    split(table.path / "_delta_log", 2, 2)
    next((table.path / "_delta_log").glob("*.checkpoint.0000000001.*")).unlink()
    left = table.delta
    assert table.open()._state == left._state


def test_a_hint_that_leads_nowhere_is_passed_over(table: Written) -> None:
    hint = table.path / "_delta_log" / "_last_checkpoint"
    for content in ('{"version":700,"size":1}', "{", "[]", ""):
        hint.write_text(content)
        assert table.open().version == 1


def damage_json(log: Path) -> None:
    (log / f"{1:020d}.json").write_text('{"add":')


def damage_gap(log: Path) -> None:
    (log / f"{1:020d}.json").unlink()


def damage_metadata(log: Path) -> None:
    (log / f"{0:020d}.json").write_text('{"commitInfo":{}}\n')


def damage_checkpoint(log: Path) -> None:
    (log / f"{2:020d}.checkpoint.parquet").write_bytes(b"PAR1")


@pytest.mark.parametrize("damage", [damage_json, damage_gap, damage_metadata, damage_checkpoint])
def test_a_damaged_log_says_so(table: Written, damage: Callable[[Path], None]) -> None:
    table.kill(0, 1)
    damage(table.path / "_delta_log")
    with pytest.raises(TableFailed, match="is damaged") as raised:
        table.open()
    assert "from a copy" in raised.value.hint


def test_a_checkpoint_of_another_kind_is_refused(table: Written) -> None:
    log = table.path / "_delta_log"
    name = f"{1:020d}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.json"
    (log / name).write_text("{}")
    assert table.open().version == 1  # the commits say all
    (log / f"{0:020d}.json").unlink()
    with pytest.raises(TableFailed, match=r"80a083e8.*") as raised:
        table.open()
    assert "classic" in raised.value.hint


def test_a_checkpoint_with_side_files_is_refused(table: Written) -> None:
    table.delta.checkpoint()
    file = table.path / "_delta_log" / f"{1:020d}.checkpoint.parquet"
    rows = pq.read_table(file)
    at = rows.schema.get_field_index("sidecar")
    kind = rows.schema.field(at).type
    side = [{"path": "x", "sizeInBytes": 1, "modificationTime": 1, "tags": []}]
    pq.write_table(rows.set_column(at, "sidecar", pa.array(side * rows.num_rows, kind)), file)
    with pytest.raises(TableFailed, match="V2 checkpoint"):
        table.open()


# --- tables of an earlier version ----------------------------------------------------------------


def test_a_table_of_an_earlier_version_gets_vectors_and_goes_on(tmp_path: Path) -> None:
    with tarfile.open(BEFORE) as archive:
        archive.extractall(tmp_path, filter="data")
    place = tmp_path / "before" / "lake" / "billing" / "invoices"
    rows = ids(place)
    owner = DeltaTable(str(place)).metadata().configuration["headrace.writer"]
    folder = Folder.of(str(place), {})
    delta = Delta.open(folder, owner)
    assert delta
    epoch = delta.properties[EPOCH]
    assert delta.applied(epoch) > 0
    assert not delta.has_vectors
    assert DeltaTable(str(place)).protocol().min_reader_version == 1
    delta.enable_vectors()
    delta.enable_vectors()
    [path] = delta.files
    marks = Marks(batch_id=7, epoch=epoch, sequence=10_000)
    delta.commit([], [], dead={path: BitMap([0]).serialize()}, marks=marks)
    assert delta.files[path].live == delta.files[path].rows - 1
    assert len(ids(place)) == len(rows) - 1
    assert delta.properties["delta.logRetentionDuration"] == "interval 1 days"
    again = Delta.open(folder, owner)
    assert again
    assert again.has_vectors
    assert again.applied(epoch) == 10_000


def test_every_table_of_an_earlier_version_is_opened(tmp_path: Path) -> None:
    with tarfile.open(BEFORE) as archive:
        archive.extractall(tmp_path, filter="data")
    logs = list((tmp_path / "before").rglob("_delta_log"))
    assert len(logs) > 5
    for log in logs:
        known = DeltaTable(str(log.parent))
        delta = Delta.open(
            Folder.of(str(log.parent), {}), known.metadata().configuration["headrace.writer"]
        )
        assert delta
        assert delta.version == known.version()
        files = {str(log.parent / path) for path in delta.files}
        assert files == set(known.file_uris())
        assert delta.schema == pa.schema(known.schema().to_arrow())


def test_a_table_without_vectors_keeps_its_old_protocol(tmp_path: Path) -> None:
    table = Written(tmp_path / "table", vectors=False)
    known = DeltaTable(str(table.path))
    assert (known.protocol().min_reader_version, known.protocol().min_writer_version) == (1, 2)
    assert known.to_pyarrow_table().num_rows == 200  # by a reader that knows none


# --- one writer ----------------------------------------------------------------------------------


def test_of_several_writers_exactly_one_gets_a_version(tmp_path: Path) -> None:
    table = Written(tmp_path / "table")
    script = textwrap.dedent(
        """
        import sys
        from headrace.sinks.lake.deltalog import Action, DeltaCommit, DeltaLog
        from headrace.sinks.lake.storage import Folder
        log = DeltaLog(Folder.of(sys.argv[1], {}))
        print("ready", flush=True)
        sys.stdin.readline()
        won = [log.put(DeltaCommit(version, [Action()])) for version in range(2, 102)]
        print(sum(won))
        """
    )
    command = [sys.executable, "-c", script, str(table.path)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("\n")
        racer.stdin.flush()
    won = [int(racer.communicate()[0]) for racer in racers]
    assert sum(won) == 100
    assert len(table.log) == 102  # and no leftover


def test_a_crash_between_vectors_and_commit_changes_nothing(table: Written) -> None:
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from headrace.sinks.lake.deltalog import DeltaLog
        from tests.sinks.deltas import *
        DeltaLog.put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        folder = Folder.of(sys.argv[1], {})
        delta = Delta.open(folder, WRITER)
        marks = Marks(batch_id=9, epoch="e", sequence=90)
        delta.commit([], [], dead={next(iter(delta.files)): BitMap([1]).serialize()}, marks=marks)
        """
    )
    done = subprocess.run([sys.executable, "-c", script, str(table.path)], check=False)
    assert done.returncode == -signal.SIGKILL
    [leftover] = table.path.glob("deletion_vector_*.bin")
    assert table.ids() == list(range(200))
    table.open()
    table.kill(0, 1)
    assert table.ids() == without(200, 1)
    assert [table.delta.vacuum(0), table.delta.vacuum(0)] == [0, 1]
    assert not leftover.exists()
    assert table.ids() == without(200, 1)


def test_who_has_been_taken_over_from_writes_no_more(table: Written) -> None:
    with pytest.raises(SinkFenced, match="another pipeline writes"):
        Delta.open(table.folder, "query-2")
    other = Delta.open(table.folder, "query-2", adopt=True)
    assert other
    with pytest.raises(SinkFenced, match="taken over"):
        table.kill(0, 1)
    other.commit([], [], dead={table.added[0].path: BitMap([2]).serialize()}, marks=table.marks())
    assert table.ids() == without(200, 2)


def test_a_second_process_of_the_same_writer_is_noticed(table: Written) -> None:
    other = Delta.open(table.folder, WRITER)
    assert other
    other.note({"headrace.key": "id"})
    table.kill(0, 1)  # metadata alone is taken over
    assert table.delta.properties["headrace.key"] == "id"
    with pytest.raises(SinkFenced, match="not committed"):
        other.commit([], [table.added[1].path], marks=table.marks())
    assert table.ids() == without(200, 1)


def test_a_commit_whose_answer_was_lost_counts_once(
    table: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = DeltaLog.put

    def answered_late(log: DeltaLog, commit: DeltaCommit) -> bool:
        put(log, commit)
        return put(log, commit)  # as a client does that has got no answer

    monkeypatch.setattr(DeltaLog, "put", answered_late)
    table.kill(0, 1)
    assert (table.delta.version, table.ids()) == (2, without(200, 1))

    def lost(log: DeltaLog, commit: DeltaCommit) -> bool:
        put(log, commit)
        raise SinkUnavailable("no answer")

    monkeypatch.setattr(DeltaLog, "put", lost)
    with pytest.raises(SinkUnavailable):
        table.kill(0, 2)
    monkeypatch.setattr(DeltaLog, "put", put)
    with pytest.raises(TableMoved, match="after all"):
        table.kill(0, 2)
    assert table.delta.applied("e") == 30
    assert list(table.delta.dead(table.added[0].path)) == [1, 2]
    table.kill(0, 3)
    assert table.ids() == without(200, 1, 2, 3)


def test_no_second_table_is_made(table: Written) -> None:
    with pytest.raises(SinkUnavailable, match="There is one"):
        Delta.create(table.folder, SCHEMA, {}, writer="query-2")


def test_a_restored_log_goes_on(table: Written) -> None:
    table.delta.note({EPOCH: "e"})
    with pytest.raises(LogReplaced, match="ends at 3"):
        table.delta.continue_in("e", "f", 3, "1a")
    table.delta.continue_in("other", "f", 10, "1a")
    version = table.delta.version
    table.delta.continue_in("e", "f", 10, "1a")
    assert table.delta.version == version + 1
    assert (table.open().applied("f"), table.delta.properties[EPOCH]) == (10, "f")
    assert table.open().place("f") == Progress("f", 10, "1a")


def test_commits_are_readable_as_files_are_here(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        table = Written(tmp_path / "table")
        table.kill(0, 1)
    finally:
        os.umask(before)
    for file in table.path.rglob("*"):
        assert stat.S_IMODE(file.stat().st_mode) == (0o700 if file.is_dir() else 0o600), file


# --- upkeep --------------------------------------------------------------------------------------


def test_checkpoints_come_by_themselves_and_old_commits_go(table: Written) -> None:
    table.delta.note({"delta.checkpointInterval": "5"})
    for at in range(12):
        table.kill(0, at)
    assert [name for name in table.log if "checkpoint.parquet" in name] == [
        f"{version:020d}.checkpoint.parquet" for version in (5, 10)
    ]
    log = table.path / "_delta_log"
    (log / ".headrace-0123").touch()
    os.utime(log / ".headrace-0123", (0, 0))
    for version in range(9):
        for file in log.glob(f"{version:020d}.*"):
            os.utime(file, (0, 0))
    assert DeltaLog(table.folder).clean(timedelta(days=1)) == 6
    assert table.log[0] == f"{5:020d}.checkpoint.parquet"
    assert table.ids() == without(200, *range(12))
    left = table.delta
    assert table.open()._state == left._state


def test_of_old_checkpoints_one_an_hour_stays(table: Written) -> None:
    for at in range(8):
        table.kill(0, at)
        table.delta.checkpoint()
    log = table.path / "_delta_log"
    now = datetime.now(UTC).replace(minute=30)
    ages = {2: 5.2, 3: 5.1, 4: 5.0, 5: 4.1, 6: 4.0, 7: 0.1, 8: 0.1, 9: 0}
    for version, hours in ages.items():
        moment = (now - timedelta(hours=hours)).timestamp()
        os.utime(log / f"{version:020d}.checkpoint.parquet", (moment, moment))
    assert DeltaLog(table.folder).clean(timedelta(days=1)) == 3
    left = [int(name[:20]) for name in table.log if "checkpoint.parquet" in name]
    assert left == [4, 6, 7, 8, 9]
    assert table.open().version == 9


def test_the_checkpoint_stays_that_the_commits_kept_begin_with(table: Written) -> None:
    for at in range(4):
        table.kill(0, at)
        table.delta.checkpoint()
    log = table.path / "_delta_log"
    hour = datetime.now(UTC).replace(minute=10) - timedelta(hours=5)
    for version in range(6):
        # 3 and 4 are of one hour, but only the first of them is older than what is kept.
        moment = (hour + timedelta(minutes=(version - 3) * 20)).timestamp()
        for file in log.glob(f"{version:020d}.*"):
            os.utime(file, (moment, moment))
    DeltaLog(table.folder).clean(datetime.now(UTC) - hour - timedelta(minutes=10))
    assert table.log[0] == f"{3:020d}.checkpoint.parquet"
    state = DeltaLog(table.folder).read(3)
    assert state
    assert state.version == 3


def test_marks_outlast_the_time_that_others_set_for_them(table: Written) -> None:
    name = "delta.setTransactionRetentionDuration"
    table.delta.note({name: "interval 0 seconds"})
    table.kill(0, 1)
    table.delta.checkpoint()
    for file in (table.path / "_delta_log").glob("*.json"):
        file.unlink()
    assert table.open().applied("e") == 20
    assert table.delta._state.transactions["headrace.version"] == table.delta.version


def test_a_checkpoint_that_fails_stops_nothing(
    table: Written, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: DeltaTable) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(DeltaTable, "create_checkpoint", full)
    table.delta.note({"delta.checkpointInterval": "1"})
    table.kill(0, 1)
    assert "no checkpoint" in caplog.text
    assert table.ids() == without(200, 1)


def test_unused_files_are_deleted_after_a_while(table: Written) -> None:
    table.kill(0, 1)
    table.kill(0, 2)
    leftover = table.file([1])  # a task that was killed
    table.delta.commit([table.file(range(100, 200))], [table.added[1].path])
    hidden = [table.path / name for name in ("_change_data/a.parquet", ".tool/b.parquet")]
    for file in hidden:
        file.parent.mkdir()
        file.touch()
    (table.path / "README.md").touch()
    assert table.delta.vacuum(1) == 0
    assert (table.path / leftover.path).exists()
    notes = table.path / "_headrace" / "unused.json"
    noted = json.loads(notes.read_text())["since"]
    [(moment, unused)] = noted.items()
    assert {leftover.path, table.added[1].path} < set(unused)
    assert len(unused) == 3
    # An hour later, but one of them has been committed, and another one has come.
    table.commit([leftover])
    young = table.file([2])
    notes.write_text(json.dumps({"since": {str(int(moment) - 3_600_001): unused}}))
    assert table.delta.vacuum(1) == 2
    assert not (table.path / table.added[1].path).exists()
    assert (table.path / leftover.path).exists()
    assert (table.path / young.path).exists()
    assert all(file.exists() for file in [*hidden, table.path / "README.md"])
    assert table.ids() == sorted([*without(200, 1, 2), 1])
    notes.write_text("{")
    assert [table.delta.vacuum(0), table.delta.vacuum(0)] == [0, 1]


def test_what_is_left_of_a_write_that_was_killed_is_deleted(table: Written) -> None:
    left = table.path / f".headrace-{'0' * 32}"
    left.touch()
    assert [table.delta.vacuum(0), table.delta.vacuum(0)] == [0, 1]
    assert not left.exists()


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_a_vector_that_the_log_names_by_its_whole_path_is_not_deleted(
    table: Written, scheme: str
) -> None:
    table.kill(0, 5)
    file = table.delta.files[table.added[0].path]
    assert file.vector
    path = f"{scheme}{table.path / file.vector.file}"
    named = msgspec.structs.replace(file.vector, storageType="p", pathOrInlineDv=path)
    log = table.path / "_delta_log" / f"{2:020d}.json"
    before, after = (msgspec.json.encode(each).decode() for each in (file.vector, named))
    log.write_text(log.read_text().replace(before, after))
    assert table.open().vacuum(0) == 0
    assert list(table.delta.dead(file.path)) == [5]


@pytest.mark.parametrize("scheme", ["", "file:", "file://", "s3a://bucket"])
def test_a_file_outside_of_the_folder_fails_the_table(table: Written, scheme: str) -> None:
    log = table.path / "_delta_log" / f"{1:020d}.json"
    path = table.added[0].path
    log.write_text(log.read_text().replace(f'"{path}"', f'"{scheme}/elsewhere/{path}"'))
    with pytest.raises(TableFailed, match="outside of its folder"):
        table.open()


def test_nothing_of_a_compaction_by_others_is_deleted(table: Written) -> None:
    assert DeltaTable(str(table.path)).optimize.compact()["numFilesAdded"] == 1
    assert [table.delta.vacuum(0), table.delta.vacuum(0)] == [0, 2]
    assert table.ids() == list(range(200))
    assert table.open().vacuum(0) == 0
