"""What `headrace check` looks at on a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator

from psycopg import sql

from ...errors import HeadraceError
from .. import Finding
from . import ddl
from .catalog import Catalog
from .publications import everything_published, find_pair
from .settings import PostgresSettings

_OLDEST = 150000

_USER = """
    SELECT current_user, rolsuper, rolreplication OR rolsuper
        OR pg_has_role(current_user, 'rds_replication', 'member')
    FROM pg_roles WHERE rolname = current_user"""
_USER_PLAIN = """
    SELECT current_user, rolsuper, rolreplication OR rolsuper
    FROM pg_roles WHERE rolname = current_user"""

_TABLE = """
    SELECT c.relreplident, has_table_privilege(c.oid, 'SELECT'),
           pg_has_role(c.relowner, 'USAGE'),
           EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid
                   AND CASE c.relreplident WHEN 'i' THEN i.indisreplident
                       ELSE i.indisprimary END),
           has_schema_privilege(n.oid, 'USAGE')
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s"""


def check(source: PostgresSettings) -> list[Finding]:
    """Every setting and privilege that capturing needs, with the statement that fixes it."""
    try:
        connection = source.address.connect()
    except HeadraceError as error:
        fix = "Check the source's url, the server's pg_hba.conf and that it listens there."
        return [Finding("connection", ok=False, detail=str(error), fix=fix)]
    catalog = Catalog(connection, source=source.name)
    try:
        return list(_Check(source, catalog).findings())
    finally:
        catalog.close()


class _Check:
    """The looks at one server."""

    def __init__(self, source: PostgresSettings, catalog: Catalog) -> None:
        self._source = source
        self._catalog = catalog

    def findings(self) -> Iterator[Finding]:
        """All of them, in the order in which they matter."""
        yield Finding("connection", ok=True, detail=self._source.url.masked_url())
        yield self._version()
        yield self._wal_level()
        yield self._replication_role()
        yield from self._room()
        yield from self._publication_and_slot()
        yield from self._tables()
        if self._source.ddl:
            yield self._event_trigger()

    def _setting(self, name: str) -> str:
        return str(self._catalog.rows("SELECT current_setting(%s)", name)[0][0])

    def _version(self) -> Finding:
        number = int(self._setting("server_version_num"))
        ok = number >= _OLDEST
        fix = "" if ok else "Upgrade the server to PostgreSQL 15 or later."
        return Finding("version", ok=ok, detail=f"PostgreSQL {number // 10000}", fix=fix)

    def _wal_level(self) -> Finding:
        level = self._setting("wal_level")
        ok = level == "logical"
        fix = "" if ok else "ALTER SYSTEM SET wal_level = logical;  -- then restart the server"
        return Finding("wal_level", ok=ok, detail=level, fix=fix)

    def _replication_role(self) -> Finding:
        # Amazon's servers grant replication through a role of their own.
        rds = self._catalog.rows("SELECT 1 FROM pg_roles WHERE rolname = 'rds_replication'")
        user, _, ok = self._catalog.rows(_USER if rds else _USER_PLAIN)[0]
        grant = f"GRANT rds_replication TO {_name(user)};" if rds else ""
        fix = grant or f"ALTER ROLE {_name(user)} REPLICATION;"
        detail = f"user {user} {'may' if ok else 'may not'} replicate"
        return Finding("replication privilege", ok=ok, detail=detail, fix="" if ok else fix)

    def _room(self) -> Iterator[Finding]:
        used = {
            "max_replication_slots": "SELECT count(*) FROM pg_replication_slots",
            "max_wal_senders": "SELECT count(*) FROM pg_stat_replication",
        }
        have_slot = self._catalog.slot(self._source.slot_name) is not None
        for setting, query in used.items():
            limit, taken = int(self._setting(setting)), int(self._catalog.rows(query)[0][0])
            # One for good (unless it is there already), one while a copy begins.
            ok = limit - taken >= (1 if have_slot else 2)
            fix = "" if ok else f"ALTER SYSTEM SET {setting} = {taken + 10};  -- then restart"
            yield Finding(setting, ok=ok, detail=f"{taken} of {limit} in use", fix=fix)

    def _publication_and_slot(self) -> Iterator[Finding]:
        name = self._source.publication_name
        first = find_pair(self._catalog, self._source).first
        if first is not None:
            ok = first.everything
            detail = f"{name} exists" if ok else f"{name} does not publish every operation"
            yield Finding("publication", ok, detail, "" if ok else everything_published(name))
        else:
            yield self._may_create_publication(name)
        slot = self._catalog.slot(self._source.slot_name)
        if slot is None:
            detail = f"{self._source.slot_name} will be created"
            yield Finding("slot", ok=True, detail=detail)
            return
        here = self._catalog.rows("SELECT current_database()")[0][0]
        ok = slot.plugin == "pgoutput" and slot.database == here and not slot.lost
        detail = f"{self._source.slot_name}: plugin {slot.plugin}, database {slot.database}"
        detail += ", WAL lost" if slot.lost else ""
        fix = f"headrace snapshot {self._source.name}  -- drops it and starts anew"
        yield Finding("slot", ok=ok, detail=detail, fix="" if ok else fix)

    def _may_create_publication(self, name: str) -> Finding:
        database, user, ok = self._catalog.rows(
            "SELECT current_database(), current_user,"
            " has_database_privilege(current_database(), 'CREATE')"
        )[0]
        fix = f"GRANT CREATE ON DATABASE {_name(database)} TO {_name(user)};"
        detail = (
            f"{name} will be created" if ok else f"{name} does not exist, nor may {user} create it"
        )
        return Finding("publication", ok=ok, detail=detail, fix="" if ok else fix)

    def _tables(self) -> Iterator[Finding]:
        globs = self._source.tables
        found = self._catalog.candidates(globs)
        if not found:
            fix = "Check `tables` of the source, and that the tables exist in this database."
            detail = f"no table matches {', '.join(globs)}"
            yield Finding("tables", ok=False, detail=detail, fix=fix)
        published = {
            (table.schema, table.name)
            for table in self._catalog.published(self._source.publication_name)
        }
        for schema, name in found:
            yield self._table(schema, name, published=(schema, name) in published)

    def _table(self, schema: str, name: str, *, published: bool) -> Finding:
        identity, readable, owned, has_key, usable = self._catalog.rows(_TABLE, schema, name)[0]
        quoted = f"{_name(schema)}.{_name(name)}"
        what = f"table {schema}.{name}"
        user = self._catalog.rows("SELECT current_user")[0][0]
        if not usable or not readable:
            fix = f"GRANT USAGE ON SCHEMA {_name(schema)} TO {_name(user)};" if not usable else ""
            fix = " ".join([fix, f"GRANT SELECT ON {quoted} TO {_name(user)};"]).strip()
            return Finding(what, ok=False, detail="may not be read", fix=fix)
        if not published and not owned:
            publication = _name(self._source.publication_name)
            fix = f"ALTER PUBLICATION {publication} ADD TABLE {quoted};  -- as its owner"
            return Finding(what, ok=False, detail="is not published, and not ours", fix=fix)
        if identity == "n" or (identity != "f" and not has_key):
            detail = "has no replica identity: the server will refuse UPDATE and DELETE on it"
            fix = f"ALTER TABLE {quoted} REPLICA IDENTITY FULL;  -- or give it a primary key"
            return Finding(what, ok=False, detail=detail, fix=fix)
        sent = {"d": "key", "i": "index", "f": "all columns"}[identity]
        return Finding(what, ok=True, detail=f"old row: {sent}")

    def _event_trigger(self) -> Finding:
        found = ddl.installed(self._catalog)
        user, superuser, _ = self._catalog.rows(_USER_PLAIN)[0]
        ok = found == ddl.EDITION or superuser
        fix = f"ALTER ROLE {_name(user)} SUPERUSER;  -- once, or set ddl: false"
        if found == ddl.EDITION:
            detail = "installed"
        elif found is None:
            detail = "will be installed" if ok else "needs a superuser"
        else:
            # An older one may let whoever can log in act as the superuser who has installed it.
            detail = "will be renewed" if ok else "is of another edition; needs a superuser"
        return Finding("ddl event trigger", ok=ok, detail=detail, fix="" if ok else fix)


def _name(name: str) -> str:
    return sql.Identifier(name).as_string()
