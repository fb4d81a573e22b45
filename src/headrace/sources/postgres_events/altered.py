"""Captured tables that DDL has changed since the last look at the catalogs, or taken away.

Events say what a statement wrote, in the columns of that moment. They do not say what DDL does to
rows that nobody writes: defaults of new columns, renamed and dropped ones, rewrites, partitions. So
a table whose definition is another one than at the last look is read anew.

Nor do they say that a partition is gone, and a look shows none that has come and gone since the one
before. But each event names the partition that it was written to: one that no look has shown is
looked for before its events are in the log.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ...change.event import BeforeKind, Change, Op, Table, Transaction
from .. import Register
from ..postgres.looks import LookState, TableLook, compare
from .catalog import EventCatalog
from .entries import Leaf
from .position import EventTablePosition
from .resume import EventResume, TransactionSnapshot


class Looked(NamedTuple):
    """What a look has found."""

    resume: EventResume  # which remembers it
    altered: set[str]  # tables whose rows must be read anew
    leaves: set[Leaf]  # partitions that are there


def look_at_tables(
    catalog: EventCatalog, resume: EventResume, written: Iterable[Leaf] = ()
) -> Looked:
    """Look at all tables, or only at those of partitions that were written to."""
    written = set(written)
    live = resume.live
    if written:
        paths = {leaf.table for leaf in written}
        live = {oid: path for oid, path in live.items() if path in paths}
    looks, leaves = catalog.looks_with_leaves(list(live))
    shown = {Leaf(live[root], leaf) for leaf, root in leaves.items()}
    gone = {leaf.table for leaf in written - shown}
    altered = set()
    for look in looks:
        path = live[look.oid]
        copy = resume.snapshots[path]
        if path in gone or (copy.look is not None and _is_altered(copy.look, look)):
            altered.add(path)
        state = compare(copy.look, look).state
        if state != copy.look:
            resume = resume.with_snapshot(path, msgspec.structs.replace(copy, look=state))
    return Looked(resume, altered, shown)


def _is_altered(before: LookState, look: TableLook) -> bool:
    found = compare(before, look)
    return bool(found.reason) or found.state.definition != before.definition


def gone_tables(catalog: EventCatalog, before: EventResume, after: EventResume) -> dict[str, Table]:
    """Tables that are not captured any more because they are gone, or have another name."""
    left = {
        path: copy.relation
        for path, copy in before.snapshots.items()
        if path not in after.snapshots and path in before.versions
    }
    found = {path: catalog.gone(path, relation) for path, relation in left.items()}
    return {path: table for path, table in found.items() if table is not None}


def dropped(table: Table, register: Register, resume: EventResume) -> Change:
    """Empty a table that is gone."""
    payload = {"ddl_type": "DROP_TABLE", "dropped": True}
    now = time.time_ns() // 1000
    xid = TransactionSnapshot.of(resume.seen).after
    name = f"dropped-{xid}-{table.relation}"
    return Change(
        Op.SCHEMA, register(table), None, None, BeforeKind.NONE, msgspec.json.encode(payload), None,
        (), Transaction(name, now, now), 1, EventTablePosition(xid, 0, resume.lsn), last=True,
    )  # fmt: skip
