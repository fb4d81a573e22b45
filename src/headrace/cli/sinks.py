"""The commands for what sinks get and send; each loads only what it needs, as all commands do."""

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ..change.path import without_schema
from ..errors import ConfigError, PipelineError, nearest
from .options import DEFAULT_CONFIG, AsJson, ConfigFile
from .terminal import open_lakes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..config import Config
    from ..pipeline.redrive import RedriveResult
    from ..sinks import Sink
    from ..sinks.push.settings import PushSettings

REPAIRS = 2  # that the first snapshot finds what another writer did, and fails, is not the end
PATIENCE_SECONDS = 10.0  # with a sink that waits for its destination, before nobody is kept waiting

SinkName = Annotated[str, typer.Argument(help="The sink's name in the config.", metavar="SINK")]


# --- redrive -------------------------------------------------------------------------------------


def redrive(
    name: SinkName,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this row: users:7, or public.users:7. May be given again.",
            metavar="TABLE:PK",
        ),
    ] = None,
    config: ConfigFile = DEFAULT_CONFIG,
) -> None:
    """Send a sink's dead letters again, each row's in order; what is accepted leaves them.

    A running pipeline does it between two batches, and a sink that had halted goes on. Without
    one the command does it itself, on Spark. Exits with 1 when some are still not accepted.
    """
    from ..config import load
    from ..operate.show import Bar, redriven_lines, terminal
    from ..pipeline.checkpoint import in_use
    from ..sinks.lake.modes import umask_of
    from ..sinks.push.deadletters import rows_of
    from ..sinks.push.settings import PushSettings

    settings = load(config)
    sink = _sink(settings, name, lambda sink: sink.keeps_dead_letters, "has no dead letters")
    if not isinstance(sink, PushSettings):
        raise ConfigError(
            f"the dead letters of {name} are its own: it is no push sink of Headrace's"
        )
    rows, keys = rows_of(sink.letters), key or []
    _expect_keys(keys, rows)
    running = in_use(settings.checkpoint_dir)
    open_lakes(umask_of(settings.pipeline.sinks if settings.pipeline else ()))
    with Bar(terminal(stderr=True), f"{name}: sending dead letters again") as bar:
        bar.show(0, 0)
        result = _request(settings, sink, keys) if running else _do(settings, sink, keys)
    for line in redriven_lines(name, result):
        typer.echo(line)
    if result.reason or result.refused or result.waiting:
        raise typer.Exit(1)


def _expect_keys(keys: "Sequence[str]", rows: dict[str, int]) -> None:
    named = [row.partition("|")[2] for row in rows]  # source|schema.table:key
    known = {*named, *(without_schema(each) for each in named)}
    for key in keys:
        if key not in known:
            raise ConfigError(f"there is no dead letter of {key}{nearest(key, named[:20])}")


def _request(settings: "Config", sink: "PushSettings", keys: "Sequence[str]") -> "RedriveResult":
    """Request it from the running pipeline."""
    import time
    from pathlib import Path

    from ..operate.commands import look_at_pipeline
    from ..pipeline.checkpoint import in_use
    from ..pipeline.redrive import ask
    from ..sinks import SinkPhase

    began = time.monotonic()

    def look(result: "RedriveResult | None") -> None:
        seen = look_at_pipeline(settings)
        if result is not None or seen is None or time.monotonic() - began < PATIENCE_SECONDS:
            return
        if all(status.sink != sink.name for status in seen.sinks):
            raise PipelineError(
                f"requested, but the running pipeline has no sink called {sink.name}",
                hint="It sends the dead letters again when it is started with the sink.",
            )
        for status in seen.sinks:
            if status.sink == sink.name and status.phase is SinkPhase.WAITING:
                raise PipelineError(
                    f"requested, but {sink.name} waits: {status.error}",
                    hint="The pipeline sends the dead letters again when it is back.",
                )

    return ask(Path(sink.folder), keys, lambda: in_use(settings.checkpoint_dir), look)


def _do(settings: "Config", sink: "PushSettings", keys: "Sequence[str]") -> "RedriveResult":
    """Do it here, where no pipeline runs."""
    from ..pipeline.checkpoint import alone_in
    from ..pipeline.redrive import nothing, redrive
    from ..pipeline.run import PipelineInput, plans
    from ..pipeline.session import opened_session
    from ..run import formats
    from ..sinks.push.deadletters import rows_of

    section, folder = settings.pipeline, settings.pipeline_dir
    assert section is not None
    with alone_in(settings.checkpoint_dir):
        if not rows_of(sink.letters):
            return nothing(sink.folder)
        [plan] = plans(
            [sink],
            PipelineInput(address=settings.log_address),
            checkpoints=settings.checkpoint_dir,
            formats=formats(settings),
        )
        folder.mkdir(parents=True, exist_ok=True)
        spark_settings = {name: value.reveal() for name, value in section.spark.items()}
        journal = folder / "spark.log"
        with opened_session(section.master, spark_settings, journal=journal) as spark:
            return redrive(plan.kept_at(settings.checkpoint_address), spark, keys)


# --- verify --------------------------------------------------------------------------------------


def verify(  # noqa: PLR0913, PLR0917 - an option for each thing one may set
    name: SinkName,
    table: Annotated[
        list[str] | None,
        typer.Argument(
            help="Of a sink of tables: only these, schema.table or patterns.",
            metavar="[TABLE]...",
            show_default="all",
        ),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Take new snapshots of the tables that differ.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(
            help="Let `headrace run` do it every 1h, 30m or 1d from now on; never: no more.",
            metavar="AGE",
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(help="Name so many rows of a table at most.", min=0, max=1000)
    ] = 20,
    first: Annotated[
        int,
        typer.Option(
            "--from", help="Of a sink that sends events: the first sequence to look at.", min=1
        ),
    ] = 1,
    upto: Annotated[
        int | None,
        typer.Option(help="The last one.", min=1, show_default="the log's last"),
    ] = None,
    config: ConfigFile = DEFAULT_CONFIG,
    as_json: AsJson = False,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    """Compare a sink with where its changes come from, and name what is not equal.

    Every row of a sink of tables is compared with its source, while both go on changing; rows
    that differ are named by their keys and columns. Of a sink that sends events, those that the
    log holds for it are counted by ranges of sequences, against the sink's own account and its
    dead letters. Exits with 1 when something is missing or differs, and when no table was compared,
    or none that a TABLE means.
    """
    import msgspec

    from ..config import load
    from ..operate.show import Bar, terminal, verified_lines
    from ..pipeline.verify import verify as comparing

    settings = load(config)
    sink = _sink(settings, name, _is_comparable, "keeps no account of it, and no rows")
    if sink.needs_every_row:
        given = _TablesGiven(table or [], repair=repair, rows=rows, as_json=as_json)
        if every is not None:
            _schedule(settings, name, every, given)
        else:
            _verify_tables(settings, sink, given, with_parent=with_parent)
        return
    if table or repair or every:
        raise ConfigError(
            f"the sink {name} has no tables of rows: TABLE, --repair and --every are for one"
        )
    with Bar(terminal(stderr=True), f"{name}: reading the log") as bar:
        found = comparing(sink, settings.log_address, bar.show, first=first, upto=upto)
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        for line in verified_lines(found):
            typer.echo(line)
    if not found.complete:
        raise typer.Exit(1)


def _is_comparable(sink: "Sink") -> bool:
    return sink.needs_every_row or sink.rendering is not None


class _TablesGiven(NamedTuple):
    """What was given for a sink of tables."""

    tables: "Sequence[str]"
    repair: bool
    rows: int
    as_json: bool


def _schedule(settings: "Config", name: str, every: str, given: _TablesGiven) -> None:
    from ..sinks.requests import Requests
    from .quantities import parse_age

    requests = Requests(settings.sink_dir(name))
    if every == "never":
        was = requests.end_verify()
        typer.echo(f"{name}: is {'no longer' if was else 'not'} verified by `headrace run`")
        return
    requests.schedule_verify(parse_age(every), given.tables, repair=given.repair)
    typer.echo(f"{name}: `headrace run` verifies it every {every}; `headrace status` has the last")


def _verify_tables(
    settings: "Config", sink: "Sink", given: _TablesGiven, *, with_parent: bool
) -> None:
    """Compare the rows of a sink's tables with their sources."""
    import os

    import msgspec

    from ..operate.show import Bar, terminal
    from ..operate.verify import (
        Repair,
        compared_lines,
        expect_compared,
        verify_tables,
        with_others,
    )
    from ..sinks.tables.sink import Tables
    from .terminal import stop_on_signals

    if not isinstance(sink, Tables):
        raise ConfigError(
            f"the rows of the sink {sink.name} cannot be compared: it is of no known type"
        )
    if with_parent:
        stop_on_signals(with_parent=True)
        os.nice(10)
    with Bar(terminal(stderr=True), f"{sink.name}: comparing rows") as bar:

        def look(what: str, rows: int) -> None:
            bar.show(rows, 0)

        found = verify_tables(settings, sink, given.tables, look)
        all_found, repaired = found.verification, list[str]()
        for _ in range(REPAIRS if given.repair else 0):
            if found.verification.sound:
                break
            repair = Repair(settings, sink, found)
            for line in repair.request():
                typer.echo(line, err=True)
            if not repair.wait():
                break
            repaired += repair.tables
            found = verify_tables(settings, sink, repair.tables, look)
            all_found = with_others(found.verification, all_found)
    if given.as_json:
        typer.echo(msgspec.json.encode(found.verification))
    else:
        for line in compared_lines(found, most=given.rows):
            typer.echo(line)
    if not all_found.sound:
        raise typer.Exit(1)
    expect_compared(all_found, [*given.tables, *repaired])


# --- preview -------------------------------------------------------------------------------------


def preview(
    name: SinkName,
    table: Annotated[str, typer.Argument(help="The table: schema.table.", metavar="TABLE")],
    limit: Annotated[int, typer.Option(help="How many rows.", min=1, max=1000)] = 10,
    config: ConfigFile = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Show a table's newest changes as a sink sees them, after its transforms.

    Nothing is stored or sent, and the sink may be running.
    """
    import msgspec

    from ..config import load
    from ..operate.show import preview_table, terminal
    from ..pipeline.options import Options
    from ..pipeline.preview import preview as looking
    from ..pipeline.remote import reading

    settings = load(config)
    sink = _sink(settings, name, lambda _: True, "")
    address = settings.log_address
    log = reading(Options.read(address))
    found = looking(sink, log, table, limit=limit, address=address)
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        terminal().print(preview_table(found))


# --- all -----------------------------------------------------------------------------------------


def _sink(settings: "Config", name: str, can: "Callable[[Sink], bool]", otherwise: str) -> "Sink":
    """The sink of that name, as its pipeline would have it."""
    from ..run import formats
    from ..sinks import informed

    sinks = {sink.name: sink for sink in settings.pipeline.sinks} if settings.pipeline else {}
    if name not in sinks:
        raise ConfigError(f"no sink called {name}{nearest(name, sinks)}")
    if not can(sinks[name]):
        able = [each for each, sink in sinks.items() if can(sink)]
        there = f"; those that do: {', '.join(able)}" if able else ""
        raise ConfigError(f"the sink {name} sends no events and {otherwise}{there}")
    return informed(
        sinks[name], formats=formats(settings), folder=str(settings.checkpoint_dir / name)
    )
