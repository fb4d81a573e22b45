"""`verify` counts what a sink says it has sent against the log, and names what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.event import Op
from headrace.errors import LogReplaced
from headrace.operate.show import verified_lines
from headrace.pipeline.verify import EventSpan, Verified, verify
from headrace.sinks.lake.delta import Marks
from headrace.sinks.lake.storage import Folder
from headrace.sinks.push import Event, deadletters
from headrace.sinks.push import ledger as ledgers
from headrace.sinks.push.deadletters import DeadLetterBuffer, DeadLetters
from headrace.sinks.push.delivery import Counts, DeliveryCheckpoint
from headrace.sinks.push.ledger import LedgerEntry, PushLedger
from headrace.transforms import TableTransform
from tests.changes import Writer, opened_writer
from tests.sinks.socket_sink import Courier


class Account:
    """A log, and the ledger of a sink that has sent some of it."""

    def __init__(self, folder: Path, writer: Writer) -> None:
        self.log = folder / "log"
        self.writer = writer
        self.sink = Courier(name="post", port=1, folder=str(folder / "post"))
        self.ledger = PushLedger.open(self.sink.folder, "query-1", adopt=False)
        self.batch = 0

    def settle(self, first: int, last: int, *, doubtful: int = 0, **counts: int) -> None:
        """Say that a batch is settled."""
        self.ledger.begin(self.batch, 0)
        epoch = self.writer.log.epoch
        line = LedgerEntry("settled", "query-1", self.batch, epoch, first, last, last - first + 1)
        fields = {"counts": Counts(**counts), "doubtful": doubtful, "rendered": self.sink.rendered}
        self.ledger.settle(_with(line, **fields))
        self.batch += 1

    def keep(self, *sequences: int) -> DeadLetters:
        """Put dead letters of these changes into the table, a row each."""
        box = DeadLetterBuffer(self.sink.letters, self.writer.log.epoch)
        for n in sequences:
            name = ("INSERT", "shop", "public", "users")
            event = Event(n, 0, f"evt_{n}", f"shop|public.users:{n}", *name, None, 0, b"{}")
            box.add(event, "refused", "no thanks", 1)
        box.flush()
        letters = DeadLetters(self.sink.letters, "query-1", adopt=False)
        letters.commit(box.added, marks=_marks(self.writer.log.epoch))
        return letters

    def verify(self, **bounds: Any) -> Verified:
        return verify(self.sink, {"path": str(self.log)}, lambda done, total: None, **bounds)


def _with(line: LedgerEntry, **fields: Any) -> LedgerEntry:
    return msgspec.structs.replace(line, **fields)


def _marks(epoch: str) -> Marks:
    return Marks(batch_id=None, epoch=epoch, sequence=1)


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    with opened_writer(tmp_path / "log") as writer:
        for n in range(1, 31):
            writer.put("users", str(n))
        yield Account(tmp_path, writer)


def test_what_was_sent_or_kept_is_complete_and_the_rest_is_to_come(account: Account) -> None:
    account.settle(1, 10, sent=10)
    account.settle(11, 20, sent=7, refused=2, waiting=1, retries=4)
    account.keep(11, 12, 13)
    found = account.verify()
    assert (found.first, found.last, found.expected, found.sent, found.aside) == (1, 20, 20, 17, 3)
    assert (found.dead_letters, found.waiting_rows, found.to_come, found.retried) == (3, 3, 10, 4)
    assert found.complete
    assert not found.repeated
    text = "\n".join(verified_lines(found))
    assert "sequences 1 to 20 stand for 20 events; 17 were sent, 3 became dead letters" in text
    assert "10 events are still to come" in text
    assert text.endswith("nothing is missing")


def test_what_begins_before_the_log_is_not_called_complete(account: Account) -> None:
    account.settle(1, 20, sent=20)
    account.writer.log.trim(11)
    text = "\n".join(verified_lines(account.verify()))
    assert "up to 10 the log no longer has what was sent" in text
    assert "nothing could be compared" in text
    assert "nothing is missing" not in text


def test_gaps_are_named_within_and_between_batches(account: Account) -> None:
    account.settle(1, 10, sent=9)
    account.settle(16, 30, sent=15)
    found = account.verify()
    assert found.missing == [EventSpan(1, 10, 1), EventSpan(11, 15, 5)]
    assert not found.complete
    assert (found.expected, found.sent) == (30, 24)
    assert "missing: 5 events within 11 to 15" in "\n".join(verified_lines(found))
    assert account.verify(first=16).missing == []
    assert account.verify(first=12, upto=20).missing == [EventSpan(12, 15, 4)]
    assert account.verify(upto=10).missing == [EventSpan(1, 10, 1)]


def test_what_was_begun_twice_may_have_come_twice(account: Account) -> None:
    account.settle(1, 10, sent=10, doubtful=6)
    account.settle(11, 30, sent=21)
    found = account.verify()
    assert found.repeated == [EventSpan(1, 10, 6)]
    assert found.surplus == [EventSpan(11, 30, 1)]
    assert found.complete


def test_ranges_that_overlap_came_twice(account: Account) -> None:
    account.settle(1, 20, sent=20)
    account.settle(11, 30, sent=20)
    assert account.verify().repeated == [EventSpan(11, 20, 10)]


def test_changes_of_other_tables_are_no_gap(account: Account) -> None:
    account.sink = replace(account.sink, tables=("public.users",))
    account.settle(1, 30, sent=30)
    account.writer.put_many("orders", 5)
    account.writer.put("users", "x")
    assert account.verify().to_come == 1
    account.settle(36, 36, sent=1)
    assert account.verify().complete
    # What was wanted then counts, whatever is wanted now.
    account.sink = replace(account.sink, tables=())
    found = account.verify()
    assert found.missing == []
    assert found.expected == 31


def test_tombstones_are_counted(account: Account) -> None:
    account.sink = replace(account.sink, tombstones=True)
    account.writer.put("users", "1", Op.DELETE)
    account.settle(1, 31, sent=31)
    assert account.verify().missing == [EventSpan(1, 31, 1)]


def test_dead_letters_that_are_gone_are_missed(account: Account) -> None:
    account.settle(1, 30, sent=26, refused=4)
    account.keep(1, 2)
    account.ledger.settle(LedgerEntry("redriven", "query-1", counts=Counts(sent=1)))
    found = account.verify()
    assert (found.redriven, found.letters_missing, found.complete) == (1, 1, False)
    account.ledger.settle(LedgerEntry("redriven", "query-1", counts=Counts(sent=1)))
    assert account.verify().complete


def test_dead_letters_that_leave_while_they_are_counted_are_not_missed(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.settle(1, 30, sent=26, refused=4)
    letters = account.keep(1, 2, 3, 4)
    files_of = deadletters.files_of

    def just_before(folder: Folder) -> list[str]:
        if files := letters.files:  # a redrive notes what it sent, and takes it out of the table
            line = LedgerEntry("redriven", "query-1", counts=Counts(sent=4), files=files)
            account.ledger.settle(line)
            letters.commit([], files, marks=_marks(account.writer.log.epoch))
        return files_of(folder)

    monkeypatch.setattr(deadletters, "files_of", just_before)
    found = account.verify()
    assert found.complete
    assert (found.redriven, found.dead_letters) == (4, 0)


def test_what_was_trimmed_cannot_be_compared(account: Account) -> None:
    account.settle(1, 10, sent=3)
    account.settle(11, 20, sent=10)
    account.settle(21, 30, sent=10)
    account.writer.log.trim(15)
    found = account.verify()
    assert (found.trimmed, found.first, found.last) == (14, 21, 30)
    assert found.complete
    assert "up to 14 the log no longer has what was sent" in "\n".join(verified_lines(found))


def test_old_batches_are_compared_together(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "_KEPT", 1)
    monkeypatch.setattr(ledgers, "_MOST_LINES", 1)
    account.settle(1, 10, sent=10, doubtful=2)
    account.settle(11, 20, sent=8, refused=1)
    account.ledger.settle(LedgerEntry("redriven", "query-1", counts=Counts(sent=1)))
    account.settle(21, 30, sent=10)
    account.ledger.compact()
    found = account.verify()
    assert found.missing == [EventSpan(1, 20, 1)]
    assert found.repeated == [EventSpan(1, 20, 2)]
    assert found.redriven == 1
    assert not found.letters_missing


def test_what_other_transforms_chose_cannot_be_compared(account: Account) -> None:
    chosen = {"public.users": TableTransform(where="id <> '3'")}
    account.sink = replace(account.sink, transforms=chosen)
    account.settle(1, 10, sent=9)
    assert account.verify(upto=10).complete
    account.sink = replace(account.sink, transforms={})
    account.settle(11, 20, sent=10)
    account.settle(21, 30, sent=9)
    found = account.verify()
    assert found.missing == [EventSpan(21, 30, 1)]
    assert (found.other_transforms, found.surplus) == (1, [])
    assert "1 ranges had other transforms" in "\n".join(verified_lines(found))


def test_another_log_cannot_be_compared(account: Account) -> None:
    line = LedgerEntry("settled", "query-1", 0, "another", 1, 10, 10)
    account.ledger.settle(line)
    with pytest.raises(LogReplaced, match="another log"):
        account.verify()
    account.batch = 1
    account.settle(1, 30, sent=30)
    assert account.verify().earlier_logs == 1


def test_a_sink_that_has_sent_nothing_has_all_to_come(account: Account) -> None:
    found = account.verify()
    assert (found.first, found.last, found.to_come, found.complete) == (0, 0, 30, True)
    assert "nothing that was sent is to be compared" in next(iter(verified_lines(found)))


# --- what the ledger must remember for it --------------------------------------------------------


def paused(batch: int, *, closed: bool) -> LedgerEntry:
    points = {0: DeliveryCheckpoint(3, 0)}
    line = LedgerEntry("paused", "query-1", batch, counts=Counts(sent=3), tasks=1)
    return _with(line, points=points, closed=closed)


def test_only_who_dies_leaves_doubt_about_what_was_sent(account: Account) -> None:
    account.ledger.begin(0, 0)
    account.ledger.pause(paused(0, closed=True))
    again = PushLedger.open(account.sink.folder, "query-1", adopt=False)
    again.begin(0, 0)
    assert not again.unsure
    again.pause(paused(0, closed=False))  # and is killed while it waits
    last = PushLedger.open(account.sink.folder, "query-1", adopt=False)
    last.begin(0, 0)
    assert last.unsure
    known = last.paused(0)
    assert known is not None
    assert known.counts.sent == 3
