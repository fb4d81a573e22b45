"""The log as it is stored, for readers that share the work: ranges, records, tables."""

import functools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.response import Stream

from ..change.block import BlockRows
from ..change.event import Table
from ..log import PIECE_HEAD, Log, Ranges
from .access import Access, access_of, whole
from .openapi import operation, replies
from .query import RangesQuery, RecordsQuery, TablesQuery, read_query
from .service import Service
from .threads import aside

RECORDS = "application/x-headrace-records"
BLOCKS = "application/x-headrace-blocks"  # the same with blocks, for those who accept it


class TableVersionList(msgspec.Struct, frozen=True):
    """Versions of tables' columns, oldest first."""

    epoch: str
    tables: list[Table]


@get(
    "/v1/ranges", guards=[whole], operation_class=operation(RangesQuery), responses=replies(Ranges)
)
async def ranges(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Where readers may cut the log: the ends of ranges, each the end of a transaction."""
    log = Service.of(request).log
    query = read_query(request, RangesQuery)
    find = functools.partial(_ranges, log, query)
    # Mostly there is nothing to look for.
    idle = query.after >= log.latest_sequence and query.since is None
    found = find() if idle else await aside(find)
    return Response(msgspec.json.encode(found), media_type="application/json")


def _ranges(log: Log, query: RangesQuery) -> Ranges:
    found = log.ranges(query.after, limit=query.limit, upto=query.upto, parts=query.parts)
    if query.since is None:
        return found
    return msgspec.structs.replace(found, since=log.since(query.since))


@get(
    "/v1/records",
    guards=[whole],
    operation_class=operation(RecordsQuery),
    responses=replies(bytes, media_type=RECORDS),
)
async def records(request: Request[Any, Any, Any]) -> Stream:
    """Changes as the log stores them, in pieces."""
    service = Service.of(request)
    query = read_query(request, RecordsQuery)
    latest = service.log.latest_sequence
    upto = latest if query.upto is None else min(query.upto, latest)
    headers = {
        "X-Headrace-Epoch": service.feed.epoch,
        "X-Headrace-Generation": service.feed.generation,
        "X-Headrace-Latest": str(latest),
    }
    if BLOCKS in request.headers.get("accept", ""):
        stored = _stored(service.log, query.after, upto, access_of(request))
        return Stream(stored, media_type=BLOCKS, headers=headers)
    pieces = _pieces(service.log, query.after, upto, access_of(request))
    return Stream(pieces, media_type=RECORDS, headers=headers)


@get(
    "/v1/tables",
    guards=[whole],
    operation_class=operation(TablesQuery),
    responses=replies(TableVersionList),
)
async def tables(request: Request[Any, Any, Any]) -> Response[bytes]:
    """What the columns of tables were, and are: one entry a version."""
    service = Service.of(request)
    query = read_query(request, TablesQuery)
    # In a thread: there may be thousands.
    document = await aside(_tables, service, query.after)
    return Response(document, media_type="application/json")


def _tables(service: Service, after: int) -> bytes:
    later = [table for table in service.log.tables() if table.version > after]
    return msgspec.json.encode(TableVersionList(service.feed.epoch, later))


async def _pieces(log: Log, after: int, upto: int, access: Access) -> AsyncIterator[bytes]:
    # What is trimmed meanwhile is left out; each piece says where it begins. Whoever gets too
    # little because the key has ended asks for the rest, and is refused.
    while access.valid() and (piece := await aside(log.piece, after, upto=upto)):
        after, count, records = piece.last, piece.count, [piece.records]
        yield piece.head
        del piece  # it may be large, and the client may take nothing for long
        yield records.pop()
        await access.pay(count)


async def _stored(log: Log, after: int, upto: int, access: Access) -> AsyncIterator[bytes]:
    """The same with blocks as they are, each with the number of its first row (4 bytes)."""
    while access.valid() and (part := await aside(log.stored, after, upto=upto)):
        first, count, after = part.first, part.count, part.last
        content = [part.packed() if isinstance(part, BlockRows) else part.records]
        del part  # it may be large, and the client may take nothing for long
        yield PIECE_HEAD.pack(first, count, len(content[0]))
        yield content.pop()
        await access.pay(count)
