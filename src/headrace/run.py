"""A process of Headrace at work: every source captured, the log served, old changes removed."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from .capture import Capture
from .config import Config
from .errors import ConfigError, LogError, SourceError
from .formats.catalogue import Formats
from .formats.facts import Facts, SourceServer
from .log import Log, LogRetention, RetentionSettings, keys
from .log.backup import BackupFolders
from .log.files import raise_file_limit
from .log.folder import make_private, unusable
from .log.keys import Key, KeyRequest, Scope
from .model import Model
from .observe.lines import LogFormat
from .observe.traces import Tracing, tracing
from .retry import Backoff
from .serve import BackgroundServer, ServerSettings, create_app
from .serve.service import Service
from .sinks.report import PipelineFolder
from .sinks.requests import Requests
from .sources import Phase, Source, Status
from .sources.redact import stored_tables
from .sources.worker import Apart

logger = logging.getLogger(__name__)

OPERATOR_KEY = "operator.key"  # a file in data_dir
RETENTION_RETRY_SECONDS = 60.0
LOOK_SECONDS = 0.25
PROGRESS_SECONDS = 5.0  # between two lines about a snapshot
BACKOFF = Backoff(first=1.0, longest=60.0)  # before a pipeline that ended is started again
STEADY_SECONDS = 60.0  # after so long, an end is not blamed on the start
STOP_SECONDS = 20.0  # for a pipeline to stop in order


def server_settings(config: Config) -> ServerSettings:
    """The server's settings; a ConfigError when what the config says does not go together."""
    return ServerSettings(
        **msgspec.structs.asdict(config.server),
        enabled=config.cdc.enabled,
        batch_size=config.cdc.batch_size,
        pipeline=_pipeline(config),
        retention=RetentionSettings(
            days=config.cdc.retention_days,
            size=config.cdc.retention_bytes,
            limit=None if config.cdc.max_log_gb is None else int(config.cdc.max_log_gb * 1e9),
            cursor_hours=config.cdc.max_cursor_hours,
        ),
        backup=backup_folders(config),
    )


def backup_folders(config: Config) -> BackupFolders:
    """What a backup of this config copies."""
    sinks = config.pipeline.sinks if config.pipeline else ()
    paths = [getattr(sink, name, "") for sink in sinks for name in ("path", "dead_letters")]
    return BackupFolders(
        data=config.data_dir,
        sinks=config.checkpoint_dir,
        left_out=(
            config.verify_dir,
            *(Path(path) for path in paths if path and "://" not in path),
        ),
    )


def _pipeline(config: Config) -> PipelineFolder | None:
    pipeline = config.pipeline
    if pipeline is None:
        return None
    return PipelineFolder(
        folder=config.pipeline_dir,
        sinks=tuple(sink.name for sink in pipeline.sinks),
        same_log=pipeline.url is None,
        checkpoints=config.checkpoint_dir,
        elsewhere=bool(config.checkpoint_address),
    )


def formats(config: Config) -> Formats:
    """The formats of this installation: from which servers, by which model."""
    model = config.model
    servers = tuple(
        SourceServer(
            source.name,
            host=source.host,
            instance=model.instances.get(source.name, ""),
            region=model.regions.get(source.name, ""),
        )
        for source in config.sources
    )
    return Formats(Facts(servers=servers), model)


@contextmanager
def traced(config: Config, service: str) -> Iterator[None]:
    """Trace what this process does, if the config says where to."""
    section = config.telemetry
    if section is None:
        yield
        return
    try:
        otlp = import_module("headrace.observe.otlp")
    except ImportError as error:
        raise ConfigError(
            "headrace.telemetry needs OpenTelemetry", hint="Run: pip install 'headrace[otel]'"
        ) from error
    exporter = otlp.OtlpExporter(section.endpoint, service=service)
    with tracing(Tracing(exporter, section.sample)):
        yield


def check_model(config: Config) -> None:
    """Compare the model with the tables there are; a ConfigError names all that is not there."""
    if config.model == Model():
        return  # there is nothing to compare, so no source is read
    config.model.check([table for source in config.sources for table in stored_tables(source)])


@contextmanager
def operator_key(folder: Path) -> Iterator[Key]:
    """A key to everything for the commands of this machine, while the process lives.

    Whoever may read it in the log's folder may read and write the log anyway.
    """
    wanted = KeyRequest(name="operator", scopes=frozenset({Scope.ADMIN}))
    made = keys.make(wanted, now=time.time_ns() // 1000)
    file = folder / OPERATOR_KEY
    try:
        file.unlink(missing_ok=True)  # a process that was killed leaves it behind
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(made.secret)
    except OSError as error:
        raise unusable(folder, error) from error
    try:
        yield msgspec.structs.replace(made.key, id=keys.OPERATOR)
    finally:
        file.unlink(missing_ok=True)


class Run:
    """Everything one `headrace run` does, from entering to leaving."""

    def __init__(self, config: Config) -> None:
        if not config.sources:
            raise ConfigError(
                "headrace.sources: there is nothing to capture",
                hint="Name a source, or run `headrace pipeline`, which needs none here.",
            )
        self.config = config
        self._settings = server_settings(config)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        raise_file_limit()
        if self.config.cdc.enabled:
            self._check_model()
        with ExitStack() as stack:
            make_private(self.config.data_dir)
            stack.enter_context(traced(self.config, "headrace"))
            self.log = stack.enter_context(Log.open(self.config.log_dir))
            sources = self.config.sources if self.config.cdc.enabled else ()
            self.captures = {source.name: self._capture(source) for source in sources}
            app = create_app(
                self.log,
                statuses=self.statuses,
                copy_again=self.copy_again if sources else None,
                settings=self._settings,
                formats=formats(self.config).of_log(self.log.epoch),
                operator=stack.enter_context(operator_key(self.config.data_dir)),
            )
            self.service: Service = app.state.service
            self.retention: LogRetention = self.service.retention
            self.server = stack.enter_context(BackgroundServer(app, self._settings))
            stack.enter_context(self._retaining())
            stack.callback(self._stop_captures)
            for capture in self.captures.values():
                capture.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # All are closed before any is waited for: one may be waiting for another's transaction.
        for capture in self.captures.values():
            capture.close()
        self._stack.close()

    def _capture(self, source: Source) -> Capture:
        capture = Capture(Apart(source), self.log)
        if paused_at := Requests(self.config.source_dir(source.name)).paused_at:
            capture.pause(paused_at)
        return capture

    def _stop_captures(self) -> None:
        for capture in self.captures.values():
            capture.stop()

    def take_up(self, config: Config) -> None:
        """Go on with another config: only sources that came, went or differ are touched.

        What cannot change without a restart must be as it was, see `config.taken_up`.
        """
        before, self.config = {source.name: source for source in self.config.sources}, config
        wanted = {source.name: source for source in config.sources} if config.cdc.enabled else {}
        kept = {
            name: capture
            for name, capture in self.captures.items()
            if name in wanted and before[name] == wanted[name]
        }
        for name in self.captures.keys() - kept.keys():
            self.captures[name].close()
        for name in self.captures.keys() - kept.keys():
            self.captures[name].stop()
        captures = {name: kept.get(name) or self._capture(wanted[name]) for name in wanted}
        self.captures = captures  # at once: others are reading it
        self.service.take_up(server_settings(config), formats(config).of_log(self.log.epoch))
        for name in captures.keys() - kept.keys():
            captures[name].start()

    def statuses(self) -> list[Status]:
        """How every source is doing."""
        return [capture.status() for capture in self.captures.values()]

    def copy_again(self, source: str, tables: Sequence[str]) -> None:
        """Copy tables of a source (none: all) anew."""
        if source not in self.captures:
            self.config.source(source)
            raise ConfigError(f"source {source} is not captured: cdc.enabled is false")
        capture = self.captures[source]
        # Checked here first: a table that the source does not have is refused, and halts nothing.
        capture.source.copy_again(self.log.resume(source), tables)
        capture.copy_again(tables)

    @property
    def halted(self) -> list[Status]:
        """The sources that need an operator."""
        return [status for status in self.statuses() if status.phase is Phase.HALTED]

    def work(self, stopping: threading.Event, look: Callable[[], None]) -> None:
        """Until `stopping` is set: log what happens, call `look` now and then."""
        log = SourceStatusLog()
        while True:
            log.log_changes(self.statuses())
            look()
            if stopping.wait(LOOK_SECONDS):
                return

    def _check_model(self) -> None:
        try:
            check_model(self.config)
        except SourceError as error:
            # It is tried again later, and what was captured until then is served.
            logger.warning("model not checked error=%s", error.explain())

    @contextmanager
    def _retaining(self) -> Iterator[None]:
        """Remove old changes in a thread of its own: to give their room back takes a while."""
        stopping = threading.Event()
        thread = threading.Thread(target=self._retain, args=(stopping,), name="retention")
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    def _retain(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            try:
                self.retention.work(stopping)
            except LogError as error:
                # Capture halts with the same reason; what is in the log can still be read.
                logger.warning("retention error=%s", error.explain())
            except Exception:  # without retention the disk would fill, so the thread goes on
                logger.exception("retention failed, and is tried again")
            stopping.wait(RETENTION_RETRY_SECONDS)


class SourceStatusLog:
    """Logs how the sources are doing, each change of state once."""

    def __init__(self) -> None:
        self._known: dict[str, Status] = {}
        self._progress: dict[str, float] = {}  # when a snapshot's progress is to be logged again

    def log_changes(self, statuses: Sequence[Status]) -> None:
        """Log what differs from the last time."""
        for status in statuses:
            before = self._known.get(status.source)
            if before is None or before.phase is not status.phase:
                self._log_phase(status)
            for table, reason in status.errored.items():
                if before is None or table not in before.errored:
                    logger.warning("source=%s table=%s errored=%s", status.source, table, reason)
            for warning in status.warnings:
                if before is None or warning not in before.warnings:
                    logger.warning("source=%s warning=%s", status.source, warning)
            if status.copying:
                self._log_progress(status)
            self._known[status.source] = status

    def _log_progress(self, status: Status) -> None:
        now = time.monotonic()
        if now < self._progress.get(status.source, 0.0):
            return
        self._progress[status.source] = now + PROGRESS_SECONDS
        logger.info(
            "source=%s snapshot tables=%d done=%d rows=%d",
            status.source,
            len(status.copies),
            sum(copy.done for copy in status.copies),
            sum(copy.rows for copy in status.copies),
        )

    def _log_phase(self, status: Status) -> None:
        logger.info(
            "source=%s phase=%s position=%s", status.source, status.phase, status.position or "none"
        )
        if status.phase is Phase.HALTED:
            logger.error(
                "source=%s halted, what it captured is still served; error=%s; hint=%s",
                status.source,
                status.error,
                status.hint,
            )


class PipelineProcess:
    """`headrace pipeline` as a process of its own, started again whenever it ends.

    It and the JVM it starts are one process group, so that nothing of them is left behind. Its
    input is a pipe from here, whose end tells it that this process is gone, however that ended.
    """

    def __init__(
        self,
        config_file: Path,
        on_line: Callable[[str], None],
        *,
        line_format: LogFormat = LogFormat.TEXT,
    ) -> None:
        """`on_line` gets every line that it prints, those of its log in `line_format`."""
        program = [sys.executable, "-m", "headrace.cli", "pipeline", "--with-parent"]
        self._command = [*program, "--config", str(config_file), "--log-format", line_format]
        self._on_line = on_line
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="pipeline")
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # between starting it and stopping it

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("pipeline did not stop within %d s and is killed", STOP_SECONDS)
            _kill_group(process.pid)
        self._thread.join()

    def _keep(self) -> None:
        failures = 0  # one after the other
        while (process := self._started()) is not None:
            began = time.monotonic()
            assert process.stdout is not None
            for line in process.stdout:
                self._on_line(line.rstrip("\n"))
            code = process.wait()
            _kill_group(process.pid)
            assert process.stdin is not None
            process.stdin.close()
            if self._stopping.is_set():
                return
            failures = 1 if time.monotonic() - began > STEADY_SECONDS else failures + 1
            wait = BACKOFF.wait(failures)
            logger.error("pipeline ended exit_code=%d restart_seconds=%g", code, wait)
            if self._stopping.wait(wait):
                return

    def _started(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for us: we stop it, in our order
            )
            return self._process


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):  # all of them have ended by themselves
        os.killpg(leader, signal.SIGKILL)


def end_with_parent() -> None:
    """End this process and its group at once when the process that started it is gone.

    There is nobody left to wait for an orderly end, and the next run needs the checkpoints. To a
    sink it is a crash like any other.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
