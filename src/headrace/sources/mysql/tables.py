"""The tables of a stream: how their rows are read, and what DDL makes of them.

What a table's columns are is known by position: what the table map itself tells counts first, and
what it leaves out comes from the catalogue as it was read at the copy and after each DDL.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from ...change.event import Op, Table
from ...errors import DecodeError
from .. import Register
from .catalog import Server
from .decode.columns import ColumnType, DeclaredColumn, MappedColumn, columns_of, type_text
from .decode.events import TableMap
from .decode.path import Path
from .decode.rows import Rows
from .decode.statements import Ddl, Effect, Verb
from .resume import Copy, Declared, Place, Resume, packed
from .settings import ANNOTATIONS

# Columns that MySQL makes for an index on an expression, and MariaDB for a unique one on texts.
_hidden = re.compile(r"!hidden!|DB_ROW_HASH_\d+$").match

T = TypeVar("T")
Told = tuple[Op, Table, dict[str, Any]]
"""Something to say that is not about a row."""


class Describes(Protocol):
    """Who knows what tables are now: the catalog."""

    def server(self) -> Server:
        """Who the server is."""
        ...

    def declared(self, schema: str, name: str) -> Declared | None:
        """A table as it is now; None: there is none."""
        ...

    def table_of(
        self, schema: str, name: str, columns: list[tuple[str, str]], declared: Declared
    ) -> Table:
        """A table with these columns, and the key and foreign keys that it is declared with."""
        ...


class State(msgspec.Struct, frozen=True):
    """What the resume keeps of the tables. Replaced, never altered."""

    copies: dict[Path, Copy]
    errored: dict[Path, str]
    versions: dict[Path, int]
    former: tuple[Path, ...]
    catalogue: bytes
    told_later: dict[Path, list[dict[str, str]]]

    @property
    def to_copy(self) -> bool:
        """Whether a table has rows left to read."""
        return any(not copy.done for copy in self.copies.values())


class Reading(msgspec.Struct, frozen=True):
    """How the rows after a table map are read."""

    path: Path
    table: Table | None = None  # None: not captured
    rows: Rows | None = None  # None: passed over
    annotates: bool = False


class Tables:
    """Which tables count, and how to read each."""

    def __init__(
        self,
        catalog: Describes,
        register: Register,
        resume: Resume,
        *,
        wants: Callable[[str, str], bool],
        named: bool,
    ) -> None:
        self._catalog = catalog
        self._register = register
        self._wants = wants
        self._named = named  # whether table maps tell names; looked at again with each
        self._declared = resume.declared()
        self._used: set[Path] = set()  # tables of which rows were read as they are declared
        self._readings: dict[bytes, Reading] = {}
        self._latest: dict[Path, Table] = {}  # as each was described last
        self.state = State(
            resume.copies,
            resume.errored,
            resume.versions,
            resume.former,
            resume.catalogue,
            resume.told_later,
        )

    @property
    def folds(self) -> bool:
        """Whether the server keeps names in small letters."""
        return self._catalog.server().folds

    def known(self, content: bytes) -> Reading | None:
        """The reading for a table map that was there before, by all that follows its number."""
        return self._readings.get(content)

    def mapped(self, event: TableMap) -> tuple[Reading, list[Told]]:
        """How to read what a table map announces, and what has to be said first."""
        path = Path(event.database, event.table)
        if event.columns and path in self.state.copies:
            self._named = event.columns[0].name is not None
        told: list[Told] = []
        if event.table == ANNOTATIONS:
            reading = self._annotations(event, path)
        elif path not in self.state.copies or not self.state.copies[path].begun:
            reading = Reading(path)
        else:
            reading, told = self._captured(event, path)
        self._readings[event.content] = reading
        return reading, told

    def cannot_read(self, path: Path, reason: str) -> None:
        """Put a table into the errored state."""
        self._set(errored=self.state.errored | {path: reason})

    def _captured(self, event: TableMap, path: Path) -> tuple[Reading, list[Told]]:
        try:
            table, types = self._described(event, path)
        except DecodeError as error:
            if path not in self.state.errored:
                self.cannot_read(path, str(error))
            return Reading(path, self._last_known(path)), []
        table = self._latest[path] = self._register(table)
        self._used.add(path)
        told: list[Told] = []
        later = self.state.told_later.get(path, [])
        if self.state.versions.get(path) != table.version or later:
            self._set(
                versions=self.state.versions | {path: table.version},
                told_later=_left_out(self.state.told_later, path),
            )
            told += [(Op.SCHEMA, table, schema(table) | said) for said in later or [{}]]
        if path in self.state.former:
            told.append(self._forgotten(path, table))
        readable = path not in self.state.errored
        return Reading(path, table, Rows(table, types) if readable else None), told

    def _described(self, event: TableMap, path: Path) -> tuple[Table, list[ColumnType]]:
        declared = self._declared.get(path) or Declared(())
        expect_no_history(declared)
        shown = event.columns
        if len(shown) == len(declared.columns) + declared.hidden:
            shown = shown[: len(declared.columns)]
        try:
            types = list(columns_of(shown, declared.columns))
            types += [_unshown(each) for each in event.columns[len(shown) :]]
            columns = [(column.name, column.type) for column in declared.columns]
        except DecodeError:
            if not event.columns or event.columns[0].name is None:
                raise
            # The table map is of another time than the catalogue, and tells enough by itself.
            types = [_merged(mapped, declared) for mapped in event.columns]
            columns = [_text(mapped, declared) for mapped in event.columns]
            keys = [each for each in event.columns if each.key is not None]
            key = tuple(str(each.name) for each in sorted(keys, key=lambda each: each.key or 0))
            declared = msgspec.structs.replace(declared, key=key)
        columns = [(name, kind) for name, kind in columns if not _hidden(name)]
        table = self._catalog.table_of(event.database, event.table, columns, declared)
        return table, types

    def _annotations(self, event: TableMap, path: Path) -> Reading:
        schemas = {known.schema for known in self.state.copies}
        if event.database not in schemas:
            return Reading(path)
        if path not in self._declared:
            declared = self._catalog.declared(event.database, event.table)
            self._declared = self._declared | {path: declared or Declared(())}
        try:
            table, types = self._described(event, path)
        except DecodeError:
            return Reading(path)
        return Reading(path, table, Rows(table, types), annotates=True)

    # -- DDL ------------------------------------------------------------------------------------

    def defined(self, ddl: Ddl, sql: str, end: Place) -> list[Told]:
        """What a statement makes of the tables; `end`: where it ends in the binary log."""
        if not ddl.effects and not ddl.drops_schema:
            return []
        said = {"ddl_type": ddl.kind, "ddl_command": sql}
        told: list[Told] = []
        if ddl.drops_schema:
            for path in [each for each in self.state.copies if each.schema == ddl.drops_schema]:
                told += self._dropped(path, said)
        if self._stayed(ddl):
            (effect,) = ddl.effects
            self._set(copies=self.state.copies | {effect.path: Copy(again=True)})
            return []
        for effect in ddl.effects:
            told += self._effect(effect, said, end)
        return told

    def _stayed(self, ddl: Ddl) -> bool:
        """Whether a table may be there still: MariaDB logs the RENAME of a temporary one alike.

        The same is seen where it went and came back since; a new copy is right for both.
        """
        if len(ddl.effects) != 1 or ddl.effects[0].to is None:
            return False
        path, to = ddl.effects[0].path, ddl.effects[0].to
        copy = self.state.copies.get(path)
        if copy is None or not (copy.begun or copy.again):
            return False
        return self._catalog.declared(*path) is not None and self._catalog.declared(*to) is None

    def _effect(self, effect: Effect, said: dict[str, Any], end: Place) -> list[Told]:
        if effect.path.table == ANNOTATIONS:
            self._declare(effect.path, None)
            return []
        path = effect.path
        match effect.verb:
            case Verb.CREATE | Verb.REPLACE:
                return self._created(effect, said, end)
            case Verb.ALTER | Verb.INDEX:
                return self._altered(effect, said, end)
            case Verb.DROP:
                return self._dropped(path, said)
            case Verb.RENAME:
                return self._renamed(effect, said)
            case Verb.TRUNCATE:
                return self._truncated(path, said)

    def _created(self, effect: Effect, said: dict[str, Any], end: Place) -> list[Told]:
        path = effect.path
        copy = self.state.copies.get(path)
        if not self._wants(effect.path.schema, effect.path.table):
            return []
        if copy is not None and not copy.begun:
            return []  # what it holds is in the copy that is to come
        if copy is not None and effect.maybe:
            return self._altered(effect, said, end)
        told = self._dropped(path, said) if copy is not None else []
        if effect.loses:
            self._appeared(path)
            return told
        # A new table is empty, so it needs no copy: its rows come in the stream.
        self._set(copies=self.state.copies | {path: Copy(begun=True, done=True)})
        self._declare(path, self._catalog.declared(effect.path.schema, effect.path.table))
        if path in self.state.former and (table := self._now(effect.path)) is not None:
            told.append(self._forgotten(path, table))
        return told + self._columns_told(effect, said, end)

    def _forgotten(self, path: Path, table: Table) -> Told:
        """Rows of an earlier table of the name are in the log: these are none of the new one's."""
        self._set(former=tuple(each for each in self.state.former if each != path))
        return Op.TRUNCATE, table, {"snapshot": True, "relations": []}

    def _altered(self, effect: Effect, said: dict[str, Any], end: Place) -> list[Told]:
        path = effect.path
        copy = self.state.copies.get(path)
        if copy is None or not copy.begun:
            return []
        known = self._declared.get(path)
        ahead = known is not None and known.read_at >= end and path in self._used
        if ahead and not self._named:
            self.cannot_read(path, _TWICE_ALTERED)
        before = self._last_known(path) if effect.drops else None
        now = self._catalog.declared(effect.path.schema, effect.path.table)
        self._declare(path, now or known)
        # By another key the rows that are in the log would not be found again.
        if effect.loses or (known is not None and now is not None and known.key != now.key):
            self._set(copies=self.state.copies | {path: Copy(again=True)})
        return self._gone(effect, before, end) + self._columns_told(effect, said, end)

    def _gone(self, effect: Effect, before: Table | None, end: Place) -> list[Told]:
        """A table without the columns that go, where another of the name may be there already.

        Else nobody would learn that the values of the old one have gone.
        """
        path = effect.path
        declared = self._declared.get(path)
        if before is None or declared is None:
            return []
        left = tuple(each for each in before.columns if each.name.lower() not in effect.drops)
        there = {each.name.lower() for each in declared.columns}
        certain = declared.read_at == end and not effect.drops & there
        if certain or len(left) == len(before.columns):
            return []
        table = self._register(msgspec.structs.replace(before, columns=left, version=0))
        self._latest[path] = table
        self._set(versions=self.state.versions | {path: table.version})
        return [(Op.SCHEMA, table, schema(table))]

    def _columns_told(self, effect: Effect, said: dict[str, Any], end: Place) -> list[Told]:
        """A table's columns after a statement, where they are known; else the next row shows them.

        What the catalogue shows may be of a later statement, unless the binary log ends here.
        """
        path = effect.path
        declared = self._declared.get(path)
        certain = declared is not None and declared.read_at == end
        before = self.state.versions.get(path)
        if self._named and not certain:
            if effect.verb is not Verb.INDEX:
                later = [*self.state.told_later.get(path, []), said]
                self._set(told_later=self.state.told_later | {path: later})
            return []
        table = self._now(effect.path)
        if table is None or (effect.verb is Verb.INDEX and table.version == before):
            return []
        later = [*self.state.told_later.get(path, []), said]
        self._set(told_later=_left_out(self.state.told_later, path))
        return [(Op.SCHEMA, table, schema(table) | each) for each in later]

    def _dropped(self, path: Path, said: dict[str, Any]) -> list[Told]:
        copy = self.state.copies.get(path)
        if copy is None:
            return []
        rows_in_log = copy.begun or copy.again
        table = self._last_known(path) if rows_in_log else None
        self._forget(path)
        if table is not None:
            return [(Op.SCHEMA, table, said | {"dropped": True})]
        if rows_in_log:
            self._set(former=(*self.state.former, path))
        return []

    def _renamed(self, effect: Effect, said: dict[str, Any]) -> list[Told]:
        assert effect.to is not None
        told = self._dropped(effect.path, said)
        if self._wants(effect.to.schema, effect.to.table):
            self._appeared(effect.to)
        return told

    def _appeared(self, path: Path) -> None:
        """A table is there with rows that are in the log under another name, or nowhere."""
        copy = self.state.copies.get(path)
        again = path in self.state.former or (copy is not None and copy.again)
        former = tuple(each for each in self.state.former if each != path)
        self._set(copies=self.state.copies | {path: Copy(again=again)}, former=former)

    def _truncated(self, path: Path, said: dict[str, Any]) -> list[Told]:
        copy = self.state.copies.get(path)
        table = self._last_known(path)
        if copy is None or not copy.begun or table is None:
            return []
        emptied = {"cascade": False, "restart_identity": True, "relations": []}
        return [(Op.TRUNCATE, table, emptied | said)]

    def _now(self, path: Path) -> Table | None:
        """A table as the catalogue shows it, in the log's version; None: nothing is known."""
        declared = self._declared.get(path)
        if declared is None or not declared.columns:
            return None
        columns = [(column.name, column.type) for column in declared.columns]
        table = self._catalog.table_of(path.schema, path.table, columns, declared)
        table = self._latest[path] = self._register(table)
        self._set(versions=self.state.versions | {path: table.version})
        return table

    def _last_known(self, path: Path) -> Table | None:
        if path in self._latest:
            return self._latest[path]
        return self._now(path)

    def _forget(self, path: Path) -> None:
        self._latest.pop(path, None)
        self._declare(path, None)
        self._set(
            copies=_left_out(self.state.copies, path),
            errored=_left_out(self.state.errored, path),
            versions=_left_out(self.state.versions, path),
            told_later=_left_out(self.state.told_later, path),
        )

    def _declare(self, path: Path, declared: Declared | None) -> None:
        kept = _left_out(self._declared, path)
        self._used.discard(path)
        self._declared = kept if declared is None else kept | {path: declared}
        self._set(catalogue=packed(self._declared))

    def _set(self, **changed: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changed)
        # Whatever was found out about a table map may not hold any more.
        self._readings = {}


_TWICE_ALTERED = (
    "its columns were altered again before the first change of them was read, and the binary log "
    "does not name columns (binlog_row_metadata is not FULL)"
)


def _left_out(known: dict[Path, T], path: Path) -> dict[Path, T]:
    return {each: value for each, value in known.items() if each != path}


def schema(table: Table) -> dict[str, Any]:
    """What a SCHEMA change says."""
    columns = [
        {"name": column.name, "type": column.type, "key": column.key} for column in table.columns
    ]
    return {"columns": columns}


def expect_no_history(declared: Declared) -> None:
    """DecodeError for a table whose old rows would be told like new ones."""
    if declared.versioned:
        raise DecodeError(
            "it keeps its history (WITH SYSTEM VERSIONING), which the binary log tells as rows of "
            "the table itself",
            hint="ALTER TABLE … DROP SYSTEM VERSIONING; then run `headrace snapshot SOURCE TABLE`.",
        )


def _unshown(mapped: MappedColumn) -> ColumnType:
    named = msgspec.structs.replace(mapped, name=mapped.name or "!hidden!", unsigned=False)
    return columns_of((named,), None)[0]


def _fitting(mapped: MappedColumn, declared: Declared) -> DeclaredColumn | None:
    """The declared column of the same name, if it has the same type."""
    for column in declared.columns:
        if column.name == mapped.name:
            try:
                columns_of((mapped,), (column,))
            except DecodeError:
                return None
            return column
    return None


def _merged(mapped: MappedColumn, declared: Declared) -> ColumnType:
    column = _fitting(mapped, declared)
    return columns_of((mapped,), None if column is None else (column,))[0]


def _text(mapped: MappedColumn, declared: Declared) -> tuple[str, str]:
    column = _fitting(mapped, declared)
    return str(mapped.name), type_text(mapped) if column is None else column.type
