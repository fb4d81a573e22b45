"""Dead letters as a task writes them, and what it does when they cannot be written; no Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SinkUnavailable
from headrace.sinks.lake.storage import Folder
from headrace.sinks.push import ACCEPTED, Channel, Event, Reply
from headrace.sinks.push import deadletters as module
from headrace.sinks.push.channels import close_all
from headrace.sinks.push.deadletters import SCHEMA
from headrace.sinks.push.delivery import DeliveryCheckpoint
from headrace.sinks.push.tasks import DeliveryTask, TaskReport
from tests.sinks.memory_destination import POLICY, REFUSED, Office, event

HELD_BYTES = 100_000
SIZE = 8_000  # of an event; a dozen are as much as is held


@dataclass(frozen=True)
class Place:
    """A destination that is an office in memory."""

    office: Office

    def connect(self) -> Channel:
        return _Open(self.office)


class _Open:
    def __init__(self, office: Office) -> None:
        self._office = office

    def send(self, events: Sequence[Event]) -> Sequence[Reply]:
        return self._office.send(events)

    def close(self) -> None:
        pass


class Disk:
    """Counts what is written, and is full for as long as it is told to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        self.writes = 0
        there: Any = Folder.write

        def write(*given: Any) -> Any:
            self.writes += 1
            if self.full:
                raise SinkUnavailable("the disk is full")
            return there(*given)

        monkeypatch.setattr(Folder, "write", write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(module, "_BUFFERED_BYTES", HELD_BYTES)
    yield Disk(monkeypatch)
    close_all()


def large(sequence: int, row: str) -> Event:
    return event(sequence, row, b"x" * SIZE)


@pytest.mark.parametrize("rows", [1, 3, 900], ids=["one row", "three rows", "each its own"])
def test_when_dead_letters_cannot_be_written_a_task_stops_and_holds_no_more_of_them(
    tmp_path: Path, disk: Disk, rows: int
) -> None:
    office = Office(lambda each: REFUSED if each.row != "good" else ACCEPTED)
    events = [large(n, "good" if n % 10 == 0 else f"bad{n % rows}") for n in range(1, 901)]
    folder = Folder.of(str(tmp_path / "letters"), {})
    deliver = DeliveryTask(Place(office), POLICY, folder)
    read = 0

    def chunks() -> Iterator[tuple[str, list[Event]]]:
        nonlocal read
        for at in range(0, len(events), 20):
            read += 20
            yield "log", events[at : at + 20]

    told = TaskReport(0)
    deliver.run(told, DeliveryCheckpoint(), chunks())
    assert disk.writes == 1, "it is tried once a round"
    assert read < 200, "nothing more is read"
    assert told.stopped is not None
    assert told.stopped.reason == "dead letters cannot be kept: the disk is full"
    assert len(told.stopped.checkpoint.pending) * SIZE < 2 * HELD_BYTES
    assert (told.counts.refused, told.counts.waiting) == (0, 0)

    disk.full = False
    again = TaskReport(0)
    deliver.run(again, told.stopped.checkpoint, chunks())
    assert again.stopped is None
    assert [each.sequence for each in office.taken] == list(range(10, 901, 10)), "none twice"
    kept = [row for file in again.added for row in folder.read(file.path, SCHEMA.names).to_pylist()]
    assert sorted(row["sequence"] for row in kept) == [n for n in range(1, 901) if n % 10]
    assert again.counts.refused + again.counts.waiting == 810
