"""What a PostgreSQL server says about itself, its tables and its types."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, LiteralString

import msgspec
import psycopg
from psycopg import sql

from ...change.event import COMMENT_BYTES, Column, Reference, Table, bounded_comment
from ...change.path import path_matches, split_path, table_path
from ...errors import DecodeError
from .address import classify
from .look_query import ANY_NARROW, LISTED_COLUMNS, UNSENT_GENERATED, look_object
from .looks import LookColumn, LookState, Numbering, TableLook, key_names, missing_value, numbered
from .pgoutput import WalRelation
from .rows import Rows
from .values import TYPES_SQL, PgType, as_utf8, encoder, pg_types

_LONGEST_NAME = 63  # bytes; PostgreSQL cuts longer ones
_look = msgspec.json.Decoder(TableLook).decode


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot as the server shows it."""

    confirmed: int
    plugin: str
    database: str
    lost: bool


@dataclass(frozen=True, slots=True)
class Published:
    """A table of a publication: what the stream will send of it."""

    schema: str
    name: str
    oid: int
    columns: tuple[str, ...] | None  # None: all of them
    filter: str | None = None

    @property
    def path(self) -> str:
        """schema.table, as the config and the status write it."""
        return table_path(self.schema, self.name)


_SLOT = """
    SELECT coalesce(confirmed_flush_lsn - '0/0', 0)::bigint, plugin, database,
           coalesce(wal_status = 'lost', false)
    FROM pg_replication_slots WHERE slot_name = %s"""

_BEAT = """
    SELECT CASE WHEN NOT pg_is_in_recovery()
                THEN pg_logical_emit_message(true, 'headrace.heartbeat', '') END"""

_CANDIDATES = """
    SELECT n.nspname, c.relname, c.oid::bigint
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT c.relispartition
      AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'headrace')
    ORDER BY 1, 2"""

_PUBLISHED = """
    SELECT p.schemaname, p.tablename, c.oid::bigint, coalesce(p.attnames, '{}'), p.rowfilter
    FROM pg_publication_tables p
    JOIN pg_namespace n ON n.nspname = p.schemaname
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
    WHERE p.pubname IN (%s, %s) ORDER BY 1, 2"""

# What a Relation message will say. The catalogs of 15 list generated columns as published, but the
# server sends none before 18, and then only stored ones; a deferrable key identifies no row to it.
_GONE_LEAVES = """
    SELECT w.leaf::bigint FROM unnest(%s::oid[], %s::oid[]) w(leaf, whole)
    WHERE NOT EXISTS (SELECT FROM pg_partition_ancestors(w.leaf) a WHERE a.relid = w.whole)"""
_LOOK = look_object("ANY (%s::oid[])")

# Rows of a partition are captured as rows of the whole; the server keeps a key towards such a
# table once more for each of its partitions. A key with PERIOD (18) names no one row.
_REFERENCES = """
    SELECT ARRAY(SELECT a.attname::text FROM unnest(k.conkey) WITH ORDINALITY AS c(number, at)
                 JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = c.number
                 ORDER BY c.at),
           n.nspname, t.relname,
           ARRAY(SELECT a.attname::text FROM unnest(k.confkey) WITH ORDINALITY AS c(number, at)
                 JOIN pg_attribute a ON a.attrelid = k.confrelid AND a.attnum = c.number
                 ORDER BY c.at)
    FROM pg_constraint k
    JOIN pg_class t ON t.oid = coalesce(pg_partition_root(k.confrelid)::oid, k.confrelid)
    JOIN pg_namespace n ON n.oid = t.relnamespace
    WHERE k.conrelid = %s AND k.contype = 'f'
      AND coalesce(to_jsonb(k) ->> 'conperiod', 'false') = 'false'
    ORDER BY k.conkey[1], k.conname"""

# Of the table itself (no name) and its columns, without those that a server adds (ctid, below 0);
# everybody may read them. A database without an encoding may hold bytes that are no text, which the
# server would refuse to send as text.
_COMMENTS = """
    SELECT coalesce(a.attname, ''), convert_to(left(d.description, %s),
           CASE getdatabaseencoding() WHEN 'SQL_ASCII' THEN 'SQL_ASCII' ELSE 'UTF8' END)
    FROM pg_description d
    LEFT JOIN pg_attribute a ON a.attrelid = d.objoid AND a.attnum = d.objsubid AND d.objsubid > 0
    WHERE d.objoid = %s AND d.classoid = 'pg_class'::regclass AND d.objsubid >= 0"""

_SEEN = "SELECT pg_visible_in_snapshot(%s::text::xid8, pg_current_snapshot())"
_UNSEEN_SECONDS = 2.0  # far more than a synchronous standby takes
_LOOK_SECONDS = 0.01

_PARTS = """
    SELECT format('%%I.%%I', n.nspname, c.relname),
           coalesce(pg_relation_size(c.oid), 0) / current_setting('block_size')::int,
           coalesce(pg_relation_filenode(c.oid), 0)::bigint, c.reltuples::bigint
    FROM (SELECT relid::oid FROM pg_partition_tree(%s::oid) UNION SELECT %s::oid) t
    JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind = 'r' ORDER BY c.oid"""

# What a copy reads are the physical tables; a grant on a partitioned table is none on its parts.
_UNREADABLE = """
    SELECT t.oid::bigint, format('%%I.%%I', n.nspname, c.relname), quote_ident(current_user),
           CASE WHEN NOT has_schema_privilege(n.oid, 'USAGE') THEN quote_ident(n.nspname) END,
           row_security_active(c.oid)
    FROM unnest(%s::oid[]) AS t(oid)
    CROSS JOIN LATERAL (SELECT relid::oid FROM pg_partition_tree(t.oid) UNION SELECT t.oid) p(part)
    JOIN pg_class c ON c.oid = p.part JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind = 'r' AND (row_security_active(c.oid) OR
                               NOT (has_schema_privilege(n.oid, 'USAGE')
                                    AND has_table_privilege(c.oid, 'SELECT')))
    ORDER BY c.oid DESC"""


def hidden_rows(user: str) -> str:
    """Why a table is not read of which a policy may hide rows."""
    return f"row-level security may hide rows of it; run: ALTER ROLE {user} BYPASSRLS;"


@dataclass(frozen=True, slots=True)
class PhysicalTable:
    """A physical table: a partition, or a table itself."""

    relation: str
    blocks: int
    filenode: int
    estimated_rows: int


class Catalog:
    """Asks the catalogs over one ordinary connection."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        *,
        source: str,
        origin: str = "",
        publication: str = "",
    ) -> None:
        self._connection = connection
        self._publication = publication
        self._publications = (publication, inserts_name(publication))
        self._source = source
        self._origin = origin
        self._types: dict[int, PgType] = {}
        self._encoding = ""
        self._database = connection.info.dbname

    def rows(
        self, query: LiteralString | sql.Composed, *parameters: object
    ) -> list[tuple[Any, ...]]:
        """What a query returns."""
        try:
            cursor = self._connection.execute(query, parameters or None)
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise classify(error, "query failed") from error

    def run(self, statements: LiteralString | sql.Composed) -> None:
        """Run statements that return nothing."""
        self.rows(statements)

    def alter(self, *statements: LiteralString | sql.Composed) -> None:
        """Run DDL in one transaction, in which no lock is waited for longer than a second.

        A SourceUnavailable when somebody else had it; `connected` is true then.
        """
        try:
            with self._connection.transaction():
                self._connection.execute("SET LOCAL lock_timeout = '1s'")
                for statement in statements:
                    self._connection.execute(statement)
        except psycopg.Error as error:
            raise classify(error, "DDL failed") from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What the block does in one transaction."""
        try:
            with self._connection.transaction():
                yield
        except psycopg.Error as error:
            raise classify(error, "query failed") from error

    @property
    def connected(self) -> bool:
        """Whether the session is still there."""
        return not self._connection.closed

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    @property
    def session(self) -> int:
        """The number of its process on the server."""
        return self._connection.info.backend_pid

    def share(self, snapshot: str) -> None:
        """From here on, see the database as an exported snapshot shows it."""
        self.run("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        self.run(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))

    def oldest_unseen(self) -> int:
        """The oldest transaction that the snapshot in use might not see."""
        query = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
        return int(self.rows(query)[0][0])

    def row_encoding(self) -> str:
        """The encoding in which rows are sent."""
        if not self._encoding:
            (encoding,) = self.rows("SELECT current_setting('server_encoding')")[0]
            self._encoding = "SQL_ASCII" if encoding == "SQL_ASCII" else "UTF8"
        return self._encoding

    def wal_sender_timeout(self) -> float:
        """Seconds after which the server drops a silent reader; 0: never."""
        query = "SELECT setting::float8 / 1000 FROM pg_settings WHERE name = 'wal_sender_timeout'"
        return float(self.rows(query)[0][0])

    def beat(self) -> None:
        """Write a word into the stream; in a transaction, or the slot would not move past it.

        A standby cannot write one.
        """
        self.rows(_BEAT)

    def version(self) -> int:
        """As server_version_num writes it: 150000 is 15.0."""
        return int(self.rows("SELECT current_setting('server_version_num')")[0][0])

    def in_recovery(self) -> bool:
        """Whether it is a standby, to which nothing can be written."""
        return bool(self.rows("SELECT pg_is_in_recovery()")[0][0])

    def wal_lsn(self) -> int:
        """How far the server's log reaches."""
        query = """SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                           ELSE pg_current_wal_lsn() END - '0/0')::bigint"""
        return int(self.rows(query)[0][0])

    def next_xid(self) -> int:
        """The next transaction id, with its epoch."""
        query = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        return int(self.rows(query)[0][0])

    def slot(self, name: str) -> Slot | None:
        """A slot; None when there is none of this name."""
        found = self.rows(_SLOT, name)
        return Slot(*found[0]) if found else None

    def candidates(self, globs: Sequence[str]) -> list[tuple[str, str]]:
        """Tables (schema, name) that match any of the globs."""
        return [(table.schema, table.name) for table in self._candidates(globs)]

    def wanted(self, globs: Sequence[str]) -> list[Published]:
        """The tables that match any of the globs, whole."""
        return self._candidates(globs)

    def published(self, publication: str) -> list[Published]:
        """The tables of a publication, and of the one for inserts beside it."""
        found = self.rows(_PUBLISHED, publication, inserts_name(publication))
        return [
            Published(schema, name, oid, tuple(columns), rowfilter)
            for schema, name, oid, columns, rowfilter in found
        ]

    def parts(self, oid: int) -> list[PhysicalTable]:
        """The physical tables behind a table."""
        return [PhysicalTable(*row) for row in self.rows(_PARTS, oid, oid)]

    def unreadable(self, tables: Mapping[str, int]) -> dict[str, str]:
        """Of these tables, by their oids, those whose rows cannot be read, and the fix."""
        paths = {oid: path for path, oid in tables.items()}
        return {
            paths[oid]: hidden_rows(user)
            if hidden
            else "its rows cannot be read; run: "
            + (f"GRANT USAGE ON SCHEMA {schema} TO {user}; " if schema else "")
            + f"GRANT SELECT ON {part} TO {user};"
            for oid, part, user, schema, hidden in self.rows(_UNREADABLE, list(paths))
        }

    def tables(self, publication: str, globs: Sequence[str]) -> list[Table]:
        """The tables that match any of the globs, also those that are not published yet."""
        found = {table.path: table for table in self._candidates(globs)}
        # What is published already may be some of a table's columns, or a partition.
        found |= {
            table.path: table for table in self.published(publication) if matches(table.path, globs)
        }
        return [self._table(found[path]) for path in sorted(found)]

    def describe(self, published: Published) -> Rows:
        """The decoder for rows of a published table as it is now."""
        return self._rows(self._table(published))

    def describe_relation(
        self, relation: WalRelation, *, announced_by: int, known: LookState | None = None
    ) -> tuple[Rows, Numbering]:
        """The decoder for rows after a Relation message; `announced_by` is its transaction.

        `known` is the state after the columns before it; and which columns they are.
        """
        if announced_by:
            self._await(announced_by)
        look = self.look(relation.id) or TableLook(relation.id, "", "", relation.identity)
        names = [column.name for column in relation.columns]
        numbering = numbered(known, names, look, xid=announced_by)
        keys = {column.name for column in relation.columns if column.identity}
        if relation.identity in ("full", "nothing"):
            # Then the flags do not name the key: all columns have them, or none.
            keys = key_names(known, names, numbering.numbers, look)
        if numbering.types:
            self.forget_types()  # they are noted as the look has them: rows must be read so too
        # By the type too: it may be uncertain which column it is, and the look is of a later time.
        missing = {(column.number, column.type_id): column.missing for column in look.columns}
        columns = self._look_columns(
            LookColumn(c.name, c.type_id, c.modifier, c.name in keys, number,
                       missing=missing.get((number, c.type_id), ()) if numbering.certain else ())
            for c, number in zip(relation.columns, numbering.numbers, strict=True)
        )  # fmt: skip
        table = Published(relation.schema, relation.name, relation.id, None)
        return self._rows(self._described(table, relation.identity, columns)), numbering

    def look(self, oid: int) -> TableLook | None:
        """A table as it is now; None: there is none."""
        return next(iter(self.looks([oid])), None)

    def looks(self, oids: Sequence[int]) -> list[TableLook]:
        """These tables as they are now, without those that are gone."""
        found = [_look(msgspec.json.encode(look)) for (look,) in self.rows(_LOOK, list(oids))]
        narrow = bool(self._publication and self.rows(ANY_NARROW, *self._publications))
        return [self.narrowed(look) for look in found] if narrow else found

    def gone_leaves(self, leaves: Mapping[int, int]) -> set[int]:
        """Those of some partitions that are none of their tables any more; leaf -> table."""
        found = self.rows(_GONE_LEAVES, list(leaves), list(leaves.values()))
        return {leaf for (leaf,) in found}

    def describe_look(self, look: TableLook, *, announced_by: int) -> Rows:
        """The decoder for rows of a table as a look in the stream shows it."""
        self._await(announced_by)
        table = Published(look.schema, look.name, look.oid, None)
        return self._rows(self._described(table, look.identity, self._look_columns(look.sent)))

    def narrowed(self, look: TableLook) -> TableLook:
        """The same, with the columns alone that the publication sends."""
        if not self._publication:
            return look
        lists = self.rows(LISTED_COLUMNS, look.oid, *self._publications)
        if lists:
            listed = {number for (numbers,) in lists for number in numbers}
            unsent = {column.number for column in look.columns} - listed
        else:
            found = self.rows(UNSENT_GENERATED, look.oid, *self._publications)
            unsent = {number for (number,) in found}
        return look.without(unsent)

    def forget_types(self) -> None:
        """Ask for every type again: some were altered."""
        self._types = {}

    def sourceless(self) -> Table:
        """The table of changes that belong to no table."""
        return Table(self._source, "postgres", self._origin, self._database, "", "")

    def _columns(self, columns: Sequence[tuple[str, bool, int, int]]) -> tuple[Column, ...]:
        names = self._type_names([(oid, modifier) for _, _, oid, modifier in columns])
        return tuple(
            Column(name, type_name, key, oid, modifier)
            for (name, key, oid, modifier), type_name in zip(columns, names, strict=True)
        )

    def _candidates(self, globs: Sequence[str]) -> list[Published]:
        found = [Published(schema, name, oid, None) for schema, name, oid in self.rows(_CANDIDATES)]
        return [table for table in found if matches(table.path, globs)]

    def _await(self, xid: int) -> None:
        """Wait until the catalogs show what a transaction has done to them.

        It is streamed once its commit is written, and visible once synchronous standbys have it.
        """
        end = time.monotonic() + _UNSEEN_SECONDS
        while not self.rows(_SEEN, xid)[0][0] and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)

    def _table(self, published: Published) -> Table:
        """A table as it is now."""
        look = self.look(published.oid)
        if look is None:
            return self._described(published, "default", ())
        wanted = published.columns
        found = [column for column in look.sent if wanted is None or column.name in wanted]
        return self._described(published, look.identity, self._look_columns(found))

    def _look_columns(self, columns: Iterable[LookColumn]) -> tuple[Column, ...]:
        found = list(columns)
        plain = self._columns([(c.name, c.key, c.type_id, c.modifier) for c in found])
        self._learn(column.type_id for column in found)
        return tuple(
            msgspec.structs.replace(
                column, number=each.number, initial_default=self._initial_default(each)
            )
            for column, each in zip(plain, found, strict=True)
        )

    def _initial_default(self, column: LookColumn) -> str:
        """As rows have it: the type's own encoder writes it."""
        if len(column.missing) != 1:
            return ""
        value = missing_value(column.missing[0]).encode()
        encode = encoder(column.type_id, self._types)
        try:
            return (value if encode is None else encode(value)).decode()
        except DecodeError:
            return ""  # neither could a row with it be read, which is reported there

    def _described(self, published: Published, identity: str, columns: tuple[Column, ...]) -> Table:
        comments = self._comments(published.oid)
        return Table(
            self._source,
            "postgres",
            self._origin,
            self._database,
            published.schema,
            published.name,
            tuple(
                msgspec.structs.replace(column, comment=comments.get(column.name, ""))
                for column in columns
            ),
            identity,
            published.oid,
            references=self._references(published.oid, columns),
            comment=comments.get("", ""),
        )

    def _comments(self, oid: int) -> dict[str, str]:
        """The comments of a table's columns, and its own under no name, as they are now."""
        return {
            name: bounded_comment(bytes(text).decode(errors="replace"))
            for name, text in self.rows(_COMMENTS, COMMENT_BYTES, oid)
        }

    def _references(self, oid: int, columns: tuple[Column, ...]) -> tuple[Reference, ...]:
        """The foreign keys over these columns, as they are now."""
        names = {column.name for column in columns}
        found = [
            Reference(tuple(own), schema, table, tuple(theirs))
            for own, schema, table, theirs in self.rows(_REFERENCES, oid)
            # Columns that are not captured name nothing; nor do those that were renamed since.
            if names.issuperset(own)
        ]
        return tuple(dict.fromkeys(found))

    def _rows(self, table: Table) -> Rows:
        self._learn(column.type_id for column in table.columns)
        encoders = [encoder(column.type_id, self._types) for column in table.columns]
        if self.row_encoding() == "SQL_ASCII":
            # Nobody has made sure that what passes through as it is can be read.
            encoders = [encode or as_utf8 for encode in encoders]
        return Rows(table, encoders)

    def _type_names(self, types: Sequence[tuple[int, int]]) -> list[str]:
        query = """SELECT coalesce(format_type(oid::oid, modifier), 'unknown')
                   FROM unnest(%s::bigint[], %s::int[]) WITH ORDINALITY AS t(oid, modifier, at)
                   ORDER BY at"""
        oids, modifiers = [oid for oid, _ in types], [modifier for _, modifier in types]
        return [name for (name,) in self.rows(query, oids, modifiers)]

    def _learn(self, oids: Iterable[int]) -> None:
        if not all(oid in self._types for oid in oids):
            self._types = pg_types(self.rows(TYPES_SQL))


def matches(path: str, globs: Sequence[str]) -> bool:
    """Whether schema.table matches one of the globs; a bare name means the schema public."""
    schema, name = split_path(path)
    return any(path_matches(schema, name, glob, default="public") for glob in globs)


def inserts_name(publication: str) -> str:
    """The name of the publication for tables of which only inserts are captured."""
    name = f"{publication}_inserts"
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    ending = f"_{hashlib.sha256(publication.encode()).hexdigest()[:8]}_inserts"
    return publication.encode()[: _LONGEST_NAME - len(ending)].decode(errors="ignore") + ending
