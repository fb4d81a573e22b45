"""The commands for event tables in PostgreSQL; each loads only what it needs."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import DEFAULT_CONFIG, ConfigFile

if TYPE_CHECKING:
    from pathlib import Path

    from ..sources.postgres_events import PostgresEvents

app = typer.Typer(
    no_args_is_help=True,
    help="Put triggers and an event table into a PostgreSQL database, or take them out.",
)

SourceName = Annotated[
    str, typer.Argument(help="The source's name in the config; it has an event table.")
]
Print = Annotated[
    bool, typer.Option("--print", help="Only show the SQL, for whoever owns the database.")
]


@app.command()
def install(
    source: SourceName, print_only: Print = False, config: ConfigFile = DEFAULT_CONFIG
) -> None:
    """Create the event table and the triggers that write to it.

    May be run again: it adds what is missing. `headrace run` does the same by itself, unless the
    source says `install: false`.
    """
    from contextlib import closing

    from ..errors import SourceRefused
    from ..sources.postgres_events import install

    found = _source(config, source)
    with closing(found.catalog()) as catalog:
        if print_only:
            typer.echo(install.statements(catalog, found))
            return
        installed = install.install(catalog, found)
    for path in installed.triggers:
        typer.echo(f"{path} writes its changes to {found.schema}.events")
    missing = installed.refused | installed.waiting
    if missing:
        raise SourceRefused("\n".join(f"table {path}: {why}" for path, why in missing.items()))


@app.command()
def remove(
    source: SourceName, print_only: Print = False, config: ConfigFile = DEFAULT_CONFIG
) -> None:
    """Drop the triggers, the functions and the event table with all that is in it."""
    from contextlib import closing

    from ..sources.postgres_events import install

    found = _source(config, source)
    with closing(found.catalog()) as catalog:
        if print_only:
            typer.echo(install.removal(catalog, found.schema))
            return
        for path in install.uninstall(catalog, found.schema):
            typer.echo(f"{path} no longer writes its changes")


def _source(config: "Path", name: str) -> "PostgresEvents":
    from ..config import load
    from ..errors import ConfigError
    from ..sources.postgres_events import PostgresEvents

    found = load(config).source(name)
    if not isinstance(found, PostgresEvents):
        raise ConfigError(
            f"source {name} has no event table",
            hint="Give it the type postgres_events, or set cdc.storage to event_table.",
        )
    return found
