"""What a log adds up to is what the source's tables hold."""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headrace.change.event import BeforeKind, Change, Column, Op, Table, Transaction
from headrace.change.replay import Replay, TableName
from headrace.sources.postgres.position import PostgresPosition

TRANSACTION = Transaction("7", commit_time=1, captured_at=2)
USERS = TableName("shop", "public", "users")

Image = dict[str, Any] | None


def table(*columns: str, key: tuple[str, ...] = ("id",), version: int = 1) -> Table:
    described = tuple(Column(name, "text", key=name in key) for name in columns)
    return Table("shop", "postgres", "o", "db", "public", "users", described, version=version)


PLAIN = table("id", "name")


def image(value: Image) -> bytes | None:
    return None if value is None else msgspec.json.encode(value)


def change(
    op: Op,
    after: Image = None,
    *,
    before: Image = None,
    of: Table = PLAIN,
    unchanged: tuple[str, ...] = (),
) -> Change:
    source = after or before or {}
    key = {name: source[name] for name in of.key if name in source} or None
    kind = BeforeKind.NONE if before is None else BeforeKind.FULL
    position = PostgresPosition(1, 1)
    return Change(
        op, of, image(key), image(before), kind, image(after), None, unchanged,
        TRANSACTION, 1, position, sequence=next(_sequences),
    )  # fmt: skip


_sequences: Iterator[int] = itertools.count(1)


def rows(*changes: Change) -> list[dict[str, Any]]:
    """The rows after the changes, none of which may surprise."""
    replay = Replay.of(changes)
    assert replay.surprises == []
    return replay.rows(USERS)


ADA = {"id": 1, "name": "Ada"}
BOB = {"id": 2, "name": "Bob"}


def test_rows_that_were_copied_and_inserted_are_there() -> None:
    assert rows(change(Op.READ, ADA), change(Op.INSERT, BOB)) == [ADA, BOB]


def test_an_update_replaces_the_row_of_its_key() -> None:
    renamed = {"id": 1, "name": "Countess"}
    assert rows(change(Op.INSERT, ADA), change(Op.UPDATE, renamed)) == [renamed]


def test_an_update_of_the_key_leaves_no_row_behind() -> None:
    moved = {"id": 9, "name": "Ada"}
    update = change(Op.UPDATE, moved, before={"id": 1})
    assert rows(change(Op.INSERT, ADA), change(Op.INSERT, BOB), update) == [BOB, moved]


def test_a_column_the_source_did_not_send_keeps_its_value() -> None:
    update = change(Op.UPDATE, {"id": 1}, unchanged=("name",))
    assert rows(change(Op.INSERT, ADA), update) == [ADA]


def test_a_column_not_sent_keeps_its_value_when_the_key_changes_too() -> None:
    update = change(Op.UPDATE, {"id": 5}, before={"id": 1}, unchanged=("name",))
    assert rows(change(Op.INSERT, ADA), update) == [{"id": 5, "name": "Ada"}]


def test_a_deleted_row_is_gone() -> None:
    assert rows(change(Op.INSERT, ADA), change(Op.INSERT, BOB), change(Op.DELETE, before=ADA)) == [
        BOB
    ]


def test_a_truncated_table_is_empty() -> None:
    assert rows(change(Op.INSERT, ADA), change(Op.TRUNCATE)) == []


def test_an_added_column_is_null_in_the_rows_before_it() -> None:
    wider = table("id", "name", "age", version=2)
    grown = {"id": 2, "name": "Bob", "age": 40}
    changes = (
        change(Op.INSERT, ADA),
        change(Op.SCHEMA, of=wider),
        change(Op.INSERT, grown, of=wider),
    )
    assert rows(*changes) == [{**ADA, "age": None}, grown]


def test_a_dropped_column_is_gone_from_the_rows_before_it() -> None:
    narrower = table("id", version=2)
    assert rows(change(Op.INSERT, ADA), change(Op.SCHEMA, of=narrower)) == [{"id": 1}]


def test_rows_are_found_by_another_key_after_the_key_changed() -> None:
    by_name = table("id", "name", key=("name",), version=2)
    deletion = change(Op.DELETE, before={"name": "Ada"}, of=by_name)
    assert rows(change(Op.INSERT, ADA), change(Op.INSERT, BOB), deletion) == [BOB]


def test_equal_rows_of_a_table_without_a_key_are_kept_apart() -> None:
    keyless = table("id", "name", key=())
    twins = [change(Op.INSERT, ADA, of=keyless) for _ in range(3)]
    deletion = change(Op.DELETE, before=ADA, of=keyless)
    assert rows(*twins, deletion) == [ADA, ADA]


def test_an_update_without_a_key_replaces_one_equal_row() -> None:
    keyless = table("id", "name", key=())
    twins = [change(Op.INSERT, ADA, of=keyless) for _ in range(2)]
    update = change(Op.UPDATE, BOB, before=ADA, of=keyless)
    assert rows(*twins, update) == [ADA, BOB]


def test_messages_are_about_no_table() -> None:
    nothing = msgspec.structs.replace(PLAIN, name="")
    replay = Replay.of([change(Op.MESSAGE, {"text": "hello"}, of=nothing)])
    assert replay.tables == []


def test_the_same_table_of_two_sources_is_two_tables() -> None:
    elsewhere = msgspec.structs.replace(PLAIN, source="other")
    replay = Replay.of([change(Op.INSERT, ADA), change(Op.INSERT, BOB, of=elsewhere)])
    assert [(name.source, replay.rows(name)) for name in replay.tables] == [
        ("other", [BOB]),
        ("shop", [ADA]),
    ]


@pytest.mark.parametrize(
    ("changes", "surprise"),
    [
        ((change(Op.INSERT, ADA), change(Op.INSERT, ADA)), "already there"),
        ((change(Op.UPDATE, ADA),), "no such row"),
        ((change(Op.DELETE, before=ADA),), "no such row"),
        ((change(Op.UPDATE, {"id": 1}, unchanged=("name",)),), "no such row"),
    ],
    ids=["inserted twice", "updated without a row", "deleted without a row", "never seen whole"],
)
def test_a_repeated_or_missing_change_is_noticed(changes: list[Change], surprise: str) -> None:
    [found] = Replay.of(changes).surprises
    assert surprise in found
    assert "public.users" in found


def test_all_rows_of_a_key_go_over_to_other_columns() -> None:
    full = msgspec.structs.replace(PLAIN, identity="full")
    wider = msgspec.structs.replace(table("id", "name", "age", version=2), identity="full")
    twin = {"id": 1, "name": "Twin"}
    changes = (
        change(Op.INSERT, ADA, of=full),
        change(Op.INSERT, twin, of=full),
        change(Op.SCHEMA, of=wider),
        change(Op.DELETE, before={**twin, "age": None}, of=wider),
    )
    assert rows(*changes) == [{**ADA, "age": None}]
