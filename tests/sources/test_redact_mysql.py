"""Columns of MariaDB and MySQL that never reach the log."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.capture import Capture
from headrace.change.event import BeforeKind, Op
from headrace.change.replay import Replay, TableName
from headrace.log import Log
from headrace.sources import Phase
from headrace.sources.mysql import plan, snapshot
from headrace.sources.mysql import resume as resumes
from headrace.sources.mysql.decode.path import TablePath
from headrace.sources.mysql.resume import (
    DeclaredTable,
    MysqlResume,
    MysqlTableSnapshot,
    PrimaryKeyRange,
    packed,
)
from headrace.sources.redact import ColumnRules
from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase
from tests.sources.capturing import driven
from tests.sources.mycapturing import Captured, image, numbers
from tests.sources.myplaces import VALUES, mysql
from tests.sources.redacting import MASK, Redacting, assert_nowhere

RULES: dict[str, Any] = {"exclude_columns": ("*ssn",), "mask": {"*.email": MASK}}


class RedactedFeed(Captured):
    """A running capture that hides columns."""

    def start(self) -> None:
        self.capture = Capture(Redacting(self.source), self.log)
        self.capture.start()


@contextmanager
def redacted(database: MysqlDatabase, folder: Path, **settings: Any) -> Iterator[RedactedFeed]:
    """Capture a database; the block begins after the first snapshot."""
    with Log.open(folder / "log") as log:
        feed = RedactedFeed(database, log, mysql(database, **RULES | settings))
        with feed.running():
            yield feed


def users(database: MysqlDatabase) -> None:
    database.execute(
        "CREATE TABLE users (id int PRIMARY KEY, email varchar(50), ssn text, note text);"
        "INSERT INTO users VALUES (1, 'Oleander', 'Rhabarber', 'plain')"
    )


def test_nothing_that_a_table_goes_through_shows_a_value(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    users(maria)
    with redacted(maria, tmp_path) as feed:
        maria.execute("UPDATE users SET email = 'Oleander-2'")
        maria.execute(
            "SET SESSION binlog_row_image = MINIMAL; UPDATE users SET ssn = 'Rhabarber-2'"
        )
        maria.execute("SET SESSION binlog_row_image = MINIMAL; UPDATE users SET email = 'Oleander'")
        maria.execute("UPDATE users SET id = 2")
        maria.execute("ALTER TABLE users ADD COLUMN old_ssn varchar(20) DEFAULT 'Rhabarber'")
        maria.execute("CREATE TABLE bare AS SELECT 1 AS n, 'Rhabarber' AS ssn")
        maria.execute("UPDATE users SET note = 'x'; DELETE FROM users; TRUNCATE users")
        maria.execute(
            "INSERT INTO users (id, email, ssn) SELECT seq, 'Oleander', 'Rhabarber' FROM "
            + numbers(9_000)
        )
        changes = feed.streamed()
        assert feed.status.errored == {}
        feed.capture.stop()
        assert_nowhere(("Oleander", "Rhabarber"), feed.log, tmp_path)
    code = MASK.code("Oleander")
    updates = [each for each in changes if each.op is Op.UPDATE]
    whole, other, short, moved, _ = updates
    assert image(whole.before) == {"id": 1, "email": code, "note": "plain"}
    assert (image(other.after), other.unchanged) == ({"id": 1}, ("email", "note"))
    assert (image(short.after), short.unchanged) == ({"id": 1, "email": code}, ("note",))
    assert (short.before_kind, image(short.before)) == (BeforeKind.KEY, {"id": 1})
    assert (image(moved.before)["id"], moved.key) == (1, b'{"id":2}')
    [altered] = [each for each in changes if each.op is Op.SCHEMA and each.table.name == "users"]
    assert image(altered.after)["ddl_type"]
    assert "ddl_command" not in image(altered.after)
    assert (
        len([each for each in changes if each.op is Op.INSERT and "id" in image(each.after)])
        == 9_000
    )


def test_a_value_has_one_code_in_a_snapshot_and_in_the_stream(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    declared = ", ".join(f"c{at} {each.type}" for at, each in enumerate(VALUES.values()))
    my.execute(f"CREATE TABLE kinds (id int PRIMARY KEY, {declared})")
    values = ", ".join(each.literal for each in VALUES.values())
    my.execute(f"INSERT INTO kinds VALUES (1, {values})")
    with redacted(my, tmp_path, mask={"kinds.c*": MASK}) as feed:
        my.execute(f"INSERT INTO kinds VALUES (2, {values})")
        [read, inserted] = [image(each.after) for each in feed.changes(Op.READ, Op.INSERT)]
    assert read | {"id": 2} == inserted
    assert all(len(value) == len(MASK.code("x")) for name, value in read.items() if name != "id")


def test_a_renamed_column_halts_the_source_until_the_rules_name_it(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    users(maria)
    with redacted(maria, tmp_path) as feed:
        maria.execute("ALTER TABLE users CHANGE email mail varchar(50) DEFAULT 'Oleander'")
        maria.execute("UPDATE users SET mail = 'Oleander-2'")
        status = feed.until_halted()
        assert f"{maria.name}.users.mail may be {maria.name}.users.email renamed" in status.error
        feed.source = mysql(maria, **RULES | {"mask": {"*mail": None}})
        feed.restart()
        assert feed.rows("users") == [{"id": 1, "mail": None, "note": "plain"}]
        feed.capture.stop()
        assert_nowhere(("Oleander", "Rhabarber"), feed.log, tmp_path)


@pytest.mark.parametrize("key", ["email", "seq"])
def test_an_interrupted_snapshot_has_no_masked_key_in_its_position(
    maria: MysqlDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(snapshot, "RANGE_ROWS", 300)
    monkeypatch.setattr(plan, "RANGE_ROWS", 0)
    monkeypatch.setattr(snapshot, "BATCH_ROWS", 100)
    maria.execute(
        f"CREATE TABLE users (email varbinary(50), seq int, n int, PRIMARY KEY ({key}));"
        f"INSERT INTO users SELECT concat('Oleander-', seq), seq, 0 FROM {numbers(3000)}"
    )
    source = Redacting(mysql(maria, **RULES))
    with Log.open(tmp_path / "log") as log:
        for turn in range(2):
            with driven(source, log) as reading:
                reading.until(lambda batch: any(c.op is Op.READ for c in batch.changes))
            assert source.describe(log.resume("shop")).copies[0].done is False
            assert_nowhere(("Oleander",), log, tmp_path)
            maria.execute(f"UPDATE users SET n = n + 1 WHERE seq % 3 = {turn}")
            maria.execute(f"DELETE FROM users WHERE seq % 50 = {turn}")
        capture = Capture(source, log)
        capture.start()
        wait_until(
            lambda: capture.status().phase is Phase.STREAMING, timeout=120, message="it streams"
        )
        capture.stop()
        changes = log.read(0, limit=1 << 30)
        assert_nowhere(("Oleander",), log, tmp_path)
    emptied = [each for each in changes if each.op is Op.TRUNCATE]
    assert bool(emptied) is (key == "email"), "what has no place begins anew"
    replay = Replay.of(changes)
    assert replay.surprises == []
    rows = replay.rows(TableName("shop", maria.name, "users"))
    there = maria.execute("SELECT email, n FROM users")
    assert sorted((row["email"], row["n"]) for row in rows) == sorted(
        (MASK.code(base64.b64encode(email).decode()), n) for email, n in there
    )


def test_a_resume_position_has_neither_masked_keys_nor_ddl_text() -> None:
    users, teams = TablePath("shop", "users"), TablePath("shop", "teams")
    half = (PrimaryKeyRange(after=("4f6c",)),)
    declared = {users: DeclaredTable((), ("email",)), teams: DeclaredTable((), ("id",))}
    resume = MysqlResume(
        "s", "o", "f.1", 4, 0, "",
        {path: MysqlTableSnapshot(begun=True, rows=7, left=half) for path in (users, teams)},
        {}, {}, packed(declared),
        pending_ddl={teams: [{"ddl_type": "ALTER_TABLE", "ddl_command": "ALTER …"}]},
    )  # fmt: skip
    stored = resume.without_values(ColumnRules((), {"email": MASK}))
    assert stored.snapshots[users] == MysqlTableSnapshot(replaces=True)
    assert stored.snapshots[teams] == resume.snapshots[teams]
    assert stored.pending_ddl == {teams: [{"ddl_type": "ALTER_TABLE"}]}


def test_the_catalogue_is_unpacked_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [TablePath("once", "users"), TablePath("once", "teams")]
    declared = {path: DeclaredTable((), ("email",)) for path in paths}
    half = MysqlTableSnapshot(begun=True, left=(PrimaryKeyRange(after=("4f6c",)),))
    resume = MysqlResume(
        "s", "o", "f.1", 4, 0, "", dict.fromkeys(paths, half), {}, {}, packed(declared)
    )
    read: list[bytes] = []

    def counted(data: bytes) -> dict[TablePath, DeclaredTable]:
        read.append(data)
        return declared

    monkeypatch.setattr(resumes, "unpacked", counted)
    for _ in range(3):
        stored = resume.without_values(ColumnRules((), {"email": MASK}))
        assert stored.snapshots[paths[0]] == MysqlTableSnapshot(replaces=True)
    assert len(read) == 1
