"""How the log lies in RocksDB: under which keys.

Changes have the default column family to themselves, so that files never overlap and RocksDB
moves them down its levels without rewriting. Everything else is in the family `state`. A block
of rows (`change.block`) stands under the first of its sequences, and nothing under the others.
"""

import msgspec

from ..change.span import LogSpan

STATE = "state"

SEQUENCE = b"changefeed_sequence"  # the last committed sequence
FIRST = b"changefeed_first"  # the first sequence that is still kept
BYTES = b"changefeed_bytes"  # bytes of every record ever committed
TRIMMED = b"changefeed_trimmed_bytes"  # bytes of the records trimmed away
REMOVALS = b"removals"  # which changes were removed lately, why, and who still needed them
EPOCH = b"epoch"
ANCESTORS = b"ancestors"  # as earlier versions noted the logs that this one was restored from
LINEAGE = b"lineage"  # the generations of this log, oldest first
LAYOUT = b"layout"
LAYOUTS = RECORDS_ONLY, WITH_BLOCKS = b"1", b"2"  # one version after the other


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


def cursor_key(name: str, owner: str | None) -> bytes:
    """Where a named cursor is kept; every owner has names of its own."""
    return b"cursor:" + (name if owner is None else f"{name}:{owner}").encode()


def api_key(id: str) -> bytes:
    """Where an API key is kept."""
    return b"key:" + id.encode()


def mark_key(sequence: int) -> bytes:
    """Where a mark (time and size of the log at a sequence) is kept."""
    return b"mark:%020d" % sequence


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """How large and how old the log was at a sequence: what retention by age and size needs."""

    captured_at: int
    total_bytes: int
    span: LogSpan | None = None  # the changes since the last mark, where they were noted
