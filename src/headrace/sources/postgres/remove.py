"""Takes everything out of a database that Headrace has put there.

The order matters: without its publications no table needs a replica identity, so those go first.
"""

from __future__ import annotations

from collections.abc import Iterator

from psycopg import sql

from ...change.path import table_path
from ...errors import SourceError, SourceRefused
from .. import Removal
from . import slot
from .catalog import Catalog, inserts_name
from .publications import PublicationNote, find_pair
from .settings import PostgresSettings

_EVENT_TRIGGERS = """
    SELECT t.evtname FROM pg_event_trigger t
    JOIN pg_proc f ON f.oid = t.evtfoid JOIN pg_namespace n ON n.oid = f.pronamespace
    WHERE n.nspname = 'headrace' AND t.evtname LIKE 'headrace\\_%%' ORDER BY 1"""
_FUNCTIONS = """
    SELECT f.oid::regprocedure::text FROM pg_proc f
    JOIN pg_namespace n ON n.oid = f.pronamespace
    WHERE n.nspname = 'headrace' AND f.proname = ANY (%s) ORDER BY f.proname = 'describe', 1"""
_OUR_FUNCTIONS = ["tell_ddl", "describe", "keep_writable"]
_SCHEMA = """
    SELECT 1 FROM pg_namespace n WHERE n.nspname = 'headrace'
      AND NOT EXISTS (SELECT FROM pg_class WHERE relnamespace = n.oid)
      AND NOT EXISTS (SELECT FROM pg_type WHERE typnamespace = n.oid)
      AND NOT EXISTS (SELECT FROM pg_proc f WHERE f.pronamespace = n.oid
                      AND f.proname <> ALL (%s))"""
_OTHERS = """
    SELECT 1 FROM pg_publication WHERE pubname <> %s
      AND obj_description(oid, 'pg_publication') LIKE '%%"headrace":%%'"""
_FULL = """
    SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = %s AND c.relreplident = 'f'"""
_INDEX = """
    SELECT 1 FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
    WHERE i.indrelid = %s AND c.relname = %s"""
_IDENTITY_OF = "replica identity of "
_FREE_SECONDS = 3.0  # until the server has noticed that a stream was ended
_IDENTITIES = {"d": "DEFAULT", "n": "NOTHING"}
_READER = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND active"


def remove(
    catalog: Catalog, source: PostgresSettings, slots: set[str], *, dry_run: bool
) -> list[Removal]:
    """Take everything out, or only list it."""
    if not dry_run:
        _expect_unread(catalog, source, slots)
    found = list(_found(catalog, source, slots))
    return found if dry_run else _taken_out(catalog, found, inserts_name(source.publication_name))


def _expect_unread(catalog: Catalog, source: PostgresSettings, slots: set[str]) -> None:
    for name in sorted(slots):
        slot.await_free(catalog, name, seconds=_FREE_SECONDS)
        for (process,) in catalog.rows(_READER, name):
            raise SourceRefused(
                f"replication slot {name} is being read by the server's process {process}",
                hint=f"Stop the `headrace run` that captures {source.name}, and run it again.",
            )


def _found(catalog: Catalog, source: PostgresSettings, slots: set[str]) -> Iterator[Removal]:
    # Another source may capture the same database, and needs the event triggers.
    alone = not catalog.rows(_OTHERS, inserts_name(source.publication_name))
    for (name,) in catalog.rows(_EVENT_TRIGGERS) if alone else ():
        yield Removal(f"event trigger {name}", f"DROP EVENT TRIGGER IF EXISTS {_quoted(name)};")
    pair = find_pair(catalog, source)
    name = source.publication_name
    if pair.first is not None and pair.ours:
        yield Removal(f"publication {name}", f"DROP PUBLICATION IF EXISTS {_quoted(name)};")
    yield from _identities(catalog, pair.note)
    # After them: its comment is what remembers the identities.
    if pair.second is not None:
        name = inserts_name(name)
        yield Removal(f"publication {name}", f"DROP PUBLICATION IF EXISTS {_quoted(name)};")
    for name in sorted(slots):
        if catalog.slot(name) is not None:
            drop = sql.SQL("SELECT pg_drop_replication_slot({});").format(sql.Literal(name))
            yield Removal(f"replication slot {name}", drop.as_string())
    if not alone:
        return
    for (function,) in catalog.rows(_FUNCTIONS, _OUR_FUNCTIONS):
        yield Removal(f"function {function}", f"DROP FUNCTION IF EXISTS {function};")
    if catalog.rows(_SCHEMA, _OUR_FUNCTIONS):
        yield Removal("schema headrace", "DROP SCHEMA IF EXISTS headrace;")


def _identities(catalog: Catalog, note: PublicationNote | None) -> Iterator[Removal]:
    """What makes tables have the replica identity that they had before."""
    for oid, former in (note.identities if note else {}).items():
        for schema, name in catalog.rows(_FULL, int(oid)):
            identity = _IDENTITIES.get(former)
            if identity is None:
                # Without its index, such an identity is none.
                there = catalog.rows(_INDEX, int(oid), former[1:])
                identity = f"USING INDEX {_quoted(former[1:])}" if there else "NOTHING"
            table = sql.Identifier(schema, name).as_string()
            statement = f"ALTER TABLE ONLY {table} REPLICA IDENTITY {identity};"
            yield Removal(f"{_IDENTITY_OF}{table_path(schema, name)}", statement)


def _taken_out(catalog: Catalog, found: list[Removal], note: str) -> list[Removal]:
    """Take out what can be; the publication with the note stays while an identity is not back."""
    outcome: list[Removal] = []
    for each in found:
        left = any(done.error and done.what.startswith(_IDENTITY_OF) for done in outcome)
        if left and each.what == f"publication {note}":
            why = "it remembers the replica identities that could not be restored; run it again"
            outcome.append(Removal(each.what, each.statement, why))
        else:
            outcome.append(_run(catalog, each))
    return outcome


def _run(catalog: Catalog, found: Removal) -> Removal:
    try:
        catalog.alter(sql.Composed([sql.SQL(found.statement)]))
    except SourceError as error:
        return Removal(found.what, found.statement, str(error))
    return found


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()
