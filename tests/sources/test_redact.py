"""What must never be stored does not reach the log."""

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.capture import Capture
from headrace.change import block
from headrace.change.event import Batch, BeforeKind, Change, Column, Op, Reference, Table
from headrace.change.record import Records
from headrace.config import parse
from headrace.errors import ConfigError, SourceUnavailable
from headrace.log import Log
from headrace.sources import Phase, Status
from headrace.sources.redact import ColumnRules, open_redacted
from headrace.sources.sqlite import alter, install
from headrace.sources.worker import Apart
from headrace.testing import wait_until
from headrace.transforms import Mask
from tests.sinks.lake import change, put, remove, schema
from tests.sources.redacting import MASK, Mistaken

USERS = Table(
    "shop",
    "postgres",
    "origin-1",
    "shop",
    "public",
    "users",
    (
        Column("id", "bigint", key=True),
        Column("email", "text"),
        Column("ssn", "text"),
        Column("team", "bigint"),
    ),
    references=(Reference(("team",), "public", "teams", ("id",)),),
)


class Fake:
    """A source that hands over what it is given."""

    name = "shop"

    def __init__(
        self, batches: Sequence[Any], exclude: Sequence[str] = (), **mask: Mask | None
    ) -> None:
        self._batches = batches
        self.exclude_columns = tuple(exclude)
        self.mask = {name.replace("__", "."): each for name, each in mask.items()}

    def open(self, resume: bytes | None, register: Any) -> Any:
        self._known = register(USERS)
        return self

    def __iter__(self) -> Iterator[Batch]:
        for make in self._batches:
            yield Batch(make(self._known), b"resume")

    def ack(self, resume: bytes) -> None: ...

    def status(self) -> Status: ...  # type: ignore[empty-body]

    def close(self) -> None: ...


def stored(source: Any) -> tuple[list[Table], list[Change]]:
    """The tables that are registered, and the changes as the log would have them."""
    tables: list[Table] = []

    def register(table: Table) -> Table:
        tables.append(msgspec.structs.replace(table, version=len(tables) + 1))
        return tables[-1]

    batches = list(open_redacted(source, None, register))
    return tables, [change for batch in batches for change in batch.changes]


def user(number: int, **values: Any) -> dict[str, Any]:
    return {"id": number, "email": f"{number}@b.c", "ssn": "123-45", "team": 7} | values


def test_columns_are_left_out_and_masked_in_every_image() -> None:
    def batch(table: Table) -> list[Change]:
        new = put(table, Op.UPDATE, **user(1))
        full = msgspec.json.encode(user(1, email=None))
        kept = {"changed": ("email", "ssn"), "unchanged": ("ssn", "team")}
        return [
            msgspec.structs.replace(new, before=full, before_kind=BeforeKind.FULL, **kept),
            remove(table, id=2),
        ]

    [table], [update, delete] = stored(Fake([batch], ["ssn"], public__users__email=MASK))
    assert [(each.name, each.type) for each in table.columns] == [
        ("id", "bigint"),
        ("email", "text"),
        ("team", "bigint"),
    ]
    assert table.references == USERS.references
    assert json.loads(update.after or b"") == {"id": 1, "email": MASK.code("1@b.c"), "team": 7}
    assert json.loads(update.before or b"") == {"id": 1, "email": None, "team": 7}
    assert (update.changed, update.unchanged) == (("email",), ("team",))
    assert (delete.key, delete.before) == (b'{"id":2}', b'{"id":2}')
    assert update.table == table


def test_a_masked_key_is_the_same_in_key_and_images() -> None:
    [table], [insert, delete] = stored(
        Fake([lambda t: [put(t, **user(1)), remove(t, id=1)]], users__id=MASK, team=None)
    )
    code = MASK.code("1")
    assert insert.key == delete.key == msgspec.json.encode({"id": code})
    assert json.loads(insert.after or b"") == user(1, id=code, team=None)
    assert table.key == ("id",)
    assert table.references == (), "whose values are not there"


def test_rows_of_a_snapshot_are_redacted_in_their_block() -> None:
    rows = [user(1), user(2, email=None), user(3, email='"ü\t')]

    def batch(table: Table) -> Records:
        columns = [
            block.json_text([msgspec.json.encode(row[column.name]) for row in rows])
            for column in table.columns
        ]
        transaction = put(table, id=1).transaction
        position = put(table, id=1).position
        packed = block.pack(
            table, transaction, (position, position), [c for c in columns if c], len(rows)
        )
        return Records([packed], {table.version: table}, [(table.version, "READ", 0, len(rows))])

    _, found = stored(Fake([batch], ["ssn"], email=MASK))
    assert [json.loads(each.after or b"") for each in found] == [
        {"id": row["id"], "email": row["email"] and MASK.code(row["email"]), "team": 7}
        for row in rows
    ]
    assert [each.key for each in found] == [b'{"id":1}', b'{"id":2}', b'{"id":3}']


@pytest.mark.parametrize("hidden", ["ssn", "orders.ssn"])
def test_neither_raw_rows_nor_ddl_text_are_stored(hidden: str) -> None:
    """Also of a table without hidden columns: a text may be about several tables."""

    def batch(table: Table) -> list[Change]:
        return [
            change(Op.MESSAGE, table, after=b'{"error":"x","pgoutput":"U0VDUkVU"}'),
            msgspec.structs.replace(schema(table), after=b'{"columns":[],"ddl_command":"SECRET"}'),
            change(Op.TRUNCATE, table, after=b'{"cascade":true,"relations":[7]}'),
        ]

    [table], [raw, ddl, truncate] = stored(Fake([batch], [hidden]))
    assert raw.after == b'{"error":"x"}'
    assert [each["name"] for each in json.loads(ddl.after or b"")["columns"]] == [
        column.name for column in table.columns
    ]
    assert b"SECRET" not in (ddl.after or b"")
    assert truncate.after == b'{"cascade":true,"relations":[7]}'


def test_messages_are_stored_but_for_those_of_our_own_triggers() -> None:
    nowhere = msgspec.structs.replace(USERS, schema="", name="", columns=(), references=())
    said = {"prefix": "app", "transactional": True, "content": "hello"}

    class Messages(Fake):
        def open(self, resume: bytes | None, register: Any) -> Any:
            self._known = register(nowhere)
            return self

    def batch(table: Table) -> list[Change]:
        unread = {"error": "x", "operation": "INSERT", "new": "U0VDUkVU"}
        contents = [said, said | {"prefix": "headrace.ddl"}, unread]
        return [change(Op.MESSAGE, table, after=msgspec.json.encode(each)) for each in contents]

    _, [message, ours, raw] = stored(Messages([batch], ["ssn"]))
    assert json.loads(message.after or b"") == said
    assert json.loads(ours.after or b"") == {"prefix": "headrace.ddl", "transactional": True}
    assert json.loads(raw.after or b"") == {"error": "x", "operation": "INSERT"}


def test_codes_that_are_too_long_for_a_block_are_stored_row_by_row() -> None:
    count = 16_000

    def batch(table: Table) -> Records:
        columns = [block.json_text([b"%d" % row for row in range(count)]) for _ in table.columns]
        at = put(table, id=1)
        packed = block.pack(
            table, at.transaction, (at.position, at.position), [c for c in columns if c], count
        )
        assert len(packed) < block.LARGEST
        return Records([packed], {table.version: table}, [(table.version, "READ", 0, count)])

    source: Any = Fake([batch], email=MASK, ssn=MASK)
    [made] = open_redacted(source, None, lambda table: msgspec.structs.replace(table, version=1))
    found = list(made.changes)
    assert isinstance(made.changes, Records)
    assert max(map(len, made.changes.encoded)) < block.LARGEST
    assert [each.ordinal for each in found] == list(range(1, count + 1))
    assert [each.last for each in found[-2:]] == [False, True]
    assert json.loads(found[7].after or b"") == {
        "id": 7,
        "email": MASK.code("7"),
        "ssn": MASK.code("7"),
        "team": 7,
    }


@pytest.mark.parametrize(
    ("exclude", "mask"), [(["public.users.id"], {}), (["*"], {}), ([], {"ID": None})]
)
def test_a_key_cannot_be_taken_away(exclude: list[str], mask: dict[str, Mask | None]) -> None:
    with pytest.raises(ConfigError, match=r"takes id away, which is of the key of public\.users"):
        ColumnRules(tuple(exclude), mask).of(USERS)


def test_a_source_without_rules_is_left_alone() -> None:
    made: list[Change] = []

    def batch(table: Table) -> list[Change]:
        made.append(put(table, **user(1)))
        return made

    tables, found = stored(Fake([batch], ["public.orders.ssn"]))
    assert found == made
    assert tables[0].columns == USERS.columns


def test_what_is_kept_comes_before_a_pattern() -> None:
    rules = ColumnRules((), {"users.id": "keep", "TEAM": "keep", "users.*": None})
    redacted = rules.of(USERS)
    assert redacted.masks == {"email": None, "ssn": None}
    assert redacted.stored.hidden == ("email", "ssn")


def test_patterns_that_match_nothing_are_named() -> None:
    rules = ColumnRules(("ssn", "users.emial"), {"public.*.team": None, "other.users.id": MASK})
    assert rules.unmatched([USERS]) == ["users.emial", "other.users.id"]


def test_a_mistake_in_the_capturing_process_is_reported_without_values(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))  # where the class is
    with Log.open(tmp_path / "log") as log:
        source: Any = Mistaken("Rhabarber", ("ssn",))
        capture = Capture(Apart(source), log)
        capture.start()
        wait_until(lambda: capture.status().phase is Phase.HALTED, message="it halts")
        capture.stop()
        error = capture.status().error
    assert error.startswith("unexpected ValueError in _fails, line ")
    assert caplog.text.count("_fails") >= 2
    assert "a thread ended" in caplog.text
    assert "Rhabarber" not in f"{caplog.text} {capfd.readouterr()}"


def test_a_mistake_while_a_source_is_opened_is_reported_without_values(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))  # where the class is
    source: Any = Mistaken("Rhabarber", ("ssn",), opens=False)
    with pytest.raises(SourceUnavailable, match="has ended"):
        list(Apart(source).open(None, lambda table: table))
    assert "the capturing process ended" in caplog.text
    assert "_fails" in caplog.text
    assert "Rhabarber" not in f"{caplog.text} {capfd.readouterr()}"


def versions(*changes: dict[str, Any]) -> list[Table]:
    """Versions of a table as they are stored, one for each change of it."""
    found = [ColumnRules(("users.ssn",)).of(USERS).stored]
    for each in changes:
        found.append(msgspec.structs.replace(found[-1], **each))
    return found


PLAIN = (Column("id", "bigint", key=True), Column("email", "text"), Column("team", "bigint"))
NUMBER = (*PLAIN, Column("number", "text"))


@pytest.mark.parametrize(
    ("known", "table", "former"),
    [
        (versions(), {"columns": NUMBER}, "public.users.ssn"),
        # Restored on another server, where it has another number.
        (versions(), {"columns": NUMBER, "origin": "o-2", "relation": 9}, "public.users.ssn"),
        # Under the name of a table that is gone.
        (
            versions({"relation": 7}, {"relation": 8, "name": "people", "hidden": ()}),
            {"columns": (*PLAIN, Column("ssn", "text")), "relation": 7, "name": "people"},
            "public.users.ssn",
        ),
        (versions(), {"columns": PLAIN}, None),
        (versions(), {"columns": (*PLAIN, Column("ssn", "text"))}, None),  # the rule is gone
        (versions({"hidden": ()}), {"columns": NUMBER}, None),
        (versions(), {"columns": (*PLAIN, Column("old_ssn", "text"))}, None),  # a rule is about it
        (versions(), {"columns": NUMBER, "name": "others"}, None),
    ],
)
def test_what_may_be_a_hidden_column_under_another_name_is_refused(
    known: list[Table], table: dict[str, Any], former: str | None
) -> None:
    now = msgspec.structs.replace(known[0], hidden=(), **table)
    rules = ColumnRules(("users.old_ssn",))
    if former is None:
        rules.expect_no_rename(known, now)
        return
    with pytest.raises(ConfigError, match=f"may be {former} renamed"):
        rules.expect_no_rename(known, now)


@pytest.mark.parametrize(
    ("names", "suspect"),
    [
        ("id email note ssn", "note"),  # two names exchanged
        ("id email old note ssn", "old"),  # renamed, and a new one of its name
        ("old id email ssn note", None),  # added at another place
        ("id email old ssn note", "old"),  # or renamed, and the new one put behind it
        ("id email ssn note old", None),
        ("email id ssn note", None),
    ],
)
def test_a_name_that_another_column_has_taken_is_noticed(names: str, suspect: str | None) -> None:
    rules = ColumnRules(("users.ssn",))

    def users(names: str) -> Table:
        columns = tuple(Column(name, "text") for name in names.split())
        return Table("shop", "mysql", "", "", "public", "users", columns)

    known, now = (rules.of(users(each)).stored for each in ("id email ssn note", names))
    if suspect is None:
        rules.expect_no_rename([known], now)
        return
    with pytest.raises(ConfigError, match=rf"users\.{suspect} may be public\.users\.ssn renamed"):
        rules.expect_no_rename([known], now)
    kept = ColumnRules(("users.ssn",), {"note": "keep", "old": "keep"})
    kept.expect_no_rename([known], now)


# --- with a database -----------------------------------------------------------------------------


def test_a_database_is_captured_without_them(tmp_path: Path) -> None:
    database = tmp_path / "shop.db"
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT, ssn TEXT)")
    connection.execute("INSERT INTO users VALUES (1, 'Oleander', 'Rhabarber')")
    install(str(database), ["*"])
    content = {
        "sources": {
            "shop": {
                "type": "sqlite",
                "path": str(database),
                "exclude_columns": ["*.ssn"],
                "mask": {"users.email": {"hmac": "${MASK_KEY}"}},
            }
        }
    }
    config = parse(content, folder=tmp_path, environment={"MASK_KEY": MASK.hmac.reveal()})
    assert MASK.hmac.reveal() not in repr(config)
    with Log.open(tmp_path / "log") as log:
        capture = Capture(Apart(config.sources[0]), log)
        capture.start()
        try:
            wait_until(lambda: _rows(log), message="the snapshot is there")
            connection.execute("UPDATE users SET email = 'Oleander-2'")
            alter(str(database), "ALTER TABLE users ADD COLUMN note TEXT DEFAULT 'new'")
            connection.execute("INSERT INTO users (id, ssn, note) VALUES (2, 'Rhabarber', 'plain')")
            wait_until(lambda: len(_rows(log)) == 3, message="the changes are there")
        finally:
            capture.stop()
            connection.close()
        images = [json.loads(each.after or b"") for each in _rows(log)]
        last = _rows(log)[-1].table
        everything = b"".join(map(msgspec.json.encode, log.read(0, limit=1000)))
    assert images == [
        {"id": 1, "email": MASK.code("Oleander")},
        {"id": 1, "email": MASK.code("Oleander-2")},
        {"id": 2, "email": None, "note": "plain"},
    ]
    # The row that was there has its note by the columns alone.
    assert (last.columns[-1].name, last.columns[-1].initial_default) == ("note", '"new"')
    for secret in (b"Oleander", b"Rhabarber", MASK.hmac.reveal().encode()):
        assert secret not in everything
        for file in (tmp_path / "log").rglob("*"):
            assert not file.is_file() or secret not in file.read_bytes(), file


def _rows(log: Log) -> list[Change]:
    ops = (Op.READ, Op.INSERT, Op.UPDATE)
    return [each for each in log.read(0, limit=1000) if each.op in ops]


def test_a_masked_column_keeps_its_number_and_gives_older_rows_the_code_of_their_default() -> None:
    email = Column("email", "text", number=7, initial_default='"a@b.c"')
    table = msgspec.structs.replace(USERS, columns=(USERS.columns[0], email))
    for mask, initial in ((MASK, json.dumps(MASK.code("a@b.c"))), (None, "")):
        _, stored = ColumnRules((), {"email": mask}).of(table).stored.columns
        assert (stored.number, stored.initial_default) == (7, initial)
