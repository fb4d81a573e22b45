"""The tables of a stream: how their rows are read, and what DDL makes of them.

What a table's columns are is known by position: what the table map itself has counts first, and
what it leaves out comes from the catalogue as it was read at the snapshot and after each DDL.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ...change.cascade import acts
from ...change.columns import schema_payload
from ...change.event import Op, Table
from ...errors import DecodeError
from .. import Register
from . import follow
from .catalog import ServerIdentity
from .decode.absent import ColumnDefaults
from .decode.alterations import Alteration
from .decode.columns import ColumnType, DeclaredColumn, MappedColumn, columns_of, type_text
from .decode.events import TableMap
from .decode.path import TablePath
from .decode.rows import BinlogRowDecoder, Row
from .decode.statements import DdlStatement, Effect, Verb
from .keys import KeyOrder, UnreadKeys
from .resume import BinlogOffset, DeclaredTable, MysqlResume, MysqlTableSnapshot, packed
from .settings import ANNOTATIONS

# Columns that MySQL makes for an index on an expression, and MariaDB for a unique one on texts.
_hidden = re.compile(r"!hidden!|DB_ROW_HASH_\d+$").match

T = TypeVar("T")
TableEvent = tuple[Op, Table, dict[str, Any]]
"""A change that is not about a row: operation, table, content."""


class TableDescriber(Protocol):
    """Describes tables as they are now: the catalog does."""

    def server(self) -> ServerIdentity:
        """The identity of the server."""
        ...

    def declared(self, schema: str, name: str) -> DeclaredTable | None:
        """A table as it is now; None: there is none."""
        ...

    def table_of(
        self, schema: str, name: str, columns: list[tuple[str, str]], declared: DeclaredTable
    ) -> Table:
        """A table with these columns, and the key and foreign keys that it is declared with."""
        ...


class TablesState(msgspec.Struct, frozen=True):
    """What the resume keeps of the tables. Replaced, never altered."""

    snapshots: dict[TablePath, MysqlTableSnapshot]
    errored: dict[TablePath, str]
    versions: dict[TablePath, int]
    former: tuple[TablePath, ...]
    catalogue: bytes
    pending_ddl: dict[TablePath, list[dict[str, str]]]

    @property
    def to_snapshot(self) -> bool:
        """Whether a table has rows left to read."""
        return any(not progress.done for progress in self.snapshots.values())


class MappedTable(msgspec.Struct, frozen=True):
    """How the rows after a table map are read."""

    path: TablePath
    table: Table | None = None  # None: not captured
    rows: BinlogRowDecoder | None = None  # None: passed over
    annotates: bool = False
    unread: UnreadKeys | None = None  # whose changes do not count; None: all do


class CapturedTables:
    """Which tables count, and how to read each."""

    def __init__(
        self,
        catalog: TableDescriber,
        register: Register,
        resume: MysqlResume,
        *,
        wants: Callable[[str, str], bool],
        named: bool,
        stops: bool = False,
    ) -> None:
        self._catalog = catalog
        self._register = register
        self._wants = wants
        self._named = named  # whether table maps have names; looked at again with each
        self._stops = stops  # at a statement that rewrites rows, instead of a new snapshot
        self._declared = resume.declared()
        # Tables whose columns are known for certain once the stream has come to `read_at`.
        self.ahead = {path for path, each in self._declared.items() if _is_ahead(each)}
        self._used: set[TablePath] = set()  # tables of which rows were read as they are declared
        self._computing = follow.computing(self._declared)
        self._readings: dict[bytes, MappedTable] = {}
        self._latest: dict[TablePath, Table] = {}  # as each was described last
        self.state = TablesState(
            resume.snapshots,
            resume.errored,
            resume.versions,
            resume.former,
            resume.catalogue,
            resume.pending_ddl,
        )

    @property
    def folds(self) -> bool:
        """Whether the server keeps names in small letters."""
        return self._catalog.server().folds

    def known(self, content: bytes) -> MappedTable | None:
        """The reading for a table map that was there before, by all that follows its number."""
        return self._readings.get(content)

    def mapped(self, event: TableMap, offset: BinlogOffset) -> tuple[MappedTable, list[TableEvent]]:
        """How to read what a table map announces there, and the events that come first."""
        path = TablePath(event.database, event.table)
        if event.columns and path in self.state.snapshots:
            self._named = event.columns[0].name is not None
        events: list[TableEvent] = []
        if event.table == ANNOTATIONS:
            reading = self._annotations(event, path)
        elif not self.counts(path):
            reading = MappedTable(path)
        else:
            reading, events = self._captured(event, path, offset)
        self._readings[event.content] = reading
        return reading, events

    def cannot_read(self, path: TablePath, reason: str) -> None:
        """Put a table into the errored state."""
        self._set(errored=self.state.errored | {path: reason})

    def _captured(
        self, event: TableMap, path: TablePath, offset: BinlogOffset
    ) -> tuple[MappedTable, list[TableEvent]]:
        try:
            table, types = self._described(event, path)
        except DecodeError as error:
            if path not in self.state.errored:
                self.cannot_read(path, str(error))
            return MappedTable(path, self._last_known(path)), []
        except _AnotherTable:
            self._rewritten(path, _NOT_FOLLOWED)
            return MappedTable(path, self._last_known(path) if self._stops else None), []
        table = self._latest[path] = self._register(table)
        self._used.add(path)
        events: list[TableEvent] = []
        later = self.state.pending_ddl.get(path, [])
        if self.state.versions.get(path) != table.version or later:
            self._set(
                versions=self.state.versions | {path: table.version},
                pending_ddl=_left_out(self.state.pending_ddl, path),
            )
            events += [(Op.SCHEMA, table, schema_payload(table) | ddl) for ddl in later or [{}]]
        if path in self.state.former:
            events.append(self._forgotten(path, table))
        rows = None
        if path not in self.state.errored:
            rows = BinlogRowDecoder(table, types, self._defaults(path, offset))
        return MappedTable(path, table, rows, unread=self._unread(path, table)), events

    def _defaults(self, path: TablePath, offset: BinlogOffset) -> Callable[[], ColumnDefaults]:
        declared = self._declared[path]
        mariadb = self._catalog.server().mariadb
        # Without a character set it was stored before defaults were.
        current = declared.read_at <= offset and bool(declared.charset)
        return functools.cache(
            lambda: ColumnDefaults.of(declared.there, mariadb=mariadb, current=current)
        )

    def _unread(self, path: TablePath, table: Table) -> UnreadKeys | None:
        left = self.state.snapshots[path].left
        order = KeyOrder.of(self._declared[path]) if left else None
        return None if order is None else UnreadKeys(table, order, left)

    def counts(self, path: TablePath) -> bool:
        """Whether what happens to a table's rows is captured."""
        progress = self.state.snapshots.get(path)
        return progress is not None and progress.begun

    def begin_anew(self, path: TablePath) -> None:
        """Take the snapshot of a table from its first row."""
        self._track(path, MysqlTableSnapshot(replaces=True))

    def _described(self, event: TableMap, path: TablePath) -> tuple[Table, list[ColumnType]]:
        declared = self._declared.get(path) or DeclaredTable(())
        expect_no_history(declared)
        shown = event.columns
        named = bool(shown) and shown[0].name is not None
        if len(shown) == len(declared.columns) + declared.hidden:
            shown = shown[: len(declared.columns)]
        try:
            if declared.followed and named:
                raise DecodeError("the catalogue is of another time")
            types = list(columns_of(shown, declared.columns))
            types += [_unshown(each) for each in event.columns[len(shown) :]]
            columns = [(column.name, column.type) for column in declared.columns]
        except DecodeError:
            if not named:
                raise
            # The table map is of another time than the catalogue, and has enough by itself.
            types = [_merged(mapped, declared) for mapped in event.columns]
            columns = [_text(mapped, declared) for mapped in event.columns]
        columns = [(name, kind) for name, kind in columns if not _hidden(name)]
        if named:
            declared = self._as_mapped(path, declared, columns, event)
        table = self._catalog.table_of(event.database, event.table, columns, declared)
        return table, types

    def _as_mapped(
        self,
        path: TablePath,
        declared: DeclaredTable,
        columns: list[tuple[str, str]],
        event: TableMap,
    ) -> DeclaredTable:
        """A table as a table map shows it, which is of the stream's place."""
        keys = [each for each in event.columns if each.key is not None]
        key = tuple(str(each.name) for each in sorted(keys, key=lambda each: each.key or 0))
        found = follow.mapped(declared, columns, key)
        if found is None:
            raise _AnotherTable
        if found is not declared:
            self._declare(path, found)
        return found

    def _annotations(self, event: TableMap, path: TablePath) -> MappedTable:
        schemas = {known.schema for known in self.state.snapshots}
        if event.database not in schemas:
            return MappedTable(path)
        if path not in self._declared:
            declared = self._catalog.declared(event.database, event.table)
            self._declared = self._declared | {path: declared or DeclaredTable(())}
        try:
            table, types = self._described(event, path)
        except (DecodeError, _AnotherTable):
            return MappedTable(path)
        return MappedTable(path, table, BinlogRowDecoder(table, types), annotates=True)

    # -- DDL ------------------------------------------------------------------------------------

    def defined(self, statement: DdlStatement, sql: str, end: BinlogOffset) -> list[TableEvent]:
        """What a statement makes of the tables; `end`: where it ends in the binary log."""
        if not statement.effects and not statement.drops_schema:
            return []
        ddl = {"ddl_type": statement.kind, "ddl_command": sql}
        events: list[TableEvent] = []
        if statement.drops_schema:
            for path in [
                each for each in self.state.snapshots if each.schema == statement.drops_schema
            ]:
                events += self._dropped(path, ddl)
        if self._stayed(statement):
            (effect,) = statement.effects
            self.begin_anew(effect.path)
            return []
        for effect in statement.effects:
            events += self._effect(effect, ddl, end)
        return events

    def _stayed(self, ddl: DdlStatement) -> bool:
        """Whether a table may be there still: MariaDB logs the RENAME of a temporary one alike.

        The same is seen where it went and came back since; a new snapshot is right for both.
        """
        if len(ddl.effects) != 1 or ddl.effects[0].to is None:
            return False
        path, to = ddl.effects[0].path, ddl.effects[0].to
        progress = self.state.snapshots.get(path)
        if progress is None or not (progress.begun or progress.replaces):
            return False
        return self._catalog.declared(*path) is not None and self._catalog.declared(*to) is None

    def _effect(self, effect: Effect, ddl: dict[str, Any], end: BinlogOffset) -> list[TableEvent]:
        if effect.path.table == ANNOTATIONS:
            self._declare(effect.path, None)
            return []
        path = effect.path
        match effect.verb:
            case Verb.CREATE | Verb.REPLACE:
                return self._created(effect, ddl, end)
            case Verb.ALTER | Verb.INDEX:
                return self._altered(effect, ddl, end)
            case Verb.DROP:
                return self._dropped(path, ddl)
            case Verb.RENAME:
                return self._renamed(effect, ddl)
            case Verb.TRUNCATE:
                return self._truncated(path, ddl)

    def _created(self, effect: Effect, ddl: dict[str, Any], end: BinlogOffset) -> list[TableEvent]:
        path = effect.path
        progress = self.state.snapshots.get(path)
        if not self._wants(effect.path.schema, effect.path.table):
            return []
        if progress is not None and not progress.begun:
            return []  # what it holds is in the snapshot that is to come
        if progress is not None and effect.maybe:
            there = msgspec.structs.replace(effect, alteration=Alteration())
            return self._altered(there, ddl, end)
        events = self._dropped(path, ddl) if progress is not None else []
        now = self._catalog.declared(effect.path.schema, effect.path.table)
        late = now is None or now.read_at != end
        # What its foreign keys do is known of the catalogue alone.
        if effect.loses or (effect.alteration.acting and late):
            self._appeared(path)
            return events
        # A new table is empty, so it needs no snapshot: its rows come in the stream.
        self._track(path, MysqlTableSnapshot(begun=True, done=True))
        related = effect.alteration.related
        declared = now and follow.created(now, end, keyless=effect.keyless, related=related)
        self._declare(path, declared)
        if path in self.state.former and (table := self._now(effect.path)) is not None:
            events.append(self._forgotten(path, table))
        return events + self._schema_events(effect, ddl, end)

    def _forgotten(self, path: TablePath, table: Table) -> TableEvent:
        """Rows of an earlier table of the name are in the log: these are none of the new one's."""
        self._set(former=tuple(each for each in self.state.former if each != path))
        return Op.TRUNCATE, table, {"snapshot": True, "relations": []}

    def _altered(self, effect: Effect, ddl: dict[str, Any], end: BinlogOffset) -> list[TableEvent]:
        path = effect.path
        progress = self.state.snapshots.get(path)
        if progress is None or not progress.begun:
            return []
        known = self._declared.get(path) or DeclaredTable(())
        misread = known.read_at >= end and path in self._used and not self._named
        now = self._catalog.declared(effect.path.schema, effect.path.table)
        self._declare(path, follow.altered(known, now, effect.alteration, end))
        late = now is None or now.read_at != end
        reason = _rewrites(effect, known) or (_acts_now(effect, known) if late else "")
        # One snapshot shows a table either before an ALTER TABLE, which the catalogue may show
        # early, or behind.
        other = now is not None and not known.like(now)
        if progress.left and (effect.verb is Verb.ALTER or reason or other):
            self.begin_anew(path)
        elif reason:
            self._rewritten(path, reason)
        elif misread and effect.alteration.changes_columns:
            self.cannot_read(path, _TWICE_ALTERED)
        renamed = effect.alteration.renamed
        events = self._references_follow(path, path, renamed) if renamed else []
        return events + self._schema_events(effect, ddl, end)

    def _rewritten(self, path: TablePath, reason: str) -> None:
        """Rows have other values than those in the log, or may have."""
        if path in self.state.errored:
            return  # only a snapshot that somebody asks for heals it
        if self._stops:
            self.cannot_read(path, f"{reason} (on_rewrite: stop); `headrace snapshot` restores it")
        else:
            self.begin_anew(path)

    def settled_at(self, offset: BinlogOffset) -> list[TableEvent]:
        """What is certain of tables' columns now that the stream has come to this place."""
        events: list[TableEvent] = []
        for path in [each for each in self.ahead if self._declared[each].read_at <= offset]:
            found = follow.reached(self._declared[path])
            if found is None:
                self._rewritten(path, _NOT_FOLLOWED)
                self.ahead.discard(path)
                continue
            self._declare(path, found)
            events += self._settled(path)
        return events

    def _settled(self, path: TablePath) -> list[TableEvent]:
        before, later = self.state.versions.get(path), self.state.pending_ddl.get(path, [])
        table = self._now(path) if self.counts(path) else None
        if table is None or (table.version == before and not later):
            return []
        self._set(pending_ddl=_left_out(self.state.pending_ddl, path))
        return [(Op.SCHEMA, table, schema_payload(table) | each) for each in later or [{}]]

    def _schema_events(
        self, effect: Effect, ddl: dict[str, Any], end: BinlogOffset
    ) -> list[TableEvent]:
        """A table's columns after a statement, where they are known; else the next row shows them.

        What the catalogue shows may be of a later statement, unless the binary log ends here.
        """
        path = effect.path
        declared = self._declared.get(path)
        certain = declared is not None and declared.read_at == end
        before = self.state.versions.get(path)
        unknown = declared is None or any(not each.type for each in declared.there)
        if not certain and (self._named or unknown):
            if effect.verb is not Verb.INDEX:
                later = [*self.state.pending_ddl.get(path, []), ddl]
                self._set(pending_ddl=self.state.pending_ddl | {path: later})
            return []
        table = self._now(effect.path)
        if table is None or (effect.verb is Verb.INDEX and table.version == before):
            return []
        later = [*self.state.pending_ddl.get(path, []), ddl]
        self._set(pending_ddl=_left_out(self.state.pending_ddl, path))
        return [(Op.SCHEMA, table, schema_payload(table) | each) for each in later]

    def _dropped(self, path: TablePath, ddl: dict[str, Any]) -> list[TableEvent]:
        progress = self.state.snapshots.get(path)
        if progress is None:
            return []
        rows_in_log = progress.begun or progress.replaces
        table = self._last_known(path) if rows_in_log else None
        self._forget(path)
        if table is not None:
            return [(Op.SCHEMA, table, ddl | {"dropped": True})]
        if rows_in_log:
            self._set(former=(*self.state.former, path))
        return []

    def _renamed(self, effect: Effect, ddl: dict[str, Any]) -> list[TableEvent]:
        assert effect.to is not None
        events = self._dropped(effect.path, ddl)
        events += self._references_follow(effect.path, effect.to, {})
        if self._wants(effect.to.schema, effect.to.table):
            self._appeared(effect.to)
        return events

    def _references_follow(
        self, path: TablePath, to: TablePath, renamed: Mapping[str, str]
    ) -> list[TableEvent]:
        """Foreign keys name a table by its new name, and no statement says so."""
        events: list[TableEvent] = []
        for child, declared in list(self._declared.items()):
            found = follow.with_parent(declared, path, to, renamed)
            if found != declared:
                self._declare(child, found)
                events += self._settled(child)
        return events

    def foreign_keys_off(self, path: TablePath) -> None:
        """Rows of a table were changed, and those that name them stayed as they are."""
        for child in follow.dependents(self._declared, [path]):
            if self.counts(child):
                self.begin_anew(child)

    def recomputed_by(self, path: TablePath, rows: Sequence[Row]) -> list[TablePath]:
        """Tables that have other generated values behind a change of another one's rows."""
        if path not in self._computing:
            return []
        columns, children = self._computing[path]
        if not any(_renames(row, columns) for row in rows):
            return []
        return [child for child in children if self.counts(child)]

    def _appeared(self, path: TablePath) -> None:
        """A table is there with rows that are in the log under another name, or nowhere."""
        progress = self.state.snapshots.get(path)
        # A snapshot that stands before the statement may have read it under this name.
        known = progress is not None and (progress.replaces or progress.begun)
        replaces = path in self.state.former or known
        former = tuple(each for each in self.state.former if each != path)
        self._set(former=former)
        self._track(path, MysqlTableSnapshot(replaces=replaces))

    def _truncated(self, path: TablePath, ddl: dict[str, Any]) -> list[TableEvent]:
        progress = self.state.snapshots.get(path)
        table = self._last_known(path)
        if progress is None or not progress.begun or table is None:
            return []
        emptied = {"cascade": False, "restart_identity": True, "relations": []}
        return [(Op.TRUNCATE, table, emptied | ddl)]

    def _now(self, path: TablePath) -> Table | None:
        """A table as the catalogue shows it, in the log's version; None: nothing is known."""
        declared = self._declared.get(path)
        if declared is None or not declared.columns:
            return None
        columns = [(column.name, column.type) for column in declared.there]
        table = self._catalog.table_of(path.schema, path.table, columns, declared)
        table = self._latest[path] = self._register(table)
        self._set(versions=self.state.versions | {path: table.version})
        return table

    def _last_known(self, path: TablePath) -> Table | None:
        if path in self._latest:
            return self._latest[path]
        return self._now(path)

    def _forget(self, path: TablePath) -> None:
        self._latest.pop(path, None)
        self._declare(path, None)
        self._set(
            snapshots=_left_out(self.state.snapshots, path),
            errored=_left_out(self.state.errored, path),
            versions=_left_out(self.state.versions, path),
            pending_ddl=_left_out(self.state.pending_ddl, path),
        )

    def _declare(self, path: TablePath, declared: DeclaredTable | None) -> None:
        kept = _left_out(self._declared, path)
        self._used.discard(path)
        self._declared = kept if declared is None else kept | {path: declared}
        self._computing = follow.computing(self._declared)
        self.ahead.discard(path)
        if declared is not None and _is_ahead(declared):
            self.ahead.add(path)
        self._set(catalogue=packed(self._declared))

    def _track(self, path: TablePath, snapshot: MysqlTableSnapshot) -> None:
        self._set(snapshots=self.state.snapshots | {path: snapshot})

    def _set(self, **changed: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changed)
        # Whatever was found out about a table map may not hold any more.
        self._readings = {}


class _AnotherTable(Exception):
    """A table map has other columns than DDL has left."""


_NOT_FOLLOWED = "it has other columns than the statements that were read gave it"
_TWICE_ALTERED = (
    "its columns were altered again before the first change of them was read, and the binary log "
    "does not name columns (binlog_row_metadata is not FULL)"
)


def _renames(row: Row, columns: frozenset[str]) -> bool:
    """Whether a row goes, or may have other values in these columns."""
    _, before, _, after, changed, unchanged = row
    if before is None or after is None:
        return after is None
    return not columns.issubset(unchanged) if changed is None else not columns.isdisjoint(changed)


def _is_ahead(declared: DeclaredTable) -> bool:
    return bool(declared.followed) or not declared.exact


def _rewrites(effect: Effect, known: DeclaredTable) -> str:
    """Why a statement may have given rows other values, or taken some away; "": it has not."""
    if effect.loses:
        return "rows may have come or gone with a statement"
    alteration = effect.alteration
    unnumbered = any(not column.number for column in known.there)
    if unnumbered and (alteration.dropped or alteration.renamed):
        return "which of its columns went and which stayed is not known"
    if alteration.modified and not known.exact:
        return "the types that its columns had are not known"
    return alteration.rewrites(known.there, known.key, known.charset if known.exact else "")


def _acts_now(effect: Effect, known: DeclaredTable) -> str:
    """Why a statement leaves open what foreign keys do from then on; "": it does not."""
    alteration = effect.alteration
    if alteration.acting or (alteration.related and any(acts(each) for each in known.references)):
        return "it has other foreign keys, and what they do is not known"
    return ""


def _left_out(known: dict[TablePath, T], path: TablePath) -> dict[TablePath, T]:
    return {each: value for each, value in known.items() if each != path}


def expect_no_history(declared: DeclaredTable) -> None:
    """DecodeError for a table whose old rows would look like new ones."""
    if declared.versioned:
        raise DecodeError(
            "it keeps its history (WITH SYSTEM VERSIONING), which the binary log shows as rows of "
            "the table itself",
            hint="ALTER TABLE … DROP SYSTEM VERSIONING; then run `headrace snapshot SOURCE TABLE`.",
        )


def _unshown(mapped: MappedColumn) -> ColumnType:
    named = msgspec.structs.replace(mapped, name=mapped.name or "!hidden!", unsigned=False)
    return columns_of((named,), None)[0]


def _fitting(mapped: MappedColumn, declared: DeclaredTable) -> DeclaredColumn | None:
    """The declared column of the same name, if it has the same type."""
    for column in (*declared.followed, *declared.columns):
        if column.name == mapped.name and column.type:
            try:
                columns_of((mapped,), (column,))
            except DecodeError:
                continue
            return column
    return None


def _merged(mapped: MappedColumn, declared: DeclaredTable) -> ColumnType:
    column = _fitting(mapped, declared)
    return columns_of((mapped,), None if column is None else (column,))[0]


def _text(mapped: MappedColumn, declared: DeclaredTable) -> tuple[str, str]:
    column = _fitting(mapped, declared)
    return str(mapped.name), type_text(mapped) if column is None else column.type
