"""Whether a log holds everything once, in order, and adds up to the database."""

from collections.abc import Iterable, Iterator

from headrace.change.event import Change, Op
from headrace.change.replay import Replay, TableName
from headrace.demo.postgres import PostgresShop
from headrace.demo.verify import compare_log
from headrace.log import LogReader
from headrace.sources.postgres.position import PostgresPosition
from headrace.sources.postgres_events.position import EventTablePosition
from headrace.testing import PostgresDatabase
from tests.faults.captor import SOURCE
from tests.faults.workload import TABLES


def verify(
    log: LogReader,
    database: PostgresDatabase,
    *,
    tables: Iterable[str] = TABLES,
    surprises: bool = True,
) -> Replay:
    """Assert every promise about a log; without `surprises` its changes must follow smoothly."""
    checks = Checks()
    replay = Replay()
    for change in every_change(log):
        checks.see(change)
        replay.apply(change)
    checks.end()
    if not surprises:
        assert not replay.surprises, replay.surprises[:5]
    names = [TableName(SOURCE, "public", table) for table in tables]
    verdicts = compare_log(PostgresShop(database.url), replay, names)
    assert all(verdict.equal for verdict in verdicts), [v for v in verdicts if not v.equal]
    return replay


def every_change(log: LogReader) -> Iterator[Change]:
    """The whole log, oldest first."""
    after = 0
    while changes := log.read(after, limit=5000):
        yield from changes
        after = changes[-1].sequence


class Checks:
    """Looks at one change after the other."""

    def __init__(self) -> None:
        self._before: Change | None = None
        self._ids: set[str] = set()
        self._transactions: set[str] = set()
        self._places: set[tuple[int, int]] = set()
        self._commit_lsn = 0

    def see(self, change: Change) -> None:
        """The next change of the log."""
        before, self._before = self._before, change
        expected = before.sequence + 1 if before else 1
        assert change.sequence == expected, f"{change.sequence} follows {expected - 1}"
        identity = change.id
        assert identity not in self._ids, f"the id of {change} was there before"
        self._ids.add(identity)
        if before is None or before.last:
            self._begin(change)
        else:
            assert change.transaction.id == before.transaction.id, f"{before} is cut short"
            assert change.ordinal == before.ordinal + 1, f"{change} after {before.ordinal}"
        if not _copied(change):
            self._see_streamed(change)

    def end(self) -> None:
        """Nothing comes after."""
        assert self._before is None or self._before.last, f"{self._before} is the end"

    def _begin(self, change: Change) -> None:
        assert change.ordinal == 1, f"{change} begins a transaction"
        assert change.transaction.id not in self._transactions, f"{change} was there before"
        self._transactions.add(change.transaction.id)

    def _see_streamed(self, change: Change) -> None:
        commit_lsn = change.position.commit
        if isinstance(change.position, PostgresPosition | EventTablePosition):
            assert commit_lsn >= self._commit_lsn, f"{change} comes after {self._commit_lsn:X}"
        self._commit_lsn = commit_lsn
        place = commit_lsn, change.ordinal
        assert place not in self._places, f"{change} was there before"
        self._places.add(place)


def _copied(change: Change) -> bool:
    """Whether it is of a snapshot: its rows, or what announces them."""
    return change.op is Op.READ or change.transaction.id.startswith("snapshot-")
