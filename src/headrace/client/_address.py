"""Where a server is, and what its answers mean."""

from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from ..errors import ConfigError, ServerAbsent, ServerBusy, ServerError

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 60.0
LONGEST_WAIT = 300.0  # seconds, whatever an answer asks for
SILENT_SECONDS = 30.0  # a stream has a heartbeat every ten

_BUSY = (429, 500, 502, 503, 504)


class Address(NamedTuple):
    """The place that a URL names."""

    host: str
    port: int
    tls: bool
    path: str = ""  # before that of every route, for a server behind a proxy

    @classmethod
    def of(cls, url: str) -> "Address":
        """ConfigError when it is no address of a server."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            # Not shown: it may hold a password.
            raise ConfigError("the url must be like http://127.0.0.1:3000")
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                "the url must have no user and no password in it",
                hint="Give the API key to the client: Client(url, key).",
            )
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, tls, parts.path.rstrip("/"))


def refusal(what: str, status: int, body: bytes, *, after: str | None = None) -> ServerError:
    """The error that an answer's document describes; `after` is its Retry-After."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        document = None
    if not isinstance(document, dict) or not {"error", "message"} <= document.keys():
        return ServerAbsent(f"{what}, as no Headrace does")
    kind = ServerBusy if status in _BUSY else ServerError
    error = kind(f"{what}: {document['message']}", hint=document.get("hint") or "")
    error.word = str(document["error"])
    # The other form, a date, is one that no Headrace sends.
    error.after = min(float(after), LONGEST_WAIT) if after and after.isdigit() else 0.0
    return error
