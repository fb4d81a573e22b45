"""The whole change as one JSON object: what `headrace tail` and Spark read."""

from dataclasses import dataclass
from typing import ClassVar

import msgspec

from ..change.event import BeforeKind, Change, Op
from ._line import one_line


class CanonicalTransaction(msgspec.Struct, frozen=True):
    """Where a change stands in its transaction."""

    id: str
    ordinal: int
    last: bool
    commit_time: int  # microseconds since 1970


class CanonicalChange(msgspec.Struct, frozen=True):
    """Every field of a change; null stands for what is not known or does not apply.

    Images are JSON text, also the `null` of one that is not there: `Raw` never holds None.
    """

    sequence: int
    id: str
    op: Op
    source: str
    connector: str
    database: str
    schema: str
    table: str
    key: msgspec.Raw
    before: msgspec.Raw
    before_kind: BeforeKind
    after: msgspec.Raw
    changed: tuple[str, ...] | None
    unchanged: tuple[str, ...]
    transaction: CanonicalTransaction
    position: dict[str, str | int]
    captured_at: int  # microseconds since 1970
    schema_version: int
    metadata: msgspec.Raw


_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")


@dataclass(frozen=True)
class Canonical:
    """Every change, with every field."""

    name: ClassVar[str] = "canonical"
    media_type: ClassVar[str] = "application/json"

    def encode(self, change: Change) -> bytes:
        """The change as one JSON object; its images go in as they are."""
        table, transaction = change.table, change.transaction
        line = _encode(
            CanonicalChange(
                change.sequence,
                change.id,
                change.op,
                table.source,
                table.connector,
                table.database,
                table.schema,
                table.name,
                _raw(change.key),
                _raw(change.before),
                change.before_kind,
                _raw(change.after),
                change.changed,
                change.unchanged,
                CanonicalTransaction(
                    transaction.id, change.ordinal, change.last, transaction.commit_time
                ),
                change.position.to_json(),
                transaction.captured_at,
                table.version,
                _raw(transaction.metadata),
            )
        )
        return one_line(line)


def _raw(image: bytes | None) -> msgspec.Raw:
    return _NULL if image is None else msgspec.Raw(image)
