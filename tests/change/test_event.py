"""The change's own promises: an identity that never differs, positions that order."""

import re
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change import event
from headrace.change.arrow import row_schema
from headrace.change.event import (
    Change,
    Column,
    Op,
    Table,
    Transaction,
    bounded_comment,
    same_columns,
)
from headrace.change.lsn import format_lsn, parse_lsn
from headrace.change.record import decode, encode
from headrace.sources.postgres.position import PostgresPosition
from tests.changes import make_change, make_table

LSNS = st.integers(0, 2**64 - 1)


@pytest.mark.requirement("S2-15")
@given(LSNS)
def test_an_lsn_survives_its_text_form(lsn: int) -> None:
    assert parse_lsn(format_lsn(lsn)) == lsn


@pytest.mark.requirement("S2-15")
def test_an_lsn_is_written_as_postgresql_writes_it() -> None:
    assert format_lsn(0x16B3748) == "0/16B3748"
    assert format_lsn(0x7_0000_000A) == "7/A"


@pytest.mark.parametrize("text", ["", "0", "0/", "/1", "x/1", "0/100000000", "100000000/0"])
def test_what_is_no_lsn_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_lsn(text)


def test_an_id_is_evt_and_a_uuid() -> None:
    name = make_change().id
    assert re.fullmatch(r"evt_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name)
    assert str(UUID(name.removeprefix("evt_"))) == name.removeprefix("evt_")


@pytest.mark.requirement("S0-34")
def test_an_id_depends_only_on_source_commit_and_ordinal() -> None:
    change = make_change(after={"id": 1})
    again = msgspec.structs.replace(
        change,
        table=msgspec.structs.replace(change.table, version=9),
        transaction=msgspec.structs.replace(change.transaction, captured_at=1, metadata=b"{}"),
        position=PostgresPosition(change.position.commit, 1),
        after=None,
        sequence=99,
        last=False,
    )
    assert again.id == change.id


def test_an_id_differs_with_each_thing_it_is_made_of() -> None:
    change = make_change()
    table, transaction, position = change.table, change.transaction, change.position
    replaced = msgspec.structs.replace
    others: list[Change] = [
        replaced(change, ordinal=2),
        replaced(change, table=replaced(table, origin="another server")),
        replaced(change, position=PostgresPosition(position.commit + 1, position.own)),
        replaced(change, transaction=Transaction("8", transaction.commit_time, 0)),
    ]
    assert len({change.id, *(other.id for other in others)}) == 5


def test_an_id_is_the_same_in_every_version_of_headrace() -> None:
    # Consumers have stored ids: a change of how they are made would show them everything twice.
    assert make_change().id == "evt_91feb3e4-0a2c-87ec-a84f-53600eff638a"


def test_a_change_cannot_be_altered() -> None:
    change = make_change()
    with pytest.raises(AttributeError):
        change.op = Op.DELETE  # type: ignore[misc]


def test_a_tables_key_lists_its_key_columns_in_their_order() -> None:
    columns = (Column("b", "int", key=True), Column("x", "int"), Column("a", "int", key=True))
    table = Table("s", "postgres", "o", "d", "public", "t", columns)
    assert table.key == ("b", "a")
    assert make_table(key=()).key == ()


@pytest.mark.parametrize("end_lsn", [0, 0x16B3830])
def test_a_position_shows_its_lsns_as_text(end_lsn: int) -> None:
    position = PostgresPosition(0x16B3800, 0x16B3748, end_lsn)
    assert position.to_json() == {"lsn": "0/16B3748", "commit_lsn": "0/16B3800"}


def test_the_end_of_a_commit_survives_the_log_and_older_records_have_none() -> None:
    position = PostgresPosition(0x16B3800, 0x16B3748, 0x16B3830)
    change = make_change(position=position)
    [record] = encode([change])
    assert decode(1, record, {1: change.table}) == change
    # As records were before the end was kept: the connector and two numbers.
    written, former = (
        msgspec.msgpack.encode(each)
        for each in (position, ["postgres", position.commit, position.own])
    )
    assert record.count(written) == 1
    old = decode(1, record.replace(written, former), {1: change.table})
    assert old == msgspec.structs.replace(
        change, position=PostgresPosition(position.commit, position.own, 0)
    )


def test_tables_that_were_stored_without_foreign_keys_have_none() -> None:
    stored = msgspec.json.decode(msgspec.json.encode(make_table()))
    del stored["references"]
    assert msgspec.convert(stored, Table) == make_table()


# As the version before comments wrote a table, byte for byte.
UNCOMMENTED = (
    b'{"source":"shop","connector":"postgres","origin":"origin-1","database":"shop",'
    b'"schema":"public","name":"users","columns":['
    b'{"name":"id","type":"text","key":true,"type_id":0,"modifier":-1},'
    b'{"name":"name","type":"text","key":false,"type_id":0,"modifier":-1}],'
    b'"identity":"default","relation":0,"version":1,"references":[],"hidden":[]}'
)


class ColumnBefore(msgspec.Struct, frozen=True):
    """A column as that version reads it."""

    name: str
    type: str
    key: bool = False
    type_id: int = 0
    modifier: int = -1


class TableBefore(msgspec.Struct, frozen=True):
    """A table as that version reads it."""

    source: str
    name: str
    columns: tuple[ColumnBefore, ...] = ()
    version: int = 0


def commented(table: Table) -> Table:
    columns = tuple(msgspec.structs.replace(each, comment="a") for each in table.columns)
    return msgspec.structs.replace(table, columns=columns, comment="b")


def test_tables_that_were_stored_without_comments_have_none() -> None:
    assert msgspec.json.decode(UNCOMMENTED, type=Table) == make_table(version=1)


def test_a_table_with_comments_is_read_by_the_version_before_them() -> None:
    now = msgspec.json.encode(commented(make_table(version=1)))
    expected = msgspec.json.decode(UNCOMMENTED, type=TableBefore)
    assert msgspec.json.decode(now, type=TableBefore) == expected


def test_comments_are_not_in_what_rows_carry() -> None:
    assert row_schema(commented(make_table())) == row_schema(make_table())
    assert same_columns(commented(make_table()).columns, make_table().columns)
    assert not same_columns(make_table().columns[:1], make_table().columns)


@pytest.mark.parametrize(
    ("text", "kept"),
    [("", ""), ("é" * 2048, "é" * 2048), ("x" + "é" * 2048, "x" + "é" * 2047), ("\0", "\0")],
)
def test_a_comment_is_cut_between_characters(text: str, kept: str) -> None:
    assert bounded_comment(text) == kept


def test_a_position_is_found_by_its_former_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"headrace\.sources\.postgres\.position"):
        assert event.PostgresPosition is PostgresPosition  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        event.OraclePosition  # type: ignore[attr-defined] # noqa: B018
