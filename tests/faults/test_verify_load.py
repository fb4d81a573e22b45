"""`verify` under load: no false alarm while everything changes, and no damage is missed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyroaring import BitMap
from pyspark.sql import SparkSession

from headrace.sinks.lake.delta import Delta
from headrace.testing import PostgresDatabase
from tests.effort import times
from tests.pipeline.verifying import FollowingLake
from tests.sources.capturing import postgres

pytestmark = [pytest.mark.requirement("P-11")]

ROWS = 2000
LARGE = "repeat(md5(random()::text), 200)"  # is stored apart, and not sent by an update
STATEMENTS: tuple[Callable[[int, int], str], ...] = (
    lambda one, other: f"UPDATE busy SET n = n + 1, at = now() WHERE id = {one}",
    lambda one, other: f"UPDATE busy SET large = {LARGE} WHERE id BETWEEN {one} AND {one + 5}",
    lambda one, other: f"DELETE FROM busy WHERE id = {one}",
    lambda one, other: f"INSERT INTO busy VALUES ({one}, 1, now(), {LARGE}) ON CONFLICT DO NOTHING",
    # To a key that may have just been another row's.
    lambda one, other: (
        f"DELETE FROM busy WHERE id = {other}; UPDATE busy SET id = {other} WHERE id = {one}"
    ),
    lambda one, other: "UPDATE hot SET n = n + 1",
    lambda one, other: f"INSERT INTO pile VALUES ({one % 7}, 'a')",
)


@contextmanager
def load(database: PostgresDatabase, seeds: range) -> Iterator[None]:
    """Sessions that write without a pause."""
    stopping = threading.Event()

    def write(seed: int) -> None:
        chosen = random.Random(seed)
        with database.connect() as connection:
            while not stopping.is_set():
                one, other = chosen.randrange(ROWS), chosen.randrange(ROWS)
                with connection.transaction():
                    # One after the other, so that no two wait for each other's rows.
                    connection.execute("SELECT pg_advisory_xact_lock(1)")
                    connection.execute(chosen.choice(STATEMENTS)(one, other).encode())

    threads = [threading.Thread(target=write, args=(seed,), daemon=True) for seed in seeds]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["rows", "history"])
def test_under_load_nothing_differs_until_somebody_damages_a_table(
    keep: str, pg: PostgresDatabase, spark: SparkSession, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE busy (id int PRIMARY KEY, n int, at timestamptz, large text)")
    pg.execute("CREATE TABLE hot (id int PRIMARY KEY, n int)")
    pg.execute("CREATE TABLE pile (n int, word text)")
    pg.execute("ALTER TABLE pile REPLICA IDENTITY FULL")
    pg.execute(f"INSERT INTO busy SELECT i, 0, now(), {LARGE} FROM generate_series(1, {ROWS}) i")
    pg.execute("INSERT INTO hot VALUES (1, 0)")
    pg.execute("INSERT INTO pile SELECT i % 7, 'a' FROM generate_series(1, 100) i")
    lake = FollowingLake(spark, tmp_path, postgres(pg), keep=keep)
    with lake.running():
        with load(pg, range(2)):
            for _ in range(times(3, nightly=20)):
                found = lake.verify()
                tables = {each.table: each for each in found.verification.tables}
                assert {name: each.outcome for name, each in tables.items()} == dict.fromkeys(
                    ("public.busy", "public.hot", "public.pile"), "equal"
                ), found.compared
                assert tables["public.hot"].rows == 1
        lake.verify("hot")  # everything that was written has come through the log
        lake.until_copied()  # and into the lake: nobody else commits
        _kill_one_row(lake, "busy")
        found = lake.verify("busy")
        [table] = found.verification.tables
        assert (table.missing, table.surplus, table.differing) == (1, 0, 0)


def _kill_one_row(lake: FollowingLake, name: str) -> None:
    """Mark a live row as dead, in a commit that looks like one of compaction."""
    delta = Delta.open(lake.sink.folder.within("public", name), "query-1")
    assert delta is not None
    path, file = next(
        (path, file) for path, file in delta.files.items() if file.live and "past" not in path
    )
    position = next(at for at in range(file.rows) if at not in delta.dead(path))
    delta.commit([], [], dead={path: BitMap([position]).serialize()})
