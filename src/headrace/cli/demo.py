"""The command `demo`."""

from enum import StrEnum
from typing import Annotated

import typer

from .terminal import log_to, open_console, restore_umask, stop_on_signals


class DemoSource(StrEnum):
    """The databases that the demo knows."""

    POSTGRES = "postgres"
    MYSQL = "mysql"
    SQLITE = "sqlite"


def demo(  # noqa: PLR0913, PLR0917 - an option for each thing one may set
    context: typer.Context,
    source: Annotated[DemoSource, typer.Option(help="What the shop is in.")] = DemoSource.POSTGRES,
    seconds: Annotated[float, typer.Option(help="How long the shop is open.", min=1)] = 60,
    forever: Annotated[bool, typer.Option("--forever", help="Until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(help="The port, or the next free one.", min=1)] = 3000,
    keep_dir: Annotated[
        bool, typer.Option("--keep-dir", help="Leave the log, the database and the tables behind.")
    ] = False,
    no_lake: Annotated[
        bool, typer.Option("--no-lake", help="Leave out Spark and the Delta tables.")
    ] = False,
) -> None:
    """Watch it work: a shop in a real database, captured, served, and replicated to Delta tables.

    Exits with 0 only if the rows that the log replays to equal the database's, table by table, and
    so do the Delta tables. Without Java these are left out.
    """
    restore_umask()  # a server of the demo may run as another user
    from ..demo import Demo

    console = open_console()
    log_to(console, context)
    chosen = Demo(
        source=source.value,
        seconds=None if forever else seconds,
        port=port,
        keep_dir=keep_dir,
        lake=not no_lake,
    )
    if not chosen.run(console, stop_on_signals()):
        raise typer.Exit(1)
