"""The changefeed: poll, stream, stats, retention."""

import asyncio
import functools
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, get, post
from litestar.response import Stream

from ..change.event import Op
from ..formats import Changefeed
from ..formats.changefeed import ChangefeedEvent
from .access import access_of, admin, whole
from .filter import Filter
from .openapi import (
    EVENT_STREAM,
    LAST_EVENT_ID,
    NO_CURSOR,
    SWITCHED_OFF,
    WITH_BODY,
    operation,
    replies,
)
from .permissions import Permissions
from .query import UINT64, NoQuery, PollQuery, StreamQuery, read_body, read_query
from .request import expect_shared, start_after
from .service import Service
from .sse import (
    Pace,
    StreamStart,
    event_stream,
    frames,
    gap_comment,
    id_suffix,
    resume_after,
)
from .subscription import Subscription


class ChangefeedPage(msgspec.Struct, frozen=True):
    """The answer to a poll."""

    events: list[ChangefeedEvent]
    count: int
    latest_sequence: int


class ChangefeedStats(msgspec.Struct, frozen=True):
    """What the feed holds."""

    total_events: int
    latest_sequence: int
    total_size_bytes: int


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to delete: every event with a sequence strictly below `before_sequence`."""

    # A bound beyond an int64 cannot be checked by msgspec.
    before_sequence: Annotated[int, msgspec.Meta(ge=0, extra_json_schema={"maximum": UINT64})]
    force: bool = False  # even what a named cursor still needs

    def __post_init__(self) -> None:
        if self.before_sequence > UINT64:
            raise ValueError(f"before_sequence must be at most {UINT64}")


class Retained(msgspec.Struct, frozen=True):
    """What was deleted."""

    deleted: int
    before_sequence: int  # nothing below it is left
    latest_sequence: int
    held_by: str | None  # the cursor or sink (sink:NAME) that kept more from being deleted
    losers: list[str] | msgspec.UnsetType = msgspec.UNSET  # who needed what was deleted by force


@functools.cache
def _format(include: frozenset[Op]) -> Changefeed:
    """One format for all who ask for the same, so that they share what it encodes."""
    return Changefeed(include)


@get(
    "/changefeed",
    operation_class=operation(PollQuery),
    responses=replies(ChangefeedPage) | NO_CURSOR,
)
async def poll(request: Request[Any, Any, Any]) -> Response[bytes]:
    """The next events; when there are none, wait for one."""
    service, access = Service.of(request), access_of(request)
    query = read_query(request, PollQuery)
    subscription = Subscription(
        service.feed,
        _format(query.include),
        filter=Filter(key_prefix=query.key_prefix),
        after=expect_shared(
            service,
            start_after(service, access, after=query.from_seq, cursor=query.cursor),
            query.epoch,
            query.generation,
        ),
        permissions=Permissions.of(access),
    )
    limit = query.limit or service.settings.batch_size
    page = await subscription.page(limit, wait=query.long_poll_ms / 1000)
    access.spend(len(page.events))
    body = b'{"events":[%b],"count":%d,"latest_sequence":%d}' % (
        b",".join(page.payloads),
        len(page.events),
        service.log.latest_sequence,
    )
    return Response(body, media_type="application/json", headers=service.headers(page))


@get(
    "/changefeed/stream",
    operation_class=operation(StreamQuery, header=LAST_EVENT_ID),
    responses=replies(ChangefeedEvent, media_type=EVENT_STREAM) | NO_CURSOR,
)
async def stream(request: Request[Any, Any, Any]) -> Stream:
    """The same events as they come, each `data: {JSON}` with its sequence as `id:`."""
    service, access = Service.of(request), access_of(request)
    query = read_query(request, StreamQuery)
    after = start_after(service, access, after=query.from_seq, cursor=query.cursor)
    start = resume_after(request, StreamStart(after, query.generation))
    subscription = Subscription(
        service.feed,
        _format(query.include),
        filter=Filter(key_prefix=query.key_prefix),
        after=expect_shared(service, start.after, query.epoch, start.generation),
        upto=None if query.keep_alive else service.log.latest_sequence,
        permissions=Permissions.of(access),
    )
    pace = Pace(idle=query.heartbeat_ms / 1000, seconds=query.max_seconds)
    suffix = id_suffix(service.feed, places=query.place_ids)
    sent = frames(subscription, access, pace=pace, gap=gap_comment, suffix=suffix)
    return event_stream(service.feed, sent)


@get(
    "/changefeed/stats",
    guards=[whole],
    operation_class=operation(NoQuery),
    responses=replies(ChangefeedStats) | SWITCHED_OFF,
)
async def stats(request: Request[Any, Any, Any]) -> ChangefeedStats:
    """How much the feed holds."""
    service = Service.of(request)
    read_query(request, NoQuery)
    now = service.log.stats()
    return ChangefeedStats(now.count, now.latest_sequence, now.total_bytes)


@post(
    "/changefeed/retention",
    status_code=200,
    guards=[admin],
    operation_class=operation(NoQuery, body=Retention),
    responses=replies(Retained) | SWITCHED_OFF | WITH_BODY,
)
async def retention(request: Request[Any, Any, Any]) -> Retained:
    """Delete every event below a sequence, but none that a named cursor or a sink still needs."""
    service = Service.of(request)
    read_query(request, NoQuery)
    body = await read_body(request, Retention)
    # In a thread: it waits for the disk, and for its turn to write.
    trim = service.retention.trim
    trimmed = await asyncio.to_thread(trim, body.before_sequence, force=body.force)
    return Retained(
        trimmed.removed,
        trimmed.first_sequence,
        service.log.latest_sequence,
        trimmed.held_by,
        list(trimmed.losers) or msgspec.UNSET,
    )
