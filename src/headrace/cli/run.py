"""The commands that run until they are stopped: `run` and `pipeline`."""

from typing import Annotated

import typer

from .. import __version__
from ..errors import HeadraceError
from ..observe.lines import LogFormat
from .options import DEFAULT_CONFIG, ConfigFile, LogLines
from .terminal import (
    log_to,
    open_console,
    open_lakes,
    reload_on_hangup,
    start_again,
    stop_on_signals,
)

PATIENCE_SECONDS = 10.0  # with another pipeline at the same checkpoints, which may be about to end


def run(
    context: typer.Context,
    config: ConfigFile = DEFAULT_CONFIG,
    log_format: LogLines = LogFormat.TEXT,
) -> None:
    """Capture every source into the log, and serve the log over HTTP.

    With a section `pipeline` in the config, it also starts `headrace pipeline` as a process of
    its own, and starts it again whenever it ends. Stops in order on Ctrl-C or SIGTERM. A source
    that halts does not end it: the log is still served, and the exit code is 1 in the end.
    """
    import gc
    import logging
    from contextlib import ExitStack

    from ..config import load
    from ..operate.control import RunControl
    from ..operate.reload import ConfigReload
    from ..operate.schedule import ScheduledVerifications
    from ..operate.show import RunProgress
    from ..run import PipelineProcess, Run

    settings = load(config)
    console = open_console(stderr=True)
    journal = log_to(console, context, log_format)
    stopping = stop_on_signals()
    reloading = reload_on_hangup(stopping)
    with ExitStack() as stack:
        running = stack.enter_context(Run(settings))
        # What is loaded stays. To look through it for garbage, time and again, would hold up
        # every client for a tenth of a second.
        gc.collect()
        gc.freeze()
        progress = stack.enter_context(RunProgress(console, live_only=True))

        def pipeline_process() -> PipelineProcess:
            return PipelineProcess(config, journal.pass_on, line_format=log_format)

        file = stack.enter_context(ConfigReload(running, config, pipeline_process))
        running.service.control = RunControl(running, file)
        stack.enter_context(ScheduledVerifications(lambda: running.config, config))
        started = f"headrace {__version__}: {running.server.url}, log in {settings.log_dir}"
        if log_format is LogFormat.JSON:
            logging.getLogger(__name__).info("%s url=%s", started, running.server.url)
        else:
            typer.echo(started)

        def look() -> None:
            if reloading.is_set():
                reloading.clear()
                file.reload_logged()
            progress.show(running.statuses(), running.log.stats())

        running.work(stopping, look)
        halted = running.halted
    if halted:
        names = ", ".join(status.source for status in halted)
        raise HeadraceError(f"stopped, with {names} halted", hint=halted[0].hint)


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
    log_format: LogLines = LogFormat.TEXT,
) -> None:
    """Carry the log's changes into every sink of the config, on Spark.

    Stops in order on Ctrl-C or SIGTERM, between two batches if the running one ends within a few
    seconds. A sink that halts does not end it: the others go on, and the exit code is 1 in the
    end.
    """
    from ..config import load

    settings = load(config)
    section = settings.pipeline
    if section is None:
        from ..errors import ConfigError

        raise ConfigError("the config has no section pipeline", hint="See docs/pipeline.md.")
    from ..log.folder import make_private
    from ..operate.show import SinkProgress
    from ..pipeline.executors import packages_of, prepared
    from ..pipeline.reload import PipelineReload, plans_of
    from ..pipeline.run import Pipeline, alone_in, announce, extra_tasks
    from ..pipeline.session import ends_in_time, opened_session
    from ..run import formats, traced
    from ..sinks.lake.modes import umask_of

    queries = plans_of(settings, formats(settings), once=once, adopt=adopt or ())
    folder = settings.pipeline_dir
    console = open_console(stderr=True)
    log_to(console, context, log_format)
    stopping = stop_on_signals(with_parent=with_parent)
    reloading = reload_on_hangup(stopping)
    make_private(settings.data_dir)
    make_private(folder)
    make_private(settings.checkpoint_dir)
    open_lakes(umask_of(section.sinks))
    spark_settings = {name: value.reveal() for name, value in section.spark.items()}
    session = opened_session(
        section.master,
        spark_settings,
        journal=folder / "spark.log",
        extra_tasks=extra_tasks(queries, section.master),
    )
    file = PipelineReload(config, settings, formats)
    again = False
    # The pipeline of a run that was killed is about to end; the one of a run has time.
    seconds = float("inf") if with_parent else PATIENCE_SECONDS
    alone = alone_in(settings.checkpoint_dir, stopping=stopping, seconds=seconds)
    with alone, traced(settings, "headrace-pipeline"):
        announce(queries, folder)
        with (
            prepared(session, stopping, packages_of(section.sinks)) as spark,
            Pipeline(spark, queries, folder=folder) as running,
            SinkProgress(console) as progress,
            ends_in_time(spark),
        ):

            def look() -> None:
                nonlocal again
                if not once and (reloading.is_set() or file.requested()):
                    reloading.clear()
                    again = not file.take_up(running)
                    if again:
                        stopping.set()
                progress.show(running.statuses())

            running.work(stopping, look, once=once)
    if again:
        start_again()
    if running.halted:
        names = ", ".join(status.sink for status in running.halted)
        raise HeadraceError(f"stopped, with {names} halted", hint=running.halted[0].hint)
    if once and stopping.is_set():
        raise HeadraceError("stopped before every sink had all that is in the log")
