"""pgoutput, protocol version 1: bytes -> messages. No I/O, no state.

Rows (Insert, Update, Delete) are not parsed here: their tuples are turned into JSON in one pass by
`rows`, which is most of the work of capturing. Everything else is parsed into a value.

Anything that the protocol does not allow raises ProtocolError, whatever the bytes are.
"""

import struct
from collections.abc import Callable

import msgspec

from ...errors import ProtocolError

# PostgreSQL counts microseconds from 2000-01-01.
EPOCH_MICROSECONDS = 946_684_800_000_000

_BEGIN = struct.Struct(">cQqI")
_COMMIT = struct.Struct(">cBQQq")
_RELATION = struct.Struct(">cI")
_COLUMN = struct.Struct(">Ii")
_TRUNCATE = struct.Struct(">cIB")
_MESSAGE = struct.Struct(">cBQ")
_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">H")

_IDENTITIES = {"d": "default", "n": "nothing", "f": "full", "i": "index"}


class WalBegin(msgspec.Struct, frozen=True):
    """A transaction starts; it is sent only when it has committed, so its commit is known."""

    commit_lsn: int
    commit_time: int  # microseconds since 1970
    xid: int


class WalCommit(msgspec.Struct, frozen=True):
    """A transaction ends."""

    commit_lsn: int
    end_lsn: int  # acknowledging this, not commit_lsn, keeps it from being sent again


class RelationColumn(msgspec.Struct, frozen=True):
    """A column in a Relation message."""

    name: str
    identity: bool  # part of what is sent as the old row's key
    type_id: int
    modifier: int


class WalRelation(msgspec.Struct, frozen=True):
    """A table's columns, sent before its first row on a connection and after each change."""

    id: int
    schema: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]


class WalTruncate(msgspec.Struct, frozen=True):
    """Tables emptied by one statement."""

    relations: tuple[int, ...]
    cascade: bool
    restart_identity: bool


class Message(msgspec.Struct, frozen=True):
    """What pg_logical_emit_message wrote."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


class Ignored(msgspec.Struct, frozen=True):
    """Origin and Type messages: nothing we need."""


Parsed = WalBegin | WalCommit | WalRelation | WalTruncate | Message | Ignored


def parse(data: bytes) -> Parsed:
    """The message in `data`; rows are not accepted."""
    try:
        return _PARSERS[data[:1]](data)
    except KeyError:
        raise ProtocolError(f"unknown pgoutput message {data[:1]!r}") from None
    except (struct.error, UnicodeDecodeError, ValueError, IndexError) as error:
        raise ProtocolError(f"malformed pgoutput message {data[:1]!r}") from error


def _begin(data: bytes) -> WalBegin:
    _, commit_lsn, commit_time, xid = _BEGIN.unpack(data)
    return WalBegin(commit_lsn, commit_time + EPOCH_MICROSECONDS, xid)


def _commit(data: bytes) -> WalCommit:
    _, _flags, commit_lsn, end_lsn, _time = _COMMIT.unpack(data)
    return WalCommit(commit_lsn, end_lsn)


def _relation(data: bytes) -> WalRelation:
    _, relation = _RELATION.unpack_from(data)
    schema, at = _string(data, 5)
    name, at = _string(data, at)
    identity = _IDENTITIES.get(chr(data[at]), "default")
    (count,) = _COUNT.unpack_from(data, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        flags = data[at]
        column, at = _string(data, at + 1)
        type_id, modifier = _COLUMN.unpack_from(data, at)
        at += 8
        columns.append(RelationColumn(column, bool(flags & 1), type_id, modifier))
    _ended(data, at)
    # pg_catalog is sent as an empty name.
    return WalRelation(relation, schema or "pg_catalog", name, identity, tuple(columns))


def _truncate(data: bytes) -> WalTruncate:
    _, count, options = _TRUNCATE.unpack_from(data)
    at = _TRUNCATE.size
    _ended(data, at + 4 * count)
    relations = struct.unpack_from(f">{count}I", data, at)
    return WalTruncate(relations, bool(options & 1), bool(options & 2))


def _message(data: bytes) -> Message:
    _, flags, lsn = _MESSAGE.unpack_from(data)
    prefix, at = _string(data, _MESSAGE.size)
    (length,) = _LENGTH.unpack_from(data, at)
    at += 4
    _ended(data, at + length)
    return Message(bool(flags & 1), lsn, prefix, data[at : at + length])


def _ignored(data: bytes) -> Ignored:
    return Ignored()


def _string(data: bytes, start: int) -> tuple[str, int]:
    end = data.index(b"\0", start)
    return data[start:end].decode(), end + 1


def _ended(data: bytes, at: int) -> None:
    if at != len(data):
        raise ValueError(f"{len(data)} bytes where {at} were expected")


_PARSERS: dict[bytes, Callable[[bytes], Parsed]] = {
    b"B": _begin,
    b"C": _commit,
    b"R": _relation,
    b"T": _truncate,
    b"M": _message,
    b"O": _ignored,
    b"Y": _ignored,
}
