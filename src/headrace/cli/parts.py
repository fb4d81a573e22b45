"""The commands for one source or sink: `pause`, `resume`, `reset`; and `sinks`, `reload`."""

from enum import StrEnum
from typing import Annotated

import typer

from .options import DEFAULT_CONFIG, AsJson, ConfigFile, KeyFile, ServerUrl, Yes, configured
from .terminal import open_console

PartName = Annotated[
    str,
    typer.Argument(
        help="The name of a source or a sink in the config; source:NAME where both have it.",
        metavar="SOURCE|SINK",
    ),
]


class ResetFrom(StrEnum):
    """Where a sink begins again."""

    START = "start"
    NOW = "now"


def pause(
    name: PartName,
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
) -> None:
    """Stop one source or sink in order, until it is resumed; the rest goes on.

    It stays paused when Headrace is restarted. Meanwhile the database keeps what a paused source
    has not captured, and the log what a paused sink has not stored.
    """
    from ..operate.control import PartHandle

    typer.echo(PartHandle(configured(config, url, key_file), name).pause())


def resume(
    name: PartName,
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
) -> None:
    """Let a paused source or sink go on where it was, or one that has halted try again."""
    from ..operate.control import PartHandle

    typer.echo(PartHandle(configured(config, url, key_file), name).resume())


def reset(
    name: PartName,
    begin: Annotated[
        ResetFrom,
        typer.Option(
            "--from", help="Where a sink begins: with what the log has, or with what is new."
        ),
    ] = ResetFrom.START,
    yes: Yes = False,
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
) -> None:
    """Let one source or sink begin again from the start; says first what that does, and asks.

    A source takes a new snapshot of all its tables. A sink empties what it has stored, or moves it
    aside, and gets everything again that the log holds.
    """
    from ..operate.control import PartHandle
    from ..serve.service import PartKind

    handle = PartHandle(configured(config, url, key_file), name)
    if handle.part.kind is PartKind.SOURCE and begin is ResetFrom.NOW:
        raise typer.BadParameter("--from is for sinks; a source begins with a snapshot.")
    typer.echo(handle.reset_effect(begin.value))
    if not yes:
        typer.confirm("Do it?", abort=True)
    typer.echo(handle.reset(begin.value))


def sinks(
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Show how every sink is doing."""
    import msgspec

    from ..errors import ConfigError
    from ..operate.commands import look_at_pipeline
    from ..operate.show import pipeline_lines

    found = look_at_pipeline(configured(config, url, key_file))
    if found is None:
        raise ConfigError("there is no sink: the config has no section pipeline")
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    console = open_console()
    for part in pipeline_lines(found):
        console.print(part, highlight=False)


def reload(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would change.")
    ] = False,
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Let the running server read its config file again, and show what that changes.

    Only sources and sinks that came, went or have other settings are started and stopped; streams
    of clients stay open. What needs a restart is shown and stays as it was. A config that cannot
    be used changes nothing. SIGHUP does the same.
    """
    import msgspec

    from ..operate.control import request_reload

    found = request_reload(configured(config, url, key_file), dry_run=dry_run)
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    for line in found.changes:
        typer.echo(line)
    if not found.changes:
        typer.echo("nothing has changed")
    elif dry_run:
        typer.echo("nothing was taken up: this was a dry run")
