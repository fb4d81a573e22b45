"""The commands that only look: `check`, `status` and `tail`."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import DEFAULT_CONFIG, AsJson, ConfigFile, KeyFile, ServerUrl, configured
from .terminal import open_console

if TYPE_CHECKING:
    from ..client.client import EventPage

LAST_SHOWN = 10  # changes that `tail` shows before it waits for more


def check(config: ConfigFile = DEFAULT_CONFIG) -> None:
    """Check everything that capturing and the pipeline need, and show how to fix what is missing.

    Exits with 1 when something is missing.
    """
    from ..config import load
    from ..operate.commands import check_machine, check_sinks, check_tables
    from ..operate.show import finding_lines

    settings = load(config)
    console = open_console()
    for warning in settings.warnings:
        console.print(f"! {warning}", style="yellow", markup=False, soft_wrap=True)
    found = {"this machine": check_machine(settings)}
    found |= {source.name: source.check() for source in settings.sources}
    if findings := check_tables(settings):
        found["model"] = findings
    if settings.pipeline:
        from ..pipeline.session import check_java

        found["pipeline"] = [check_java(), *check_sinks(settings)]
    for name, findings in found.items():
        console.print(name, style="bold", highlight=False)
        for line in finding_lines(findings):
            console.print(line, soft_wrap=True)
    if not all(finding.ok for findings in found.values() for finding in findings):
        raise typer.Exit(1)


def status(
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Show how the sources, the log and the pipeline are doing.

    Without a running server it shows what the log on disk knows.
    """
    import msgspec

    from ..operate.commands import look
    from ..operate.show import overview_lines

    overview = look(configured(config, url, key_file))
    if as_json:
        typer.echo(msgspec.json.encode(overview))
    else:
        console = open_console()
        for part in overview_lines(overview):
            console.print(part, highlight=False)


def tail(  # noqa: PLR0913, PLR0917 - an option for each thing one may set
    config: ConfigFile = DEFAULT_CONFIG,
    after: Annotated[
        str,
        typer.Option(
            help="A sequence, or latest, or earliest.", show_default="what shows the last 10"
        ),
    ] = "",
    tables: Annotated[
        list[str] | None, typer.Option(help="Only tables that match; may be given again.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Stop after so many changes.", min=1)] = None,
    follow: Annotated[bool, typer.Option(help="Whether to wait for more.")] = True,
    format: Annotated[
        str | None,
        typer.Option(
            help="Print events of this format, as JSON; docs/formats.md has their names.",
            metavar="NAME",
            show_default="lines for people",
        ),
    ] = None,
    preserve_transactions: Annotated[
        bool,
        typer.Option(
            "--preserve-transactions",
            help="With --format savegress: also events where transactions begin and end.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print changes as they come: from the running server, or without one from the log on disk."""
    from ..client.client import PageRequest
    from ..config import load
    from ..operate.commands import open_changes
    from ..operate.tail import DiskChanges
    from ..operate.tail import follow as following

    _expect_format(format, preserve_transactions=preserve_transactions)
    wanted = PageRequest(tuple(tables or ()), format or "canonical", preserve_transactions)
    with open_changes(load(config)) as (changes, latest):
        if isinstance(changes, DiskChanges):
            typer.echo("no server answers; reading the log on disk", err=True)
        start = _starting_point(after, latest)
        upto = None if follow else max(start, latest)
        try:
            for page in following(changes, start, wanted, upto=upto, limit=limit):
                _print_page(page, as_json=as_json or format is not None)
        except KeyboardInterrupt:
            return


def _expect_format(name: str | None, *, preserve_transactions: bool) -> None:
    from ..formats.catalogue import names

    if name is not None and name not in names():
        raise typer.BadParameter(f"no format called {name!r}; there are: {', '.join(names())}.")
    if preserve_transactions and name != "savegress":
        raise typer.BadParameter("--preserve-transactions goes with --format savegress.")


def _starting_point(after: str, latest: int) -> int:
    if after in ("", "latest", "earliest"):
        return {"": max(latest - LAST_SHOWN, 0), "latest": latest, "earliest": 0}[after]
    if after.isascii() and after.isdigit():
        return int(after)
    raise typer.BadParameter(f"{after!r} is not a sequence, latest or earliest.")


def _print_page(page: "EventPage", *, as_json: bool) -> None:
    from ..operate.show import change_line

    if page.gap:
        typer.echo(f"the changes {page.gap} are no longer in the log", err=True)
    for event in page.events:
        typer.echo(event if as_json else change_line(event))
