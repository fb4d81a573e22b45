"""Events published to JetStream, a window at a time, each accepted when a stream has stored it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ...errors import SinkUnavailable
from ..push import (
    DeliveryOutcome,
    Event,
    OperationNames,
    Reply,
    ReplyWindow,
    Routes,
    Template,
    token,
    waves,
)
from ..push.wire import ReplyTimeout, unavailable, why
from .protocol import NatsLine, NatsMessage, header_value, published
from .session import NatsLogin, NatsSession, denied, opened

_PIECE = 200  # messages written at once
_IN_USE = 10058  # a stream of this name is there, with other settings
_TOO_LARGE = 10054
_NO_RESPONDERS = b"503"

_OPERATIONS = OperationNames(header_value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects:
    """Where events go, and the stream that is made for them."""

    subject: Template
    stream: str  # "": none is made
    stream_settings: Mapping[str, str | int | bool]

    @property
    def wanted(self) -> dict[str, Any]:
        """The stream that is to be there."""
        every = self.subject.fill(source="*", schema="*", table="*")
        return {"name": self.stream, "subjects": [every], "storage": "file", **self.stream_settings}


class _Route(NamedTuple):
    """What the events of a table share."""

    subject: bytes
    table: bytes


class _Error(msgspec.Struct):
    """What a stream did not like."""

    err_code: int = 0
    description: str = "not stored"


class _Stored(msgspec.Struct):
    """What JetStream answers to a message."""

    stream: str = ""
    seq: int = 0
    error: _Error | None = None


_stored = msgspec.json.Decoder(_Stored)


class _Window(ReplyWindow):
    """What became of the events of one call."""

    def __init__(self, events: Sequence[Event]) -> None:
        super().__init__(events)
        self.unserved: list[int] = []  # the places of events that no stream takes
        self.refusing = False  # a stream has not stored a message


class NatsChannel:
    """JetStream, from one of Spark's Python processes."""

    def __init__(self, login: NatsLogin, subjects: Subjects) -> None:
        self._login = login
        self._subjects = subjects
        self._route = Routes(self._new_route)
        self._strict: dict[bytes, bool] = {}  # subjects: whether a message may be refused
        self._served: set[bytes] = set()  # subjects that have a stream, by what was stored
        self._careful = False  # a message was not stored, and the next may be: one of a row a time
        self._sent = 0
        self._session: NatsSession | None = None
        self._open()

    def send(self, events: Sequence[Event]) -> Sequence[Reply]:
        """Hand over some events, in order, and wait until streams have stored them."""
        window = _Window(events)
        session = self._session
        if session is None or not session.alive():
            session = self._open()
        subjects = {self._route(event).subject for event in events}
        careful = self._may_refuse_one(session, subjects) or self._careful
        places = range(len(events))
        for wave in waves(events, places) if careful else [places]:
            if self._session is None:  # the window has a reply for the rest
                break
            self._publish(session, window, wave)
        self._careful = window.refusing
        self._reply_unserved(window, subjects)
        return window.replies()

    def close(self) -> None:
        """Close the connection."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    # --- a window --------------------------------------------------------------------------------

    def _publish(self, session: NatsSession, window: _Window, wave: Sequence[int]) -> None:
        deadline = time.monotonic() + self._login.timeout
        waiting: dict[bytes, int] = {}
        try:
            messages: list[bytes] = []
            for at in wave:
                if message := self._message(session, window, at):
                    messages.append(message)
                    waiting[b"%b%d" % (session.inbox, self._sent)] = at
                if len(messages) == _PIECE:
                    session.send(b"".join(messages))
                    messages.clear()
            session.send(b"".join(messages))
            while waiting:
                frame = session.next(deadline - time.monotonic())
                if isinstance(frame, NatsMessage):
                    self._stored_reply(window, waiting.pop(frame.subject, None), frame)
                elif denied(frame):
                    self._denied(window, waiting, frame)
        except OSError as error:
            window.otherwise = self._lost(session, error, answered=window.accepted > 0)
            self.close()

    def _message(self, session: NatsSession, window: _Window, at: int) -> bytes:
        """An event as bytes; b"": it is not sent."""
        event = window.events[at]
        if event.row in window.failed_rows:
            return b""
        route = self._route(event)
        known = event.id.encode()
        headers = (
            b"NATS/1.0\r\nNats-Msg-Id: %b\r\nsavegress-event-id: %b\r\nsavegress-operation: %b\r\n"
            b"savegress-table: %b\r\nsavegress-timestamp: %d\r\n\r\n"
        ) % (
            known,
            known,
            _OPERATIONS[event.op],
            route.table,
            event.commit_time // 1000,
        )
        payload = event.payload or b""
        if (size := len(headers) + len(payload)) > session.max_payload:
            reason = f"it has {size} bytes, and the server takes {session.max_payload}: max_payload"
            window.fail(at, Reply(DeliveryOutcome.REFUSED, reason))
            return b""
        self._sent += 1
        return published(route.subject, b"%b%d" % (session.inbox, self._sent), headers, payload)

    def _stored_reply(self, window: _Window, at: int | None, frame: NatsMessage) -> None:
        if at is None:
            return
        if frame.status == _NO_RESPONDERS:
            window.unserved.append(at)
            window.failed_rows.add(window.events[at].row)
            return
        try:
            ack = _stored.decode(frame.data)
        except msgspec.DecodeError:
            ack = _Stored()
        if ack.error is None and ack.stream and ack.seq:
            window.accept(at)
        else:
            window.refusing = True
            window.fail(at, self._reply(ack, self._route(window.events[at]).subject))

    def _reply(self, ack: _Stored, subject: bytes) -> Reply:
        """The reply for an event that no stream has stored."""
        about, error = f"subject {subject.decode()}", ack.error
        if error is None:
            reason = f"{about}: something answered that is no stream of JetStream"
            return Reply(DeliveryOutcome.FAILED, reason)
        refused = error.err_code == _TOO_LARGE
        reason = self._login.without_secrets(error.description)
        return Reply(
            DeliveryOutcome.REFUSED if refused else DeliveryOutcome.FAILED, f"{about}: {reason}"
        )

    def _denied(self, window: _Window, waiting: dict[bytes, int], frame: NatsLine) -> None:
        """Refuse every event of a subject that we may not publish to."""
        reply = Reply(
            DeliveryOutcome.REFUSED,
            self._login.without_secrets(frame.rest.decode(errors="replace")),
        )
        for inbox, at in list(waiting.items()):
            if b'"%b"' % self._route(window.events[at]).subject in frame.rest:
                window.fail(at, reply)
                del waiting[inbox]

    def _reply_unserved(self, window: _Window, subjects: set[bytes]) -> None:
        """Where no stream takes anything, JetStream itself may be down; else it is the subject."""
        unserved = {self._route(window.events[at]).subject for at in window.unserved}
        if window.accepted:
            self._served |= subjects - unserved
        elif unserved & self._served:  # of one that had a stream: nothing is known any more
            self._served.clear()
        outcome = DeliveryOutcome.FAILED if self._served else DeliveryOutcome.UNREACHABLE
        for at in window.unserved:
            subject = self._route(window.events[at]).subject.decode()
            reason = (
                f"no stream has the subject {subject}, or JetStream is off; create a stream, "
                "or set stream"
            )
            window.fail(at, Reply(outcome, reason))

    def _lost(self, session: NatsSession, error: OSError, *, answered: bool) -> Reply:
        reason = why(error)
        if isinstance(error, ReplyTimeout):
            reason = f"no answer in {self._login.timeout:g} s"
        failed = isinstance(error, ReplyTimeout) and answered
        outcome = DeliveryOutcome.FAILED if failed else DeliveryOutcome.UNREACHABLE
        return Reply(outcome, str(unavailable("NATS", session.host, reason)))

    # --- streams ---------------------------------------------------------------------------------

    def _open(self) -> NatsSession:
        self.close()
        session = opened(self._login)
        try:
            self._make_stream(session)
        except OSError as error:
            session.close()
            raise unavailable("NATS", session.host, why(error)) from error
        except SinkUnavailable:
            session.close()
            raise
        self._strict.clear()
        self._session = session
        return session

    def _make_stream(self, session: NatsSession) -> None:
        name = self._subjects.stream
        if not name:
            return
        ack = session.request(f"$JS.API.STREAM.CREATE.{name}", self._subjects.wanted)
        if ack is None:
            reason = "JetStream is off, or we may not make streams"
        elif (error := ack.get("error")) is None or error.get("err_code") == _IN_USE:
            return
        else:
            reason = error.get("description", "")
        raise unavailable("NATS", session.host, f"stream {name}: {reason}")

    def _may_refuse_one(self, session: NatsSession, subjects: set[bytes]) -> bool:
        """Whether some stream may refuse one message and take the next.

        The repeat of a message that a stream has already is dropped there, so a later event of a
        row must not get ahead.
        """
        try:
            if unknown := subjects - self._strict.keys():
                limited = _limited(session)
                for subject in unknown:
                    self._strict[subject] = limited or _may_refuse(session, subject.decode())
        except OSError as error:
            self.close()
            raise unavailable("NATS", session.host, why(error)) from error
        return any(self._strict[subject] for subject in subjects)

    def _new_route(self, event: Event) -> _Route:
        subject = self._subjects.subject.fill(
            source=event.source, schema=event.schema, table=event.table, escape=token
        )
        return _Route(subject.encode(), header_value(event.table))


def _limited(session: NatsSession) -> bool:
    """Whether our account may store only so much: a large message fails, and a small one not."""
    info = session.request("$JS.API.INFO", {})
    if not info or "limits" not in info:
        return True
    limits = [info["limits"], *(tier.get("limits", {}) for tier in info.get("tiers", {}).values())]
    return any(each.get(name, -1) > 0 for each in limits for name in ("max_storage", "max_memory"))


def _may_refuse(session: NatsSession, subject: str) -> bool:
    """Whether the stream of a subject is full at some time, moves, or has a largest message."""
    names = session.request("$JS.API.STREAM.NAMES", {"subject": subject})
    if not names or not names.get("streams"):
        return True
    info = session.request(f"$JS.API.STREAM.INFO.{names['streams'][0]}", {})
    if not info or "config" not in info:
        return True
    config = info["config"]
    return bool(
        config.get("discard") == "new"
        or config.get("num_replicas", 1) > 1
        or config.get("max_msg_size", -1) > 0
    )
