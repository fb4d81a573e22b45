"""What a client that was away gets when it comes back: served from the log, within bounds.

Nothing is queued for it. How far it had come is remembered, or it sends that itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ...change.event import Change
from ...config.settings import WebSocketSection
from ...log import UNKNOWN_GENERATION, LogReader
from ...log.holding import removal_of
from . import messages
from .messages import Rejected, ResumeRequest

MOST_KEPT = 20_000  # subscriptions of one owner; about 0.5 KB each
MOST_SCANNED = 100_000  # changes that are searched for an event, about half a second's work

_READ = 1024  # changes at once

Wants = Callable[[Change], bool]


@dataclass(slots=True)
class ClientSubscription:
    """A subscription, now or until a while ago, and how far its client has come."""

    id: str
    owner: str | None  # the holder of the key; None: a client without one
    sent: int  # everything up to here was given to the socket
    received: int  # the client surely has everything up to here


_Away = dict[
    str, tuple[float, ClientSubscription]
]  # by id, in the order they ended; with when that was


class ClientSubscriptions:
    """The subscriptions of clients that are here, or may come back."""

    def __init__(self, settings: WebSocketSection, seconds: Callable[[], float]) -> None:
        self._settings = settings
        self._seconds = seconds
        self._here: dict[str, ClientSubscription] = {}
        self._away: dict[str | None, _Away] = {}  # by owner

    def find(self, id: str, owner: str | None) -> ClientSubscription | None:
        """One of the same owner's that has not been away for too long."""
        self._forget()
        kept = self._here.get(id) or self._away.get(owner, {}).get(id, (0, None))[1]
        return kept if kept is not None and kept.owner == owner else None

    def begin(self, kept: ClientSubscription) -> None:
        """A client is here; it may take up what another connection of its own left."""
        self._away.get(kept.owner, {}).pop(kept.id, None)
        self._here[kept.id] = kept

    def end(self, kept: ClientSubscription) -> None:
        """Its connection has ended; nothing happens if another one has taken it up."""
        if self._here.get(kept.id) is kept:
            del self._here[kept.id]
            self._away.setdefault(kept.owner, {})[kept.id] = (self._seconds(), kept)
            self._forget()

    def drop(self, kept: ClientSubscription) -> None:
        """The client has replaced it."""
        if self._here.get(kept.id) is kept:
            del self._here[kept.id]

    def _forget(self) -> None:
        before = self._seconds() - self._settings.held_seconds
        for owner, away in list(self._away.items()):
            while away:
                ended, kept = next(iter(away.values()))
                if len(away) <= MOST_KEPT and ended >= before:
                    break
                del away[kept.id]
            else:
                del self._away[owner]


class ResumePoint(NamedTuple):
    """Where a subscription begins."""

    after: int
    lost: Rejected | None = None  # the message to the client, if something is lost


@dataclass(frozen=True)
class ReplayWindow:
    """What is held of a log for one subscription."""

    log: LogReader
    wants: Wants
    settings: WebSocketSection
    now: int  # microseconds since 1970

    def start(self, resume: ResumeRequest, kept: ClientSubscription | None) -> ResumePoint:
        """Where a client that comes back goes on."""
        return self._begin(self._position(resume, kept))

    def _position(self, resume: ResumeRequest, kept: ClientSubscription | None) -> int | None:
        """How far the client has come; None: nobody knows."""
        latest = self.log.latest_sequence
        if resume.epoch is not None or resume.generation is not None:
            epoch = self.log.epoch if resume.epoch is None else resume.epoch
            shared = self.log.shared_upto(epoch, resume.generation or UNKNOWN_GENERATION)
            # An id without a sequence is searched for, unless it may be of another log.
            unnamed = 0 if epoch == self.log.epoch else latest
            if shared is None or (resume.last_sequence or unnamed) > shared:
                return None
        sequence = resume.last_sequence
        if sequence is not None and sequence > latest:
            sequence = None
        if resume.last_event_id is not None:
            # Of what was not sent yet, it cannot be.
            upto = latest if kept is None else max(kept.sent, sequence or 0)
            found = self._find(resume.last_event_id, after=sequence or 0, upto=upto)
            sequence = sequence if found is None else found
        # A pong says what has arrived, not what was done with it: the client itself knows better.
        return sequence if sequence is not None or kept is None else kept.received

    def _begin(self, position: int | None) -> ResumePoint:
        latest, first = self.log.latest_sequence, self.log.first_sequence
        if position == latest:
            return ResumePoint(latest)
        after = max(position or 0, self._first_since(self._oldest) - 1, first - 1)
        after = self._newest(after, latest)
        if position is not None and not self._loses(position, after):
            return ResumePoint(after)
        begin = None if position is None else position + 1
        removal = removal_of(self.log.removals(), begin) if begin is not None else None
        reason = "" if removal is None else str(removal.reason)
        return ResumePoint(after, messages.gap(begin, after, log_first=first, reason=reason))

    @property
    def _oldest(self) -> int:
        return self.now - int(self.settings.held_seconds * 1_000_000)

    def _first_since(self, moment: int) -> int:
        """The first sequence captured at `moment` or later."""
        low, high = self.log.first_sequence, self.log.latest_sequence + 1
        while low < high:
            middle = (low + high) // 2
            found = self.log.read(middle - 1, limit=1)
            if found and found[0].transaction.captured_at < moment:
                low = middle + 1
            else:
                high = middle
        return low

    def _newest(self, after: int, latest: int) -> int:
        """The sequence after which no more events come than are held.

        Where that would take long to find out, everything is given instead.
        """
        if latest - after <= self.settings.held_events:
            return after
        count = 0
        for change in islice(self._backwards(after, latest), MOST_SCANNED):
            count += self.wants(change)
            if count > self.settings.held_events:
                return change.sequence
        return after

    def _loses(self, position: int, after: int) -> bool:
        """Whether an event lies between; what cannot be looked at counts as one."""
        if after <= position:
            return False
        if position + 1 < self.log.first_sequence or after - position > MOST_SCANNED:
            return True
        return any(map(self.wants, self._backwards(position, after)))

    def _find(self, event: str, *, after: int, upto: int) -> int | None:
        """The sequence of an event that was sent to this subscription; None: it was not found."""
        for change in self._backwards(max(after, upto - MOST_SCANNED), upto):
            if self.wants(change) and change.id == event:
                return change.sequence
        return None

    def _backwards(self, after: int, upto: int) -> Iterator[Change]:
        """The changes beyond `after`, last one first."""
        while upto > max(after, self.log.first_sequence - 1):
            begin = max(upto - _READ, after)
            changes: Sequence[Change] = self.log.read(begin, limit=_READ, upto=upto)
            yield from reversed(changes)
            upto = begin
