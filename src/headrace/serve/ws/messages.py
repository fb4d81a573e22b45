"""The messages of the WebSocket protocol, version 1.0.0: what clients send, and what they receive.

No input or output here: text in, values out; values in, text out.
"""

import math
import re
import uuid
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from ...formats.timestamps import iso

PROTOCOL_VERSION = "1.0.0"
VERSIONS = (1,)  # of the events' schema, and so of the protocol's first number
LARGEST_MESSAGE = 64 << 10  # bytes
MOST_TABLES = 100

_WELL_FORMED_KEY = re.compile(r"cdc_[A-Za-z0-9_-]{64}")


class Code(StrEnum):
    """What went wrong, in a word for programs."""

    INVALID_MESSAGE = "invalid_message"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    TABLE_NOT_FOUND = "table_not_found"
    INVALID_OPERATION = "invalid_operation"
    SERVER_ERROR = "server_error"
    SERVICE_DEGRADED = "service_degraded"
    RATE_LIMITED = "rate_limited"


class Rejected(Exception):
    """A message that cannot be followed; the connection goes on."""

    def __init__(self, code: Code, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


# --- what clients send ---------------------------------------------------------------------------

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Sequence = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Version = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Auth(msgspec.Struct, frozen=True, rename="camel"):
    """Who the client is; the key is never shown again."""

    api_key: str

    def __repr__(self) -> str:
        return "Auth(api_key=…)"

    @property
    def well_formed(self) -> bool:
        """Whether it looks like a key, known or not."""
        return _WELL_FORMED_KEY.fullmatch(self.api_key) is not None


class ResumeRequest(msgspec.Struct, frozen=True, rename="camel"):
    """How far a client has come that was here before; it says what it knows."""

    subscription_id: _Name | None = None
    last_event_id: _Name | None = None
    last_sequence: _Sequence | None = None
    epoch: _Name | None = None  # of the log that the sequence belongs to
    generation: _Name | None = None  # … in which it was read there


class Subscribe(msgspec.Struct, frozen=True):
    """Which tables the client wants to hear of, instead of those before."""

    tables: Annotated[list[_Name], msgspec.Meta(min_length=1, max_length=MOST_TABLES)]
    resume: ResumeRequest | None = None


class Pong(msgspec.Struct, frozen=True):
    """The client is still there."""

    timestamp: str  # that of the ping


class ProtocolVersion(msgspec.Struct, frozen=True, rename="camel"):
    """Which version the client would like, and which it could do with."""

    requested_version: _Version
    supported_versions: Annotated[list[_Version], msgspec.Meta(max_length=100)] = []


ClientMessage = Auth | Subscribe | Pong | ProtocolVersion


class _Typed(msgspec.Struct, frozen=True):
    type: str


_TYPES: dict[str, msgspec.json.Decoder[Any]] = {
    "auth": msgspec.json.Decoder(Auth),
    "subscribe": msgspec.json.Decoder(Subscribe),
    "pong": msgspec.json.Decoder(Pong),
    "protocol_version": msgspec.json.Decoder(ProtocolVersion),
}
_typed = msgspec.json.Decoder(_Typed).decode


def parse(text: str) -> ClientMessage:
    """What a message says; unknown fields are passed over. Rejected when it says nothing."""
    decoder = _TYPES.get(type := _decoded(_typed, text).type)
    if decoder is None:
        known = ", ".join(_TYPES)
        message = f"no message of type {type[:100]!r} is understood here; there are: {known}"
        raise Rejected(Code.INVALID_OPERATION, message)
    parsed: ClientMessage = _decoded(decoder.decode, text)
    return parsed


def _decoded(decode: Callable[[str], Any], text: str) -> Any:
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        raise Rejected(Code.INVALID_MESSAGE, f"the message is not as it must be: {error}") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Rejected(Code.INVALID_MESSAGE, f"the message is not JSON: {error}") from None
    except RecursionError:
        raise Rejected(Code.INVALID_MESSAGE, "the message is nested too deeply") from None


# --- what they receive ---------------------------------------------------------------------------

_encode = msgspec.json.Encoder().encode


def connection_id() -> str:
    """A name for a connection."""
    return str(uuid.uuid4())


def subscription_id() -> str:
    """A name for a subscription."""
    return f"sub_{uuid.uuid4()}"


def auth_success(connection: str) -> bytes:
    """The key is good."""
    return _encode(
        {
            "type": "auth_success",
            "connectionId": connection,
            "message": "Authentication successful",
        }
    )


def auth_failure(at: int) -> bytes:
    """The key is not good, for whatever reason; `at`: microseconds since 1970, as in all these."""
    return _encode(
        {
            "type": "auth_failure",
            "error": "invalid_api_key",
            "message": "The provided API key is invalid or has expired",
            "timestamp": iso(at),
        }
    )


class Confirmed(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription that stands."""

    id: str
    tables: tuple[str, ...]  # as the client named them
    sequence: int  # events follow this one, none of them missing
    epoch: str
    generation: str


def subscription_confirmed(confirmed: Confirmed) -> bytes:
    """Events flow from here."""
    return _encode(
        {
            "type": "subscription_confirmed",
            "subscriptionId": confirmed.id,
            "status": "confirmed",
            "tables": confirmed.tables,
            "message": f"Successfully subscribed to {len(confirmed.tables)} tables",
            "sequence": confirmed.sequence,
            "epoch": confirmed.epoch,
            "generation": confirmed.generation,
        }
    )


def subscription_rejected(rejected: Rejected) -> bytes:
    """Some tables cannot be subscribed to, so none is."""
    return _encode(
        {
            "type": "subscription_rejected",
            "subscriptionId": subscription_id(),
            "status": "rejected",
            "error": rejected.code,
            "message": str(rejected),
            "details": rejected.details,
        }
    )


def ping(at: int) -> bytes:
    """A question whether the client is still there."""
    return _encode({"type": "ping", "timestamp": iso(at)})


class ConnectionHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How a connection does."""

    status: str
    queued: int  # events that wait for the client
    tables: int
    uptime: float  # seconds
    sequence: int | None  # everything up to here was sent; None: nothing is subscribed to


def connection_status(health: ConnectionHealth, at: int) -> bytes:
    """How the connection does."""
    position = {} if health.sequence is None else {"sequence": health.sequence}
    return _encode(
        {
            "type": "connection_status",
            "status": health.status,
            "queuedEventsCount": health.queued,
            "activeSubscriptions": health.tables,
            "uptime": math.floor(health.uptime),
            "timestamp": iso(at),
            **position,
        }
    )


def protocol_version(requested: ProtocolVersion) -> bytes:
    """The version that both understand; Rejected when there is none."""
    offered = {requested.requested_version, *requested.supported_versions}
    common = [version for version in VERSIONS if version in offered]
    if not common:
        message = f"the server speaks version {_listed(VERSIONS)}, and the client does not"
        raise Rejected(Code.INVALID_OPERATION, message, {"supportedVersions": VERSIONS})
    wanted = requested.requested_version
    return _encode(
        {
            "type": "protocol_version",
            "requestedVersion": wanted,
            "supportedVersions": VERSIONS,
            "version": wanted if wanted in common else max(common),
            "protocolVersion": PROTOCOL_VERSION,
        }
    )


def error(rejected: Rejected, at: int, *, request: str | None = None) -> bytes:
    """Something went wrong; the request's id finds it in the server's log."""
    details = {} if rejected.details is None else {"details": rejected.details}
    return _encode(
        {
            "type": "error",
            "error": rejected.code,
            "message": str(rejected),
            "requestId": request or request_id(),
            "timestamp": iso(at),
            **details,
        }
    )


def request_id() -> str:
    """An id for an error, which finds it in the server's log."""
    return f"req_{uuid.uuid4()}"


def gap(first: int | None, last: int, *, log_first: int, reason: str = "") -> Rejected:
    """Events that the client will not get; `first` None: nobody knows where it stood.

    `log_first` is the oldest sequence of the log: what is held no longer may still be read there.
    """
    message = (
        f"events up to sequence {last} are no longer held for this subscription; "
        "query the current state, or read them from /v1/changes while the log has them"
    )
    lost: dict[str, int | str] = {"last": last} if first is None else {"first": first, "last": last}
    lost |= {"reason": reason} if reason else {}
    details = {"gap": lost, "firstSequence": last + 1, "logFirstSequence": log_first}
    return Rejected(Code.SERVICE_DEGRADED, message, details)


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions))
