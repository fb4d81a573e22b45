"""Who still needs old changes, and what became of those who did when they were removed."""

import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from .keys import Key, Scope

REMOVALS_KEPT = 50
_HOUR = 3_600_000_000  # microseconds


class Cursor(msgspec.Struct, frozen=True):
    """How far a named consumer has come: it has everything up to `sequence`.

    Consumers that share it may be further: up to `reached` they have all but what is `waiting`.
    """

    name: str
    sequence: int
    updated_at: int  # microseconds since 1970
    owner: str | None = None  # id of the API key that made it; None: a program on this machine
    reached: int = 0
    waiting: tuple[int, ...] = ()

    @property
    def id(self) -> tuple[str, str | None]:
        """What tells it from all others: two owners may use the same name."""
        return self.name, self.owner


class Holder(NamedTuple):
    """A consumer whose unread changes are kept: it has everything up to `sequence`."""

    name: str  # a cursor's, or `sink:` and a sink's
    sequence: int


class RemovalReason(StrEnum):
    """Why changes were removed."""

    AGE = "cdc.retention_days"
    SIZE = "cdc.retention_bytes"
    LIMIT = "cdc.max_log_gb"
    DISK = "disk full"
    REQUEST = "trim"
    FORCE = "trim --force"


class ChangeRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that were removed: everything below `first_sequence`."""

    first_sequence: int
    at: int  # microseconds since 1970
    reason: RemovalReason
    losers: tuple[str, ...] = ()  # holders that had not read all of it


def cursor_holders(
    cursors: Iterable[Cursor],
    keys: Sequence[Key],
    *,
    now: int,
    read_limit: int = 0,
) -> list[Holder]:
    """What cursors keep: nothing for a key that has ended.

    For a key that may only read, nothing below the sequence `read_limit` either.
    """
    known = {key.holder for key in keys}
    valid = [key for key in keys if key.valid(now)]
    alive = {key.holder for key in valid}
    admins = {key.holder for key in valid if Scope.ADMIN in key.scopes}
    holders = []
    for cursor in cursors:
        # An owner that the log does not know is the operator, whose key is in no log.
        if cursor.owner in known and cursor.owner not in alive:
            continue
        limited = cursor.owner in alive and cursor.owner not in admins
        least = read_limit - 1 if limited else 0
        holders.append(Holder(cursor.name, max(cursor.sequence, least)))
    return holders


def noted(removals: Sequence[ChangeRemoval], latest: ChangeRemoval) -> list[ChangeRemoval]:
    """The removals to remember: of those in a row that hurt nobody, one for each reason."""
    kept = list(removals)
    if kept and kept[-1].reason is latest.reason and not kept[-1].losers and not latest.losers:
        kept.pop()
    return [*kept, latest][-REMOVALS_KEPT:]


def removal_of(removals: Iterable[ChangeRemoval], sequence: int) -> ChangeRemoval | None:
    """What removed a change; None: nothing, or it is forgotten."""
    return next((each for each in removals if sequence < each.first_sequence), None)


def explained(removal: ChangeRemoval | None) -> str:
    """Why changes are gone, to be added to a sentence; "" where nobody knows."""
    if removal is None:
        return ""
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(removal.at / 1e6))
    return f": removed by {removal.reason} at {moment} UTC"


def slowest(holders: Iterable[Holder]) -> Holder | None:
    """The one that has read least."""
    return min(holders, key=lambda holder: holder.sequence, default=None)


def hours_before(now: int, hours: float) -> int:
    """A moment, in microseconds."""
    return now - int(hours * _HOUR)


Holders = Callable[[], Sequence[Holder]]
