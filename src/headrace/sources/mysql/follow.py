"""Tables at the stream's place, as DDL was followed up to there. No I/O.

The catalogue shows a table as it is now, which may be behind statements that the stream has not
come to. So columns and key are taken from one statement to the next, and the catalogue is believed
where the stream has reached the place at which it was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from ...change.cascade import SET_NULL, acts
from ...change.event import Reference
from .decode.alterations import Alteration
from .decode.columns import DeclaredColumn, declared_type
from .decode.definitions import normal
from .decode.path import TablePath
from .resume import BinlogOffset, DeclaredTable, MysqlResume, unpacked

_NEVER: BinlogOffset = (1 << 60, 0)
# Columns that a table may have and the catalogue not show.
_UNSHOWN = frozenset({"my_row_id"})


def created(
    now: DeclaredTable, end: BinlogOffset, *, keyless: bool, related: bool
) -> DeclaredTable:
    """A table that was created by a statement that ends there."""
    exact = now.read_at == end
    key = () if keyless and not exact else now.key
    references = now.references if exact else _idle(now) if related else ()
    now = msgspec.structs.replace(
        now, key=key, references=references, exact=exact, keyless=keyless and not exact
    )
    return now.numbered(None)


def _idle(now: DeclaredTable) -> tuple[Reference, ...]:
    """The foreign keys of a table that change no rows, so it matters little since when."""
    return tuple(each for each in now.references if not acts(each))


def altered(
    known: DeclaredTable, now: DeclaredTable | None, alteration: Alteration, end: BinlogOffset
) -> DeclaredTable:
    """A table behind a statement that ends there; `now`: as the catalogue shows it."""
    charset = known.charset if known.exact else ""
    columns, last = alteration.applied(known.there, known.last_number, charset)
    names = {name.lower(): name for name in known.key}
    key = tuple(alteration.renamed.get(small, name) for small, name in names.items())
    references = _with_columns(known.references, alteration.renamed)
    followed = msgspec.structs.replace(
        known, columns=columns, references=references, followed=(), last_number=last
    )
    if now is None:  # it goes in a later statement
        return msgspec.structs.replace(followed, key=key, followed=columns, read_at=_NEVER)
    if now.read_at == end:
        return msgspec.structs.replace(now, exact=True).numbered(followed)
    key = key if known.exact else now.key
    columns = tuple(_as_shown(column, now.columns) for column in columns)
    return msgspec.structs.replace(
        now,
        key=key,
        references=_idle(now) if alteration.related else references,
        followed=columns,
        last_number=last,
        exact=known.exact,
        charset="" if alteration.recharged else known.charset,
        keyless=known.keyless and not alteration.rekeyed,
    )


def _with_columns(
    references: Iterable[Reference], renamed: Mapping[str, str]
) -> tuple[Reference, ...]:
    """Foreign keys of a table whose columns have other names now."""
    return tuple(
        msgspec.structs.replace(
            each, columns=tuple(renamed.get(name.lower(), name) for name in each.columns)
        )
        for each in references
    )


def _as_shown(column: DeclaredColumn, shown: Sequence[DeclaredColumn]) -> DeclaredColumn:
    """A column with all that the catalogue has of it, if that is the same one."""
    for each in shown:
        if each.name.lower() == column.name.lower() and _same_type(each.type, column.type):
            return msgspec.structs.replace(
                each,
                name=column.name,  # a later statement may have changed its case
                charset=column.charset,
                number=column.number,
                initial_default=column.initial_default,
            )
    return column


def _same_type(one: str, other: str) -> bool:
    return bool(one and other) and normal(declared_type(one)) == normal(declared_type(other))


def mapped(
    declared: DeclaredTable, columns: Sequence[tuple[str, str]], key: tuple[str, ...]
) -> DeclaredTable | None:
    """A table of which a table map has these names, types and key; None: it is another one."""
    names = frozenset(name.lower() for name, _ in columns)
    numbered = all(column.number for column in declared.there)
    if names - _UNSHOWN == declared.names - _UNSHOWN and declared.exact and numbered:
        return declared
    if declared.exact and names - _UNSHOWN != declared.names - _UNSHOWN:
        return None
    # What the catalogue has of a column may be of a later statement: then its type is another one.
    there = {(column.name.lower(), column.type): column for column in declared.there}
    shown = tuple(there.get((n.lower(), kind)) or DeclaredColumn(n, kind) for n, kind in columns)
    found = msgspec.structs.replace(declared, columns=shown, followed=()).numbered(declared)
    if not declared.exact:
        key = () if declared.keyless else key
        declared = msgspec.structs.replace(declared, key=key, keyless=False, exact=True)
    last = found.last_number
    if shown == declared.columns:
        return msgspec.structs.replace(declared, columns=found.columns, last_number=last)
    return msgspec.structs.replace(declared, followed=found.columns, last_number=last)


def reached(declared: DeclaredTable) -> DeclaredTable | None:
    """A table once the stream is where the catalogue was read; None: it is another one."""
    shown = frozenset(column.name.lower() for column in declared.columns)
    if declared.followed and shown != declared.names:
        return None
    found = declared.numbered(declared)
    return msgspec.structs.replace(found, followed=(), exact=True, keyless=False)


def dependents(
    declared: Mapping[TablePath, DeclaredTable], paths: Iterable[TablePath]
) -> set[TablePath]:
    """The tables whose rows the server changes by itself when rows of these change."""
    found: set[TablePath] = set()
    parents = set(paths)
    while parents:
        parents = {
            path
            for path, table in declared.items()
            if any(acts(each) and (each.schema, each.table) in parents for each in table.references)
        } - found
        found |= parents
    return found


def unfollowed(resume: MysqlResume) -> dict[str, str]:
    """Tables that do not follow the server, and why.

    What foreign keys do follows from changes of the table that they name, which are not read while
    that one is errored. Its next snapshot comes with snapshots of these.
    """
    found = {str(path): why for path, why in resume.errored.items()}
    declared = resume.declared() if found else {}
    for parent in resume.errored:
        for child in dependents(declared, [parent]) & resume.snapshots.keys():
            found.setdefault(
                str(child),
                f"what its foreign keys do to its rows is not known while {parent} is errored; "
                f"a new snapshot of {parent} brings one of this table",
            )
    return found


def loose_references(table: DeclaredTable) -> list[Reference]:
    """The foreign keys of a table that act, and whose text the server compares by a collation."""
    loose = {column.name for column in table.there if column.loose}
    return [each for each in table.references if acts(each) and not loose.isdisjoint(each.columns)]


def loosely_compared(reference: Reference) -> str:
    """What is wrong with one of these."""
    parent = TablePath(reference.schema, reference.table)
    return (
        f"its foreign key ({', '.join(reference.columns)}) names rows of {parent} by text, which "
        "the server compares by its collation and Headrace byte by byte: rows whose text differs "
        "in case, accents or trailing spaces do not follow"
    )


LOOSE_FIX = (
    "Drop the foreign key, give its columns in both tables COLLATE utf8mb4_0900_bin (MariaDB: "
    "utf8mb4_nopad_bin), and add it again. `headrace verify SINK` finds rows that did not follow."
)


def collation_warnings(resume: MysqlResume) -> tuple[str, ...]:
    """The foreign keys that are not followed exactly."""
    return _collation_warnings(resume.catalogue)


@lru_cache(maxsize=8)
def _collation_warnings(catalogue: bytes) -> tuple[str, ...]:
    """Every status asks, and the catalogue seldom changes."""
    return tuple(
        f"{path}: {loosely_compared(each)}. {LOOSE_FIX}"
        for path, table in unpacked(catalogue).items()
        for each in loose_references(table)
    )


def computing(
    declared: Mapping[TablePath, DeclaredTable],
) -> dict[TablePath, tuple[frozenset[str], frozenset[TablePath]]]:
    """Tables whose rows are named by such that have generated columns, which may then change.

    For each the columns by which its rows are named, and those tables.
    """
    computed = {path for path, table in declared.items() if _computes(table)}
    parents = {
        TablePath(each.schema, each.table)
        for table in declared.values()
        for each in table.references
        if computed and acts(each)
    }
    found = {}
    for parent in parents:
        children = dependents(declared, [parent]) & computed
        if children:
            found[parent] = _named(declared, parent), frozenset(children)
    return found


def _named(declared: Mapping[TablePath, DeclaredTable], parent: TablePath) -> frozenset[str]:
    return frozenset(
        name
        for table in declared.values()
        for each in table.references
        if (each.schema, each.table) == parent and acts(each)
        for name in each.parent_columns
    )


def _computes(child: DeclaredTable) -> bool:
    """Whether a foreign key changes rows of a table that has generated columns."""
    changes = any(each.on_update or each.on_delete == SET_NULL for each in child.references)
    return changes and any("generated" in column.extra for column in child.there)


def with_parent(
    child: DeclaredTable, path: TablePath, to: TablePath, renamed: Mapping[str, str]
) -> DeclaredTable:
    """A table whose foreign keys follow another one to its new name and columns."""
    references = tuple(
        msgspec.structs.replace(
            each,
            schema=to.schema,
            table=to.table,
            parent_columns=tuple(renamed.get(name.lower(), name) for name in each.parent_columns),
        )
        if (each.schema, each.table) == path
        else each
        for each in child.references
    )
    return msgspec.structs.replace(child, references=references)
