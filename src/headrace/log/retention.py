"""How long changes stay, and what goes first when there is no room.

Changes go by age and by size, but none that a cursor or a sink still needs. Where the log reaches
its limit, or its disk runs full, the oldest go whoever needs them: status and log name the losers.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from .holding import Holder, RemovalReason, cursor_holders, explained, hours_before, removal_of
from .writer import Log, Trimmed

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0  # between two looks at the size of the log and at its disk
REGULAR_SECONDS = 3600.0  # between two removals by age and size
WARNING_SHARE = 0.8  # of max_log_gb
# A share of the disk, at most so many bytes: below the first it warns, below the second it removes.
DISK_WARNING, DISK_WARNING_BYTES = 0.1, 10 << 30
DISK_RESERVE, DISK_RESERVE_BYTES = 0.05, 5 << 30
SHARE_REMOVED = 8  # one part of so many is removed at a time when the disk is full
SMALLEST = 64 << 20  # bytes; to remove a log that is smaller would free nothing worth having
_RECLAIM_CHANGES = 500_000  # at once, so that it can be stopped
_DAY = 86_400


class RetentionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long changes are kept."""

    days: float = 30.0
    size: int | None = None  # bytes beyond which they go if nobody needs them
    limit: int | None = None  # bytes beyond which they go whoever needs them
    cursor_hours: float = 168.0  # how old a change may be that a read key's cursor keeps


class RoomState(StrEnum):
    """Whether the log has room."""

    OK = "ok"
    WARNING = "warning"  # changes that somebody needs go soon
    REMOVING = "removing"  # they go now


class RetentionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What retention keeps and what it cannot keep, for people and for /health."""

    state: RoomState = RoomState.OK
    reasons: tuple[str, ...] = ()  # what an operator must know, in sentences; none: all is well
    losers: tuple[str, ...] = ()  # who needs changes that are gone


class DiskSpace(NamedTuple):
    """Of the disk that holds the log."""

    total: int
    free: int

    @classmethod
    def of(cls, folder: Path) -> "DiskSpace":
        """As it is now; a disk that cannot be looked at counts as empty."""
        try:
            found = shutil.disk_usage(folder)
        except OSError:
            return cls(1, 1)
        return cls(found.total, found.free)

    @property
    def short(self) -> bool:
        """Whether it is time to warn."""
        return self.free < min(self.total * DISK_WARNING, DISK_WARNING_BYTES)

    @property
    def full(self) -> bool:
        """Whether room must be made."""
        return self.free < min(self.total * DISK_RESERVE, DISK_RESERVE_BYTES)


class LogRetention:
    """Removes old changes of a log; knows the cursors itself, and is given the `sinks`."""

    def __init__(
        self,
        log: Log,
        settings: RetentionSettings | None = None,
        *,
        sinks: Callable[[], Sequence[Holder]] = tuple,
        space: Callable[[Path], DiskSpace] = DiskSpace.of,
    ) -> None:
        self._log = log
        self._settings = settings or RetentionSettings()
        self._sinks = sinks
        self._space = space
        self._reclaimed = log.first_sequence
        self._next = 0, 0  # a size of the log, and what would go next then
        self._old = 0  # what is below it is older than what a read key's cursor keeps
        self._reported: tuple[str, ...] = ()
        self.seen = RetentionStatus()  # when `work` last looked
        self._regular = 0.0  # when removal by age and size is due

    def take_up(self, settings: RetentionSettings, sinks: Callable[[], Sequence[Holder]]) -> None:
        """Keep by other settings, and for other sinks, from now on."""
        self._settings, self._sinks = settings, sinks
        self._regular, self._old, self._next = 0.0, 0, (0, 0)

    def holders(self) -> list[Holder]:
        """Everybody who keeps changes from being removed."""
        now = time.time_ns() // 1000
        cursors = self._log.cursors()
        if any(cursor.owner for cursor in cursors):
            moment = hours_before(now, self._settings.cursor_hours)
            self._old = self._log.before_time(moment, start=self._old)
        held = cursor_holders(cursors, self._log.keys(), now=now, read_limit=self._old)
        return [*held, *self._sinks()]

    def trim(self, before: int, *, force: bool = False) -> Trimmed:
        """Remove what an operator wants removed."""
        return self._trim(before, force=force)

    def apply(self) -> Trimmed:
        """Remove what is older, or more, than the settings keep and nobody needs."""
        log, settings = self._log, self._settings
        oldest = time.time() - settings.days * _DAY
        by_age = log.before_time(int(oldest * 1_000_000))
        by_size = 0 if settings.size is None else log.beyond_size(settings.size)
        reason = RemovalReason.SIZE if by_size > by_age else RemovalReason.AGE
        return self._trim(max(by_age, by_size), reason=reason)

    def make_room(self) -> Trimmed | None:
        """Remove the oldest changes, whoever needs them, where there is no room; None: there is."""
        limit, size = self._settings.limit, self._log.stats().total_bytes
        if limit is not None and size > limit:
            before = self._log.beyond_size(limit)
            return self._trim(before, force=True, reason=RemovalReason.LIMIT)
        if size > SMALLEST and self._space(self._log.path).full:
            before = self._log.beyond_size(size - size // SHARE_REMOVED)
            return self._trim(before, force=True, reason=RemovalReason.DISK)
        return None

    def work(self, stopping: threading.Event) -> None:
        """Until `stopping` is set: remove what is due, give the disk back, log who loses."""
        while not stopping.is_set():
            if time.monotonic() >= self._regular:
                self._regular = time.monotonic() + REGULAR_SECONDS
                self._log_removal("retention", self.apply())
            if room := self.make_room():
                self._log_removal("made room", room)
            self._report()
            self._reclaim(stopping)
            stopping.wait(LOOK_SECONDS)

    def status(self) -> RetentionStatus:
        """Whether there is room, and who is about to lose or has lost changes."""
        holders, space = self.holders(), self._space(self._log.path)
        lost = self._lost(holders)
        reasons = [*self._near_limit(holders), *_near_full(self._log.path, space), *lost.values()]
        state = RoomState.WARNING if reasons else RoomState.OK
        if space.full or self._beyond_limit():
            state = RoomState.REMOVING
        return RetentionStatus(state=state, reasons=tuple(reasons), losers=tuple(lost))

    def _beyond_limit(self) -> bool:
        limit = self._settings.limit
        return limit is not None and self._log.stats().total_bytes > limit

    def _near_limit(self, holders: Sequence[Holder]) -> list[str]:
        """A warning for each holder whose changes would go next; none: nobody loses anything."""
        limit, size = self._settings.limit, self._log.stats().total_bytes
        if limit is None or size < limit * WARNING_SHARE:
            return []
        if abs(size - self._next[0]) > limit // 100:  # to look takes a while in a large log
            self._next = size, self._log.beyond_size(int(limit * WARNING_SHARE))
        first, next_to_go = self._log.first_sequence, self._next[1]
        return [
            f"the log has {size / 1e9:.3g} GB of cdc.max_log_gb {limit / 1e9:g}, and "
            f"{each.name} still needs changes from {each.sequence + 1} on, which go at the limit"
            for each in holders
            if first <= each.sequence + 1 < next_to_go
        ]

    def _lost(self, holders: Sequence[Holder]) -> dict[str, str]:
        first, removals = self._log.first_sequence, self._log.removals()
        return {
            each.name: f"{each.name} needs changes {each.sequence + 1} to {first - 1}, which are "
            f"gone{explained(removal_of(removals, each.sequence + 1))}"
            for each in holders
            if each.sequence + 1 < first
        }

    def _trim(
        self, before: int, *, force: bool = False, reason: RemovalReason | None = None
    ) -> Trimmed:
        return self._log.trim(before, force=force, reason=reason, holders=self.holders)

    def _log_removal(self, what: str, trimmed: Trimmed) -> None:
        if not (trimmed.removed or trimmed.held_by):
            return
        level = logging.WARNING if trimmed.losers else logging.INFO
        logger.log(
            level,
            "%s removed=%d first_sequence=%d held_by=%s losers=%s",
            what,
            trimmed.removed,
            trimmed.first_sequence,
            trimmed.held_by,
            ",".join(trimmed.losers) or None,
        )

    def _report(self) -> None:
        """Log each reason for concern once."""
        self.seen = self.status()
        reasons = self.seen.reasons
        kinds = tuple(reason.partition(",")[0] for reason in reasons)
        for kind, reason in zip(kinds, reasons, strict=True):
            if kind not in self._reported:
                logger.warning("retention: %s", reason)
        self._reported = kinds

    def _reclaim(self, stopping: threading.Event) -> None:
        first = self._log.first_sequence
        while self._reclaimed < first and not stopping.is_set():
            upto = min(first, self._reclaimed + _RECLAIM_CHANGES)
            self._log.reclaim(upto)
            self._reclaimed = upto


def _near_full(folder: Path, space: DiskSpace) -> list[str]:
    if not space.short:
        return []
    return [
        f"the disk of {folder} has {space.free / 1e9:.3g} GB free of {space.total / 1e9:.3g}; "
        "the oldest changes go when it is full"
    ]
