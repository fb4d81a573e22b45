"""Deletion vectors: which rows of a data file are dead, as the Delta protocol stores them.

A file `deletion_vector_<uuid>.bin` is a version byte, then for each vector its size, its bytes and
their CRC-32 (big-endian). A vector is a magic number and a 64-bit roaring bitmap in the portable
format (little-endian): a count of 32-bit maps, each with the upper half of its numbers.
"""

import re
import struct
import uuid
import zlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec
from pyroaring import BitMap, BitMap64

from ...errors import TableFailed

if TYPE_CHECKING:
    from .storage import Folder

_MAGIC = 1681511377
_VERSION = b"\x01"
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_VALUE = {letter: value for value, letter in enumerate(_Z85)}
_UUID_LETTERS = 20
_local = partial(re.compile("^file:(//)?").sub, "")


class VectorRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """A vector as the log refers to it; the names are those of the log."""

    storageType: str  # noqa: N815 - u: a file by its uuid, p: by its path, i: within the log
    pathOrInlineDv: str  # noqa: N815
    sizeInBytes: int  # noqa: N815
    cardinality: int  # dead rows
    offset: int | None = None

    @property
    def file(self) -> str:
        """The path of its file in the table's folder; "": it is in none, or elsewhere."""
        if self.storageType != "u":
            return ""
        prefix, text = self.pathOrInlineDv[:-_UUID_LETTERS], self.pathOrInlineDv[-_UUID_LETTERS:]
        name = file_name(uuid.UUID(bytes=from_z85(text)))
        return f"{prefix}/{name}" if prefix else name


def file_name(name: uuid.UUID) -> str:
    """The name of a file of vectors."""
    return f"deletion_vector_{name}.bin"


def file_of(folder: "Folder", ref: VectorRef) -> str:
    """The path of a vector's file in the table's folder; "": it is within the log."""
    return "" if ref.storageType == "i" else ref.file or _absolute(folder, ref)


def read(folder: "Folder", ref: VectorRef) -> BitMap:
    """The dead rows of a file, by their position from 0."""
    if ref.storageType == "i":
        return decode(from_z85(ref.pathOrInlineDv)[: ref.sizeInBytes])
    # An offset is that of the size before the vector.
    start, length = ref.offset or 0, ref.sizeInBytes + 8
    stored = folder.read_bytes(file_of(folder, ref), start, length)
    size, data, checksum = stored[:4], stored[4:-4], stored[-4:]
    if len(stored) != length or int.from_bytes(size) != ref.sizeInBytes:
        raise _damaged("is not where the log says that it is")
    if int.from_bytes(checksum) != zlib.crc32(data):
        raise _damaged("has another checksum than its bytes")
    return decode(data)


def write(folder: "Folder", dead: Mapping[str, BitMap]) -> dict[str, VectorRef]:
    """One new file with a vector for each path; nobody knows of it until it is committed."""
    if not dead:
        return {}
    name = uuid.uuid4()
    content, refs = bytearray(_VERSION), {}
    for path, rows in dead.items():
        data = encode(rows)
        refs[path] = VectorRef("u", to_z85(name.bytes), len(data), len(rows), len(content))
        content += struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    folder.write_bytes(file_name(name), bytes(content))
    return refs


def encode(rows: BitMap) -> bytes:
    """A vector's bytes."""
    rows.run_optimize()
    return struct.pack("<IQI", _MAGIC, 1, 0) + rows.serialize()


def decode(data: bytes) -> BitMap:
    """The rows of a vector's bytes."""
    if int.from_bytes(data[:4], "little") != _MAGIC:
        raise _damaged("has a format that is not known here")
    try:
        if data[4:16] == struct.pack("<QI", 1, 0):
            return BitMap.deserialize(data[16:])
        return BitMap(BitMap64.deserialize(data[4:]))
    except (ValueError, OverflowError) as error:
        raise _damaged("cannot be read") from error


def _absolute(folder: "Folder", ref: VectorRef) -> str:
    if ref.storageType != "p":
        raise _damaged(f"is stored in a way that is not known here ({ref.storageType})")
    path = _local(unquote(ref.pathOrInlineDv))
    if not path.startswith(f"{folder.uri}/"):
        raise TableFailed(
            f"a deletion vector of {folder.uri} lies outside of the table, in {path}",
            hint="A shallow clone of another table cannot be written: set another path.",
        )
    return path.removeprefix(f"{folder.uri}/")


def _damaged(what: str) -> TableFailed:
    return TableFailed(f"a deletion vector {what}")


def to_z85(data: bytes) -> str:
    """Bytes, a multiple of four, as text.

    >>> to_z85(bytes.fromhex("864fd26fb559f75b"))
    'HelloWorld'
    """
    text = []
    for (number,) in struct.iter_unpack(">I", data):
        text += [_Z85[number // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(text)


def from_z85(text: str) -> bytes:
    """The bytes behind text.

    >>> from_z85("HelloWorld").hex()
    '864fd26fb559f75b'
    """
    found = bytearray()
    try:
        for at in range(0, len(text), 5):
            number = 0
            for letter in text[at : at + 5]:
                number = number * 85 + _VALUE[letter]
            found += struct.pack(">I", number)
    except (KeyError, struct.error) as error:
        raise _damaged("has a name that cannot be read") from error
    return bytes(found)
