"""Server-sent events: a subscription's pages as frames."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request
from litestar.response import Stream

from .access import Access
from .feed import Feed
from .query import UINT64, Whole, read_value
from .subscription import Delivery, Gap, Page, Subscription

RETRY_MS = 1000
_LAST_EVENT_ID = Whole(0, UINT64, "the last sequence the client has")


def resume_after(request: Request[Any, Any, Any], cursor: int) -> int:
    """Where a stream begins: a client that reconnects says so in Last-Event-ID."""
    last = request.headers.get("last-event-id", "")
    return read_value("Last-Event-ID", last, _LAST_EVENT_ID) if last else cursor


def event_stream(feed: Feed, frames: AsyncIterator[bytes]) -> Stream:
    """The response whose body is made of frames."""
    return Stream(
        frames,
        headers={
            # Given here, because a media type that begins with text/ would get a charset.
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would hold the frames back
            "X-Headrace-Epoch": feed.epoch,
        },
    )


@dataclass(frozen=True)
class Pace:
    """How long a stream goes on, and how long it may be silent."""

    idle: float  # seconds of nothing after which a heartbeat is sent
    seconds: float = math.inf


async def frames(
    subscription: Subscription, access: Access, *, pace: Pace, gap: Callable[[Gap], bytes]
) -> AsyncIterator[bytes]:
    """Frames of what comes, as fast as the client's key may have it."""
    yield b"retry: %d\n\n" % RETRY_MS
    until = asyncio.get_running_loop().time() + pace.seconds
    cursor = subscription.scanned
    async for page in subscription.follow(until=until, idle=pace.idle):
        yield _frame(page, cursor, gap)
        cursor = page.scanned
        await access.pay(len(page.deliveries))
    if subscription.scanned > cursor:
        yield b"id: %d\n\n" % subscription.scanned


def gap_comment(gap: Gap) -> bytes:
    """A gap that clients which parse every `data:` line as a change pass over."""
    return b": gap %d-%d\n\n" % gap


def gap_event(gap: Gap) -> bytes:
    """A gap as an event of its own name."""
    return b"event: gap\ndata: %b\n\n" % msgspec.json.encode(gap._asdict())


def _frame(page: Page, cursor: int, gap: Callable[[Gap], bytes]) -> bytes:
    parts = _messages(page.deliveries)
    if page.gap:
        parts.insert(0, gap(page.gap))
    # An id alone dispatches nothing, but a client that reconnects begins there: past all that
    # its filter left out.
    last = page.deliveries[-1].sequence if page.deliveries else cursor
    if page.scanned > last:
        parts.append(b"id: %d\n\n" % page.scanned)
    if not page.deliveries and not page.gap:
        parts.append(b": heartbeat\n\n")
    return b"".join(parts)


def _messages(deliveries: list[Delivery]) -> list[bytes]:
    # Of several events at one sequence only the last names it: whoever is cut off between them
    # reconnects before the first.
    following = [delivery.sequence for delivery in deliveries[1:]] + [0]
    return [
        b"data: %b\n\n" % payload
        if sequence == next_one
        else b"id: %d\ndata: %b\n\n" % (sequence, payload)
        for (sequence, payload), next_one in zip(deliveries, following, strict=False)
    ]
