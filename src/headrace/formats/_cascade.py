"""What else a mutation did, beside the change that its event is about: rows and queries."""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from ._rows import EntityRow, Referenced, Values, together

_VERBS = {"CREATE": "created", "UPDATE": "updated", "DELETE": "deleted"}
_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_encode = msgspec.json.Encoder().encode


class Cascade:
    """The `cascade` of an event: it begins with what the event's own entity invalidates."""

    def __init__(self, root: EntityRow) -> None:
        self._root = root
        self._updated: list[bytes] = []
        self._deleted: list[bytes] = []
        self._queries: dict[str, str] = {}  # with the first reason that there was
        self._invalidate(root, f"entity_{_VERBS[root.operation]}")

    def fold(self, rows: Iterable[EntityRow]) -> None:
        """Rows that were deleted because the event's own was."""
        for row in {row.key: row for row in rows}.values():
            self._delete(row, "parent_deleted")
            self._invalidate(row, "parent_deleted")

    def add(self, history: Sequence[EntityRow], *, folded: bool) -> None:
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

    def _delete(self, row: EntityRow, reason: str) -> None:
        """List a row under the id that it had before the mutation."""
        self._deleted.append(_entry(row, row.old_id, reason))

    def _reason(self, operation: str) -> str:
        if "CREATE" in (operation, self._root.operation):
            return "child_entity_added"
        deleted = self._root.operation == "DELETE"
        return "parent_entity_deleted" if deleted else "related_entity_updated"

    def _invalidate(self, row: EntityRow, reason: str, operation: str = "") -> None:
        for query in row.shape.entity.invalidated(operation or row.operation):
            self._queries.setdefault(query, reason)


def _entry(row: EntityRow, id: bytes, reason: str, changes: bytes = b"") -> bytes:
    return b'{"entity_type":%b,"entity_id":%b%b,"reason":"%b"}' % (
        row.shape.label,
        id,
        changes,
        reason.encode(),
    )


def _changes(rows: Sequence[EntityRow]) -> bytes:
    """The columns that any of the changes of a row changed, in order."""
    names = dict.fromkeys(name for row in rows for name in row.changed())
    return b',"changes":%b' % rows[-1].shape.names(names)


def _snake(name: str) -> str:
    return _BOUNDARY.sub("_", name).lower()


# --- rows deleted by foreign keys ---------------------------------------------------------------


class CascadedDeletes(NamedTuple):
    """Deleted rows, by the event that reports them."""

    folded: dict[EntityRow, list[EntityRow]]  # rows under the topmost one that they detached on
    detached: set[EntityRow]  # topmost rows that referenced rows which no event reports


_NO_CASCADE = CascadedDeletes({}, set())


def cascaded_deletes(rows: Sequence[EntityRow]) -> CascadedDeletes:
    """The rows that a transaction deleted, each reported once.

    Where a row references several, the topmost one with the lowest sequence counts.
    """
    if len(rows) < 2 or not any(row.shape.links for row in rows):
        return _NO_CASCADE
    graph = ForeignKeyGraph(rows)
    heads = graph.heads()
    tops = graph.tops(heads)
    folded: dict[EntityRow, list[EntityRow]] = {}
    for at, row in enumerate(rows):
        top = tops[at]
        if top not in (-1, at) and row.shape.included:
            folded.setdefault(rows[top], []).append(row)
    detached = {rows[at] for at in set(tops.values()) - {-1, *heads}}
    return CascadedDeletes(folded, detached)


class ForeignKeyGraph:
    """Which deleted row references which. Rows are numbers, in the order of their sequences."""

    def __init__(self, rows: Sequence[EntityRow]) -> None:
        self._rows = rows
        self._parents = _parents(rows)
        self._children: list[list[int]] = [[] for _ in rows]
        for at, parents in enumerate(self._parents):
            for parent in parents:
                self._children[parent].append(at)

    def tops(self, heads: Sequence[int]) -> dict[int, int]:
        """For each row the topmost one above it, or itself, that an event reports; -1: none."""
        tops: dict[int, int] = {}
        for head in heads:
            tops[head] = self._reported(head)
            waiting = deque([head])
            while waiting:
                above = waiting.popleft()
                for at in self._children[above]:
                    if at not in tops:
                        tops[at] = self._reported(at) if tops[above] < 0 else tops[above]
                        waiting.append(at)
        return tops

    def below(self, rows: Iterable[int]) -> set[int]:
        """Every row that references one of these, at whatever depth, and these themselves."""
        reached: set[int] = set()
        self._reach(rows, reached)
        return reached

    def heads(self) -> list[int]:
        """The rows that reference no other; of a cycle, the one with the lowest sequence."""
        heads = [at for at, parents in enumerate(self._parents) if not parents]
        reached = self.below(heads)
        # What is left are cycles and what references them. A depth-first walk comes back last from
        # the row at which it entered a topmost cycle, which is the one with the lowest sequence.
        for at in self._came_back_last(reached):
            if at not in reached:
                heads.append(at)
                self._reach([at], reached)
        return sorted(heads)

    def _reach(self, rows: Iterable[int], reached: set[int]) -> None:
        """Add rows and all that reference them; what is reached already is not entered again."""
        waiting = [at for at in rows if at not in reached]
        reached.update(waiting)
        while waiting:
            for at in self._children[waiting.pop()]:
                if at not in reached:
                    reached.add(at)
                    waiting.append(at)

    def _reported(self, at: int) -> int:
        return at if self._rows[at].shape.included else -1

    def _came_back_last(self, passed: set[int]) -> list[int]:
        seen = set(passed)
        order: list[int] = []
        for start in range(len(self._rows)):
            path = [(start, iter(self._children[start]))] if start not in seen else []
            seen.add(start)
            while path:
                child = next((each for each in path[-1][1] if each not in seen), None)
                if child is None:
                    order.append(path.pop()[0])
                else:
                    seen.add(child)
                    path.append((child, iter(self._children[child])))
        return order[::-1]


def _parents(rows: Sequence[EntityRow]) -> list[list[int]]:
    """For each row, those that it references; one that references itself is a cycle."""
    named = _by_reference(rows)
    return [sorted(set(_references(row, named))) for row in rows]


_Named = dict[tuple[Referenced, tuple[str, ...], Values], int]


def _references(row: EntityRow, named: _Named) -> Iterator[int]:
    for columns, place, parent_columns in row.shape.links:
        values = row.named(columns)
        at = None if values is None else named.get((place, parent_columns, values))
        if at is not None:
            yield at


def _by_reference(rows: Sequence[EntityRow]) -> _Named:
    """Rows under everything by which another one may name them; the first of equal ones."""
    wanted: dict[Referenced, set[tuple[str, ...]]] = {}
    for shape in {id(row.shape): row.shape for row in rows}.values():
        for _, place, columns in shape.links:
            wanted.setdefault(place, set()).add(columns)
    named: _Named = {}
    for at, row in enumerate(rows):
        table = row.shape.table
        for place in ((table.schema, table.name), row.name):
            for columns in wanted.get(place, ()):
                values = row.named(columns or row.shape.entity.id)
                if values is not None:
                    named.setdefault((place, columns, values), at)
    return named
