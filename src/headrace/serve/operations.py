"""For the operator: sources, copying again, health, metrics."""

import asyncio
from typing import Any

import msgspec
from litestar import Request, Response, get, post

from ..errors import TableUnknown
from ..metrics import MEDIA_TYPE, Facts, Told, expose
from ..sinks import report
from ..sources import Status
from .access import OPEN, Access, access_of, admin, tells_all, whole
from .asked import may
from .body import read_body
from .health import HealthReport, Verdict
from .openapi import WITH_BODY, answers, asks, problem
from .problems import Problem, Refused
from .query import NoQuery, read_query
from .service import Service


class SourceList(msgspec.Struct, frozen=True):
    """Every source, in the order of the config."""

    sources: list[Status]


class CopyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tables to copy again; none: all."""

    tables: list[str] = []


class CopyAccepted(msgspec.Struct, frozen=True):
    """The copy begins as soon as the batch at hand is stored."""

    source: str
    tables: list[str]


_NO_COPY = {
    404: problem("There is no such source, or it has no such table."),
    409: problem("This server does not capture its sources."),
}


@get("/v1/sources", guards=[whole], operation_class=asks(NoQuery), responses=answers(SourceList))
async def sources(request: Request[Any, Any, Any]) -> SourceList:
    """How every source is doing."""
    service = Service.of(request)
    read_query(request, NoQuery)
    return SourceList(service.statuses())


@post(
    "/v1/sources/{name:str}/snapshot",
    status_code=202,
    guards=[admin],
    operation_class=asks(NoQuery, body=CopyRequest),
    responses=answers(CopyAccepted, status=202) | WITH_BODY | _NO_COPY,
)
async def snapshot(request: Request[Any, Any, Any]) -> CopyAccepted:
    """Copy tables of a source again."""
    service = Service.of(request)
    read_query(request, NoQuery)
    asked = await read_body(request, CopyRequest)
    name: str = request.path_params["name"]
    known = [status.source for status in service.statuses()]
    if name not in known:
        message = f"there is no source called {name!r}"
        raise Refused(404, Problem("unknown_source", message, known=known))
    if service.copy_again is None:
        raise Refused(409, Problem("not_capturing", "this server does not capture its sources"))
    # In a thread: it may wait for the batch at hand.
    try:
        await asyncio.to_thread(service.copy_again, name, asked.tables)
    except TableUnknown as error:
        raise Refused(404, Problem("unknown_table", str(error), hint=error.hint)) from error
    return CopyAccepted(name, asked.tables)


@get(
    "/health",
    opt=OPEN,
    operation_class=asks(NoQuery),
    responses=answers(HealthReport) | answers(HealthReport, status=503),
)
async def health(request: Request[Any, Any, Any]) -> Response[HealthReport]:
    """Whether capture keeps up; 503 when it does not."""
    service = Service.of(request)
    read_query(request, NoQuery)
    report = service.health.report(service.statuses(), service.log)
    status = 503 if report.status is Verdict.UNHEALTHY else 200
    told = report if tells_all(request) else HealthReport(report.status)
    return Response(told, status_code=status, media_type="application/json")


@get(
    "/metrics",
    guards=[whole],
    operation_class=asks(NoQuery),
    responses=answers(str, media_type=MEDIA_TYPE),
)
async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """How everything is doing, in Prometheus' text format."""
    service, access = Service.of(request), access_of(request)
    read_query(request, NoQuery)
    # In a thread: it reads a file, and perhaps many cursors.
    exposed = await asyncio.to_thread(_exposed, service, access)
    return Response(exposed, media_type=MEDIA_TYPE)


def _exposed(service: Service, access: Access) -> bytes:
    statuses, cursors = service.statuses(), service.log.cursors()
    place = service.settings.pipeline
    facts = Facts(
        health=service.health.report(statuses, service.log).status,
        log=service.log.stats(),
        sources=statuses,
        cursors=cursors,
        named=[cursor for cursor in cursors if may(access, cursor)],
        waiting_subscriptions=service.feed.waiting,
        pipeline=Told(place=place, seen=report.read(place.folder)) if place else None,
    )
    return expose(facts)
