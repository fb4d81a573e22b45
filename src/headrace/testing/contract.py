"""What every source promises, as tests: a source runs them all by subclassing `SourceContract`.

    class TestMine(SourceContract):
        values = {"integer": Value("integer", "-7", "-7"), …}

        @pytest.fixture
        def place(self) -> Iterator[Place]:
            …                               # a fresh database, and the source that captures it

Rows are written by `writer`: in SQL, unless a subclass gives another one. pytest is not needed to
import it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

from ..change.event import Batch, BeforeKind, Change, Op
from ..errors import HeadraceError, TableUnknown
from ..sources import Phase
from .reading import MARKS, Place, Reading, image, reading, session
from .writing import PATIENCE, RowWriter, Session, SqlWriter, Value, fill, writers

KINDS = ("integer", "big integer", "decimal", "text", "unicode", "binary", "date", "time", "moment")


class SourceContract:
    """The tests; a subclass gives the fixture `place` and says what its database can do."""

    values: ClassVar[Mapping[str, Value]]  # at least one for each of KINDS
    sessions_at_once: ClassVar[bool] = True  # whether two transactions may be writing at once
    commit_order: ClassVar[bool] = True  # whether also of those that do not concern one another
    savepoints: ClassVar[bool] = True  # whether a part of a transaction can be undone
    keys_change: ClassVar[bool] = True  # whether an update may change a row's key
    columns_declared: ClassVar[bool] = True  # whether a table has columns before it has rows
    truncate: ClassVar[str] = "TRUNCATE TABLE {}"  # how a table is emptied, in SQL

    def writer(self, session: Any) -> RowWriter:
        """What writes rows over a session of the place; a database without SQL has its own."""
        return SqlWriter(session, truncate=self.truncate)

    def _reading(self, place: Place, folder: Path) -> AbstractContextManager[Reading]:
        return reading(place, folder, writer=self.writer)

    @contextmanager
    def _writing(self, place: Place) -> Iterator[RowWriter]:
        """A transaction of its own."""
        with session(place) as opened:
            yield self.writer(opened)

    def _create(self, place: Place, table: str, *, rows: int = 0) -> None:
        """A table with the rows 1 … `rows`."""
        with self._writing(place) as writer:
            writer.create(table)
        place.altered()
        with self._writing(place) as writer:
            fill(writer, table, rows)

    def _insert(
        self, place: Place, number: int, name: str, amount: int | None, **more: Any
    ) -> None:
        with self._writing(place) as writer:
            writer.insert("users", [{"id": number, "name": name, "amount": amount, **more}])

    def _delete(self, place: Place, number: int) -> None:
        with self._writing(place) as writer:
            writer.delete("users", [number])

    def _update(self, place: Place, number: int, **values: Any) -> None:
        with self._writing(place) as writer:
            writer.update("users", [number], values)

    def _writers(self, place: Place, *tables: str) -> AbstractContextManager[Callable[[], None]]:
        def connect() -> tuple[Session, RowWriter]:
            opened = place.connect()
            return opened, self.writer(opened)

        return writers(connect, *tables, keys_change=self.keys_change)

    def _expect_equal(
        self, place: Place, feed: Reading, *tables: str, surprises: bool = False
    ) -> None:
        """The log adds up to what is in the database."""
        for table in tables:
            with self._writing(place) as reader:
                rows = reader.rows(table)
            assert feed.rows(table, surprises=surprises) == rows, table

    # -- snapshot and stream --------------------------------------------------------------------

    def test_rows_that_were_there_are_read_once(self, place: Place, tmp_path: Path) -> None:
        self._create(place, "users", rows=300)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            reads = feed.changes(Op.READ, table="users")
            assert [image(change.after)["id"] for change in reads] == list(range(1, 301))
            assert feed.changes(table="users")[0].op is Op.SCHEMA
            _expect_whole(feed)
            self._expect_equal(place, feed, "users")

    def test_snapshot_and_stream_meet_exactly_while_others_write(
        self, place: Place, tmp_path: Path
    ) -> None:
        self._create(place, "users", rows=40)
        self._create(place, "orders", rows=2000)
        with self._reading(place, tmp_path) as feed:
            with self._writers(place, "users", "orders") as progress:
                progress()
                feed.until_change("users")
                progress()
                feed.catch_up()
                progress()
            feed.catch_up()
            _expect_whole(feed)
            self._expect_equal(place, feed, "users", "orders")

    # -- resuming -------------------------------------------------------------------------------

    def test_stopped_after_every_batch_nothing_is_skipped_or_repeated(
        self, place: Place, tmp_path: Path
    ) -> None:
        self._create(place, "users", rows=20)
        with self._reading(place, tmp_path) as feed, self._writers(place, "users") as progress:
            for _ in range(10):
                feed.until(lambda batch: batch.changes, take=feed.step)
                feed.reopen()
                progress()
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            _expect_whole(feed)
            self._expect_equal(place, feed, "users", surprises=True)

    def test_from_every_resume_the_rest_comes_again_as_it_was(
        self, place: Place, tmp_path: Path
    ) -> None:
        """What is not acknowledged is not forgotten, and has the same ids whenever it comes."""
        self._create(place, "users", rows=5)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            batches: list[Batch] = [Batch((), feed.log.resume(feed.source.name))]
            for number in range(1, 5):
                self._insert(place, 100 + number, "new", 1)
                self._update(place, number, name=f"n{number}")
                batches += feed.pass_over()
            for at, batch in enumerate(batches, 1):
                if batch.resume is not None:
                    feed.close()
                    feed.go_back(batch.resume)
                    assert _essence(feed.pass_over()) == _essence(batches[at:]), f"after batch {at}"

    def test_a_batch_that_was_not_stored_comes_again(self, place: Place, tmp_path: Path) -> None:
        self._create(place, "users", rows=5)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            self._delete(place, 1)
            lost = _essence(feed.until(_has(Op.DELETE), take=feed.peek))
            feed.reopen()
            assert _essence(feed.until(_has(Op.DELETE), take=feed.step)) == lost

    # -- transactions ---------------------------------------------------------------------------

    def test_what_was_rolled_back_never_appears(self, place: Place, tmp_path: Path) -> None:
        self._create(place, "users", rows=1)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            opened = place.connect()
            writer = self.writer(opened)
            writer.insert("users", [_user(2, "undone")])
            opened.rollback()
            writer.insert("users", [_user(3, "kept")])
            if self.savepoints:
                writer.savepoint()
                writer.update("users", [3], {"name": "undone"})
                writer.undo()
            writer.insert("users", [_user(4, "kept")])
            opened.commit()
            writer.delete("users")
            opened.close()
            feed.catch_up()
            streamed = feed.changes(Op.INSERT, Op.UPDATE, Op.DELETE, table="users")
            assert [image(change.after) for change in streamed] == [
                _user(3, "kept"),
                _user(4, "kept"),
            ]
            assert len({change.transaction.id for change in streamed}) == 1
            _expect_whole(feed)

    def test_transactions_that_overlap_come_whole_in_the_order_of_their_commits(
        self, place: Place, tmp_path: Path
    ) -> None:
        if not self.sessions_at_once:
            raise SkipTest("here only one transaction writes at a time")
        self._create(place, "users", rows=3)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            first, second, third = (place.connect() for _ in range(3))
            for turn in range(3):
                for number, opened in enumerate((first, second, third), 1):
                    self.writer(opened).update("users", [number], {"amount": turn})
            for opened in (third, first, second):
                opened.commit()
                if not self.commit_order:
                    feed.catch_up()
                opened.close()
            feed.catch_up()
            updates = feed.changes(Op.UPDATE, table="users")
            assert [image(change.after)["id"] for change in updates] == [3] * 3 + [1] * 3 + [2] * 3
            _expect_whole(feed)

    def test_a_transaction_that_commits_late_is_not_missed(
        self, place: Place, tmp_path: Path
    ) -> None:
        if not self.sessions_at_once:
            raise SkipTest("here only one transaction writes at a time")
        self._create(place, "users", rows=1)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            late = place.connect()
            self.writer(late).insert("users", [_user(2, "late")])
            self._insert(place, 3, "early", 0)
            feed.until_change("users", Op.INSERT)
            feed.reopen()
            self.writer(late).insert("users", [_user(4, "later")])
            late.commit()
            late.close()
            feed.catch_up()
            inserts = feed.changes(Op.INSERT, table="users")
            assert [image(change.after)["id"] for change in inserts] == [3, 2, 4]
            _expect_whole(feed)

    def test_a_large_transaction_is_seen_whole_or_not_at_all(
        self, place: Place, tmp_path: Path
    ) -> None:
        self._create(place, "users")
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            with self._writing(place) as writer:
                fill(writer, "users", 20_000)
            feed.catch_up()
            inserts = feed.changes(Op.INSERT, table="users")
            assert [change.ordinal for change in inserts] == list(range(1, 20_001))
            _expect_whole(feed)

    # -- rows -----------------------------------------------------------------------------------

    def test_inserts_updates_and_deletes_carry_their_rows(
        self, place: Place, tmp_path: Path
    ) -> None:
        self._create(place, "users")
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            self._insert(place, 1, "ann", None)
            self._update(place, 1, amount=9007199254740993)
            self._delete(place, 1)
            feed.catch_up()
            insert, update, delete = feed.changes(Op.INSERT, Op.UPDATE, Op.DELETE, table="users")
            row = {"id": 1, "name": "ann", "amount": 9007199254740993}
            assert image(insert.after) == row | {"amount": None}
            absent = dict.fromkeys(update.unchanged)
            assert image(update.after) | absent == row | absent
            assert delete.after is None
            for change in (insert, update, delete):
                assert image(change.key) == {"id": 1}
                _expect_old_row(change, row if change.op is Op.DELETE else image(insert.after))

    def test_an_update_of_the_key_names_the_old_one(self, place: Place, tmp_path: Path) -> None:
        if not self.keys_change:
            raise SkipTest("here a row keeps its key")
        self._create(place, "users", rows=3)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            self._update(place, 2, id=10)
            feed.catch_up()
            assert [row["id"] for row in feed.rows("users")] == [1, 3, 10]
            self._expect_equal(place, feed, "users")

    def test_values_read_by_the_snapshot_and_by_the_stream_are_the_same_json(
        self, place: Place, tmp_path: Path
    ) -> None:
        assert set(KINDS) <= set(self.values), f"values must have each of {KINDS}"
        values = list(self.values.values())
        names = [f"c{number}" for number in range(len(values))]
        row = dict(zip(names, values, strict=True))
        with self._writing(place) as writer:
            writer.create("things", {name: value.type for name, value in row.items()})
        with self._writing(place) as writer:
            writer.insert("things", [{"id": 1, **row}])
        self._create(place, "users")
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            for inserted in ({"id": 2, **row}, {"id": 3}):
                with self._writing(place) as writer:
                    writer.insert("things", [inserted])
            feed.catch_up()
            read, streamed, nothing = feed.changes(Op.READ, Op.INSERT, table="things")
        members = [f'"{name}":{value.json}' for name, value in row.items()]
        assert read.after == f'{{"id":1,{",".join(members)}}}'.encode()
        assert streamed.after == f'{{"id":2,{",".join(members)}}}'.encode()
        assert image(nothing.after) == {"id": 3, **dict.fromkeys(names * self.columns_declared)}

    # -- tables ---------------------------------------------------------------------------------

    def test_rows_follow_the_columns_of_their_own_time(self, place: Place, tmp_path: Path) -> None:
        if not self.columns_declared:
            raise SkipTest("here a table has no columns of its own")
        self._create(place, "users", rows=1)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            self._insert(place, 2, "before", 1)
            with self._writing(place) as writer:
                writer.add_column("users", "note")
            place.altered()
            self._insert(place, 3, "between", 1, note="n")
            with self._writing(place) as writer:
                writer.drop_column("users", "name")
            place.altered()
            with self._writing(place) as writer:
                writer.insert("users", [{"id": 4, "amount": 1, "note": "n"}])
            feed.catch_up()
            inserts = feed.changes(Op.INSERT, table="users")
            assert [list(image(change.after)) for change in inserts] == [
                ["id", "name", "amount"],
                ["id", "name", "amount", "note"],
                ["id", "amount", "note"],
            ]
            for change in inserts:
                assert [c.name for c in change.table.columns] == list(image(change.after))
            reported = [
                [column["name"] for column in image(change.after)["columns"]]
                for change in feed.changes(Op.SCHEMA, table="users")
            ]
            # Columns may be reported again, with the statement that changed them.
            distinct = [columns for columns, _ in itertools.groupby(reported)]
            assert distinct == [list(image(change.after)) for change in inserts]

    def test_a_table_that_appears_later_is_captured(self, place: Place, tmp_path: Path) -> None:
        self._create(place, "users", rows=1)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            self._create(place, "later", rows=3)
            # Either way: found and read, or captured already when the rows were written.
            feed.until(_has(Op.READ, Op.INSERT, table="later"), take=feed.step)
            feed.catch_up()
            self._expect_equal(place, feed, "later")

    def test_an_emptied_table_is_empty(self, place: Place, tmp_path: Path) -> None:
        self._create(place, "users", rows=3)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            with self._writing(place) as writer:
                writer.truncate("users")
            self._insert(place, 7, "new", 0)
            feed.catch_up()
            assert [row["id"] for row in feed.rows("users")] == [7]

    def test_a_table_is_read_again_on_request(self, place: Place, tmp_path: Path) -> None:
        self._create(place, "users", rows=3)
        self._create(place, "orders", rows=3)
        for tables, again in (([f"{place.schema}.users"], 6), ([], 9)):
            with self._reading(place, tmp_path) as feed:
                feed.catch_up()
                feed.close()
                resume = feed.source.copy_again(feed.log.resume(feed.source.name), tables)
                assert resume is not None
                feed.log.append(feed.source.name, Batch((), resume))
                feed.reopen()
                feed.catch_up()
                self._update(place, 2, amount=5)
                feed.catch_up()
                assert len(feed.changes(Op.READ, table="users")) == again
                assert len(feed.changes(Op.READ, table="orders")) == (6 if not tables else 3)
                self._expect_equal(place, feed, "users", "orders")

    def test_a_table_that_is_not_captured_cannot_be_read_again(
        self, place: Place, tmp_path: Path
    ) -> None:
        self._create(place, "users", rows=1)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            resume = feed.log.resume(feed.source.name)
            error = _failure(lambda: feed.source.copy_again(resume, [f"{place.schema}.nothing"]))
            assert isinstance(error, TableUnknown)

    # -- the server -----------------------------------------------------------------------------

    def test_another_database_under_the_same_name_halts(self, place: Place, tmp_path: Path) -> None:
        self._create(place, "users", rows=1)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            resume = feed.log.resume(feed.source.name)
            register = feed.log.register
        with place.another() as other:
            self._create(other, "users", rows=1)
            stream = other.source().open(resume, register)
            error = _failure(lambda: _drained(iter(stream)))
            stream.close()
        assert not error.retry
        assert error.hint

    def test_a_server_that_does_not_answer_is_waited_for(
        self, place: Place, tmp_path: Path
    ) -> None:
        self._create(place, "users", rows=1)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            feed.close()
            try:
                place.stop()
            except NotImplementedError as reason:
                raise SkipTest(f"it cannot be stopped: {reason}") from None
            try:
                stream = feed.source.open(feed.log.resume(feed.source.name), feed.log.register)
                error = _failure(lambda: _drained(iter(stream)))
                stream.close()
                assert error.retry, error
                assert not all(finding.ok for finding in feed.source.check())
            finally:
                place.start()
            self._insert(place, 2, "after", 0)
            feed.reopen()
            feed.catch_up()
            self._expect_equal(place, feed, "users")

    def test_closed_from_another_thread_the_iteration_ends(
        self, place: Place, tmp_path: Path
    ) -> None:
        self._create(place, "users", rows=1)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            feed.mark()
            feed.reopen()
            came = threading.Event()

            def read_to_the_end() -> None:
                for _ in feed.stream:
                    came.set()

            thread = threading.Thread(target=read_to_the_end, daemon=True)
            thread.start()
            assert came.wait(PATIENCE), "the stream gives nothing"
            feed.stream.close()
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the stream does not end"
            feed.stream.close()  # once more, which must not matter

    # -- what it reports -------------------------------------------------------------------------

    def test_it_reports_its_status_and_what_it_needs(self, place: Place, tmp_path: Path) -> None:
        self._create(place, "users", rows=3)
        self._create(place, "orders")
        with self._reading(place, tmp_path) as feed:
            assert feed.stream.status().phase is Phase.STARTING
            feed.catch_up()
            source, status = feed.source, feed.stream.status()
            assert (status.source, status.phase) == (source.name, Phase.STREAMING)
            assert status.position
            assert status.errored == {}
            copies = {copy.table: (copy.rows, copy.done) for copy in status.copies}
            assert copies[f"{place.schema}.users"] == (3, True)
            described = source.describe(feed.log.resume(source.name))
            assert (described.phase, described.position) == (Phase.STOPPED, status.position)
            assert source.describe(None).phase is Phase.STOPPED
            assert source.host
            findings = source.check()
            assert findings
            assert [finding for finding in findings if not finding.ok] == []
            tables = {table.name: table for table in source.captured_tables()}
            assert set(tables) == {"users", "orders", MARKS}
            if self.columns_declared:
                names = [column.name for column in tables["users"].columns]
                assert names == ["id", "name", "amount"]
            assert tables["users"].key == ("id",)
            assert (tables["users"].version, tables["users"].origin) == (0, "")
            captured = feed.changes(table="users")[0].table
            assert captured.origin
            assert captured.columns == tables["users"].columns

    def test_what_it_put_into_the_database_is_taken_out_again(
        self, place: Place, tmp_path: Path
    ) -> None:
        self._create(place, "users", rows=3)
        with self._reading(place, tmp_path) as feed:
            feed.catch_up()
            source, resume = feed.source, feed.log.resume(feed.source.name)
            shown = source.remove(resume, dry_run=True)
            self._insert(place, 4, "still captured", 0)
            feed.catch_up()
            self._expect_equal(place, feed, "users")
            feed.close()
            taken = source.remove(feed.log.resume(source.name))
            assert [each.what for each in taken] == [each.what for each in shown]
            assert all(each.statement for each in taken)
            assert [each.error for each in taken if each.error] == []
            assert source.remove(None) == [], "something was left"
            self._insert(place, 5, "free", 0)
            self._update(place, 5, name="still free")
            self._delete(place, 5)


# --- judging -------------------------------------------------------------------------------------


def _user(number: int, name: str) -> dict[str, Any]:
    return {"id": number, "name": name, "amount": 0}


def _has(*ops: Op, table: str = "users") -> Callable[[Batch], bool]:
    return lambda batch: any(c.op in ops and c.table.name == table for c in batch.changes)


def _essence(batches: Iterable[Batch]) -> list[tuple[object, ...]]:
    """What must be the same each time a change comes."""
    return [
        (c.id, c.op, c.key, c.before, c.after, c.transaction.id, c.ordinal, c.last)
        for batch in batches
        for c in batch.changes
        if c.table.name != MARKS
    ]


def _expect_whole(feed: Reading) -> None:
    """Every transaction is complete and in one piece, and no change is there twice."""
    changes = feed.log.read(0, limit=1 << 30)
    assert len({change.id for change in changes}) == len(changes), "a change is there twice"
    starts = [change.ordinal == 1 for change in changes]
    assert starts == [True, *(change.last for change in changes[:-1])], "a part is missing"
    for one, following in itertools.pairwise(changes):
        if not one.last:
            assert one.transaction.id == following.transaction.id
            assert one.ordinal + 1 == following.ordinal


def _expect_old_row(change: Change, row: dict[str, Any]) -> None:
    """The old row is what `before_kind` says, and never invented."""
    before = None if change.before is None else image(change.before)
    match change.before_kind:
        case BeforeKind.FULL:
            assert before == row
        case BeforeKind.KEY:
            assert before == image(change.key)
        case BeforeKind.NONE:
            assert before is None


def _failure(act: Callable[[], object]) -> HeadraceError:
    try:
        act()
    except HeadraceError as error:
        return error
    raise AssertionError("nothing was refused")


def _drained(batches: Iterator[Batch]) -> None:
    for _ in batches:
        pass
