"""What is larger than a piece: packets that arrive in parts, transactions that are compressed."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, SupportsIndex

import pyarrow as pa
import pytest

from headrace.change.event import Op
from headrace.sources.mysql.dump import BinlogDump, Packets
from headrace.sources.mysql.transactions import BinlogAssembler
from headrace.testing.mysql import MysqlDatabase
from tests.sources.mycapturing import captured, numbers

_GTID, _XID, _PAYLOAD = 162, 16, 40
_CHECKSUM = 4
_ROWS = 60_000


class Piece(bytes):
    """Bytes of a socket that are never put together two by two."""

    def __radd__(self, other: object) -> bytes:
        raise AssertionError("a long packet is copied with every piece of it")


class Slices:
    """A socket that gives some bytes at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        self._rest = [data[at : at + size] for at in range(0, len(data), size)]

    def settimeout(self, seconds: SupportsIndex) -> None:
        """It never waits."""

    def recv(self, most: int) -> bytes:
        """The next bytes; at the end none."""
        return Piece(self._rest.pop(0)) if self._rest else b""


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000, 1 << 18])
def test_packets_are_cut_right_however_they_arrive(size: int) -> None:
    sent = [b"", b"a", b"bc" * 700, b"", b"d" * 5000]
    data = b"".join(struct.pack("<I", len(each))[:3] + b"\0" + each for each in sent)
    assert received(data, size) == sent


def test_a_packet_beyond_sixteen_megabytes_is_put_together() -> None:
    sent = bytes(range(256)) * (1 << 16) + b"end"
    head, rest = sent[:0xFFFFFF], sent[0xFFFFFF:]
    data = b"\xff\xff\xff\0" + head + struct.pack("<I", len(rest))[:3] + b"\1" + rest
    assert received(data, 16_384) == [sent]


def received(data: bytes, size: int) -> list[bytes]:
    """The packets in what a socket gives."""
    connection: Any = SimpleNamespace(_sock=Slices(data, size))
    packets = Packets(connection)
    arrivals = -(-len(data) // size)
    return [packet for _ in range(arrivals) for packet in packets.receive(0.0) or []]


def _length_encoded(number: int) -> bytes:
    return b"\xfe" + struct.pack("<Q", number)


def _field(number: int, value: bytes) -> bytes:
    return bytes((number, len(value))) + value


def _without_checksum(event: bytes) -> bytes:
    size = len(event) - _CHECKSUM
    return event[:9] + struct.pack("<I", size) + event[13:size]


def _compressed(events: list[bytes]) -> bytes:
    """A TRANSACTION_PAYLOAD as a MySQL would write it for these events."""
    inner = b"".join(map(_without_checksum, events))
    small = pa.compress(inner, codec="zstd", asbytes=True)
    fields = [_length_encoded(len(small)), b"\0", _length_encoded(len(inner))]
    head = b"".join(_field(number, value) for number, value in enumerate(fields, 1))
    body = head + b"\0" + small
    head = events[-1][:4] + bytes((_PAYLOAD,)) + events[-1][5:9]
    size = 19 + len(body) + _CHECKSUM
    event: bytes = head + struct.pack("<I", size) + events[-1][13:19] + body
    return event + struct.pack("<I", zlib.crc32(event))


def _compressing(
    receive: Callable[[BinlogDump, float], list[bytes]],
) -> Callable[[BinlogDump, float], Any]:
    """What `receive` gives, with the events of each transaction in one payload."""
    inner: list[bytes] | None = None

    def compressed(dump: BinlogDump, timeout: float) -> list[bytes]:
        nonlocal inner
        found: list[bytes] = []
        for event in receive(dump, timeout):
            if inner is None:
                found.append(event)
                standalone = event[4] == _GTID and event[19 + 12] & 1
                inner = [] if event[4] == _GTID and not standalone else None
                continue
            inner.append(event)
            if event[4] == _XID:
                found.append(_compressed(inner))
                inner = None
        return found

    return compressed


def test_a_compressed_transaction_is_handed_on_in_pieces(
    maria: MysqlDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MariaDB's own events, in the wrapping that only MySQL has."""
    held: list[int] = []
    flush = BinlogAssembler.flush

    def counted(assembler: BinlogAssembler) -> None:
        flush(assembler)
        held.append(len(assembler.open))

    monkeypatch.setattr(BinlogAssembler, "flush", counted)
    monkeypatch.setattr(BinlogDump, "receive", _compressing(BinlogDump.receive))
    maria.execute("CREATE TABLE users (id int PRIMARY KEY, name varchar(100))")
    with captured(maria, tmp_path) as feed:
        maria.execute(
            f"INSERT INTO users SELECT seq, repeat('x', 90) FROM {numbers(_ROWS)};"
            "INSERT INTO users VALUES (0, 'last')"
        )
        found = feed.streamed(Op.INSERT)
    assert len(found) == _ROWS + 1
    assert 1 < max(held) < _ROWS / 3
    of_many = found[:_ROWS]
    assert len({each.transaction.id for each in of_many}) == 1
    assert [each.ordinal for each in of_many] == list(range(1, _ROWS + 1))
    assert [at for at, each in enumerate(found, 1) if each.last] == [_ROWS, _ROWS + 1]


def test_a_server_that_compresses_transactions_is_read_in_pieces(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    if not my.execute("SHOW VARIABLES LIKE 'binlog_transaction_compression'"):
        pytest.skip("this server compresses no transactions")
    my.execute("CREATE TABLE users (id int PRIMARY KEY, name varchar(100))")
    with captured(my, tmp_path) as feed:
        my.execute(
            "SET SESSION binlog_transaction_compression = ON;"
            f"INSERT INTO users SELECT seq, repeat('x', 90) FROM {numbers(_ROWS)}"
        )
        found = feed.streamed(Op.INSERT)
        assert [each.ordinal for each in found] == list(range(1, _ROWS + 1))
        assert [each.last for each in found].index(True) == _ROWS - 1
