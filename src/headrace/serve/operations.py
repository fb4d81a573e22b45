"""For the operator: sources, new snapshots, health, metrics."""

import asyncio
import logging
import shutil
from typing import Any

import msgspec
from litestar import Request, Response, get, post

from ..errors import TableUnknown
from ..log import Log
from ..metrics import (
    MEDIA_TYPE,
    LogCounts,
    Measurements,
    PipelineState,
    ServedCounts,
    expose,
)
from ..sinks import report
from ..sources import Status
from .access import OPEN, Access, access_of, admin, sees_all, whole
from .health import HealthReport, HealthStatus
from .openapi import WITH_BODY, operation, problem, replies
from .problems import Problem, RequestRefused
from .query import NoQuery, read_body, read_query
from .request import may
from .service import Service
from .threads import aside

logger = logging.getLogger(__name__)


class SourceList(msgspec.Struct, frozen=True):
    """Every source, in the order of the config."""

    sources: list[Status]


class SnapshotRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tables to snapshot again; none: all."""

    tables: list[str] = []


class SnapshotAccepted(msgspec.Struct, frozen=True):
    """The snapshot begins as soon as the batch at hand is stored."""

    source: str
    tables: list[str]


_NO_SNAPSHOT = {
    404: problem("There is no such source, or it has no such table."),
    409: problem("This server does not capture its sources."),
}


@get(
    "/v1/sources", guards=[whole], operation_class=operation(NoQuery), responses=replies(SourceList)
)
async def sources(request: Request[Any, Any, Any]) -> SourceList:
    """How every source is doing."""
    service = Service.of(request)
    read_query(request, NoQuery)
    return SourceList(service.statuses())


@post(
    "/v1/sources/{name:str}/snapshot",
    status_code=202,
    guards=[admin],
    operation_class=operation(NoQuery, body=SnapshotRequest),
    responses=replies(SnapshotAccepted, status=202) | WITH_BODY | _NO_SNAPSHOT,
)
async def snapshot(request: Request[Any, Any, Any]) -> SnapshotAccepted:
    """Take a new snapshot of tables."""
    service = Service.of(request)
    read_query(request, NoQuery)
    body = await read_body(request, SnapshotRequest)
    name: str = request.path_params["name"]
    known = [status.source for status in service.statuses()]
    if name not in known:
        message = f"there is no source called {name!r}"
        raise RequestRefused(404, Problem("unknown_source", message, known=known))
    if service.copy_again is None:
        raise RequestRefused(
            409, Problem("not_capturing", "this server does not capture its sources")
        )
    # In a thread: it may wait for the batch at hand.
    try:
        await asyncio.to_thread(service.copy_again, name, body.tables)
    except TableUnknown as error:
        raise RequestRefused(404, Problem("unknown_table", str(error), hint=error.hint)) from error
    return SnapshotAccepted(name, body.tables)


@get(
    "/health",
    opt=OPEN,
    operation_class=operation(NoQuery),
    responses=replies(HealthReport) | replies(HealthReport, status=503),
)
async def health(request: Request[Any, Any, Any]) -> Response[HealthReport]:
    """Whether every source and sink works; 503 when a source does not."""
    service = Service.of(request)
    read_query(request, NoQuery)
    report = service.health.report(service.statuses(), service.log, _pipeline(service))
    status = 503 if report.status is HealthStatus.UNHEALTHY else 200
    shown = report if sees_all(request) else HealthReport(report.status)
    return Response(shown, status_code=status, media_type="application/json")


class Probe(msgspec.Struct, frozen=True):
    """The answer to a probe."""

    status: str
    reason: str = ""


@get("/livez", opt=OPEN, operation_class=operation(NoQuery), responses=replies(Probe))
async def livez(request: Request[Any, Any, Any]) -> Probe:
    """Whether the process answers, whatever else does not work."""
    read_query(request, NoQuery)
    return Probe("alive")


@get(
    "/readyz",
    opt=OPEN,
    operation_class=operation(NoQuery),
    responses=replies(Probe) | replies(Probe, status=503),
)
async def readyz(request: Request[Any, Any, Any]) -> Response[Probe]:
    """Whether the log is served; 503 once the server is stopping or cannot read the log."""
    service = Service.of(request)
    read_query(request, NoQuery)
    reason = _unready(service)
    probe = Probe("not ready", reason) if reason else Probe("ready")
    return Response(probe, status_code=503 if reason else 200, media_type="application/json")


def _unready(service: Service) -> str:
    if service.feed.closing:
        return "the server is stopping"
    try:
        service.log.stats()
    except Exception:
        # Whatever RocksDB raises; the details are no concern of whoever probes.
        logger.exception("the log cannot be read")
        return "the log cannot be read"
    return ""


@get(
    "/metrics",
    guards=[whole],
    operation_class=operation(NoQuery),
    responses=replies(str, media_type=MEDIA_TYPE),
)
async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """How everything is doing, in Prometheus' text format."""
    service, access = Service.of(request), access_of(request)
    read_query(request, NoQuery)
    # In a thread: it reads a file, and perhaps many cursors.
    exposed = await aside(_exposed, service, access)
    return Response(exposed, media_type=MEDIA_TYPE)


def _exposed(service: Service, access: Access) -> bytes:
    statuses, cursors, pipeline = service.statuses(), service.log.cursors(), _pipeline(service)
    judged = service.health.report(statuses, service.log, pipeline)
    measured = Measurements(
        health=judged.status,
        log=service.log.stats(),
        sources=statuses,
        cursors=cursors,
        named=[cursor for cursor in cursors if may(access, cursor)],
        waiting_subscriptions=service.feed.waiting,
        counts=_log_counts(service.log, len(service.retention.seen.reasons)),
        requests=ServedCounts(
            http=service.requests.http,
            http_seconds=service.requests.http_seconds,
            grpc=service.requests.grpc,
            grpc_seconds=service.requests.grpc_seconds,
            delivered=service.feed.delivered,
        ),
        pipeline=pipeline,
        sink_ages=judged.sink_ages,
    )
    return expose(measured)


def _log_counts(log: Log, warnings: int) -> LogCounts:
    disk = shutil.disk_usage(log.path)
    # A copy: the log goes on counting.
    counted = list(log.appended.changes.items())
    return LogCounts(
        changes=[(log.table(version), op, count) for (version, op), count in counted],
        latency=dict(log.appended.latency),
        warnings=warnings,
        disk_free=disk.free,
        disk_size=disk.total,
    )


def _pipeline(service: Service) -> PipelineState | None:
    folder = service.settings.pipeline
    if folder is None:
        return None
    found = report.with_verified(report.read(folder.folder), folder.folder_of)
    return PipelineState(folder=folder, report=found)
