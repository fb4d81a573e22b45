"""The changes in any format: a page of JSON, lines of NDJSON, a stream."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.response import Stream

from ..errors import LogError
from ..formats.canonical import CanonicalChange
from .access import Access, access_of
from .feed import BLOCK
from .openapi import EVENT_STREAM, LAST_EVENT_ID, NO_CURSOR, operation, replies
from .permissions import Permissions
from .query import ChangesQuery, ChangesStreamQuery, read_query
from .request import expect_shared, request_filter, request_format, start_after
from .service import Service
from .sse import Pace, StreamStart, event_stream, frames, gap_event, id_suffix, resume_after
from .subscription import FeedPage, Subscription

NDJSON = "application/x-ndjson"
PIECE_BYTES = 256 << 10  # of lines on their way to one client, besides what its socket has
PAGE = 1000  # changes in a JSON answer unless `limit` says otherwise


class ChangesPage(msgspec.Struct, frozen=True):
    """The answer as one JSON document."""

    changes: list[CanonicalChange]
    count: int
    latest_sequence: int
    scanned: int  # go on after this one
    epoch: str
    generation: str


class EventsPage(msgspec.Struct, frozen=True):
    """The same in another format than the canonical one; /schemas describes its events."""

    events: list[dict[str, Any]]
    count: int
    latest_sequence: int
    scanned: int  # go on after this one
    epoch: str
    generation: str


@get(
    "/v1/changes",
    operation_class=operation(ChangesQuery, lines=NDJSON),
    responses=replies(ChangesPage | EventsPage) | NO_CURSOR,
)
async def changes(request: Request[Any, Any, Any]) -> Response[Any]:
    """The next changes: one JSON document, or with `Accept: application/x-ndjson` a line each."""
    service = Service.of(request)
    query = read_query(request, ChangesQuery)
    subscription = _subscription(request, query)
    if NDJSON in request.headers.get("accept", ""):
        return await _lines(request, subscription, query)
    page = await subscription.page(query.limit or PAGE, wait=query.wait_ms / 1000)
    access_of(request).spend(len(page.events))
    body = _document(service, page, b"changes" if query.format == "canonical" else b"events")
    return Response(body, media_type="application/json", headers=service.headers(page))


@get(
    "/v1/changes/stream",
    operation_class=operation(ChangesStreamQuery, header=LAST_EVENT_ID),
    responses=replies(dict[str, Any], media_type=EVENT_STREAM) | NO_CURSOR,
)
async def changes_stream(request: Request[Any, Any, Any]) -> Stream:
    """The same changes as they come, each `data: {JSON}` with its sequence as `id:`."""
    service = Service.of(request)
    query = read_query(request, ChangesStreamQuery)
    idle = query.heartbeat_ms / 1000
    sent = frames(
        _subscription(request, query),
        access_of(request),
        pace=Pace(idle=idle),
        gap=gap_event,
        suffix=id_suffix(service.feed, places=query.place_ids),
    )
    return event_stream(service.feed, sent)


def _subscription(
    request: Request[Any, Any, Any], query: ChangesQuery | ChangesStreamQuery
) -> Subscription:
    service, access = Service.of(request), access_of(request)
    after = start_after(service, access, after=query.after, cursor=query.cursor)
    start = StreamStart(after, query.generation)
    if isinstance(query, ChangesStreamQuery):
        start = resume_after(request, start)
    after = expect_shared(service, start.after, query.epoch, start.generation)
    return Subscription(
        service.feed,
        request_format(
            service, query.format, query.operations, markers=query.preserve_transactions
        ),
        filter=request_filter(service, access, query),
        after=after,
        upto=query.upto,
        permissions=Permissions.of(access),
    )


def _document(service: Service, page: FeedPage, name: bytes) -> bytes:
    return (
        b'{"%b":[%b],"count":%d,"latest_sequence":%d,"scanned":%d,"epoch":%b,"generation":%b}'
        % (
            name,
            b",".join(page.payloads),
            len(page.events),
            service.log.latest_sequence,
            page.scanned,
            msgspec.json.encode(service.feed.epoch),
            msgspec.json.encode(service.feed.generation),
        )
    )


async def _lines(
    request: Request[Any, Any, Any], subscription: Subscription, query: ChangesQuery
) -> Response[Any]:
    """A page when there is a limit; else everything there is, in pieces."""
    service, access = Service.of(request), access_of(request)
    wait = query.wait_ms / 1000
    if query.limit is not None:
        page = await subscription.page(query.limit, wait=wait)
        access.spend(len(page.events))
        return Response(_joined(page), media_type=NDJSON, headers=service.headers(page))
    page = await subscription.page(BLOCK, wait=wait, room=PIECE_BYTES)
    subscription.end_at(service.log.latest_sequence)
    headers = service.headers(page, scanned=subscription.end)
    return Stream(_pieces(page, subscription, access), media_type=NDJSON, headers=headers)


async def _pieces(
    page: FeedPage, subscription: Subscription, access: Access
) -> AsyncIterator[bytes]:
    yield _joined(page)
    while not subscription.complete:
        await access.pay(len(page.events))
        page = await subscription.next(BLOCK, room=PIECE_BYTES)
        if page.gap:
            # Breaking off is the only notice left: the headers are sent.
            raise LogError(
                f"changes {page.gap.first}-{page.gap.last} were trimmed while being sent"
            )
        yield _joined(page)
    access.spend(len(page.events))
    if subscription.ended:
        raise LogError("the API key ended while changes were sent")


def _joined(page: FeedPage) -> bytes:
    return b"".join(payload + b"\n" for payload in page.payloads)
