"""The command `erase`: one row's values out of everything that Headrace has stored."""

from typing import Annotated

import typer

from .options import DEFAULT_CONFIG, AsJson, ConfigFile, Yes
from .terminal import open_lakes


def erase(  # noqa: PLR0913, PLR0917 - an option for each thing one may set
    table: Annotated[str, typer.Argument(help="The table: schema.table.", metavar="TABLE")],
    key: Annotated[
        str,
        typer.Argument(help='The row\'s key: 42, or \'{"tenant": 1, "id": 42}\'.', metavar="KEY"),
    ],
    keep_last: Annotated[
        bool,
        typer.Option(
            "--keep-last",
            help="The row is still in its source: the values that it has now stay.",
        ),
    ] = False,
    source: Annotated[
        str, typer.Option(help="The source, where several have the table.", show_default=False)
    ] = "",
    yes: Yes = False,
    config: ConfigFile = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Erase one row's values from the log and the sinks, and search for them afterwards.

    The row must be deleted in its source, or its values overwritten there, and that captured.
    `headrace run` must not be running. What is left of the row is its key. Earlier versions of its
    Delta and Iceberg tables cannot be read afterwards. Exits with 1 when values are left, or may
    be, and when nothing has such a row.
    """
    import msgspec

    from ..config import load
    from ..operate.erase import EraseRequest
    from ..operate.erase import erase as erasing
    from ..operate.show import erasure_parts, terminal
    from ..sinks.lake.modes import umask_of

    settings = load(config)
    if not yes:
        typer.echo(f"Erases the row {key} of {table} from the log and every sink, for good.")
        typer.confirm("Do it?", abort=True)
    open_lakes(umask_of(settings.pipeline.sinks if settings.pipeline else ()))
    request = EraseRequest(table=table, key=key, source=source, keep_last=keep_last)
    done = erasing(settings, request)
    if as_json:
        typer.echo(msgspec.json.encode({**msgspec.to_builtins(done), "complete": done.complete}))
    else:
        for part in erasure_parts(done):
            terminal().print(part, highlight=False, soft_wrap=True)
    if not (done.complete and done.found):
        raise typer.Exit(1)
