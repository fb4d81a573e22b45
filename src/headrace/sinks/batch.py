"""What a batch is to a sink: rows of a DataFrame, or a range of the log that its tasks read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..change import record
from ..change.block import BlockRows
from ..change.event import Change, Table, Transaction, piece_begin
from ..change.span import LogSpan

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class Takes(Enum):
    """What a batch is to a sink."""

    ROWS = "rows"  # a DataFrame of changes, with the columns that `fields` names
    LOG_RANGE = "log_range"  # a LogBatch: its tasks read the log, so no change passes through Java


class ReadableLog(Protocol):
    """A log that tasks can read wherever they run; it can be pickled."""

    def pieces(self, epoch: str, after: int, upto: int) -> Iterator[tuple[int, int, bytes]]:
        """Neighbouring changes: the first one's sequence, how many, and their records."""
        ...

    def blocks(
        self, epoch: str, after: int, upto: int
    ) -> Iterator[tuple[int, int, bytes] | BlockRows]:
        """The same, with blocks of rows as they are, where the log can give them."""
        ...

    def spans(self, epoch: str, after: int, upto: int) -> list[LogSpan]:
        """What is known of a range without reading it, in order; of the rest, nothing."""
        ...

    def tables(self, epoch: str) -> Mapping[int, Table]:
        """The tables, by version."""
        ...


@dataclass(frozen=True, slots=True)
class LogBlock:
    """Rows that a snapshot has read together: a transaction, or what is left of it in a range."""

    rows: BlockRows
    described: Table

    @property
    def first(self) -> int:
        """The sequence of the first row; those of the others follow it."""
        return self.rows.first

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.rows.count

    @property
    def last(self) -> int:
        """The sequence of the last row."""
        return self.rows.last

    @property
    def table(self) -> int:
        """The version of the table that all rows belong to."""
        return self.described.version

    @property
    def transaction(self) -> Transaction:
        """The transaction that all rows belong to."""
        return self.rows.block.transaction

    @property
    def ordinal(self) -> int:
        """The place of the first row in its transaction."""
        return self.rows.begin + 1

    def records(self) -> bytes:
        """The rows as `LogRange.pieces` gives them."""
        return b"".join(self.rows.records())

    def columns(
        self,
        names: Sequence[str] | None = None,
        *,
        as_text: frozenset[str] = frozenset(),
        rescue: bool = False,
    ) -> "pa.Table":
        """Columns of the rows (without names: all), as `change.arrow.decode` gives them.

        DecodeError: a value does not fit its column's type.
        """
        # Only here: push sinks run where there is no pyarrow.
        from ..change.arrow import block_table  # noqa: PLC0415

        table = self.described
        wanted = {column.name: column for column in table.columns}
        chosen = [wanted[name] for name in (wanted if names is None else names)]
        return block_table(
            self.rows, chosen, connector=table.connector, as_text=as_text, rescue=rescue
        )


@dataclass(frozen=True, slots=True)
class LogRange:
    """Changes that a task reads from the log: those after `after`, up to and with `upto`.

    Several tasks read the same changes, and each takes the rows of its own part.
    """

    log: ReadableLog
    epoch: str
    after: int
    upto: int
    part: int = 0
    parts: int = 1

    def beyond(self, sequence: int) -> "LogRange":
        """What follows a change of it."""
        return replace(self, after=max(sequence, self.after))

    def own_part(self) -> "LogRange":
        """The changes that are this part's, where parts are divided by the sequence."""
        size = self.upto - self.after
        ends = (self.after + size * at // self.parts for at in (self.part, self.part + 1))
        return LogRange(self.log, self.epoch, *ends)

    def pieces(self) -> Iterator[tuple[int, int, bytes]]:
        """Neighbouring changes: the first one's sequence, how many, and their records."""
        return self.log.pieces(self.epoch, self.after, self.upto)

    def blocks(self) -> Iterator[tuple[int, int, bytes] | LogBlock]:
        """The same changes, but what a snapshot has read together as a block of columns.

        A log behind an older server gives all of them as records.
        """
        tables = self.tables()
        for part in self.log.blocks(self.epoch, self.after, self.upto):
            if isinstance(part, BlockRows):
                yield LogBlock(part, tables[part.block.head.table])
            else:
                yield part

    def spans(self) -> list[LogSpan]:
        """What is known of it without reading it, in order; of the rest, nothing."""
        return self.log.spans(self.epoch, self.after, self.upto)

    def tables(self) -> Mapping[int, Table]:
        """The tables, by version."""
        return self.log.tables(self.epoch)

    def transactions(self) -> Iterator[list[list[Change]]]:
        """All changes in order, some whole transactions at a time.

        Of a very large transaction each piece counts as one; see `change.event.PIECE`.
        """
        tables = self.tables()
        current: list[Change] = []  # the last transaction, whose end may be still to come
        begun = 0
        for first, count, records in self.pieces():
            ended: list[list[Change]] = []
            for sequence, each in enumerate(record.several(records, count), first):
                if (begin := piece_begin(sequence, each.ordinal)) != begun:
                    begun, before, current = begin, current, []
                    ended += [before] if before else []
                current.append(record.change(sequence, each, tables[each.table]))
            if ended:
                yield ended
        if current:
            yield [current]


class LogBatch(Protocol):
    """A batch for a sink that takes log ranges: which changes it has, and tasks to read them."""

    @property
    def spark(self) -> "SparkSession":
        """Where its tasks run."""
        ...

    @property
    def whole(self) -> LogRange | None:
        """All of it, for the driver to look at; None: the batch is empty."""
        ...

    @property
    def upto(self) -> int:
        """The last change's sequence; 0: the batch is empty."""
        ...

    def run(self, task: Callable[[LogRange], msgspec.Struct | None]) -> Sequence[str]:
        """Run `task` in Spark, once for each part; returns the JSON of what they returned."""
        ...

    def changes_of(self, table: Table) -> "DataFrame":
        """Its changes of one table, with all columns of `change.arrow.frame`."""
        ...
