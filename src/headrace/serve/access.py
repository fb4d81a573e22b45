"""Authentication and permissions: a key for each client, or none on this machine."""

import asyncio
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote_plus

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import ASGIApp, Receive, Send
from litestar.types import Scope as RequestScope

from ..change.event import Table
from ..log.keys import OPERATOR, Key, Scope
from ._http import EXTENSION
from .keyring import LOOK_SECONDS, End, Keyring
from .origins import authority
from .parameters import MOST_PARAMETERS
from .problems import Problem, RequestRefused
from .service import Service
from .settings import is_loopback

Connection = ASGIConnection[Any, Any, Any, Any]

_LIKE_A_KEY = re.compile(r"cdc_[0-9a-f]{16}", re.IGNORECASE)  # also a part of one
_KEY_NAMES = {"api_key", "apikey", "api-key", "x-api-key", "access_token", "authorization"}


# --- what a client may ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """What one client may do; without a key, as a program on this machine, everything."""

    key: Key | None = None
    _keyring: Keyring | None = field(default=None, repr=False, compare=False)

    @property
    def admin(self) -> bool:
        """Whether it may change things: trim, copy again, move others' cursors, make keys."""
        return self.key is None or Scope.ADMIN in self.key.scopes

    @property
    def tenant(self) -> str | None:
        """Whose rows it may see; None: everybody's."""
        return None if self.key is None else self.key.tenant

    @property
    def whole(self) -> bool:
        """Whether it may see every table, and everybody's rows."""
        return self.key is None or not (self.key.tables or self.key.tenant is not None)

    def allows(self, table: Table) -> bool:
        """Whether it may see a table."""
        return self.key is None or self.key.allows(table)

    def valid(self) -> bool:
        """Whether it still holds now: a key may expire, or be revoked."""
        return self.key is None or self._keyring is None or self._keyring.valid(self.key)

    def lasting(self) -> bool:
        """Whether whoever holds it still has a valid key, if only one that it was rotated to."""
        return (
            self.key is None
            or self._keyring is None
            or self._keyring.holds_valid_key(self.key.holder)
        )

    def admit(self) -> None:
        """Count a request; RequestRefused (429) when the key has used up its limits."""
        if self.key is None or self._keyring is None:
            return
        limiter = self._keyring.limiter
        wait = limiter.request(self.key) or limiter.spend(self.key, 0)
        if wait:
            raise rate_limited("this API key asks for more than its limits allow", wait)

    @contextmanager
    def connected(self, end: End | None = None) -> Iterator[None]:
        """Count a connection for as long as it stands; RequestRefused (429): too many.

        `end` is called when the key ends before it: the client may take nothing, so that whoever
        sends to it never comes to look at the key.
        """
        if self.key is None or self._keyring is None:
            yield
            return
        limiter, connections = self._keyring.limiter, self._keyring.connections
        # A client may ask again on a connection before the answer that it has is done with here.
        known = end is not None and connections.holds(self.key, end)
        if not known and not limiter.connect(self.key):
            most = self.key.limits.connections
            raise rate_limited(f"this API key may have {most} connections at once", 1.0)
        if end is not None:
            connections.enter(self.key, end)
        try:
            yield
        finally:
            if end is not None:
                connections.leave(self.key, end)
            if end is None or not connections.holds(self.key, end):
                limiter.disconnect(self.key)

    def spend(self, events: int) -> float:
        """Count events that were sent; returns the seconds to wait before sending more."""
        if self.key is None or self._keyring is None:
            return 0.0
        return self._keyring.limiter.spend(self.key, events)

    async def pay(self, events: int) -> None:
        """Count events that were sent, and wait until more may be sent, or the key has ended."""
        wait = self.spend(events)
        while wait > 0 and self.valid():
            await asyncio.sleep(min(wait, LOOK_SECONDS))
            wait -= LOOK_SECONDS


def authenticate(service: Service, secret: str | None) -> Access:
    """The access of a key; RequestRefused (401) alike for missing, unknown and ended keys."""
    if secret is None and not service.settings.key_required:
        return Access()
    key = service.keyring.find(secret or "")
    if key is None:
        raise unauthenticated()
    return Access(key, service.keyring)


def access_of(connection: Connection) -> Access:
    """What the client of a request may, by the key in its headers."""
    state = connection.scope["state"]
    if "access" not in state:
        state["access"] = authenticate(Service.of(connection), _presented(connection))
    access: Access = state["access"]
    return access


def unauthenticated() -> RequestRefused:
    """The one answer to every key that opens nothing."""
    message = "a valid API key is needed; this one is missing, unknown or has ended"
    hint = "Send it in the header X-API-Key, or as a bearer token; see docs/deployment.md."
    headers = {"WWW-Authenticate": "Bearer"}
    return RequestRefused(401, Problem("unauthenticated", message, hint=hint), headers=headers)


def rate_limited(message: str, wait: float) -> RequestRefused:
    """A key wants more than it may have now."""
    headers = {"Retry-After": str(math.ceil(wait))}
    return RequestRefused(429, Problem("rate_limited", message), headers=headers)


# --- guards of routes ----------------------------------------------------------------------------
# None of them waits for anything. They are coroutines because Litestar would call functions in a
# thread, where they would wait for whatever reads much at the moment.

OPEN = {"open": True}  # `opt` of a route that checks the key itself, or needs none


async def admitted(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse whoever has no valid key where one is needed, or has used it up for now."""
    if not route.opt.get("open"):
        access = access_of(connection)
        access.admit()
        # On the event loop, where those who are connected are counted and looked after.
        extensions: Any = connection.scope.get("extensions") or {}
        end = extensions.get(EXTENSION, {}).get("let_go")
        connection.scope["state"]["held"].enter_context(access.connected(end))


async def admin(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse a key that may only read."""
    if not access_of(connection).admin:
        message = f"this API key may not do that: it lacks the scope {Scope.ADMIN}"
        raise RequestRefused(403, Problem("permission_denied", message))


async def operator(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse everybody but the commands of this machine."""
    if (key := access_of(connection).key) is None or key.id != OPERATOR:
        message = "only the commands of the server's machine may do that, as the server's user"
        raise RequestRefused(403, Problem("permission_denied", message))


async def whole(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse a key of some tables or of a tenant: this route shows everything."""
    if not access_of(connection).whole:
        message = "this route shows all tables and tenants, and this API key has only some"
        hint = "Ask /v1/changes, which leaves out the others; or use a key without such limits."
        raise RequestRefused(403, Problem("permission_denied", message, hint=hint))


def sees_all(connection: Connection) -> bool:
    """Whether a client of an open route may know of everything."""
    keyless = Service.of(connection).settings.key_required and _presented(connection) is None
    return not keyless and access_of(connection).whole


def holding(app: ASGIApp) -> ASGIApp:
    """Let go, when an answer has ended in whatever way, of what a guard has taken for it."""

    async def call(scope: RequestScope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            scope["state"]["held"] = held
            await app(scope, receive, send)

    return call


async def no_key_in_url(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse a key in the URL: URLs are written down by proxies, browsers and logs."""
    raw = connection.scope["query_string"].decode("latin-1")
    url = unquote_plus(raw) + connection.scope["path"]
    # More parameters than any route takes: the query is refused when it is read.
    few = raw if raw.count("&") < MOST_PARAMETERS else ""
    names = {name.lower() for name, _ in parse_qsl(few, keep_blank_values=True)}
    if _LIKE_A_KEY.search(url) or names & _KEY_NAMES:
        hint = "Send it in the header X-API-Key, or as a bearer token; make a new key: this one "
        hint += "may have been written down on its way."
        raise RequestRefused(
            400, Problem("key_in_url", "an API key must not be in the URL", hint=hint)
        )


async def known_host(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse a foreign Host: a web page whose name was pointed at this machine sends its own."""
    settings = Service.of(connection).settings
    host = connection.headers.get("host", "")
    # Where a key is needed, such a page gets nothing: it has none.
    anywhere = settings.allow_remote or settings.key_required
    if not anywhere and not is_loopback(_hostname(host)):
        message = f"the server answers only to loopback names, not to Host {host[:200]!r}"
        hint = "Ask for http://127.0.0.1, or set server.allow_remote (docs/deployment.md)."
        raise RequestRefused(403, Problem("forbidden_host", message, hint=hint))


async def same_origin(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse what another site's page asks a browser to do: browsers then send that Origin."""
    origin = connection.headers.get("origin")
    if origin is None or authority(origin) == connection.headers.get("host", "").lower():
        return
    if not Service.of(connection).origins.allows(origin):
        message = f"pages of {origin[:200]!r} may not use this server"
        hint = "Name the origin in server.allowed_origins if you trust its pages."
        raise RequestRefused(403, Problem("forbidden_origin", message, hint=hint))


async def no_body(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse a GET with a body: nothing would ever read it."""
    headers = connection.headers
    if connection.scope.get("method") == "GET" and (
        headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    ):
        raise RequestRefused(400, Problem("unexpected_body", "a GET request takes no body"))


async def changefeed_enabled(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse the changefeed where it is switched off."""
    if not Service.of(connection).settings.enabled:
        hint = "Set cdc.enabled to true."
        raise RequestRefused(
            404, Problem("not_enabled", "the changefeed is switched off", hint=hint)
        )


def _presented(connection: Connection) -> str | None:
    """The key in the headers; None: there is none."""
    headers = connection.headers
    given = headers.getall("x-api-key", [])
    for value in headers.getall("authorization", []):
        # A proxy's own scheme, such as Basic, is none of ours.
        scheme, _, token = value.partition(" ")
        if scheme.lower() == "bearer":
            given.append(token.strip())
    if len(given) > 1:
        message = "the API key must be given once: in X-API-Key, or as a bearer token"
        raise RequestRefused(400, Problem("ambiguous_key", message))
    return given[0] if given else None


def _hostname(host: str) -> str:
    """The Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
