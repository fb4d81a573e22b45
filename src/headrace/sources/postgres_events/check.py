"""What `headrace check` looks at on a PostgreSQL server that is captured by an event table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from psycopg import sql

from ...errors import HeadraceError
from .. import Finding
from ..postgres.catalog import Published
from . import ddl
from .catalog import EventCatalog, Triggers
from .settings import PostgresEventsSettings
from .triggers import create

_OLDEST = 150000

_TABLE = """
    SELECT has_table_privilege(c.oid, 'SELECT'), has_schema_privilege(n.oid, 'USAGE'),
           EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s"""

_RIGHTS = """
    SELECT p.relname, w.needed FROM (VALUES ('events', 'SELECT'), ('events', 'DELETE'),
        ('relations', 'SELECT'), ('state', 'SELECT')) w(relname, needed)
    JOIN pg_class p ON p.relname = w.relname
    JOIN pg_namespace n ON n.oid = p.relnamespace AND n.nspname = %s
    WHERE NOT has_table_privilege(p.oid, w.needed)
      AND (%s OR w.needed = 'SELECT')"""


def check(source: PostgresEventsSettings) -> list[Finding]:
    """Every table, trigger and privilege that capturing needs, and what fixes it."""
    try:
        connection = source.address.connect()
    except HeadraceError as error:
        fix = "Check the source's url, the server's pg_hba.conf and that it listens there."
        return [Finding("connection", ok=False, detail=str(error), fix=fix)]
    catalog = EventCatalog(connection, source=source.name, schema=source.schema)
    with closing(catalog):
        return list(_Check(source, catalog).findings())


class _Check:
    """The looks at one server."""

    def __init__(self, source: PostgresEventsSettings, catalog: EventCatalog) -> None:
        self._source = source
        self._catalog = catalog
        self._install = f"headrace postgres install {source.name}"
        self._user = str(catalog.rows("SELECT current_user")[0][0])

    def findings(self) -> Iterator[Finding]:
        """All of them, in the order in which they matter."""
        yield Finding("connection", ok=True, detail=self._source.url.masked_url())
        yield self._version()
        yield self._primary()
        yield self._event_table()
        if self._catalog.edition() is not None:
            yield self._rights()
        yield from self._tables()

    def _version(self) -> Finding:
        number = self._catalog.version()
        ok = number >= _OLDEST
        fix = "" if ok else "Upgrade the server to PostgreSQL 15 or later."
        return Finding("version", ok=ok, detail=f"PostgreSQL {number // 10000}", fix=fix)

    def _primary(self) -> Finding:
        standby = self._catalog.rows("SELECT pg_is_in_recovery()")[0][0]
        fix = "Let the url name the primary: triggers fire only there." if standby else ""
        detail = "a standby" if standby else "takes writes"
        return Finding("primary", ok=not standby, detail=detail, fix=fix)

    def _event_table(self) -> Finding:
        schema, found = self._source.schema, self._catalog.edition()
        if found is None:
            may = self._source.install and self._may_create(schema)
            detail = f"{schema}.events " + ("will be created" if may else "does not exist")
            return Finding("event table", ok=may, detail=detail, fix="" if may else self._install)
        ok = found == ddl.edition(schema)
        detail = f"{schema}.events exists" + ("" if ok else ", of another edition of Headrace")
        return Finding("event table", ok=ok, detail=detail, fix="" if ok else self._install)

    def _may_create(self, schema: str) -> bool:
        query = """SELECT coalesce((SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace
                   WHERE nspname = %s), has_database_privilege(current_database(), 'CREATE'))"""
        return bool(self._catalog.rows(query, schema)[0][0])

    def _rights(self) -> Finding:
        schema, user = _name(self._source.schema), _name(self._user)
        missing = self._catalog.rows(_RIGHTS, self._source.schema, self._source.trim)
        grants = [f"GRANT {need} ON {schema}.{_name(table)} TO {user};" for table, need in missing]
        if missing:
            grants.insert(0, f"GRANT USAGE ON SCHEMA {schema} TO {user};")
        detail = f"user {self._user} " + ("lacks rights on it" if missing else "may read it")
        return Finding("event table rights", ok=not missing, detail=detail, fix=" ".join(grants))

    def _tables(self) -> Iterator[Finding]:
        found = self._catalog.wanted(self._source.tables)
        if not found:
            fix = "Check `tables` of the source, and that the tables exist in this database."
            detail = f"no table matches {', '.join(self._source.tables)}"
            yield Finding("tables", ok=False, detail=detail, fix=fix)
        triggers = self._catalog.triggers()
        for table in found:
            yield self._table(table, triggers.get(table.oid))

    def _table(self, table: Published, triggers: Triggers | None) -> Finding:
        what = f"table {table.path}"
        readable, usable, keyed = self._catalog.rows(_TABLE, table.oid)[0]
        user, name = _name(self._user), ddl.quoted_table((table.schema, table.name))
        if not usable or not readable:
            fix = f"GRANT USAGE ON SCHEMA {_name(table.schema)} TO {user};" if not usable else ""
            fix = f"{fix} GRANT SELECT ON {name} TO {user};".strip()
            return Finding(what, ok=False, detail="may not be read", fix=fix)
        statement = create(self._source.schema, self._catalog.target(table))
        if triggers is None or not triggers.complete:
            may = self._source.install and self._catalog.owns(table.oid)
            detail = "gets its triggers at the start" if may else "has no triggers, and is not ours"
            return Finding(what, ok=may, detail=detail, fix="" if may else statement)
        if not triggers.enabled:
            return Finding(what, ok=False, detail="has triggers that are disabled", fix=statement)
        if not triggers.always:
            detail = "has triggers that do not fire for rows that replication or a restore writes"
            return Finding(what, ok=False, detail=detail, fix=statement)
        detail = "writes its changes" if keyed else "writes its changes; it has no primary key"
        if triggers.current:
            return Finding(what, ok=True, detail=detail)
        # Slower, and it cannot become a partition of another captured table.
        detail += ", by triggers of an earlier edition"
        return Finding(what, ok=True, detail=detail, fix=statement)


def _name(name: str) -> str:
    return sql.Identifier(name).as_string()
