"""Values of many megabytes, worked on a piece at a time. No I/O.

A value that is turned into JSON at once is held five times: as it came, sliced, as a string,
encoded, and in its row. In pieces it is held as it came and as the result.
"""

from __future__ import annotations

import codecs
import re
from binascii import b2a_base64, unhexlify
from collections.abc import Iterable, Iterator
from io import BytesIO

import msgspec

LARGE = 1 << 20  # bytes; shorter values are not worth the trouble
_PIECE = 3 << 15  # bytes; a multiple of six: hex of whole groups of base64

_quote = msgspec.json.Encoder().encode
_utf8 = codecs.getincrementaldecoder("utf-8")

_ESCAPES = {
    rb"\b": b"\b",
    rb"\f": b"\f",
    rb"\n": b"\n",
    rb"\r": b"\r",
    rb"\t": b"\t",
    rb"\v": b"\v",
}
_BACKSLASH = b"\0"  # stands for one that was escaped: no text of PostgreSQL holds it
_last_escape = re.compile(rb"\\*\Z").search


def quoted(value: bytes | memoryview) -> bytes:
    """Text as a JSON string; raises UnicodeDecodeError."""
    return _joined(b'"', (_quote(text)[1:-1] for text in _decoded(value)), b'"')


def expect_utf8(value: bytes | memoryview) -> None:
    """Raise UnicodeDecodeError unless it is UTF-8."""
    for _ in _decoded(value):
        pass


def base64_of_hex(value: bytes | memoryview) -> bytes:
    """What hex digits stand for as a JSON string of base64; raises binascii.Error."""
    pieces = (b2a_base64(unhexlify(piece), newline=False) for piece in _pieces(value))
    return _joined(b'"', pieces, b'"')


def unescaped(field: bytes) -> bytes:
    """A field of COPY's text format as it was before COPY escaped it; raises ValueError."""
    if len(field) < LARGE:
        return _unescaped(field)
    return _joined(b"", map(_unescaped, _between_escapes(field)), b"")


def listed(texts: Iterable[bytes]) -> bytes:
    """Millions of small texts with commas between them."""
    whole = BytesIO()
    for at, text in enumerate(texts):
        if at:
            whole.write(b",")
        whole.write(text)
    return whole.getvalue()


def _joined(start: bytes, pieces: Iterable[bytes], end: bytes) -> bytes:
    # Unlike a list of pieces or a bytearray, this gives what it holds without a copy.
    whole = BytesIO()
    whole.write(start)
    whole.writelines(pieces)
    whole.write(end)
    return whole.getvalue()


def _unescaped(field: bytes) -> bytes:
    if _BACKSLASH in field:
        raise ValueError("a zero byte")
    field = field.replace(rb"\\", _BACKSLASH)
    for escape, meaning in _ESCAPES.items():
        field = field.replace(escape, meaning)
    if b"\\" in field:
        raise ValueError("an escape that COPY does not define")
    return field.replace(_BACKSLASH, b"\\")


def _decoded(value: bytes | memoryview) -> Iterator[str]:
    decode = _utf8().decode
    for piece in _pieces(value):
        yield decode(piece)
    decode(b"", final=True)


def _pieces(value: bytes | memoryview) -> Iterator[bytes]:
    for at in range(0, len(value), _PIECE):
        yield bytes(value[at : at + _PIECE])


def _between_escapes(field: bytes) -> Iterator[bytes]:
    """Pieces that end between two escapes, never inside one."""
    at = 0
    while at < len(field):
        end = at + _PIECE
        run = _last_escape(field[at:end])
        if run is not None and len(run[0]) % 2:
            end += 1
        yield field[at:end]
        at = end
