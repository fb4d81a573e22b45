"""Deletion vectors are the bytes that the Delta protocol describes."""

import struct
import uuid
import zlib
from pathlib import Path

import pytest
from pyroaring import BitMap, BitMap64

from headrace.errors import SinkUnavailable, TableFailed
from headrace.sinks.lake import vectors
from headrace.sinks.lake.storage import Folder
from headrace.sinks.lake.vectors import VectorRef

# One 32-bit map, key 0, as the specification of roaring bitmaps lays it out: the cookie of a bitmap
# without runs, one container, its key 0 and cardinality - 1, its offset, then the numbers.
ROWS = (3, 4, 7, 11, 18, 29)
PORTABLE = (
    struct.pack("<QI", 1, 0)
    + struct.pack("<IIHHI", 12346, 1, 0, len(ROWS) - 1, 16)
    + struct.pack(f"<{len(ROWS)}H", *ROWS)
)
DATA = struct.pack("<I", 1681511377) + PORTABLE
NAME = uuid.UUID("d2c639aa-8816-431a-aaf6-d3fe2512ff61")  # the protocol's example …
TEXT = "^-aqEH.-t@S}K{vb[*k^"  # … and what it is in the log


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.of(str(tmp_path), {})


def test_bytes_are_those_of_the_protocol() -> None:
    assert vectors.encode(BitMap(ROWS)) == DATA
    assert list(vectors.decode(DATA)) == list(ROWS)
    many = BitMap(range(0, 400_000, 3)) | BitMap(range(100_000, 200_000))
    assert BitMap(BitMap64.deserialize(vectors.encode(many)[4:])) == many


def test_a_name_is_a_uuid_in_z85() -> None:
    assert vectors.to_z85(NAME.bytes) == TEXT
    assert VectorRef("u", TEXT, 40, 6, 4).file == f"deletion_vector_{NAME}.bin"
    assert VectorRef("u", f"ab{TEXT}", 40, 6, 4).file == f"ab/deletion_vector_{NAME}.bin"


@pytest.mark.parametrize("kind", ["u", "prefix", "p", "file://", "i"])
def test_a_vector_is_read_from_wherever_it_is(folder: Folder, kind: str) -> None:
    stored = struct.pack(">BI", 1, len(DATA)) + DATA + struct.pack(">I", zlib.crc32(DATA))
    path = f"{'ab/' if kind == 'prefix' else ''}deletion_vector_{NAME}.bin"
    folder.write_bytes(path, stored)
    storage, text = {
        "u": ("u", TEXT),
        "prefix": ("u", f"ab{TEXT}"),
        "p": ("p", f"{folder.uri}/{path}"),
        "file://": ("p", f"file://{folder.uri}/{path}"),
        "i": ("i", vectors.to_z85(DATA)),
    }[kind]
    ref = VectorRef(storage, text, len(DATA), len(ROWS), None if kind == "i" else 1)
    assert list(vectors.read(folder, ref)) == list(ROWS)


def test_one_file_holds_the_vectors_of_a_commit(folder: Folder) -> None:
    dead = {"a": BitMap([1]), "b": BitMap(range(70_000)), "c": BitMap(ROWS)}
    refs = vectors.write(folder, dead)
    assert len({ref.file for ref in refs.values()}) == 1
    assert len(list(Path(folder.uri).iterdir())) == 1
    assert {path: vectors.read(folder, ref) for path, ref in refs.items()} == dead
    assert {path: ref.cardinality for path, ref in refs.items()} == {"a": 1, "b": 70_000, "c": 6}
    assert vectors.write(folder, {}) == {}


@pytest.mark.parametrize(
    ("at", "reason"),
    [(30, "checksum"), (4, "not where"), (-1, "checksum")],
)
def test_a_damaged_vector_is_noticed(folder: Folder, at: int, reason: str) -> None:
    ref = vectors.write(folder, {"a": BitMap(ROWS)})["a"]
    file = Path(folder.uri, ref.file)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(TableFailed, match=reason):
        vectors.read(folder, ref)


def test_what_is_not_there_or_not_known_is_reported(folder: Folder) -> None:
    with pytest.raises(SinkUnavailable, match="No such file"):
        vectors.read(folder, VectorRef("u", TEXT, 40, 6, 1))
    with pytest.raises(TableFailed, match="not known"):
        vectors.read(folder, VectorRef("i", vectors.to_z85(b"\0" * 40), 40, 6))
    with pytest.raises(TableFailed, match="outside"):
        vectors.read(folder, VectorRef("p", "s3://other/deletion_vector.bin", 40, 6, 1))
    with pytest.raises(TableFailed, match="cannot be read"):
        vectors.decode(DATA[:-3])
    with pytest.raises(TableFailed, match="name"):
        assert VectorRef("u", "ü" * 20, 40, 6, 1).file
