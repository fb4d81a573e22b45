"""The changes in any format: a page of JSON, lines of NDJSON, a stream."""

import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.response import Stream

from ..errors import LogError
from ..formats.canonical import CanonicalChange
from ..formats.changefeed import ON_REQUEST
from .feed import BLOCK
from .filter import Filter
from .openapi import LAST_EVENT_ID, answers, asks
from .problems import Problem, Refused, invalid_parameter
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


class EventsPage(msgspec.Struct, frozen=True):
    """The same in another format than the canonical one; /schemas tells what its events are."""

    events: list[dict[str, Any]]
    count: int
    latest_sequence: int
    scanned: int  # go on after this one
    epoch: str


@get("/v1/changes", operation_class=asks(ChangesQuery), responses=answers(ChangesPage | EventsPage))
async def changes(request: Request[Any, Any, Any]) -> Response[Any]:
    """The next changes: one JSON document, or with `Accept: application/x-ndjson` a line each."""
    service = Service.of(request)
    query = read_query(request, ChangesQuery)
    subscription = _subscription(service, query, after=query.after)
    if NDJSON in request.headers.get("accept", ""):
        return await _lines(service, subscription, query)
    page = await subscription.page(query.limit or PAGE, wait=query.wait_ms / 1000)
    body = _document(service, page, b"changes" if query.format == "canonical" else b"events")
    return Response(body, media_type="application/json", headers=service.headers(page))


@get(
    "/v1/changes/stream",
    operation_class=asks(ChangesStreamQuery, header=LAST_EVENT_ID),
    responses=answers(dict[str, Any], media_type="text/event-stream"),
)
async def changes_stream(request: Request[Any, Any, Any]) -> Stream:
    """The same changes as they come, each `data: {JSON}` with its sequence as `id:`."""
    service = Service.of(request)
    query = read_query(request, ChangesStreamQuery)
    subscription = _subscription(service, query, after=resume_after(request, query.after))
    idle = query.heartbeat_ms / 1000
    return event_stream(
        service.feed, frames(subscription, seconds=math.inf, idle=idle, gap=gap_event)
    )


def _subscription(
    service: Service, query: ChangesQuery | ChangesStreamQuery, *, after: int
) -> Subscription:
    if query.preserve_transactions and query.format != "savegress":
        message = f"preserve_transactions goes with format=savegress, not with {query.format}"
        raise invalid_parameter("preserve_transactions", "true", message)
    if query.format == "entity" and not service.settings.enabled:
        hint = "Set cdc.enabled to true."
        raise Refused(404, Problem("not_enabled", "the entity events are switched off", hint=hint))
    format = service.formats.named(
        query.format,
        # Whoever names an operation wants it, also in a format that carries it only on request.
        include=query.operations & ON_REQUEST,
        markers=query.preserve_transactions,
    )
    wanted = Filter(source=query.source, tables=query.tables, operations=query.operations)
    return Subscription(service.feed, format, filter=wanted, after=after, upto=query.upto)


def _document(service: Service, page: Page, name: bytes) -> bytes:
    return b'{"%b":[%b],"count":%d,"latest_sequence":%d,"scanned":%d,"epoch":%b}' % (
        name,
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
