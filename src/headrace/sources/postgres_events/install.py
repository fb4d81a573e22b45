"""Putting the event table and its triggers into a database, and taking them out again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ...errors import SourceRefused, SourceUnavailable
from ..postgres.catalog import Published
from . import ddl, triggers
from .catalog import EventCatalog
from .settings import PostgresEventsSettings

_WAIT = "1s"  # for a lock: whoever wants to write waits as long
_TRIES = 30


@dataclass(frozen=True, slots=True)
class InstalledTriggers:
    """Which of the wanted tables write their changes, and why others do not."""

    tables: list[Published]
    triggers: dict[str, str]  # schema.table -> which triggers
    refused: dict[str, str]  # schema.table -> reason
    waiting: dict[str, str]  # the same, of tables that are tried again
    renewed: dict[str, str]  # schema.table -> the triggers these have replaced without a gap


def ensure(catalog: EventCatalog, source: PostgresEventsSettings) -> InstalledTriggers:
    """The tables to capture, after putting triggers on those that lack them.

    One whose triggers its owner must create counts once somebody has done it.
    """
    other_owner = catalog.other_owner()
    if source.install:
        set_up(catalog, source.schema, other_owner)
    elif catalog.edition() is None:
        raise SourceRefused(
            f"there is no event table in schema {source.schema}",
            hint=f"Run `headrace postgres install {source.name}` as its owner.",
        )
    if catalog.moved():
        raise SourceRefused(
            f"schema {source.schema} was loaded from a dump of another server or database",
            hint=f"Run `headrace postgres install {source.name}` as its owner.",
        )
    present = catalog.triggers()
    outcome = InstalledTriggers([], {}, {}, {}, {})
    for table in catalog.wanted(source.tables):
        found = present.get(table.oid)
        if found is not None and found.current and (found.always or not found.enabled):
            continue
        why = _cannot(catalog, source, table, other_owner)
        if found is not None and found.current:
            # Not as renewed: some rows may have been written while they did not fire.
            if why or not _add(catalog, source, table):
                outcome.waiting[table.path] = _not_always(catalog, source, table)
        elif found is not None and found.complete:
            if not why and _add(catalog, source, table) and found.enabled:
                outcome.renewed[table.path] = found.which
        elif why:
            outcome.refused[table.path] = why
        elif not _add(catalog, source, table):
            outcome.waiting[table.path] = (
                "it gets its triggers once the transactions that write to it end"
            )
    return _installed(catalog, source, outcome)


def set_up(catalog: EventCatalog, schema: str, other_owner: str) -> None:
    """Create the event table where it is missing, and bring its functions up to date."""
    found = catalog.edition()
    if other_owner and found is None:
        raise SourceRefused(
            f"schema {schema} belongs to {other_owner}, whose functions could run with every write",
            hint="Let its owner be a superuser, the database's owner or the source's user; or set "
            "`schema` to another one.",
        )
    if other_owner:
        return  # and no triggers of ours call what is there
    try:
        if found != ddl.edition(schema) and not catalog.apply(ddl.setup(schema), wait=_WAIT):
            if found is None:
                raise SourceUnavailable(f"schema {schema} is being written to")
            return  # it works as it is, and is renewed later
        if catalog.moved() and not catalog.apply(ddl.moved(schema), wait=_WAIT):
            raise SourceUnavailable(f"{schema}.events came by a dump, and is being written to")
    except SourceRefused as error:
        if found is not None:
            return  # somebody else's, and it works: that is for its owner to renew
        raise SourceRefused(
            "the event table cannot be created",
            hint="`headrace postgres install --print` shows what its owner can run.",
        ) from error


def install(catalog: EventCatalog, source: PostgresEventsSettings) -> InstalledTriggers:
    """What a person asks for by the command: as `ensure`, also where captures must not."""
    return ensure(catalog, dataclasses.replace(source, install=True))


def uninstall(catalog: EventCatalog, schema: str) -> list[str]:
    """Take triggers, functions and tables out again; returns which tables had triggers."""
    tables = catalog.triggered()
    # One by one: whoever waits for one table must not make others wait for the rest.
    for _ in range(_TRIES):
        for table in catalog.triggered():
            catalog.apply(triggers.drop(table), wait=_WAIT)
        busy = catalog.triggered()
        if not busy:
            break
    else:
        raise SourceUnavailable(
            f"the triggers of {', '.join(table.path for table in busy)} cannot be dropped while "
            "transactions that write there are open; run it again"
        )
    if not catalog.apply(ddl.remove(schema), wait=_WAIT):
        raise SourceUnavailable(f"{schema}.events is being read; stop its reader, run it again")
    return [table.path for table in tables]


def statements(catalog: EventCatalog, source: PostgresEventsSettings) -> str:
    """Everything that `install` would run, for somebody else to run."""
    wanted = [catalog.target(table) for table in catalog.wanted(source.tables)]
    parts = [triggers.create(source.schema, table) for table in wanted]
    return "\n\n".join([ddl.setup(source.schema), *parts])


def removal(catalog: EventCatalog, schema: str) -> str:
    """Everything that `uninstall` would run, for somebody else to run."""
    parts = [triggers.drop(table) for table in catalog.triggered()]
    return "\n".join([f"SET lock_timeout = '{_WAIT}';", *parts, ddl.remove(schema)])


def _installed(
    catalog: EventCatalog, source: PostgresEventsSettings, outcome: InstalledTriggers
) -> InstalledTriggers:
    present = {oid: found for oid, found in catalog.triggers().items() if found.complete}
    tables = [table for table in catalog.wanted(source.tables) if table.oid in present]
    for table in tables:
        if not present[table.oid].enabled:
            outcome.waiting[table.path] = (
                "its triggers are disabled, so its changes are not captured; its owner can run: "
                + triggers.create(source.schema, catalog.target(table))
            )
    which = {table.path: present[table.oid].which for table in tables}
    return dataclasses.replace(outcome, tables=tables, triggers=which)


def _not_always(catalog: EventCatalog, source: PostgresEventsSettings, table: Published) -> str:
    return (
        "its triggers do not fire for rows that replication or a restore writes; its owner can "
        f"run: {triggers.create(source.schema, catalog.target(table))}"
    )


def _cannot(
    catalog: EventCatalog, source: PostgresEventsSettings, table: Published, other_owner: str
) -> str:
    """Why the triggers of a table cannot be created by us; "": they can."""
    if not source.install:
        return f"it has no triggers; run `headrace postgres install {source.name}` as its owner"
    if other_owner and catalog.owner(table.oid) != other_owner:
        return f"its triggers would call functions of {other_owner}, who does not own it"
    if catalog.edition() != ddl.edition(source.schema):
        return f"schema {source.schema} is of another edition, and its owner must renew it: " + (
            f"run `headrace postgres install {source.name}` as its owner"
        )
    if catalog.owns(table.oid):
        return ""
    statements = triggers.create(source.schema, catalog.target(table))
    return f"it has no triggers, and is not ours; its owner can run: {statements}"


def _add(catalog: EventCatalog, source: PostgresEventsSettings, table: Published) -> bool:
    """Put the triggers on a table; False when others would have had to wait too long."""
    return catalog.apply(triggers.create(source.schema, catalog.target(table)), wait=_WAIT)
