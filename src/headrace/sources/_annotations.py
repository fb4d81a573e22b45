"""Transaction annotations: what an application says about its own transaction. No I/O.

An annotation is a JSON object, and the last word on a key counts. What is no such object, or too
large, must stop nothing: it is shown as text, under a key of its own.
"""

from __future__ import annotations

import msgspec

ERROR = "annotation_error"
LIMIT = 64 << 10  # bytes, of one annotation and of all that a transaction has

_SHOWN = 1000  # characters of one that is too large
_LONGEST = 4  # bytes of a character
_ONE_LINE = bytes.maketrans(b"\n\r\t", b"   ")  # in JSON these stand only between tokens

_Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(_Fields).decode
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def annotated(metadata: bytes | None, content: bytes) -> tuple[bytes, bool]:
    """A transaction's metadata with one more annotation, and whether that is there as a whole."""
    known = {} if metadata is None else _fields(metadata)
    error = known.pop(ERROR, None)  # ours, so it takes no room from the annotation
    parsed = _parsed(content)
    if parsed is not None and len(_encode(known | parsed)) <= LIMIT:
        return _written(known | parsed, error), True
    if error is not None:
        return _written(known, error), False  # there is room for one
    text = _shown(content)
    return _written(known, msgspec.Raw(_encode(text))), text.encode() == content


def _parsed(content: bytes) -> _Fields | None:
    """The fields of an annotation; None: it is no object that everybody can read."""
    if len(content) > LIMIT:
        return None
    try:
        _decode(content)  # first, since what is left raw is not looked into
        return _fields(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _shown(content: bytes) -> str:
    if len(content) <= LIMIT:
        return content.decode(errors="replace")
    start = content[: _SHOWN * _LONGEST].decode(errors="replace")[:_SHOWN]
    return f"{start}… ({len(content)} bytes)"


def _written(fields: _Fields, error: msgspec.Raw | None) -> bytes:
    if error is not None:
        fields = fields | {ERROR: error}
    return _encode(fields).translate(_ONE_LINE)
