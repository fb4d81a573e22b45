"""What foreign keys do to rows in a range of the log, as changes of these rows.

    changes of the log ─▶ a pass over them ─▶ rows that are named, found in files ─▶ a pass …

A pass replays the range with the columns that foreign keys are about, in the order of the log, and
does at each DELETE and each changed key what the database did by itself. It needs the rows that the
range began with, but only those that are named: each pass says which values these have, and the
last one names no values whose rows were not looked for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from ...change import cascade, record
from ...change.arrow import RESCUED, arrow_schema, decode, rescued_of
from ...change.event import Column, Reference, Table
from ...errors import DecodeError, TableFailed
from ...transforms.rules import whole_rows_hint
from .. import LogBlock, LogRange
from ..lake.plan import TableRef
from .fold import ROW_OPS, RowChange, RowKey, SequencedRecord
from .row_search import Values, Wanted

# Rows of a table that one range changes by foreign keys, and changes of it that say which these
# are: the driver holds them.
_MOST_ROWS = 1_000_000
_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
# A source writes decimals as text, or whole ones that no integer holds as numbers.
_ENCODERS = [msgspec.json.Encoder(decimal_format=each).encode for each in ("string", "number")]
_details = msgspec.json.Decoder(dict[str, Any]).decode

Row = dict[str, Any]  # values as Arrow has them; a column that is not there is not known
Search = Callable[["Child", Wanted], list[Row]]
"""Finds the rows that a table has before the range."""


def ref_of(table: Table) -> TableRef:
    """Which table it is a version of."""
    return TableRef(table.source, table.schema, table.name)


def acting(table: Table) -> tuple[Reference, ...]:
    """Its foreign keys that change rows without a change event."""
    return tuple(filter(cascade.acts, table.references))


def alike(one: Table, other: Table) -> bool:
    """Whether two versions have the same columns and foreign keys that act."""
    columns = [[(c.name, c.type, c.key) for c in each.columns] for each in (one, other)]
    return columns[0] == columns[1] and acting(one) == acting(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A table whose foreign keys act."""

    table: Table
    key: tuple[str, ...]  # by which the sink finds its rows
    chosen_key: bool
    applied: int  # the table has all changes up to this one
    failure: TableFailed | None = None  # why its rows cannot follow
    # The tables that are not followed once this one's rows are not known; none: it is its own.
    instead: tuple[TableRef, ...] = ()

    @property
    def ref(self) -> TableRef:
        """Which table it is."""
        return ref_of(self.table)


class CascadeFailed(Exception):
    """Rows of a table cannot be changed as its foreign keys demand."""

    def __init__(self, ref: TableRef, sequence: int, reason: TableFailed) -> None:
        super().__init__(str(reason))
        self.ref = ref
        self.sequence = sequence
        self.reason = reason


class Family:
    """Tables whose foreign keys act, and those that they name."""

    def __init__(self, children: Iterable[Child]) -> None:
        self.children = {each.ref: each for each in children}
        self.naming: dict[TableRef, list[tuple[Child, Reference]]] = defaultdict(list)
        self._columns: dict[TableRef, set[str]] = defaultdict(set)
        for child in self.children.values():
            self._columns[child.ref].update(child.key)
            for reference in acting(child.table):
                parent = TableRef(child.ref.source, reference.schema, reference.table)
                self.naming[parent].append((child, reference))
                self._columns[child.ref].update(reference.columns)
                self._columns[parent].update(reference.parent_columns)

    def columns(self, table: Table) -> tuple[Column, ...]:
        """Those that are looked at of a version of a table."""
        names = self._columns[ref_of(table)]
        return tuple(Column(each.name, each.type) for each in table.columns if each.name in names)

    def follower(self, table: Table, fields: Sequence[Any]) -> Child | None:
        """A table whose rows may change with a change of another one; None: there is none."""
        op = fields[record.OP]
        for child, each in self.naming.get(ref_of(table), ()):
            if op == "DELETE" and each.on_delete:
                return child
            if op == "UPDATE" and each.on_update and _may_differ(fields, each.parent_columns):
                return child
        return None

    def by_columns(self, ref: TableRef, names: Collection[str]) -> Child | None:
        """A table whose rows are found by some of these columns of a table; None: none is."""
        child = self.children.get(ref)
        if child and self.replays(ref):
            own = {*child.key, *(n for each in acting(child.table) for n in each.columns)}
            if own.intersection(names):
                return child
        for other, reference in self.naming.get(ref, ()):
            if not set(reference.parent_columns).isdisjoint(names):
                return other
        return None

    def replays(self, ref: TableRef) -> bool:
        """Whether rows of a table can follow, so that all its changes are looked at."""
        child = self.children.get(ref)
        return child is not None and not child.failure and not child.instead

    def below(self, parents: Iterable[TableRef]) -> set[TableRef]:
        """The tables whose rows may follow those of others, be it by way of more."""
        found, left = set[TableRef](), [*parents]
        while left:
            fresh = {child.ref for child, _ in self.naming.get(left.pop(), ())} - found
            found |= fresh
            left += fresh
        return found


def _may_differ(fields: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether an UPDATE may have given these columns other values."""
    changed = fields[record.CHANGED]
    if changed is not None:
        return any(name in changed for name in names)
    old, new = (_image(image or b"{}") for image in (_old_image(fields), fields[record.AFTER]))
    sent = [name for name in names if name not in fields[record.UNCHANGED]]
    return any(old.get(name) != new.get(name) for name in sent)


def _old_image(fields: Sequence[Any]) -> bytes | None:
    """What a change has of the row before it: without an old image, its key has not changed."""
    image: bytes | None = fields[record.BEFORE] or fields[record.KEY]
    return image


# --- the changes of the log ----------------------------------------------------------------------


class Step(NamedTuple):
    """A change of the log, as far as foreign keys are about it."""

    sequence: int
    commit_time: int
    ref: TableRef
    op: str  # of a row, or TRUNCATE
    old: Row  # what is known of the row before
    new: Row  # and of the row after
    key: bytes | None = None  # as the change has it; None: there is none, or nobody asks
    old_key: bytes | None = None


def read_steps(changes: LogRange, family: Family) -> list[Step]:
    """The changes of a family's tables in their order; none, if they change no other rows.

    A first reading keeps nothing. The second one keeps the changes of the tables whose rows may
    follow: those before the change that they follow say which rows there are, and those behind it
    how the source writes their keys.
    """
    tables, causes = changes.tables(), _causes(changes, family)
    if not causes:
        return []
    below = family.below(causes)
    replayed = {ref for ref in {*causes, *below} if family.replays(ref)}
    steps: list[Step] = []
    kept = Counter[TableRef]()
    for first, rows in _records(changes, lambda ref, _: ref in causes or ref in replayed):
        found: dict[int, list[SequencedRecord]] = defaultdict(list)
        for sequence, fields in enumerate(rows, first):
            table = tables[fields[record.TABLE]]
            ref = ref_of(table)
            if ref not in replayed and not family.follower(table, fields):
                continue
            found[table.version].append((sequence, fields))
            kept[ref] += 1
            if kept[ref] > _MOST_ROWS:
                own = ref in below and ref in replayed
                raise _too_many(family.children[ref] if own else causes[ref], ref, sequence)
        decoded = (_steps(tables[at], some, family) for at, some in found.items())
        steps += sorted(chain.from_iterable(decoded), key=attrgetter("sequence"))
    return steps


def _causes(changes: LogRange, family: Family) -> dict[TableRef, Child]:
    """The tables whose changes may change rows of others, each with one of those others."""
    tables = changes.tables()
    found: dict[TableRef, Child] = {}
    named = family.naming.keys()
    for _, rows in _records(changes, lambda ref, op: op in ("UPDATE", "DELETE") and ref in named):
        for fields in rows:
            table = tables[fields[record.TABLE]]
            ref = ref_of(table)
            if ref in named and ref not in found and (child := family.follower(table, fields)):
                found[ref] = child
    return found


def _too_many(child: Child, ref: TableRef, sequence: int) -> CascadeFailed:
    most = f"{_MOST_ROWS:,}"
    reason = f"its foreign keys act in a batch that has more than {most} changes of {ref}"
    return CascadeFailed(next(iter(child.instead), child.ref), sequence, TableFailed(reason))


def _records(
    changes: LogRange, wants: Callable[[TableRef, str], bool]
) -> Iterator[tuple[int, Iterable[tuple[Any, ...]]]]:
    """The parts of a range that have a wanted change, by its table and operation."""
    tables = changes.tables()
    for part in changes.blocks():
        if isinstance(part, LogBlock):
            if wants(ref_of(part.described), "READ"):
                yield part.first, record.rows(part.records(), part.count)
            continue
        first, count, records = part
        there = {(each.table, each.op) for each in record.heads(records, count)}
        if any(wants(ref_of(tables[version]), op) for version, op in there):
            yield first, record.rows(records, count)


def _steps(table: Table, changes: Sequence[SequencedRecord], family: Family) -> Iterator[Step]:
    """The changes of one version of a table, decoded together."""
    ref, columns = ref_of(table), family.columns(table)
    child = family.children.get(ref)
    row_key = _row_key(child) if child else None
    olds = [_old_image(fields) for _, fields in changes]
    after = [
        fields[record.AFTER] if fields[record.OP] in ROW_OPS else None for _, fields in changes
    ]
    names = [column.name for column in columns]
    decoded = [decode(s, columns, connector=table.connector, rescue=True) for s in (olds, after)]
    for each in decoded:
        _expect_comparable(each, family, ref, changes[0][0])
    old_rows, new_rows = (each.select(names).to_pylist() for each in decoded)
    for (sequence, fields), image, was, now in zip(changes, olds, old_rows, new_rows, strict=True):
        op, time = fields[record.OP], fields[record.COMMIT_TIME]
        if op not in ROW_OPS:
            details = _details(fields[record.AFTER] or b"{}")
            if op == "TRUNCATE" or details.get("dropped"):
                yield Step(sequence, time, ref, "TRUNCATE", {}, {})
            continue
        known = _image(image) if image and op in ("UPDATE", "DELETE") else {}
        old = {name: value for name, value in was.items() if name in known}
        absent = fields[record.UNCHANGED] or ()
        new = {} if op == "DELETE" else {n: v for n, v in now.items() if n not in absent}
        key = left = None
        if row_key:
            key, left = row_key.keys(RowChange.of(sequence, fields))
        yield Step(sequence, time, ref, op, old, new, key, left)


def _expect_comparable(rows: pa.Table, family: Family, ref: TableRef, sequence: int) -> None:
    """Expect values by which rows of one table can be found from those of another."""
    odd = {field.name for field in rows.schema if pa.types.is_nested(field.type)}
    if RESCUED in rows.column_names:
        odd.update(*map(rescued_of, rows[RESCUED].unique().to_pylist()))
    child = family.by_columns(ref, odd) if odd else None
    if child:
        reason = f"a value of {ref} is a list or does not fit, so no foreign key is followed by it"
        failed = next(iter(child.instead), child.ref)
        raise CascadeFailed(failed, sequence, TableFailed(reason))


def _row_key(child: Child) -> RowKey | None:
    if child.failure or child.instead:
        return None
    columns = [each for each in child.table.columns if each.name in child.key]
    return RowKey(columns, chosen=child.chosen_key)


# --- a pass --------------------------------------------------------------------------------------


class _Rows:
    """The rows of a table that are known, by their key and by the columns of its foreign keys."""

    def __init__(self, child: Child, stored: Iterable[Row]) -> None:
        self.child = child
        self._rows: dict[Values, Row] = {}
        self._by: dict[tuple[str, ...], dict[Values, dict[Values, None]]] = {
            reference.columns: defaultdict(dict) for reference in acting(child.table)
        }
        for row in stored:
            self.put(row)

    def key(self, row: Row) -> Values:
        return tuple(row.get(name) for name in self.child.key)

    def get(self, key: Values) -> Row | None:
        return self._rows.get(key)

    def put(self, row: Row) -> None:
        key = self.key(row)
        self.pop(key)
        self._rows[key] = row
        for columns, found in self._by.items():
            found[tuple(row.get(name) for name in columns)][key] = None

    def pop(self, key: Values) -> Row | None:
        row = self._rows.pop(key, None)
        if row is not None:
            for columns, found in self._by.items():
                del found[tuple(row.get(name) for name in columns)][key]
        return row

    def clear(self) -> None:
        self._rows.clear()
        for found in self._by.values():
            found.clear()

    def naming(self, columns: tuple[str, ...], values: Values) -> list[Row]:
        return [self._rows[key] for key in self._by[columns].get(values, ())]


class _Effect(NamedTuple):
    """What became of a row by a foreign key."""

    step: Step
    row: Row
    becomes: Row | None
    columns: tuple[str, ...]  # that have other values


class _Pass:
    """The changes of a range, replayed with the stored rows that were found so far."""

    def __init__(self, family: Family, stored: Mapping[TableRef, Sequence[Row]]) -> None:
        self._family = family
        self._rows = {
            child.ref: _Rows(child, stored.get(child.ref, ()))
            for child in family.children.values()
            if family.replays(child.ref)
        }
        self.effects: dict[TableRef, list[_Effect]] = defaultdict(list)
        self.named: dict[TableRef, dict[tuple[str, ...], set[Values]]] = defaultdict(
            lambda: defaultdict(set)
        )

    def run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            rows = self._rows.get(step.ref)
            if rows is None or step.sequence <= rows.child.applied:
                old, new = step.old, {**step.old, **step.new}
            elif step.op == "TRUNCATE":
                rows.clear()
                continue
            else:
                old, new = self._applied(rows, step)
            if step.op in ("UPDATE", "DELETE"):
                self._cascade(step.ref, old, None if step.op == "DELETE" else new, step)

    def _applied(self, rows: _Rows, step: Step) -> tuple[Row, Row]:
        """The row of a change, before and after it."""
        if step.op not in ("UPDATE", "DELETE"):
            rows.put(step.new)
            return {}, step.new
        # Without an old image the key has not changed.
        key = rows.key({**step.new, **step.old})
        known = rows.pop(key)
        old = {**(known or {}), **step.old}
        new = {**old, **step.new}
        if step.op == "UPDATE":
            rows.put(new)
            if known is None:
                # Rows may come in part, and then the rest is looked for.
                columns = self._family.columns(rows.child.table)
                if any(column.name not in new for column in columns):
                    self.named[step.ref][rows.child.key].add(key)
        return old, new

    def _cascade(self, parent: TableRef, old: Row, new: Row | None, step: Step) -> None:
        """Do what the database does by itself when a row goes or gets other values."""
        for child, reference in self._family.naming.get(parent, ()):
            if step.sequence <= child.applied:
                continue
            _expect_known(child, reference, old, new, step)
            values = cascade.named_by(reference, old, new)
            if values is None:
                continue
            if child.failure:
                raise CascadeFailed(
                    next(iter(child.instead), child.ref), step.sequence, child.failure
                )
            self.named[child.ref][reference.columns].add(values)
            rows = self._rows[child.ref]
            # What follows from one may change or remove others, so they are looked for again.
            while named := rows.naming(reference.columns, values):
                for row in named:
                    if rows.get(rows.key(row)) is row:
                        self._change(rows, row, reference, new, step)

    def _change(
        self, rows: _Rows, row: Row, reference: Reference, new: Row | None, step: Step
    ) -> None:
        child, becomes = rows.child, cascade.consequence(reference, row, new)
        effects = self.effects[child.ref]
        effects.append(_Effect(step, row, becomes, reference.columns))
        if len(effects) > _MOST_ROWS:
            reason = f"its foreign keys change more than {_MOST_ROWS:,} of its rows at once"
            raise CascadeFailed(child.ref, step.sequence, TableFailed(reason))
        rows.pop(rows.key(row))
        if becomes is not None:
            rows.put(becomes)
        self._cascade(child.ref, row, becomes, step)


def _expect_known(
    child: Child, reference: Reference, old: Row, new: Row | None, step: Step
) -> None:
    """Expect that the old values are known by which rows name another one."""
    unknown = [name for name in reference.parent_columns if name not in old]
    if not unknown:
        return
    same = new is not None and all(
        name not in new if name in unknown else new.get(name) == old[name]
        for name in reference.parent_columns
    )
    if same or not (reference.on_delete if new is None else reference.on_update):
        return
    reason = TableFailed(
        f"its foreign key names {unknown[0]} of {step.ref}, whose old value a change lacks",
        hint=f"The way out: {whole_rows_hint(child.table.connector)}, then run "
        "`headrace snapshot SOURCE TABLE`.",
    )
    raise CascadeFailed(next(iter(child.instead), child.ref), step.sequence, reason)


# --- all of it -----------------------------------------------------------------------------------


def cascaded_rows(
    family: Family, steps: Sequence[Step], search: Search
) -> dict[TableRef, list[RowChange]]:
    """The changes that follow from foreign keys, of each table in their order."""
    stored: dict[TableRef, dict[Values, Row]] = defaultdict(dict)
    searched: dict[TableRef, dict[tuple[str, ...], set[Values]]] = defaultdict(
        lambda: defaultdict(set)
    )
    while True:
        done = _Pass(family, {ref: [*rows.values()] for ref, rows in stored.items()})
        done.run(steps)
        wanted = {
            ref: {
                columns: fresh
                for columns, values in named.items()
                if (fresh := values - searched[ref][columns])
            }
            for ref, named in done.named.items()
        }
        if not any(wanted.values()):
            return {
                ref: _changes(family.children[ref], steps, effects)
                for ref, effects in done.effects.items()
            }
        for ref, criteria in wanted.items():
            child = family.children[ref]
            for columns, values in criteria.items():
                searched[ref][columns] |= values
            if criteria:
                for row in search(child, criteria):
                    stored[ref][tuple(row[name] for name in child.key)] = row
                if len(stored[ref]) > _MOST_ROWS:
                    reason = f"its foreign keys change more than {_MOST_ROWS:,} of its rows at once"
                    raise CascadeFailed(ref, steps[0].sequence, TableFailed(reason))


def _changes(child: Child, steps: Sequence[Step], effects: Sequence[_Effect]) -> list[RowChange]:
    """What became of rows, as the log would have it; an update has what is other in the row."""
    written = _KeyTexts(child, steps)
    columns = [each.name for each in child.table.columns]
    found: list[RowChange] = []
    for names, some in groupby(effects, key=lambda each: each.columns):
        together = list(some)
        shown = [name for name in columns if name in {*names, *child.key}]
        sent = [{n: (each.becomes or each.row)[n] for n in shown} for each in together]
        afters = _images(child, shown, sent, together[0].step.sequence)
        keys = written.of([each.becomes or each.row for each in together], together)
        befores = written.of([each.row for each in together], together)
        absent = tuple(name for name in columns if name not in shown)
        for each, after, key, before in zip(together, afters, keys, befores, strict=True):
            sequence, time = each.step.sequence, each.step.commit_time
            if each.becomes is None:
                found.append(RowChange(sequence, "DELETE", before, None, None, (), time))
            else:
                old = before if before != key else None
                found.append(RowChange(sequence, "UPDATE", key, old, after, absent, time))
    return found


class _KeyTexts:
    """The texts of a table's keys: those that its changes in the range have, where there are such.

    Changes of one row are found by the text of its key.
    """

    def __init__(self, child: Child, steps: Sequence[Step]) -> None:
        self._child = child
        self._known: dict[Values, bytes] = {}
        for step in steps:
            if step.ref == child.ref and step.key is not None:
                old, now = ({**step.new, **step.old}, {**step.old, **step.new})
                self._known[self._key(old)] = step.old_key or step.key
                self._known[self._key(now)] = step.key

    def _key(self, row: Row) -> Values:
        return tuple(row.get(name) for name in self._child.key)

    def of(self, rows: Sequence[Row], effects: Sequence[_Effect]) -> list[bytes]:
        keys = list(map(self._key, rows))
        names = [each.name for each in self._child.table.columns if each.name in self._child.key]
        unknown = list(
            {
                key: row for key, row in zip(keys, rows, strict=True) if key not in self._known
            }.items()
        )
        sent = [{name: row[name] for name in names} for _, row in unknown]
        texts = _images(self._child, names, sent, effects[0].step.sequence)
        self._known |= {key: text for (key, _), text in zip(unknown, texts, strict=True)}
        return [self._known[key] for key in keys]


def _images(child: Child, names: Sequence[str], rows: Sequence[Row], sequence: int) -> list[bytes]:
    """Rows as images, from which the same values are read again."""
    if not rows:
        return []
    columns = [Column(c.name, c.type) for c in child.table.columns if c.name in names]
    connector = child.table.connector
    for encode in _ENCODERS:
        with suppress(DecodeError, pa.ArrowException):
            written = list(map(encode, rows))
            typed = pa.Table.from_pylist(rows, arrow_schema(columns, connector=connector))
            if decode(written, columns, connector=connector).equals(typed):
                return written
    reason = "a value of its key or its foreign key cannot be written as its source would do"
    raise CascadeFailed(child.ref, sequence, TableFailed(reason))
