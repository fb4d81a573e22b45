"""The triggers of a table, as SQL. No I/O.

    BEFORE INSERT, UPDATE   sets aside the rows that the new one conflicts with
    AFTER INSERT, UPDATE    of those, records the ones that are gone: REPLACE has deleted them, and
                            without recursive_triggers nobody else does; then records the row
    AFTER DELETE            records the row

Values are stored as they are, of whatever type, so nothing is lost or needs a function that some
build of SQLite lacks. A row of more than 32 values goes on in further entries, marked `+`.
SQLite refuses to drop a column that a trigger cannot do without. So a column that can be dropped is
named in a subquery, with a null of the same name outside of it: a name that the table does not have
any more is looked up there.
A table that may be written to between its own BEFORE and AFTER triggers has others, which keep what
is set aside: see `_NestedTriggers`.
Entries are numbered on from the last one, also when somebody has deleted it.
Of several triggers for one event SQLite runs the newest first. Ours must be the newest: a trigger
of the application that updates the same row would otherwise come before the row itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from .connections import quoted
from .schema import OURS, SqliteShape, Unique

WIDTH = 32  # values in an entry
KEYS = 8  # columns of the longest key that a table without rowid may have
KEPT = 32  # rows that stay set aside where nobody knows when they are not needed any more

_V = TypeVar("_V")

VALUES = ", ".join(f"v{number}" for number in range(WIDTH))
NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
MOVE_ON = "UPDATE headrace_state SET last = (SELECT max(entry) FROM headrace_changes);"

NEXT = "(SELECT last + 1 FROM headrace_state)"  # the number of a trigger's first entry

ANNOTATE = f"""CREATE TRIGGER headrace_annotate AFTER INSERT ON headrace_annotations BEGIN
  INSERT INTO headrace_changes (entry, layout, op, at, v0)
    VALUES ({NEXT}, 0, 'N', {NOW}, NEW.metadata);
  DELETE FROM headrace_annotations;
  {MOVE_ON}
END"""


def triggers(shape: SqliteShape, layout: int) -> dict[str, str]:
    """The triggers of a table by name, in the order to create them in."""
    made = _NestedTriggers if shape.nested else _Triggers
    return _written(shape, made(shape, layout))


def former_triggers(shape: SqliteShape, layout: int) -> dict[str, str]:
    """The same as earlier versions made them: they capture as much, but hold on to columns."""
    return _written(shape, _FormerTriggers(shape, layout))


def _written(shape: SqliteShape, made: _Triggers) -> dict[str, str]:
    return {
        name: f"CREATE TRIGGER {name} {event} ON {quoted(shape.name)}{when} BEGIN\n  "
        + "\n  ".join(body)
        + "\nEND"
        for name, event, when, body in made.all()
    }


class _Triggers:
    _next = NEXT

    def __init__(self, shape: SqliteShape, layout: int) -> None:
        self._shape = shape
        self._layout = layout
        self._table = quoted(shape.name)
        self._columns = [quoted(column.name) for column in shape.layout.columns]
        self._identity = [quoted(name) for name in shape.identity]
        self._loose = {quoted(name) for name in shape.droppable}
        self._lower = {column.name.lower() for column in shape.layout.columns}

    def all(self) -> list[tuple[str, str, str, list[str]]]:
        prefix = f"{OURS}{self._layout}"
        moved = self._moved()
        return [
            (f"{prefix}_inserting", "BEFORE INSERT", "", self._set_aside("")),
            (f"{prefix}_inserted", "AFTER INSERT", "", self._inserted()),
            (f"{prefix}_updating", "BEFORE UPDATE", f" WHEN {moved}", self._updating()),
            (f"{prefix}_updated", "AFTER UPDATE", "", self._updated(moved)),
            (f"{prefix}_deleted", "AFTER DELETE", "", self._deleted()),
        ]

    def _inserted(self) -> list[str]:
        return self._after_replaced("1", "I", "NEW")

    def _updating(self) -> list[str]:
        same = [f"t.{name} IS OLD.{name}" for name in self._identity]
        return self._set_aside(f" AND NOT ({_all(same)})")

    def _updated(self, moved: str) -> list[str]:
        return self._after_replaced(moved, "U", "OLD", "NEW")

    def _deleted(self) -> list[str]:
        conditions = [f"OLD.{name} = k{number}" for number, name in enumerate(self._identity)]
        return [
            f"DELETE FROM headrace_replaced WHERE layout = {self._layout} AND {_all(conditions)};",
            *self._tell(self._next, "D", "OLD"),
            MOVE_ON,
        ]

    def _tell(self, entry: str, op: str, *which: str) -> list[str]:
        statements = []
        values = [(each, column) for each in which for column in self._columns]
        for number, part in enumerate(_parts(values)):
            names = ", ".join(f"v{at}" for at in range(len(part)))
            kind = op if number == 0 else "+"
            into, first = ("entry, ", f"{entry}, ") if entry and number == 0 else ("", "")
            row = self._selected(f"{first}{self._layout}, '{kind}', {NOW}", part, self._unless(op))
            statements.append(
                f"INSERT INTO headrace_changes ({into}layout, op, at, {names}) {row};"
            )
        return statements

    def _unless(self, op: str) -> str:
        """The condition of an entry; empty: it is always written."""
        return ""

    def _selected(self, first: str, part: Sequence[tuple[str, str]], when: str) -> str:
        """Values of the row, of which those that are dropped by then are null."""
        absent = [
            self._nulls(which, [c for w, c in part if w == which and c in self._loose])
            for which in dict.fromkeys(which for which, c in part if c in self._loose)
        ]
        where = f" WHERE {when}" if when else ""
        if not absent:
            values = ", ".join(f"{which}.{column}" for which, column in part)
            return f"SELECT {first}, {values}{where}" if when else f"VALUES ({first}, {values})"
        values = ", ".join(f"(SELECT {which}.{column})" for which, column in part)
        return f"SELECT {first}, {values} FROM {' CROSS JOIN '.join(absent)}{where}"

    def _nulls(self, name: str, columns: Sequence[str]) -> str:
        # Over a table of one row: older libraries build an index for a query without any.
        nulls = ", ".join(f"NULL AS {column}" for column in columns)
        return f"(SELECT {nulls} FROM headrace_state) AS {name}"

    def _value(self, which: str, column: str) -> str:
        """One value of the row; null where it is dropped by then."""
        if column not in self._loose:
            return f"{which}.{column}"
        return f"(SELECT (SELECT {which}.{column}) FROM {self._nulls(which, [column])})"

    # -- rows that REPLACE deletes --------------------------------------------------------------

    def _set_aside(self, but: str) -> list[str]:
        statements = [f"DELETE FROM headrace_replaced WHERE layout = {self._layout};"]
        keys = ", ".join(f"k{number}" for number in range(len(self._identity)))
        these = ", ".join(f"t.{name}" for name in self._identity)
        for number, unique in enumerate(self._shape.uniques):
            for at, part in enumerate(_parts(self._columns)):
                names = ", ".join(f"v{n}" for n in range(len(part)))
                known = self._known(at) if self._is_known(number) else ""
                statements.append(
                    f"INSERT INTO headrace_replaced (layout, part, {keys}, {names})"
                    f" SELECT {self._layout}, {at}, {these}, {', '.join(map(self._stored, part))}"
                    f" FROM {self._present()} WHERE {self._conflict(unique)}{but}{known};"
                )
        return statements

    def _is_known(self, number: int) -> bool:
        """Whether rows may be set aside already when those of a unique index are looked for."""
        return number > 0

    def _present(self) -> str:
        """The table as `t`; as `s`, nulls for columns that it does not have any more."""
        loose = [column for column in self._columns if column in self._loose]
        return f"{self._table} AS t" + (f" CROSS JOIN {self._nulls('s', loose)}" if loose else "")

    def _stored(self, column: str) -> str:
        if column not in self._loose:
            return f"t.{column}"
        same = _all([f"s.{name} = t.{name}" for name in self._identity])
        return f"(SELECT s.{column} FROM {self._table} AS s WHERE {same})"

    def _known(self, part: int) -> str:
        same = [f"r.k{number} IS t.{name}" for number, name in enumerate(self._identity)]
        return (
            f" AND NOT EXISTS (SELECT 1 FROM headrace_replaced AS r WHERE r.layout ="
            f" {self._layout} AND r.part = {part} AND {_all(same)})"
        )

    def _conflict(self, unique: Unique) -> str:
        if unique.where:
            return self._partial_conflict(unique)
        if unique.names is not None and not self._loose & {term for term, _ in unique.terms}:
            return _all([f"t.{term}{_collated(c)} = NEW.{term}" for term, c in unique.terms])
        if unique.names is not None:
            conditions = [
                f"s.{term}{_collated(c)} = {self._value('NEW', term)}" for term, c in unique.terms
            ]
            return self._found(conditions, " AS s", [f"s.{name}" for name in self._identity])
        return self._found(self._expressed(unique), "", self._identity)

    def _expressed(self, unique: Unique) -> list[str]:
        # Over a row that has the names of the table's, an expression means what it means there.
        news = ", ".join(f"{self._value('NEW', column)} AS {column}" for column in self._columns)
        return [
            f"({term}){_collated(c)} = (SELECT {term} FROM (SELECT {news}))"
            for term, c in unique.terms
        ]

    def _partial_conflict(self, unique: Unique) -> str:
        if unique.names is None:
            conditions = self._expressed(unique)
        else:
            conditions = [f"{t}{_collated(c)} = {self._value('NEW', t)}" for t, c in unique.terms]
        return self._found([*conditions, f"({unique.where})"], "", self._identity)

    def _found(self, conditions: Sequence[str], alias: str, keys: Sequence[str]) -> str:
        these = ", ".join(f"t.{name}" for name in self._identity)
        found = f"SELECT {', '.join(keys)} FROM {self._table}{alias} WHERE {_all(conditions)}"
        return f"{these if len(self._identity) == 1 else f'({these})'} IN ({found})"

    def _moved(self) -> str:
        """Whether an update may meet other rows."""
        names = {quoted(name) for name in self._shape.identity}
        for unique in self._shape.uniques:
            if unique.names is None:
                return "1"
            names |= {quoted(name) for name in unique.names}
        moved = [f"{self._value('NEW', n)} IS NOT {self._value('OLD', n)}" for n in sorted(names)]
        return f"({' OR '.join(moved)})"

    def _after_replaced(self, when: str, op: str, *which: str) -> list[str]:
        """Record the rows that are gone, and then the row itself."""
        ours = f"layout = {self._layout}"
        return [
            f"DELETE FROM headrace_replaced WHERE {ours} AND NOT ({when} AND {self._gone('')});",
            self._tell_replaced(ours, "r.layout"),
            *self._tell(f"{self._next} + {_count(ours)})", op, *which),
            f"DELETE FROM headrace_replaced WHERE {ours};",
            MOVE_ON,
        ]

    def _tell_replaced(self, these: str, layout: str) -> str:
        order = self._upto("r")
        return (
            f"INSERT INTO headrace_changes (entry, layout, op, at, {VALUES})"
            f" SELECT (SELECT last FROM headrace_state)"
            f" + {_count(these)} AND {self._upto('o')} <= {order}),"
            f" {layout}, CASE r.part WHEN 0 THEN 'D' ELSE '+' END, {NOW}, {VALUES}"
            f" FROM headrace_replaced AS r WHERE r.{these} ORDER BY {order.strip('()')};"
        )

    def _upto(self, row: str) -> str:
        """What rows that were set aside are ordered by; all parts of one come together."""
        if len(self._columns) <= WIDTH:
            return f"{row}.rowid"
        keys = [f"{row}.k{number}" for number, _ in enumerate(self._identity)]
        return f"({', '.join(keys)}, {row}.part)"

    def _gone(self, row: str) -> str:
        """Whether a row that was set aside has been deleted."""
        identity = list(enumerate(self._identity))
        taken = _all([f"NEW.{name} = {row}k{number}" for number, name in identity])
        return f"({taken} OR {self._absent(row)})"

    def _absent(self, row: str) -> str:
        identity = list(enumerate(self._identity))
        if not row and {f"k{number}" for number, _ in identity} & self._lower:
            row = "headrace_replaced."  # for the table has such columns too
        there = _all([f"t.{name} = {row}k{number}" for number, name in identity])
        return f"NOT EXISTS (SELECT 1 FROM {self._table} AS t WHERE {there})"


class _NestedTriggers(_Triggers):
    """Of a table that is written to between its own BEFORE and AFTER triggers.

    An inner write must not clear what an outer one has set aside, and no trigger knows which it is.
    So rows stay set aside, as they are now, until they are gone; the oldest are forgotten.
    Besides them `headrace_replaced` has, under layouts of its own:

        <number>d   rows whose deletion an inner trigger has recorded: the outer one shall not
        <number>u   before an update, the newest entry (`v0`), where `rewritten`: what a foreign key
                    does to the updated row is recorded first. That entry gets the old row of the
                    update, and stands for both.
    """

    def __init__(self, shape: SqliteShape, layout: int) -> None:
        super().__init__(shape, layout)
        self._ours = f"layout = {layout}"
        self._leaving = f"layout = -{layout}"
        self._recorded = f"layout = '{layout}d'"
        self._noted = f"layout = '{layout}u'"
        self._keys = ", ".join(f"k{number}" for number in range(len(self._identity)))
        self._old = self._is("OLD")

    def _is(self, which: str) -> str:
        """Whether what is set aside has the identity of the row."""
        return _all([f"{which}.{name} = k{number}" for number, name in enumerate(self._identity)])

    def _set_aside(self, but: str) -> list[str]:
        parts = len(_parts(self._columns))
        oldest = f"(SELECT max(rowid) FROM headrace_replaced) - {KEPT * parts}"
        these = f"layout IN ({self._layout}, '{self._layout}d', '{self._layout}u')"
        statements = [f"DELETE FROM headrace_replaced WHERE {these} AND rowid <= {oldest};"]
        if parts > 1:
            whole = self._first_part("1")
            statements.append(
                f"DELETE FROM headrace_replaced WHERE {self._ours} AND part > 0 AND NOT {whole};"
            )
        return statements + super()._set_aside(but)[1:]

    def _is_known(self, number: int) -> bool:
        return True

    def _first_part(self, condition: str) -> str:
        same = _all([f"o.k{n} = headrace_replaced.k{n}" for n in range(len(self._identity))])
        return (
            f"EXISTS (SELECT 1 FROM headrace_replaced AS o WHERE o.{self._ours} AND o.part = 0"
            f" AND {same} AND {condition})"
        )

    def _updating(self) -> list[str]:
        statements = super()._updating()
        if self._shape.rewritten:
            olds = ", ".join(f"OLD.{name}" for name in self._identity)
            statements.append(
                f"INSERT INTO headrace_replaced (layout, {self._keys}, v0)"
                f" SELECT '{self._layout}u', {olds}, last FROM headrace_state;"
            )
        return statements

    def _inserted(self) -> list[str]:
        return [
            *self._take(self._gone("")),
            *self._tell_next("I", "NEW"),
            f"DELETE FROM headrace_replaced WHERE {self._leaving}"
            f" OR {self._recorded} AND {self._is('NEW')};",
            MOVE_ON,
        ]

    def _updated(self, moved: str) -> list[str]:
        gone = f"{moved} AND NOT ({self._old}) AND {self._gone('')}"
        rewritten = self._shape.rewritten
        if rewritten:
            gone = f"({gone} OR {self._old} AND {self._is_another()})"
        return [
            *self._take(gone),
            *self._follow(),
            *(self._join_inner(moved) if rewritten else []),
            *self._tell_next("U", "OLD", "NEW"),
            *([f"DELETE FROM headrace_replaced WHERE {moved} AND {self._note()};"] * rewritten),
            *self._let_go("NEW"),
            MOVE_ON,
        ]

    def _deleted(self) -> list[str]:
        return [
            f"DELETE FROM headrace_replaced WHERE {self._ours} AND {self._old};",
            *self._take(self._absent("")),
            *self._tell_next("D", "OLD"),
            *self._let_go("OLD"),
            MOVE_ON,
        ]

    def _take(self, gone: str) -> list[str]:
        return [
            f"UPDATE headrace_replaced SET layout = -{self._layout} WHERE {self._ours} AND {gone};",
            self._tell_replaced(self._leaving, str(self._layout)),
        ]

    def _tell_next(self, op: str, *which: str) -> list[str]:
        return self._tell(f"{self._next} + {_count(self._leaving)})", op, *which)

    def _let_go(self, which: str) -> list[str]:
        return [
            f"DELETE FROM headrace_replaced WHERE {self._recorded} AND {self._is(which)};",
            f"INSERT INTO headrace_replaced (layout, {self._keys})"
            f" SELECT '{self._layout}d', {self._keys} FROM headrace_replaced"
            f" WHERE {self._leaving} AND part = 0 AND NOT ({self._is(which)});",
            f"DELETE FROM headrace_replaced WHERE {self._leaving};",
        ]

    def _follow(self) -> list[str]:
        """Keep what is set aside of the row as it is now."""
        keys = [f"k{number} = NEW.{name}" for number, name in enumerate(self._identity)]
        there = _all([f"s.{name} = NEW.{name}" for name in self._identity])
        statements = []
        for at, part in enumerate(_parts(self._columns)):
            values = [
                f"v{n} = (SELECT (SELECT s.{column} FROM {self._table} AS s WHERE {there})"
                f" FROM {self._nulls('s', [column])})"
                for n, column in enumerate(part)
            ]
            statements.append(
                f"UPDATE headrace_replaced SET {', '.join([*keys, *values])}"
                f" WHERE {self._ours} AND part = {at} AND {self._old};"
            )
        return statements

    def _unless(self, op: str) -> str:
        if op == "D":
            recorded = f"SELECT 1 FROM headrace_replaced WHERE {self._recorded} AND {self._old}"
            return f"NOT EXISTS ({recorded})"
        return f"{self._inner()} IS NULL" if op == "U" and self._shape.rewritten else ""

    # -- updates that a foreign key's action goes on from ---------------------------------------

    def _is_another(self) -> str:
        """Whether the row that was set aside is not the one that has its identity by now."""
        part, *_ = _parts(self._columns)
        same = [f"o.v{n} IS {self._value('OLD', column)}" for n, column in enumerate(part)]
        return self._first_part(f"NOT ({_all(same)})")

    def _note(self) -> str:
        newest = f"(SELECT max(rowid) FROM headrace_replaced WHERE {self._noted} AND {self._old})"
        return f"rowid = {newest}"

    def _join_inner(self, moved: str) -> list[str]:
        """Give the old row to the entry that goes on from the new one."""
        part, *_ = _parts(self._columns)
        same = [f"c.v{n} IS {self._value('NEW', column)}" for n, column in enumerate(part)]
        inner = (
            f"(SELECT min(c.entry) FROM headrace_changes AS c"
            f" WHERE c.entry > headrace_replaced.v0 AND c.{self._ours} AND c.op IN ('U', 'D')"
            f" AND {_all(same)})"
        )
        statements = [
            f"UPDATE headrace_replaced SET v1 = {inner} WHERE {moved} AND {self._note()};"
        ]
        for at, columns in enumerate(_parts(self._columns)):
            olds = [f"v{n} = {self._value('OLD', column)}" for n, column in enumerate(columns)]
            statements.append(
                f"UPDATE headrace_changes SET {', '.join(olds)}"
                f" WHERE entry = {self._inner()} + {at};"
            )
        return statements

    def _inner(self) -> str:
        return f"(SELECT v1 FROM headrace_replaced WHERE {self._note()})"


class _FormerTriggers(_Triggers):
    _next = ""

    def __init__(self, shape: SqliteShape, layout: int) -> None:
        super().__init__(shape, layout)
        self._loose = set()

    def _after_replaced(self, when: str, op: str, *which: str) -> list[str]:
        order = ", ".join(f"r.k{number}" for number, _ in enumerate(self._identity))
        return [
            f"INSERT INTO headrace_changes (layout, op, at, {VALUES})"
            f" SELECT r.layout, CASE r.part WHEN 0 THEN 'D' ELSE '+' END, {NOW}, {VALUES}"
            f" FROM headrace_replaced AS r WHERE r.layout = {self._layout} AND {when}"
            f" AND {self._gone('r.')} ORDER BY {order}, r.part;",
            f"DELETE FROM headrace_replaced WHERE layout = {self._layout};",
            *self._tell("", op, *which),
            MOVE_ON,
        ]


def _parts(values: Sequence[_V]) -> list[Sequence[_V]]:
    return [values[at : at + WIDTH] for at in range(0, len(values), WIDTH)]


def _count(these: str) -> str:
    """The number of rows that are set aside, so far without the bracket that closes it."""
    return f"(SELECT count(*) FROM headrace_replaced AS o WHERE o.{these}"


def _collated(collation: str) -> str:
    return "" if collation == "BINARY" else f" COLLATE {quoted(collation)}"


def _all(conditions: Sequence[str]) -> str:
    return " AND ".join(conditions)


def drop(name: str) -> str:
    """The statement that takes a trigger away."""
    return f"DROP TRIGGER IF EXISTS main.{quoted(name)}"
