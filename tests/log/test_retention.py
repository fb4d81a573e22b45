"""Retention keeps what consumers need; without room the oldest goes, and the losers are named."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.event import Batch
from headrace.log import Cursor, Holder, Log, LogRetention, RemovalReason, RetentionSettings
from headrace.log import retention as module
from headrace.log.holding import ChangeRemoval, noted, removal_of
from headrace.log.keys import KeyRequest, Scope, make
from headrace.log.retention import DiskSpace, RoomState
from headrace.testing import wait_until
from tests.log.transactions import SOURCE, known_table, sequences, stored, transaction

HOUR = 3_600_000_000
NOW = time.time_ns() // 1000
GB = 10**9


def aged(log: Log, number: int, *, hours: float, size: int = 300) -> int:
    """A transaction that was captured so long ago."""
    changes = transaction(known_table(log), number, size, captured_at=NOW - int(hours * HOUR))
    return log.append(SOURCE, Batch(changes, b""))


def key(log: Log, *, scope: Scope = Scope.READ, **ended: Any) -> str:
    """The id of a new key, kept in the log."""
    made = make(KeyRequest(scopes=frozenset({scope})), now=NOW).key
    log.put_key(msgspec.structs.replace(made, **ended))
    return made.id


def kept_from(log: Log, **settings: Any) -> int:
    """The first sequence that is left after everything that may go has gone."""
    retention = LogRetention(log, RetentionSettings(**settings))
    return retention.trim(log.latest_sequence + 1).first_sequence


@pytest.mark.requirement("P-13", "C-24")
def test_a_sink_keeps_changes_as_a_cursor_does(log: Log) -> None:
    stored(log, 1, 10)
    log.move_cursor("fast", 8)
    sinks = [Holder("sink:lake", 3)]
    retention = LogRetention(log, sinks=lambda: sinks)
    held = retention.trim(10)
    assert (held.first_sequence, held.held_by, held.losers) == (4, "sink:lake", ())
    forced = retention.trim(7, force=True)
    assert (forced.first_sequence, forced.losers) == (7, ("sink:lake",))
    sinks.clear()  # it is no longer in the config
    assert retention.trim(20).held_by == "fast"


@pytest.mark.requirement("C-24")
def test_a_cursor_of_a_key_that_has_ended_keeps_nothing(log: Log) -> None:
    stored(log, 1, 10)
    ended = [key(log, revoked_at=NOW - 1), key(log, expires_at=NOW - 1)]
    for owner in ended:
        log.put_cursor(Cursor("gone", 2, 0, owner))
    assert kept_from(log, cursor_hours=1e6) == 11
    assert len(log.cursors()) == 2


@pytest.mark.requirement("C-24")
def test_a_rotated_key_keeps_what_its_cursor_needs(log: Log) -> None:
    stored(log, 1, 10)
    first = key(log, replaced_at=NOW - 1)
    key(log, first=first)
    log.put_cursor(Cursor("reports", 2, 0, first))
    assert kept_from(log, cursor_hours=1e6) == 3


@pytest.mark.requirement("C-24")
def test_a_read_keys_cursor_keeps_changes_for_so_many_hours_only(log: Log) -> None:
    for number, hours in enumerate((100, 80, 60, 1), 1):
        aged(log, number, hours=hours)
    log.put_cursor(Cursor("reports", 0, 0, key(log)))
    assert kept_from(log, cursor_hours=90) == 301
    assert kept_from(log, cursor_hours=70) == 601
    # Keeping the cursor alive does not keep the changes.
    log.put_cursor(Cursor("reports", 0, 0, log.cursors()[0].owner))
    assert kept_from(log, cursor_hours=30) == 901


@pytest.mark.requirement("C-24")
@pytest.mark.parametrize("who", ["admin", "machine", "operator"])
def test_others_cursors_keep_changes_until_there_is_no_room(log: Log, who: str) -> None:
    for number, hours in enumerate((100, 1), 1):
        aged(log, number, hours=hours)
    owners = {"admin": key(log, scope=Scope.ADMIN), "machine": None, "operator": "operator"}
    log.put_cursor(Cursor("reports", 0, 0, owners[who]))
    assert kept_from(log, cursor_hours=1) == 1


@pytest.mark.requirement("C-24")
def test_before_the_limit_it_warns_and_beyond_it_the_oldest_goes(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 11):
        stored(log, number, 1100)
    size = log.stats().total_bytes
    log.move_cursor("slow", 5)
    holders = [Holder("sink:lake", 2000), Holder("sink:quick", 11_000)]

    def retention(limit: float) -> LogRetention:
        settings = RetentionSettings(limit=int(limit))
        return LogRetention(log, settings, sinks=lambda: holders, space=lambda _: DiskSpace(GB, GB))

    roomy = retention(size * 1.5)
    assert roomy.make_room() is None
    assert roomy.status() == msgspec.structs.replace(roomy.status(), state=RoomState.OK, reasons=())
    near = retention(size * 1.1)
    assert near.make_room() is None
    status = near.status()
    assert status.state is RoomState.WARNING
    assert ["slow" in reason for reason in status.reasons] == [True, False]
    assert all("cdc.max_log_gb" in reason for reason in status.reasons)
    full = retention(size * 0.7)
    assert full.status().state is RoomState.REMOVING
    made = full.make_room()
    assert made is not None
    assert made.losers == ("sink:lake", "slow")
    assert log.stats().total_bytes <= size * 0.7
    assert log.stats().total_bytes > size * 0.5
    status = full.status()
    assert (status.state, status.losers) == (RoomState.WARNING, ("slow", "sink:lake"))
    assert f"needs changes 6 to {log.first_sequence - 1}" in status.reasons[-2]
    assert "removed by cdc.max_log_gb at" in status.reasons[-2]
    # Whoever has read on is no loser any more.
    log.move_cursor("slow", 11_000)
    holders[0] = Holder("sink:lake", 11_000)
    assert full.status() == module.RetentionStatus(state=RoomState.OK)


@pytest.mark.requirement("C-24")
def test_when_nobody_needs_what_goes_at_the_limit_nothing_is_reported(log: Log) -> None:
    for number in range(1, 11):
        stored(log, number, 1100)
    settings = RetentionSettings(limit=log.stats().total_bytes // 2)
    retention = LogRetention(log, settings, space=lambda _: DiskSpace(GB, GB))
    made = retention.make_room()
    assert made is not None
    assert (made.removed > 0, made.losers) == (True, ())
    assert retention.status() == module.RetentionStatus(state=RoomState.OK)


@pytest.mark.requirement("C-24")
def test_a_full_disk_costs_the_oldest_changes_after_a_warning(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1000)
    for number in range(1, 11):
        stored(log, number, 1100)
    log.move_cursor("slow", 0)
    free = GB
    retention = LogRetention(log, space=lambda _: DiskSpace(10 * GB, free))
    assert retention.status().state is RoomState.OK
    free = GB // 10 * 9
    assert retention.make_room() is None
    status = retention.status()
    assert (status.state, "0.9 GB free of 10" in status.reasons[0]) == (RoomState.WARNING, True)
    free = GB // 10
    before = log.stats().total_bytes
    made = retention.make_room()
    assert made is not None
    assert (made.losers, log.removals()[-1].reason) == (("slow",), RemovalReason.DISK)
    assert before * 0.7 < log.stats().total_bytes < before
    assert retention.status().state is RoomState.REMOVING


def test_a_disk_that_others_filled_does_not_cost_a_small_log(log: Log) -> None:
    stored(log, 1, 1000)
    assert LogRetention(log, space=lambda _: DiskSpace(GB, 0)).make_room() is None


def test_the_room_of_removed_changes_is_given_back(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        for number in range(1, 120):
            changes = transaction(known_table(log), number, 500)
            large = [msgspec.structs.replace(each, after=_noise(each.after)) for each in changes]
            log.append(SOURCE, Batch(large, b""))
        before = _size(tmp_path)
        stopping = threading.Event()
        settings = RetentionSettings(limit=log.stats().total_bytes // 10)
        thread = threading.Thread(target=LogRetention(log, settings).work, args=(stopping,))
        thread.start()
        try:
            wait_until(lambda: _size(tmp_path) < before * 0.6, timeout=60, message="it shrinks")
        finally:
            stopping.set()
            thread.join()


@pytest.mark.requirement("C-24")
def test_losers_are_logged_and_removals_are_remembered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Log.open(tmp_path) as log:
        for number in range(1, 11):
            stored(log, number, 1100)
        log.move_cursor("slow", 5)
        stopping = threading.Event()
        monkeypatch.setattr(stopping, "wait", lambda _: stopping.set())
        settings = RetentionSettings(limit=log.stats().total_bytes // 2, days=1e5)
        with caplog.at_level(logging.INFO, logger="headrace"):
            LogRetention(log, settings).work(stopping)
        assert "losers=slow" in caplog.text
        assert "retention: slow needs changes 6 to" in caplog.text
        kept = sequences(log)
    with Log.open(tmp_path) as log:
        assert sequences(log) == kept
        [removal] = log.removals()
        assert (removal.reason, removal.losers) == (RemovalReason.LIMIT, ("slow",))


def test_of_removals_that_hurt_nobody_one_is_remembered_for_each_reason() -> None:
    def removal(first: int, reason: RemovalReason, *losers: str) -> ChangeRemoval:
        return ChangeRemoval(first_sequence=first, at=first, reason=reason, losers=losers)

    age, force = RemovalReason.AGE, RemovalReason.FORCE
    known = [removal(5, age), removal(9, force, "slow")]
    once = noted(known, removal(12, age))
    twice = noted(once, removal(15, age))
    assert [each.first_sequence for each in twice] == [5, 9, 15]
    assert [getattr(removal_of(twice, n), "reason", None) for n in (4, 8, 10, 15)] == [
        age, force, age, None
    ]  # fmt: skip
    many = twice
    for first in range(20, 200):
        many = noted(many, removal(first, force, "slow"))
    assert len(many) == 50


def _noise(image: bytes | None) -> bytes:
    row = msgspec.json.decode(image or b"{}")
    return msgspec.json.encode(row | {"name": f"{hash(row['id']):x}" * 40})


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.sst"))
