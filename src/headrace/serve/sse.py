"""Server-sent events: a subscription's pages as frames."""

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from litestar import Request
from litestar.response import Stream

from .access import Access
from .feed import LogFeed
from .parameters import Integer
from .query import UINT64, read_value
from .subscription import FeedPage, LogGap, Subscription

RETRY_MS = 1000
_AT = "@"  # between a sequence and its generation
PAGE_BYTES = 128 << 10  # of events on their way to one client, besides what its socket has
_LAST_EVENT_ID = Integer(0, UINT64, "the last sequence the client has")


class StreamStart(NamedTuple):
    """Where a stream begins."""

    after: int
    generation: str | None  # of the log in which that was read; None: not known


def resume_after(request: Request[Any, Any, Any], start: StreamStart) -> StreamStart:
    """Where a stream begins: a client that reconnects says so in Last-Event-ID."""
    last = request.headers.get("last-event-id", "")
    if not last:
        return start
    # What the address says of the generation is of the first connection.
    sequence, _, generation = last.partition(_AT)
    after = read_value("Last-Event-ID", sequence, _LAST_EVENT_ID)
    return StreamStart(after, generation or None)


def id_suffix(feed: LogFeed, *, places: bool) -> bytes:
    """What follows the sequence in each `id:`; nothing, unless whole places are wanted."""
    return f"{_AT}{feed.generation}".encode() if places else b""


def event_stream(feed: LogFeed, frames: AsyncIterator[bytes]) -> Stream:
    """The response whose body is made of frames."""
    return Stream(
        frames,
        headers={
            # Given here, because a media type that begins with text/ would get a charset.
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold the frames back
            "X-Headrace-Epoch": feed.epoch,
            "X-Headrace-Generation": feed.generation,
        },
    )


@dataclass(frozen=True)
class Pace:
    """How long a stream goes on, and how long it may be silent."""

    idle: float  # seconds of nothing after which a heartbeat is sent
    seconds: float = math.inf


async def frames(
    subscription: Subscription,
    access: Access,
    *,
    pace: Pace,
    gap: Callable[[LogGap], bytes],
    suffix: bytes = b"",
) -> AsyncIterator[bytes]:
    """Frames of what comes, as fast as the client's key may have it; `suffix` ends every id."""
    yield b"retry: %d\n\n" % RETRY_MS
    until = asyncio.get_running_loop().time() + pace.seconds
    cursor = subscription.scanned
    async for page in subscription.follow(until=until, idle=pace.idle, room=PAGE_BYTES):
        frame = [_frame(page, cursor, gap, suffix)]
        cursor, count = page.scanned, len(page.events)
        del page  # it may be large, and the client may take nothing for long
        yield frame.pop()
        await access.pay(count)
    if subscription.scanned > cursor:
        yield b"id: %d%b\n\n" % (subscription.scanned, suffix)


def gap_comment(gap: LogGap) -> bytes:
    """A gap that clients which parse every `data:` line as a change pass over."""
    return f": gap {gap.first}-{gap.last} {gap.reason}".rstrip().encode() + b"\n\n"


def gap_event(gap: LogGap) -> bytes:
    """A gap as an event of its own name."""
    return b"event: gap\ndata: %b\n\n" % msgspec.json.encode(gap._asdict())


def _frame(page: FeedPage, cursor: int, gap: Callable[[LogGap], bytes], suffix: bytes) -> bytes:
    missing = gap(page.gap) if page.gap else b""
    if page.events:
        return missing + page.once(_framing(suffix))
    return missing + _scanned(page, cursor, suffix) + (b"" if page.gap else b": heartbeat\n\n")


@functools.lru_cache(maxsize=8)  # the same one for all, so that they share what it makes
def _framing(suffix: bytes) -> Callable[[FeedPage], bytes]:
    return functools.partial(_messages, suffix)


def _messages(suffix: bytes, page: FeedPage) -> bytes:
    # Of several events at one sequence only the last names it: whoever is cut off between them
    # reconnects before the first.
    following = [event.sequence for event in page.events[1:]] + [0]
    parts = [
        b"data: %b\n\n" % payload
        if sequence == next_one
        else b"id: %d%b\ndata: %b\n\n" % (sequence, suffix, payload)
        for (sequence, payload), next_one in zip(page.events, following, strict=False)
    ]
    return b"".join(parts) + _scanned(page, page.events[-1].sequence, suffix)


def _scanned(page: FeedPage, sent: int, suffix: bytes) -> bytes:
    # An id alone dispatches nothing, but a client that reconnects begins there: past all that
    # its filter left out.
    return b"id: %d%b\n\n" % (page.scanned, suffix) if page.scanned > sent else b""
