"""Events published to JetStream, a window at a time, each accepted when a stream has stored it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ...errors import SinkUnavailable
from ..push import Answer, Event, Verdict
from ..push.names import token
from ..push.order import Window, waves
from ..push.routes import Operations, Routes
from ..push.template import Template
from ..push.wire import Silent, unavailable, why
from .protocol import Line, Message, header_value, published
from .session import Login, Session, denied, opened

_PIECE = 200  # messages written at once
_IN_USE = 10058  # a stream of this name is there, with other settings
_TOO_LARGE = 10054
_NOBODY = b"503"

_OPERATIONS = Operations(header_value)


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


class _Window(Window):
    """What became of the events of one call."""

    def __init__(self, events: Sequence[Event]) -> None:
        super().__init__(events)
        self.nobody: list[int] = []  # the places of events that no stream takes
        self.refusing = False  # a stream has not stored a message


class NatsChannel:
    """JetStream, from one of Spark's Python processes."""

    def __init__(self, login: Login, subjects: Subjects) -> None:
        self._login = login
        self._subjects = subjects
        self._route = Routes(self._new_route)
        self._strict: dict[bytes, bool] = {}  # subjects: whether a message may be refused
        self._served: set[bytes] = set()  # subjects that have a stream, by what was stored
        self._careful = False  # a message was not stored, and the next may be: one of a row a time
        self._sent = 0
        self._session: Session | None = None
        self._open()

    def send(self, events: Sequence[Event]) -> Sequence[Verdict]:
        """Hand over some events, in order, and wait until streams have stored them."""
        window = _Window(events)
        session = self._session
        if session is None or not session.alive():
            session = self._open()
        subjects = {self._route(event).subject for event in events}
        careful = self._look(session, subjects) or self._careful
        places = range(len(events))
        for wave in waves(events, places) if careful else [places]:
            if self._session is None:  # the window knows what is to be said of the rest
                break
            self._publish(session, window, wave)
        self._careful = window.refusing
        self._judge_nobody(window, subjects)
        return window.verdicts()

    def close(self) -> None:
        """Let go of the connection."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    # --- a window --------------------------------------------------------------------------------

    def _publish(self, session: Session, window: _Window, wave: Sequence[int]) -> None:
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
                said = session.next(deadline - time.monotonic())
                if isinstance(said, Message):
                    self._answered(window, waiting.pop(said.subject, None), said)
                elif denied(said):
                    self._denied(window, waiting, said)
        except OSError as error:
            window.otherwise = self._lost(session, error, answered=window.accepted > 0)
            self.close()

    def _message(self, session: Session, window: _Window, at: int) -> bytes:
        """An event as bytes; b"": it is not sent."""
        event = window.events[at]
        if event.row in window.held:
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
            window.fail(at, Verdict(Answer.REFUSED, reason))
            return b""
        self._sent += 1
        return published(route.subject, b"%b%d" % (session.inbox, self._sent), headers, payload)

    def _answered(self, window: _Window, at: int | None, said: Message) -> None:
        if at is None:
            return
        if said.status == _NOBODY:
            window.nobody.append(at)
            window.held.add(window.events[at].row)
            return
        try:
            answer = _stored.decode(said.data)
        except msgspec.DecodeError:
            answer = _Stored()
        if answer.error is None and answer.stream and answer.seq:
            window.accept(at)
        else:
            window.refusing = True
            window.fail(at, self._verdict(answer, self._route(window.events[at]).subject))

    def _verdict(self, answer: _Stored, subject: bytes) -> Verdict:
        """Of an event that no stream says to have."""
        about, error = f"subject {subject.decode()}", answer.error
        if error is None:
            reason = f"{about}: something answered that is no stream of JetStream"
            return Verdict(Answer.FAILED, reason)
        refused = error.err_code == _TOO_LARGE
        reason = self._login.without_secrets(error.description)
        return Verdict(Answer.REFUSED if refused else Answer.FAILED, f"{about}: {reason}")

    def _denied(self, window: _Window, waiting: dict[bytes, int], said: Line) -> None:
        """Of a subject that we may not publish to, every event."""
        verdict = Verdict(
            Answer.REFUSED, self._login.without_secrets(said.rest.decode(errors="replace"))
        )
        for inbox, at in list(waiting.items()):
            if b'"%b"' % self._route(window.events[at]).subject in said.rest:
                window.fail(at, verdict)
                del waiting[inbox]

    def _judge_nobody(self, window: _Window, subjects: set[bytes]) -> None:
        """Where no stream takes anything, JetStream itself may be down; else it is the subject."""
        nobody = {self._route(window.events[at]).subject for at in window.nobody}
        if window.accepted:
            self._served |= subjects - nobody
        elif nobody & self._served:  # of one that had a stream: nothing is known any more
            self._served.clear()
        answer = Answer.FAILED if self._served else Answer.UNREACHABLE
        for at in window.nobody:
            subject = self._route(window.events[at]).subject.decode()
            reason = (
                f"no stream has the subject {subject}, or JetStream is off; create a stream, "
                "or set stream"
            )
            window.fail(at, Verdict(answer, reason))

    def _lost(self, session: Session, error: OSError, *, answered: bool) -> Verdict:
        reason = why(error)
        if isinstance(error, Silent):
            reason = f"no answer in {self._login.timeout:g} s"
        failed = isinstance(error, Silent) and answered
        answer = Answer.FAILED if failed else Answer.UNREACHABLE
        return Verdict(answer, str(unavailable("NATS", session.host, reason)))

    # --- streams ---------------------------------------------------------------------------------

    def _open(self) -> Session:
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

    def _make_stream(self, session: Session) -> None:
        name = self._subjects.stream
        if not name:
            return
        answer = session.ask(f"$JS.API.STREAM.CREATE.{name}", self._subjects.wanted)
        if answer is None:
            reason = "JetStream is off, or we may not make streams"
        elif (error := answer.get("error")) is None or error.get("err_code") == _IN_USE:
            return
        else:
            reason = error.get("description", "")
        raise unavailable("NATS", session.host, f"stream {name}: {reason}")

    def _look(self, session: Session, subjects: set[bytes]) -> bool:
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


def _limited(session: Session) -> bool:
    """Whether our account may store only so much: a large message fails, and a small one not."""
    told = session.ask("$JS.API.INFO", {})
    if not told or "limits" not in told:
        return True
    limits = [told["limits"], *(tier.get("limits", {}) for tier in told.get("tiers", {}).values())]
    return any(each.get(name, -1) > 0 for each in limits for name in ("max_storage", "max_memory"))


def _may_refuse(session: Session, subject: str) -> bool:
    """Whether the stream of a subject is full at some time, moves, or has a largest message."""
    names = session.ask("$JS.API.STREAM.NAMES", {"subject": subject})
    if not names or not names.get("streams"):
        return True
    told = session.ask(f"$JS.API.STREAM.INFO.{names['streams'][0]}", {})
    if not told or "config" not in told:
        return True
    config = told["config"]
    return bool(
        config.get("discard") == "new"
        or config.get("num_replicas", 1) > 1
        or config.get("max_msg_size", -1) > 0
    )
