"""A format: the key of a row, and the row."""

from dataclasses import dataclass
from typing import ClassVar

from headrace.change.event import Change, Op

ROWS = {Op.READ, Op.INSERT, Op.UPDATE, Op.DELETE}


@dataclass(frozen=True)
class Pair:
    """`{"key": …, "row": …}`; the row is null where it was deleted."""

    name: ClassVar[str] = "pair"
    media_type: ClassVar[str] = "application/json"
    schema: ClassVar[bytes] = b"""{
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "required": ["key", "row"],
        "properties": {"key": {"type": ["object", "null"]}, "row": {"type": ["object", "null"]}}
    }"""

    def encode(self, change: Change) -> bytes | None:
        if change.op not in ROWS:
            return None
        # Keys and rows are JSON already: nothing is decoded.
        row = None if change.op is Op.DELETE else change.after
        return b'{"key":%b,"row":%b}' % (change.key or b"null", row or b"null")
