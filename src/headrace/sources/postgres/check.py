"""What `headrace check` looks at on a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from psycopg import sql

from ...errors import HeadraceError
from .. import Finding
from . import ddl
from .catalog import Catalog, inserts_name
from .identity import Member, members, remedy
from .membership import unlogged_tables
from .publications import (
    PublicationPair,
    creation,
    everything_published,
    find_pair,
    inserts_creation,
    only_inserts_published,
)
from .settings import PostgresSettings

_OLDEST = 150000

_USER = """
    SELECT current_user, rolsuper, rolreplication OR rolsuper
        OR pg_has_role(current_user, 'rds_replication', 'member')
    FROM pg_roles WHERE rolname = current_user"""
_USER_PLAIN = """
    SELECT current_user, rolsuper, rolreplication OR rolsuper
    FROM pg_roles WHERE rolname = current_user"""

_RIGHTS = """
    SELECT c.oid::bigint, has_table_privilege(c.oid, 'SELECT'), pg_has_role(c.relowner, 'USAGE'),
           has_schema_privilege(c.relnamespace, 'USAGE'), row_security_active(c.oid)
    FROM pg_class c WHERE c.oid = ANY (%s::oid[])"""

_MAY_CREATE = """
    SELECT current_database(), current_user, has_database_privilege(current_database(), 'CREATE')"""


@dataclass(frozen=True, slots=True)
class _TableRights:
    readable: bool
    owned: bool
    reachable: bool  # its schema may be used
    filtered: bool  # a policy may hide rows of it


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
        yield self._slot()
        yield from self._published()
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

    def _slot(self) -> Finding:
        name = self._source.slot_name
        slot = self._catalog.slot(name)
        if slot is None:
            return Finding("slot", ok=True, detail=f"{name} will be created")
        here = self._catalog.rows("SELECT current_database()")[0][0]
        ok = slot.plugin == "pgoutput" and slot.database == here and not slot.lost
        detail = f"{name}: plugin {slot.plugin}, database {slot.database}"
        detail += ", WAL lost" if slot.lost else ""
        detail += "" if ok else "; a new start replaces it"
        return Finding("slot", ok, detail, "" if ok else f"headrace snapshot {self._source.name}")

    def _published(self) -> Iterator[Finding]:
        """The publications, and each table."""
        globs, first = self._source.tables, self._source.publication_name
        wanted = [table.oid for table in self._catalog.wanted(globs)]
        if not wanted:
            fix = "Check `tables` of the source, and that the tables exist in this database."
            yield Finding(
                "tables", ok=False, detail=f"no table matches {', '.join(globs)}", fix=fix
            )
        found = members(self._catalog, first, wanted=wanted)
        published = {member.oid for member in found if member.publication}
        found = [m for m in found if m.oid in wanted and (m.publication or m.oid not in published)]
        rights = {
            oid: _TableRights(*each)
            for oid, *each in self._catalog.rows(_RIGHTS, [member.oid for member in found])
        }
        pair = find_pair(self._catalog, self._source)
        missing = [member for member in found if not member.publication]
        foreign = {member.oid for member in missing if not rights[member.oid].owned}
        yield self._first(pair, [m for m in missing if not m.refused], foreign)
        yield self._second(pair, [m for m in missing if m.refused], foreign)
        for member in found:
            yield self._table(member, rights[member.oid], pair)
        for path, fix in unlogged_tables(self._catalog, globs).items():
            detail = "not captured: an UNLOGGED table writes no row to the WAL. To change it:"
            yield Finding(f"table {path}", ok=True, detail=detail, fix=fix)

    def _first(self, pair: PublicationPair, missing: list[Member], foreign: set[int]) -> Finding:
        """The publication of every operation, and tables that it should have."""
        name = self._source.publication_name
        if pair.first is not None:
            ok = pair.first.everything
            detail = f"{name} exists" if ok else f"{name} does not publish every operation"
            return Finding("publication", ok, detail, "" if ok else everything_published(name))
        statement = creation(self._catalog, name, [member.published for member in missing])
        owned = foreign.isdisjoint(member.oid for member in missing)
        return self._creation("publication", name, statement, owned=owned)

    def _second(self, pair: PublicationPair, missing: list[Member], foreign: set[int]) -> Finding:
        """The publication for inserts, and tables that it should have."""
        what, first = "publication for inserts", self._source.publication_name
        name = inserts_name(first)
        if pair.second is not None:
            ok = pair.second.inserts
            detail = f"{name} {'exists' if ok else 'must publish inserts and truncates only'}"
            return Finding(what, ok, detail, "" if ok else only_inserts_published(first))
        may_create = self._catalog.rows(_MAY_CREATE)[0][2]
        if (pair.first and pair.first.all_tables) or not (missing or may_create):
            return Finding(what, ok=True, detail=f"{name} is not needed")
        tables = [member.published for member in missing]
        statement = inserts_creation(self._catalog, first, tables)
        owned = foreign.isdisjoint(member.oid for member in missing)
        return self._creation(what, name, statement, owned=owned)

    def _creation(self, what: str, name: str, statement: str, *, owned: bool) -> Finding:
        database, user, may_create = self._catalog.rows(_MAY_CREATE)[0]
        if may_create and owned:
            return Finding(what, ok=True, detail=f"{name} will be created")
        if not owned:
            detail = f"{name} does not exist, and {user} does not own every table"
            return Finding(what, ok=False, detail=detail, fix=f"{statement}  -- as their owner")
        detail = f"{name} does not exist, nor may {user} create it"
        grant = f"GRANT CREATE ON DATABASE {_name(database)} TO {_name(user)};"
        return Finding(what, ok=False, detail=detail, fix=grant)

    def _table(self, member: Member, rights: _TableRights, pair: PublicationPair) -> Finding:
        what, first = f"table {member.path}", self._source.publication_name
        lacks, fixes = [], []
        if not rights.readable or not rights.reachable:
            lacks.append("may not be read")
            fixes.append(self._grant(member, rights))
        if rights.filtered:
            lacks.append("row-level security may hide rows of it")
            fixes.append(f"ALTER ROLE {self._user} BYPASSRLS;")
        if not member.publication and not rights.owned:
            lacks.append("is not published, and not ours")
            if (pair.second if member.refused else pair.first) is not None:
                name = inserts_name(first) if member.refused else first
                fixes.append(f"ALTER PUBLICATION {_name(name)} ADD {member.published};")
        if member.publication == first and member.refused:
            lacks.append(f"{first} makes the server refuse its UPDATE and DELETE")
            fixes.append(remedy(first, member))
        if lacks:
            return Finding(what, ok=False, detail="; ".join(lacks), fix=" ".join(fixes))
        if self._source.identity == "full" and rights.owned and member.columns is None:
            return Finding(what, ok=True, detail="old row: all columns")
        if member.refused or member.publication == inserts_name(first):
            detail = "inserts only, or the server would refuse its UPDATE and DELETE. To change it:"
            if not member.refused:
                detail = "inserts only, until it is moved by `headrace run`, or by:"
            return Finding(what, ok=True, detail=detail, fix=remedy(first, member))
        sent = {"d": "key", "i": "index", "f": "all columns"}[member.parts[0].identity]
        return Finding(what, ok=True, detail=f"old row: {sent}")

    @property
    def _user(self) -> str:
        return _name(self._catalog.rows("SELECT current_user")[0][0])

    def _grant(self, member: Member, rights: _TableRights) -> str:
        usage = f"GRANT USAGE ON SCHEMA {_name(member.schema)} TO {self._user};"
        select = f"GRANT SELECT ON {member.quoted} TO {self._user};"
        return " ".join([*([] if rights.reachable else [usage]), select])

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
