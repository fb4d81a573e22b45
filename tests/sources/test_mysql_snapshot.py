"""A snapshot in several sessions, and one that was interrupted and goes on where it stopped."""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from headrace.change.event import Batch, Change, Op
from headrace.change.replay import Replay, Row, TableName
from headrace.errors import SourceUnavailable
from headrace.log import Log
from headrace.sources.mysql import Mysql, aside, plan, snapshot, stream
from headrace.sources.mysql.address import run
from headrace.sources.mysql.catalog import BinlogEnd, FoundTable, MysqlCatalog
from headrace.sources.mysql.decode.columns import DeclaredColumn
from headrace.sources.mysql.keys import KeyOrder
from headrace.sources.mysql.resume import (
    DeclaredTable,
    MysqlResume,
    PrimaryKeyRange,
    decode,
    file_number,
    snapshot_again,
)
from headrace.sources.mysql.snapshot import MysqlSnapshot
from headrace.testing.mysql import MysqlDatabase
from tests.mysqls import mysql_of
from tests.sources.capturing import driven
from tests.sources.mycapturing import Captured, captured, image, ordered
from tests.sources.myplaces import mysql

_ROWS = 2000


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges and batches of some rows, so that small tables have several; nobody waits long."""
    monkeypatch.setattr(snapshot, "RANGE_ROWS", 300)
    monkeypatch.setattr(plan, "RANGE_ROWS", 0)
    monkeypatch.setattr(snapshot, "BATCH_ROWS", 100)
    monkeypatch.setattr(aside, "_FIRST_SECONDS", 0.2)
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.sources.mysql.stream._WAIT_SECONDS", 0.05)


@dataclass(frozen=True, slots=True)
class Kind:
    """A primary key: its columns, and the expression of each for the number {0}."""

    columns: dict[str, str]
    values: tuple[str, ...]

    @property
    def names(self) -> str:
        """Its columns in a statement."""
        return ", ".join(self.columns)

    def create(self, database: MysqlDatabase, rows: int = _ROWS) -> None:
        """A table of it; `seq` has the number, `n` counts the versions of a row."""
        columns = ", ".join(f"{name} {kind}" for name, kind in self.columns.items())
        database.execute(
            f"CREATE TABLE users (n int, seq int, s varchar(90), {columns},"
            f" PRIMARY KEY ({self.names}))"
        )
        self.insert(database, 1, rows)

    def insert(self, database: MysqlDatabase, first: int, last: int) -> None:
        """New rows."""
        values = ", ".join(value.format("seq") for value in self.values)
        database.execute(
            f"INSERT INTO users (n, seq, s, {self.names})"
            f" SELECT 0, seq, repeat('x', 80), {values} FROM seq_{first}_to_{last}"
        )

    def move(self, database: MysqlDatabase, by: int, where: str) -> None:
        """Give rows other keys."""
        values = [value.format(f"(seq + {by})") for value in self.values]
        keys = ", ".join(
            f"{name} = {value}" for name, value in zip(self.columns, values, strict=True)
        )
        database.execute(f"UPDATE users SET n = n + 1, {keys} WHERE {where}")


NUMBER = Kind({"id": "int"}, ("{0}",))
CERTAIN = {
    "integer": NUMBER,
    "negative": Kind({"id": "bigint"}, ("CAST({0} AS SIGNED) - 1000",)),
    "unsigned": Kind({"id": "bigint unsigned"}, ("9223372036854775808 + {0} - 1000",)),
    "decimal": Kind({"id": "decimal(20,3) zerofill"}, ("({0} + 10000) / 8",)),
    "day": Kind({"id": "date"}, ("'2000-01-01' + INTERVAL {0} DAY",)),
    "moment": Kind({"id": "datetime(3)"}, ("'2000-01-01' + INTERVAL {0} * 250000 MICROSECOND",)),
    "instant": Kind({"id": "timestamp"}, ("'2005-01-01' + INTERVAL {0} MINUTE",)),
    "bytes": Kind({"id": "binary(6)"}, ("UNHEX(LPAD(HEX({0} * 7 + 100000), 8, '0'))",)),
    "boolean": Kind({"b": "boolean", "id": "int"}, ("MOD({0}, 2)", "{0}")),
    "several": Kind(
        {"`b``s`": "varbinary(9)", "a": "smallint", "c": "int"},
        ("CAST(MOD({0} + 90000, 3) AS CHAR)", "FLOOR({0} / 100)", "{0}"),
    ),
}  # fmt: skip
UNCERTAIN = {
    "text": Kind({"id": "varchar(20) CHARACTER SET latin1"}, ("CONCAT('é', {0} + 100000)",)),
    "folded": Kind(
        {"id": "char(20) COLLATE utf8mb4_unicode_ci"},
        ("CONCAT(IF(MOD({0}, 2), 'É', 'e'), '''\\\\ 水', {0} + 100000)",),
    ),
    "label": Kind({"e": "enum('z','a')", "id": "int"}, ("MOD({0} + 90000, 2) + 1", "{0}")),
}


class Interrupted:
    """A snapshot that ends after some batches, and goes on after a while."""

    def __init__(self, database: MysqlDatabase, log: Log) -> None:
        self.database = database
        self.log = log
        self.source: Mysql = mysql(database)

    def copy_some(self, batches: int) -> None:
        """Read so many batches of rows, then let go."""
        with driven(self.source, self.log) as reading:
            for _ in range(batches):
                reading.until(lambda batch: any(c.op is Op.READ for c in batch.changes))
        assert self.resume.to_snapshot, "it is not done"

    @property
    def resume(self) -> MysqlResume:
        stored = self.log.resume("shop")
        assert stored is not None
        resume = decode(stored)
        assert isinstance(resume, MysqlResume)
        return resume

    def changes(self, *ops: Op) -> list[Change]:
        """What the log holds."""
        found = self.log.read(0, limit=1 << 30)
        return [change for change in found if not ops or change.op in ops]

    def finish(self) -> None:
        """Take it up again to the end; the log must be what the table is."""
        file, position = self.database.server.end
        end = file_number(file), position

        def ends(batch: Batch) -> bool:
            del batch
            return self.resume.offset >= end and not self.resume.to_snapshot

        with driven(self.source, self.log) as reading:
            reading.until(ends)
        replay = Replay.of(self.changes())
        assert replay.surprises == []
        there = {name for (name,) in self.database.execute("SHOW TABLES")}
        for name in ("users", "other"):
            found = replay.rows(TableName("shop", self.database.name, name))
            expected = table_rows(self.database, name) if name in there else []
            assert plain(found) == expected, name
        assert set(Counter(change.id for change in self.changes()).values()) == {1}

    def assert_nothing_came_twice(self) -> None:
        """Every row was read once, and its versions follow one another."""
        assert self.changes(Op.TRUNCATE) == []
        reads = Counter(change.key for change in self.changes(Op.READ))
        assert set(reads.values()) == {1}
        ends = [change.transaction.id for change in self.changes() if change.last]
        assert len(ends) == len(set(ends)), "a transaction ends once"
        versions: dict[int, int] = {}
        for change in self.changes(Op.READ, Op.INSERT, Op.UPDATE):
            row = image(change.after)
            if change.op is Op.UPDATE:
                assert row["n"] == versions[row["seq"]] + 1
            elif row["seq"] in versions:  # it has come from keys that were not read
                assert row["n"] > versions[row["seq"]]
            versions[row["seq"]] = row["n"]


def plain(rows: list[Row]) -> list[Row]:
    """The columns whose values Python and JSON share."""
    return ordered([{"seq": row["seq"], "n": row["n"]} for row in rows])


def table_rows(database: MysqlDatabase, name: str = "users") -> list[Row]:
    """The same of the table itself."""
    found = database.execute(f"SELECT seq, n FROM {name}")
    return ordered([{"seq": seq, "n": n} for seq, n in found])


@pytest.fixture
def interrupted(maria: MysqlDatabase, tmp_path: Path) -> Iterator[Interrupted]:
    with Log.open(tmp_path / "log") as log:
        yield Interrupted(maria, log)


def write(database: MysqlDatabase, kind: Kind, turn: int) -> None:
    """Everything that may happen to rows that are read, to others, and between both."""
    kind.insert(database, 3000 + turn * 100, 3050 + turn * 100)
    database.execute(f"UPDATE users SET n = n + 1 WHERE seq % 5 = {turn}")
    database.execute(f"DELETE FROM users WHERE seq % 50 = {turn}")
    kind.move(database, 7000, f"seq % 100 = {7 + turn}")
    kind.move(database, -4000, f"seq % 100 = {17 + turn}")
    database.execute(f"UPDATE users SET n = n + 1 WHERE seq % 10 = {7 + turn}")
    kind.move(database, 0, f"seq % 200 = {7 + turn}")
    database.execute(f"DELETE FROM users WHERE seq % 300 = {17 + turn}")


@pytest.mark.requirement("P-24")
@pytest.mark.parametrize("name", CERTAIN)
def test_an_interrupted_snapshot_goes_on_where_it_stopped(
    interrupted: Interrupted, name: str
) -> None:
    kind, database = CERTAIN[name], interrupted.database
    kind.create(database)
    for turn in range(3):
        interrupted.copy_some(3)
        write(database, kind, turn)
    interrupted.finish()
    interrupted.assert_nothing_came_twice()


@pytest.mark.parametrize("name", UNCERTAIN)
def test_a_key_whose_order_only_the_server_knows_is_read_from_the_start(
    interrupted: Interrupted, name: str
) -> None:
    kind, database = UNCERTAIN[name], interrupted.database
    kind.create(database)
    interrupted.copy_some(3)
    write(database, kind, 0)
    interrupted.finish()
    assert len(interrupted.changes(Op.TRUNCATE)) == 1


@pytest.mark.requirement("P-24")
@pytest.mark.parametrize("name", ["integer", "several", "text", "folded", "label"])
def test_several_sessions_read_a_table_that_is_written(
    maria: MysqlDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kind = (CERTAIN | UNCERTAIN)[name]
    kind.create(maria)
    sessions: set[int] = set()
    rows = snapshot._Session.rows

    def counted(session: snapshot._Session, statement: str) -> Iterator[list[bytes]]:
        sessions.add(id(session.connection))
        return rows(session, statement)

    monkeypatch.setattr(snapshot._Session, "rows", counted)
    ending = threading.Event()

    def writing() -> None:
        numbers = itertools.cycle(range(_ROWS))
        with closing(maria.connect()) as connection, connection.cursor() as cursor:
            while not ending.is_set():
                cursor.execute("UPDATE users SET n = n + 1 WHERE seq = %s", (next(numbers),))

    thread = threading.Thread(target=writing)
    thread.start()
    try:
        with captured(maria, tmp_path, snapshot_workers=4) as feed:
            ending.set()
            thread.join()
            assert plain(feed.rows("users")) == table_rows(maria)
            reads = Counter(change.key for change in feed.changes(Op.READ))
            assert (len(reads), set(reads.values())) == (_ROWS, {1})
    finally:
        ending.set()
        thread.join()
    assert (len(sessions) > 1) == (name != "label")


@pytest.mark.parametrize(
    ("statements", "again"),
    [
        ("ALTER TABLE users ADD COLUMN more int DEFAULT 5", True),
        ("ALTER TABLE users MODIFY id bigint", True),
        ("ALTER TABLE users DROP PRIMARY KEY, ADD PRIMARY KEY (seq, id)", True),
        ("CREATE INDEX numbers ON users (n)", False),
        ("TRUNCATE users", False),
        ("CREATE TABLE new LIKE users; INSERT INTO new SELECT * FROM users WHERE seq % 2;"
         "RENAME TABLE users TO old, new TO users; DROP TABLE old", True),
        ("CREATE OR REPLACE TABLE users (n int, seq int, s varchar(90), id int PRIMARY KEY)",
         False),
    ],
)  # fmt: skip
def test_ddl_between_the_parts_of_a_snapshot(
    interrupted: Interrupted, statements: str, *, again: bool
) -> None:
    database = interrupted.database
    NUMBER.create(database)
    interrupted.copy_some(3)
    database.execute("UPDATE users SET n = n + 1 WHERE seq % 5 = 0")
    database.execute(statements)
    database.execute("UPDATE users SET n = n + 1 WHERE seq % 5 = 1")
    NUMBER.insert(database, 5000, 5100)
    database.execute("INSERT INTO users (n, seq, id) VALUES (0, -1, -1)")
    database.execute("DELETE FROM users WHERE seq % 50 = 0")
    interrupted.finish()
    renamed = "RENAME" in statements
    emptied = [
        image(each.after).get("snapshot", False) for each in interrupted.changes(Op.TRUNCATE)
    ]
    assert any(emptied) == (again and not renamed)


@pytest.mark.parametrize("name", ["integer", "text"])
@pytest.mark.parametrize("statement", ["DROP TABLE users", "RENAME TABLE users TO other"])
def test_a_table_that_was_half_read_goes_away(
    interrupted: Interrupted, name: str, statement: str
) -> None:
    database = interrupted.database
    (CERTAIN | UNCERTAIN)[name].create(database)
    interrupted.copy_some(3)
    database.execute("UPDATE users SET n = n + 1")
    database.execute(statement)
    interrupted.finish()
    schemas = [image(change.after) for change in interrupted.changes(Op.SCHEMA)]
    assert [each["ddl_command"] for each in schemas if each.get("dropped")]


def test_another_type_of_the_key_that_the_catalogue_shows_early(interrupted: Interrupted) -> None:
    database = interrupted.database
    CERTAIN["day"].create(database)
    interrupted.copy_some(3)
    database.execute(
        "CREATE INDEX numbers ON users (n); UPDATE users SET n = n + 1;"
        "ALTER TABLE users DROP PRIMARY KEY, DROP COLUMN id, ADD COLUMN id bigint;"
        "UPDATE users SET id = seq, n = n + 1; ALTER TABLE users ADD PRIMARY KEY (id)"
    )
    interrupted.finish()


def test_snapshots_at_one_position_have_ids_of_their_own(interrupted: Interrupted) -> None:
    UNCERTAIN["text"].create(interrupted.database)
    interrupted.copy_some(3)
    interrupted.copy_some(3)
    interrupted.finish()
    again = snapshot_again(interrupted.resume, {f"{interrupted.database.name}.users"})
    interrupted.log.append("shop", Batch([], again.encode()))
    interrupted.finish()
    assert len({change.position for change in interrupted.changes(Op.READ)}) == 1


@pytest.mark.parametrize("moment", ["before its position", "behind its position"])
@pytest.mark.parametrize(
    "statements",
    [
        "CREATE TABLE other LIKE users; INSERT INTO other SELECT * FROM users",
        "RENAME TABLE users TO other",
        "TRUNCATE users",
        "DROP TABLE users; CREATE TABLE users (id int PRIMARY KEY, n int, seq int);"
        "INSERT INTO users VALUES (1, 1, 1)",
    ],
)
def test_ddl_while_the_first_snapshot_begins(
    maria: MysqlDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    statements: str, moment: str,
) -> None:  # fmt: skip
    NUMBER.create(maria)
    begin, hold, runs = snapshot._begin, MysqlSnapshot.hold, iter([statements])

    def begin_later(connections: list[Any]) -> None:
        if moment == "before its position" and (statement := next(runs, "")):
            maria.execute(statement)
        begin(connections)

    def hold_later(found: MysqlSnapshot, table: FoundTable) -> None:
        if statement := next(runs, ""):
            maria.execute(statement)
        hold(found, table)

    monkeypatch.setattr(snapshot, "_begin", begin_later)
    monkeypatch.setattr(MysqlSnapshot, "hold", hold_later)
    with captured(maria, tmp_path) as feed:
        names = {str(name) for (name,) in maria.execute("SHOW TABLES")}
        feed.until(lambda: names <= _done(feed), "the tables are in the log")
        for name in names:
            assert plain(feed.rows(name)) == table_rows(maria, name)
        assert feed.status.errored == {}


def _done(feed: Captured) -> set[str]:
    """The tables whose snapshots are done."""
    return {path.table for path, progress in feed.resume.snapshots.items() if progress.done}


def test_rows_that_are_not_sent_whole_go_on_where_they_were_read(interrupted: Interrupted) -> None:
    database = interrupted.database
    NUMBER.create(database)
    interrupted.copy_some(3)
    with parts_of_rows(database):
        database.execute(
            "UPDATE users SET n = n + 1 WHERE seq % 5 = 0;"
            "UPDATE users SET id = id + 5000, n = n + 1 WHERE seq < 10"
        )
        database.execute("SET binlog_row_image = FULL; UPDATE users SET n = n + 1 WHERE seq < 500")
        interrupted.finish()
    assert interrupted.changes(Op.TRUNCATE) == []


@contextmanager
def parts_of_rows(database: MysqlDatabase) -> Iterator[None]:
    """Let the server log parts of rows, and Headrace know it: it then requests their statements."""
    database.execute("SET GLOBAL binlog_row_image = MINIMAL")
    try:
        yield
    finally:
        database.execute("SET GLOBAL binlog_row_image = FULL")


def test_a_row_that_is_not_sent_whole_and_was_not_read_begins_the_snapshot_anew(
    interrupted: Interrupted,
) -> None:
    database = interrupted.database
    # The first range is read before any other: what moves to its keys should have been read there.
    interrupted.source = mysql(database, snapshot_workers=1)
    NUMBER.create(database)
    interrupted.copy_some(3)
    with parts_of_rows(database):
        database.execute(
            "BEGIN; UPDATE users SET n = n + 1 WHERE seq = 1;"
            f"UPDATE users SET id = -id, n = n + 1 WHERE seq = {_ROWS};"
            f"UPDATE users SET n = n + 1 WHERE seq = {_ROWS}; COMMIT;"
            "UPDATE users SET n = n + 1 WHERE seq % 5 = 0"
        )
        interrupted.finish()
    assert len(interrupted.changes(Op.TRUNCATE)) == 1


def test_a_resume_of_an_earlier_version_in_the_middle_of_a_snapshot_goes_on(
    interrupted: Interrupted,
) -> None:
    database = interrupted.database
    NUMBER.create(database)
    interrupted.copy_some(3)
    stored = interrupted.log.resume("shop")
    assert stored is not None
    fields = msgspec.msgpack.decode(stored)
    tables = msgspec.msgpack.decode(zlib.decompress(fields[7]), strict=False)
    ((path, progress),) = tables[0].items()
    assert progress[5], "ranges that are left"
    tables[0][path] = progress[:5]  # it knew no ranges
    fields[7] = zlib.compress(msgspec.msgpack.encode(tables))
    interrupted.log.append("shop", Batch([], msgspec.msgpack.encode(fields)))
    write(database, NUMBER, 0)
    interrupted.finish()
    assert len(interrupted.changes(Op.TRUNCATE)) == 1


def test_the_ranges_that_are_left_stay_few(interrupted: Interrupted) -> None:
    interrupted.source = mysql(interrupted.database, snapshot_workers=3)
    NUMBER.create(interrupted.database, 6000)
    for _ in range(6):
        interrupted.copy_some(4)
        (progress,) = interrupted.resume.snapshots.values()
        assert 0 < len(progress.left) <= 2 * 3 + 1
    interrupted.finish()
    interrupted.assert_nothing_came_twice()


def test_a_snapshot_that_gave_way_goes_on_where_it_was(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    NUMBER.create(maria)
    with captured(maria, tmp_path, start=False, snapshot_rows_per_second=200) as feed:
        feed.start()
        feed.until(lambda: bool(feed.stored(Op.READ)), "the snapshot has begun")
        maria.execute(
            "SET SESSION lock_wait_timeout = 60; LOCK TABLES users WRITE;"
            "UPDATE users SET n = n + 1; DELETE FROM users WHERE seq % 2; UNLOCK TABLES"
        )
        assert [copy for copy in feed.status.copies if not copy.done], "it was not done before"
    with captured(maria, tmp_path) as feed:
        assert plain(feed.rows("users")) == table_rows(maria)
        assert feed.changes(Op.TRUNCATE) == []
        assert set(Counter(change.key for change in feed.changes(Op.READ)).values()) == {1}


@pytest.mark.requirement("P-03")
def test_a_table_that_gets_its_name_back_behind_the_snapshot_is_not_there_twice(
    maria: MysqlDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maria.execute("CREATE TABLE bare (n int); INSERT INTO bare VALUES (1), (2)")
    with captured(maria, tmp_path) as feed:
        begin = MysqlSnapshot.open

        def away_for_a_moment(*given: Any, **more: Any) -> MysqlSnapshot:
            monkeypatch.setattr(MysqlSnapshot, "open", begin)
            maria.execute("RENAME TABLE bare TO away; INSERT INTO away VALUES (3)")
            opened = begin(*given, **more)
            maria.execute("RENAME TABLE away TO bare")
            return opened

        monkeypatch.setattr(MysqlSnapshot, "open", away_for_a_moment)
        feed.capture.copy_again([f"{maria.name}.bare"])
        feed.until(lambda: bool(feed.stored(Op.TRUNCATE)), "the table is read again")
        feed.until_caught_up()
        assert sorted(row["n"] for row in feed.rows("bare")) == [1, 2, 3]


@pytest.mark.requirement("P-03")
def test_other_tables_arrive_while_one_is_read_again(
    maria: MysqlDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_TURN_SECONDS", 0.2)
    NUMBER.create(maria, 3000)
    maria.execute("CREATE TABLE others (id int PRIMARY KEY)")
    with captured(maria, tmp_path) as feed:
        feed.source = replace(feed.source, snapshot_rows_per_second=600)
        feed.restart()
        feed.until_streaming()
        feed.capture.copy_again([f"{maria.name}.users"])
        feed.until(lambda: bool(feed.stored(Op.TRUNCATE)), "the table is being read")
        for number in range(3):
            maria.execute("INSERT INTO others VALUES (%s)", number)
            # Keys that are read, and such that are not.
            maria.execute("UPDATE users SET n = n + 1 WHERE seq %% 500 = %s", number)
            maria.execute("DELETE FROM users WHERE seq %% 700 = %s", number)
        feed.until_caught_up()
        assert plain(feed.rows("users")) == table_rows(maria)
        (truncate,) = feed.stored(Op.TRUNCATE)
        read = [each for each in feed.changes(Op.READ) if each.sequence > truncate.sequence]
        others = [each.sequence for each in feed.changes(Op.INSERT) if each.table.name == "others"]
        assert others[0] < read[-1].sequence, "it came only after the last row"
        assert set(Counter(change.key for change in read).values()) == {1}


def damage(database: MysqlDatabase, table: str) -> None:
    """Overwrite a page in the middle of a table."""
    page, server = 16384, database.server
    server.stop("fast")
    file = server.data / database.name / f"{table}.ibd"
    with file.open("r+b") as data:
        data.seek(20 * page + 100)
        data.write(b"\xa5" * (page - 200))
    server.start()


def test_a_table_that_is_damaged_in_its_middle_waits_alone(tmp_path: Path) -> None:
    with mysql_of("mariadb") as server, server.database() as database:
        NUMBER.create(database, 4000)
        database.execute("CREATE TABLE whole (id int PRIMARY KEY, n int)")
        database.execute("INSERT INTO whole SELECT seq, 0 FROM seq_1_to_1000")
        damage(database, "users")
        with captured(database, tmp_path, start=False) as feed:
            feed.start()
            feed.until(lambda: len(feed.stored(Op.READ, table="whole")) == 1000, "it was read")
            database.execute("UPDATE whole SET n = 1")
            feed.until(lambda: len(feed.stored(Op.UPDATE)) == 1000, "the stream goes on")
            feed.until(lambda: "cannot be read" in str(feed.status.errored), "the reason is shown")
            reads = Counter(change.key for change in feed.stored(Op.READ, table="users"))
            assert 0 < len(reads) < 4000
            database.execute("DROP TABLE users")
            feed.until(lambda: not feed.status.errored, "nothing is left of it")
            feed.until(lambda: feed.rows("users") == [], "the log knows that it was dropped")


EDGES = {
    "tinyint": ("-128", "-1", "0", "127"),
    "bigint": ("-9223372036854775808", "-1", "0", "9223372036854775807"),
    "bigint unsigned zerofill": ("0", "9223372036854775808", "18446744073709551615"),
    "decimal(65,30)": ("-0.1", "0", "99999999999999999999999999999999999.1", "0.05"),
    "date": ("'0000-00-00'", "'1000-01-01'", "'2000-00-01'", "'2000-10-00'", "'9999-12-31'"),
    "datetime(6)": ("'0000-00-00'", "'2000-01-01'", "'2000-01-01 00:00:00.000001'", "'9999-12-31'"),
    "timestamp(2)": ("0", "'1970-01-01 00:00:01'", "'2000-02-29 23:59:59.99'"),
    "binary(3)": ("''", "x'0000ff'", "x'ff'", "'a'"),
    "varbinary(3)": ("''", "x'00'", "x'0000'", "x'20'", "'a'", "'a '", "x'ff'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", EDGES)
def test_keys_are_compared_as_the_server_does(
    maria: MysqlDatabase, tmp_path: Path, kind: str
) -> None:
    maria.execute(f"CREATE TABLE users (a {kind}, b {kind}, PRIMARY KEY (b, a))")
    maria.execute(f"SET sql_mode = ''; CREATE TABLE one (v {kind})")
    for value in EDGES[kind]:
        maria.execute(f"SET sql_mode = ''; INSERT INTO one VALUES ({value})")
    maria.execute("SET sql_mode = ''; INSERT INTO users SELECT x.v, y.v FROM one x JOIN one y")
    order = KeyOrder.of(DeclaredTable(tuple(DeclaredColumn(n, kind) for n in "ab"), ("b", "a")))
    assert order is not None
    assert order.certain
    with captured(maria, tmp_path, tables=["users"]) as feed:
        images = [change.key or b"" for change in feed.changes(Op.READ)]
        address = feed.source.address
    with closing(address.connect()) as connection, connection.cursor() as cursor:
        connection.select_db(maria.name)
        cursor.execute(f"SELECT {order.bound} FROM users ORDER BY {order.by}")
        bounds = list(cursor.fetchall())
        ranks = sorted(map(order.rank_of_image, images))
        assert ranks == [order.rank_of_bound(bound) for bound in bounds]
        for after, upto in itertools.combinations(range(len(bounds)), 2):
            inside = order.inside(PrimaryKeyRange(bounds[after], bounds[upto]))
            cursor.execute(f"SELECT count(*) FROM users WHERE {inside}")
            assert cursor.fetchall()[0][0] == upto - after


def test_a_range_of_a_key_of_several_columns_reads_its_own_rows_alone(
    maria: MysqlDatabase,
) -> None:
    kind = CERTAIN["several"]
    kind.create(maria, 3000)
    columns = tuple(
        DeclaredColumn(name.strip("`").replace("``", "`"), declared)
        for name, declared in kind.columns.items()
    )
    order = KeyOrder.of(DeclaredTable(columns, tuple(column.name for column in columns)))
    assert order is not None
    with closing(maria.connect()) as connection, connection.cursor() as cursor:
        chosen = f"FROM users FORCE INDEX (PRIMARY) ORDER BY {order.by}"
        cursor.execute(f"SELECT {order.bound} {chosen} LIMIT 2 OFFSET 1500")
        after, _ = cursor.fetchall()
        cursor.execute(f"SELECT {order.bound} {chosen} LIMIT 1 OFFSET 1600")
        (upto,) = cursor.fetchall()
        cursor.execute("FLUSH STATUS")
        inside = order.inside(PrimaryKeyRange(after, upto))
        cursor.execute(
            f"SELECT count(*) FROM users FORCE INDEX (PRIMARY) WHERE {inside} ORDER BY {order.by}"
        )
        assert cursor.fetchall()[0][0] == 100
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
        assert sum(int(value) for _, value in cursor.fetchall()) < 150


@pytest.mark.parametrize(("busy", "agreeing"), [(0, 3), (3, 3), (1000, 2)])
def test_sessions_show_one_position_whatever_is_committed_between_them(
    maria: MysqlDatabase, monkeypatch: pytest.MonkeyPatch, busy: int, agreeing: int
) -> None:
    maria.execute("CREATE TABLE users (id int AUTO_INCREMENT PRIMARY KEY)")
    begin, commits = snapshot._begin, itertools.count()

    def interleaved(connections: list[Any]) -> None:
        begin(connections[:1])
        if next(commits) < busy:
            maria.execute("INSERT INTO users VALUES ()")
        begin(connections[1:])

    monkeypatch.setattr(snapshot, "_begin", interleaved)
    source = mysql(maria)
    with closing(MysqlCatalog(source.address.connect(), source="shop")) as catalog:
        tables = catalog.candidates(source.wants)
        with closing(MysqlSnapshot.open(source.address, catalog, tables, workers=3)) as found:
            maria.execute("INSERT INTO users VALUES ()")
            count = f"SELECT count(*) FROM {maria.name}.users"
            shown = [session.run(count)[0][0] for session in found._sessions]
            assert shown == [min(busy, 20)] * agreeing
            assert found.end.offset < catalog.end().offset


@pytest.mark.parametrize(("busy", "begins"), [(0, True), (3, True), (1000, False)])
def test_a_snapshot_begins_where_no_xa_transaction_has_just_ended(
    maria: MysqlDatabase, monkeypatch: pytest.MonkeyPatch, busy: int, *, begins: bool
) -> None:
    """MariaDB writes XA COMMIT to its binary log before others can see the rows."""
    maria.execute("CREATE TABLE users (id int AUTO_INCREMENT PRIMARY KEY)")
    begin, attempts = snapshot._begin, itertools.count()

    def interleaved(connections: list[Any]) -> None:
        attempt = next(attempts)
        maria.execute("INSERT INTO users VALUES ()")
        if attempt < busy:
            maria.execute(
                "XA START 'x'; INSERT INTO users VALUES (); XA END 'x'; XA PREPARE 'x';"
                "XA COMMIT 'x'"
            )
        begin(connections)

    monkeypatch.setattr(snapshot, "_begin", interleaved)
    source = mysql(maria)
    with closing(MysqlCatalog(source.address.connect(), source="shop")) as catalog:
        tables = catalog.candidates(source.wants)
        if begins:
            MysqlSnapshot.open(source.address, catalog, tables, workers=2).close()
            assert next(attempts) == busy + 1
        else:
            with pytest.raises(SourceUnavailable, match="XA"):
                MysqlSnapshot.open(source.address, catalog, tables, workers=2)


def test_sessions_begin_under_a_lock_where_the_server_shows_no_position(
    maria: MysqlDatabase,
) -> None:
    """As on MySQL, with the same statements."""
    maria.execute("CREATE TABLE users (id int AUTO_INCREMENT PRIMARY KEY)")
    count, counts = f"SELECT count(*) FROM {maria.name}.users", []

    def end() -> BinlogEnd:
        counts.append(maria.execute(count)[0][0])
        return BinlogEnd("mysql-bin.000001", 4, "")

    catalog = MagicMock(spec=MysqlCatalog)
    catalog.server.return_value.mariadb = False
    catalog.end.side_effect = end
    address, ending = mysql(maria).address, threading.Event()

    def writing() -> None:
        while not ending.is_set():
            maria.execute("INSERT INTO users VALUES ()")

    threads = [threading.Thread(target=writing) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            connections = [address.connect() for _ in range(4)]
            tables = [FoundTable(maria.name, "users", True, 0)]
            snapshot._snapshot(connections, address, catalog, tables)
            shown = [run(connection, count)[0][0] for connection in connections]
            for connection in connections:
                connection.close()
            assert shown == [counts[-1]] * 4
    finally:
        ending.set()
        for thread in threads:
            thread.join()
