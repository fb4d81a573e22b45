"""What a reader requests, what it receives, and how far that brings it; no input or output here."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict
from urllib.parse import quote

from ..errors import ChangesTrimmed, ConfigError, FeedReplaced, ServerError
from ..retry import Backoff
from ..v1 import changefeed_pb2 as v1
from .transport import with_query

logger = logging.getLogger("headrace.client")

RECONNECT = Backoff(first=1.0, longest=8.0)
REMEMBERED_IDS = 10_000  # and always all that a new connection may repeat
HEARTBEAT_MS = 10_000
FORMATS = {"sse": "canonical", "websocket": "notification", "grpc": "protobuf"}


class Filters(TypedDict, total=False):
    """Which changes, beyond their tables; what is left out always holds."""

    source: str  # one alone, by its name in the config
    operations: Sequence[str]  # insert, update, delete, …
    event_type: str  # of entities, a pattern such as entity:*
    entity_type: str
    tenant_id: str
    trigger: str  # a pattern such as api_*
    changed_fields: Sequence[str]  # at least one of them


@dataclass(frozen=True)
class ChangesRequest:
    """Which changes, in which format, over which transport."""

    tables: tuple[str, ...]
    transport: str
    format: str
    filters: Mapping[str, Any]

    @classmethod
    def of(
        cls, tables: Sequence[str], transport: str, format: str | None, filters: Filters
    ) -> "ChangesRequest":
        """The same, checked; ConfigError names what does not go together."""
        if isinstance(tables, str):
            raise ConfigError(f"tables must be a list of names or patterns, and not {tables!r}")
        if transport not in FORMATS:
            raise ConfigError(f"no transport called {transport!r}; there are: {', '.join(FORMATS)}")
        own = FORMATS[transport]
        if transport != "sse" and format not in (None, own):
            raise ConfigError(f"over {transport} events come as {own}, and not as {format!r}")
        if transport == "websocket" and (filters or not tables):
            raise ConfigError("over websocket tables must be named, and there are no other filters")
        return cls(tuple(tables), transport, format or own, {**filters})

    def path(self, progress: "ReaderProgress") -> str:
        """Where the events that follow a place are streamed."""
        query: dict[str, object] = {"after": progress.after, "format": self.format}
        query |= {"heartbeat_ms": HEARTBEAT_MS, **progress.place}
        query["tables"] = ",".join(self.tables)
        for name, value in self.filters.items():
            query[name] = value if isinstance(value, str) else ",".join(value)
        return with_query("/v1/changes/stream", query)

    def message(self, progress: "ReaderProgress") -> v1.SubscribeRequest:
        """The same for gRPC."""
        place: dict[str, Any] = {"after": progress.after, **progress.place}
        filters = dict(self.filters)
        operations = [_known(name) for name in filters.pop("operations", ())]
        return v1.SubscribeRequest(
            tables=self.tables, operations=operations, together=True, **filters, **place
        )


def cursor_path(name: str) -> str:
    """Where a cursor is."""
    quoted = quote(name, safe="")
    # A segment of dots alone would be taken for another folder.
    return f"/v1/cursors/{quoted if name.strip('.') else quoted.replace('.', '%2E')}"


def _known(operation: str) -> str:
    names = v1.Operation.keys()
    if operation.upper() not in names:
        known = ", ".join(names[1:]).lower()
        raise ConfigError(f"no operation called {operation!r} over gRPC; there are: {known}")
    return operation.upper()


class ReceivedEvent(NamedTuple):
    """One event, in the requested format."""

    id: str  # "": the format has none
    sequence: int  # this event completes everything up to here: resume after it, or ack it
    data: Any  # the decoded JSON; over gRPC the CDCEvent
    raw: bytes = b""  # the JSON itself, with every digit; not over gRPC
    epoch: str = ""  # of the log in which the sequence was read
    generation: str = ""  # of its writer then


class MissedChanges(NamedTuple):
    """Sequences, both ends included, that this reader does not get: mostly they were trimmed."""

    first: int
    last: int
    in_log: bool = False  # a WebSocket resumes from less than the log: sse can still read them


class Opened(NamedTuple):
    """A connection stands."""

    epoch: str  # of the log: a sequence means nothing in another one
    generation: str = ""  # of its writer: the log may be put back from an older copy


def opened(headers: Mapping[str, str]) -> Opened:
    """What the headers of a response say of the log."""
    named = (headers.get(f"X-Headrace-{name}", "") for name in ("Epoch", "Generation"))
    return Opened(*named)


def acked(event: ReceivedEvent | int) -> dict[str, object]:
    """Where a cursor is to stand when an event is done; a number does not say in which log."""
    if isinstance(event, int):
        return {"sequence": event}
    named = {"epoch": event.epoch, "generation": event.generation}
    return {"sequence": event.sequence, **{name: value for name, value in named.items() if value}}


class Scanned(NamedTuple):
    """Nothing else matches up to a sequence."""

    sequence: int


StreamMessage = ReceivedEvent | MissedChanges | Opened | Scanned


class ReaderProgress:
    """How far a reader is, over all its connections."""

    def __init__(self, after: int, on_gap: Callable[[MissedChanges], None] | None) -> None:
        self.after = after
        self.begun = after > 0  # whether it has a sequence to resume after
        self.last_id = ""
        self._on_gap = on_gap
        self._epoch = self._generation = ""
        self._attempts = 0
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._since = 0  # events since that sequence: a new connection may repeat them

    def take(self, message: StreamMessage) -> ReceivedEvent | None:
        """Note a message; an event that is new comes back."""
        match message:
            case Opened(epoch, generation):
                self._expect_same(epoch)
                self._generation = generation
                if self._attempts:
                    logger.info("connected again after %d attempts", self._attempts)
                self._attempts = 0
                self.begun = True
            case MissedChanges():
                self._report(message)
                self._reach(message.last)
            case Scanned(sequence):
                self._reach(sequence)
            case ReceivedEvent():
                self._reach(message.sequence)
                self._since += 1
                self.last_id = message.id
                if self._is_new(message.id):
                    return message._replace(epoch=self._epoch, generation=self._generation)
        return None

    @property
    def place(self) -> dict[str, str]:
        """Which log the sequence belongs to, as a request names it; nothing: not known yet."""
        # What came before the first connection may be from an earlier generation.
        named = {"epoch": self._epoch, "generation": self._generation}
        return {name: value for name, value in named.items() if value}

    def resume(self, after: int) -> None:
        """Go on from a cursor's sequence."""
        self.after, self.begun = after, True

    def pause(self, error: ServerError) -> float:
        """Seconds to wait before the next attempt; an error that would come again is raised."""
        if not error.retry:
            raise error
        if not self._attempts:  # once for all attempts until one connects
            logger.warning("%s; this is tried again until it works", error)
        self._attempts += 1
        return max(RECONNECT.wait(self._attempts), error.after)

    def _reach(self, sequence: int) -> None:
        if sequence > self.after:
            self.after, self._since = sequence, 0

    def _is_new(self, id: str) -> bool:
        if not id:
            return True
        if id in self._ids:
            return False
        self._ids[id] = None
        while len(self._ids) > max(REMEMBERED_IDS, self._since):
            self._ids.popitem(last=False)
        return True

    def _report(self, gap: MissedChanges) -> None:
        if self._on_gap is None and gap.in_log:
            raise ChangesTrimmed(
                f"changes {gap.first}-{gap.last} are no longer kept for a WebSocket",
                hint=f"The log still has them: read on over sse, with after={gap.first - 1}.",
                first=gap.first,
                last=gap.last,
            )
        if self._on_gap is None:
            raise ChangesTrimmed(
                f"changes {gap.first}-{gap.last} were trimmed before they were read",
                first=gap.first,
                last=gap.last,
            )
        self._on_gap(gap)

    def _expect_same(self, epoch: str) -> None:
        if self._epoch and epoch != self._epoch:
            raise FeedReplaced(f"the log is another one, {epoch}, and was {self._epoch}")
        self._epoch = epoch
