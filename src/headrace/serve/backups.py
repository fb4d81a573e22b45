"""Setting everything aside for a backup, which a command of this machine then copies."""

import asyncio
from typing import Any

import msgspec
from litestar import Request, post

from ..log import backup
from .access import operator
from .openapi import operation, problem, replies
from .problems import Problem, RequestRefused
from .query import NoQuery, read_query
from .service import Service

_REFUSED = {
    403: problem("Only the commands of the server's machine may do this."),
    409: problem("This server has no folders to copy."),
}


class StagedBackup(msgspec.Struct, frozen=True):
    """Where everything was set aside; whoever copies the folder removes it."""

    folder: str
    latest_sequence: int


@post(
    "/v1/backup",
    status_code=200,
    guards=[operator],
    operation_class=operation(NoQuery),
    responses=replies(StagedBackup) | _REFUSED,
)
async def stage(request: Request[Any, Any, Any]) -> StagedBackup:
    """Set aside the log and what sinks note of it, as they are now, for `headrace backup`."""
    service = Service.of(request)
    read_query(request, NoQuery)
    folders = service.settings.backup
    if folders is None:
        raise RequestRefused(409, Problem("no_folders", "this server has no folders to copy"))
    # In a thread: it waits for the disk, and for its turn to write.
    staged = await asyncio.to_thread(backup.stage, service.log, folders)
    return StagedBackup(str(staged), service.log.latest_sequence)
