"""Which events a task sends that shares a batch with others; no Spark."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace.change.event import Op
from headrace.formats.catalogue import Formats
from headrace.pipeline.options import Options
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.sinks import LogRange
from headrace.sinks.push import Event
from headrace.sinks.push.events import Chunk, EventRendering, part_of
from tests.sinks.lake import Shop, put, remove
from tests.sinks.push_harness import USERS

PARTS = 3


class Batch(Shop):
    """A log, whose changes several tasks read."""

    def chunks(self, rendering: EventRendering, parts: int) -> list[list[Chunk]]:
        """What each task makes of all changes."""
        path = str(self.log.path)
        log, latest = PipelineLog(DiskLog(path), Options(path=path)), self.log.latest_sequence
        ranges = [LogRange(log, self.log.epoch, 0, latest, part, parts) for part in range(parts)]
        # As they come to a task.
        return [list(rendering.events(pickle.loads(pickle.dumps(each)))) for each in ranges]

    def events(self, rendering: EventRendering, parts: int = 1) -> list[list[Event]]:
        """The events that each task sends."""
        return [
            [event for chunk in chunks for event in chunk.events]
            for chunks in self.chunks(rendering, parts)
        ]


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Batch]:
    made = Batch(tmp_path)
    users = made.table("users", USERS)
    for number in range(20):
        made.commit(*(put(users, id=number % 7, name=f"{number}.{n}") for n in range(3)))
    made.commit(put(users, Op.UPDATE, was={"id": 1}, id=8, name="moved"))
    made.commit(remove(users, id=2), put(made.table("others", USERS), id=2, name="-"))
    yield made
    made.log.close()


def by_row(events: Sequence[Event]) -> dict[str, list[Event]]:
    found = defaultdict(list)
    for event in events:
        found[event.row].append(event)
    return dict(found)


@pytest.mark.parametrize("format", ["savegress", "debezium", "entity"])
def test_together_they_send_every_event_once_and_each_row_is_one_tasks(
    batch: Batch, format: str
) -> None:
    rendering = EventRendering(Formats(), format, splits_keys=True, adds_tombstones=True)
    [whole] = batch.events(rendering)
    parted = batch.events(rendering, PARTS)
    assert all(parted)
    for part, events in enumerate(parted):
        assert {part_of(event.row, PARTS) for event in events} == {part}
    together = {row: own for events in parted for row, own in by_row(events).items()}
    assert together == by_row(whole)


def test_a_key_that_changes_is_told_by_the_tasks_of_both_rows(batch: Batch) -> None:
    rendering = EventRendering(Formats(), "savegress", splits_keys=True)
    events = [event for events in batch.events(rendering, PARTS) for event in events]
    moved = [event for event in events if event.sequence == 61]
    assert {(event.row[-1], event.op, event.at) for event in moved} == {
        ("1", "DELETE", 0),
        ("8", "INSERT", 2),
    }
    assert len({event.id for event in moved}) == 2


def test_each_has_seen_all_changes_of_wanted_tables(batch: Batch) -> None:
    rendering = EventRendering(Formats(), "savegress", ("users",))
    for chunks in batch.chunks(rendering, PARTS):
        assert sum(chunk.changes for chunk in chunks) == 62
        assert (chunks[0].first, chunks[-1].last) == (1, 63)
        tables = {json.loads(e.payload or b"")["table"] for each in chunks for e in each.events}
        assert tables == {"users"}
