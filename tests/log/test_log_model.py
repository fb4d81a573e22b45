"""Whatever is done to a log, it holds what a plain list would hold."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from headrace.change.event import Batch, Op
from headrace.change.record import encode
from headrace.log import Log
from tests.effort import times
from tests.log.blocks import as_block, rows
from tests.log.transactions import ids, known_table, transaction

SOURCES = ("one", "two")
TABLES = ("users", "orders")
HALF_A_MINUTE = 30_000_000  # so that the log marks age and size now and then
SIZES = st.integers(0, 40)


class LogMachine(RuleBasedStateMachine):
    """A log beside a list: transactions whole and in pieces, given up, cut off and trimmed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-model-"))
        self.log = Log.open(self.folder)
        self.committed: list[tuple[str, int]] = []
        self.resumes: dict[str, bytes] = {}
        self.first = 1
        self.number = 0
        self.open = ""  # the source whose transaction is open
        self.pieces: list[tuple[str, int]] = []
        self.sizes: list[int] = []  # bytes by sequence; those of a block stand with its last
        self.new_sizes: list[int] = []

    def teardown(self) -> None:
        self.log.close()
        shutil.rmtree(self.folder)

    def _append(self, source: str, size: int, resume: bytes | None) -> None:
        if not self.pieces:
            self.number += 1
        changes = transaction(
            known_table(self.log, TABLES[self.number % 2]),
            self.number,
            size,
            start=len(self.pieces) + 1,
            captured_at=self.number * HALF_A_MINUTE,
        )
        changes = [
            replace(each, op=Op.TRUNCATE) if (self.number + each.ordinal) % 13 == 0 else each
            for each in changes
        ]
        self.log.append(source, Batch(changes, resume))
        self.pieces += ids(changes)
        self.new_sizes += map(len, encode(changes))

    @precondition(lambda self: not self.open)
    @rule(source=st.sampled_from(SOURCES), size=SIZES)
    def append(self, source: str, size: int) -> None:
        """A transaction in one batch."""
        resume = b"%d" % (self.number + 1)
        self._append(source, size, resume)
        self._commit(source, resume)

    @precondition(lambda self: not self.open)
    @rule(source=st.sampled_from(SOURCES), size=SIZES.filter(bool))
    def append_block(self, source: str, size: int) -> None:
        """A batch of a snapshot."""
        self.number += 1
        table, resume = known_table(self.log), b"%d" % self.number
        changes = rows(table, self.number, size, captured_at=self.number * HALF_A_MINUTE)
        block = as_block(changes, table, self.number)
        self.log.append(source, Batch(block, resume))
        self.pieces += ids(changes)
        self.new_sizes += [0] * (size - 1) + [len(block.encoded[0])]
        self._commit(source, resume)

    @rule(source=st.sampled_from(SOURCES), size=SIZES.filter(bool))
    def append_piece(self, source: str, size: int) -> None:
        """A transaction that goes on."""
        self.open = self.open or source
        self._append(self.open, size, None)

    @precondition(lambda self: self.open)
    @rule(size=SIZES)
    def end(self, size: int) -> None:
        """The rest of a transaction in pieces."""
        resume = b"end of %d" % self.number
        self._append(self.open, size, resume)
        self._commit(self.open, resume)

    def _commit(self, source: str, resume: bytes) -> None:
        self.committed += self.pieces
        self.sizes += self.new_sizes
        self.resumes[source] = resume
        self.open, self.pieces, self.new_sizes = "", [], []

    @rule(source=st.sampled_from(SOURCES))
    def abandon(self, source: str) -> None:
        """A source fails, perhaps in the middle of a transaction."""
        self.log.abandon(source)
        if source == self.open:
            self.open, self.pieces, self.new_sizes = "", [], []

    @rule()
    def reopen(self) -> None:
        """The process ends, perhaps in the middle of a transaction."""
        self.log.close()
        self.log = Log.open(self.folder)
        self.open, self.pieces, self.new_sizes = "", [], []

    @rule(before=st.integers(0, 200), share=st.booleans())
    def trim(self, before: int, share: bool) -> None:
        """Remove the oldest."""
        before = self.first + (before if share else 0)
        self.log.trim(before)
        self.first = max(self.first, min(before, len(self.committed) + 1))

    @invariant()
    def holds_what_the_list_holds(self) -> None:
        """Every promise at once: order, density, visibility, positions, sizes."""
        changes = self.log.read(0, limit=1_000_000)
        assert ids(changes) == self.committed[self.first - 1 :]
        assert [c.sequence for c in changes] == list(range(self.first, len(self.committed) + 1))
        assert {s: r for s in SOURCES if (r := self.log.resume(s)) is not None} == self.resumes
        stats = self.log.stats()
        sizes = self.sizes[self.first - 1 :]
        assert (stats.count, stats.total_bytes) == (len(sizes), sum(sizes))
        assert (stats.first_sequence, stats.latest_sequence) == (self.first, len(self.committed))

    @invariant()
    def knows_without_reading_what_reading_shows(self) -> None:
        """Spans lie one after the other, and each says exactly what is there."""
        reached = self.first - 1
        for span in self.log.spans(0, len(self.committed)):
            assert reached <= span.after < span.upto <= len(self.committed)
            reached = span.upto
            read = self.log.read(span.after, limit=1_000_000, upto=span.upto)
            of_rows = [each for each in read if each.op is not Op.TRUNCATE]
            assert span.others == tuple(each.sequence for each in read if each not in of_rows)
            assert len({part.version for part in span.tables}) == len(span.tables)
            assert sum(part.changes for part in span.tables) == len(read)
            for part in span.tables:
                own = [each.sequence for each in read if each.table.version == part.version]
                rows_of = [each for each in of_rows if each.table.version == part.version]
                # What was read by a snapshot is in blocks here.
                single = [each.sequence for each in rows_of if each.op is not Op.READ]
                found = (own[0], own[-1], max(single, default=0), len(own))
                assert (part.first, part.last, part.last_of_row, part.changes) == found
                assert bool(part.snapshots) == (len(single) < len(rows_of))


TestLogModel = LogMachine.TestCase
TestLogModel.settings = settings(
    max_examples=times(6, nightly=36), stateful_step_count=25, deadline=None
)
