"""The server's routes."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar, Request, Response, Router
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.routes import HTTPRoute

from ..errors import HeadraceError
from ..formats.catalogue import Formats
from ..log import Log
from ..log.keys import Key
from ..sources import Status
from . import (
    access,
    backups,
    changefeed,
    changes,
    control,
    cursors,
    keys,
    openapi,
    operations,
    problems,
    records,
    schemas,
)
from .feed import LogFeed
from .groups import Groups
from .health import HealthCheck
from .keyring import Keyring
from .query import LARGEST_BODY
from .retention import retention_of
from .service import Service
from .settings import ServerSettings, exposure
from .ws import route as ws

logger = logging.getLogger(__name__)


def create_app(
    log: Log,
    *,
    statuses: Callable[[], list[Status]],
    copy_again: Callable[[str, list[str]], None] | None,
    settings: ServerSettings,
    formats: Formats | None = None,
    operator: Key | None = None,
) -> Litestar:
    """The server of a log, its sources being captured by this process.

    `operator` is a key that is in no log: this process's own commands have it.
    """
    formats = formats or Formats()
    feed = LogFeed(log, formats.model)
    log.listen(feed.announce)
    retention = retention_of(log, settings)
    service = Service(
        log=log,
        retention=retention,
        feed=feed,
        statuses=statuses,
        copy_again=copy_again,
        settings=settings,
        health=HealthCheck(settings, room=lambda: retention.seen),
        formats=formats,
        keyring=Keyring(log, operator=operator),
        groups=Groups(feed, log),
    )

    @asynccontextmanager
    async def following(app: Litestar) -> AsyncIterator[None]:
        feed.open()
        if settings.key_required and not service.keyring.usable:
            logger.warning(
                "host=%s needs API keys and there is none, so every client is refused; "
                "`headrace keys create` makes one",
                settings.host,
            )
        for warning in exposure(settings):
            logger.warning("host=%s %s", settings.host, warning)
        try:
            yield
        finally:
            feed.close()

    return Litestar(
        route_handlers=[
            Router(
                "/",
                guards=[access.changefeed_enabled],
                route_handlers=[
                    changefeed.poll,  # GET  /changefeed
                    changefeed.stream,  # GET  /changefeed/stream
                    changefeed.stats,  # GET  /changefeed/stats
                    changefeed.retention,  # POST /changefeed/retention
                ],
            ),
            changes.changes,  # GET  /v1/changes
            changes.changes_stream,  # GET  /v1/changes/stream
            ws.stream,  # GET  /v1/stream, upgraded to a WebSocket
            ws.upgrade,  # GET  /v1/stream, not upgraded
            cursors.listed,  # GET  /v1/cursors
            cursors.cursor,  # GET  /v1/cursors/{name}
            cursors.moved,  # PUT  /v1/cursors/{name}
            cursors.dropped,  # DELETE /v1/cursors/{name}
            cursors.lease,  # POST /v1/cursors/{name}/lease
            cursors.acked,  # POST /v1/cursors/{name}/ack
            records.ranges,  # GET  /v1/ranges
            records.records,  # GET  /v1/records
            records.tables,  # GET  /v1/tables
            schemas.listed,  # GET  /schemas
            schemas.schema,  # GET  /schemas/{file}
            operations.sources,  # GET  /v1/sources
            operations.snapshot,  # POST /v1/sources/{name}/snapshot
            control.pause_source,  # POST /v1/sources/{name}/pause
            control.resume_source,  # POST /v1/sources/{name}/resume
            control.reset_source,  # POST /v1/sources/{name}/reset
            control.sinks,  # GET  /v1/sinks
            control.pause_sink,  # POST /v1/sinks/{name}/pause
            control.resume_sink,  # POST /v1/sinks/{name}/resume
            control.reset_sink,  # POST /v1/sinks/{name}/reset
            control.reload,  # POST /v1/reload
            backups.stage,  # POST /v1/backup
            operations.health,  # GET  /health
            operations.livez,  # GET  /livez
            operations.readyz,  # GET  /readyz
            operations.metrics,  # GET  /metrics
            keys.create,  # POST /v1/keys
            keys.listed,  # GET  /v1/keys
            keys.revoke,  # DELETE /v1/keys/{id}
            keys.rotate,  # POST /v1/keys/{id}/rotate
            # GET /openapi.json comes with `openapi_config`
        ],
        guards=[
            access.no_key_in_url,
            access.known_host,
            access.same_origin,
            access.no_body,
            access.admitted,
        ],
        middleware=[access.holding],
        before_request=_options,
        state=State({"service": service, "streams": ws.WebSocketStreams(service)}),
        lifespan=[following],
        exception_handlers={
            problems.RequestRefused: problems.refuse,
            HTTPException: problems.refuse_http,
            HeadraceError: problems.refuse_failed,
            Exception: problems.refuse_bug,
        },
        request_max_body_size=LARGEST_BODY,
        openapi_config=openapi.config(),
        plugins=[openapi.ArrayStructs()],
        logging_config=None,
    )


async def _options(request: Request[Any, Any, Any]) -> Response[None] | None:
    """Answer OPTIONS with every method of a path; Litestar knows of its first route's alone."""
    if request.method != "OPTIONS":
        return None
    path = request.scope["path_template"]
    routes = (route for route in request.app.routes if isinstance(route, HTTPRoute))
    methods = {method for route in routes if route.path_format == path for method in route.methods}
    return Response(None, status_code=204, headers={"Allow": ", ".join(sorted(methods))})
