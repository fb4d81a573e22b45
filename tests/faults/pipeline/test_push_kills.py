"""Killed between any two steps, a push sink goes on: nothing lost, rows in order, the same ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from headrace.change.event import Op
from headrace.pipeline.verify import EventSpan, Verified, verify
from headrace.sinks import SinkPhase
from tests.faults.pipeline.dying import Run, RunResult
from tests.faults.pipeline.outside import Outside
from tests.faults.pipeline.sender import KillPoint
from tests.sinks.lake import Shop, put
from tests.sinks.push_harness import USERS
from tests.sinks.socket_sink import Courier, Office, Taken, kind, opened_office

pytestmark = pytest.mark.slow


class Sender(Outside[RunResult]):
    """The process that sends."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__("sender", str(folder), folder, RunResult, str(port))

    def run(self, **order: Any) -> None:
        """Send all that is in the log."""
        ended = self.does(Run(**order))
        assert ended.phase is SinkPhase.STOPPED, ended

    def die(self, **order: Any) -> None:
        """Send until it kills itself."""
        self.dies_of(Run(**order))


class Place(Shop):
    """A log, an office, and the process between them, with the next one that starts meanwhile."""

    def __init__(self, folder: Path, office: Office) -> None:
        super().__init__(folder)
        self.office = office
        self.sender, self._spare = self._started(), self._started()

    def _started(self) -> Sender:
        return Sender(self.folder, self.office.port)

    def fill(self, count: int) -> None:
        """Changes of a few rows."""
        table = self.table("users", USERS)
        for number in range(count):
            self.commit(put(table, Op.UPDATE, id=number % 13, name=f"{number}"))

    def die(self, **order: Any) -> None:
        """Let it die; the next one takes its place."""
        self.sender.die(**order)
        self.sender.close()
        self.sender, self._spare = self._spare, self._started()

    def letters(self) -> list[int]:
        """The sequences of the dead letters."""
        folder = self.folder / "pipeline" / "post" / "dead_letters"
        if not folder.exists():
            return []
        return sorted(DeltaTable(str(folder)).to_pyarrow_table()["sequence"].to_pylist())

    def check(self) -> None:
        """Everything is there, rows are in order, and what came twice had the same id."""
        upto = self.log.latest_sequence
        ids: dict[int, set[str]] = {}
        for event in self.office.taken:
            ids.setdefault(event.sequence, set()).add(event.id)
        assert sorted(ids) == list(range(1, upto + 1))
        assert all(len(found) == 1 for found in ids.values())
        for row, found in self.office.firsts().items():
            assert found == sorted(found), row
        assert self.letters() == []
        counted = self.verified()
        assert counted.complete
        assert (counted.expected, counted.to_come, counted.surplus) == (upto, 0, [])

    def verified(self) -> Verified:
        """What the account says, compared with the log."""
        folder = str(self.folder / "pipeline" / "post")
        sink = Courier(name="post", port=self.office.port, folder=folder)
        return verify(sink, {"path": str(self.log.path)}, lambda done, total: None)

    def close(self) -> None:
        """Leave nothing behind."""
        self.sender.close()
        self._spare.close()
        self.log.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with opened_office() as office:
        made = Place(tmp_path_factory.mktemp("push"), office)
        yield made
        made.close()


def refusing(*keys: str) -> Any:
    def judge(event: Taken) -> tuple[str, str, float]:
        refused = event.row.rpartition(":")[2] in keys
        return ("refused", "no thanks", 0.0) if refused else kind(event)

    return judge


def test_killed_after_sending_sends_that_batch_again_and_no_other(place: Place) -> None:
    place.fill(150)
    place.sender.run()
    first = place.log.latest_sequence + 1
    place.fill(50)
    before = len(place.office.taken)
    place.die(kill=KillPoint.SENT)
    sent = place.office.taken[before:]
    assert len(sent) == 50
    place.sender.run()
    # Two tasks send at once, so rows may come in another order.
    assert sorted(place.office.taken[before + 50 :]) == sorted(sent)
    assert place.verified().repeated[-1] == EventSpan(first, first + 49, 50)
    place.check()


def test_killed_when_it_is_settled_sends_nothing_again(place: Place) -> None:
    place.fill(60)
    before = len(place.office.taken)
    place.die(kill=KillPoint.SETTLED)
    assert len(place.office.taken) == before + 60
    place.sender.run()
    assert len(place.office.taken) == before + 60
    place.check()


def test_killed_while_it_waits_goes_on_where_it_was(place: Place) -> None:
    place.fill(80)
    before = len(place.office.taken)
    upto = place.log.latest_sequence
    place.office.judge = lambda event: (
        kind(event) if event.sequence <= upto - 40 else ("failed", "no room", 0.0)
    )
    place.die(kill=KillPoint.PAUSED)
    place.office.judge = kind
    place.sender.run()
    assert len(place.office.taken) == before + 80, "nothing twice"
    place.check()


def test_killed_with_dead_letters_keeps_each_once_and_redriving_restores_order(
    place: Place,
) -> None:
    place.fill(26)
    place.office.judge = refusing("3", "7")
    place.die(kill=KillPoint.KEPT)
    kept = place.letters()
    assert len(kept) == 4
    place.sender.run()
    assert place.letters() == kept
    place.fill(13)
    place.sender.run()
    assert len(place.letters()) == 6
    place.office.judge = kind
    place.die(kill=KillPoint.REDRIVEN, redrive=True)
    assert len(place.letters()) == 6, "they were sent, and nobody knows"
    place.sender.run(redrive=True)
    place.check()
