"""Takes everything out of a database that Headrace has put there.

The order matters: without its publications no table needs a replica identity, so those go first.
"""

from __future__ import annotations

from collections.abc import Iterator

from psycopg import sql

from ...errors import SourceError, SourceRefused
from .. import Removal
from .catalog import Catalog
from .settings import PostgresSettings

_EVENT_TRIGGERS = """
    SELECT t.evtname FROM pg_event_trigger t
    JOIN pg_proc f ON f.oid = t.evtfoid JOIN pg_namespace n ON n.oid = f.pronamespace
    WHERE n.nspname = 'headrace' AND t.evtname LIKE 'headrace\\_%%' ORDER BY 1"""
_FUNCTIONS = """
    SELECT f.oid::regprocedure::text FROM pg_proc f
    JOIN pg_namespace n ON n.oid = f.pronamespace
    WHERE n.nspname = 'headrace' AND f.proname = ANY (%s) ORDER BY f.proname = 'describe', 1"""
_OUR_FUNCTIONS = ["tell_ddl", "describe"]
_SCHEMA = """
    SELECT 1 FROM pg_namespace n WHERE n.nspname = 'headrace'
      AND NOT EXISTS (SELECT FROM pg_class WHERE relnamespace = n.oid)
      AND NOT EXISTS (SELECT FROM pg_type WHERE typnamespace = n.oid)
      AND NOT EXISTS (SELECT FROM pg_proc f WHERE f.pronamespace = n.oid
                      AND f.proname <> ALL (%s))"""
_READER = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND active"


def remove(
    catalog: Catalog, source: PostgresSettings, slots: set[str], *, dry_run: bool
) -> list[Removal]:
    """Take everything out, or only list it."""
    if not dry_run:
        _expect_unread(catalog, source, slots)
    found = list(_found(catalog, source, slots))
    return found if dry_run else [_taken_out(catalog, each) for each in found]


def _expect_unread(catalog: Catalog, source: PostgresSettings, slots: set[str]) -> None:
    for slot in sorted(slots):
        for (process,) in catalog.rows(_READER, slot):
            raise SourceRefused(
                f"replication slot {slot} is being read by the server's process {process}",
                hint=f"Stop the `headrace run` that captures {source.name}, and run it again.",
            )


def _found(catalog: Catalog, source: PostgresSettings, slots: set[str]) -> Iterator[Removal]:
    for (name,) in catalog.rows(_EVENT_TRIGGERS):
        yield Removal(f"event trigger {name}", f"DROP EVENT TRIGGER IF EXISTS {_quoted(name)};")
    name = source.publication_name
    if catalog.rows("SELECT 1 FROM pg_publication WHERE pubname = %s", name):
        yield Removal(f"publication {name}", f"DROP PUBLICATION IF EXISTS {_quoted(name)};")
    for name in sorted(slots):
        if catalog.slot(name) is not None:
            drop = sql.SQL("SELECT pg_drop_replication_slot({});").format(sql.Literal(name))
            yield Removal(f"replication slot {name}", drop.as_string())
    for (function,) in catalog.rows(_FUNCTIONS, _OUR_FUNCTIONS):
        yield Removal(f"function {function}", f"DROP FUNCTION IF EXISTS {function};")
    if catalog.rows(_SCHEMA, _OUR_FUNCTIONS):
        yield Removal("schema headrace", "DROP SCHEMA IF EXISTS headrace;")


def _taken_out(catalog: Catalog, found: Removal) -> Removal:
    try:
        catalog.run(sql.Composed([sql.SQL(found.statement)]))
    except SourceError as error:
        return Removal(found.what, found.statement, str(error))
    return found


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()
