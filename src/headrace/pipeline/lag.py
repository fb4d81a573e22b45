"""How far the sinks are behind the log: known at every moment, or said to be unknown."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from ..errors import HeadraceError
from ..log import Ranges
from ..sinks import SinkPhase, SinkStatus
from ..sinks.report import behind
from .options import Options
from .query import PipelineInput, QueryPlan
from .remote import RemoteLog, reading

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
NOTE_SECONDS = 5.0


class LogEnd:
    """Where the log ends, looked up every second by a thread.

    A server that does not answer keeps a look waiting, and must keep nobody else waiting.
    """

    def __init__(
        self, feed: PipelineInput, positions: Callable[[], Mapping[str, int | None]] = dict
    ) -> None:
        """`positions` says how far each sink is, so that a server elsewhere knows it."""
        self._feed = feed
        self._positions = positions
        self._held = HeldPlaces(feed)
        self._seen: Ranges | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="log end", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()

    def lag(self, position: int | None) -> int | None:
        """How many changes follow a position; None: one of the two is not known."""
        seen = self._seen
        if seen is None or position is None:
            return None
        return behind(position, first=seen.first_sequence, latest=seen.latest_sequence)

    def look(self) -> Self:
        """See where the log ends now."""
        try:
            seen = self._feed.look()
        except (HeadraceError, OSError) as error:
            # Each sink reports it as its own failure.
            logger.debug("the end of the log is not known: %s", error)
            seen = None
        if not self._stopping.is_set():
            self._seen = seen
        return self

    def _watch(self) -> None:
        while not self.look()._stopping.wait(LOOK_SECONDS):
            self._held.note(self._positions(), self._seen)


class HeldPlaces:
    """Cursors on the server of a pipeline that reads from one: nothing its sinks need is removed.

    The server cannot see the checkpoints, which may be on another machine.
    """

    def __init__(self, feed: PipelineInput) -> None:
        self._log = reading(Options.read(feed.address))
        self._noted: dict[str, int] = {}
        self._due = 0.0
        self._failed = False

    def note(self, positions: Mapping[str, int | None], seen: Ranges | None) -> None:
        """Move the cursors to where the sinks are; now and then, and only those that moved."""
        if not isinstance(self._log, RemoteLog) or seen is None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + NOTE_SECONDS
        for sink, position in positions.items():
            if position is None:
                continue
            place = min(max(position, seen.first_sequence - 1), seen.latest_sequence)
            if self._noted.get(sink) != place:
                self._move(self._log, sink, place)

    def _move(self, log: RemoteLog, sink: str, place: int) -> None:
        try:
            log.hold(f"sink.{sink}", place)
        except (HeadraceError, OSError) as error:
            # The sinks go on all the same, and a server that does not answer is reported by them.
            if not self._failed:
                logger.warning("sink=%s place not noted at the server error=%s", sink, error)
            self._failed = True
            return
        self._noted[sink], self._failed = place, False


def position_of(plan: QueryPlan) -> int | None:
    """Up to where a sink has everything by its checkpoint, 0: nothing; None: it is unreadable."""
    try:
        plan.checkpoint.examine()
        return plan.checkpoint.sequence()
    except (HeadraceError, OSError):
        return None


def starting(plans: Sequence[QueryPlan]) -> list[SinkStatus]:
    """How sinks are doing before Spark is there."""
    end = LogEnd(plans[0].feed).look()  # all read the same log
    found = [(plan.sink.name, position_of(plan)) for plan in plans]
    return [
        SinkStatus(
            sink=name,
            phase=SinkPhase.STARTING,
            sequence=position or 0,
            lag=end.lag(position),
        )
        for name, position in found
    ]
