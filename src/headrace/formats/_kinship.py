"""Which of the rows that a transaction deleted hung on which others, by foreign keys."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ._entityrows import Place, Row, Values


class Families(NamedTuple):
    """Deleted rows, as far as events tell of them."""

    folded: dict[Row, list[Row]]  # rows under the topmost one that they hung on
    hung: set[Row]  # topmost ones, which hung on rows that no event tells of


_NONE = Families({}, set())


def families(rows: Sequence[Row]) -> Families:
    """The rows that a transaction deleted, each told of once.

    Where a row hangs on several, the topmost one with the lowest sequence counts.
    """
    if len(rows) < 2 or not any(row.shape.links for row in rows):
        return _NONE
    kinship = Kinship(rows)
    heads = kinship.heads()
    tops = kinship.tops(heads)
    folded: dict[Row, list[Row]] = {}
    for at, row in enumerate(rows):
        top = tops[at]
        if top not in (-1, at) and row.shape.included:
            folded.setdefault(rows[top], []).append(row)
    hung = {rows[at] for at in set(tops.values()) - {-1, *heads}}
    return Families(folded, hung)


class Kinship:
    """Who hangs on whom. Rows are numbers here, in the order of their sequences."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._parents = _parents(rows)
        self._children: list[list[int]] = [[] for _ in rows]
        for at, parents in enumerate(self._parents):
            for parent in parents:
                self._children[parent].append(at)

    def tops(self, heads: Sequence[int]) -> dict[int, int]:
        """For each row the topmost one above it, or itself, that events tell of; -1: none."""
        tops: dict[int, int] = {}
        for head in heads:
            tops[head] = self._told(head)
            waiting = deque([head])
            while waiting:
                above = waiting.popleft()
                for at in self._children[above]:
                    if at not in tops:
                        tops[at] = self._told(at) if tops[above] < 0 else tops[above]
                        waiting.append(at)
        return tops

    def below(self, rows: Iterable[int]) -> set[int]:
        """Every row that hangs on one of these, at whatever depth, and these themselves."""
        reached: set[int] = set()
        self._reach(rows, reached)
        return reached

    def heads(self) -> list[int]:
        """The rows that hang on no other; of a circle, the one with the lowest sequence."""
        heads = [at for at, parents in enumerate(self._parents) if not parents]
        reached = self.below(heads)
        # What is left are circles and what hangs on them. A depth-first walk comes back last from
        # the row at which it entered a topmost circle, which is the one with the lowest sequence.
        for at in self._came_back_last(reached):
            if at not in reached:
                heads.append(at)
                self._reach([at], reached)
        return sorted(heads)

    def _reach(self, rows: Iterable[int], reached: set[int]) -> None:
        """Add rows and all that hang on them; what is reached already is not entered again."""
        waiting = [at for at in rows if at not in reached]
        reached.update(waiting)
        while waiting:
            for at in self._children[waiting.pop()]:
                if at not in reached:
                    reached.add(at)
                    waiting.append(at)

    def _told(self, at: int) -> int:
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


def _parents(rows: Sequence[Row]) -> list[list[int]]:
    """For each row, those that it names; one that names itself is a circle of its own."""
    named = _named(rows)
    return [sorted(set(_references(row, named))) for row in rows]


_Named = dict[tuple[Place, tuple[str, ...], Values], int]


def _references(row: Row, named: _Named) -> Iterator[int]:
    for columns, place, parent_columns in row.shape.links:
        values = row.named(columns)
        at = None if values is None else named.get((place, parent_columns, values))
        if at is not None:
            yield at


def _named(rows: Sequence[Row]) -> _Named:
    """Rows under everything by which another one may name them; the first of equal ones."""
    wanted: dict[Place, set[tuple[str, ...]]] = {}
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
