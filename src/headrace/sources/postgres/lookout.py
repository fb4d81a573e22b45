"""Looks at the catalogs of captured tables, and puts what it finds into the stream.

A look is taken under a lock that DDL must wait for, and written as a message before the lock is
given back: where the message stands, the table is as it says. The lock is that of a SELECT, is
requested for a fifth of a second at most and held for some milliseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping

import msgspec
from psycopg import sql

from ...change.path import table_path
from ...errors import SourceError
from .catalog import Catalog, inserts_name, matches
from .looks import Comparison, LookMessage, TableLook, compare, placed
from .publications import find_pair
from .resume import PostgresResume
from .settings import PostgresSettings
from .transactions import LOOK

logger = logging.getLogger(__name__)

_WHOLE_SECONDS = 60.0  # between two looks at everything: the row type of a table may be in use

# Each row of the catalogs that DDL would replace by another; to look at all of it is far cheaper
# than to look at tables. Enums and composite types are all counted, since any may be in use.
_FINGERPRINT = """
    WITH RECURSIVE part AS (
        SELECT unnest(%s::oid[]) AS oid
        UNION SELECT i.inhrelid FROM pg_inherits i JOIN part ON i.inhparent = part.oid)
    SELECT count(*), sum(hash) FROM (
        SELECT hashint8extended(a.xmin::text::bigint << 12 | a.attnum, a.attrelid::bigint) AS hash
        FROM part JOIN pg_attribute a ON a.attrelid = part.oid WHERE a.attnum > 0
        UNION ALL SELECT hashint8extended(c.xmin::text::bigint, c.oid::bigint)
        FROM part JOIN pg_class c USING (oid)
        UNION ALL SELECT hashint8extended(x.xmin::text::bigint, x.indexrelid::bigint)
        FROM part JOIN pg_index x ON x.indrelid = part.oid WHERE x.indisprimary
        UNION ALL SELECT hashint8extended(i.xmin::text::bigint, i.inhrelid::bigint)
        FROM part JOIN pg_inherits i ON i.inhrelid = part.oid
        UNION ALL SELECT hashint8extended(xmin::text::bigint, oid::bigint) FROM pg_enum
        UNION ALL SELECT hashint8extended(a.xmin::text::bigint << 12 | a.attnum, c.oid::bigint)
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
        WHERE c.relkind = 'c' AND a.attnum > 0) rows"""

_HOLD = """
    SET LOCAL lock_timeout = '200ms'; SET LOCAL synchronous_commit = local;
    LOCK TABLE ONLY {} IN ACCESS SHARE MODE"""

_NAMES = """
    SELECT c.oid::bigint, n.nspname, c.relname
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = ANY (%s::oid[]) AND NOT c.relispartition"""

_PUBLISHED_BY = """
    SELECT p.pubname FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
    WHERE r.prrelid = %s AND p.pubname IN (%s, %s)"""

_EMIT = "SELECT pg_logical_emit_message(true, %s, %s::bytea)"


def present_paths(catalog: Catalog, relations: Iterable[int]) -> dict[int, str]:
    """Those of some tables that are there and no partitions, by their oids."""
    found = catalog.rows(_NAMES, list(relations))
    return {oid: table_path(schema, name) for oid, schema, name in found}


class Lookout:
    """Watches the tables of one source over one connection."""

    def __init__(self, catalog: Catalog, source: PostgresSettings) -> None:
        self._catalog = catalog
        self._source = source
        self._standby = catalog.in_recovery()
        self._fingerprint: tuple[object, ...] = ()
        self._looked = 0.0  # when every table was looked at
        self._seen: dict[int, TableLook] = {}  # as it was sent, or as the log knows it
        self._waiting = False  # whether a table could not be looked at for want of a lock
        self._sought: set[int] = set()  # partitions with rows after which a look was sent
        self._reported: dict[str, int] = {}  # tables of which the stream has that they are gone

    def look(self, resume: PostgresResume, leaves: Mapping[int, int]) -> dict[str, str]:
        """Look whether tables were altered.

        `leaves` are partitions that have come with rows, and their tables: whether such a one is
        gone by now, no look before and none of now shows, so the stream gets one in any case.
        On a standby nothing can be written, so tables that were altered are to be read anew: they
        are returned, with the reason.
        """
        live = resume.live
        found = self._catalog.rows(_FINGERPRINT, list(live))[0]
        due = time.monotonic() - self._looked >= _WHOLE_SECONDS
        sought = {
            leaf: whole
            for leaf, whole in leaves.items()
            if leaf not in self._sought and whole in live and not self._standby
        }
        if not (due or self._waiting or sought) and found == self._fingerprint:
            return {}
        self._fingerprint, self._waiting, self._looked = found, False, time.monotonic()
        altered: dict[str, str] = {}
        for look in self._catalog.looks(list(live)):
            path = live[look.oid]
            known = resume.snapshots[path].look
            if look.oid in sought.values():
                if self._send(look):
                    self._sought |= {leaf for leaf, whole in sought.items() if whole == look.oid}
                continue
            if self._seen.get(look.oid) == look:
                continue
            compared = compare(known, look)
            if known is not None and compared == Comparison(known):
                self._seen[look.oid] = look
            elif not self._standby:
                self._send(look)
            elif known is not None:
                altered[path] = compared.reason or "DDL has altered its columns"
        return altered

    def let_go(self, leaving: dict[str, int]) -> None:
        """Say in the stream that tables are gone: what comes after it is not theirs."""
        # One that came back since is reported once more when it leaves again.
        self._reported = {p: oid for p, oid in self._reported.items() if leaving.get(p) == oid}
        news = {path: oid for path, oid in leaving.items() if path not in self._reported}
        if not news or self._standby:
            return
        self._unpublish(news.values())
        gone = [placed(TableLook(oid, "", "", "default"), path) for path, oid in news.items()]
        self._catalog.rows(_EMIT, LOOK, msgspec.json.encode(LookMessage(gone=tuple(gone))))
        self._reported |= news

    def _unpublish(self, oids: Collection[int]) -> None:
        """Take tables with a name that nobody wants out of publications of ours."""
        first = self._source.publication_name
        ours = find_pair(self._catalog, self._source).ours
        for table in self._catalog.published(first) if ours else ():
            if table.oid not in oids or matches(table.path, self._source.tables):
                continue
            for (publication,) in self._catalog.rows(
                _PUBLISHED_BY, table.oid, first, inserts_name(first)
            ):
                statement = sql.SQL("ALTER PUBLICATION {} DROP TABLE ONLY {}").format(
                    sql.Identifier(publication), sql.Identifier(table.schema, table.name)
                )
                try:
                    self._catalog.alter(statement)
                except SourceError as error:
                    self._pass_over(table.path, error)

    def _send(self, look: TableLook) -> bool:
        """Put a look into the stream; False: somebody has the lock, so later."""
        name = sql.Identifier(look.schema, look.name)
        try:
            with self._catalog.transaction():
                self._catalog.run(sql.SQL(_HOLD).format(name))
                held = self._catalog.look(look.oid)
                if held is None or (held.schema, held.name) != (look.schema, look.name):
                    self._waiting = True
                    return False
                message = msgspec.json.encode(LookMessage((held,)))
                self._catalog.rows(_EMIT, LOOK, message)
        except SourceError as error:
            self._pass_over(table_path(look.schema, look.name), error)
            return False
        self._seen[look.oid] = held
        return True

    def _pass_over(self, table: str, error: SourceError) -> None:
        """Somebody has the lock, or we may not have it; the next look finds the same."""
        if not self._catalog.connected:
            raise error
        self._waiting = True
        logger.debug("source=%s table=%s is looked at later: %s", self._source.name, table, error)
