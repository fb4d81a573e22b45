"""`verify` keeps nobody waiting, and compares nothing that it cannot know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.change.event import Batch
from headrace.errors import LogReplaced, PipelineError
from headrace.pipeline.verify_tables import TablesVerifier
from headrace.sinks import Progress
from headrace.sinks.tables.ledger import TablesLedger
from headrace.sinks.verification import TableOutcome
from headrace.sources.sqlite.point import EntryPoint
from headrace.testing import Place, session
from tests.pipeline.verifying import FollowingLake, places_of, run
from tests.sources.places import PostgresPlace

pytestmark = pytest.mark.requirement("P-11")

ITEMS = ("CREATE TABLE items (id integer PRIMARY KEY)", "INSERT INTO items VALUES (1), (2)")
# Each waits for whoever has a snapshot.
ALTERATIONS = {
    "mysql": "ALTER TABLE items ADD COLUMN n integer",
    "postgres": "CREATE INDEX CONCURRENTLY ON items (id)",
    "postgres_events": "CREATE INDEX CONCURRENTLY ON items (id)",
}


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    """Fresh databases."""
    with ExitStack() as stack:
        yield places_of(stack, request, tmp_path)


@pytest.mark.live
@pytest.mark.parametrize("kind", ALTERATIONS)
def test_a_statement_goes_first_also_while_the_log_or_the_sink_is_waited_for(
    kind: str,
    places: Callable[[str], Place],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = places(kind)
    run(place, *ITEMS)
    lake = FollowingLake(spark, tmp_path, place.source())
    holding, waiting = threading.Event(), TablesVerifier._await_capture

    def once(verifier: TablesVerifier, *point: Any) -> None:
        if holding.is_set():
            raise PipelineError("it has begun anew")
        holding.set()
        waiting(verifier, *point)

    monkeypatch.setattr(TablesVerifier, "_await_capture", once)
    failures: list[str] = []

    def verify() -> None:
        try:
            lake.verify()
        except PipelineError as error:
            failures.append(str(error))

    with lake.running():
        lake.capture.stop()
        run(place, "INSERT INTO items VALUES (3)")
        verifying = threading.Thread(target=verify)
        verifying.start()
        assert holding.wait(60)
        _execute(place, ALTERATIONS[kind])
        verifying.join()
    assert failures == ["it has begun anew"]


def _execute(place: Place, statement: str) -> None:
    """Run a statement, which gives up when it has waited for 20 seconds."""
    if isinstance(place, PostgresPlace):
        with place.database.connect(options="-c lock_timeout=20s") as connection:
            connection.execute(statement.encode())
        return
    with session(place) as writer:
        writer.execute("SET lock_wait_timeout = 20")
        writer.execute(statement)


@pytest.mark.live
@pytest.mark.parametrize("kind", ["postgres", "postgres_events", "mysql", "sqlite"])
def test_tables_that_nobody_writes_to_are_compared(
    kind: str, places: Callable[[str], Place], spark: SparkSession, tmp_path: Path
) -> None:
    place = places(kind)
    run(place, *ITEMS)
    place.altered()
    lake = FollowingLake(spark, tmp_path, place.source())
    with lake.running():
        [table] = lake.verify().verification.tables
    assert (table.outcome, table.rows) == (TableOutcome.EQUAL, 2)


@pytest.mark.live
def test_a_table_that_would_have_to_be_locked_is_left_out(
    places: Callable[[str], Place], spark: SparkSession, tmp_path: Path
) -> None:
    place = places("mysql")
    run(place, *ITEMS, "CREATE TABLE plain (id integer PRIMARY KEY) ENGINE = MyISAM")
    run(place, "INSERT INTO plain VALUES (1)")
    lake = FollowingLake(spark, tmp_path, place.source())
    with lake.running():
        run(place, "INSERT INTO items VALUES (3)")
        found = lake.verify().verification
    assert [(each.table, each.outcome, each.rows) for each in found.tables] == [
        (f"{place.schema}.items", TableOutcome.EQUAL, 3),
        (f"{place.schema}.plain", TableOutcome.LEFT_OUT, 0),
    ]
    assert "no transactions" in found.tables[1].reason


def test_a_log_that_is_trimmed_meanwhile_gives_an_error_and_no_differences(
    places: Callable[[str], Place],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = places("sqlite")
    run(place, *ITEMS, "CREATE TABLE other (id integer PRIMARY KEY)")
    place.altered()
    lake = FollowingLake(spark, tmp_path, place.source())
    waiting, reading = TablesVerifier._await_capture, EntryPoint.batches

    def written_behind_the_point(verifier: TablesVerifier, *point: Any) -> None:
        run(place, "INSERT INTO items VALUES (3)", "INSERT INTO other VALUES (1)")
        lake.until_stored(f"{place.schema}.other")
        waiting(verifier, *point)

    def trimmed_while_read(point: EntryPoint) -> Iterator[Batch]:
        yield from reading(point)
        lake.log.trim(lake.log.latest_sequence)

    monkeypatch.setattr(TablesVerifier, "_await_capture", written_behind_the_point)
    monkeypatch.setattr(EntryPoint, "batches", trimmed_while_read)
    with lake.running(), pytest.raises(PipelineError, match="was trimmed"):
        lake.verify()


def test_a_sink_with_changes_of_another_history_of_the_log_is_not_compared(
    places: Callable[[str], Place], spark: SparkSession, tmp_path: Path
) -> None:
    place = places("sqlite")
    run(place, *ITEMS)
    place.altered()
    lake = FollowingLake(spark, tmp_path, place.source())
    with lake.running():
        ledger = TablesLedger.open(lake.sink.folder, "query-1", adopt=True)
        # As it is when the log was put back from a copy that does not know this generation.
        ledger.reach(Progress(lake.log.epoch, ledger.upto, "4f"))
        ledger.save()
        with pytest.raises(LogReplaced, match="put back from an older copy"):
            lake.verify()
