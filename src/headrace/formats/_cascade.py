"""What else a mutation did, beside the change that its event is about."""

import re
from collections.abc import Iterable, Sequence

import msgspec

from ._entityrows import Row, together

_VERBS = {"CREATE": "created", "UPDATE": "updated", "DELETE": "deleted"}
_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_encode = msgspec.json.Encoder().encode


class Cascade:
    """The `cascade` of an event: it begins with what the event's own entity invalidates."""

    def __init__(self, root: Row) -> None:
        self._root = root
        self._updated: list[bytes] = []
        self._deleted: list[bytes] = []
        self._queries: dict[str, str] = {}  # with the first reason that there was
        self._invalidate(root, f"entity_{_VERBS[root.operation]}")

    def fold(self, rows: Iterable[Row]) -> None:
        """Rows that were deleted because the event's own was."""
        for row in {row.key: row for row in rows}.values():
            self._delete(row, "parent_deleted")
            self._invalidate(row, "parent_deleted")

    def add(self, history: Sequence[Row], *, folded: bool) -> None:
        """All changes of another row of the same mutation; `folded`: the last is its deletion
        because the event's own row was deleted."""
        last = history[-1]
        operation = together(history)
        if operation is None:
            return  # nobody ever saw it
        if operation == "DELETE":
            self._delete(history[0], "parent_deleted" if folded else "related_entity_deleted")
        else:
            self._updated.append(_entry(last, last.id, self._reason(operation), _changes(history)))
        verb = f"{_snake(last.name)}_{_VERBS[operation]}"
        self._invalidate(last, "parent_deleted" if folded else verb, operation)

    def written(self) -> bytes:
        """The cascade as JSON."""
        affected = b""
        if self._root.shape.affected and self._root.id != b'""':
            name = _encode(self._root.name)[:-1]
            affected = b',"affected_entities":[%b:%b]' % (name, self._root.id[1:])
        invalidations = [
            b'{"query":%b,"reason":%b%b}' % (_encode(query), _encode(reason), affected)
            for query, reason in self._queries.items()
        ]
        return b'{"updated":[%b],"deleted":[%b],"invalidations":[%b]}' % (
            b",".join(self._updated),
            b",".join(self._deleted),
            b",".join(invalidations),
        )

    def _delete(self, row: Row, reason: str) -> None:
        """List a row under the id that it had before the mutation."""
        self._deleted.append(_entry(row, row.old_id, reason))

    def _reason(self, operation: str) -> str:
        if "CREATE" in (operation, self._root.operation):
            return "child_entity_added"
        deleted = self._root.operation == "DELETE"
        return "parent_entity_deleted" if deleted else "related_entity_updated"

    def _invalidate(self, row: Row, reason: str, operation: str = "") -> None:
        for query in row.shape.entity.invalidated(operation or row.operation):
            self._queries.setdefault(query, reason)


def _entry(row: Row, id: bytes, reason: str, changes: bytes = b"") -> bytes:
    return b'{"entity_type":%b,"entity_id":%b%b,"reason":"%b"}' % (
        row.shape.label,
        id,
        changes,
        reason.encode(),
    )


def _changes(rows: Sequence[Row]) -> bytes:
    """The columns that any of the changes of a row changed, in order."""
    names = dict.fromkeys(name for row in rows for name in row.changed())
    return b',"changes":%b' % rows[-1].shape.names(names)


def _snake(name: str) -> str:
    return _BOUNDARY.sub("_", name).lower()
