"""How the snapshot of a table begins, goes on and is taken up again. No I/O."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from ...change.columns import schema_payload
from ...change.event import Change, Op, Table, Transaction
from .batches import SnapshotRows
from .catalog import BinlogEnd, FoundTable
from .decode.path import TablePath
from .keys import KeyOrder
from .pending import change_without_row
from .position import MysqlPosition
from .resume import DeclaredTable, MysqlResume, MysqlTableSnapshot, PrimaryKeyRange, packed
from .snapshot import RANGE_ROWS, CopiedRange, TableTask
from .tables import expect_no_history


@dataclass(frozen=True, slots=True)
class MysqlTablePlan:
    """How to snapshot a table: what to emit first, and how far it is then."""

    found: FoundTable
    table: Table
    declared: DeclaredTable
    end: BinlogEnd
    name: str  # what the names of its transactions begin with
    announced: list[Change]
    progress: MysqlTableSnapshot

    def begun(self, resume: MysqlResume) -> MysqlResume:
        """The resume once the table is announced."""
        path = self.found.path
        return msgspec.structs.replace(
            resume,
            snapshots=resume.snapshots | {path: self.progress},
            versions=resume.versions | {path: self.table.version},
            catalogue=packed(resume.declared() | {path: self.declared}),
        )

    def task(self) -> TableTask:
        """What to read; DecodeError: it cannot be read."""
        expect_no_history(self.declared)
        return TableTask(
            self.found.path,
            self.declared,
            SnapshotRows(self.table, self.declared, self.end, name=self.name),
            KeyOrder.of(self.declared),
            list(self.progress.left),
            is_long=not 0 < self.found.estimated_rows < RANGE_ROWS,  # 0: it has no statistics yet
        )


def plan(
    resume: MysqlResume, found: FoundTable, table: Table, declared: DeclaredTable, end: BinlogEnd
) -> MysqlTablePlan:
    """How to read a table from its first row, or what is left of it."""
    path = found.path
    known, progress = resume.declared().get(path), resume.snapshots[path]
    same = known is not None and known.like(declared)
    contents: list[tuple[Op, dict[str, Any]]] = []
    # A version whose statements wait for a row to show it is not in the log yet.
    if resume.versions.get(path) != table.version or path in resume.pending_ddl:
        contents.append((Op.SCHEMA, schema_payload(table)))
    if not progress.left or not same:
        if progress.replaces or progress.begun:
            contents.append((Op.TRUNCATE, {"snapshot": True, "relations": []}))
        progress = MysqlTableSnapshot(
            begun=True, estimated_rows=found.estimated_rows, left=(PrimaryKeyRange(),)
        )
    # With the time: where nothing is written, the next snapshot has the same position.
    name = f"snapshot-{end.file}:{end.position}-{time.time_ns() // 1000}-{path.label}"
    announced = _announced(name, table, end, contents)
    return MysqlTablePlan(found, table, declared, end, name, announced, progress)


def _announced(
    name: str, table: Table, end: BinlogEnd, contents: list[tuple[Op, dict[str, Any]]]
) -> list[Change]:
    now = time.time_ns() // 1000
    transaction = Transaction(f"{name}-0", now, now)
    position = MysqlPosition(end.file, end.position, "", end.position)
    changes = [
        change_without_row(op, table, content, (transaction, ordinal, position))
        for ordinal, (op, content) in enumerate(contents, 1)
    ]
    if changes:
        msgspec.structs.force_setattr(changes[-1], "last", True)
    return changes


def progressed(resume: MysqlResume, copied: CopiedRange) -> MysqlResume:
    """The resume after some rows have been read."""
    path = copied.task.path
    if copied.error:
        return failed(resume, path, copied.error)
    progress = resume.snapshots[path]
    left: list[PrimaryKeyRange] = []
    for part in progress.left:
        left += copied.left if part == copied.part else [part]
    rows = progress.rows + len(copied.changes)
    progress = msgspec.structs.replace(progress, rows=rows, left=tuple(left), done=not left)
    return resume.with_snapshot(path, progress)


def failed(resume: MysqlResume, path: TablePath, reason: str) -> MysqlResume:
    """The resume after a table was given up: it holds what cannot be read."""
    progress = msgspec.structs.replace(resume.snapshots[path], left=(), done=True)
    return resume.with_snapshot(path, progress).with_error(path, reason)


def interrupted(progress: MysqlTableSnapshot, declared: DeclaredTable | None) -> MysqlTableSnapshot:
    """A snapshot whose sessions have gone.

    The ranges that are left can be read in another one where it is certain which changes are of
    them; else the table is read from its first row.
    """
    if progress.done or not progress.begun:
        return progress
    order = KeyOrder.of(declared) if declared is not None else None
    if progress.left and order is not None and order.certain:
        return progress
    return MysqlTableSnapshot(replaces=True)
