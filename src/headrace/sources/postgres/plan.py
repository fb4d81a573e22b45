"""What has to be read to copy a table, and how far that has come. No I/O but catalog look-ups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from ...change.columns import schema_payload
from ...change.event import BeforeKind, Change, Op, Table, Transaction
from .. import Register
from .catalog import Catalog, PhysicalTable, Published
from .looks import compare
from .resume import BlockRange, PostgresTableSnapshot, PostgresTablesResume
from .rows import Rows
from .snapshot import Copied, Point, Task, ranges

R = TypeVar("R", bound=PostgresTablesResume)


@dataclass(frozen=True, slots=True)
class SnapshotPlan(Generic[R]):
    """How to snapshot a table: what to emit first, what to read, and the resume after it."""

    resume: R
    announced: list[Change]
    tasks: list[Task]


class Planner:
    """Plans copies at one point, as the catalogs were there."""

    def __init__(
        self, catalog: Catalog, register: Register, *, publication: str, point: Point
    ) -> None:
        self._catalog = catalog
        self._register = register
        self._published = {table.path: table for table in catalog.published(publication)}
        self._point = point

    def plan(self, resume: R, path: str) -> SnapshotPlan[R]:
        """How to begin a table's copy, or to take it up where it was interrupted."""
        copy = resume.snapshots[path]
        table = self._published.get(path)
        if table is None or table.oid != copy.relation:
            # Dropped or replaced between the look and the snapshot; the next look sees it. Until
            # then no row of it counts.
            gone = msgspec.structs.replace(copy, ranges=(), relation=0, replaced=copy.announced)
            return SnapshotPlan(resume.with_snapshot(path, gone), [], [])
        decoder = self._catalog.describe(table)
        former = msgspec.structs.replace(decoder.table, relation=copy.replaced)
        dropped = [self._register(former)] if copy.replaced else []
        decoder = decoder.of(self._register(decoder.table))
        parts = self._catalog.parts(table.oid)
        look = self._catalog.look(table.oid)
        found = None if look is None else compare(copy.look, look)
        # Rows that have moved meanwhile are read again. Without a key nobody could tell them from
        # new ones, so that table is copied anew, as one is that was rewritten.
        same = copy.filenodes == _filenodes(parts) and bool(decoder.table.key)
        same = same and not (found and found.reason)
        state = found.state if found else None
        if copy.ranges is not None and same:
            announced = self._announce(resume, path, decoder, dropped, forget=False)
            moved = tuple(part.relation for part in parts)
            copy = msgspec.structs.replace(copy, moved=moved, look=state)
            resume = resume.with_snapshot(path, copy)
            tasks = _rest(copy, table, decoder)
        else:
            forget = copy.again or copy.ranges is not None
            announced = self._announce(resume, path, decoder, dropped, forget=forget)
            resume = without_error(resume, path)
            begun = self._begin(table, decoder, parts)
            begun = msgspec.structs.replace(begun, published=copy.published, look=state)
            resume = resume.with_snapshot(path, begun)
            tasks = [Task(table, decoder, part) for part in begun.ranges or ()]
        return SnapshotPlan(resume.with_version(path, decoder.table.version), announced, tasks)

    def _begin(
        self, table: Published, decoder: Rows, parts: list[PhysicalTable]
    ) -> PostgresTableSnapshot:
        whole = [each for part in parts for each in ranges(part.relation, part.blocks)]
        guesses = [part.estimated_rows for part in parts]
        return PostgresTableSnapshot(
            table.oid,
            tuple(whole) if decoder.table.columns else (),
            rows=0,
            estimated_rows=sum(guesses) if min(guesses, default=-1) >= 0 else -1,
            since=self._catalog.oldest_unseen(),
            filenodes=_filenodes(parts),
        )

    def _announce(
        self,
        resume: PostgresTablesResume,
        path: str,
        decoder: Rows,
        dropped: Sequence[Table],
        *,
        forget: bool,
    ) -> list[Change]:
        """Say the table's columns, and forget its rows where they are copied anew.

        A table that had its name before is dropped: who knows tables by their number has it still.
        """
        contents: list[tuple[Op, Table, object]] = [
            (Op.SCHEMA, table, {"dropped": True}) for table in dropped
        ]
        if dropped or resume.versions.get(path) != decoder.table.version:
            contents.append((Op.SCHEMA, decoder.table, schema_payload(decoder.table)))
        if forget:
            payload = {"snapshot": True, "relations": [decoder.table.relation]}
            contents.append((Op.TRUNCATE, decoder.table, payload))
        now = time.time_ns() // 1000
        transaction = Transaction(f"snapshot-{self._point.name}-{path}", now, now)
        position = self._point.position
        announced = [
            Change(
                op=op,
                table=table,
                key=None,
                before=None,
                before_kind=BeforeKind.NONE,
                after=msgspec.json.encode(payload),
                changed=None,
                unchanged=(),
                transaction=transaction,
                ordinal=ordinal,
                position=position,
            )
            for ordinal, (op, table, payload) in enumerate(contents, 1)
        ]
        if announced:
            self._point.end(announced[-1])
        return announced


def without_error(resume: R, path: str) -> R:
    """What could not be read before is read anew: either it can be now, or that is found again."""
    errored = {each: why for each, why in resume.errored.items() if each != path}
    return msgspec.structs.replace(resume, errored=errored)


def progressed(resume: R, copied: Copied) -> R:
    """The resume after some rows have been read."""
    task = copied.task
    path = task.table.path
    copy = resume.snapshots[path]
    left, moved = copy.ranges or (), copy.moved
    if not task.since:
        left = tuple(part for part in left if not _same(part, task.range))
        if copied.left is not None:
            left = (*left, copied.left)
    elif copied.left is None:
        moved = tuple(relation for relation in moved if relation != task.range.relation)
    rows = copy.rows + len(copied.changes)
    copy = msgspec.structs.replace(copy, ranges=left, moved=moved, rows=rows)
    resume = resume.with_snapshot(path, copy)
    return resume.with_error(path, copied.error) if copied.error else resume


def _rest(copy: PostgresTableSnapshot, table: Published, decoder: Rows) -> list[Task]:
    """The ranges that are left, and rows that may have moved out of them meanwhile."""
    left = copy.ranges or ()
    moved = [
        Task(
            table,
            decoder,
            BlockRange(relation, "(0,0)", None),
            since=copy.since,
            left=tuple(each for each in left if each.relation == relation),
        )
        for relation in copy.moved
    ]
    return moved + [Task(table, decoder, part) for part in left]


def _filenodes(parts: list[PhysicalTable]) -> tuple[int, ...]:
    return tuple(part.filenode for part in parts)


def _same(one: BlockRange, other: BlockRange) -> bool:
    """Whether two are the same range, however far each has come."""
    return (one.relation, one.end) == (other.relation, other.end)
