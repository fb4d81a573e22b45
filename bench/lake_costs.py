"""What a Delta table costs besides its batches: past versions, many tables, readers."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import polars as pl
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from headrace.pipeline.session import opened_session

from . import delta
from .lake_run import MASTER, apply
from .lake_task import BATCH_BYTES, BATCH_SECONDS, GROWTH, Task
from .orders import NAME, Orders, Written
from .process import Outcome, answer, measure, module
from .report import Figure, Figures

TABLES = 1_000
HISTORY_ROWS, HISTORY_BATCHES, HISTORY_CHANGES = 100_000, 100, 1_000
ROWS = 1_000_000
_READS = 5


def figures(folder: Path, *, factor: float) -> Figures:
    """Everything, in a process of its own."""
    notes = measure(module("lake_costs", str(folder), str(factor)), folder).notes
    readings = [
        Figure(f"{name}, with dead rows, by a table just written", notes[name], "×", below=1.5)
        for name in _READERS
    ]
    return Figures(
        "What a Delta table costs",
        [
            Figure(_MANY, notes[_MANY], "s", below=0.7),
            Figure(_GROWTH, notes[_GROWTH], "×", below=1.2),
            Figure(_BYTES, notes[_BYTES], "KB", below=200.0 + 0.1 * HISTORY_CHANGES),
            *readings,
            Figure(_DEAD, notes[_DEAD], "%"),
        ],
    )


_MANY = f"a batch with a change of one of {TABLES:,} tables"
_GROWTH = f"keep: history, the last of {HISTORY_BATCHES} batches, by the first"
_BYTES = f"a batch of {HISTORY_CHANGES:,} changes beside dead rows"
_DEAD = "dead rows"


def _rs(table: Path, query: str) -> object:
    return QueryBuilder().register("lake", DeltaTable(str(table))).execute(query).read_all()


_READERS: dict[str, Callable[[Path, int], object]] = {
    "Polars, all rows": lambda table, _: (
        pl.scan_delta(str(table)).select(pl.col("weight").sum(), pl.col("note").max()).collect()
    ),
    "Polars, one key": lambda table, key: (
        pl.scan_delta(str(table)).filter(pl.col("id") == key).collect()
    ),
    "delta-rs, all rows": lambda table, _: _rs(table, "SELECT sum(weight), max(note) FROM lake"),
    "delta-rs, one key": lambda table, key: _rs(table, f"SELECT * FROM lake WHERE id = {key}"),
}


class _Costs:
    """The measurements, with one Spark."""

    def __init__(self, spark: SparkSession, folder: Path, factor: float) -> None:
        self._spark = spark
        self._folder = folder
        self._factor = factor

    def measured(self) -> Iterator[tuple[str, float]]:
        yield _MANY, self._many()
        yield _GROWTH, self._history()
        yield from self._reading()

    def _scaled(self, number: int) -> int:
        return max(round(number * self._factor), 10)

    def _task(self, name: str, written: Written, batch: int, warm_up: int) -> Task:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return Task(
            log=str(self._folder / f"{name}-log"),
            folder=str(folder),
            after=written.after,
            upto=written.upto,
            batch=batch,
            warm_up=warm_up,
            rows=written.rows,
            keep="history" if name == "history" else "rows",
        )

    def _apply(self, name: str, written: Written, batch: int, warm_up: int) -> Outcome:
        return apply(self._spark, self._task(name, written, batch, warm_up))

    def _orders(self, name: str, table: str = NAME) -> Orders:
        return Orders(str(self._folder / f"{name}-log"), name=table)

    def _many(self) -> float:
        """Seconds of a batch that changes one of many tables."""
        orders = self._orders("many")
        first = orders.insert(1)
        last = first
        for number in range(self._scaled(TABLES) - 1):
            last = self._orders("many", f"table{number}").insert(1)
        self._apply("many", Written(first.after, last.upto, last.upto), last.upto, 0)
        updates = orders.update(1, batch=1, batches=10, warm_up=5)
        return self._apply("many", updates, 1, 5).notes[BATCH_SECONDS]

    def _history(self) -> float:
        """How much longer a batch takes when there are many past versions."""
        rows, batches = self._scaled(HISTORY_ROWS), self._scaled(HISTORY_BATCHES)
        orders = self._orders("history")
        self._apply("history", orders.insert(rows), rows, 0)
        batch = self._scaled(HISTORY_CHANGES)
        updates = orders.update(rows, batch=batch, batches=batches, warm_up=5)
        return self._apply("history", updates, batch, 5).notes[GROWTH]

    def _reading(self) -> Iterator[tuple[str, float]]:
        """What dead rows cost readers, and a small batch."""
        rows, batch = self._scaled(ROWS), self._scaled(HISTORY_CHANGES)
        orders = self._orders("reading")
        self._apply("reading", orders.insert(rows), rows, 0)
        table = self._folder / "reading" / "lake" / "public" / NAME
        fresh = _seconds(table, rows)
        # Until it is put in order for the first time.
        self._apply("reading", orders.update(rows, batch=1, batches=10, warm_up=0), 1, 0)
        many = round(rows * 0.27)  # at once, so that nothing is compacted before it is read
        self._apply("reading", orders.update(rows, batch=many, batches=1, warm_up=0), many, 0)
        few = orders.update(rows, batch=batch, batches=2, warm_up=1)
        yield _BYTES, self._apply("reading", few, batch, 1).notes[BATCH_BYTES] / 1000
        for name, seconds in _seconds(table, rows).items():
            yield name, seconds / fresh[name]
        yield _DEAD, 100 * delta.dead_rows(table)


def _seconds(table: Path, rows: int) -> dict[str, float]:
    """How long readers take."""
    return {name: _timed(partial(read, table, rows // 2)) for name, read in _READERS.items()}


def _timed(read: Callable[[], object]) -> float:
    taken = []
    for _ in range(_READS):
        began = time.perf_counter()
        read()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main(folder: str, factor: str) -> None:
    """Measure everything and answer."""
    place = Path(folder)
    with opened_session(MASTER, {}, journal=place / "spark.log", extra_tasks=1) as spark:
        found = dict(_Costs(spark, place, float(factor)).measured())
    answer(Outcome(1, 1.0, found))


if __name__ == "__main__":
    main(*sys.argv[1:])
