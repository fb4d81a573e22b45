"""The parser of pgoutput reads what servers send, and nothing else upsets it."""

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.errors import ProtocolError
from headrace.sources.postgres.pgoutput import (
    Ignored,
    Message,
    RelationColumn,
    WalBegin,
    WalCommit,
    WalRelation,
    WalTruncate,
    parse,
)

INT32 = st.integers(0, 2**32 - 1)
INT64 = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@given(st.binary(max_size=200) | st.tuples(st.sampled_from(b"BCRTMOY"), st.binary()).map(
    lambda parts: bytes([parts[0]]) + parts[1]
))  # fmt: skip
@example(b"")
@example(b"I")
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        parse(data)
    except ProtocolError:
        return


@pytest.mark.parametrize("kind", [b"B", b"C", b"R", b"T", b"M"])
def test_a_message_cut_short_names_its_kind(kind: bytes) -> None:
    with pytest.raises(ProtocolError, match=kind.decode()):
        parse(kind + b"\0\0")


@pytest.mark.parametrize("kind", [b"S", b"E", b"c", b"A", b"P", b"\xff", b"I", b"U", b"D"])
def test_a_kind_that_is_not_expected_here_is_refused(kind: bytes) -> None:
    with pytest.raises(ProtocolError, match="unknown pgoutput message"):
        parse(kind + bytes(64))


def test_origins_and_types_are_passed_over() -> None:
    assert parse(b"O" + bytes(9) + b"origin\0") == Ignored()
    assert parse(b"Y" + bytes(4) + b"public\0mood\0") == Ignored()


@given(INT64, st.integers(-(2**62), 2**62), INT32)
def test_begin_tells_the_commit_to_come(lsn: int, time: int, xid: int) -> None:
    begin = parse(struct.pack(">cQqI", b"B", lsn, time, xid))
    # PostgreSQL counts from 2000-01-01, a change from 1970-01-01.
    assert begin == WalBegin(lsn, time + 946_684_800_000_000, xid)


@given(INT64, INT64)
def test_commit_tells_where_it_stands_and_where_it_ends(lsn: int, end: int) -> None:
    assert parse(struct.pack(">cBQQq", b"C", 0, lsn, end, 0)) == WalCommit(lsn, end)


@given(
    INT32,
    NAMES,
    NAMES,
    st.sampled_from(["default", "nothing", "full", "index"]),
    st.lists(
        st.builds(RelationColumn, NAMES, st.booleans(), INT32, st.integers(-1, 2**31 - 1)),
        max_size=20,
    ),
)
def test_a_relation_survives_its_message(
    oid: int, schema: str, name: str, identity: str, columns: list[RelationColumn]
) -> None:
    data = struct.pack(">cI", b"R", oid)
    data += schema.encode() + b"\0" + name.encode() + b"\0"
    data += identity[0].encode() + struct.pack(">H", len(columns))
    for column in columns:
        data += bytes([column.identity]) + column.name.encode() + b"\0"
        data += struct.pack(">Ii", column.type_id, column.modifier)
    assert parse(data) == WalRelation(oid, schema, name, identity, tuple(columns))
    with pytest.raises(ProtocolError):
        parse(data + b"\0")


def test_the_schema_pg_catalog_is_sent_without_its_name() -> None:
    relation = parse(struct.pack(">cI", b"R", 7) + b"\0t\0d\0\0")
    assert relation == WalRelation(7, "pg_catalog", "t", "default", ())


@given(st.lists(INT32, max_size=10), st.booleans(), st.booleans())
def test_a_truncate_names_all_its_tables(oids: list[int], cascade: bool, restart: bool) -> None:
    data = struct.pack(f">cIB{len(oids)}I", b"T", len(oids), cascade | restart << 1, *oids)
    assert parse(data) == WalTruncate(tuple(oids), cascade, restart)


def test_a_truncate_of_more_tables_than_it_carries_is_refused() -> None:
    # It must not be believed, let alone reserve memory for what it claims.
    with pytest.raises(ProtocolError):
        parse(struct.pack(">cIB", b"T", 2**32 - 1, 0))


@given(st.booleans(), INT64, NAMES, st.binary())
def test_a_message_keeps_its_content_as_it_is(
    transactional: bool, lsn: int, prefix: str, content: bytes
) -> None:
    data = struct.pack(">cBQ", b"M", transactional, lsn) + prefix.encode() + b"\0"
    data += struct.pack(">I", len(content)) + content
    assert parse(data) == Message(transactional, lsn, prefix, content)
