"""Who may ask: until there are keys, programs on this machine."""

from typing import Any
from urllib.parse import urlsplit

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from .problems import Problem, Refused
from .service import Service
from .settings import is_loopback

Connection = ASGIConnection[Any, Any, Any, Any]


def known_host(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse a foreign Host: a web page whose name was pointed at this machine sends its own."""
    settings = Service.of(connection).settings
    host = connection.headers.get("host", "")
    if not settings.allow_remote and not is_loopback(_hostname(host)):
        message = f"the server answers only to loopback names, not to Host {host[:200]!r}"
        hint = "Ask for http://127.0.0.1, or set server.allow_remote (docs/deployment.md)."
        raise Refused(403, Problem("forbidden_host", message, hint=hint))


def same_origin(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse what another site's page asks a browser to do: browsers then send that Origin."""
    origin = connection.headers.get("origin")
    if origin is not None and _authority(origin) != connection.headers.get("host", "").lower():
        message = f"pages of {origin[:200]!r} may not use this server"
        raise Refused(403, Problem("forbidden_origin", message))


def no_body(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse a GET with a body: nothing would ever read it."""
    headers = connection.headers
    if connection.scope.get("method") == "GET" and (
        headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    ):
        raise Refused(400, Problem("unexpected_body", "a GET request takes no body"))


def changefeed_enabled(connection: Connection, route: BaseRouteHandler) -> None:
    """Refuse the changefeed where it is switched off."""
    if not Service.of(connection).settings.enabled:
        hint = "Set cdc.enabled to true."
        raise Refused(404, Problem("not_enabled", "the changefeed is switched off", hint=hint))


def _hostname(host: str) -> str:
    """The Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""  # no origin a browser would send; equal to no host
