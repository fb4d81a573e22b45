"""Browser pages of other origins: which may use the server, and how browsers learn it.

A browser runs whatever page its user opens, beside programs that may reach servers the page may
not. It names the page's origin, and shows the page only what the server allows for that origin.
"""

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from litestar.types import ASGIApp, Receive, Send

ASK_AGAIN_SECONDS = 600  # for a browser to remember what is allowed

_METHODS = b"GET, POST, PUT, DELETE"
_SENT = b"Accept, Authorization, Content-Type, Last-Event-ID, X-API-Key"
_SHOWN = (
    b"Retry-After, WWW-Authenticate, X-Headrace-Epoch, X-Headrace-Gap, X-Headrace-Gap-Reason, "
    b"X-Headrace-Latest, X-Headrace-Scanned"
)


class AllowedOrigins:
    """The origins of `server.allowed_origins`: exact, or every host below a name."""

    def __init__(self, allowed: Iterable[str]) -> None:
        written = [origin.lower() for origin in allowed]
        self._exact = frozenset(origin for origin in written if "*" not in origin)
        self._below = [tuple(origin.split("*")) for origin in written if "*" in origin]

    def __bool__(self) -> bool:
        return bool(self._exact or self._below)

    def allows(self, origin: str) -> bool:
        """Whether pages of an origin, as a browser names it, may use the server."""
        given = origin.lower()
        if given in self._exact:
            return True
        return any(
            given.startswith(scheme) and given.endswith(rest) and _is_host(given, scheme, rest)
            for scheme, rest in self._below
        )


def _is_host(origin: str, scheme: str, rest: str) -> bool:
    """Whether what stands for the star is the beginning of a host's name, and nothing else."""
    star = origin[len(scheme) : len(origin) - len(rest)]
    return bool(star) and all(part.isascii() and _is_label(part) for part in star.split("."))


def _is_label(part: str) -> bool:
    return part.replace("-", "").replace("_", "").isalnum()


def authority(origin: str) -> str:
    """Host and port of an origin; "": it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""  # no origin a browser would send


def sharing(app: ASGIApp, origins: AllowedOrigins) -> ASGIApp:
    """The app, which also tells browsers what pages of other origins may do (CORS)."""
    if not origins:
        return app

    async def call(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        origin: bytes = headers.get(b"origin", b"")
        allowed = bool(origin) and origins.allows(origin.decode("latin-1"))
        if allowed and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _answer_preflight(origin, headers, send)
            return

        async def shared(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(b"vary", b"Origin")]
                if allowed:
                    added += [
                        (b"access-control-allow-origin", origin),
                        (b"access-control-expose-headers", _SHOWN),
                    ]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await app(scope, receive, shared)

    return call


async def _answer_preflight(origin: bytes, headers: dict[bytes, bytes], send: Send) -> None:
    allowed = [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", _SENT),
        (b"access-control-max-age", b"%d" % ASK_AGAIN_SECONDS),
        (b"vary", b"Origin"),
    ]
    if b"access-control-request-private-network" in headers:
        allowed.append((b"access-control-allow-private-network", b"true"))
    start: Any = {"type": "http.response.start", "status": 204, "headers": allowed}
    body: Any = {"type": "http.response.body", "body": b"", "more_body": False}
    await send(start)
    await send(body)
