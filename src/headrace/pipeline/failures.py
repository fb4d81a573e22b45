"""Why a query ended: the error of ours behind what Spark reports, and whether to try again.

An exception that leaves Python for the JVM comes back as text. What a sink raised is kept on this
side; of what the source raised in its own process, only the traceback's last line is left.
"""

import re
from collections.abc import Iterator

from pyspark.errors import PySparkException

from ..errors import (
    ExecutorUnprepared,
    HeadraceError,
    LogAbsent,
    QueryFailed,
    ServerAbsent,
    SinkUnavailable,
    WorkerLate,
    own_error,
)
from ..sinks.lake.refusal import refusal

# Spark waits 10 s for a source's process and 60 s for a task's; no setting changes that.
_LATE = re.compile(r"Python worker (?:failed )?to connect back")
# Of a task: only its own process lacks what this one has loaded.
_MISSING = re.compile(r"^ModuleNotFoundError: No module named '(?P<name>[\w.]+)'", re.MULTILINE)
_OTHER_PYTHON = re.compile(
    r"PYTHON_VERSION_MISMATCH\] .*?(?P<theirs>\d+\.\d+)\b.*?(?P<ours>\d+\.\d+)\b", re.DOTALL
)
_ANY = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception)): ", re.MULTILINE)


def understood(error: BaseException) -> HeadraceError:
    """The error to show a person; row values that Spark's own text may hold are left out."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, HeadraceError):
            return cause
    for cause in causes:
        if ours := own_error(str(cause)):
            return ours
    for cause in causes:
        if unprepared := _unprepared(str(cause)):
            return unprepared
    if any(_LATE.search(str(cause)) for cause in causes):
        return WorkerLate("a Python process of Spark was not ready in time")
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return SinkUnavailable(f"{place}{refusal(error)}")
    return QueryFailed(f"the query ended with {_named(error)}")


def passing(error: HeadraceError) -> bool:
    """Whether it goes away by itself, so that it is tried for ever."""
    # Nobody may have started the server yet, or captured anything.
    return error.retry or isinstance(error, ServerAbsent | LogAbsent)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _unprepared(text: str) -> ExecutorUnprepared | None:
    if found := _OTHER_PYTHON.search(text):
        return ExecutorUnprepared(
            f"the Python of an executor is {found['theirs']}, and the driver's {found['ours']}"
        )
    if found := _MISSING.search(text):
        package = found["name"].partition(".")[0]
        return ExecutorUnprepared(f"the Python of an executor has no module {package}")
    return None


def _named(error: BaseException) -> str:
    """What kind of failure it was."""
    condition = error.getCondition() if isinstance(error, PySparkException) else None
    raised = [found["kind"] for found in _ANY.finditer(str(error))]
    names = [type(error).__name__, condition, raised[-1] if raised else None]
    return ", ".join(dict.fromkeys(name for name in names if name))
