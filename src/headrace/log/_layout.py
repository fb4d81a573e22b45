"""How the log lies in RocksDB: keys, and a change as a record.

Changes have the default column family to themselves, so that files never overlap and RocksDB
moves them down its levels without rewriting. Everything else is in the family `state`.
"""

from collections.abc import Mapping, Sequence

import msgspec

from ..event import BeforeKind, Change, Op, Position, Table, Transaction

STATE = "state"

SEQUENCE = b"changefeed_sequence"  # the last committed sequence
FIRST = b"changefeed_first"  # the first sequence that is still kept
BYTES = b"changefeed_bytes"  # bytes of every record ever committed
TRIMMED = b"changefeed_trimmed_bytes"  # bytes of the records trimmed away
EPOCH = b"epoch"
LAYOUT = b"layout"
LAYOUT_VERSION = b"1"


def change_key(sequence: int) -> bytes:
    """Zero-padded, so that the order of the keys is the order of the sequences."""
    return b"changefeed:%020d" % sequence


def sequence_of(key: bytes) -> int:
    """The sequence in a change's key."""
    return int(key[11:])


def source_key(name: str) -> bytes:
    """Where a source's resume position is kept."""
    return b"source:" + name.encode()


def table_key(version: int) -> bytes:
    """Where a version of a table's columns is kept."""
    return b"table:%010d" % version


def cursor_key(name: str) -> bytes:
    """Where a named cursor is kept."""
    return b"cursor:" + name.encode()


def mark_key(sequence: int) -> bytes:
    """Where a mark (time and size of the log at a sequence) is kept."""
    return b"mark:%020d" % sequence


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """How large and how old the log was at a sequence: what retention by age and size needs."""

    captured_at: int
    total_bytes: int


class _Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    table: int
    op: Op
    transaction: str
    commit_time: int
    captured_at: int
    metadata: bytes | None
    ordinal: int
    last: bool
    position: Position
    key: bytes | None
    before_kind: BeforeKind
    before: bytes | None
    after: bytes | None
    changed: tuple[str, ...] | None
    unchanged: tuple[str, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


def encode(changes: Sequence[Change]) -> list[bytes]:
    """The records of changes: fields in `_Record`'s order, the table by its version.

    Most neighbours share table, operation and transaction, so those are written once and reused.
    Enums are written by their values: handing them over as they are takes twice as long.
    """
    records: list[bytes] = []
    add, write = records.append, _encode
    table = op = transaction = None
    head = b""
    for change in changes:
        if (
            change.transaction is not transaction
            or change.op is not op
            or change.table is not table
        ):
            table, op, transaction = change.table, change.op, change.transaction
            head = _head(table, op, transaction)
        tail = write(
            (
                change.ordinal,
                change.last,
                change.position,
                change.key,
                change.before_kind._value_,
                change.before,
                change.after,
                change.changed,
                change.unchanged,
            )
        )
        add(head + tail[1:])
    return records


def _head(table: Table, op: Op, transaction: Transaction) -> bytes:
    shared = _encode(
        (
            table.version,
            op._value_,
            transaction.id,
            transaction.commit_time,
            transaction.captured_at,
            transaction.metadata,
        )
    )
    # An array of up to 15 elements says its length in its first byte.
    return bytes([0x90 | len(_Record.__struct_fields__)]) + shared[1:]


def decode(sequence: int, record: bytes, tables: Mapping[int, Table]) -> Change:
    """The change behind a record."""
    r = _decode(record)
    return Change(
        r.op,
        tables[r.table],
        r.key,
        r.before,
        r.before_kind,
        r.after,
        r.changed,
        r.unchanged,
        Transaction(r.transaction, r.commit_time, r.captured_at, r.metadata),
        r.ordinal,
        r.position,
        r.last,
        sequence,
    )
