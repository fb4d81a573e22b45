"""What the executors of a cluster must have: this Headrace, and the packages that it needs.

A task finds out too late: its function cannot even be unpickled, and what Spark then reports names
a module of ours and not what to do. So executors are looked at before the first query starts.
"""

import importlib.metadata
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from pyspark.sql import SparkSession

from .. import __version__
from ..errors import ExecutorUnprepared, HeadraceError
from ..sinks import Sink
from .failures import understood
from .session import local_cores

logger = logging.getLogger(__name__)

# The distributions that all tasks import, each with its module.
PACKAGES = {
    "headrace": "headrace",
    "deltalake": "deltalake",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "obstore": "obstore",
    "pyarrow": "pyarrow",
    "pyroaring": "pyroaring",
}
_LOOK_SECONDS = 0.25
_SILENT_SECONDS = 30.0


class Installed(NamedTuple):
    """What one Python has."""

    host: str
    python: str  # its version
    packages: dict[str, str]  # the version of each, "": it has none


def packages_of(sinks: Iterable[Sink]) -> dict[str, str]:
    """The distributions that the tasks of some sinks import, each with its module."""
    return PACKAGES | {
        name: module for sink in sinks for name, module in sink.task_packages.items()
    }


@contextmanager
def prepared(
    session: AbstractContextManager[SparkSession],
    stopping: threading.Event,
    packages: Mapping[str, str],
) -> Iterator[SparkSession]:
    """A session whose executors, if they are elsewhere, have what tasks need."""
    with session as spark:
        if not local_cores(spark.sparkContext.master or ""):
            expect_packages(spark, stopping, packages)
        yield spark


def expect_packages(
    spark: SparkSession, stopping: threading.Event, packages: Mapping[str, str] = PACKAGES
) -> None:
    """Raise ExecutorUnprepared when an executor lacks what tasks need; `stopping` breaks it off."""
    failed: list[HeadraceError] = []

    def look() -> None:
        try:
            compare(installed(spark, packages))
        except HeadraceError as error:
            failed.append(error)

    # Spark waits for executors for ever, and a call to it cannot be broken off.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    waited = 0.0
    while thread.is_alive() and not stopping.is_set():
        thread.join(_LOOK_SECONDS)
        if waited < _SILENT_SECONDS <= waited + _LOOK_SECONDS:
            logger.warning(
                "no executor of %s has run a task yet; has the cluster cores and memory to spare?",
                spark.sparkContext.master,
            )
        waited += _LOOK_SECONDS
    if failed:
        raise failed[0]


def installed(spark: SparkSession, packages: Mapping[str, str] = PACKAGES) -> list[Installed]:
    """What the Pythons of the executors have that are there now."""
    context = spark.sparkContext
    tasks = max(2, context.defaultParallelism)
    look = looking(tuple(packages.items()))
    try:
        found = context.parallelize(range(tasks), tasks).map(look).collect()
    except Exception as error:
        raise understood(error) from error
    return distinct(Installed(*each) for each in found)


def distinct(found: Iterable[Installed]) -> list[Installed]:
    """Each of them once; a machine may have several executors, with a Python each."""
    return list({repr(each): each for each in sorted(found, key=repr)}.values())


def compare(executors: Iterable[Installed]) -> None:
    """Raise ExecutorUnprepared when one of them cannot run our tasks; warn of other versions."""
    for theirs in executors:
        ours = {name: version_here(name) for name in theirs.packages}
        missing = [name for name, version in theirs.packages.items() if not version]
        if missing:
            needed = ", ".join(f"{name} {ours[name]}" for name in missing)
            raise ExecutorUnprepared(
                f"the Python {theirs.python} of the executor on {theirs.host} lacks {needed}"
            )
        if theirs.packages["headrace"] != __version__:
            raise ExecutorUnprepared(
                f"the executor on {theirs.host} has headrace {theirs.packages['headrace']}, and "
                f"the driver {__version__}"
            )
        for name, version in theirs.packages.items():
            if version != ours[name]:
                logger.warning(
                    "executor=%s package=%s version=%s driver=%s",
                    theirs.host,
                    name,
                    version,
                    ours[name],
                )


def version_here(name: str) -> str:
    """That of a distribution on the driver; "": it has none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


Look = Callable[[int], tuple[str, str, dict[str, str]]]


def looking(packages: Sequence[tuple[str, str]]) -> Look:
    """A function that needs nothing of ours where it runs: it is pickled with its code."""

    def look(_: int) -> tuple[str, str, dict[str, str]]:
        # Within, so that it is imported where it runs.
        import importlib.metadata  # noqa: PLC0415
        import importlib.util  # noqa: PLC0415
        import platform  # noqa: PLC0415
        import socket  # noqa: PLC0415

        found = {}
        for name, module in packages:
            try:
                there = importlib.util.find_spec(module) is not None
                # Without its metadata Headrace would not find its own parts.
                found[name] = importlib.metadata.version(name) if there else ""
            except importlib.metadata.PackageNotFoundError:
                found[name] = ""
        return socket.gethostname(), platform.python_version(), found

    return look
