"""TRANSACTION_PAYLOAD of MySQL: compressed events -> the bytes of each. No I/O.

A transaction may be larger than memory when uncompressed, so it is unpacked as it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ...errors import ProtocolError
from .binlogevents import Payload

_ZSTD, _NONE = 0, 255
_HEADER_SIZE = 19
_LARGEST = (1 << 30) + (1 << 20)  # the servers' limit for an event, with some room


class _Readable(Protocol):
    def read(self, nbytes: int) -> bytes: ...


def unpacked(payload: Payload) -> Iterator[bytes]:
    """The events of a payload, one by one; ProtocolError where it is damaged."""
    if payload.compression not in (_ZSTD, _NONE):
        raise ProtocolError(f"a payload is compressed in an unknown way ({payload.compression})")
    # Here, since it takes longer to load than all else, and most servers compress nothing.
    import pyarrow as pa  # noqa: PLC0415

    plain = pa.BufferReader(payload.compressed)
    stream = plain if payload.compression == _NONE else pa.CompressedInputStream(plain, "zstd")
    try:
        with plain, stream:
            yield from _events(stream)
    except OSError as error:  # what Arrow raises for bytes that are no such stream
        raise ProtocolError("a payload of a transaction cannot be unpacked") from error


def _events(stream: _Readable) -> Iterator[bytes]:
    while head := stream.read(_HEADER_SIZE):
        size = int.from_bytes(head[9:13], "little")
        if len(head) != _HEADER_SIZE or not _HEADER_SIZE <= size <= _LARGEST:
            raise ProtocolError("an event within a payload is malformed")
        event = head + stream.read(size - _HEADER_SIZE)
        if len(event) != size:
            raise ProtocolError("an event within a payload is cut short")
        yield event
