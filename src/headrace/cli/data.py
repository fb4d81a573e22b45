"""The commands that change what there is: `snapshot`, `trim` and `remove`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import DEFAULT_CONFIG, ConfigFile, KeyFile, ServerUrl, configured
from .quantities import parse_age, parse_size


def snapshot(
    source: Annotated[str, typer.Argument(help="The source's name in the config.")],
    tables: Annotated[
        list[str] | None, typer.Argument(help="Its tables; none: all, from a new start.")
    ] = None,
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
) -> None:
    """Take a new snapshot of a source's tables: now in the running server, else at the next run."""
    from ..operate.commands import request_snapshot

    settings = configured(config, url, key_file)
    typer.echo(request_snapshot(settings, source, list(tables or ())))


def trim(  # noqa: PLR0913, PLR0917 - an option for each thing one may set
    before: Annotated[
        int | None, typer.Option(help="Remove changes with a lower sequence.", min=0)
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(help="Remove what is older: 30d, 12h.", metavar="AGE", parser=parse_age),
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(help="Remove the oldest beyond it: 10GB.", metavar="SIZE", parser=parse_size),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Remove even what a named cursor or a sink still needs.")
    ] = False,
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
) -> None:
    """Remove old changes from the log, but none that a named cursor or a sink still needs."""
    from ..operate.commands import Bound
    from ..operate.commands import trim as trimming

    bound = Bound(before, older_than, max_size)
    if sum(limit is not None for limit in bound) != 1:
        raise typer.BadParameter("Give one of --before, --older-than and --max-size.")
    trimmed = trimming(configured(config, url, key_file), bound, force=force)
    typer.echo(f"removed {trimmed.removed} changes; the log begins at {trimmed.first_sequence}")
    if trimmed.held_by:
        typer.echo(
            f"{_holder(trimmed.held_by)} still needs what follows; --force removes it all the same"
        )
    if trimmed.losers:
        losers = ", ".join(map(_holder, trimmed.losers))
        typer.echo(f"these needed what was removed: {losers}")


def _holder(name: str) -> str:
    kind, _, sink = name.partition(":")
    return f"sink {sink}" if kind == "sink" and sink else f"cursor {name}"


def backup(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.", metavar="DIR")],
    config: ConfigFile = DEFAULT_CONFIG,
) -> None:
    """Copy the log, its cursors and keys, and how far sinks are; also while everything runs.

    The copy has all of one moment. Not in it: the config, and what sinks have written elsewhere.
    """
    from ..config import load
    from ..operate.commands import backup as copying
    from ..operate.show import Bar, size, terminal

    with Bar(terminal(stderr=True), "copying") as bar:
        made = copying(load(config), folder, bar.show)
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    typer.echo(
        f"{folder}: sequences {made.first_sequence} to {made.latest_sequence} of log {made.epoch}, "
        f"{size(total)}"
    )


def restore(
    folder: Annotated[
        Path, typer.Argument(help="What `headrace backup` has filled.", metavar="DIR")
    ],
    config: ConfigFile = DEFAULT_CONFIG,
) -> None:
    """Make the log of a backup again, in a data_dir that has none; nothing may be running.

    It gets a new name (epoch), and remembers the log that it was copied from. Whoever stands at
    or before the end of the copy goes on; whoever is ahead of it halts, with what to do.
    """
    from ..config import load
    from ..operate.commands import restore as restoring
    from ..operate.show import Bar, terminal

    settings = load(config)
    with Bar(terminal(stderr=True), "copying") as bar:
        done = restoring(settings, folder, bar.show)
    was = done.ancestor
    typer.echo(f"the log in {settings.log_dir} has everything up to sequence {was.sequence}")
    typer.echo(f"it is log {done.epoch}, a copy of {was.epoch}")
    if done.sinks:
        typer.echo(
            f"sinks that go on where they were then: {', '.join(done.sinks)}; those that send "
            "events may send some again that they have sent since"
        )
    if done.kept:
        typer.echo(f"sinks whose own notes were here, and stay: {', '.join(done.kept)}")


def remove(
    source: Annotated[str, typer.Argument(help="The source's name in the config.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the statements; change nothing.")
    ] = False,
    config: ConfigFile = DEFAULT_CONFIG,
) -> None:
    """Take everything out of a source's database that Headrace has put there.

    `headrace run` must not be capturing it. The log keeps what was captured; a later run begins
    with a new snapshot. What cannot be taken out is shown with the reason, and the exit code is 1;
    the command can be repeated.
    """
    from ..config import load
    from ..operate.commands import remove as removing
    from ..operate.show import removal_lines

    removals = removing(load(config), source, dry_run=dry_run)
    for line in removal_lines(source, removals, dry_run=dry_run):
        typer.echo(line)
    if any(removal.error for removal in removals):
        raise typer.Exit(1)
