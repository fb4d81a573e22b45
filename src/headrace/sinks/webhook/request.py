"""The requests: an event or a batch of events, with the headers that sign it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from ... import __version__
from ...errors import ConfigError
from ...formats.signature import sign, sign_standard, standard_key
from ...formats.timestamps import iso
from ...secret import Secret
from ..push import Event
from .address import Endpoint

JSON = "application/json"

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_OURS = ("content-", "transfer-", "x-savegress-", "webhook-")
_OUR_NAMES = {"host", "connection", "keep-alive", "expect", "te", "trailer", "upgrade"}


@dataclass(frozen=True, slots=True)
class WebhookMessage:
    """One body, and the id by which the receiver knows a repeat."""

    id: str
    body: bytes


def single(event: Event) -> WebhookMessage:
    """An event alone, byte for byte as its format wrote it."""
    return WebhookMessage(event.id, event.payload or b"")


def batch(events: Sequence[Event]) -> WebhookMessage:
    """Events together; the id depends on nothing but which events these are."""
    # Events of one change may share its id, and differ in their place.
    names = msgspec.json.encode(
        [(event.id, event.at) if event.at else event.id for event in events]
    )
    identity = f"batch-{blake2b(names, digest_size=16).hexdigest()}"
    body = b'{"batch_id":"%b","batch_size":%d,"batch_timestamp":"%b","events":[%b]}' % (
        identity.encode(),
        len(events),
        # Not the time of sending, so that a repeat is the same to the byte.
        iso(events[-1].commit_time).encode(),
        b",".join([event.payload or b"null" for event in events]),
    )
    return WebhookMessage(identity, body)


class RequestEncoder:
    """Encodes and signs requests."""

    __slots__ = ("_head", "_keys", "_secret")

    def __init__(
        self,
        endpoint: Endpoint,
        media_type: str,
        *,
        secrets: Sequence[Secret],
        headers: Mapping[str, Secret],
    ) -> None:
        fields = {
            "Host": endpoint.authority,
            "User-Agent": f"headrace/{__version__}",
            "Accept": "*/*",
        }
        given = {name.title(): value.reveal() for name, value in headers.items()}
        fields |= given | {"Content-Type": media_type}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._head = f"POST {endpoint.target} HTTP/1.1\r\n{lines}".encode("latin-1")
        self._secret = secrets[0].reveal() if secrets else ""
        self._keys = [standard_key(secret.reveal()) for secret in secrets]

    def encode(self, message: WebhookMessage, now: int) -> bytes:
        """The request's bytes, signed at `now`, in seconds since 1970."""
        identity, body = message.id, message.body
        headers = (
            f"Content-Length: {len(body)}\r\n"
            f"X-Savegress-Event-ID: {identity}\r\nX-Savegress-Timestamp: {now}\r\n"
            f"webhook-id: {identity}\r\nwebhook-timestamp: {now}\r\n"
        )
        if self._keys:
            signed = " ".join([sign_standard(body, identity, now, key) for key in self._keys])
            headers += (
                f"X-Savegress-Signature: {sign(body, self._secret)}\r\n"
                f"webhook-signature: {signed}\r\n"
            )
        return b"%b%b\r\n%b" % (self._head, headers.encode("latin-1"), body)


def expect_headers(headers: Mapping[str, Secret]) -> None:
    """Refuse headers that cannot be sent, or that a request has by itself; values never show."""
    for name, value in headers.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"headers: {name!r} is no name of a header")
        if not _VALUE.fullmatch(value.reveal()):
            raise ConfigError(
                f"headers: the value of {name} holds a line end, a control character or one "
                "beyond Latin-1"
            )
        if name.lower() in _OUR_NAMES or name.lower().startswith(_OURS):
            raise ConfigError(f"headers: {name} is set by the sink itself; leave it out")


def expect_secret(setting: str, secret: Secret | None) -> None:
    """Refuse a secret that gives no key."""
    if secret is None:
        return
    try:
        standard_key(secret.reveal())
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from None
