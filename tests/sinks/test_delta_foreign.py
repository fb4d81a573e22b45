"""Other tools that write our Delta tables: understood, or the table fails with the way out."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyroaring import BitMap

from headrace.errors import SinkFenced, TableFailed, TableMoved
from headrace.sinks.lake import vectors
from headrace.sinks.lake.delta import Delta
from headrace.sinks.lake.deltalog import (
    Action,
    AddFile,
    DataFile,
    DeltaCommit,
    DeltaLog,
    Metadata,
    ProtocolVersions,
)
from tests.sinks.deltas import SCHEMA, WRITER, Written, without

Other = Callable[[Written], None]


@pytest.fixture(params=["vectors", "none"])
def table(tmp_path: Path, request: pytest.FixtureRequest) -> Written:
    made = Written(tmp_path / "table", vectors=request.param == "vectors")
    if made.delta.has_vectors:
        made.kill(0, 5)
    else:
        made.commit([made.file([])])
    return made


def opened(table: Written) -> DeltaTable:
    return DeltaTable(str(table.path))


def foreign(table: Written, *actions: Action, operation: str = "WRITE") -> None:
    """A commit as another tool makes it."""
    info = {"operation": operation, "engineInfo": "Tool/1", "timestamp": 1_700_000_000_000}
    log = DeltaLog(table.folder)
    state = log.read()
    assert state
    assert log.put(DeltaCommit(state.version + 1, [Action(commit_info=info), *actions]))


def numbers(*given: int) -> pa.Table:
    return pa.table({"id": list(given), "name": ["x"] * len(given)}, schema=SCHEMA)


# --- understood ----------------------------------------------------------------------------------


def compact(table: Written) -> None:
    assert opened(table).optimize.compact()["numFilesRemoved"] > 1


def purge(table: Written) -> None:
    opened(table).vacuum(0, dry_run=False, enforce_retention_duration=False)


def checkpoint(table: Written) -> None:
    opened(table).create_checkpoint()


def describe(table: Written) -> None:
    opened(table).alter.set_table_properties({"delta.checkpointInterval": "50"})


def undo(table: Written) -> None:
    before = opened(table).version()
    write_deltalake(str(table.path), numbers(500), mode="append")
    opened(table).restore(before)


def delete(table: Written) -> None:
    assert opened(table).delete("id in (7, 150)")["num_deleted_rows"] == 2


def delete_in_vain(table: Written) -> None:
    before = opened(table).version()
    delete(table)
    opened(table).restore(before)


def delete_by_vector(table: Written) -> None:
    log = DeltaLog(table.folder)
    state = log.read()
    assert state
    if not table.delta.has_vectors:
        delete(table)
        return
    files = [state.files[added.path] for added in table.added]
    dead = {files[0].path: BitMap([5, 7]), files[1].path: BitMap([50])}
    refs = vectors.write(table.folder, dead)
    removes = [Action(remove=file.removed(1, data_change=True)) for file in files]
    adds = [Action(add=file.added(refs[file.path], data_change=True)) for file in files]
    foreign(table, *removes, *adds, operation="DELETE")


UNDERSTOOD: list[tuple[Other, tuple[int, ...]]] = [
    (compact, ()),
    (purge, ()),
    (checkpoint, ()),
    (describe, ()),
    (undo, ()),
    (delete_in_vain, ()),
    (delete, (7, 150)),
    (delete_by_vector, (7, 150)),
]
NAMES = [each.__name__ for each, _ in UNDERSTOOD]


@pytest.mark.parametrize(("other", "gone"), UNDERSTOOD, ids=NAMES)
def test_what_is_understood_is_taken_over_by_a_running_table(
    table: Written, other: Other, gone: tuple[int, ...]
) -> None:
    had = table.ids()
    other(table)
    table.commit([table.file([300])])
    assert table.ids() == sorted({*had, 300} - set(gone))
    assert table.delta.version == opened(table).version()
    left = table.delta
    assert table.open()._state == left._state


@pytest.mark.parametrize(("other", "gone"), UNDERSTOOD, ids=NAMES)
def test_what_is_understood_is_taken_over_at_the_start(
    table: Written, other: Other, gone: tuple[int, ...]
) -> None:
    had = table.ids()
    other(table)
    assert table.open().version == opened(table).version()
    table.commit([table.file([300])])
    assert table.ids() == sorted({*had, 300} - set(gone))


def test_rows_that_others_deleted_stay_deleted(tmp_path: Path) -> None:
    table = Written(tmp_path / "table")
    delete_by_vector(table)
    table.kill(0, 8)  # noticed on the way
    assert table.ids() == without(200, 5, 7, 8, 150)
    assert list(table.delta.dead(table.added[0].path)) == [5, 7, 8]


def test_a_batch_about_files_that_are_gone_is_applied_again(tmp_path: Path) -> None:
    table = Written(tmp_path / "table")
    table.kill(0, 5)
    compact(table)
    with pytest.raises(TableMoved, match="replaced files"):
        table.kill(0, 6)
    [new] = table.delta.files
    assert new != table.added[0].path
    rows = table.folder.read(new)["id"].to_pylist()
    table.commit(dead={new: [rows.index(6)]})
    assert table.ids() == without(200, 5, 6)


def test_rows_deleted_during_a_compaction_do_not_come_back(tmp_path: Path) -> None:
    table = Written(tmp_path / "table")
    joined = table.file(range(200))
    delete_by_vector(table)
    with pytest.raises(TableMoved):
        table.delta.commit([joined], [file.path for file in table.added])
    assert table.ids() == without(200, 5, 7, 150)


def test_a_deletion_that_knows_only_earlier_vectors_fails_the_table(tmp_path: Path) -> None:
    table = Written(tmp_path / "table")
    table.kill(0, 5)
    stale = table.delta.files[table.added[0].path]
    table.kill(0, 8)
    refs = vectors.write(table.folder, {stale.path: BitMap([5, 6, 7])})
    remove = Action(remove=stale.removed(1, data_change=True))
    add = Action(add=stale.added(refs[stale.path], data_change=True))
    foreign(table, remove, add, operation="DELETE")
    assert 8 in table.ids()
    with pytest.raises(TableFailed, match=r"DELETE by Tool/1 .* added or changed rows"):
        table.commit([table.file([300])])


def test_files_without_statistics_are_counted(tmp_path: Path) -> None:
    table = Written(tmp_path / "table")
    joined = table.file(range(200))
    add = DataFile(joined.path, joined.size, 200).added(None, data_change=False)
    removes = [file.removed(1, data_change=False) for file in table.delta.files.values()]
    foreign(table, Action(add=add), *(Action(remove=each) for each in removes))
    assert [file.rows for file in table.open().files.values()] == [200]
    table.commit(dead={joined.path: [3]})
    assert table.ids() == without(200, 3)
    assert table.open().files[joined.path].live == 199


# --- not understood ------------------------------------------------------------------------------


def append(table: Written) -> None:
    write_deltalake(str(table.path), numbers(500), mode="append")


def append_and_compact(table: Written) -> None:
    append(table)
    compact(table)


def append_and_delete(table: Written) -> None:
    write_deltalake(str(table.path), numbers(500, 501), mode="append")
    opened(table).delete("id = 501")


def overwrite(table: Written) -> None:
    write_deltalake(str(table.path), numbers(500), mode="overwrite")


def update(table: Written) -> None:
    opened(table).update(updates={"name": "'other'"}, predicate="id = 3")


def merge(table: Written) -> None:
    merging = opened(table).merge(numbers(3, 999), "t.id = s.id", "s", "t")
    merging.when_matched_update_all().when_not_matched_insert_all().execute()


def column(table: Written) -> None:
    fields = pa.schema([("more", pa.string())])
    write_deltalake(str(table.path), fields.empty_table(), mode="append", schema_mode="merge")


def replaced(table: Written) -> None:
    state = DeltaLog(table.folder).read()
    assert state
    removes = [Action(remove=file.removed(1, data_change=True)) for file in state.files.values()]
    metadata = Metadata("another", state.metadata.schema_string, [], {})
    foreign(table, Action(meta_data=metadata), *removes, operation="CREATE OR REPLACE TABLE")


def lie(table: Written) -> None:
    """A deletion that adds rows."""
    file = table.file([900])
    add = AddFile(file.path, {}, file.size, 1, data_change=True, stats=file.statistics)
    foreign(table, Action(add=add), operation="DELETE")


def append_as_no_change(table: Written) -> None:
    """An append that says that it changes no data."""
    file = table.file([900])
    add = AddFile(file.path, {}, file.size, 1, data_change=False, stats=file.statistics)
    foreign(table, Action(add=add))


def undelete(table: Written) -> None:
    """A file with all of its rows again, of which the commit does not say how many they are."""
    file = table.delta.files[table.added[0].path]
    if file.vector is None:
        return append(table)
    add = AddFile(file.path, {}, file.size, 1, data_change=True)
    foreign(table, Action(remove=file.removed(1, data_change=True)), Action(add=add))
    return None


NOT_UNDERSTOOD: list[tuple[Other, str]] = [
    (append_as_no_change, "WRITE by Tool/1 .* added or changed rows"),
    (undelete, "added or changed rows"),
    (append, r"WRITE by delta-rs.* at 20\d\d-.* UTC added or changed rows.*\(version 3\)"),
    (append_and_compact, r"WRITE by delta-rs.* added or changed rows.*\(version 3\)"),
    (append_and_delete, r"WRITE by delta-rs.* added or changed rows.*\(version 3\)"),
    (overwrite, "added or changed rows"),
    (update, "UPDATE by .* added or changed rows"),
    (merge, "MERGE by .* added or changed rows"),
    (column, "changed the columns"),
    (replaced, r"CREATE OR REPLACE TABLE by Tool/1 at 2023-11-14 22:13:20 UTC changed the columns"),
    (lie, "DELETE by Tool/1 .* added or changed rows"),
]


@pytest.mark.parametrize(
    ("other", "reason"), NOT_UNDERSTOOD, ids=[each.__name__ for each, _ in NOT_UNDERSTOOD]
)
def test_what_is_not_understood_fails_the_table(table: Written, other: Other, reason: str) -> None:
    other(table)
    version = opened(table).version()
    attempts: list[Callable[[], object]] = [
        lambda: table.commit([table.file([300])]),
        table.delta.refresh,
    ]
    for attempt in attempts:
        with pytest.raises(TableFailed, match=reason) as raised:
            attempt()
        assert "headrace snapshot" in raised.value.hint
        assert "version 2" in raised.value.hint
    if other is not replaced:
        with pytest.raises(TableFailed, match=reason):
            table.open()
    assert opened(table).version() == version


def test_a_table_that_begins_anew_is_opened_whatever_others_did(table: Written) -> None:
    append(table)
    delta = Delta.open(table.folder, WRITER, restart=True)
    assert delta
    delta.empty("e")
    assert table.open().files == {}
    table.commit([table.file([1])])
    assert table.ids() == [1]


def test_an_append_that_was_restored_is_forgotten(tmp_path: Path) -> None:
    table = Written(tmp_path / "table")
    append(table)
    with pytest.raises(TableFailed, match="version 2"):
        table.delta.refresh()
    opened(table).restore(1)
    table.commit([table.file([300])])
    assert table.ids() == [*range(200), 300]


def test_a_restore_to_an_older_state_fails_the_table(tmp_path: Path) -> None:
    table = Written(tmp_path / "table")
    table.commit([table.file([300])])  # without these rows, as if somebody had deleted them
    opened(table).restore(table.delta.version - 1)
    with pytest.raises(TableFailed, match=r"RESTORE by .* brought back an older state"):
        table.delta.refresh()
    with pytest.raises(TableFailed, match="older state"):
        table.open()


@pytest.mark.parametrize("statistics", ["{", '{"numRecords":"many"}', "[]", '{"minValues":7}'])
def test_statistics_that_nobody_can_read_are_none(tmp_path: Path, statistics: str) -> None:
    table = Written(tmp_path / "table")
    joined = table.file(range(200))
    add = DataFile(joined.path, joined.size, 200, statistics).added(None, data_change=False)
    removes = [file.removed(1, data_change=False) for file in table.delta.files.values()]
    foreign(table, Action(add=add), *(Action(remove=each) for each in removes))
    assert [file.rows for file in table.open().files.values()] == [200]
    table.commit(dead={joined.path: [3]})
    assert table.ids() == without(200, 3)


def test_what_was_understood_once_may_be_cleaned_away(tmp_path: Path) -> None:
    for name, look in (("open", Written.open), ("vacuum", lambda table: table.delta.vacuum(1))):
        table = Written(tmp_path / name)
        compact(table)
        checkpoint(table)
        look(table)
        for version in range(2):
            (table.path / "_delta_log" / f"{version:020d}.json").unlink()
        assert len(table.open().files) == 1


def test_changes_of_which_the_log_says_nothing_more_fail_the_table(tmp_path: Path) -> None:
    table = Written(tmp_path / "table")
    append(table)
    checkpoint(table)
    for version in range(2):
        (table.path / "_delta_log" / f"{version:020d}.json").unlink()
    with pytest.raises(TableFailed, match="no longer says how"):
        table.open()


# --- features ------------------------------------------------------------------------------------


def constraint(table: Written) -> None:
    opened(table).alter.add_constraint({"small": "id < 1000"})


def with_properties(**given: str) -> Other:
    def other(table: Written) -> None:
        state = DeltaLog(table.folder).read()
        assert state
        known = state.metadata
        metadata = Metadata(known.id, known.schema_string, [], known.configuration | given)
        foreign(table, Action(meta_data=metadata), operation="SET TBLPROPERTIES")

    return other


def with_features(*names: str) -> Other:
    def other(table: Written) -> None:
        listed = ["deletionVectors", *names]
        of_readers = [each for each in listed if each in ("deletionVectors", "vacuumProtocolCheck")]
        protocol = ProtocolVersions(3, 7, of_readers, listed)
        foreign(table, Action(protocol=protocol), operation="UPGRADE PROTOCOL")

    return other


def with_column(**metadata: str) -> Other:
    def other(table: Written) -> None:
        state = DeltaLog(table.folder).read()
        assert state
        known = state.metadata
        schema = json.loads(known.schema_string)
        schema["fields"][0]["metadata"] = metadata
        changed = Metadata(known.id, json.dumps(schema), [], known.configuration)
        foreign(table, Action(meta_data=changed), operation="CHANGE COLUMN")

    return other


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (constraint, "the CHECK constraint small"),
        (with_properties(**{"delta.enableChangeDataFeed": "true"}), "the change data feed"),
        (with_properties(**{"delta.appendOnly": "TRUE"}), "append-only"),
        (with_properties(**{"delta.columnMapping.mode": "name"}), "column mapping"),
        (with_properties(**{"delta.enableInCommitTimestamps": "true"}), "in-commit timestamps"),
        (with_features("rowTracking", "domainMetadata"), "domainMetadata, rowTracking"),
        (with_features("v2Checkpoint"), "v2Checkpoint"),
        (with_features("somethingNew"), "somethingNew"),
        (with_column(**{"delta.generationExpression": "1"}), r"generated column \(id\)"),
        (with_column(**{"delta.invariants": "{}"}), r"invariant \(id\)"),
        (with_column(**{"delta.identity.start": "1"}), r"identity column \(id\)"),
        (with_column(CURRENT_DEFAULT="1"), r"column default \(id\)"),
    ],
)
def test_features_that_we_do_not_write_fail_the_table(
    tmp_path: Path, other: Other, found: str
) -> None:
    table = Written(tmp_path / "table")
    other(table)
    for attempt in (lambda: table.commit([table.file([300])]), table.open):
        with pytest.raises(TableFailed, match=f"does not write: .*{found}") as raised:
            attempt()
        assert "DROP CONSTRAINT" in raised.value.hint


@pytest.mark.parametrize(
    "other",
    [
        with_features("checkConstraints", "changeDataFeed", "appendOnly"),
        with_properties(**{"delta.enableChangeDataFeed": "false", "comment": "x"}),
        with_column(comment="the key"),
    ],
)
def test_features_without_an_effect_are_taken_over(tmp_path: Path, other: Other) -> None:
    table = Written(tmp_path / "table")
    other(table)
    table.kill(0, 1)
    other(table)
    assert table.open().features >= {"deletionVectors"}
    table.kill(0, 2)
    assert table.ids() == without(200, 1, 2)


def test_another_headrace_that_takes_over_fences_this_one_off(tmp_path: Path) -> None:
    table = Written(tmp_path / "table")
    with_properties(**{"headrace.writer": "query-2"})(table)
    with pytest.raises(SinkFenced, match="taken over"):
        table.kill(0, 1)
    with pytest.raises(SinkFenced, match="another pipeline"):
        table.open()
