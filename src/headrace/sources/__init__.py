"""(1) Databases -> changes: the contract of a source.

A source is a frozen value whose fields are its settings; it opens nothing until `open`.

    stream = source.open(resume, register)   resume: what the log stored last; None: never captured
    for batch in stream:                     commit order, whole transactions (see event.Batch)
        log.append(source.name, batch)       durable first,
        stream.ack(batch.resume)             forgotten by the database second

- Everything after `resume` comes exactly once, in commit order; nothing at or before it comes.
- A table that has not been copied yet is copied first: its rows come as READ.
- A table with a value that cannot be decoded goes to an errored state; the others go on.
- Every error that ends the iteration is a HeadraceError; `retry` says whether to open again.

The class of a source has a `connector`, a `change.connector.Connector`: what readers of the log
need to know of its positions, its types and its names in formats.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from ..change.event import Batch, Table
from ..plugins import Finding as Finding  # what `check` of a source returns

Register = Callable[[Table], Table]
"""Gives a table the version that it has in the log."""


class Phase(StrEnum):
    """What a source is doing."""

    STARTING = "starting"
    SNAPSHOT = "snapshot"
    STREAMING = "streaming"
    WAITING = "waiting"  # the server does not answer; it is tried again
    HALTED = "halted"  # a person must act
    PAUSED = "paused"  # an operator has paused it
    STOPPED = "stopped"


class CopyProgress(msgspec.Struct, frozen=True):
    """How far the copy of a table has come."""

    table: str
    rows: int
    estimated_rows: int  # the server's own guess; -1: it has none
    done: bool


FORMER = "is not captured any more: it was dropped, renamed, or is not among `tables`"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How a source is doing."""

    source: str
    phase: Phase
    position: str = ""  # the source's own text for how far the log has come
    lag_bytes: int = 0  # what the server has and the log has not
    lag_seconds: float = 0.0  # age of the newest stored change while there is more to come
    heard_at: int = 0  # when the server last sent anything, µs since 1970; 0: never
    stored_at: int = 0  # when the log last took a batch, µs since 1970; 0: never
    copies: tuple[CopyProgress, ...] = ()
    errored: dict[str, str] = {}  # table -> reason
    inserts_only: dict[str, str] = {}  # table -> the statement after which all is captured
    former: tuple[str, ...] = ()  # captured before, and not now: dropped, renamed, not in `tables`
    warnings: tuple[str, ...] = ()  # what an operator should do before it does harm
    retained_bytes: int = 0  # what the server keeps for this source: WAL, captured event rows
    error: str = ""  # why it waits or has halted
    hint: str = ""  # what to do about it

    @property
    def copying(self) -> bool:
        """Whether a snapshot is being taken, be it while the other tables are streamed."""
        if self.phase is Phase.STREAMING:
            return any(not copy.done and copy.table not in self.errored for copy in self.copies)
        return self.phase is Phase.SNAPSHOT


class Removal(msgspec.Struct, frozen=True):
    """One thing of Headrace in a database, that `headrace remove` takes out."""

    what: str  # as its operator calls it: "replication slot headrace_shop"
    statement: str  # what takes it out; run, or shown by --dry-run
    error: str = ""  # why it is still there


class Stream(Protocol):
    """An open source."""

    def __iter__(self) -> Iterator[Batch]:
        """Batches as they come, for ever; ends after `close`."""
        ...

    def ack(self, resume: bytes) -> None:
        """Everything up to `resume` is durable: the database may forget it."""
        ...

    def status(self) -> Status:
        """How it is doing; may be called from any thread."""
        ...

    def close(self) -> None:
        """End the iteration and let go of the database; may be called from any thread."""
        ...


class Source(Protocol):
    """A database whose changes are captured."""

    @property
    def name(self) -> str:
        """The configured name."""
        ...

    @property
    def host(self) -> str:
        """The server's name as the settings give it, without asking anybody."""
        ...

    def open(self, resume: bytes | None, register: Register) -> Stream:
        """Begin, or go on after `resume`."""
        ...

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume that copies these tables anew; no tables: all, from a new start."""
        ...

    def describe(self, resume: bytes | None) -> Status:
        """The status behind a stored resume, without asking the database."""
        ...

    def check(self) -> list[Finding]:
        """Look at everything that capturing needs on the server."""
        ...

    def captured_tables(self) -> list[Table]:
        """The tables that would be captured now, with columns and foreign keys.

        Asked from the database, so it may raise a SourceError. They have no version and no origin.
        """
        ...

    def remove(self, resume: bytes | None, *, dry_run: bool = False) -> list[Removal]:
        """Take everything out of the database that Headrace has put there, in this order.

        `resume` is what the log stored last; None: there is no log. What cannot be taken out has
        an `error`, and the rest is taken out all the same. Repeated, it finds only what is left. A
        SourceRefused when somebody captures the source now; with `dry_run` nothing is changed.
        """
        ...
