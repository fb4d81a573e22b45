"""Random histories, cut into random batches, end in the rows that a naive replay ends in."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from headrace.change.event import Change, Column, Op, Table
from headrace.log import writer
from tests.effort import times
from tests.sinks.lake import Lake, put, remove, schema, truncate

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

    def __init__(self, lake: Lake, seed: int) -> None:
        self._lake = lake
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
        kind = self._random.choice([*kinds, "truncate", "alter"])
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
        free = sorted(set(range(KEYS)) - self._there)
        if not free:
            self._there.clear()
            return truncate(self._table)
        number = self._random.choice(free)
        self._there.add(number)
        op = self._random.choice([Op.INSERT, Op.READ])
        return put(self._table, op, **self._row(number))

    def _update(self, number: int, *, move: bool) -> Change:
        free = sorted(set(range(KEYS)) - self._there)
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
