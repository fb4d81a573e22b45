"""Spark for a pipeline: the Java it needs, its settings, and a terminal that it leaves alone."""

import faulthandler
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from ..errors import PipelineError
from ..sources import Finding
from .gateway import end, launched, started

logger = logging.getLogger(__name__)

JAVA_VERSION = 17  # the oldest that Spark 4 runs on

_INSTALL_JAVA = (
    f"Install Java {JAVA_VERSION} or later (Debian: apt-get install openjdk-17-jre-headless), "
    "or set JAVA_HOME to where it is."
)

# Spark's own choice starts `readlink` and `chmod` about ten times for each file that it writes, and
# two files a batch: without Hadoop's native library, every look at a link is a process.
_CHECKPOINT_FILES = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

_REDACTION = "spark.redaction.regex"
_SECRETS = "(?i)secret|password|token|access[.]?key|credential"

END_SECONDS = 60.0  # that the end of a pipeline may take: more than its sinks are given
_KILLED_SECONDS = 10.0  # for what is left to do without Spark
_MOST_REFUSALS = 100
_TASK_ERROR_LOGGERS = (
    "org.apache.spark.api.python",
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",
    "org.apache.spark.sql.execution.streaming.runtime.StreamExecution",
)
_STATEMENT_ERROR_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")  # PySpark's own

# Of calls to a JVM that is ending: its connections break a moment before it is seen to be gone.
_CUT_OFF = (Py4JError, OSError)


@contextmanager
def opened_session(
    master: str, settings: Mapping[str, str], *, journal: Path, extra_tasks: int = 0
) -> Iterator[SparkSession]:
    """Spark from here to the end of the block; what it logs goes to `journal`.

    So many tasks may run beyond those of the cores: most of the time they wait for other systems,
    or leave the cores to the others.
    """
    java = check_java()
    if not java.ok:
        raise PipelineError(java.detail, hint=java.fix)
    # The runner of Python sources has a limit of 15 s of its own, too short for a busy machine to
    # start Python in. It reads no other setting.
    os.environ.setdefault("SPARK_AUTH_SOCKET_TIMEOUT", "60")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = settings.get(
        "spark.pyspark.python", os.environ.get("PYSPARK_PYTHON", sys.executable)
    )
    if local_cores(master):
        # Nothing else keeps Spark's pages from being open to the network.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    _quieten_py4j()
    defaults = default_settings(master, extra_tasks=extra_tasks)
    chosen = {**defaults, _REDACTION: redaction(settings), **settings}
    gateway = launched(chosen, journal)
    try:
        context = started(chosen, gateway)
        session = SparkSession.builder.getOrCreate()
        if pages := context.uiWebUrl:
            logger.info("spark ui=%s", pages)
        try:
            yield session
        finally:
            if jvm_lives(session):
                with suppress(*_CUT_OFF):
                    context.stop()
    finally:
        end(gateway)


def hide_task_errors(session: SparkSession) -> None:
    """Keep errors of tasks out of Spark's log and PySpark's: a statement's show values of rows."""
    log4j: Any = session.sparkContext._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
    for name in _TASK_ERROR_LOGGERS:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    for name in _STATEMENT_ERROR_LOGGERS:
        PySparkLogger.getLogger(name).disabled = True  # it writes to stderr, by no other setting


@contextmanager
def ends_in_time(session: SparkSession, seconds: float = END_SECONDS) -> Iterator[None]:
    """After the block the process ends within a time, whatever hangs: a JVM may never answer."""

    def enforce() -> None:
        logger.error("not ended after seconds=%d, so Spark is killed; no batch is lost", seconds)
        faulthandler.dump_traceback(all_threads=True)  # what it waits for
        gateway: Any = session.sparkContext._gateway
        if gateway is not None:
            gateway.proc.kill()  # which ends every call to it
        time.sleep(_KILLED_SECONDS)
        os._exit(1)

    try:
        yield
    finally:
        timer = threading.Timer(seconds, enforce)
        timer.daemon = True
        timer.start()


def default_settings(master: str, *, extra_tasks: int = 0) -> dict[str, str]:
    """What a pipeline needs unless its config says otherwise."""
    settings = {
        "spark.master": master,
        "spark.app.name": "headrace",
        "spark.ui.enabled": "false",  # a cluster's own pages are for its operators to choose
        "spark.ui.killEnabled": "false",  # pages are for reading
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.hadoop.fs.permissions.umask-mode": "077",  # of the files in checkpoints
        "spark.python.worker.reuse": "true",
        "spark.python.authenticate.socketTimeout": "60s",  # a busy machine starts Python slowly
        "spark.authenticate": "true",  # or every user of the machine could send Spark messages
        "spark.speculation": "false",  # two tasks that send the same events at once
        "spark.scheduler.mode": "FAIR",  # a long batch of one sink must not hold up the others
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_FILES,
        "spark.sql.streaming.numRecentProgressUpdates": "5",
        "spark.sql.streaming.stopTimeout": "5s",  # a sink that hangs must not keep the rest alive
    }
    if cores := local_cores(master):
        settings |= {
            # A place more for each task that may hang at another system, or compacts beside the
            # stream: those of the cores are for the others. Work is still divided by the cores.
            "spark.master": f"local[{cores + extra_tasks}]" if extra_tasks else master,
            "spark.default.parallelism": str(cores),
            "spark.sql.shuffle.partitions": str(2 * cores),
            # The rows of most sinks stay in Python: Java plans and waits, and its better compiler
            # would take longer to compile that than it ever saves.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            # For this machine alone, see `opened_session`; they remember less than Spark lets them.
            "spark.ui.enabled": "true",
            "spark.port.maxRetries": "100",  # Spark does not start where all are taken
            "spark.ui.retainedJobs": "200",
            "spark.ui.retainedStages": "200",
            "spark.ui.retainedTasks": "2000",
            "spark.sql.ui.retainedExecutions": "100",
        }
    return settings


def redaction(settings: Mapping[str, str]) -> str:
    r"""A pattern of the settings whose values no page of Spark shows: secrets, and all given ones.

    Those of Hadoop are shown a second time, under their own names.

    >>> redaction({"spark.hadoop.fs.s3a.key": "x"}).partition("|^")[2]
    '(spark\\.hadoop\\.)?fs\\.s3a\\.key$'
    """
    names = (re.escape(name.removeprefix("spark.hadoop.")) for name in settings)
    return "|".join([_SECRETS, *(rf"^(spark\.hadoop\.)?{name}$" for name in names)])


def local_cores(master: str) -> int:
    """How many cores a local master uses; 0: it is not local."""
    found = re.fullmatch(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?", master)
    if not found:
        return 0
    if found[1] == "*":
        return os.cpu_count() or 1
    return int(found[1] or 1)


def jvm_lives(session: SparkSession) -> bool:
    """Whether the JVM behind a session is still there."""
    gateway: Any = session.sparkContext._gateway
    return gateway is not None and gateway.proc.poll() is None


def rejects_tasks(session: SparkSession) -> bool:
    """Whether tasks are refused over and over, as by an executor that was stopped.

    Spark does not count such failures, and would try for ever. A JVM that is ending says nothing.
    """
    try:
        tracker = session.sparkContext.statusTracker()
        counted = int(session.conf.get("spark.task.maxFailures", "4") or 4)
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    except _CUT_OFF:
        return False
    return any(
        stage.numFailedTasks > _MOST_REFUSALS + counted * stage.numTasks
        for stage in stages
        if stage is not None
    )


def check_java() -> Finding:
    """Whether there is a Java that Spark can run on."""
    program = _java()
    if program is None:
        return Finding("java", False, "there is no Java, and Spark needs it", fix=_INSTALL_JAVA)
    shown = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)
    # openjdk version "17.0.15" 2025-04-15, or of old: java version "1.8.0_292"
    found = re.search(r'version "(?:1\.)?(\d+)', shown.stderr + shown.stdout)
    if not found:
        return Finding("java", False, f"{program} does not show its version", fix=_INSTALL_JAVA)
    version = int(found[1])
    detail = f"{program} is Java {version}"
    if version < JAVA_VERSION:
        return Finding("java", False, f"{detail}, too old for Spark", fix=_INSTALL_JAVA)
    return Finding("java", True, detail)


def _quieten_py4j() -> None:
    # It prints the traceback of every error in a batch, which the sink's status has in short;
    # and to the root logger, which nobody else uses, that of every call to a JVM that has ended.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: record.levelno >= logging.CRITICAL)


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    # Spark looks nowhere else when JAVA_HOME is set, so neither does this.
    return shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
