"""The command `init`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import DEFAULT_CONFIG, ConfigFile
from .terminal import open_console

if TYPE_CHECKING:
    from ..operate.init import ChosenDatabase


def init(  # noqa: PLR0913, PLR0917 - an option for each thing one may set
    database: Annotated[
        str | None,
        typer.Argument(
            envvar="DATABASE_URL",
            help="postgresql://user@host/database, mysql://…, or the file of a SQLite database; "
            "asked for if it is left out.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(help="What the source is called.", show_default="the database's name")
    ] = "",
    tables: Annotated[
        list[str] | None,
        typer.Option(help="Only tables that match; may be given again.", metavar="GLOB"),
    ] = None,
    password_env: Annotated[
        str,
        typer.Option(
            help="The environment variable with the password.",
            metavar="NAME",
            show_default="PGPASSWORD or MYSQL_PASSWORD",
        ),
    ] = "",
    port: Annotated[int, typer.Option(help="Where the log is served.", min=1, max=65535)] = 3000,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Write the file without asking the database.")
    ] = False,
    config: ConfigFile = DEFAULT_CONFIG,
) -> None:
    """Write a first config, with comments, by asking the database what it is and what it has.

    The password is never written into the file: it is read from the environment, here and when
    Headrace runs. A file that is there already is left alone. Exits with 1 if something is still
    missing in the database; the file is written all the same, and says how to fix it.
    """
    from ..errors import ConfigError
    from ..operate.init import connects, content, write
    from ..operate.show import finding_lines

    if config.exists():
        raise ConfigError(
            f"{config} is there already", hint="Name another file with --config, or remove it."
        )
    chosen = _database(database, name, password_env)
    folder, globs = config.absolute().parent, tuple(tables or ())
    findings = [] if no_check else chosen.check(globs, folder)
    console = open_console()
    for line in finding_lines(findings):
        console.print(line, soft_wrap=True)
    if not connects(findings):
        raise ConfigError(
            "the database does not answer, and nothing was written",
            hint="Fix that, or write the file without asking it: --no-check.",
        )
    write(config, content(chosen, findings, tables=globs, port=port), chosen)
    typer.echo(f"wrote {config}; next: {_next(config, chosen)}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _database(given: str | None, name: str, variable: str) -> "ChosenDatabase":
    import os
    import sys
    from urllib.parse import quote

    from ..operate.init import ChosenDatabase

    asking = sys.stdin.isatty()
    if given is None:
        if not asking:
            raise typer.BadParameter("Name the database, or set DATABASE_URL.")
        given = str(typer.prompt("The database (a URL, or the file of a SQLite database)"))
    chosen = ChosenDatabase.named(given, name=name, variable=variable)
    if chosen.needs_password:
        known = os.environ.get(chosen.variable)
        if known is None and asking:
            typed = typer.prompt("Its password", default="", hide_input=True, show_default=False)
            known = quote(str(typed), safe="")
        if known:
            chosen = chosen.with_password(known)
    return chosen


def _next(config: Path, chosen: "ChosenDatabase") -> str:
    option = "" if config == DEFAULT_CONFIG else f" --config {config}"
    export = f"export {chosen.variable}=…, then " if chosen.password is not None else ""
    return f"{export}`headrace check{option}` and `headrace run{option}`"
