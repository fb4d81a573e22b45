"""The binary log of MySQL and MariaDB: bytes -> events. No state.

    form = UNKNOWN                        until the server has described its format
    event = parse(data, form)             one event, header and checksum included
    if isinstance(event, FormatDescription): form = event

Rows are not decoded here: `rows` turns the rows of an event into JSON images.

Bytes that the format does not allow raise ProtocolError, and so does an event that must not be
passed over but is not known: nothing of a stream is left out in silence.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol
from uuid import UUID

import msgspec
import zstandard

from ....errors import DecodeError, ProtocolError, SourceRefused
from .charsets import charset_of, decoder
from .events import (
    Event,
    FormatDescription,
    Gtid,
    GtidList,
    Header,
    Heartbeat,
    IgnoredEvent,
    Incident,
    Payload,
    PreviousGtids,
    Query,
    Rotate,
    RowsEvent,
    RowsKind,
    RowsQuery,
    TableMap,
    XaPrepare,
    Xid,
)
from .gtid import MariadbGtid, MysqlGtid, MysqlGtids
from .tablemap import integer, part, table_map, without_doubtful_signs

HEADER_SIZE = 19
CHECKSUM_SIZE = 4

_HEADER = struct.Struct("<IBIIIH")
_IN_USE = 0x01  # in the flags of a format description while its file is written
_IGNORABLE = 0x80
_FOREIGN_KEYS_OFF = 2  # in the flags of rows
_STATEMENT_ENDS = 0x01  # in the flags of rows


def parse(data: bytes, form: FormatDescription) -> Event:
    """The event in `data`, which begins with its header."""
    try:
        header = Header(*_HEADER.unpack_from(data))
        if header.size != len(data):
            raise ValueError(f"{len(data)} bytes where {header.size} were announced")
        body = data[:-CHECKSUM_SIZE]
        # The usual case first: every event comes by here.
        if not form.checksum or zlib.crc32(body) != int.from_bytes(data[-CHECKSUM_SIZE:], "little"):
            body = _unchecked(data, header, form)
        read = _READERS.get(header.kind)
        return _unknown(header) if read is None else read(header, body, form)
    except (struct.error, ValueError, IndexError, KeyError, zlib.error, DecodeError) as error:
        kind = data[4] if len(data) > 4 else "?"
        raise ProtocolError(f"malformed binlog event of type {kind}") from error


def inner_events(payload: Payload, form: FormatDescription) -> Iterator[Event]:
    """The events inside a payload; they have no checksums and no positions of their own."""
    inner = msgspec.structs.replace(form, checksum=False)
    for data in _unpacked(payload):
        yield parse(data, inner)


def _unchecked(data: bytes, header: Header, form: FormatDescription) -> bytes:
    """The event without its checksum, where none was expected or it is not the usual one."""
    if form.checksum is False and header.kind != _FORMAT:
        return data
    body = data[:-CHECKSUM_SIZE]
    if len(body) < HEADER_SIZE:
        raise ValueError("no room for a checksum")
    found = int.from_bytes(data[-CHECKSUM_SIZE:], "little")
    if found in (zlib.crc32(body), _crc_when_closed(body, header)):
        return body
    if form.checksum is None and header.kind != _FORMAT:
        return data  # the format is not known yet, and this one has none
    if header.kind == _FORMAT and body[-1] == 0:
        return body  # with checksums off the four bytes stay empty
    raise ProtocolError(
        f"a binlog event of type {header.kind} does not have the checksum that it was sent with",
        hint="Check the network and the disk of the server; `mariadb-binlog` reads the same file.",
    )


def _crc_when_closed(data: bytes, header: Header) -> int | None:
    """The flag of a file that is in use is set and cleared without a new checksum."""
    if header.kind != _FORMAT:
        return None
    return zlib.crc32(data[:17] + bytes([data[17] & ~_IN_USE]) + data[18:])


def _unknown(header: Header) -> IgnoredEvent:
    if header.flags & _IGNORABLE:
        return IgnoredEvent(header)
    raise ProtocolError(
        f"the server sent a binlog event of type {header.kind}, which is not known here and must "
        "not be passed over",
        hint="This server may be newer than Headrace: see docs/mysql.md for those that are known.",
    )


def _ignored(header: Header, data: bytes, form: FormatDescription) -> IgnoredEvent:
    return IgnoredEvent(header)


def _format(header: Header, data: bytes, form: FormatDescription) -> FormatDescription:
    version, server, created, header_size = struct.unpack_from("<H50sIB", data, HEADER_SIZE)
    if (version, header_size) != (4, HEADER_SIZE):
        raise ValueError(f"a binlog of version {version}")
    lengths, checksum = data[HEADER_SIZE + 57 : -1], data[-1]
    name = server.rstrip(b"\0").decode("ascii")
    return FormatDescription(header, name, created, lengths, checksum=checksum == 1)


def _rotate(header: Header, data: bytes, form: FormatDescription) -> Rotate:
    (position,) = struct.unpack_from("<Q", data, HEADER_SIZE)
    return Rotate(header, data[HEADER_SIZE + 8 :].decode(), position)


def _xid(header: Header, data: bytes, form: FormatDescription) -> Xid:
    return Xid(header, *struct.unpack_from("<Q", data, HEADER_SIZE))


def _xa_prepare(header: Header, data: bytes, form: FormatDescription) -> XaPrepare:
    one_phase, format_id, gtrid, bqual = struct.unpack_from("<BIII", data, HEADER_SIZE)
    at = HEADER_SIZE + 13
    branch = part(data, at + gtrid, bqual)
    return XaPrepare(header, bool(one_phase), format_id, part(data, at, gtrid), branch)


def _incident(header: Header, data: bytes, form: FormatDescription) -> Incident:
    (number,) = struct.unpack_from("<H", data, HEADER_SIZE)
    size = data[HEADER_SIZE + 2]
    message = part(data, HEADER_SIZE + 3, size).decode("utf-8", "replace")
    return Incident(header, number, message)


def _heartbeat(header: Header, data: bytes, form: FormatDescription) -> Heartbeat:
    return Heartbeat(header, data[HEADER_SIZE:].decode(), header.end)


def _heartbeat_v2(header: Header, data: bytes, form: FormatDescription) -> Heartbeat:
    """The file and the position as fields, because positions may need more than 32 bits."""
    at, file, position = HEADER_SIZE, "", 0
    while data[at] != 0:
        size, begin = integer(data, at + 1)
        value = part(data, begin, size)
        if data[at] == 1:
            file = value.decode()
        elif data[at] == 2:
            position, _ = integer(value, 0)
        at = begin + size
    return Heartbeat(header, file, position)


def _rows_query(header: Header, data: bytes, form: FormatDescription) -> RowsQuery:
    # A length of one byte stands first, which is wrong for long statements.
    return RowsQuery(header, data[HEADER_SIZE + 1 :].decode("utf-8", "replace"))


def _annotate_rows(header: Header, data: bytes, form: FormatDescription) -> RowsQuery:
    return RowsQuery(header, data[HEADER_SIZE:].decode("utf-8", "replace"))


# --- statements ----------------------------------------------------------------------------------

_QUERY = struct.Struct("<IIBHH")
_AFTER_LOAD = 13  # bytes that EXECUTE_LOAD_QUERY puts between


def _query(header: Header, data: bytes, form: FormatDescription, *, between: int = 0) -> Query:
    thread, _seconds, size, error, status = _QUERY.unpack_from(data, HEADER_SIZE)
    at = HEADER_SIZE + _QUERY.size + between
    variables = _statuses(part(data, at, status))
    at += status
    database = part(data, at, size).decode()
    sql = data[at + size + 1 :]
    if header.kind == _QUERY_COMPRESSED:
        sql = _uncompressed(sql)
    sql_mode = int.from_bytes(variables.get(1, b""), "little")
    microseconds = int.from_bytes(variables.get(13) or variables.get(128, b""), "little")
    text = _sql(sql, int.from_bytes(variables.get(4, b"")[:2], "little"))
    phase = (variables.get(_TWO_PHASE) or b"\0")[0]
    done = not phase & (_ALTER_STARTED | _ALTER_ROLLED_BACK)
    return Query(header, database, text, sql_mode, error, microseconds, thread, done)


def _load_query(header: Header, data: bytes, form: FormatDescription) -> Query:
    return _query(header, data, form, between=_AFTER_LOAD)


# MariaDB with binlog_alter_two_phase logs an ALTER TABLE when it starts and when it ends.
_TWO_PHASE = 130
_ALTER_STARTED, _ALTER_COMMITTED, _ALTER_ROLLED_BACK = 2, 4, 8

# How long each status variable is; those with a length of their own are counted in `_status_size`.
_STATUS_SIZES = {0: 4, 1: 8, 3: 4, 4: 6, 7: 2, 8: 2, 9: 8, 10: 4, 13: 3, 16: 1, 17: 8, 18: 2,
                 19: 1, 20: 1, 128: 3, 129: 8}  # fmt: skip


def _statuses(data: bytes) -> dict[int, bytes]:
    """The status variables; what comes after one that is not known cannot be found."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        code = data[at]
        at += 1
        size = _STATUS_SIZES.get(code) or _status_size(code, data, at)
        if size is None:
            break
        found[code] = part(data, at, size)
        at += size
    return found


def _status_size(code: int, data: bytes, at: int) -> int | None:
    if code in (5, 6):  # time zone, catalog
        return 1 + data[at]
    if code == 2:  # catalog, of old with a zero byte
        return 2 + data[at]
    if code == 11:  # invoker: user and host
        user = 1 + data[at]
        return user + 1 + data[at + user]
    if code == 12:  # names of databases
        count, end = data[at], at + 1
        for _ in range(0 if count == 254 else count):
            end = data.index(b"\0", end) + 1
        return end - at
    if code == _TWO_PHASE:  # the end of an ALTER also has the number of its start
        return 9 if data[at] & (_ALTER_COMMITTED | _ALTER_ROLLED_BACK) else 1
    return None


def _sql(sql: bytes, collation: int) -> str:
    """Statements are logged in the client's character set, and may hold any bytes in literals."""
    try:
        return decoder(charset_of(collation))(sql)
    except (DecodeError, UnicodeError):
        return sql.decode("utf-8", "backslashreplace")


# --- transactions --------------------------------------------------------------------------------

_SECOND_FOLLOWS = 1 << 55  # the original commit's time, when it is another


def _gtid(header: Header, data: bytes, form: FormatDescription) -> Gtid:
    _flags, uuid, number = struct.unpack_from("<B16sq", data, HEADER_SIZE)
    gtid = None if header.kind == _ANONYMOUS else MysqlGtid(str(UUID(bytes=uuid)), number)
    at = HEADER_SIZE + 42  # after last_committed and sequence_number
    if len(data) < at + 7:
        return Gtid(header, gtid)
    committed = int.from_bytes(data[at : at + 7], "little")
    at += 14 if committed & _SECOND_FOLLOWS else 7
    length = integer(data, at)[0] if at < len(data) else 0
    return Gtid(header, gtid, commit_time=committed & ~_SECOND_FOLLOWS, length=length)


def _varied(data: bytes, at: int) -> tuple[int, int]:
    """An integer whose first byte has a low 1 for each byte that follows, and where it ends."""
    more = (~data[at] & data[at] + 1).bit_length() - 1
    end = at + more + 1
    number = int.from_bytes(part(data, at, more + 1), "little")
    # With eight ones the first byte holds nothing else.
    return number >> (8 if more == 8 else more + 1), end


def _tagged_gtid(header: Header, data: bytes, form: FormatDescription) -> Gtid:
    """GTID_TAGGED: numbered fields, each a varied integer; optional ones come later."""
    _version, at = _varied(data, HEADER_SIZE)
    size, at = _varied(data, at)
    _last, at = _varied(data, at)
    if HEADER_SIZE + size > len(data):
        raise ValueError("the fields are cut short")
    uuid, tag, fields = b"", "", dict[int, int]()
    while at < HEADER_SIZE + size:
        field, at = _varied(data, at)
        if field == 1:
            uuid, at = _varied_bytes(data, at)
        elif field == 3:
            length, at = _varied(data, at)
            tag, at = part(data, at, length).decode("ascii"), at + length
        else:
            fields[field], at = _varied(data, at)
    # Signed ones have their sign in the lowest bit.
    gtid = MysqlGtid(str(UUID(bytes=uuid)), fields[2] >> 1, tag)
    return Gtid(header, gtid, commit_time=fields.get(6, 0), length=fields.get(8, 0))


def _varied_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    found = bytearray()
    for _ in range(16):
        byte, at = _varied(data, at)
        found.append(byte)
    return bytes(found), at


def _previous_gtids(header: Header, data: bytes, form: FormatDescription) -> PreviousGtids:
    return PreviousGtids(header, MysqlGtids.decode(data[HEADER_SIZE:]))


def _mariadb_gtid(header: Header, data: bytes, form: FormatDescription) -> Gtid:
    sequence, domain, flags = struct.unpack_from("<QIB", data, HEADER_SIZE)
    return Gtid(
        header,
        MariadbGtid(domain, header.server_id, sequence),
        standalone=bool(flags & 0x01),
        prepared_xa=bool(flags & 0x40),
    )


def _gtid_list(header: Header, data: bytes, form: FormatDescription) -> GtidList:
    (count,) = struct.unpack_from("<I", data, HEADER_SIZE)
    count &= (1 << 28) - 1  # the bits above are flags
    entries = part(data, HEADER_SIZE + 4, 16 * count)
    gtids = tuple(MariadbGtid(*entry) for entry in struct.iter_unpack("<IIQ", entries))
    return GtidList(header, gtids)


def _payload(header: Header, data: bytes, form: FormatDescription) -> Payload:
    at, fields = HEADER_SIZE, dict[int, int]()
    while True:
        field, at = integer(data, at)
        if field == 0:
            break
        size, at = integer(data, at)
        fields[field], _ = integer(part(data, at, size), 0)
        at += size
    compressed = part(data, at, fields[1])
    return Payload(header, compressed, fields[2], fields.get(3, 0))


# --- compressed transactions ----------------------------------------------------------------------

_ZSTD, _NONE = 0, 255
_LARGEST = (1 << 30) + (1 << 20)  # the servers' limit for an event, with some room


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def _unpacked(payload: Payload) -> Iterator[bytes]:
    """The events of a payload, one by one; ProtocolError where it is damaged.

    A transaction may be larger than memory when uncompressed, so it is unpacked as it is read.
    """
    if payload.compression not in (_ZSTD, _NONE):
        raise ProtocolError(f"a payload is compressed in an unknown way ({payload.compression})")
    stream: _Readable = io.BytesIO(payload.compressed)
    if payload.compression == _ZSTD:
        stream = zstandard.ZstdDecompressor().stream_reader(payload.compressed)
    size = 0
    try:
        for event in _packed_events(stream):
            size += len(event)
            yield event
    except zstandard.ZstdError as error:
        raise ProtocolError("a payload of a transaction cannot be unpacked") from error
    # The decompressor takes the end of its input for the end of the stream.
    if payload.size not in (0, size):
        raise ProtocolError("a payload of a transaction is cut short")


def _packed_events(stream: _Readable) -> Iterator[bytes]:
    while head := stream.read(HEADER_SIZE):
        size = int.from_bytes(head[9:13], "little")
        if len(head) != HEADER_SIZE or not HEADER_SIZE <= size <= _LARGEST:
            raise ProtocolError("an event within a payload is malformed")
        event = head + stream.read(size - HEADER_SIZE)
        if len(event) != size:
            raise ProtocolError("an event within a payload is cut short")
        yield event


# --- rows ----------------------------------------------------------------------------------------


def _table_map(header: Header, data: bytes, form: FormatDescription) -> TableMap:
    number = int.from_bytes(part(data, HEADER_SIZE, 6), "little")
    content = data[HEADER_SIZE + 8 :]
    database, table, columns = table_map(content, mariadb=form.mariadb)
    if not form.counts_years:
        columns = without_doubtful_signs(columns)
    return TableMap(header, number, database, table, columns, content)


def _rows(kind: RowsKind, *, second: bool, compressed: bool = False) -> _Reader:
    """The reader of rows: of the second version, which may bring more data in front."""

    def read(header: Header, data: bytes, form: FormatDescription) -> RowsEvent:
        # The table's number has six bytes; the two before it belong to the header.
        number, flags = struct.unpack_from("<QH", data, HEADER_SIZE - 2)
        at = HEADER_SIZE + 8
        if second:
            at += max(2, int.from_bytes(part(data, at, 2), "little"))
        width, at = integer(data, at)
        size = (width + 7) // 8
        present, at = part(data, at, size), at + size
        after = b""
        if kind is RowsKind.UPDATE:
            after, at = part(data, at, size), at + size
        if compressed:
            data, at = _uncompressed(data[at:]), 0
        return RowsEvent(
            header, kind, number >> 16, bool(flags & _STATEMENT_ENDS), width, present, after,
            data, at, len(data), bool(flags & _FOREIGN_KEYS_OFF),
        )  # fmt: skip

    return read


def _uncompressed(data: bytes) -> bytes:
    """What MariaDB has compressed: a byte of kind and size, the length, a zlib stream."""
    kind, at = data[0], 1 + (data[0] & 7)
    if kind & 0xF0 != 0x80:
        raise ValueError(f"compressed in an unknown way ({kind >> 4 & 7})")
    size = int.from_bytes(part(data, 1, at - 1), "big")
    inflate = zlib.decompressobj()
    found = inflate.decompress(data[at:], size + 1)
    if len(found) != size:
        raise ValueError(f"{size} bytes announced, {len(found)} there")
    return found


def _partial_rows(header: Header, data: bytes, form: FormatDescription) -> Event:
    raise SourceRefused(
        "the binlog has partial JSON values, from which a row cannot be made whole",
        hint="SET PERSIST binlog_row_value_options = ''; then run `headrace snapshot SOURCE`.",
    )


_Reader = Callable[[Header, bytes, FormatDescription], "Event"]

_FORMAT, _ANONYMOUS, _QUERY_COMPRESSED = 15, 34, 165
_READERS: dict[int, _Reader] = {
    2: _query,
    3: _ignored,  # STOP
    4: _rotate,
    5: _ignored,  # INTVAR, and 13, 14: variables of the statement that follows
    9: _ignored,  # APPEND_BLOCK, and 11, 17: the file of the LOAD DATA that follows
    11: _ignored,
    13: _ignored,
    14: _ignored,
    15: _format,
    16: _xid,
    17: _ignored,
    18: _load_query,
    19: _table_map,
    23: _rows(RowsKind.INSERT, second=False),
    24: _rows(RowsKind.UPDATE, second=False),
    25: _rows(RowsKind.DELETE, second=False),
    26: _incident,
    27: _heartbeat,
    28: _ignored,  # IGNORABLE
    29: _rows_query,
    30: _rows(RowsKind.INSERT, second=True),
    31: _rows(RowsKind.UPDATE, second=True),
    32: _rows(RowsKind.DELETE, second=True),
    33: _gtid,
    34: _gtid,
    35: _previous_gtids,
    36: _ignored,  # TRANSACTION_CONTEXT, and 37 VIEW_CHANGE: group replication's own
    37: _ignored,
    38: _xa_prepare,
    39: _partial_rows,
    40: _payload,
    41: _heartbeat_v2,
    42: _tagged_gtid,
    160: _annotate_rows,
    161: _ignored,  # BINLOG_CHECKPOINT
    162: _mariadb_gtid,
    163: _gtid_list,
    # 164, START_ENCRYPTION, is marked as ignorable by a server, which decrypts what follows.
    165: _query,
    166: _rows(RowsKind.INSERT, second=False, compressed=True),
    167: _rows(RowsKind.UPDATE, second=False, compressed=True),
    168: _rows(RowsKind.DELETE, second=False, compressed=True),
    169: _rows(RowsKind.INSERT, second=True, compressed=True),
    170: _rows(RowsKind.UPDATE, second=True, compressed=True),
    171: _rows(RowsKind.DELETE, second=True, compressed=True),
}
