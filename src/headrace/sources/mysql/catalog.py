"""The catalogue of a MySQL or MariaDB server: its identity, settings, tables and binary log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...change.event import Column, Reference, Table, bounded_comment
from ...errors import SourceRefused
from .address import run
from .decode.columns import DeclaredColumn, declared_type
from .decode.gtid import MariadbGtids, MysqlGtids
from .decode.path import TablePath
from .dump import force_close
from .resume import BinlogOffset, DeclaredTable, file_number
from .settings import SYSTEM_SCHEMAS

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

Gtids = MysqlGtids | MariadbGtids

# Engines whose rows a consistent snapshot shows.
_TRANSACTIONAL = frozenset({"innodb", "rocksdb", "tokudb", "ndbcluster"})

_LONG_TEXTS = ("tinytext", "text", "mediumtext", "longtext")

_TABLES = """
    SELECT TABLE_SCHEMA, TABLE_NAME, COALESCE(ENGINE, ''), COALESCE(TABLE_ROWS, -1)
    FROM information_schema.TABLES
    WHERE TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED') AND TABLE_SCHEMA NOT IN ({system})
    ORDER BY 1, 2"""
_ONE = """
    SELECT COALESCE(ENGINE, ''), TABLE_TYPE, COALESCE(TABLE_COLLATION, ''), TABLE_COMMENT
    FROM information_schema.TABLES
    WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s
      AND TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED')"""
_COLUMNS = """
    SELECT COLUMN_NAME, COLUMN_TYPE, COALESCE(CHARACTER_SET_NAME, ''), COLUMN_COMMENT,
           IS_NULLABLE, COLUMN_DEFAULT, EXTRA, COALESCE(COLLATION_NAME, '')
    FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s
    ORDER BY ORDINAL_POSITION"""
# Of the table itself (no name) and its columns.
_COMMENTS = """
    SELECT '', TABLE_COMMENT FROM information_schema.TABLES
    WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s
    UNION ALL
    SELECT COLUMN_NAME, COLUMN_COMMENT FROM information_schema.COLUMNS
    WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND COLUMN_COMMENT <> ''"""
_KEY = """
    SELECT COLUMN_NAME FROM information_schema.STATISTICS
    WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND INDEX_NAME = 'PRIMARY'
    ORDER BY SEQ_IN_INDEX"""
# An index on an expression (MySQL), and a unique one on whole texts (MariaDB), each has a column.
_HIDDEN = """
    SELECT COUNT(*) FROM information_schema.STATISTICS
    WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND EXPRESSION IS NOT NULL"""
_HAS_EXPRESSIONS = """
    SHOW COLUMNS FROM information_schema.STATISTICS LIKE 'EXPRESSION'"""  # since 8.0.13
_HIDDEN_HASHES = """
    SELECT COUNT(DISTINCT INDEX_NAME) FROM information_schema.STATISTICS
    WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND INDEX_TYPE = 'HASH'"""
_REFERENCES = """
    SELECT CONSTRAINT_NAME, COLUMN_NAME, REFERENCED_TABLE_SCHEMA, REFERENCED_TABLE_NAME,
           REFERENCED_COLUMN_NAME
    FROM information_schema.KEY_COLUMN_USAGE
    WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND REFERENCED_TABLE_NAME IS NOT NULL
    ORDER BY CONSTRAINT_NAME, ORDINAL_POSITION"""
_ACTIONS = """
    SELECT CONSTRAINT_NAME, DELETE_RULE, UPDATE_RULE
    FROM information_schema.REFERENTIAL_CONSTRAINTS
    WHERE CONSTRAINT_SCHEMA = %s AND TABLE_NAME = %s"""
# MariaDB's JSON is text with this constraint.
_DOCUMENTS = """
    SELECT CONSTRAINT_NAME FROM information_schema.CHECK_CONSTRAINTS
    WHERE CONSTRAINT_SCHEMA = %s AND TABLE_NAME = %s
      AND LOWER(CHECK_CLAUSE) = LOWER(CONCAT('json_valid(`', CONSTRAINT_NAME, '`)'))"""


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """The server's identity, version and settings of its names and rows."""

    mariadb: bool
    version: str
    uuid: str  # MySQL's server_uuid; MariaDB's server_uid, which another network card changes
    number: int  # server_id
    domain: int  # MariaDB's gtid_domain_id
    folds: bool  # whether it keeps names in small letters
    image: str  # binlog_row_image

    @property
    def identity(self) -> str:
        """What must be the same for as long as it is the same server.

        A MariaDB has no name of its own: when its files were begun distinguishes it from others.
        """
        return f"mariadb:{self.number}:{self.domain}" if self.mariadb else f"mysql:{self.uuid}"

    def same_as(self, identity: str) -> bool:
        """Whether it may be this server; a MariaDB's domain may change, not its files' birth."""
        if not self.mariadb:
            return identity == self.identity
        return identity.rpartition(":")[0] == self.identity.rpartition(":")[0]

    @property
    def newer(self) -> bool:
        """Whether it has the words of MySQL 8.2 for replication, and 8.4 has no others."""
        return not self.mariadb and _version(self.version) >= (8, 2)

    @property
    def logs_cascades(self) -> bool:
        """Whether what foreign keys do to rows is in the binary log."""
        return not self.mariadb and _version(self.version) >= (9, 6)

    @property
    def origin(self) -> str:
        """The identity that its tables carry, which is kept from the first start on."""
        return f"mysql:{self.uuid or uuid4()}"

    def parse_gtids(self, text: str) -> Gtids:
        """A set of transactions in the server's own text."""
        return MariadbGtids.parse(text) if self.mariadb else MysqlGtids.parse(text)


@dataclass(frozen=True, slots=True)
class BinlogEnd:
    """Where a server's binary log ends."""

    file: str
    position: int
    gtids: str

    @property
    def offset(self) -> BinlogOffset:
        """What orders it among others."""
        return file_number(self.file), self.position


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table that is there."""

    schema: str
    name: str
    transactional: bool
    estimated_rows: int

    @property
    def path(self) -> TablePath:
        """What it is known by."""
        return TablePath(self.schema, self.name)


class MysqlCatalog:
    """Queries about a server, over a session of their own."""

    def __init__(
        self,
        connection: Connection[Cursor],
        *,
        source: str,
        origin: str = "",
        silence_limit: float = 60.0,
    ) -> None:
        self._connection = connection
        self._silence_limit = silence_limit  # seconds that a response may take which needs no work
        self._source = source
        self._origin = origin
        self._server: ServerIdentity | None = None
        # By table, those of its columns and its own under no name. They are of this session: a
        # resume position is stored with every batch, and would be several times as long with them.
        self._comments: dict[TablePath, dict[str, str]] = {}

    def close(self) -> None:
        """End the session."""
        force_close(self._connection)

    def of(self, origin: str) -> MysqlCatalog:
        """The same session, for tables of this origin."""
        return MysqlCatalog(
            self._connection, source=self._source, origin=origin, silence_limit=self._silence_limit
        )

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return run(self._connection, query, *parameters)

    def _soon(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of a query that a server answers at once, if it is there."""
        connection: Any = self._connection
        usual, connection._read_timeout = connection._read_timeout, self._silence_limit
        try:
            return self.rows(query, *parameters)
        finally:
            connection._read_timeout = usual

    def variables(self, *names: str) -> dict[str, str]:
        """Global settings of the server; those it does not know are left out."""
        wanted = ", ".join(["%s"] * len(names))
        query = f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({wanted})"
        return {str(name).lower(): str(value) for name, value in self._soon(query, *names)}

    def server(self) -> ServerIdentity:
        """The server's identity, version and settings of its names and rows."""
        if self._server is None:
            self._server = self._identity()
        return self._server

    def _identity(self) -> ServerIdentity:
        version = str(self._soon("SELECT VERSION()")[0][0])
        known = self.variables(
            "server_uuid",
            "server_uid",
            "server_id",
            "gtid_domain_id",
            "lower_case_table_names",
            "binlog_row_image",
        )
        return ServerIdentity(
            mariadb="mariadb" in version.lower(),
            version=version,
            uuid=known.get("server_uuid") or known.get("server_uid", ""),
            number=int(known["server_id"]),
            domain=int(known.get("gtid_domain_id", "0")),
            folds=known.get("lower_case_table_names", "0") != "0",
            image=known.get("binlog_row_image", "FULL").upper(),
        )

    def end(self) -> BinlogEnd:
        """Where the binary log ends now."""
        # MySQL 8.4 knows only the second one, MariaDB and older servers only the first.
        newer = self.server().newer
        found = self._soon("SHOW BINARY LOG STATUS" if newer else "SHOW MASTER STATUS")
        if not found:
            raise SourceRefused("the server writes no binary log (log_bin is off)")
        file, position, *rest = found[0]
        if self.server().mariadb:
            gtids = str(self._soon("SELECT @@global.gtid_binlog_pos")[0][0] or "")
        else:
            gtids = str(rest[2] if len(rest) > 2 else "").replace("\n", "")
        return BinlogEnd(str(file), int(position), gtids)

    def exact_end(self) -> BinlogEnd:
        """Where the binary log ends, with the transactions before that position and no others."""
        end = self.end()
        if not self.server().mariadb:
            return end  # one response has both
        return replace(end, gtids=self.gtids_at(end.file, end.position))

    def gtids_at(self, file: str, position: int) -> str:
        """MariaDB: the last transactions before a position."""
        found = self.rows("SELECT BINLOG_GTID_POS(%s, %s)", file, position)
        return str(found[0][0] or "")

    def files(self) -> dict[str, int]:
        """The files of the binary log that are still there, with their sizes."""
        return {str(row[0]): int(row[1]) for row in self._soon("SHOW BINARY LOGS")}

    def candidates(self, wants: Callable[[str, str], bool]) -> list[FoundTable]:
        """Tables that are wanted."""
        system = ", ".join(f"'{schema}'" for schema in sorted(SYSTEM_SCHEMAS))
        return [
            FoundTable(schema, name, engine.lower() in _TRANSACTIONAL, int(rows))
            for schema, name, engine, rows in self.rows(_TABLES.format(system=system))
            if wants(schema, name)
        ]

    def declared(self, schema: str, name: str) -> DeclaredTable | None:
        """A table as it is now; None: there is none."""
        found = self._soon(_ONE, schema, name)
        if not found:
            return None
        documents = (
            {row[0] for row in self._soon(_DOCUMENTS, schema, name)}
            if self.server().mariadb
            else set()
        )
        described = self._soon(_COLUMNS, schema, name)
        columns = tuple(
            DeclaredColumn(
                column,
                kind,
                charset,
                column in documents and _is_text(kind),
                nullable == "YES",
                None if default is None else str(default),
                str(extra).lower(),
                loose=_is_loose(kind, collation),
            )
            for column, kind, charset, _, nullable, default, extra, collation in described
        )
        key = tuple(row[0] for row in self._soon(_KEY, schema, name))
        references = self._references(schema, name)
        *about, comment = found[0]
        engine, kind, collation = (str(each).lower() for each in about)
        texts = [("", comment), *((column, text) for column, _, _, text, *_ in described)]
        self._comments[TablePath(schema, name)] = _bounded(texts)
        hidden = self._hidden(schema, name) if engine != "memory" else 0
        return DeclaredTable(
            columns,
            key,
            references,
            transactional=engine in _TRANSACTIONAL,
            hidden=hidden,
            versioned=kind == "system versioned",
            charset=collation.partition("_")[0],
            # Read last: whatever the responses above show has happened before this.
            read_at=self.end().offset,
        )

    def _references(self, schema: str, name: str) -> tuple[Reference, ...]:
        found = self._soon(_REFERENCES, schema, name)
        if not found:
            return ()
        if self.server().logs_cascades:
            return _references(found, {})
        rules = self._soon(_ACTIONS, schema, name)
        return _references(found, {each: (_acts(d), _acts(u)) for each, d, u in rules})

    def _hidden(self, schema: str, name: str) -> int:
        server = self.server()
        if not server.mariadb and not self._soon(_HAS_EXPRESSIONS):
            return 0
        return int(self._soon(_HIDDEN_HASHES if server.mariadb else _HIDDEN, schema, name)[0][0])

    def _comments_of(self, schema: str, name: str) -> dict[str, str]:
        """The comments of a table and its columns, as they were when it was last declared."""
        path = TablePath(schema, name)
        if path not in self._comments:
            self._comments[path] = _bounded(self._soon(_COMMENTS, *path, *path))
        return self._comments[path]

    def table(self, schema: str, name: str, declared: DeclaredTable) -> Table:
        """The table of a description."""
        columns = [(column.name, column.type) for column in declared.columns]
        return self.table_of(schema, name, columns, declared)

    def table_of(
        self, schema: str, name: str, columns: Iterable[tuple[str, str]], declared: DeclaredTable
    ) -> Table:
        """A table with these columns, and the key and foreign keys that it is declared with."""
        # MariaDB declares a document as text, and its values are shown as documents.
        documents = {(column.name, column.type) for column in declared.columns if column.json}
        comments = self._comments_of(schema, name)
        unnumbered = DeclaredColumn("", "")
        there = {column.name: column for column in declared.there}
        typed = tuple(
            Column(
                each,
                "json" if (each, kind) in documents else kind,
                each in declared.key,
                comment=comments.get(each, ""),
                number=there.get(each, unnumbered).number,
                initial_default=there.get(each, unnumbered).initial_default,
            )
            for each, kind in columns
        )
        names = {column.name for column in typed}
        return Table(
            self._source,
            "mysql",
            self._origin,
            schema,
            schema,
            name,
            typed,
            "full" if self.server().image == "FULL" else "default",
            references=tuple(r for r in declared.references if names.issuperset(r.columns)),
            comment=comments.get("", ""),
        )

    def sourceless(self, database: str) -> Table:
        """The table of changes that belong to no table."""
        return Table(self._source, "mysql", self._origin, database, "", "")


def _bounded(comments: Iterable[tuple[Any, ...]]) -> dict[str, str]:
    return {str(name): bounded_comment(str(text)) for name, text in comments if text}


def _is_text(kind: str) -> bool:
    """Whether such a column can hold documents: bytes and labels stay what they are."""
    return declared_type(kind).base in ("char", "varchar", *_LONG_TEXTS)


def _is_loose(kind: str, collation: str) -> bool:
    """Whether texts of a column may be equal that are not the same."""
    if not _is_text(kind):
        return False  # labels are compared by their numbers
    # Most binary collations ignore trailing spaces, which a CHAR never has.
    pads = "nopad" not in collation and "0900" not in collation
    if pads and declared_type(kind).base != "char":
        return True
    return not collation.endswith("_bin")


def _acts(rule: str) -> str:
    """What InnoDB does by a rule; SET DEFAULT it refuses."""
    return rule.lower() if rule.upper() in ("CASCADE", "SET NULL") else ""


def _references(
    rows: list[tuple[Any, ...]], actions: Mapping[str, tuple[str, str]]
) -> tuple[Reference, ...]:
    found: dict[str, list[tuple[Any, ...]]] = {}
    for constraint, *rest in rows:
        found.setdefault(constraint, []).append(tuple(rest))
    references = [
        Reference(
            tuple(part[0] for part in parts),
            parts[0][1],
            parts[0][2],
            tuple(part[3] for part in parts),
            *actions.get(constraint, ("", "")),
        )
        for constraint, parts in found.items()
    ]
    return tuple(dict.fromkeys(references))


def _version(text: str) -> tuple[int, int]:
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
