"""What a server has: its event table, and the tables that write their changes to it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import psycopg

from ...change.event import Column, Position, Table
from ...change.path import split_path
from ...errors import DecodeError, PositionLost, SourceError, SourceRefused
from ..postgres.address import classify
from ..postgres.catalog import Catalog, Published
from ..postgres.lookout import present_paths
from ..postgres.looks import TableLook
from ..postgres.snapshot import Point
from .ddl import HERE
from .entries import EventEntry
from .position import EventTablePosition
from .resume import TransactionSnapshot
from .rows import EventRows, EventTableDescription
from .triggers import TriggerTarget

_IDENTITY = """
    SELECT s.system_identifier::text, current_database(),
           -- The control file has that of the last checkpoint, which may be minutes old.
           CASE WHEN pg_is_in_recovery() THEN NULL ELSE
               ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int END
    FROM pg_control_system() s"""

# Every table, or partition, that has triggers of ours; not those that the server has cloned.
_TRIGGERED = """
    SELECT n.nspname, c.relname, c.oid::bigint, {by_row},
           array_agg(t.tgname::text), bool_and(t.tgenabled <> 'D' AND t.tgenabled <> 'R'),
           bool_and(t.tgenabled = 'A' AND clones.odd IS NULL),
           string_agg(format('%%s:%%s:%%s', t.oid, t.xmin, t.tgenabled) || coalesce(clones.odd, ''),
                      ' ' ORDER BY t.tgname)
    FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    -- Of partitions, those that do not fire always, as the whole table's do: by name, which has an
    -- oid in it.
    CROSS JOIN LATERAL (
        SELECT string_agg(format(' %%s:%%s:%%s', k.oid, k.xmin, k.tgenabled), '' ORDER BY k.oid)
        FROM pg_trigger k WHERE k.tgparentid <> 0 AND k.tgname = t.tgname
          AND k.tgfoid = t.tgfoid AND k.tgenabled <> 'A') clones(odd)
    WHERE t.tgparentid = 0 AND starts_with(t.tgname, %s) AND t.tgfoid IN (
        SELECT p.oid FROM pg_proc p JOIN pg_namespace ours ON ours.oid = p.pronamespace
        WHERE ours.nspname = %s)
    GROUP BY n.nspname, c.oid ORDER BY n.nspname, c.relname"""
_BY_ROW = """(c.relkind = 'p' OR EXISTS (
        SELECT FROM pg_inherits i WHERE c.oid IN (i.inhparent, i.inhrelid)))"""
_TRIGGERED = _TRIGGERED.replace("{by_row}", _BY_ROW)
_RECORDED_BY_ROW = f"SELECT {_BY_ROW} FROM pg_class c WHERE c.oid = %s"

# Everything below some tables: plain reads, which show the snapshot of the session.
_LEAVES = """
    WITH RECURSIVE tree(oid, root) AS (
        SELECT unnest(%s::oid[]), unnest(%s::oid[])
        UNION SELECT i.inhrelid, tree.root FROM pg_inherits i JOIN tree ON i.inhparent = tree.oid)
    SELECT tree.oid::bigint, root::bigint FROM tree
    JOIN pg_class c ON c.oid = tree.oid AND c.relispartition"""

# Whoever owns them decides what runs when others write.
_STRANGERS = """
    SELECT r.rolname FROM pg_namespace n
    LEFT JOIN pg_proc p ON p.pronamespace = n.oid AND p.proname IN
        ('emit_cdc_event', 'emit_cdc_events', 'take_turn', 'note_columns', 'told', 'columns_now',
         'as_json', 'json_columns', 'json_of', 'text_of', 'has_own_json', 'row_parts')
    JOIN pg_roles r ON r.oid IN (n.nspowner, p.proowner)
    JOIN pg_roles me ON me.rolname = current_user
    WHERE n.nspname = %s AND NOT r.rolsuper AND r.oid <> me.oid
      -- A superuser is a member of every role, which says nothing.
      AND NOT (pg_has_role(r.oid, 'MEMBER') AND NOT me.rolsuper)
      AND r.oid <> (SELECT datdba FROM pg_database WHERE datname = current_database())
    LIMIT 1"""

# Of values that are stored apart too, without reading them.
_SIZE = "coalesce(octet_length(old), 0) + coalesce(octet_length(new), 0) AS size"

# What a snapshot does not see was open in it, or began later.
_NEWS = """
    FROM (SELECT xid, id FROM {schema}.events WHERE xid = ANY (%(open)s::text[]::xid8[])
          UNION ALL
          SELECT xid, id FROM {schema}.events WHERE xid >= %(after)s::text::xid8) news"""
_NEWS = _NEWS.replace("xid, id", "xid, id, " + _SIZE)

# A dump that is loaded again keeps the installation's name, but makes other tables.
# Whoever disables the triggers that notice removed events writes their rows of the catalog anew.
_STATE = """SELECT installation || '/' || '{schema}.events'::regclass::oid, trimmed::text::bigint,
    (SELECT string_agg(format('%%s:%%s:%%s', t.oid, t.xmin, t.tgenabled), ' ' ORDER BY t.oid)
     FROM pg_trigger t WHERE t.tgrelid = '{schema}.events'::regclass AND NOT t.tgisinternal) guards
    FROM {schema}.state"""

# In this order: what a snapshot sees has been written before, but perhaps not to the disk.
_WAL = """(pg_current_wal_insert_lsn() - '0/0')::bigint,
    pg_current_wal_insert_lsn() <= pg_current_wal_flush_lsn()"""

# Its own commit waits for the disk, and for no standby, whatever the session's setting is.
_FLUSH = """SELECT set_config('synchronous_commit', 'local', true),
                   pg_logical_emit_message(true, 'headrace.heartbeat', '')"""

# All by one snapshot: what was removed is not taken for what never was.
_ANY_NEWS = (
    "SELECT state.*, pg_current_snapshot()::text, EXISTS (SELECT"
    + _NEWS
    + f"), {_WAL} FROM ({_STATE}) AS state"
)

# Whoever has waited for another's row has its own entry after all of the other's: in the order of
# their last entries no transaction comes before one that it has seen.
_TRANSACTIONS = (
    "SELECT xid::text::bigint, max(id), count(*), sum(size)::bigint"
    + _NEWS
    + """
    WHERE pg_visible_in_snapshot(xid, %(target)s::text::pg_snapshot)
    GROUP BY xid HAVING max(id) > %(entry)s ORDER BY max(id)"""
)

_FIELDS = """e.xid::text, e.id, e.turn, e.op, e.relation, e.columns, e.old, e.new, e.annotations,
    (extract(epoch FROM e.at) * 1000000)::bigint"""
_ENTRIES = f"""
    SELECT {_FIELDS}
    FROM unnest(%(xids)s::text[]::xid8[]) WITH ORDINALITY AS t(xid, place)
    JOIN {{schema}}.events e USING (xid) ORDER BY t.place, e.turn, e.id"""
# At least one, and no more than fit: the server sends nothing that is not wanted yet.
_PIECE = f"""
    SELECT {_FIELDS} FROM (
        SELECT *, sum(size) OVER (ORDER BY turn, id) - size AS before FROM (
            SELECT *, {_SIZE} FROM {{schema}}.events
            WHERE xid = %(xid)s::text::xid8 AND (turn, id) > (%(turn)s, %(after)s)
            ORDER BY turn, id LIMIT %(limit)s) part) e
    WHERE before < %(bytes)s ORDER BY turn, id"""
_LAST = f"""
    SELECT {_FIELDS.replace("e.old, e.new", "NULL, NULL")} FROM {{schema}}.events e
    WHERE xid = %(xid)s::text::xid8 AND id = %(last)s"""
_ANNOTATIONS = """
    SELECT annotations FROM {schema}.events
    WHERE xid = %(xid)s::text::xid8 AND annotations IS NOT NULL
    GROUP BY annotations ORDER BY min(id)"""

_TRIM = """
    WITH old AS MATERIALIZED (
        SELECT xid, turn, id FROM {schema}.events WHERE xid < %(before)s::text::xid8
        ORDER BY xid, turn, id LIMIT %(limit)s),
    gone AS (DELETE FROM {schema}.events e USING old
             WHERE e.xid = old.xid AND e.turn = old.turn AND e.id = old.id RETURNING e.xid)
    SELECT count(*) FROM gone"""


class Identity(NamedTuple):
    """Which database of which server."""

    system: str
    database: str
    timeline: int | None  # None: it is a standby


class State(NamedTuple):
    """Which installation, and below which transaction events were removed."""

    installation: str
    trimmed: int
    guards: str | None  # the triggers that notice removed events: changes whenever they do


class EventPoll(NamedTuple):
    """A look at the event table."""

    state: State
    snapshot: str
    any: bool  # whether it sees events that are not in the log
    lsn: int  # where the write-ahead log stood
    flushed: bool  # whether all that it sees would outlive a crash


class Triggers(NamedTuple):
    """The triggers of a table: which they are, and whether they fire."""

    which: str  # changes whenever they are created, disabled or enabled
    enabled: bool
    always: bool  # whether they also fire for rows that replication or a restore writes
    complete: bool  # whether every change has one
    current: bool  # whether they are those that would be created today


class EventTransaction(NamedTuple):
    """A transaction of the event table."""

    xid: int
    last: int  # its last entry
    entries: int
    size: int  # of their rows, in bytes


@dataclass(frozen=True, slots=True)
class EventPoint(Point):
    """The moment a copy shows: which transactions it sees, and one that is its own."""

    seen: str
    xid: int

    @property
    def name(self) -> str:
        """Its own transaction: no other point has it."""
        return str(self.xid)

    @property
    def position(self) -> Position:
        """Where its rows stand: in no entry."""
        return EventTablePosition(self.xid, 0, self.lsn)

    @property
    def last_position(self) -> Position:
        """The same."""
        return self.position


class EventCatalog(Catalog):
    """Asks the catalogs and the event table over one ordinary connection."""

    def __init__(
        self, connection: psycopg.Connection[Any], *, source: str, schema: str, origin: str = ""
    ) -> None:
        super().__init__(connection, source=source, origin=origin)
        self._schema = schema
        self._raw = connection

    def read_raw(self, connection: psycopg.Connection[Any]) -> None:
        """Read entries over this connection, which is in the encoding of rows."""
        self._raw = connection

    def close(self) -> None:
        """End the session."""
        self._raw.close()
        super().close()

    def identity(self) -> Identity:
        """Which server this is, and which database of it."""
        return Identity(*self.rows(_IDENTITY)[0])

    def edition(self) -> str | None:
        """What the installed function says of itself; None: there is none."""
        query = """SELECT coalesce(obj_description(p.oid, 'pg_proc'), '')
                   FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
                   WHERE n.nspname = %s AND p.proname = 'emit_cdc_event'"""
        found = self.rows(query, self._schema)
        return str(found[0][0]) if found else None

    def other_owner(self) -> str:
        """Who owns the schema or its functions, if that is nobody we trust; "": it is."""
        found = self.rows(_STRANGERS, self._schema)
        return str(found[0][0]) if found else ""

    def state(self) -> State:
        """Which installation it is, and how far its events were removed."""
        return State(*self._only(self._queried(_STATE)))

    # -- tables ---------------------------------------------------------------------------------

    def published(self, publication: str) -> list[Published]:
        """The tables that have every trigger, enabled or not; there is no publication."""
        found = self.triggers()
        return [t for t in self.wanted(("*.*",)) if t.oid in found and found[t.oid].complete]

    def wanted(self, globs: Sequence[str]) -> list[Published]:
        """The tables that match any of the globs, but for our own."""
        return self._candidates(globs)

    def triggers(self) -> dict[int, Triggers]:
        """The triggers of every table that has any of them."""
        return {table.oid: triggers for table, triggers in self._triggered()}

    def triggered(self) -> list[TriggerTarget]:
        """The tables and partitions that have any of them."""
        return [table for table, _ in self._triggered()]

    def target(self, table: Published) -> TriggerTarget:
        """A table with the triggers that it has, and the kind that it needs."""
        for found in self.triggered():
            if found.oid == table.oid:
                return found
        rows = self.rows(_RECORDED_BY_ROW, table.oid)
        return TriggerTarget(table.schema, table.name, table.oid, bool(rows and rows[0][0]))

    def _triggered(self) -> list[tuple[TriggerTarget, Triggers]]:
        schema, found = self._schema, []
        for row in self.rows(_TRIGGERED, f"!{schema}_", schema):
            namespace, name, oid, by_row, names, enabled, always, which = row
            table = TriggerTarget(namespace, name, oid, by_row, frozenset(names))
            state = table.is_complete(schema), table.is_current(schema)
            found.append((table, Triggers(which, enabled, always, *state)))
        return found

    def owns(self, relation: int) -> bool:
        """Whether we may put triggers on a table."""
        query = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = %s"
        found = self.rows(query, relation)
        return bool(found and found[0][0])

    def owner(self, relation: int) -> str:
        """Who owns a table."""
        query = "SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = %s"
        return str(self.rows(query, relation)[0][0])

    def event_rows(self, columns: str) -> EventRows:
        """The decoder for rows of a description."""
        query = "SELECT described::text FROM {schema}.relations WHERE columns = %(columns)s LIMIT 1"
        found = self._queried(query, columns=columns)
        if not found:
            raise DecodeError(f"{self._schema}.relations does not know the columns {columns}")
        described = msgspec.json.decode(found[0][0], type=EventTableDescription)
        reported = self._columns(
            [(c.name, c.key, c.type_id, c.modifier) for c in described.columns]
        )
        published = Published(described.schema, described.name, described.relation, None)
        return EventRows(self._rows(self._described(published, "full", reported)), described)

    def gone(self, path: str, relation: int) -> Table | None:
        """A table that does not exist any more under this name, without columns; None: it does."""
        if present_paths(self, [relation]).get(relation) == path:
            return None
        schema, name = split_path(path)
        return self._described(Published(schema, name, relation, None), "full", ())

    def looks_with_leaves(self, oids: list[int]) -> tuple[list[TableLook], dict[int, int]]:
        """Some tables as one snapshot shows them, and the table of each of their partitions."""
        with self.transaction():
            self.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            return self.looks(oids), dict(self.rows(_LEAVES, oids, oids))

    def _described(self, published: Published, identity: str, columns: tuple[Column, ...]) -> Table:
        # A trigger sees the whole old row, whatever the table's replica identity is. It does not
        # write which column is which.
        named = tuple(msgspec.structs.replace(c, number=0, initial_default="") for c in columns)
        return super()._described(published, "full", named)

    def _candidates(self, globs: Sequence[str]) -> list[Published]:
        return [t for t in super()._candidates(globs) if t.schema != self._schema]

    # -- events ---------------------------------------------------------------------------------

    def point(self) -> EventPoint:
        """Begin a transaction whose snapshot others may share until it ends."""
        self.run("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        query = """SELECT pg_export_snapshot(), (pg_current_wal_insert_lsn() - '0/0')::bigint,
                          pg_current_snapshot()::text, pg_current_xact_id()::text::bigint"""
        return EventPoint(*self.rows(query)[0])

    def snapshot(self) -> tuple[str, int]:
        """The snapshot of this moment, and where the write-ahead log stands."""
        query = "SELECT pg_current_snapshot()::text, (pg_current_wal_insert_lsn() - '0/0')::bigint"
        snapshot, lsn = self.rows(query)[0]
        self.flush()
        return snapshot, lsn

    def flush(self) -> None:
        """Make sure that what was committed or rolled back until now would outlive a crash.

        The server gives numbers of transactions out again after a crash if no record of them has
        reached the disk: those that were rolled back, and commits that did not wait.
        """
        self.run(_FLUSH)

    def moved(self) -> bool:
        """Whether a dump has brought the event table from another server or database."""
        return bool(self._queried(f"SELECT server <> {HERE} FROM {{schema}}.state")[0][0])

    def news(self, seen: TransactionSnapshot) -> EventPoll:
        """What this moment's snapshot sees that an earlier one does not."""
        *state, snapshot, any_, lsn, flushed = self._only(self._queried(_ANY_NEWS, **_unseen(seen)))
        return EventPoll(State(*state), snapshot, any_, lsn, flushed)

    def transactions(
        self, seen: TransactionSnapshot, target: str, entry: int
    ) -> Generator[EventTransaction, None, None]:
        """What a snapshot sees and an earlier one does not, in order, after an entry."""
        query = self._named(_TRANSACTIONS)
        parameters = _unseen(seen) | {"target": target, "entry": entry}
        try:
            # Held by the server: there may be millions, and no transaction shall stay open.
            with self._connection.cursor("headrace_transactions", withhold=True) as cursor:
                cursor.execute(query, parameters)
                for row in cursor:
                    yield EventTransaction(*row)
        except psycopg.Error as error:
            raise self._failed(error) from error

    def entries(self, xids: Sequence[int]) -> list[EventEntry]:
        """The entries of some transactions, in the order of these."""
        return self._read(_ENTRIES, xids=[str(xid) for xid in xids])

    def piece(
        self, xid: int, after: EventEntry | None, *, limit: int, size: int
    ) -> list[EventEntry]:
        """Some entries of one transaction, after another: so many, or of so many bytes."""
        turn, id_ = (after.turn, after.id) if after else (0, 0)
        return self._read(_PIECE, xid=str(xid), turn=turn, after=id_, limit=limit, bytes=size)

    def last_entry(self, reported: EventTransaction) -> EventEntry | None:
        """The last entry of a transaction, without its rows; None: it was removed."""
        return next(iter(self._read(_LAST, xid=str(reported.xid), last=reported.last)), None)

    def annotations(self, xid: int) -> list[bytes]:
        """The annotations of a transaction, in order."""
        return [text for (text,) in self._raw_rows(_ANNOTATIONS, xid=str(xid)) if text is not None]

    def trim(self, before: int, limit: int) -> int:
        """Remove some events of transactions below `before`; returns how many."""
        return int(self._queried(_TRIM, before=str(before), limit=limit)[0][0])

    def apply(self, statements: str, *, wait: str = "0") -> bool:
        """Run statements as one transaction; False when a lock was not to be had in time."""
        try:
            with self._connection.transaction():
                self._connection.execute("SELECT set_config('lock_timeout', %s, true)", (wait,))
                self._connection.execute(statements.encode())
        except psycopg.errors.LockNotAvailable:
            return False
        except psycopg.Error as error:
            raise classify(error, "statement failed") from error
        return True

    def _only(self, rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        if not rows:
            raise SourceRefused(f"the table {self._schema}.state is empty")
        return rows[0]

    def _failed(self, error: psycopg.Error) -> SourceError:
        if isinstance(error, (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)):
            return PositionLost(f"there is no event table in schema {self._schema} any more")
        return classify(error, "query failed")

    def _named(self, query: str) -> bytes:
        return query.replace("{schema}", f'"{self._schema}"').encode()

    def _queried(self, query: str, **parameters: object) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(self._named(query), parameters).fetchall()
        except psycopg.Error as error:
            raise self._failed(error) from error

    def _read(self, query: str, **parameters: object) -> list[EventEntry]:
        return [
            EventEntry(
                int(xid),
                int(id_),
                int(turn),
                op,
                int(of),
                columns.decode(),
                old,
                new,
                annotations,
                int(at),
            )
            for xid, id_, turn, op, of, columns, old, new, annotations, at in self._raw_rows(
                query, **parameters
            )
        ]

    def _raw_rows(self, query: str, **parameters: object) -> list[tuple[Any, ...]]:
        """Values as the server prints them: nobody decodes a row before its columns are known."""
        try:
            result = self._raw.execute(self._named(query), parameters).pgresult
        except psycopg.Error as error:
            raise self._failed(error) from error
        assert result is not None
        value, columns = result.get_value, range(result.nfields)
        return [tuple([value(row, at) for at in columns]) for row in range(result.ntuples)]


def _unseen(seen: TransactionSnapshot) -> dict[str, object]:
    return {"open": [str(xid) for xid in seen.open], "after": str(seen.after)}
