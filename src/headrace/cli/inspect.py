"""The commands that only look: `check`, `status` and `tail`."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import DEFAULT_CONFIG, AsJson, ConfigFile, KeyFile, ServerUrl, configured
from .quantities import parse_moment
from .terminal import open_console

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..client.client import EventPage
    from ..plugins import Finding

LAST_SHOWN = 10  # changes that `tail` shows before it waits for more


def check(config: ConfigFile = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Check everything that capturing and the pipeline need, and show how to fix what is missing.

    Every database, broker, webhook and bucket is really asked, in one pass; nothing is captured
    or sent. Exits with 1 when something is missing.
    """
    import msgspec

    from ..config import load
    from ..operate.check import check_everything
    from ..operate.show import finding_lines

    report = check_everything(load(config), _check_java)
    if as_json:
        typer.echo(msgspec.json.encode(report))
    else:
        console = open_console()
        for warning in report.warnings:
            console.print(f"! {warning}", style="yellow", markup=False, soft_wrap=True)
        for name, findings in report.findings.items():
            console.print(name, style="bold", highlight=False)
            for line in finding_lines(findings):
                console.print(line, soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


def _check_java() -> "Finding":
    from ..pipeline.session import check_java

    return check_java()


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
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", help="Begin with the last so many changes.", min=0),
    ] = None,
    follow: Annotated[
        bool | None,
        typer.Option(
            "--follow/--no-follow",
            "-f/-F",
            help="Whether to wait for more.",
            show_default="yes, but not with -n or --since",
        ),
    ] = None,
    operations: Annotated[
        list[str] | None,
        typer.Option(
            "--op", help="Only these: insert, update, delete, …; may be given again.", metavar="OP"
        ),
    ] = None,
    since: Annotated[
        float | None,
        typer.Option(
            help="Begin with what was captured since: 10m, 2h, 2026-11-16T09:30 (UTC).",
            metavar="TIME",
            parser=parse_moment,
        ),
    ] = None,
    tables: Annotated[
        list[str] | None, typer.Option(help="Only tables that match; may be given again.")
    ] = None,
    after: Annotated[
        str,
        typer.Option(
            help="A sequence, or latest, or earliest.", show_default="what shows the last 10"
        ),
    ] = "",
    limit: Annotated[int | None, typer.Option(help="Stop after so many changes.", min=1)] = None,
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
    config: ConfigFile = DEFAULT_CONFIG,
    url: ServerUrl = None,
    key_file: KeyFile = None,
) -> None:
    """Print changes as they come: from the running server, or without one from the log on disk."""
    from ..client.client import PageRequest
    from ..operate.commands import open_changes
    from ..operate.tail import DiskChanges, before_last, before_moment
    from ..operate.tail import follow as following

    _expect_format(format, preserve_transactions=preserve_transactions)
    if sum(given not in (None, "") for given in (lines, since, after)) > 1:
        raise typer.BadParameter("Give one of -n, --since and --after.")
    wanted = PageRequest(
        tuple(tables or ()),
        format or "canonical",
        preserve_transactions,
        _operations(operations or ()),
    )
    with open_changes(configured(config, url, key_file)) as (changes, latest):
        if isinstance(changes, DiskChanges):
            typer.echo("no server answers; reading the log on disk", err=True)
        if since is not None:
            start = before_moment(changes, int(since * 1_000_000), latest)
        elif after:
            start = _starting_point(after, latest)
        else:
            start = before_last(changes, LAST_SHOWN if lines is None else lines, latest, wanted)
        follows = lines is None and since is None if follow is None else follow
        upto = None if follows else max(start, latest)
        try:
            for page in following(changes, start, wanted, upto=upto, limit=limit):
                _print_page(page, as_json=as_json or format is not None)
        except KeyboardInterrupt:
            return


def _operations(given: "Iterable[str]") -> tuple[str, ...]:
    from ..change.event import Op

    names = [name.strip().upper() for text in given for name in text.split(",")]
    for name in names:
        if name not in Op.__members__:
            known = ", ".join(Op.__members__).lower()
            raise typer.BadParameter(f"no operation called {name.lower()!r}; there are: {known}.")
    return tuple(names)


def _expect_format(name: str | None, *, preserve_transactions: bool) -> None:
    from ..formats.catalogue import names

    if name is not None and name not in names():
        raise typer.BadParameter(f"no format called {name!r}; there are: {', '.join(names())}.")
    if preserve_transactions and name != "savegress":
        raise typer.BadParameter("--preserve-transactions goes with --format savegress.")


def _starting_point(after: str, latest: int) -> int:
    if after in ("latest", "earliest"):
        return {"latest": latest, "earliest": 0}[after]
    if after.isascii() and after.isdigit():
        return int(after)
    raise typer.BadParameter(f"{after!r} is not a sequence, latest or earliest.")


def _print_page(page: "EventPage", *, as_json: bool) -> None:
    from ..operate.show import change_line

    if page.gap:
        typer.echo(f"the changes {page.gap} are no longer in the log", err=True)
    for event in page.events:
        typer.echo(event if as_json else change_line(event))
