"""One client's conversation: which message may follow which. It does no input or output.

    connected -> auth -> subscribe, as often as the client likes

The connection hands it messages and the time, and does what it returns.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...config.settings import WebSocketSection
from ...formats.timestamps import iso
from . import messages
from .messages import Auth, ClientMessage, Code, Pong, ProtocolVersion, Rejected, Subscribe

POLICY, TRY_AGAIN = 1008, 1013  # close codes of RFC 6455

# Of messages by one client. Nobody needs more; whoever sends more waits.
MESSAGES_PER_SECOND = 20
MESSAGES_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class SessionClock:
    """The time; tests move it."""

    seconds: Callable[[], float] = time.monotonic  # only grows
    microseconds: Callable[[], int] = lambda: time.time_ns() // 1000  # since 1970


# --- what is to be done --------------------------------------------------------------------------


class SendMessage(NamedTuple):
    """Send a message."""

    message: bytes


class CheckKey(NamedTuple):
    """Find out whose key this is, then call `admit` or `deny`."""

    auth: Auth


class OpenSubscription(NamedTuple):
    """Find the tables and begin to send their events, or send a rejection."""

    wanted: Subscribe


class SendStatus(NamedTuple):
    """Count what waits, and send how the connection does."""


class PauseReading(NamedTuple):
    """Read nothing more for so many seconds."""

    seconds: float


class CloseConnection(NamedTuple):
    """End the connection."""

    code: int
    reason: str


Act = SendMessage | CheckKey | OpenSubscription | SendStatus | PauseReading | CloseConnection


class _Ping(NamedTuple):
    timestamp: str
    due: float  # from then on an answer is awaited
    sent: int | None  # the sequence up to which everything was sent before


class WebSocketSession:
    """The state of one client's conversation."""

    __slots__ = (
        "_admitted", "_auth_by", "_began", "_clock", "_filled", "_ping_at", "_pings", "_room",
        "_settings", "_status_at", "received",
    )  # fmt: skip

    def __init__(self, settings: WebSocketSection, clock: SessionClock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SessionClock()
        self._began = now = self._clock.seconds()
        self._auth_by = now + settings.auth_seconds
        self._admitted = False
        self._pings: list[_Ping] = []  # unanswered, oldest first
        self._ping_at = self._status_at = 0.0
        self._room, self._filled = float(MESSAGES_AT_ONCE), now
        self.received: int | None = None  # the client surely has everything up to this sequence

    @property
    def next_at(self) -> float:
        """When `elapse` has something to do, if nothing comes before."""
        if not self._admitted:
            return self._auth_by
        at = min(self._ping_at, self._status_at)
        return min(at, self._pings[0].due + self._settings.pong_seconds) if self._pings else at

    def receive(self, data: str | bytes) -> list[Act]:
        """What follows from a message."""
        try:
            self._count()
            if isinstance(data, bytes):
                raise Rejected(Code.INVALID_MESSAGE, "messages are JSON in text frames, not binary")
            return self._follow(messages.parse(data))
        except Rejected as rejected:
            acts: list[Act] = [self.error(rejected)]
            if rejected.code is Code.RATE_LIMITED:
                acts.append(PauseReading(2 / MESSAGES_PER_SECOND))
            return acts

    def admit(self) -> list[Act]:
        """The key is good."""
        self._admitted = True
        now = self._clock.seconds()
        self._ping_at = now + self._settings.ping_seconds
        self._status_at = now + self._settings.status_seconds
        return [SendMessage(messages.auth_success(messages.connection_id()))]

    def deny(self) -> list[Act]:
        """The key is not good."""
        return [
            SendMessage(messages.auth_failure(self._clock.microseconds())),
            CloseConnection(POLICY, "authentication failed"),
        ]

    def refuse(self, message: str) -> list[Act]:
        """The key is good, but it has all that it may have."""
        return [
            self.error(Rejected(Code.RATE_LIMITED, message)),
            CloseConnection(TRY_AGAIN, "rate limited"),
        ]

    def ended(self) -> list[Act]:
        """The key has expired or was revoked."""
        message = "the API key has expired or was revoked"
        return [
            self.error(Rejected(Code.UNAUTHENTICATED, message)),
            CloseConnection(POLICY, "authentication ended"),
        ]

    def elapse(self, sent: int | None = None) -> list[Act]:
        """What is due now; everything up to `sent` was given to the socket."""
        now = self._clock.seconds()
        if not self._admitted:
            return self._late() if now >= self._auth_by else []
        if self._pings and now >= self._pings[0].due + self._settings.pong_seconds:
            return [CloseConnection(POLICY, "no pong")]
        acts: list[Act] = []
        if now >= self._ping_at:
            acts.append(self._ping(sent))
        if now >= self._status_at:
            self._status_at = now + self._settings.status_seconds
            acts.append(SendStatus())
        return acts

    def status(self, *, queued: int, tables: int, sequence: int | None) -> SendMessage:
        """How the connection does."""
        limits = {
            "critical": self._settings.critical_events,
            "degraded": self._settings.degraded_events,
        }
        health = messages.ConnectionHealth(
            status=next((word for word, least in limits.items() if queued >= least), "healthy"),
            queued=queued,
            tables=tables,
            uptime=self._clock.seconds() - self._began,
            sequence=sequence,
        )
        return SendMessage(messages.connection_status(health, self._clock.microseconds()))

    def confirm(self, confirmed: messages.Confirmed) -> SendMessage:
        """A subscription stands: what was sent before it says nothing of how far it has come."""
        self.received = None
        self._pings = [ping._replace(sent=None) for ping in self._pings]
        return SendMessage(messages.subscription_confirmed(confirmed))

    def error(self, rejected: Rejected, *, request: str | None = None) -> SendMessage:
        """The message that reports an error to the client."""
        return SendMessage(messages.error(rejected, self._clock.microseconds(), request=request))

    def _follow(self, message: ClientMessage) -> list[Act]:
        if isinstance(message, Auth):
            return self._auth(message)
        if not self._admitted:
            reason = "the first message must be auth, and its answer must be awaited"
            raise Rejected(Code.UNAUTHENTICATED, reason)
        if isinstance(message, Pong):
            self._pong(message)
            return []
        if isinstance(message, ProtocolVersion):
            return [SendMessage(messages.protocol_version(message))]
        return [OpenSubscription(message)]

    def _auth(self, auth: Auth) -> list[Act]:
        if self._admitted:
            message = "the connection is authenticated already; connect anew to use another key"
            raise Rejected(Code.INVALID_OPERATION, message)
        return [CheckKey(auth)]

    def _late(self) -> list[Act]:
        message = f"no auth message came within {self._settings.auth_seconds:g} seconds"
        return [
            self.error(Rejected(Code.UNAUTHENTICATED, message)),
            CloseConnection(POLICY, "authentication timed out"),
        ]

    def _ping(self, sent: int | None) -> SendMessage:
        at, due = self._clock.microseconds(), self._ping_at
        self._ping_at = self._clock.seconds() + self._settings.ping_seconds
        self._pings.append(_Ping(iso(at), due, sent))
        return SendMessage(messages.ping(at))

    def _pong(self, pong: Pong) -> None:
        """Answers the ping of the same time and those before it; with another time, all."""
        known = any(ping.timestamp == pong.timestamp for ping in self._pings)
        while self._pings:
            ping = self._pings.pop(0)
            if known and ping.sent is not None:
                # Frames keep their order: who has the ping has what was sent before it.
                self.received = max(ping.sent, self.received or 0)
            if ping.timestamp == pong.timestamp:
                return

    def _count(self) -> None:
        now = self._clock.seconds()
        grown = self._room + (now - self._filled) * MESSAGES_PER_SECOND
        self._room, self._filled = min(grown, float(MESSAGES_AT_ONCE)), now
        if self._room < 1:
            raise Rejected(Code.RATE_LIMITED, "too many messages; this one was not looked at")
        self._room -= 1
