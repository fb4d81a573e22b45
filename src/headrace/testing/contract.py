"""What every source promises, as tests: a source runs them all by subclassing `SourceContract`.

    class TestMine(SourceContract):
        values = {"integer": Value("integer", "-7", "-7"), …}

        @pytest.fixture
        def place(self) -> Iterator[Place]:
            …                               # a fresh database, and the source that captures it

Its statements are those that all SQL databases share. pytest is not needed to import it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

from ..change.event import Batch, BeforeKind, Change, Op
from ..errors import HeadraceError, TableUnknown
from ..sources import Phase
from .reading import MARKS, PATIENCE, Place, Reading, image, reading, session
from .writing import alter, create, fill, write, writers

KINDS = ("integer", "big integer", "decimal", "text", "unicode", "binary", "date", "time", "moment")


@dataclass(frozen=True, slots=True)
class Value:
    """A column's type and a value of it, both as the database writes them, and its JSON."""

    type: str
    literal: str
    json: str


class SourceContract:
    """The tests; a subclass gives the fixture `place` and says what its database can do."""

    values: ClassVar[Mapping[str, Value]]  # at least one for each of KINDS
    sessions_at_once: ClassVar[bool] = True  # whether two transactions may be writing at once
    commit_order: ClassVar[bool] = True  # whether also of those that do not concern one another
    truncate: ClassVar[str] = "TRUNCATE TABLE {}"  # how a table is emptied

    # -- copy and stream ------------------------------------------------------------------------

    def test_rows_that_were_there_are_read_once(self, place: Place, tmp_path: Path) -> None:
        create(place, "users", rows=300)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            reads = feed.changes(Op.READ, table="users")
            assert [image(change.after)["id"] for change in reads] == list(range(1, 301))
            assert feed.changes(table="users")[0].op is Op.SCHEMA
            _expect_whole(feed)
            _expect_equal(place, feed, "users")

    def test_copy_and_stream_meet_exactly_while_others_write(
        self, place: Place, tmp_path: Path
    ) -> None:
        create(place, "users", rows=40)
        create(place, "orders", rows=2000)
        with reading(place, tmp_path) as feed:
            with writers(place, "users", "orders") as progress:
                progress()
                feed.until_told("users")
                progress()
                feed.catch_up()
                progress()
            feed.catch_up()
            _expect_whole(feed)
            _expect_equal(place, feed, "users", "orders")

    # -- resuming -------------------------------------------------------------------------------

    def test_stopped_after_every_batch_nothing_is_skipped_or_repeated(
        self, place: Place, tmp_path: Path
    ) -> None:
        create(place, "users", rows=20)
        with reading(place, tmp_path) as feed, writers(place, "users") as progress:
            for _ in range(10):
                feed.until(lambda batch: batch.changes, take=feed.step)
                feed.reopen()
                progress()
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            _expect_whole(feed)
            _expect_equal(place, feed, "users", surprises=True)

    def test_from_every_resume_the_rest_comes_again_as_it_was(
        self, place: Place, tmp_path: Path
    ) -> None:
        """What is not acknowledged is not forgotten, and has the same ids whenever it comes."""
        create(place, "users", rows=5)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            batches: list[Batch] = [Batch((), feed.log.resume(feed.source.name))]
            for number in range(1, 5):
                write(place, f"INSERT INTO users VALUES ({100 + number}, 'new', 1)")
                write(place, f"UPDATE users SET name = 'n{number}' WHERE id = {number}")
                batches += feed.pass_over()
            for at, batch in enumerate(batches, 1):
                if batch.resume is not None:
                    feed.close()
                    feed.go_back(batch.resume)
                    assert _told(feed.pass_over()) == _told(batches[at:]), f"after batch {at}"

    def test_a_batch_that_was_not_stored_comes_again(self, place: Place, tmp_path: Path) -> None:
        create(place, "users", rows=5)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            write(place, "DELETE FROM users WHERE id = 1")
            lost = _told(feed.until(_tells(Op.DELETE), take=feed.peek))
            feed.reopen()
            assert _told(feed.until(_tells(Op.DELETE), take=feed.step)) == lost

    # -- transactions ---------------------------------------------------------------------------

    def test_what_was_rolled_back_never_appears(self, place: Place, tmp_path: Path) -> None:
        create(place, "users", rows=1)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            writer = place.connect()
            writer.execute("INSERT INTO users VALUES (2, 'undone', 0)")
            writer.rollback()
            writer.execute("INSERT INTO users VALUES (3, 'kept', 0)")
            writer.execute("SAVEPOINT a")
            writer.execute("UPDATE users SET name = 'undone' WHERE id = 3")
            writer.execute("ROLLBACK TO SAVEPOINT a")
            writer.execute("INSERT INTO users VALUES (4, 'kept', 0)")
            writer.commit()
            writer.execute("DELETE FROM users")
            writer.close()
            feed.catch_up()
            streamed = feed.changes(Op.INSERT, Op.UPDATE, Op.DELETE, table="users")
            assert [image(change.after) for change in streamed] == [
                {"id": 3, "name": "kept", "amount": 0},
                {"id": 4, "name": "kept", "amount": 0},
            ]
            assert len({change.transaction.id for change in streamed}) == 1
            _expect_whole(feed)

    def test_transactions_that_overlap_come_whole_in_the_order_of_their_commits(
        self, place: Place, tmp_path: Path
    ) -> None:
        if not self.sessions_at_once:
            raise SkipTest("here only one transaction writes at a time")
        create(place, "users", rows=3)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            first, second, third = (place.connect() for _ in range(3))
            for turn in range(3):
                for number, writer in enumerate((first, second, third), 1):
                    writer.execute(f"UPDATE users SET amount = {turn} WHERE id = {number}")
            for writer in (third, first, second):
                writer.commit()
                if not self.commit_order:
                    feed.catch_up()
                writer.close()
            feed.catch_up()
            updates = feed.changes(Op.UPDATE, table="users")
            assert [image(change.after)["id"] for change in updates] == [3] * 3 + [1] * 3 + [2] * 3
            _expect_whole(feed)

    def test_a_transaction_that_commits_late_is_not_missed(
        self, place: Place, tmp_path: Path
    ) -> None:
        if not self.sessions_at_once:
            raise SkipTest("here only one transaction writes at a time")
        create(place, "users", rows=1)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            late = place.connect()
            late.execute("INSERT INTO users VALUES (2, 'late', 0)")
            write(place, "INSERT INTO users VALUES (3, 'early', 0)")
            feed.until_told("users", Op.INSERT)
            feed.reopen()
            late.execute("INSERT INTO users VALUES (4, 'later', 0)")
            late.commit()
            late.close()
            feed.catch_up()
            inserts = feed.changes(Op.INSERT, table="users")
            assert [image(change.after)["id"] for change in inserts] == [3, 2, 4]
            _expect_whole(feed)

    def test_a_large_transaction_is_seen_whole_or_not_at_all(
        self, place: Place, tmp_path: Path
    ) -> None:
        create(place, "users")
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            with session(place) as writer:
                fill(writer, "users", 20_000)
            feed.catch_up()
            inserts = feed.changes(Op.INSERT, table="users")
            assert [change.ordinal for change in inserts] == list(range(1, 20_001))
            _expect_whole(feed)

    # -- rows -----------------------------------------------------------------------------------

    def test_inserts_updates_and_deletes_carry_their_rows(
        self, place: Place, tmp_path: Path
    ) -> None:
        create(place, "users")
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            write(place, "INSERT INTO users VALUES (1, 'ann', NULL)")
            write(place, "UPDATE users SET amount = 9007199254740993 WHERE id = 1")
            write(place, "DELETE FROM users WHERE id = 1")
            feed.catch_up()
            insert, update, delete = feed.changes(Op.INSERT, Op.UPDATE, Op.DELETE, table="users")
            told = {"id": 1, "name": "ann", "amount": 9007199254740993}
            assert image(insert.after) == told | {"amount": None}
            absent = dict.fromkeys(update.unchanged)
            assert image(update.after) | absent == told | absent
            assert delete.after is None
            for change in (insert, update, delete):
                assert image(change.key) == {"id": 1}
                _expect_old_row(change, told if change.op is Op.DELETE else image(insert.after))

    def test_an_update_of_the_key_names_the_old_one(self, place: Place, tmp_path: Path) -> None:
        create(place, "users", rows=3)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            write(place, "UPDATE users SET id = 10 WHERE id = 2")
            feed.catch_up()
            assert [row["id"] for row in feed.rows("users")] == [1, 3, 10]
            _expect_equal(place, feed, "users")

    def test_values_read_by_the_copy_and_by_the_stream_are_the_same_json(
        self, place: Place, tmp_path: Path
    ) -> None:
        assert set(KINDS) <= set(self.values), f"values must have each of {KINDS}"
        values = list(self.values.values())
        names = [f"c{number}" for number in range(len(values))]
        columns = ", ".join(f"{n} {v.type}" for n, v in zip(names, values, strict=True))
        row = ", ".join(value.literal for value in values)
        write(place, f"CREATE TABLE things (id integer PRIMARY KEY, {columns})")
        write(place, f"INSERT INTO things VALUES (1, {row})")
        create(place, "users")
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            write(place, f"INSERT INTO things VALUES (2, {row})")
            write(place, "INSERT INTO things (id) VALUES (3)")
            feed.catch_up()
            copied, inserted, nothing = feed.changes(Op.READ, Op.INSERT, table="things")
        told = [f'"{n}":{v.json}' for n, v in zip(names, values, strict=True)]
        assert copied.after == f'{{"id":1,{",".join(told)}}}'.encode()
        assert inserted.after == f'{{"id":2,{",".join(told)}}}'.encode()
        assert image(nothing.after) == {"id": 3, **dict.fromkeys(names)}

    # -- tables ---------------------------------------------------------------------------------

    def test_rows_follow_the_columns_of_their_own_time(self, place: Place, tmp_path: Path) -> None:
        create(place, "users", rows=1)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            write(place, "INSERT INTO users VALUES (2, 'before', 1)")
            alter(place, "ALTER TABLE users ADD COLUMN note varchar(20)")
            write(place, "INSERT INTO users VALUES (3, 'between', 1, 'n')")
            alter(place, "ALTER TABLE users DROP COLUMN name")
            write(place, "INSERT INTO users VALUES (4, 1, 'n')")
            feed.catch_up()
            inserts = feed.changes(Op.INSERT, table="users")
            assert [list(image(change.after)) for change in inserts] == [
                ["id", "name", "amount"],
                ["id", "name", "amount", "note"],
                ["id", "amount", "note"],
            ]
            for change in inserts:
                assert [c.name for c in change.table.columns] == list(image(change.after))
            told = [
                [column["name"] for column in image(change.after)["columns"]]
                for change in feed.changes(Op.SCHEMA, table="users")
            ]
            # Columns may be told again, with the statement that changed them.
            distinct = [columns for columns, _ in itertools.groupby(told)]
            assert distinct == [list(image(change.after)) for change in inserts]

    def test_a_table_that_appears_later_is_copied(self, place: Place, tmp_path: Path) -> None:
        create(place, "users", rows=1)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            create(place, "later", rows=3)
            # Either way: found and copied, or captured already when the rows were written.
            feed.until(_tells(Op.READ, Op.INSERT, table="later"), take=feed.step)
            feed.catch_up()
            _expect_equal(place, feed, "later")

    def test_an_emptied_table_is_empty(self, place: Place, tmp_path: Path) -> None:
        create(place, "users", rows=3)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            write(place, self.truncate.format("users"))
            write(place, "INSERT INTO users VALUES (7, 'new', 0)")
            feed.catch_up()
            assert [row["id"] for row in feed.rows("users")] == [7]

    def test_a_table_is_copied_again_when_asked(self, place: Place, tmp_path: Path) -> None:
        create(place, "users", rows=3)
        create(place, "orders", rows=3)
        for tables, again in (([f"{place.schema}.users"], 6), ([], 9)):
            with reading(place, tmp_path) as feed:
                feed.catch_up()
                feed.close()
                resume = feed.source.copy_again(feed.log.resume(feed.source.name), tables)
                assert resume is not None
                feed.log.append(feed.source.name, Batch((), resume))
                feed.reopen()
                feed.catch_up()
                write(place, "UPDATE users SET amount = 5 WHERE id = 2")
                feed.catch_up()
                assert len(feed.changes(Op.READ, table="users")) == again
                assert len(feed.changes(Op.READ, table="orders")) == (6 if not tables else 3)
                _expect_equal(place, feed, "users", "orders")

    def test_a_table_that_is_not_captured_cannot_be_copied_again(
        self, place: Place, tmp_path: Path
    ) -> None:
        create(place, "users", rows=1)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            resume = feed.log.resume(feed.source.name)
            error = _failure(lambda: feed.source.copy_again(resume, [f"{place.schema}.nothing"]))
            assert isinstance(error, TableUnknown)

    # -- the server -----------------------------------------------------------------------------

    def test_another_database_under_the_same_name_halts(self, place: Place, tmp_path: Path) -> None:
        create(place, "users", rows=1)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            resume = feed.log.resume(feed.source.name)
            register = feed.log.register
        with place.another() as other:
            create(other, "users", rows=1)
            stream = other.source().open(resume, register)
            error = _failure(lambda: _drained(iter(stream)))
            stream.close()
        assert not error.retry
        assert error.hint

    def test_a_server_that_does_not_answer_is_waited_for(
        self, place: Place, tmp_path: Path
    ) -> None:
        create(place, "users", rows=1)
        with reading(place, tmp_path) as feed:
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
            write(place, "INSERT INTO users VALUES (2, 'after', 0)")
            feed.reopen()
            feed.catch_up()
            _expect_equal(place, feed, "users")

    def test_closed_from_another_thread_the_iteration_ends(
        self, place: Place, tmp_path: Path
    ) -> None:
        create(place, "users", rows=1)
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            feed.mark()
            feed.reopen()
            told = threading.Event()

            def read_to_the_end() -> None:
                for _ in feed.stream:
                    told.set()

            thread = threading.Thread(target=read_to_the_end, daemon=True)
            thread.start()
            assert told.wait(PATIENCE), "the stream says nothing"
            feed.stream.close()
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the stream does not end"
            feed.stream.close()  # once more, which must not matter

    # -- what it tells of itself ----------------------------------------------------------------

    def test_it_tells_how_it_is_doing_and_what_it_needs(self, place: Place, tmp_path: Path) -> None:
        create(place, "users", rows=3)
        create(place, "orders")
        with reading(place, tmp_path) as feed:
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
            assert [column.name for column in tables["users"].columns] == ["id", "name", "amount"]
            assert tables["users"].key == ("id",)
            assert (tables["users"].version, tables["users"].origin) == (0, "")
            captured = feed.changes(table="users")[0].table
            assert captured.origin
            assert captured.columns == tables["users"].columns


# --- judging -------------------------------------------------------------------------------------


def _tells(*ops: Op, table: str = "users") -> Callable[[Batch], bool]:
    return lambda batch: any(c.op in ops and c.table.name == table for c in batch.changes)


def _told(batches: Iterable[Batch]) -> list[tuple[object, ...]]:
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


def _expect_equal(place: Place, feed: Reading, *tables: str, surprises: bool = False) -> None:
    """The log adds up to what is in the database."""
    for table in tables:
        with session(place) as reader:
            found = reader.execute(f"SELECT id, name, amount FROM {table} ORDER BY id")
        rows = [dict(zip(("id", "name", "amount"), row, strict=True)) for row in found]
        assert feed.rows(table, surprises=surprises) == rows, table


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
