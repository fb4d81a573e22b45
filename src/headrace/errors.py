"""Every error Headrace raises, and who must act on it.

    HeadraceError
    ├── ConfigError            the person who wrote the config
    ├── LogError               the operator of the machine that holds the log
    │   ├── LogAbsent          there is no log in the folder
    │   ├── LogInUse           another process writes this log
    │   ├── LogFailed          the disk refused a write; nothing after it was stored
    │   └── LogDamaged         what is on the disk is not what was written
    ├── SourceError            the operator of the database
    │   ├── SourceUnavailable  nobody: it is tried again
    │   ├── SourceRefused      a setting or privilege is missing on the server
    │   ├── TableUnknown       the person who named a table that is not captured
    │   ├── PositionLost       the server no longer has the changes after our position
    │   ├── SourceReplaced     the server is not the one our position belongs to
    │   └── ProtocolError      the server sent what its protocol does not allow
    ├── ServerError            whoever sent the running server a request that it refuses
    │   ├── ServerAbsent       nobody answers at the server's address
    │   ├── ServerBusy         nobody: the client asks again
    │   ├── ChangesTrimmed     the log no longer has the changes after a reader's sequence
    │   └── FeedReplaced       the log is not the one that a reader's sequence belongs to
    ├── PipelineError          the operator of the pipeline
    │   ├── ChangesLost        the log no longer has the changes after a query's offset
    │   ├── LogReplaced        the log is not the one that a query's offset belongs to
    │   ├── PipelineInUse      another pipeline works with the same checkpoints
    │   ├── CheckpointUnreadable  a query's checkpoint is damaged; what its sink holds is not
    │   ├── CheckpointUnavailable  nobody: the storage of a checkpoint is asked again
    │   ├── QueryFailed        Spark gave up for a reason of its own; it is tried a few times
    │   ├── WorkerLate         nobody: a busy machine starts Python slowly, and it is tried again
    │   ├── ExecutorUnprepared  whoever sets up the cluster: an executor lacks a package
    │   ├── LogUnreachable     nobody: the query requests it from the server again
    │   ├── SinkUnavailable    nobody: the batch is tried again
    │   ├── SinkRefused        whoever runs what a sink sends to, or its settings; it halts
    │   ├── SinkFenced         another pipeline writes to the same place
    │   ├── TableMoved         nobody: a batch is applied again to the files that are there now
    │   ├── ColumnsChanged     a table has other columns than the query that reads it
    │   └── TableFailed        one table cannot follow its source; the others go on
    ├── SignatureInvalid       whoever got a webhook request that its sender did not sign so
    └── DecodeError            one value or message cannot be read; its table stops, others go on

The message is the only required argument, so errors survive pickling between processes.
"""

import difflib
import re
from collections.abc import Iterable


class HeadraceError(Exception):
    """What went wrong, in one sentence; `hint` says what to do next."""

    retry = False
    hint = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint

    def explain(self) -> str:
        """The message with its hint, for a person."""
        return f"{self}\n{self.hint}" if self.hint else str(self)


class ConfigError(HeadraceError):
    """The config cannot be used."""


class LogError(HeadraceError):
    """The log cannot do what was requested."""


class LogAbsent(LogError):
    """There is no log where one was looked for."""

    hint = "Check data_dir in the config; `headrace run` creates the log."


class LogInUse(LogError):
    """Another process holds the log open for writing."""

    hint = "Stop the other `headrace run`, or set another data_dir."


class LogFailed(LogError):
    """The disk refused a write; what was acknowledged before is safe."""

    hint = "Free some space or repair the disk, then start Headrace again; it resumes by itself."


class LogDamaged(LogError):
    """What is on the disk is not what was written there."""

    hint = (
        "Check the disk. Move the log away and bring it back from a backup with `headrace "
        "restore`; without one, `headrace run` begins a new log with a new snapshot."
    )


class SourceError(HeadraceError):
    """The source cannot be captured."""


class SourceUnavailable(SourceError):
    """The source does not answer now and may answer later."""

    retry = True


class SourceRefused(SourceError):
    """The server lacks a setting or the user a privilege."""

    hint = "Run `headrace check` for the statements that fix it."


class TableUnknown(SourceError):
    """The source captures no table of this name."""


class PositionLost(SourceError):
    """The source no longer holds the changes after our position."""

    hint = "Run `headrace snapshot SOURCE` to start again from a new snapshot."


class SourceReplaced(SourceError):
    """The server is not the one that our position belongs to."""

    hint = "Run `headrace snapshot SOURCE` to start again from a new snapshot of this server."


class ProtocolError(SourceError):
    """The server sent bytes that its protocol does not allow."""


class ServerError(HeadraceError):
    """The running server refuses a request."""

    status: int = 0  # of the response; 0: there was none
    word: str = ""  # the reply's error code, such as unknown_cursor
    after: float = 0.0  # seconds after which the reply says to ask again


class ServerAbsent(ServerError):
    """No Headrace answers at the server's address."""

    retry = True
    hint = "Start it with `headrace run`, or check server.host and server.port in the config."


class ServerBusy(ServerError):
    """The server cannot answer now, or the key has had what it may have for now."""

    retry = True


class ChangesTrimmed(ServerError):
    """Changes that a reader has not read yet are no longer in the log."""

    hint = "Read the tables' current rows, then go on after `last`; or give `on_gap`."

    def __init__(self, message: str, *, hint: str = "", first: int = 0, last: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.first = first
        self.last = last  # both included


class FeedReplaced(ServerError):
    """The server has another log than a reader has read so far."""

    hint = "Read the tables' current rows, then begin after sequence 0."


class PipelineError(HeadraceError):
    """A streaming query cannot go on."""


class ChangesLost(PipelineError):
    """Changes that a query has not read yet are no longer in the log."""

    hint = (
        "Move what the sink has stored away, run `headrace pipeline --adopt SINK` and then "
        "`headrace snapshot SOURCE` for a new snapshot. A query of your own may set failOnDataLoss "
        "to false. A longer cdc.retention_days avoids it."
    )


class LogReplaced(PipelineError):
    """The log is another one than the query has read so far."""

    hint = "Check data_dir and the server's address; `headrace pipeline --adopt` starts afresh."


class PipelineInUse(PipelineError):
    """Another pipeline works with the same checkpoints."""

    hint = (
        "Stop it first (`headrace run` starts one by itself), or set another "
        "pipeline.checkpoint_dir."
    )


class CheckpointUnreadable(PipelineError):
    """A query's checkpoint cannot be read."""


class CheckpointUnavailable(PipelineError):
    """The storage that has a query's checkpoint does not answer as it should."""

    retry = True
    hint = "It is tried again; see pipeline.checkpoint_dir, and its keys in pipeline.spark."


class QueryFailed(PipelineError):
    """A query ended for a reason that Headrace does not know."""

    hint = "What Spark says about it is in pipeline/spark.log in data_dir."


class WorkerLate(PipelineError):
    """A Python process that Spark started was not ready in time."""

    retry = True
    hint = (
        "The machine is busy, and it is tried again. If it stays so, spark.pyspark.python may "
        "name a Python that does not start: see pipeline/spark.log in data_dir."
    )


class ExecutorUnprepared(PipelineError):
    """An executor of Spark does not have what tasks need."""

    hint = (
        "Install the driver's headrace[spark] for the Python of every executor, which "
        "spark.pyspark.python names, or send a packed environment along in spark.archives: see "
        "docs/clusters.md."
    )


class LogUnreachable(PipelineError):
    """The server that a query reads from does not answer now and may answer later."""

    retry = True
    hint = "Start it with `headrace run`, or check the url."


class SinkUnavailable(PipelineError):
    """The place a sink writes to does not answer now and may answer later."""

    retry = True


class SinkRefused(PipelineError):
    """What a sink sends to refuses everything, and will until a person acts."""

    hint = "Change the sink's settings, or run `headrace redrive SINK` once it takes events again."


class SinkFenced(PipelineError):
    """Another pipeline writes to the same place."""

    hint = "Stop the other one, or run `headrace pipeline --adopt SINK` to take over from it."


class TableMoved(PipelineError):
    """Another writer has replaced files of a table that a commit was about."""

    retry = True


class ColumnsChanged(PipelineError):
    """A table has other columns now than a query that reads it with its columns."""


class TableFailed(PipelineError):
    """One table cannot follow its source any more."""

    hint = "Run `headrace snapshot SOURCE TABLE` for a new snapshot; the table then goes on."


class SignatureInvalid(HeadraceError):
    """A webhook request is not what its sender signed, or was signed long ago."""

    hint = "Answer 401 and do nothing with it. Give the body's bytes as they came."


class DecodeError(HeadraceError):
    """A value or message cannot be read."""


def nearest(name: str, known: Iterable[str]) -> str:
    """What to add to "there is no such name"."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are: {', '.join(names)}" if names else "; there are none"


_WRITTEN = re.compile(r"\bheadrace\.errors\.(?P<kind>\w+): (?P<message>[^\n]*)")


def own_error(text: str) -> HeadraceError | None:
    """The last error of ours in a traceback: what is left of one that was raised elsewhere."""
    for found in reversed(list(_WRITTEN.finditer(text))):
        kind = globals().get(found["kind"])
        if isinstance(kind, type) and issubclass(kind, HeadraceError):
            return kind(found["message"].strip())
    return None
