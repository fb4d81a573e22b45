"""What changes become before they are sent, and how what was not taken is kept; no Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from deltalake import DeltaTable

from headrace.change.event import Change
from headrace.formats import Rendered
from headrace.formats.catalogue import Formats
from headrace.sinks.lake.delta import Marks
from headrace.sinks.lake.storage import Folder
from headrace.sinks.push import Event
from headrace.sinks.push import deadletters as module
from headrace.sinks.push.deadletters import DeadLetterBuffer, DeadLetters, counted, rows_of
from headrace.sinks.push.events import EventRendering
from tests.changes import make_change


class Chatty:
    """A format that has several events of a change."""

    name = "chatty"
    media_type: ClassVar[str] = "application/json"

    def __init__(self, *, named: bool) -> None:
        self._named = named

    def render(self, transaction: Sequence[Change]) -> Sequence[Rendered]:
        own = "evt_00000000-0000-0000-0000-00000000000%d"
        told = [b'{"event_id":"%b"}' % (own % n).encode() if self._named else b"{}" for n in (1, 2)]
        return [Rendered(change.sequence, each) for change in transaction for each in told]


def test_events_of_one_change_have_ids_of_their_own() -> None:
    change = make_change(key={"id": 1}, after={"id": 1}, sequence=1)
    rendering = EventRendering(Formats(), "entity")
    first, second = rendering._of_transactions(Chatty(named=False), [[change]])
    assert (first.id, second.id) == (change.id, f"{change.id}-1")
    assert (first.at, second.at) == (0, 1)
    _, second = rendering._of_transactions(Chatty(named=True), [[change]])
    assert second.id == "evt_00000000-0000-0000-0000-000000000002", "as the event itself says"


# --- dead letters --------------------------------------------------------------------------------


def event(n: int) -> Event:
    named = ("INSERT", "shop", "public", "users", '{"id":1}')
    return Event(n, 0, f"evt_{n}", f"shop|public.users:{n % 4}", *named, 0, b'{"n":%d}' % n)


def keep(letters: DeadLetters, *numbers: int) -> None:
    box = DeadLetterBuffer(letters.folder, "log")
    for n in numbers:
        box.add(event(n), "refused", "no thanks", 1)
    box.flush()
    letters.commit(box.added, marks=Marks(batch_id=None, epoch="log", sequence=max(numbers)))


def test_many_small_files_of_dead_letters_become_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.of(str(tmp_path / "letters"), {})
    letters = DeadLetters(folder, "query-1", adopt=False)
    letters.compact()  # there is no table yet
    assert counted(folder) == (0, 0)
    for n in range(1, 21):
        keep(letters, n)
    blocked = letters.blocked()
    monkeypatch.setattr(module, "_VACUUM_HOURS", 0.0)
    monkeypatch.setattr(module, "_VACUUM_SECONDS", 0.0)
    letters.compact()
    letters.compact()  # deletes what the first has found unused
    assert len(letters.files) == 6, "two of eight each, and four"
    assert (letters.count, letters.rows, letters.blocked()) == (20, 4, blocked)
    assert len(list((tmp_path / "letters").glob("*.parquet"))) == 6, "the others are gone"
    assert sorted(DeltaTable(folder.uri).to_pyarrow_table()["sequence"].to_pylist()) == list(
        range(1, 21)
    )
    again = DeadLetters(folder, "query-1", adopt=False)
    assert (again.count, again.blocked()) == (20, blocked)
    keep(again, 21)
    assert counted(folder) == (21, 4)
    assert rows_of(folder)["shop|public.users:1"] == 6
