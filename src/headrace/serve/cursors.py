"""Named cursors: how far consumers have come, kept by the server; and leases for those that share.

A cursor belongs to the key that made it, and every key has names of its own. Nothing that a cursor
still needs is trimmed.
"""

import asyncio
import time
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, delete, get, post, put

from ..formats import StreamFormat
from ..log import Cursor
from .access import Access, access_of
from .groups import ActiveLease, Consumer, Group, LeaseSubscription
from .openapi import NO_CURSOR, WITH_BODY, operation, problem, replies
from .parameters import Name
from .permissions import Permissions
from .problems import Problem, RequestRefused, invalid_parameter
from .query import CursorQuery, LeaseQuery, NoQuery, read_body, read_query, read_value
from .request import (
    expect_shared,
    found_cursor,
    known_cursor,
    may,
    owner,
    request_filter,
    request_format,
)
from .service import Service

MOST_CURSORS = 1000  # of one key: each of them holds back trimming
_NAME = Name("a cursor")
_PATH = {"name": _NAME}

_CONFLICT = {
    409: problem(
        "It is ahead, the log lacks the sequence, consumers hold leases, or several keys have "
        "such a cursor."
    )
}


class CursorView(msgspec.Struct, frozen=True):
    """A cursor: its consumers have everything up to `sequence`."""

    name: str
    sequence: int
    latest_sequence: int
    updated_at: int  # microseconds since 1970
    owner: str | None  # id of the key that made it
    leases: list[ActiveLease]


class CursorList(msgspec.Struct, frozen=True):
    """The cursors that the client may see, by name."""

    cursors: list[CursorView]


class CursorPut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a cursor is to stand: everything up to `sequence` has been handled."""

    sequence: Annotated[int, msgspec.Meta(ge=0)]
    force: bool = False  # also backwards, and although consumers hold leases
    # The log that the sequence belongs to, and the generation in which it was read there.
    epoch: str | None = None
    generation: str | None = None


class LeasedEvent(msgspec.Struct, frozen=True):
    """An event, and what to ack it by."""

    sequence: int
    event: dict[str, Any]


class LeasePage(msgspec.Struct, frozen=True):
    """What a consumer has until its lease expires."""

    lease: str | None  # null: there is nothing now
    consumer: str
    expires_at: int  # microseconds since 1970
    events: list[LeasedEvent]
    sequence: int  # the cursor's
    latest_sequence: int


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a consumer is done with."""

    lease: str
    sequences: list[Annotated[int, msgspec.Meta(ge=1)]]


class AckPage(msgspec.Struct, frozen=True):
    """What came of it."""

    sequence: int  # the cursor's
    lost: list[int]  # not acked: the lease had expired, and they were handed on


@get("/v1/cursors", operation_class=operation(NoQuery), responses=replies(CursorList))
async def listed(request: Request[Any, Any, Any]) -> CursorList:
    """Every cursor of the client's; for an admin, everybody's."""
    service, access = Service.of(request), access_of(request)
    read_query(request, NoQuery)
    known = await asyncio.to_thread(service.log.cursors)
    # One's own last: whoever looks a name up among them finds its own.
    own = owner(access)
    known.sort(key=lambda cursor: (cursor.owner == own, cursor.name, cursor.owner or ""))
    return CursorList([_view(service, cursor) for cursor in known if may(access, cursor)])


@get(
    "/v1/cursors/{name:str}",
    operation_class=operation(CursorQuery, path=_PATH),
    responses=replies(CursorView) | NO_CURSOR,
)
async def cursor(request: Request[Any, Any, Any]) -> CursorView:
    """How far a consumer has come."""
    query = read_query(request, CursorQuery)
    service, access, name = Service.of(request), access_of(request), _name(request)
    return _view(service, known_cursor(service, access, name, whose=query.owner))


@put(
    "/v1/cursors/{name:str}",
    operation_class=operation(CursorQuery, path=_PATH, body=CursorPut),
    responses=replies(CursorView) | NO_CURSOR | _CONFLICT | WITH_BODY,
)
async def moved(request: Request[Any, Any, Any]) -> CursorView:
    """Make a cursor, or note how far its consumer has come; it is durable when this returns."""
    service, access, name = Service.of(request), access_of(request), _name(request)
    whose = read_query(request, CursorQuery).owner
    body = await read_body(request, CursorPut)
    expect_shared(service, body.sequence, body.epoch, body.generation)
    if whose is None:
        meant = found_cursor(service, access, name) or Cursor(name, 0, 0, owner(access))
    else:
        meant = known_cursor(service, access, name, whose=whose)
    async with service.groups.turn(meant.id):
        known = service.log.cursor(*meant.id)
        if known is None:
            _room(service, access)
        else:
            _expect_forward(service, known, body)
        await service.groups.forget(meant.id)
        kept = Cursor(meant.name, body.sequence, 0, meant.owner)
        # In a thread: it waits for the disk.
        return _view(service, await asyncio.to_thread(service.log.put_cursor, kept))


@delete(
    "/v1/cursors/{name:str}",
    status_code=200,
    operation_class=operation(CursorQuery, path=_PATH),
    responses=replies(CursorView) | NO_CURSOR,
)
async def dropped(request: Request[Any, Any, Any]) -> CursorView:
    """Forget a cursor: it no longer holds back trimming. Answers where it stood."""
    service, access, name = Service.of(request), access_of(request), _name(request)
    whose = read_query(request, CursorQuery).owner
    async with service.groups.turn(known_cursor(service, access, name, whose=whose).id):
        known = known_cursor(service, access, name, whose=whose)  # somebody may have been quicker
        await service.groups.forget(known.id)
        await asyncio.to_thread(service.log.drop_cursor, *known.id)
        return _view(service, known)


@post(
    "/v1/cursors/{name:str}/lease",
    status_code=200,
    operation_class=operation(LeaseQuery, path=_PATH),
    responses=replies(LeasePage) | NO_CURSOR | _CONFLICT,
)
async def lease(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Events for one of several consumers that share a cursor."""
    service, access, name = Service.of(request), access_of(request), _name(request)
    query = read_query(request, LeaseQuery)
    group = await _group(service, access, name, query)
    seconds = query.lease_ms / 1000
    consumer = Consumer(query.consumer, access.valid, access.lasting)
    leased = await group.lease(
        consumer, limit=query.limit, seconds=seconds, wait=query.wait_ms / 1000
    )
    access.spend(len(leased.events))
    body = b'{"lease":%b,"consumer":%b,"expires_at":%d,"events":[%b],"sequence":%d,' % (
        msgspec.json.encode(leased.id or None),
        msgspec.json.encode(query.consumer),
        time.time_ns() // 1000 + query.lease_ms * 1000,
        b",".join(b'{"sequence":%d,"event":%b}' % each for each in leased.events),
        leased.cursor.sequence,
    )
    feed = service.feed
    headers = {"X-Headrace-Epoch": feed.epoch, "X-Headrace-Generation": feed.generation}
    if leased.gap:
        headers |= leased.gap.headers
    body += b'"latest_sequence":%d}' % service.log.latest_sequence
    return Response(body, media_type="application/json", headers=headers)


@post(
    "/v1/cursors/{name:str}/ack",
    status_code=200,
    operation_class=operation(CursorQuery, path=_PATH, body=Ack),
    responses=replies(AckPage) | NO_CURSOR | WITH_BODY,
)
async def acked(request: Request[Any, Any, Any]) -> AckPage:
    """Note that a consumer is done with events that it leased; durable when this returns."""
    service, access, name = Service.of(request), access_of(request), _name(request)
    whose = read_query(request, CursorQuery).owner
    body = await read_body(request, Ack)
    known = known_cursor(service, access, name, whose=whose)
    group = service.groups.find(known.id)
    if group is None:
        # Nobody has leased anything lately: what is not acked by now comes again.
        return AckPage(known.sequence, [each for each in body.sequences if not _done(known, each)])
    done = await group.ack(body.lease, body.sequences)
    return AckPage(done.cursor.sequence, done.lost)


async def _group(service: Service, access: Access, name: str, query: LeaseQuery) -> Group:
    permissions, filter = Permissions.of(access), request_filter(service, access, query)
    format = request_format(service, query.format, query.operations)
    if isinstance(format, StreamFormat):
        message = (
            f"events of format {query.format} stand for no single row, so nobody can lease them"
        )
        raise invalid_parameter("format", query.format, message)
    subscription = LeaseSubscription(
        format, filter, Permissions(permissions.tables, permissions.tenant)
    )
    groups, whose = service.groups, query.owner
    async with groups.turn(known_cursor(service, access, name, whose=whose).id):
        known = known_cursor(service, access, name, whose=whose)  # it may be gone by now
        group = groups.reading(known.id, subscription)
        if group is not None:
            return group
        if groups.leases(known.id):
            message = f"the consumers of cursor {name!r} ask for another format or filter"
            hint = "All consumers of a cursor must ask for the same."
            raise RequestRefused(409, Problem("other_question", message, hint=hint))
        # An ack may be on its way to the disk: what the next group begins with is read after it.
        await groups.forget(known.id)
        return groups.begin(known_cursor(service, access, name, whose=whose), subscription)


def _expect_forward(service: Service, known: Cursor, body: CursorPut) -> None:
    if body.force:
        return
    if body.sequence < known.sequence:
        message = f"cursor {known.name!r} is at {known.sequence} and goes back only with force"
        raise RequestRefused(409, Problem("cursor_ahead", message))
    if service.groups.leases(known.id):
        message = f"consumers hold leases of cursor {known.name!r}"
        hint = "Ack what is leased, or put the cursor with force: the leases end then."
        raise RequestRefused(409, Problem("cursor_leased", message, hint=hint))


def _room(service: Service, access: Access) -> None:
    made_by = owner(access)
    if sum(each.owner == made_by for each in service.log.cursors()) >= MOST_CURSORS:
        message = f"there are {MOST_CURSORS} cursors of this key already; delete one first"
        raise RequestRefused(409, Problem("too_many_cursors", message))


def _done(known: Cursor, sequence: int) -> bool:
    return sequence <= max(known.sequence, known.reached) and sequence not in known.waiting


def _name(request: Request[Any, Any, Any]) -> str:
    name: str = read_value("name", request.path_params["name"], _NAME)
    return name


def _view(service: Service, known: Cursor) -> CursorView:
    return CursorView(
        known.name,
        known.sequence,
        service.log.latest_sequence,
        known.updated_at,
        known.owner,
        service.groups.leases(known.id),
    )
