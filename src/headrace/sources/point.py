"""The rows of tables at one point of a source's stream, read beside whoever captures it.

By them it can be found out whether what the log has led to elsewhere equals the database: whatever
the rows show is in the log before the point, and whatever follows in the log they do not show.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..change.event import Batch, Position
from ..errors import ConfigError
from . import Register, Source
from .redact import Redaction


class SourcePoint(Protocol):
    """A point of the stream, and the rows of some tables there."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Tables (schema.table) that are not read, and why."""
        ...

    def batches(self) -> Iterator[Batch]:
        """The rows as READ, and the columns of their tables before them.

        SourceUnavailable: not all could be read now; another point may be tried.
        """
        ...

    def expect_nobody_waits(self) -> None:
        """SourceUnavailable: a statement waits for the point to end; another may be tried."""
        ...

    def covers(self, position: Position) -> bool:
        """Whether the rows show the change that stands here in the stream."""
        ...

    def reached_by(self, resume: bytes) -> bool:
        """Whether a log that has stored this resume has every change that the rows show."""
        ...


@runtime_checkable
class PointSource(Protocol):
    """A source whose rows can be read at a point of its stream."""

    @property
    def tables(self) -> Sequence[str]:
        """Patterns of the tables that it captures, when they are there."""
        ...

    def at_point(
        self, resume: bytes, tables: Sequence[str], register: Register
    ) -> AbstractContextManager[SourcePoint]:
        """Captured tables (schema.table) at a point behind everything that is in the log now.

        `resume` is what the log stored last. Nothing that captures is held up.
        """
        ...


@dataclass(frozen=True, slots=True)
class _RedactedPoint:
    """A point whose rows have only what may be stored."""

    point: SourcePoint
    redaction: Redaction

    @property
    def left_out(self) -> Mapping[str, str]:
        return self.point.left_out

    def batches(self) -> Iterator[Batch]:
        return map(self.redaction.batch, self.point.batches())

    def expect_nobody_waits(self) -> None:
        self.point.expect_nobody_waits()

    def covers(self, position: Position) -> bool:
        return self.point.covers(position)

    def reached_by(self, resume: bytes) -> bool:
        return self.point.reached_by(resume)


@contextmanager
def redacted_point(
    source: Source, resume: bytes, tables: Sequence[str], register: Register
) -> Iterator[SourcePoint]:
    """A source's tables at a point, with only what its settings let be stored."""
    if not isinstance(source, PointSource):
        raise ConfigError(
            f"the rows of source {source.name} cannot be compared: its type has no method "
            "`at_point`",
            hint="Its package must read its tables at a point of the stream, or be renewed.",
        )
    redaction = Redaction.of_source(source, register)
    if redaction is None:
        with source.at_point(resume, tables, register) as point:
            yield point
        return
    with source.at_point(resume, tables, redaction.register) as point:
        yield _RedactedPoint(point, redaction)
