"""The two publications of a source: which of them has a table, and moving it to the other.

The first publishes every operation. A table whose UPDATE and DELETE the server would then refuse is
in the second, which publishes inserts and truncates only: no statement of an application fails
because of us. A table is in exactly one of them, and is moved in one transaction.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec
from psycopg import sql

from ...errors import SourceRefused, SourceUnavailable
from .catalog import Catalog, Published, inserts_name, matches
from .identity import Member, Written, members, remedy
from .membership import publication_marks, unlogged_tables
from .settings import PostgresSettings

logger = logging.getLogger(__name__)

_GENERATED_COLUMNS = 180000  # the first version that can publish them
_BUSY = "it waits for a lock that somebody holds, and is tried again"

_PUBLICATION = """
    SELECT oid::bigint, puballtables, pubviaroot,
           pubinsert AND pubupdate AND pubdelete AND pubtruncate,
           pubinsert AND NOT pubupdate AND NOT pubdelete AND pubtruncate,
           pubowner = (SELECT oid FROM pg_roles WHERE rolname = current_user),
           coalesce(obj_description(oid, 'pg_publication'), '')
    FROM pg_publication WHERE pubname = %s"""

_LEAVES = """
    SELECT format('%%s.%%s', c.relnamespace::regnamespace, c.relname)
    FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
    JOIN pg_class c ON c.oid = r.prrelid
    WHERE p.pubname = %s AND NOT p.pubviaroot AND c.relkind = 'p'"""

_IDENTITY_INDEX = """
    SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
    WHERE i.indrelid = %s AND i.indisreplident"""


# The rows of the catalogs on which a table's place depends; each change makes new ones. To look
# at them takes a tenth of the time that judging the tables takes.
_FINGERPRINT = """
    WITH RECURSIVE listed AS (
        SELECT r.oid, r.prrelid, r.xmin FROM pg_publication p
        JOIN pg_publication_rel r ON r.prpubid = p.oid WHERE p.pubname IN (%s, %s)),
    part AS (
        SELECT prrelid AS oid FROM listed
        UNION SELECT i.inhrelid FROM pg_inherits i JOIN part ON i.inhparent = part.oid)
    SELECT count(*), sum(hashtextextended(concat_ws(' ', kind, oid, xmin), 0)) FROM (
        SELECT 1 AS kind, oid, xmin FROM listed
        UNION ALL SELECT 2, c.oid, c.xmin FROM part JOIN pg_class c USING (oid)
        UNION ALL SELECT 3, i.indexrelid, i.xmin FROM part JOIN pg_index i ON i.indrelid = part.oid
        UNION ALL SELECT 4, p.oid, p.xmin FROM pg_publication p WHERE p.pubname IN (%s, %s)
    ) rows"""


class PublicationNote(msgspec.Struct, frozen=True):
    """The comment on the second publication. Its schema must not change: the trigger reads it."""

    headrace: str  # the first publication
    made: bool = False  # whether the first one was made by us too
    full: bool = False  # whether every captured table gets REPLICA IDENTITY FULL
    identities: dict[str, str] = {}  # a table's oid -> what it had before: d, n, or i and an index


@dataclass(frozen=True, slots=True)
class FoundPublication:
    """A publication as the server has it."""

    oid: int
    all_tables: bool
    via_root: bool
    everything: bool  # every operation is sent
    inserts: bool  # inserts and truncates are, and nothing else
    own: bool  # it belongs to the role of this session
    comment: str

    @property
    def note(self) -> PublicationNote | None:
        """What we have written about it; None: nothing."""
        try:
            return msgspec.json.decode(self.comment, type=PublicationNote)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


@dataclass(frozen=True, slots=True)
class PublicationPair:
    """The two publications of a source; None: there is none."""

    first: FoundPublication | None
    second: FoundPublication | None
    by_default: bool  # whether the config leaves the name to us

    @property
    def note(self) -> PublicationNote | None:
        """What we have written about them."""
        return self.second.note if self.second else None

    @property
    def ours(self) -> bool:
        """Whether the first one is ours to take tables out of."""
        if self.note is not None:
            return self.note.made
        first = self.first
        if first is None or first.all_tables:
            return False
        return self.by_default or (first.own and first.via_root)


@dataclass(slots=True)
class PublishedTables:
    """What of the wanted tables is published, and how."""

    tables: list[Published] = field(default_factory=list)
    inserts_only: dict[str, str] = field(default_factory=dict)  # table -> what changes that
    refused: dict[str, str] = field(default_factory=dict)  # table -> why it is not captured
    warnings: dict[str, str] = field(default_factory=dict)  # table -> what is wrong with it
    added: set[str] = field(default_factory=set)  # tables that were in neither publication
    inserts: int = 0  # the second publication's oid; 0: there is none
    marks: dict[str, str] = field(default_factory=dict)  # table -> how it is published


def find_pair(catalog: Catalog, source: PostgresSettings) -> PublicationPair:
    """The publications as they are."""
    first, second = (
        _find(catalog, name)
        for name in (source.publication_name, inserts_name(source.publication_name))
    )
    return PublicationPair(first, second, by_default=not source.publication)


def _find(catalog: Catalog, name: str) -> FoundPublication | None:
    rows = catalog.rows(_PUBLICATION, name)
    return FoundPublication(*rows[0]) if rows else None


def creation(catalog: Catalog, name: str, tables: Iterable[str] = (), *, options: str = "") -> str:
    """The statement that creates a publication of these tables."""
    options += "publish_via_partition_root = true"
    if catalog.version() >= _GENERATED_COLUMNS:
        options += ", publish_generated_columns = stored"
    listed = ", ".join(tables)
    listed = f" FOR {listed}" if listed else ""
    return f"CREATE PUBLICATION {_quoted(name)}{listed} WITH ({options});"


def inserts_creation(catalog: Catalog, publication: str, tables: Iterable[str] = ()) -> str:
    """The statement that creates the second publication."""
    only = "publish = 'insert, truncate', "
    return creation(catalog, inserts_name(publication), tables, options=only)


def everything_published(publication: str) -> str:
    """The statement that makes a publication send every operation."""
    name = _quoted(publication)
    return f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate');"


def only_inserts_published(publication: str) -> str:
    """The statement that makes the second publication send what it should."""
    name = _quoted(inserts_name(publication))
    return f"ALTER PUBLICATION {name} SET (publish = 'insert, truncate');"


class Publications:
    """Keeps the two publications of a source right, over one connection."""

    def __init__(
        self, catalog: Catalog, source: PostgresSettings, lock: threading.Lock | None = None
    ) -> None:
        """`lock` is held while they are altered: another thread may keep the same ones right."""
        self.lock = lock or threading.Lock()
        self._catalog = catalog
        self._source = source
        self._first = source.publication_name
        self._second = inserts_name(self._first)
        self._tried: dict[str, str] = {}  # tables whose publishing was refused, and why
        self._harmful: set[str] = set()  # tables that could not be moved for want of a lock
        self._no_second = False  # whether we may not create or alter the second publication
        self._logged: set[str] = set()
        self._fingerprint: tuple[object, ...] = ()  # as of the last look at all
        self._guarded: tuple[object, ...] = ()  # as of the last look at what harms
        self._stuck: set[str] = set()  # tables that we may not move there
        self._movable: set[str] = set()  # tables that could be in the first publication again

    def protect(self) -> None:
        """At the start, before all else: no UPDATE or DELETE fails for longer because of us."""
        with self.lock:
            self._protect()

    def _protect(self) -> None:
        pair = find_pair(self._catalog, self._source)
        if pair.first is None or not pair.ours:
            return
        pair = self._with_second(pair)
        for member in self._with_identities(pair, members(self._catalog, self._first)):
            if member.publication == self._first and member.refused:
                self._move(member, pair, PublishedTables())

    def guard(self) -> None:
        """As `protect`; costs little where nothing has changed since the last look."""
        found = self._look()
        if self._harmful or found != self._guarded:
            self._guarded = found
            self._harmful.clear()
            self.protect()

    def changed(self, durable: Collection[str]) -> bool:
        """Whether tables are in another state than when they were published."""
        if self._harmful or self._movable.intersection(durable):
            return True
        return self._look() != self._fingerprint

    def publish(self, durable: Collection[str] = ()) -> PublishedTables:
        """Publish the wanted tables, each where it belongs.

        A table goes back to the first publication once the log is known to remember that it was in
        the second (`durable`): what was changed meanwhile is in none, so it needs a new snapshot.
        """
        with self.lock:
            return self._publish(durable)

    def _publish(self, durable: Collection[str]) -> PublishedTables:
        self._fingerprint = self._look()
        pair = self._with_second(self._with_first(find_pair(self._catalog, self._source)))
        wanted = [table.oid for table in self._catalog.wanted(self._source.tables)]
        found = self._with_identities(pair, self._members(wanted))
        result = PublishedTables(inserts=pair.second.oid if pair.second else 0)
        self._harmful.clear()
        back = self._to_move_back(found, durable)
        for member in found:
            if not member.publication:
                self._add(member, pair, result)
            elif member.publication == self._first and member.refused:
                self._move(member, pair, result)
            elif member in back:
                self._move_back(member)
        published = self._catalog.published(self._first)
        result.tables = [t for t in published if matches(t.path, self._source.tables)]
        result.marks = publication_marks(self._catalog, self._first)
        for path, fix in unlogged_tables(self._catalog, self._source.tables).items():
            result.warnings[path] = f"it is UNLOGGED and not captured; to change that: {fix}"
        self._show_inserts_only(result)
        return result

    def _look(self) -> tuple[object, ...]:
        names = (self._first, self._second)
        return self._catalog.rows(_FINGERPRINT, *names, *names)[0]

    # -- the publications -----------------------------------------------------------------------

    def _with_first(self, pair: PublicationPair) -> PublicationPair:
        if pair.first is None:
            # A second one that is there may remember identities.
            note = msgspec.structs.replace(
                pair.note or PublicationNote(self._first), made=True, full=self._full
            )
            self._catalog.alter(
                _sql(creation(self._catalog, self._first)),
                *([] if pair.second else [_sql(inserts_creation(self._catalog, self._first))]),
                self._comment(note),
            )
            return find_pair(self._catalog, self._source)
        if not pair.first.everything:
            raise SourceRefused(
                f"publication {self._first} does not publish every operation",
                hint=everything_published(self._first),
            )
        return pair

    def _with_second(self, pair: PublicationPair) -> PublicationPair:
        """Create or correct the second publication, where we may."""
        assert pair.first is not None
        if pair.second is not None and not pair.second.inserts and pair.note is None:
            # Somebody else's, and made for something else.
            raise self._wrong_second()
        statements = []
        note = pair.note or PublicationNote(self._first, made=pair.ours)
        if pair.second is None and not pair.first.all_tables:
            statements.append(_sql(inserts_creation(self._catalog, self._first)))
        elif pair.second is not None and not pair.second.inserts:
            statements.append(_sql(only_inserts_published(self._first)))
        noted = pair.note is not None and note.full == self._full
        if not self._no_second and (statements or (pair.second and not noted)):
            note = msgspec.structs.replace(note, full=self._full)
            try:
                self._catalog.alter(*statements, self._comment(note))
            except SourceRefused as error:
                if pair.second is not None and not pair.second.inserts:
                    raise self._wrong_second() from error
                self._log(f"publication {self._second} cannot be created or altered: {error}")
                self._no_second = True
            return find_pair(self._catalog, self._source)
        return pair

    def _wrong_second(self) -> SourceRefused:
        fix = only_inserts_published(self._first)
        return SourceRefused(
            f"publication {self._second} must publish inserts and truncates only",
            hint=f"Set `publication` to another name, or run: {fix}",
        )

    def _comment(self, note: PublicationNote) -> sql.Composed:
        return comment(self._first, note)

    # -- replica identities ---------------------------------------------------------------------

    @property
    def _full(self) -> bool:
        return self._source.identity == "full"

    def _with_identities(self, pair: PublicationPair, found: list[Member]) -> list[Member]:
        """Where the source's setting says so, set REPLICA IDENTITY FULL."""
        lacking = [(member, part) for member in found for part in self._lacking(member)]
        if not lacking or pair.second is None:
            return found
        for member, part in lacking:
            self._set_full(member, part)
        wanted = [member.oid for member in found if not member.publication]
        return self._members(wanted)

    def _lacking(self, member: Member) -> list[Written]:
        if not self._full or not matches(member.path, self._source.tables):
            return []
        # The server refuses a full identity beside a list of columns, or with virtual ones.
        if member.columns is not None or any(part.has_virtual for part in member.parts):
            return []
        return [part for part in member.parts if part.identity != "f"]

    def _set_full(self, member: Member, part: Written) -> None:
        note = find_pair(self._catalog, self._source).note
        assert note is not None
        former = part.identity
        if former == "i":
            index = self._catalog.rows(_IDENTITY_INDEX, part.oid)
            former = f"i{index[0][0]}" if index else "n"  # without its index, it is the same
        remembered = note.identities | {str(part.oid): former}
        statement = f"ALTER TABLE ONLY {part.quoted} REPLICA IDENTITY FULL;"
        try:
            self._alter(
                self._comment(msgspec.structs.replace(note, identities=remembered)),
                _sql(statement),
            )
        except SourceRefused as error:
            self._log(f"table {member.path}: {error}; its owner can run: {statement}")

    # -- tables ---------------------------------------------------------------------------------

    def _members(self, wanted: Collection[int]) -> list[Member]:
        """Those of both publications, and the wanted ones that are in neither."""
        found = members(self._catalog, self._first, wanted=wanted)
        published = {member.oid for member in found if member.publication}
        return [m for m in found if m.publication or m.oid not in published]

    def _to_move_back(self, found: Iterable[Member], durable: Collection[str]) -> list[Member]:
        return [
            member
            for member in found
            if member.publication == self._second
            and not member.refused
            and member.path in durable
            and member.path not in self._stuck
        ]

    def _add(self, member: Member, pair: PublicationPair, result: PublishedTables) -> None:
        """Publish a table for the first time."""
        path, name = member.path, self._second if member.refused else self._first
        statement = f"ALTER PUBLICATION {_quoted(name)} ADD {member.published};"
        if path in self._tried:
            result.refused[path] = self._tried[path]
            return
        if member.refused and pair.second is None:
            statement = inserts_creation(self._catalog, self._first, [member.published])
            result.refused[path] = (
                "it is not published, because the server would then refuse its UPDATE and DELETE; "
                f"its owner can run: {statement}"
            )
            return
        self._expect_roots()
        try:
            if self._alter(_sql(statement)):
                result.added.add(path)
            else:
                result.warnings[path] = f"it is not published yet: {_BUSY}"
        except SourceRefused as error:
            why = f"it is not published ({error}); its owner can run: {statement}"
            result.refused[path] = self._tried[path] = why

    def _move(self, member: Member, pair: PublicationPair, result: PublishedTables) -> None:
        """Take a table out of the first publication, for its UPDATE and DELETE fail there."""
        harm = f"publication {self._first} makes the server refuse its UPDATE and DELETE"
        fix = remedy(self._first, member)
        if pair.second is None or not (pair.ours and member.listed):
            result.warnings[member.path] = f"{harm}; run: {fix}"
            return
        drop = f"ALTER PUBLICATION {_quoted(self._first)} DROP TABLE ONLY {member.quoted};"
        add = f"ALTER PUBLICATION {_quoted(self._second)} ADD {member.published};"
        if self._is_in(self._second, member):
            add = ""
        try:
            if not self._alter(_sql(drop), _sql(add)):
                self._harmful.add(member.path)
                result.warnings[member.path] = f"{harm}; {_BUSY}"
        except SourceRefused as error:
            result.warnings[member.path] = f"{harm} ({error}); run: {drop} {add} or: {fix}"

    def _is_in(self, publication: str, member: Member) -> bool:
        found = members(self._catalog, self._first)
        return any(m.oid == member.oid and m.publication == publication for m in found)

    def _move_back(self, member: Member) -> None:
        drop = f"ALTER PUBLICATION {_quoted(self._second)} DROP TABLE ONLY {member.quoted};"
        add = f"ALTER PUBLICATION {_quoted(self._first)} ADD {member.published};"
        if self._is_in(self._first, member):
            add = ""
        try:
            self._alter(_sql(drop), _sql(add))
        except SourceRefused as error:
            self._stuck.add(member.path)
            self._log(f"table {member.path} stays in {self._second}: {error}")

    def _show_inserts_only(self, result: PublishedTables) -> None:
        self._movable.clear()
        for member in members(self._catalog, self._first):
            if member.publication == self._second and not member.refused:
                self._movable |= {member.path} - self._stuck
            if member.publication == self._second and matches(member.path, self._source.tables):
                fix = remedy(self._first, member)
                result.inserts_only[member.path] = fix
                self._log(
                    f"table {member.path} is captured for inserts only; all of it after: {fix}"
                )
        for path, why in result.warnings.items():
            self._log(f"table {path}: {why}")

    def _expect_roots(self) -> None:
        """A publication that somebody else made must send partitioned tables as one table."""
        for (leaf,) in self._catalog.rows(_LEAVES, self._first):
            raise SourceRefused(
                f"publication {self._first} sends the partitions of {leaf}, not the table",
                hint=f"ALTER PUBLICATION {_quoted(self._first)} "
                "SET (publish_via_partition_root = true);",
            )

    def _alter(self, *statements: sql.Composed) -> bool:
        """Run DDL in one transaction; False when somebody holds a lock that it needs."""
        try:
            self._catalog.alter(*statements)
        except SourceUnavailable:
            if not self._catalog.connected:
                raise
            return False
        return True

    def _log(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.warning("source=%s %s", self._source.name, line)


def comment(publication: str, note: PublicationNote) -> sql.Composed:
    """The statement that writes a note to the second publication."""
    return sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(
        sql.Identifier(inserts_name(publication)), sql.Literal(msgspec.json.encode(note).decode())
    )


def _sql(statement: str) -> sql.Composed:
    return sql.Composed([sql.SQL(statement)])


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()
