"""What a query for one key or one day reads of a table, by the reader's own plan."""

import datetime as dt
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from headrace.change.event import Column, Op
from headrace.sinks.tables import target
from tests.sinks.lake import Lake, Row, put

pytestmark = pytest.mark.slow

ROWS, BATCHES, DAYS = 240_000, 6, 24
FILE_ROWS = 80_000  # in two row groups
COLUMNS = (Column("id", "bigint", key=True), Column("day", "date"), Column("note", "text"))
ONE_KEY, ONE_DAY = "id = 100000", "day = DATE '2025-01-05'"


class Part(NamedTuple):
    """A part of a table's files."""

    files: int
    groups: int


def thing(number: int, note: str = "first") -> Row:
    day = dt.date(2025, 1, 1) + dt.timedelta(days=number % DAYS)
    return {"id": number, "day": day.isoformat(), "note": f"{note} {number}"}


class Things:
    """A table whose batches have keys and days of its whole range."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self._table = lake.table("things", COLUMNS)
        self._path = str(lake.path / "public" / "things")

    def fill(self) -> None:
        """Fill it, and put it in order."""
        for batch in range(BATCHES):
            self.lake.snapshot(
                self._table, [thing(number) for number in range(batch, ROWS, BATCHES)]
            )
            self.lake.write()
        self.lake.compact()

    def update(self) -> None:
        """Let every file have dead rows."""
        rows = (thing(number, "then") for number in range(7, ROWS, 10_000))
        self.lake.commit(*(put(self._table, Op.UPDATE, **row) for row in rows))
        self.lake.write()

    def all(self) -> Part:
        """What there is."""
        files = DeltaTable(self._path).file_uris()
        return Part(len(files), sum(pq.read_metadata(file).num_row_groups for file in files))

    def read(self, condition: str) -> Part:
        """What delta-rs reads for a query."""
        query = QueryBuilder().register("things", DeltaTable(self._path))
        found: Any = query.execute(
            f"EXPLAIN ANALYZE SELECT * FROM things WHERE {condition}"
        ).read_all()
        plan = str(found.column("plan").to_pylist())
        files = re.findall(r"files_opened=(\d+)", plan)
        groups = re.findall(r"row_groups_pruned_statistics=\d+ total → (\d+) matched", plan)
        assert files
        assert groups
        return Part(sum(map(int, files)), sum(map(int, groups)))


@pytest.fixture
def things(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Iterator[Things]:
    monkeypatch.setattr(target, "FILE_ROWS", FILE_ROWS)
    lake = Lake(spark, tmp_path, **request.param)
    yield Things(lake)
    lake.log.close()


BY_KEY: dict[str, Any] = {}
BY_DAY: dict[str, Any] = {"cluster_by": {"public.things": ("day",)}}


@pytest.mark.parametrize(
    ("things", "query", "other"),
    [(BY_KEY, ONE_KEY, ONE_DAY), (BY_DAY, ONE_DAY, ONE_KEY)],
    indirect=["things"],
)
def test_a_query_reads_few_files_and_row_groups(things: Things, query: str, other: str) -> None:
    things.fill()
    every = things.all()
    assert every.files >= 3
    assert every.groups >= 6
    assert things.read(query) == Part(files=1, groups=1)
    assert things.read(other) == every  # its rows lie in all files

    things.update()
    files, groups = things.read(query)
    assert files < things.all().files
    # Of a file that has a vector delta-rs leaves no row group out; new files have but one.
    assert groups == files + 1
