"""For the operator: one source or sink paused, resumed or begun again, while the rest goes on."""

import asyncio
import logging
from typing import Any

import msgspec
from litestar import Request, get, post

from ..errors import ConfigError
from ..sinks.report import PipelineOverview
from ..sinks.requests import Beginning
from .access import access_of, admin, whole
from .openapi import WITH_BODY, operation, problem, replies
from .problems import Problem, RequestRefused
from .query import NoQuery, read_body, read_query
from .service import Control, PartKind, Service

logger = logging.getLogger(__name__)


class PauseState(msgspec.Struct, frozen=True):
    """Whether a source or sink is paused from now on."""

    name: str
    kind: PartKind
    paused: bool


class SourceReset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let a source begin again; with `dry_run` only say what that does."""

    dry_run: bool = False


class SinkReset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let a sink begin again, with the log's first change or with the next one."""

    beginning: Beginning = msgspec.field(default="start", name="from")
    dry_run: bool = False


class ResetEffect(msgspec.Struct, frozen=True):
    """What a reset does; `begun`: it is done now, or as soon as the pipeline runs."""

    name: str
    kind: PartKind
    effect: str
    begun: bool


class Reload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take up the config file as it is now; with `dry_run` only say what that changes."""

    dry_run: bool = False


class ReloadResult(msgspec.Struct, frozen=True):
    """What the config file changes, a line each; `restart`: what a restart alone takes up."""

    changes: list[str]
    restart: list[str]
    taken_up: bool


_REFUSED = {
    404: problem("There is no such source or sink."),
    409: problem("This server captures nothing, or this one cannot begin again."),
}


def _pausing(path: str) -> post:
    """A route that pauses or resumes."""
    return post(
        path,
        status_code=200,
        guards=[admin],
        operation_class=operation(NoQuery),
        responses=replies(PauseState) | _REFUSED,
    )


def _resetting(path: str, body: type[msgspec.Struct]) -> post:
    """A route that lets something begin again."""
    return post(
        path,
        status_code=200,
        guards=[admin],
        operation_class=operation(NoQuery, body=body),
        responses=replies(ResetEffect) | WITH_BODY | _REFUSED,
    )


@_pausing("/v1/sources/{name:str}/pause")
async def pause_source(request: Request[Any, Any, Any]) -> PauseState:
    """Let go of a source's database, until it is resumed."""
    return await _pause(request, PartKind.SOURCE)


@_pausing("/v1/sources/{name:str}/resume")
async def resume_source(request: Request[Any, Any, Any]) -> PauseState:
    """Let a source go on, after a pause or after it has halted."""
    return await _resume(request, PartKind.SOURCE)


@_resetting("/v1/sources/{name:str}/reset", SourceReset)
async def reset_source(request: Request[Any, Any, Any]) -> ResetEffect:
    """Let a source begin again, with a new snapshot of all its tables."""
    body = await read_body(request, SourceReset)
    return await _reset(request, PartKind.SOURCE, SinkReset(dry_run=body.dry_run))


@get(
    "/v1/sinks",
    guards=[whole],
    operation_class=operation(NoQuery),
    responses=replies(PipelineOverview) | _REFUSED,
)
async def sinks(request: Request[Any, Any, Any]) -> PipelineOverview:
    """How every sink is doing."""
    read_query(request, NoQuery)
    return await asyncio.to_thread(_control(request).sinks)


@_pausing("/v1/sinks/{name:str}/pause")
async def pause_sink(request: Request[Any, Any, Any]) -> PauseState:
    """Stop a sink between two batches, until it is resumed."""
    return await _pause(request, PartKind.SINK)


@_pausing("/v1/sinks/{name:str}/resume")
async def resume_sink(request: Request[Any, Any, Any]) -> PauseState:
    """Let a sink go on, after a pause or after it has halted."""
    return await _resume(request, PartKind.SINK)


@_resetting("/v1/sinks/{name:str}/reset", SinkReset)
async def reset_sink(request: Request[Any, Any, Any]) -> ResetEffect:
    """Let a sink begin again."""
    return await _reset(request, PartKind.SINK, await read_body(request, SinkReset))


@post(
    "/v1/reload",
    status_code=200,
    guards=[admin],
    operation_class=operation(NoQuery, body=Reload),
    responses=replies(ReloadResult) | WITH_BODY | {409: problem("The config cannot be used.")},
)
async def reload(request: Request[Any, Any, Any]) -> ReloadResult:
    """Read the config file again, and take up what differs."""
    read_query(request, NoQuery)
    wanted = await read_body(request, Reload)
    try:
        found = await asyncio.to_thread(_control(request).reload, dry_run=wanted.dry_run)
    except ConfigError as error:
        refusal = Problem("invalid_config", str(error), hint=error.hint or None)
        raise RequestRefused(409, refusal) from error
    if not wanted.dry_run:
        logger.info("config reloaded changes=%d by=%s", len(found.lines()), _operator(request))
    return ReloadResult(found.lines(), [each.name for each in found.restart], not wanted.dry_run)


async def _pause(request: Request[Any, Any, Any], kind: PartKind) -> PauseState:
    control, name = _named(request, kind)
    await asyncio.to_thread(control.pause, kind, name)
    return _noted(request, PauseState(name, kind, paused=True))


async def _resume(request: Request[Any, Any, Any], kind: PartKind) -> PauseState:
    control, name = _named(request, kind)
    await asyncio.to_thread(control.resume, kind, name)
    return _noted(request, PauseState(name, kind, paused=False))


async def _reset(request: Request[Any, Any, Any], kind: PartKind, wanted: SinkReset) -> ResetEffect:
    control, name = _named(request, kind)
    try:
        effect = await asyncio.to_thread(
            control.reset, kind, name, wanted.beginning, dry_run=wanted.dry_run
        )
    except ConfigError as error:
        refusal = Problem("no_reset", str(error), hint=error.hint or None)
        raise RequestRefused(409, refusal) from error
    if not wanted.dry_run:
        logger.info("%s=%s reset by=%s", kind, name, _operator(request))
    return ResetEffect(name, kind, effect, begun=not wanted.dry_run)


def _noted(request: Request[Any, Any, Any], state: PauseState) -> PauseState:
    what = "paused" if state.paused else "resumed"
    logger.info("%s=%s %s by=%s", state.kind, state.name, what, _operator(request))
    return state


def _operator(request: Request[Any, Any, Any]) -> str:
    by = access_of(request).key
    return by.id if by else "this machine"


def _control(request: Request[Any, Any, Any]) -> Control:
    control = Service.of(request).control
    if control is None:
        refusal = Problem("not_capturing", "this server neither captures nor runs sinks")
        raise RequestRefused(409, refusal)
    return control


def _named(request: Request[Any, Any, Any], kind: PartKind) -> tuple[Control, str]:
    read_query(request, NoQuery)
    control, name = _control(request), request.path_params["name"]
    known = control.names(kind)
    if name not in known:
        message = f"there is no {kind} called {name!r}"
        raise RequestRefused(404, Problem(f"unknown_{kind}", message, known=known))
    return control, name
