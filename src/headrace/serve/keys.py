"""For the operator: API keys, made, listed, revoked and rotated."""

import asyncio
import logging
import time
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, Response, delete, get, post

from ..change.glob import MOST_GLOBS
from ..errors import ConfigError
from ..log import keys
from ..log.keys import IssuedKey, KeyLimits, KeyRequest, ListedKey, Scope
from .access import access_of, admin
from .openapi import WITH_BODY, operation, problem, replies
from .problems import Problem, RequestRefused, invalid_parameter
from .query import NoQuery, read_body, read_query
from .service import Service

logger = logging.getLogger(__name__)


def _described(**schema: Any) -> msgspec.Meta:
    """What /openapi.json says of a field; `keys` checks it, in its own words."""
    return msgspec.Meta(extra_json_schema=schema)


Plain = Annotated[str, _described(minLength=1, maxLength=keys.LONGEST_TEXT)]
Duration = Annotated[str, _described(pattern="^[0-9]{1,12}[smhd]$")]
Scopes = Annotated[tuple[Literal["cdc:read", "cdc:admin"], ...], _described(minItems=1)]
Rate = Annotated[float, msgspec.Meta(ge=keys.LEAST, le=keys.MOST)] | None


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a new key is to be good for."""

    name: Annotated[str, _described(maxLength=keys.LONGEST_TEXT)] = ""
    tables: Annotated[list[Plain], _described(maxItems=MOST_GLOBS)] = []  # none: all
    tenant: Plain | None = None
    scopes: Scopes = ("cdc:read",)
    expires: Duration | None = None  # such as 90d; None: when it is revoked
    connections: Annotated[int, msgspec.Meta(ge=1, le=keys.MOST)] | None = None
    requests_per_second: Rate = None
    events_per_second: Rate = None

    def wanted(self) -> KeyRequest:
        """The same, as it is made."""
        return KeyRequest(
            name=self.name,
            scopes=frozenset(map(Scope, self.scopes)),
            tables=tuple(self.tables),
            tenant=self.tenant,
            limits=KeyLimits(self.connections, self.requests_per_second, self.events_per_second),
            seconds=None if self.expires is None else _seconds("expires", self.expires),
        )


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the old key stays valid beside the new one."""

    overlap: Duration = "1h"


class KeyIssued(msgspec.Struct, frozen=True):
    """A new key, shown this once."""

    secret: str
    key: ListedKey


class KeyList(msgspec.Struct, frozen=True):
    """Every key, oldest first, also those that have ended."""

    keys: list[ListedKey]


@post(
    "/v1/keys",
    guards=[admin],
    operation_class=operation(NoQuery, body=NewKey),
    responses=replies(KeyIssued, status=201) | WITH_BODY,
)
async def create(request: Request[Any, Any, Any]) -> Response[KeyIssued]:
    """Make a key. The answer is the only place where it is ever shown."""
    read_query(request, NoQuery)
    wanted = (await read_body(request, NewKey)).wanted()
    try:
        # In a thread, as all that waits for the disk.
        made = await asyncio.to_thread(Service.of(request).keyring.create, wanted)
    except ConfigError as error:
        raise RequestRefused(400, Problem("invalid_body", str(error))) from error
    return _shown(request, "created", made)


@get("/v1/keys", guards=[admin], operation_class=operation(NoQuery), responses=replies(KeyList))
async def listed(request: Request[Any, Any, Any]) -> KeyList:
    """Every key, without what opens anything."""
    read_query(request, NoQuery)
    return KeyList([_listed(key) for key in Service.of(request).keyring.all()])


@delete(
    "/v1/keys/{id:str}",
    status_code=200,
    guards=[admin],
    operation_class=operation(NoQuery),
    responses=replies(ListedKey) | {404: problem("There is no such key.")},
)
async def revoke(request: Request[Any, Any, Any]) -> ListedKey:
    """End a key now, with every stream that lives by it."""
    read_query(request, NoQuery)
    id: str = request.path_params["id"]
    revoked = await asyncio.to_thread(Service.of(request).keyring.revoke, id)
    if revoked is None:
        raise _unknown(id)
    _note(request, "revoked", revoked.id)
    return _listed(revoked)


@post(
    "/v1/keys/{id:str}/rotate",
    guards=[admin],
    operation_class=operation(NoQuery, body=Rotation),
    responses=replies(KeyIssued, status=201) | WITH_BODY | {404: problem("There is no such key.")},
)
async def rotate(request: Request[Any, Any, Any]) -> Response[KeyIssued]:
    """Make a key with the rights of another, which stays valid for a while."""
    read_query(request, NoQuery)
    rotation = await read_body(request, Rotation)
    overlap = _seconds("overlap", rotation.overlap)
    id: str = request.path_params["id"]
    made = await asyncio.to_thread(Service.of(request).keyring.rotate, id, overlap=overlap)
    if made is None:
        raise _unknown(id)
    return _shown(request, f"rotated old={id}", made)


def _shown(request: Request[Any, Any, Any], what: str, made: IssuedKey) -> Response[KeyIssued]:
    _note(request, what, made.key.id)
    document = KeyIssued(made.secret, _listed(made.key))
    headers = {"Cache-Control": "no-store"}
    return Response(document, status_code=201, media_type="application/json", headers=headers)


def _note(request: Request[Any, Any, Any], what: str, id: str) -> None:
    by = access_of(request).key
    logger.info("key=%s %s by=%s", id, what, by.id if by else "this machine")


def _listed(key: keys.Key) -> ListedKey:
    return keys.listed(key, now=time.time_ns() // 1000)


def _unknown(id: str) -> RequestRefused:
    message = f"there is no valid key {id[:100]!r}"
    return RequestRefused(404, Problem("unknown_key", message, hint="GET /v1/keys lists them."))


def _seconds(parameter: str, text: str) -> float:
    try:
        return keys.seconds(text)
    except ConfigError as error:
        raise invalid_parameter(parameter, text, str(error)) from error
