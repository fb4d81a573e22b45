"""What ended a query is told in Headrace's own words, without a row's values."""

import pytest
from pyspark.errors import StreamingQueryException

from headrace.errors import (
    ChangesLost,
    ConfigError,
    ExecutorUnprepared,
    HeadraceError,
    LogAbsent,
    QueryFailed,
    ServerAbsent,
    SinkFenced,
    SinkUnavailable,
    WorkerLate,
)
from headrace.pipeline.failures import passing, understood

FAILED = """[STREAM_FAILED] Query lake terminated with exception: Traceback (most recent call last):
  File "source.py", line 1, in latestOffset
    raise ChangesLost(...)
headrace.errors.ChangesLost: changes 11 to 14 are gone
 SQLSTATE: 38000"""


def raised(error: Exception, cause: Exception) -> Exception:
    """The error as it is when it was raised from another."""
    error.__cause__ = cause
    return error


def test_an_error_of_ours_is_found_behind_others() -> None:
    ours = SinkFenced("taken", hint="mend it")
    assert understood(raised(RuntimeError("x"), ours)) is ours


def test_an_error_that_crossed_the_jvm_is_itself_again() -> None:
    error = understood(StreamingQueryException(FAILED))
    assert type(error) is ChangesLost
    assert str(error) == "changes 11 to 14 are gone"
    assert error.hint == ChangesLost.hint


def test_the_innermost_error_of_a_text_is_told() -> None:
    text = "headrace.errors.SinkUnavailable: away\n\nheadrace.errors.ConfigError: no key\n"
    assert type(understood(RuntimeError(text))) is ConfigError


def test_a_failure_of_unknown_kind_shows_no_values() -> None:
    text = "Traceback:\nValueError: cannot read 4111-1111\n\nsqlalchemy.exc.DataError: 4111-1111"
    error = understood(StreamingQueryException(text))
    assert type(error) is QueryFailed
    assert str(error) == "the query ended with StreamingQueryException, sqlalchemy.exc.DataError"
    assert "headrace.errors.Nonsense" not in str(understood(RuntimeError("headrace.errors.No: x")))


# As Spark 4.3 reports it: of a source's process, of a task's, and through py4j.
LATE = [
    StreamingQueryException(
        "[STREAM_FAILED] Query [id = 4] terminated with exception: Python worker failed to connect "
        "back. SQLSTATE: XXKST\n=== Streaming Query ===\nIdentifier: [id = 4]"
    ),
    StreamingQueryException(
        "[STREAM_FAILED] Query [id = 4] terminated with exception: Job aborted due to stage failure"
        ": Lost task 0.0 in stage 1.0 (TID 1) (127.0.0.1 executor driver): java.net.SocketTimeout"
        "Exception: Timed out while waiting for the Python worker to connect back after 60000 ms"
    ),
    RuntimeError(
        "An error occurred while calling o52.start.\n: org.apache.spark.SparkException: "
        "Python worker failed to connect back.\nCaused by: java.net.SocketTimeoutException: "
        "Timed out while waiting for the Python worker to connect back"
    ),
]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[STREAM_FAILED] Query terminated with exception: Job aborted due to stage failure: "
            "Lost task 0.3 in stage 1.0 (TID 7): org.apache.spark.api.python.PythonException: "
            "Traceback (most recent call last):\n    return cloudpickle.loads(obj)\n"
            "ModuleNotFoundError: No module named 'headrace.sinks'\n\n\tat org.apache.spark.api",
            "the Python of an executor has no module headrace",
        ),
        (
            "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python "
            "in worker has different version: 3.12 than that in driver: 3.11, PySpark cannot run",
            "the Python of an executor is 3.12, and the driver's 3.11",
        ),
    ],
)
def test_what_an_executor_lacks_halts_and_is_named(text: str, message: str) -> None:
    error = understood(StreamingQueryException(text))
    assert type(error) is ExecutorUnprepared
    assert str(error) == message
    assert not passing(error)


@pytest.mark.parametrize("error", LATE)
def test_a_python_that_starts_slowly_is_a_passing_failure(error: Exception) -> None:
    for each in (error, raised(RuntimeError("x"), error)):
        late = understood(each)
        assert type(late) is WorkerLate
        assert passing(late)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(28, "No space left on device"), True),
        (SinkUnavailable("away"), True),
        (ServerAbsent("nobody answers"), True),
        (LogAbsent("not yet"), True),
        (SinkFenced("taken"), False),
        (ConfigError("wrong"), False),
        (RuntimeError("odd"), False),
    ],
)
def test_what_may_pass_is_told_from_what_stays(error: Exception, passes: bool) -> None:
    known = understood(error)
    assert isinstance(known, HeadraceError)
    assert passing(known) is passes
