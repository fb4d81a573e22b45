"""The commands; each loads only what it needs, so that the command line answers at once."""

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import HeadraceError
from . import (
    keys,
    postgres,
    sinks,
    sqlite,
)
from .options import DEFAULT_CONFIG, AsJson, ConfigFile

if TYPE_CHECKING:
    from threading import Event

    from rich.console import Console

    from ..client.client import EventPage

LAST_SHOWN = 10  # changes that `tail` shows before it waits for more

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
BYTES = {"": 1, "B": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


class Commands(TyperGroup):
    """The commands, with every error of ours told in a sentence instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"error: {error}", err=True)
            if error.hint:
                typer.echo(error.hint, err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.add_typer(keys.app, name="keys")
app.add_typer(postgres.app, name="postgres")
app.add_typer(sqlite.app, name="sqlite")
app.command()(sinks.redrive)
app.command()(sinks.verify)


def parse_age(text: str) -> float:
    """Seconds from `30d` or `1.5h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if not found:
        raise typer.BadParameter(f"{text!r} is no age; write 30d, 12h, 15m or 90s.")
    return float(found[1]) * SECONDS[found[2]]


def parse_size(text: str) -> int:
    """Bytes from `10GB` or `500M`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", text.upper())
    if not found:
        raise typer.BadParameter(f"{text!r} is no size; write 10GB, 500MB or 1000.")
    return int(float(found[1]) * BYTES[found[2]])


def main() -> None:
    """Run the command line."""
    app(prog_name="headrace")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def headrace(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error comes from, and log more.")
    ] = False,
) -> None:
    """Carry a database's row changes into a durable, ordered log, and serve them in real time.

    Every command exits with 0 when it did what it says, 1 when it could not and 2 when it was
    asked wrongly.
    """


# --- run and demo --------------------------------------------------------------------------------


@app.command()
def run(context: typer.Context, config: ConfigFile = DEFAULT_CONFIG) -> None:
    """Capture every source into the log, and serve the log over HTTP.

    With a section `pipeline` in the config, it also starts `headrace pipeline` as a process of
    its own, and starts it again whenever it ends. Stops in order on Ctrl-C or SIGTERM. A source
    that halts does not end it: the log is still served, and the exit code is 1 in the end.
    """
    from contextlib import ExitStack

    from ..config import load
    from ..operate.show import Progress
    from ..run import PipelineProcess, Run

    settings = load(config)
    console = _console(stderr=True)
    _log_to(console, context)
    stopping = _stopping_on_signals()
    with ExitStack() as stack:
        running = stack.enter_context(Run(settings))
        progress = stack.enter_context(Progress(console))
        if settings.pipeline:
            stack.enter_context(PipelineProcess(config, progress.say))
        typer.echo(f"headrace {__version__}: {running.server.url}, log in {settings.log_dir}")
        running.work(stopping, lambda: progress.show(running.statuses(), running.log.stats()))
        halted = running.halted
    if halted:
        names = ", ".join(status.source for status in halted)
        raise HeadraceError(f"stopped, with {names} halted", hint=halted[0].hint)


@app.command()
def pipeline(
    context: typer.Context,
    config: ConfigFile = DEFAULT_CONFIG,
    once: Annotated[
        bool, typer.Option("--once", help="End when every sink has all that is in the log now.")
    ] = False,
    adopt: Annotated[
        list[str] | None,
        typer.Option(
            help="Take over what this sink holds, with a new checkpoint; may be given again.",
            metavar="SINK",
        ),
    ] = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    """Carry the log's changes into every sink of the config, on Spark.

    Stops in order on Ctrl-C or SIGTERM, between two batches if the running one ends within a few
    seconds. A sink that halts does not end it: the others go on, and the exit code is 1 in the
    end.
    """
    from ..config import load

    settings = load(config)
    if settings.pipeline is None:
        from ..errors import ConfigError

        raise ConfigError("the config has no section pipeline", hint="See docs/pipeline.md.")
    from ..operate.show import SinkProgress
    from ..pipeline.run import Feed, Pipeline, alone_in, plans, waiting
    from ..pipeline.session import opened_session
    from ..run import formats

    console = _console(stderr=True)
    _log_to(console, context)
    stopping = _stopping_on_signals(with_parent=with_parent)
    section, folder = settings.pipeline, settings.pipeline_dir
    feed = Feed(
        address=settings.log_address,
        max_changes_per_batch=section.max_changes_per_batch,
        trigger_seconds=section.trigger_seconds,
    )
    queries = plans(
        section.sinks,
        feed,
        checkpoints=settings.checkpoint_dir,
        once=once,
        adopt=adopt or (),
        formats=formats(settings),
    )
    folder.mkdir(parents=True, exist_ok=True)
    spark_settings = {name: value.reveal() for name, value in section.spark.items()}
    session = opened_session(
        section.master,
        spark_settings,
        journal=folder / "spark.log",
        waiting=waiting(queries, section.master),
    )
    with (
        alone_in(settings.checkpoint_dir),
        session as spark,
        Pipeline(spark, queries, folder=folder) as running,
        SinkProgress(console) as progress,
    ):
        running.work(stopping, lambda: progress.show(running.statuses()), once=once)
    if running.halted:
        names = ", ".join(status.sink for status in running.halted)
        raise HeadraceError(f"stopped, with {names} halted", hint=running.halted[0].hint)
    if once and stopping.is_set():
        raise HeadraceError("stopped before every sink had all that is in the log")


class DemoSource(StrEnum):
    """The databases that the demo knows."""

    POSTGRES = "postgres"
    MYSQL = "mysql"
    SQLITE = "sqlite"


@app.command()
def demo(  # noqa: PLR0913, PLR0917 - an option for each thing one may ask
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
    """Watch it work: a shop in a real database, captured, served, and copied into Delta tables.

    Exits with 0 only if the rows that the log replays to equal the database's, table by table, and
    so do the Delta tables. Without Java these are left out.
    """
    from ..demo import Demo

    console = _console()
    _log_to(console, context)
    asked = Demo(
        source=source.value,
        seconds=None if forever else seconds,
        port=port,
        keep_dir=keep_dir,
        lake=not no_lake,
    )
    if not asked.play(console, _stopping_on_signals()):
        raise typer.Exit(1)


# --- check ---------------------------------------------------------------------------------------


@app.command()
def check(config: ConfigFile = DEFAULT_CONFIG) -> None:
    """Look at everything that capturing and the pipeline need, and say how to mend what is missing.

    Exits with 1 when something is.
    """
    from ..config import load
    from ..operate.commands import check_machine, check_sinks, check_tables
    from ..operate.show import finding_lines

    settings = load(config)
    console = _console()
    for warning in settings.warnings:
        console.print(f"! {warning}", style="yellow", markup=False, soft_wrap=True)
    found = {"this machine": check_machine(settings)}
    found |= {source.name: source.check() for source in settings.sources}
    if said := check_tables(settings):
        found["model"] = said
    if settings.pipeline:
        from ..pipeline.session import check_java

        found["pipeline"] = [check_java(), *check_sinks(settings)]
    for name, findings in found.items():
        console.print(name, style="bold", highlight=False)
        for line in finding_lines(findings):
            console.print(line, soft_wrap=True)
    if not all(finding.ok for findings in found.values() for finding in findings):
        raise typer.Exit(1)


# --- status and tail -----------------------------------------------------------------------------


@app.command()
def status(config: ConfigFile = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Show how the sources, the log and the pipeline are doing.

    Without a running server it tells what the log on disk knows.
    """
    import msgspec

    from ..config import load
    from ..operate.commands import look
    from ..operate.show import overview_lines

    seen = look(load(config))
    if as_json:
        typer.echo(msgspec.json.encode(seen))
    else:
        console = _console()
        for part in overview_lines(seen):
            console.print(part, highlight=False)


@app.command()
def tail(  # noqa: PLR0913, PLR0917 - an option for each thing one may ask
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
    raise typer.BadParameter(f"{after!r} is no sequence, nor latest or earliest.")


def _print_page(page: "EventPage", *, as_json: bool) -> None:
    from ..operate.show import change_line

    if page.gap:
        typer.echo(f"the changes {page.gap} are no longer in the log", err=True)
    for event in page.events:
        typer.echo(event if as_json else change_line(event))


# --- snapshot and trim ---------------------------------------------------------------------------


@app.command()
def snapshot(
    source: Annotated[str, typer.Argument(help="The source's name in the config.")],
    tables: Annotated[
        list[str] | None, typer.Argument(help="Its tables; none: all, from a new start.")
    ] = None,
    config: ConfigFile = DEFAULT_CONFIG,
) -> None:
    """Copy tables of a source anew: at once in the running server, else at the next run."""
    from ..config import load
    from ..operate.commands import copy_again

    typer.echo(copy_again(load(config), source, list(tables or ())))


@app.command()
def trim(
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
        bool, typer.Option("--force", help="Even what a named cursor still needs.")
    ] = False,
    config: ConfigFile = DEFAULT_CONFIG,
) -> None:
    """Remove old changes from the log, but none that a named cursor still needs."""
    from ..config import load
    from ..operate.commands import Bound
    from ..operate.commands import trim as trimming

    bound = Bound(before, older_than, max_size)
    if sum(limit is not None for limit in bound) != 1:
        raise typer.BadParameter("Give one of --before, --older-than and --max-size.")
    trimmed = trimming(load(config), bound, force=force)
    typer.echo(f"removed {trimmed.removed} changes; the log begins at {trimmed.first_sequence}")
    if trimmed.held_by:
        typer.echo(
            f"cursor {trimmed.held_by} still needs what follows; --force removes it all the same"
        )


# --- the terminal --------------------------------------------------------------------------------


def _console(*, stderr: bool = False) -> "Console":
    from ..operate.show import terminal

    return terminal(stderr=stderr)


def _log_to(console: "Console", context: typer.Context) -> None:
    import logging

    from ..operate.show import Journal

    debug = bool(context.find_root().params.get("debug"))
    logging.basicConfig(handlers=[Journal(console)], level=logging.WARNING, force=True)
    logging.getLogger("headrace").setLevel(logging.DEBUG if debug else logging.INFO)


def _stopping_on_signals(*, with_parent: bool = False) -> "Event":
    """An event that Ctrl-C and SIGTERM set, and (`with_parent`) the end of the parent process."""
    import signal
    import threading

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    if with_parent:
        from ..run import watch_parent

        watch_parent(stopping)
    return stopping
