"""What a sink says it has sent, compared with the log, range by range of sequences.

The log is rendered once more, with the sink's own tables and format, and the events are counted
that each settled range should have had. A count does not show which event of a range is missing, so
a range is named as a whole. Only what Spark computes needs Spark.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from ..errors import ConfigError, LogReplaced
from ..log import Ranges
from ..sinks import LogRange, SentEvents, SettledRange, Sink
from ..sinks.push.events import EventRendering
from .options import Options
from .reading import PipelineLog
from .remote import reading

if TYPE_CHECKING:
    from ..sinks.push.computing import ComputedChanges
    from .computed import Session

__all__ = ["EventSpan", "Verified", "verify"]

Look = Callable[[int, int], None]  # how many changes of how many were read


class EventSpan(msgspec.Struct, frozen=True):
    """Some events between two sequences."""

    first: int
    last: int
    events: int


class Verified(msgspec.Struct, kw_only=True):
    """What the comparison found."""

    sink: str
    first: int = 0  # the changes that were compared; 0: none
    last: int = 0
    expected: int = 0  # events that these changes stand for
    sent: int = 0  # that were accepted at once, or when they were tried again
    aside: int = 0  # that became dead letters then
    missing: list[EventSpan] = []  # neither sent nor kept
    surplus: list[EventSpan] = []  # more than there should be
    repeated: list[EventSpan] = []  # that may have come twice: nobody knew that they had been sent
    retried: int = 0  # handed over again after no answer, or a failure
    redriven: int = 0  # dead letters that were sent later
    dead_letters: int = 0  # that are kept now
    waiting_rows: int = 0  # of so many rows
    letters_missing: int = 0  # dead letters that are neither kept nor were sent
    to_come: int = 0  # events that the sink has not come to yet
    trimmed: int = 0  # up to here the log no longer has what was sent; 0: it has all
    earlier_logs: int = 0  # settled ranges of logs that were replaced since
    other_transforms: int = 0  # settled ranges whose rows other transforms chose

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing and not self.letters_missing


@dataclass(slots=True)
class _Wanted:
    """The sequences that somebody asks about."""

    first: int
    upto: int

    def meets(self, settled: SettledRange) -> bool:
        return settled.first <= self.upto and settled.last >= self.first


def verify(
    sink: Sink,
    address: Mapping[str, str],
    look: Look,
    *,
    first: int = 1,
    upto: int | None = None,
    session: "Session | None" = None,
) -> Verified:
    """Compare what a sink has sent with the log at an address.

    Ranges that reach beyond `first` and `upto` are compared whole. A pipeline may run meanwhile.
    What Spark computes is computed again, in a `session`.
    """
    rendering = sink.rendering
    if rendering is None:
        raise ConfigError(f"the sink {sink.name} keeps no count of its events")
    sent = sink.sent()  # before a look at the log, which grows
    # What is trimmed meanwhile is not to be compared any more.
    place = {**address, "failOnDataLoss": "false"}
    options = Options.read(place)
    log = reading(options)
    now = log.ranges(0, upto=0)
    computing = _Computing(place, session)
    counting = _Counting(sink.name, rendering, PipelineLog(log, options), now, computing)
    last = now.latest_sequence if upto is None else min(upto, now.latest_sequence)
    counting.wanted = _Wanted(max(first, now.first_sequence), last)
    return counting.compared(sent, first=first, oldest=now.first_sequence, look=look)


@dataclass(frozen=True, slots=True)
class _Computing:
    """How that is computed which events show."""

    address: Mapping[str, str]
    session: "Session | None"

    def of(
        self, wanted: LogRange, renderings: Sequence[EventRendering]
    ) -> "AbstractContextManager[ComputedChanges | None]":
        """What was computed of a range, until the context ends."""
        if not renderings[0].transforms.computes or wanted.after >= wanted.upto:
            return nullcontext()
        # Only here: the rest needs no Spark.
        from .computed import computed_range, own_session  # noqa: PLC0415

        globs = [each.tables for each in renderings]
        some = tuple(glob for each in globs for glob in each) if all(globs) else ()
        rendering = replace(renderings[0], tables=some)
        return computed_range(rendering, wanted, self.address, self.session or own_session)


class _Counting:
    """One comparison."""

    def __init__(
        self,
        sink: str,
        rendering: EventRendering,
        log: PipelineLog,
        now: Ranges,
        computing: _Computing,
    ) -> None:
        self._sink = sink
        self._rendering = rendering
        self._log = log
        self._epoch = now.epoch
        self._shared = now.shared_upto
        self._computing = computing
        self._computed: ComputedChanges | None = None  # of what is compared
        self.wanted = _Wanted(1, 0)

    def compared(self, sent: SentEvents, *, first: int, oldest: int, look: Look) -> Verified:
        own = [each for each in sent.settled if self._is_of_this_log(each)]
        found = _without_log(self._sink, sent, own)
        there = [each for each in own if each.first >= oldest and self.wanted.meets(each)]
        gone = [each for each in own if each.first < oldest and each.last >= first]
        found.trimmed = max((min(each.last, oldest - 1) for each in gone), default=0)
        begin = max(self.wanted.first, max((each.last for each in gone), default=0) + 1)
        self._walk(found, there, begin, look)
        return found

    def _is_of_this_log(self, settled: SettledRange) -> bool:
        return settled.last <= (self._shared(settled.epoch, settled.generation) or 0)

    def _walk(
        self, found: Verified, settled: Sequence[SettledRange], begin: int, look: Look
    ) -> None:
        """From range to range, and over what lies between them."""
        total = max([self.wanted.upto, *(each.last for each in settled)])
        start = min([begin - 1, *(each.first - 1 for each in settled[:1])])
        renderings = [self._rendering, *(each.rendering for each in settled if each.rendering)]
        whole = LogRange(self._log, self._epoch, start, total)
        with self._computing.of(whole, renderings) as self._computed:
            self._go(found, settled, (start, total), look)

    def _go(
        self,
        found: Verified,
        settled: Sequence[SettledRange],
        bounds: tuple[int, int],
        look: Look,
    ) -> None:
        start, total = bounds
        after, before = start, self._rendering
        comparable = True
        for each in settled:
            rendering = each.rendering or self._rendering
            if comparable and each.comparable:
                self._between(found, after, each, (before, rendering))
            comparable = each.comparable
            self._compare(found, each, rendering)
            after, before = max(after, each.last), rendering
            found.first, found.last = found.first or each.first, after
            look(after - start, total - start)
        found.to_come = self._count(self._rendering, after, self.wanted.upto)
        look(total - start, total - start)

    def _between(
        self,
        found: Verified,
        after: int,
        settled: SettledRange,
        renderings: Sequence[EventRendering],
    ) -> None:
        # Settings may have changed anywhere in between.
        events = min(self._count(each, after, settled.first - 1) for each in set(renderings))
        if events:
            found.expected += events
            found.missing.append(EventSpan(after + 1, settled.first - 1, events))
        if found.last and settled.first <= after:
            upto = min(after, settled.last)
            twice = self._count(renderings[-1], settled.first - 1, upto)
            found.repeated.append(EventSpan(settled.first, upto, twice))

    def _compare(self, found: Verified, settled: SettledRange, rendering: EventRendering) -> None:
        counted = settled.events + settled.aside
        if settled.comparable:
            expected = self._count(rendering, settled.first - 1, settled.last)
        else:
            expected = counted
            found.other_transforms += 1
        found.expected += expected
        found.sent += settled.events
        found.aside += settled.aside
        found.retried += settled.retried
        if counted < expected:
            found.missing.append(EventSpan(settled.first, settled.last, expected - counted))
        elif counted > expected:
            found.surplus.append(EventSpan(settled.first, settled.last, counted - expected))
        if settled.again:
            found.repeated.append(EventSpan(settled.first, settled.last, settled.again))

    def _count(self, rendering: EventRendering, after: int, upto: int) -> int:
        """The events of a piece of the log."""
        if after >= upto:
            return 0
        wanted = LogRange(self._log, self._epoch, after, upto)
        own = replace(rendering, computed=self._computed)
        return sum(len(chunk.events) for chunk in own.events(wanted))


def _without_log(sink: str, sent: SentEvents, own: Sequence[SettledRange]) -> Verified:
    """What is known without the log."""
    if sent.settled and not own:
        raise LogReplaced(
            "everything that the sink has sent comes from another log than this one",
            hint="Check data_dir and pipeline.url.",
        )
    kept = sum(each.aside for each in sent.settled)
    return Verified(
        sink=sink,
        redriven=sent.redriven,
        dead_letters=sent.dead_letters,
        waiting_rows=sent.waiting_rows,
        letters_missing=max(kept - sent.redriven - sent.dead_letters, 0),
        earlier_logs=len(sent.settled) - len(own),
    )
