"""Random histories, cut into random batches, end in the rows that a naive replay ends in."""

import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from headrace.change.event import Change, Column, Op, Table
from headrace.log import writer
from headrace.sinks.lake import files
from headrace.sinks.lake.deltalog import DeltaLog
from headrace.sinks.tables import apply, compaction, parquet, target
from tests.effort import times
from tests.sinks.lake import Lake, Row, Shop, ordered, put, remove, schema, truncate
from tests.sinks.plain import PlainLake

KEYS = 12
BASE = [
    Column("id", "integer", key=True),
    Column("twin", "integer"),
    Column("name", "text"),
    Column("big", "text"),
]
OPTIONAL = [Column("extra", "numeric(10,2)"), Column("seen", "timestamp with time zone")]
WIDER = {"integer": "bigint", "numeric(10,2)": "numeric(14,4)"}
REMOVABLE = [*OPTIONAL, Column("extra", "numeric(14,4)")]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the log knows of some changes of a batch what they are, and others are read."""
    monkeypatch.setattr(writer, "_MARK_CHANGES", 5)


class History:
    """Makes changes that a database could have made."""

    def __init__(
        self,
        lake: Shop,
        seed: int,
        *,
        keys: int = KEYS,
        rare: Sequence[str] = ("truncate", "alter"),
    ) -> None:
        """`rare`: what happens now and then beside changes of rows."""
        self._lake = lake
        self._keys = keys
        self._rare = rare
        self._random = random.Random(seed)
        self._there: set[int] = set()
        self._columns = list(BASE)
        self._table: Table = lake.table("orders", self._columns)

    def transaction(self) -> None:
        """One more, of one to six changes."""
        changes = [self._change() for _ in range(self._random.randint(1, 6))]
        self._lake.commit(*changes)

    def _change(self) -> Change:
        kinds = ["insert"] * 5 + ["update"] * 6 + ["delete"] * 3 + ["move"] * 2
        kind = self._random.choice([*kinds, *self._rare])
        if kind == "insert" or (kind in ("update", "delete", "move") and not self._there):
            return self._insert()
        if kind == "truncate":
            self._there.clear()
            return truncate(self._table)
        if kind == "alter":
            return self._alter()
        number = self._random.choice(sorted(self._there))
        if kind == "delete":
            self._there.remove(number)
            return remove(self._table, **self._key(number))
        return self._update(number, move=kind == "move")

    def _insert(self) -> Change:
        free = sorted(set(range(self._keys)) - self._there)
        if not free:
            return self._update(self._random.choice(sorted(self._there)), move=False)
        number = self._random.choice(free)
        self._there.add(number)
        op = self._random.choice([Op.INSERT, Op.READ])
        return put(self._table, op, **self._row(number))

    def _update(self, number: int, *, move: bool) -> Change:
        free = sorted(set(range(self._keys)) - self._there)
        target = self._random.choice(free) if move and free else number
        row = self._row(target)
        if self._random.random() < 0.5:
            del row["big"]  # as an unchanged large value
        self._there = self._there - {number} | {target}
        was = self._key(number) if target != number else None
        return put(self._table, Op.UPDATE, was=was, **row)

    def _alter(self) -> Change:
        """A column comes (perhaps again), goes or gets wider, or another column is the key."""
        kind = self._random.choice(["add", "add", "drop", "widen", "key"])
        names = [column.name for column in self._columns]
        if kind == "add" and (free := [each for each in OPTIONAL if each.name not in names]):
            self._columns.append(self._random.choice(free))
        elif kind == "drop" and (gone := [each for each in self._columns if each in REMOVABLE]):
            self._columns.remove(self._random.choice(gone))
        elif kind == "key":
            self._columns = [_keyed(column, self._columns) for column in self._columns]
        elif kind == "widen":
            self._columns = [
                Column(column.name, WIDER.get(column.type, column.type), column.key)
                for column in self._columns
            ]
        self._table = self._lake.table("orders", self._columns)
        return schema(self._table)

    def _key(self, number: int) -> dict[str, int]:
        return dict.fromkeys(self._table.key, number)

    def _row(self, number: int) -> dict[str, Any]:
        made = {
            "id": number,
            "twin": number,
            "name": self._random.choice(["a", "b", None, "c d"]),
            "big": str(self._random.random()),
            "extra": f"{self._random.randint(-999, 999)}.{self._random.randint(10, 99)}",
            "seen": f"2025-03-{self._random.randint(10, 28)}T00:00:00.123456+00:00",
        }
        return {column.name: made[column.name] for column in self._columns}


def _keyed(column: Column, columns: list[Column]) -> Column:
    """The key is the column id, then id and twin, which is always the same, then id again."""
    two = sum(each.key for each in columns) == 2
    return Column(
        column.name, column.type, key=column.name == "id" or (column.name == "twin" and not two)
    )


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.requirement("S2-23")
@settings(
    max_examples=times(6, nightly=30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(1, 12), min_size=2, max_size=6))
def test_any_history_in_any_batches_equals_a_naive_replay(
    spark: SparkSession, seed: int, cuts: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake(spark, Path(folder), file_mb=0.002)  # so small that there are many files
        history = History(lake, seed)
        for transactions in cuts:
            for _ in range(transactions):
                history.transaction()
            lake.write()
            lake.writer.maintain()
            assert lake.writer.failed_tables() == []
            assert lake.rows() == lake.expected()
        lake.writer.finish()
        lake.log.close()


class Killed(BaseException):
    """The process ends here; nothing catches this."""


SMALL: dict[Any, dict[str, tuple[int, ...]]] = {
    target: {"FILE_ROWS": (8, 20), "WINDOW_KEYS": (5, 1000)},
    compaction: {"_FEW_ROWS": (0, 2, 5)},
    files: {"GENERATION": (2, 3)},
    parquet: {"GROUP_ROWS": (3, 1000), "GROUP_BYTES": (500, 10**7)},
    apply: {"_MOST_BYTES": (200, 10**7)},
}


@pytest.mark.parametrize("seed", range(times(5, nightly=100)))
def test_any_batches_beside_any_steps_of_compaction_equal_a_naive_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chosen = random.Random(seed)
    for module, limits in SMALL.items():
        for name, values in limits.items():
            monkeypatch.setattr(module, name, chosen.choice(values))
    lake = PlainLake(
        monkeypatch,
        tmp_path,
        keep=chosen.choice(["rows", "rows", "history"]),
        deletes=chosen.choice(["vectors", "vectors", "vectors", "rewrite"]),
        partition_by=chosen.choice([{}, {"public.orders": ("name",)}]),
        cluster_by=chosen.choice([{}, {"public.orders": ("big",)}]),
        vacuum_hours=chosen.choice([0, 24]),
    )
    # With `keep: history`, a column that comes back narrower fails the table.
    rare = [("truncate",), ()] if lake.sink.keep == "history" else [("truncate", "alter"), ()]
    history = History(lake, seed, keys=40, rare=chosen.choice(rare))
    ends = [0]
    for _ in range(60):
        match chosen.choice(["changes"] * 8 + ["batch"] * 8 + ["compaction"] * 8 + ["log"]):
            case "changes":
                for _ in range(chosen.randint(5, 15)):
                    history.transaction()
                    ends.append(lake.log.latest_sequence)
            case "compaction":
                for _ in range(chosen.randint(1, 4)):
                    lake.compact()
            case "log":
                lake.cut_short(truncate(lake.table("other")), truncate(lake.table("another")))
            case "batch" if later := [end for end in ends if end > lake.written]:
                write_perhaps_killed(lake, chosen, later)
        if lake.written:
            expect_replayed(lake)
    lake.log.close()


def write_perhaps_killed(lake: PlainLake, chosen: random.Random, ends: list[int]) -> None:
    """The next batch, whose process may end before or after its commit."""
    upto, parts, really = chosen.choice(ends), chosen.choice([1, 1, 2]), DeltaLog.put

    def put_and_end(log: DeltaLog, commit: Any) -> bool:
        if chosen.random() < 0.5:
            assert really(log, commit)
        raise Killed

    if chosen.random() < 0.3:
        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            patch.setattr(DeltaLog, "put", put_and_end)
            lake.write(upto, parts)
        lake.open()
    if lake.written < upto:
        lake.write(upto, parts)
    if chosen.random() < 0.1:
        lake.repeat(parts)


def expect_replayed(lake: PlainLake) -> None:
    assert lake.writer.failed_tables() == []
    names = [column.name for column in BASE]  # history keeps values of others that are gone
    current = [row for row in lake.rows(own=True) if row.get("_current", True)]
    expected = lake.expected(upto=lake.written)
    assert _only(names, current) == _only(names, expected)


def _only(names: list[str], rows: list[Row]) -> list[Row]:
    return ordered([{name: row[name] for name in names} for row in rows])
