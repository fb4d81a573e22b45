"""Canonical changes: a page of JSON, lines of NDJSON, a stream."""

import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.response import Stream

from ..errors import LogError
from ..formats import Canonical
from ..formats.canonical import CanonicalChange
from .feed import BLOCK
from .filter import Filter
from .openapi import LAST_EVENT_ID, answers, asks
from .query import ChangesQuery, ChangesStreamQuery, read_query
from .service import Service
from .sse import event_stream, frames, gap_event, resume_after
from .subscription import Page, Subscription

NDJSON = "application/x-ndjson"
PAGE = 1000  # changes in a JSON answer unless `limit` says otherwise


class ChangesPage(msgspec.Struct, frozen=True):
    """The answer as one JSON document."""

    changes: list[CanonicalChange]
    count: int
    latest_sequence: int
    scanned: int  # go on after this one
    epoch: str


@get("/v1/changes", operation_class=asks(ChangesQuery), responses=answers(ChangesPage))
async def changes(request: Request[Any, Any, Any]) -> Response[Any]:
    """The next changes: one JSON document, or with `Accept: application/x-ndjson` a line each."""
    service = Service.of(request)
    query = read_query(request, ChangesQuery)
    subscription = Subscription(
        service.feed,
        Canonical(),
        filter=Filter(tables=query.tables, operations=query.operations),
        after=query.after,
        upto=query.upto,
    )
    if NDJSON in request.headers.get("accept", ""):
        return await _lines(service, subscription, query)
    page = await subscription.page(query.limit or PAGE, wait=query.wait_ms / 1000)
    return Response(
        _document(service, page), media_type="application/json", headers=service.headers(page)
    )


@get(
    "/v1/changes/stream",
    operation_class=asks(ChangesStreamQuery, header=LAST_EVENT_ID),
    responses=answers(CanonicalChange, media_type="text/event-stream"),
)
async def changes_stream(request: Request[Any, Any, Any]) -> Stream:
    """The same changes as they come, each `data: {JSON}` with its sequence as `id:`."""
    service = Service.of(request)
    query = read_query(request, ChangesStreamQuery)
    subscription = Subscription(
        service.feed,
        Canonical(),
        filter=Filter(tables=query.tables, operations=query.operations),
        after=resume_after(request, query.after),
        upto=query.upto,
    )
    idle = query.heartbeat_ms / 1000
    return event_stream(
        service.feed, frames(subscription, seconds=math.inf, idle=idle, gap=gap_event)
    )


def _document(service: Service, page: Page) -> bytes:
    return b'{"changes":[%b],"count":%d,"latest_sequence":%d,"scanned":%d,"epoch":%b}' % (
        b",".join(page.payloads),
        len(page.deliveries),
        service.log.latest_sequence,
        page.scanned,
        msgspec.json.encode(service.feed.epoch),
    )


async def _lines(
    service: Service, subscription: Subscription, query: ChangesQuery
) -> Response[Any]:
    """A page when there is a limit; else everything there is, in pieces."""
    page = await subscription.page(query.limit or BLOCK, wait=query.wait_ms / 1000)
    if query.limit is not None:
        return Response(_joined(page), media_type=NDJSON, headers=service.headers(page))
    subscription.end_at(service.log.latest_sequence)
    headers = service.headers(page, scanned=subscription.end)
    return Stream(_pieces(page, subscription), media_type=NDJSON, headers=headers)


async def _pieces(page: Page, subscription: Subscription) -> AsyncIterator[bytes]:
    yield _joined(page)
    while not subscription.complete:
        page = await subscription.next(BLOCK)
        if page.gap:
            # Breaking off is the only notice left: the headers are sent.
            raise LogError(
                f"changes {page.gap.first}-{page.gap.last} were trimmed while being sent"
            )
        yield _joined(page)


def _joined(page: Page) -> bytes:
    return b"".join(payload + b"\n" for payload in page.payloads)
