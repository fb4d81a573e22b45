"""The commands for triggers in SQLite databases; each loads only what it needs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..sources.sqlite import Report

app = typer.Typer(
    no_args_is_help=True,
    help="Put the triggers that record changes into a SQLite database, or take them out.",
)

Database = Annotated[Path, typer.Argument(help="The database's file.", metavar="DB")]


@app.command()
def install(
    database: Database,
    tables: Annotated[
        list[str] | None,
        typer.Option(help="Globs between commas: only these. May be given again.", metavar="GLOBS"),
    ] = None,
    keep_journal: Annotated[
        bool, typer.Option("--keep-journal", help="Leave the journal mode as it is.")
    ] = False,
) -> None:
    """Create the triggers, and the tables that they write to.

    Run it again after tables were created or altered: it renews what needs it, and changes nothing
    else. `headrace run` does the same for the tables of its source as soon as it notices. The
    journal mode becomes WAL, so that transactions can be distinguished.
    """
    from ..sources.sqlite import install as put

    globs = [glob.strip() for text in tables or ["*"] for glob in text.split(",")]
    _show(put(str(database), globs, wal=not keep_journal))


@app.command()
def alter(
    database: Database,
    sql: Annotated[str, typer.Argument(help="ALTER TABLE, or several statements.")],
) -> None:
    """Alter tables and renew their triggers in one transaction.

    Columns that a trigger names cannot be dropped otherwise, and what others write between an
    ALTER TABLE and the new triggers makes a new snapshot of the table necessary.
    """
    from ..sources.sqlite import alter as run

    _show(run(str(database), sql))


@app.command()
def remove(database: Database) -> None:
    """Drop all triggers and tables of Headrace; what was not captured yet is lost."""
    from ..sources.sqlite import remove as take

    removed = take(str(database))
    typer.echo("removed" if removed else "there was nothing to remove")


def _show(report: "Report") -> None:
    from ..errors import SourceRefused

    for path in report.tables:
        typer.echo(
            f"{path} {'has new triggers' if path in report.changed else 'is as it should be'}"
        )
    if report.refused:
        raise SourceRefused(
            "\n".join(f"table {path}: {why}" for path, why in report.refused.items())
        )
