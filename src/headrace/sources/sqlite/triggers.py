"""The triggers of a table, as SQL. No I/O.

    BEFORE INSERT, UPDATE   sets aside the rows that the new one conflicts with
    AFTER INSERT, UPDATE    of those, records the ones that are gone: REPLACE has deleted them, and
                            without recursive_triggers nobody else does; then records the row
    AFTER DELETE            records the row

Values are stored as they are, of whatever type, so nothing is lost or needs a function that some
build of SQLite lacks. A row of more than 32 values goes on in further entries, marked `+`.
Of several triggers for one event SQLite runs the newest first. Ours must be the newest: a trigger
of the application that updates the same row would otherwise come before the row itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from .connections import quoted
from .schema import OURS, SqliteShape, Unique

WIDTH = 32  # values in an entry
KEYS = 8  # columns of the longest key that a table without rowid may have

VALUES = ", ".join(f"v{number}" for number in range(WIDTH))
NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
MOVE_ON = "UPDATE headrace_state SET last = (SELECT max(entry) FROM headrace_changes);"

ANNOTATE = f"""CREATE TRIGGER headrace_annotate AFTER INSERT ON headrace_annotations BEGIN
  INSERT INTO headrace_changes (layout, op, at, v0) VALUES (0, 'N', {NOW}, NEW.metadata);
  DELETE FROM headrace_annotations;
  {MOVE_ON}
END"""


def triggers(shape: SqliteShape, layout: int) -> dict[str, str]:
    """The triggers of a table by name, in the order to create them in."""
    return {
        name: f"CREATE TRIGGER {name} {event} ON {quoted(shape.name)}{when} BEGIN\n  "
        + "\n  ".join(body)
        + "\nEND"
        for name, event, when, body in _Triggers(shape, layout).all()
    }


class _Triggers:
    def __init__(self, shape: SqliteShape, layout: int) -> None:
        self._shape = shape
        self._layout = layout
        self._table = quoted(shape.name)
        self._columns = [quoted(column.name) for column in shape.layout.columns]
        self._identity = [quoted(name) for name in shape.identity]

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
        return [*self._tell_replaced("1"), *self._tell("I", self._row("NEW")), MOVE_ON]

    def _updating(self) -> list[str]:
        same = [f"t.{name} IS OLD.{name}" for name in self._identity]
        return self._set_aside(f" AND NOT ({' AND '.join(same)})")

    def _updated(self, moved: str) -> list[str]:
        values = self._row("OLD") + self._row("NEW")
        return [*self._tell_replaced(moved), *self._tell("U", values), MOVE_ON]

    def _deleted(self) -> list[str]:
        conditions = [f"OLD.{name} = k{number}" for number, name in enumerate(self._identity)]
        return [
            f"DELETE FROM headrace_replaced WHERE layout = {self._layout} AND {_all(conditions)};",
            *self._tell("D", self._row("OLD")),
            MOVE_ON,
        ]

    def _row(self, which: str) -> list[str]:
        return [f"{which}.{column}" for column in self._columns]

    def _tell(self, op: str, values: Sequence[str]) -> list[str]:
        statements = []
        for number, part in enumerate(_parts(values)):
            names = ", ".join(f"v{at}" for at in range(len(part)))
            kind = op if number == 0 else "+"
            statements.append(
                f"INSERT INTO headrace_changes (layout, op, at, {names})"
                f" VALUES ({self._layout}, '{kind}', {NOW}, {', '.join(part)});"
            )
        return statements

    # -- rows that REPLACE deletes --------------------------------------------------------------

    def _set_aside(self, but: str) -> list[str]:
        statements = [f"DELETE FROM headrace_replaced WHERE layout = {self._layout};"]
        keys = ", ".join(f"k{number}" for number in range(len(self._identity)))
        these = ", ".join(f"t.{name}" for name in self._identity)
        for number, unique in enumerate(self._shape.uniques):
            for at, part in enumerate(_parts(self._row("t"))):
                names = ", ".join(f"v{n}" for n in range(len(part)))
                known = self._known(at) if number else ""
                statements.append(
                    f"INSERT INTO headrace_replaced (layout, part, {keys}, {names})"
                    f" SELECT {self._layout}, {at}, {these}, {', '.join(part)}"
                    f" FROM {self._table} AS t WHERE {self._conflict(unique)}{but}{known};"
                )
        return statements

    def _known(self, part: int) -> str:
        same = [f"r.k{number} IS t.{name}" for number, name in enumerate(self._identity)]
        return (
            f" AND NOT EXISTS (SELECT 1 FROM headrace_replaced AS r WHERE r.layout ="
            f" {self._layout} AND r.part = {part} AND {_all(same)})"
        )

    def _conflict(self, unique: Unique) -> str:
        if unique.names is not None:
            return _all([f"t.{term}{_collated(c)} = NEW.{term}" for term, c in unique.terms])
        # Over a row that has the names of the table's, an expression means what it means there.
        news = ", ".join(f"NEW.{column} AS {column}" for column in self._columns)
        conditions = [
            f"({term}){_collated(c)} = (SELECT {term} FROM (SELECT {news}))"
            for term, c in unique.terms
        ]
        keys = ", ".join(self._identity)
        these = ", ".join(f"t.{name}" for name in self._identity)
        found = f"SELECT {keys} FROM {self._table} WHERE {_all(conditions)}"
        return f"{these if len(self._identity) == 1 else f'({these})'} IN ({found})"

    def _moved(self) -> str:
        """Whether an update may meet other rows."""
        names = {quoted(name) for name in self._shape.identity}
        for unique in self._shape.uniques:
            if unique.names is None:
                return "1"
            names |= {quoted(name) for name in unique.names}
        return f"({' OR '.join(f'NEW.{n} IS NOT OLD.{n}' for n in sorted(names))})"

    def _tell_replaced(self, when: str) -> list[str]:
        identity = list(enumerate(self._identity))
        there = _all([f"t.{name} = r.k{number}" for number, name in identity])
        taken = _all([f"NEW.{name} = r.k{number}" for number, name in identity])
        order = ", ".join(f"r.k{number}" for number, _ in identity)
        return [
            f"INSERT INTO headrace_changes (layout, op, at, {VALUES})"
            f" SELECT r.layout, CASE r.part WHEN 0 THEN 'D' ELSE '+' END, {NOW}, {VALUES}"
            f" FROM headrace_replaced AS r WHERE r.layout = {self._layout} AND {when}"
            f" AND ({taken} OR NOT EXISTS (SELECT 1 FROM {self._table} AS t WHERE {there}))"
            f" ORDER BY {order}, r.part;",
            f"DELETE FROM headrace_replaced WHERE layout = {self._layout};",
        ]


def _parts(values: Sequence[str]) -> list[Sequence[str]]:
    return [values[at : at + WIDTH] for at in range(0, len(values), WIDTH)]


def _collated(collation: str) -> str:
    return "" if collation == "BINARY" else f" COLLATE {quoted(collation)}"


def _all(conditions: Sequence[str]) -> str:
    return " AND ".join(conditions)


def drop(name: str) -> str:
    """The statement that takes a trigger away."""
    return f"DROP TRIGGER IF EXISTS main.{quoted(name)}"
