"""Events published to RabbitMQ, a window at a time, each accepted when the server confirms it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pamqp import commands

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
    within,
)
from ..push.wire import ReplyTimeout, unavailable, why
from .frames import MessageEnvelope, PublishConfirm, ReturnedMessage
from .session import AmqpLogin, AmqpSession, ChannelClosed, opened

_PIECE = 200  # messages written at once
LONGEST_EXCHANGE = 127  # characters of a name, as pamqp has it
_LONGEST = 255  # bytes of a queue's name or a routing key
_NOT_FOUND, _DENIED, _PRECONDITION = 404, 403, 406

_OPERATIONS = OperationNames(str)

ExchangeType = Literal["", "direct", "topic", "fanout", "headers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where events go, and what is made for them."""

    exchange: Template
    routing_key: Template
    declare_exchange: ExchangeType
    declare_queue: Template
    queue_arguments: dict[str, str | int | bool]
    content_type: str

    @property
    def may_refuse(self) -> bool:
        """Whether a queue that we make takes nothing while it is full."""
        overflow = self.queue_arguments.get("x-overflow", "")
        return overflow in ("reject-publish", "reject-publish-dlx")


class _Route(NamedTuple):
    """What the events of a table share."""

    exchange: str
    key: str
    queue: str


class _Published:
    """Messages that wait for their confirms; `places` are those of their events."""

    def __init__(self, window: ReplyWindow, places: Sequence[int], first: int) -> None:
        self._window, self._places, self._first = window, places, first
        self._waits = bytearray(b"\1" * len(places))
        self._lowest = 0  # all before have their answers
        self.left = len(places)

    def confirm(self, frame: PublishConfirm) -> None:
        """The server has, or has not, a message or all up to it."""
        at = frame.tag - self._first
        if not 0 <= at < len(self._places):
            raise ConnectionAbortedError("it confirms what was not sent")
        for each in range(self._lowest, at + 1) if frame.multiple else (at,):
            if self._waits[each]:
                self._waits[each] = 0
                self.left -= 1
                if frame.accepted:
                    self._window.accept(self._places[each])
                else:
                    self._window.fail(self._places[each], _NACKED)
        if frame.multiple:
            self._lowest = at + 1

    def returned(self, frame: ReturnedMessage, outcome: DeliveryOutcome) -> Event | None:
        """No queue has the message, although the server confirms it."""
        for at in self._places:
            event = self._window.events[at]
            if event.id == frame.message_id and at not in self._window.failed:
                self._window.fail(at, Reply(outcome, frame.reason))
                return event
        return None

    def fail_rest(self, reply: Reply) -> None:
        """No answer comes any more."""
        for at, waits in zip(self._places, self._waits, strict=True):
            if waits:
                self._window.fail(at, reply)


_NACKED = Reply(
    DeliveryOutcome.FAILED,
    "the server did not take it (nack): a queue is full, or it failed inside",
)


class RabbitmqChannel:
    """RabbitMQ, from one of Spark's Python processes."""

    def __init__(self, login: AmqpLogin, addresses: Addresses) -> None:
        self._login = login
        self._addresses = addresses
        self._route = Routes(self._new_route)
        self._envelopes: dict[tuple[str, str, str, str], MessageEnvelope] = {}
        self._ready: set[_Route] = set()
        # A message was refused while the next one may be accepted: one of a row at a time.
        self._careful = addresses.may_refuse
        self._session: AmqpSession | None = opened(login)

    def send(self, events: Sequence[Event]) -> Sequence[Reply]:
        """Hand over some events, in order, and wait until the server has confirmed them."""
        window = ReplyWindow(events)
        session = self._session
        if session is None or not session.alive():
            session = self._reopen()
        places = self._prepare(session, window)
        for wave in waves(events, places) if self._careful else [places]:
            wanted = [at for at in wave if events[at].row not in window.failed_rows]
            if self._session is None:  # the window has a reply for the rest
                break
            self._publish(session, window, wanted)
        self._careful = self._addresses.may_refuse or _NACKED in window.failed.values()
        return window.replies()

    def close(self) -> None:
        """Close the connection."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _reopen(self) -> AmqpSession:
        self.close()
        self._ready.clear()
        session = self._session = opened(self._login)
        return session

    # --- a window --------------------------------------------------------------------------------

    def _publish(self, session: AmqpSession, window: ReplyWindow, places: Sequence[int]) -> None:
        published = _Published(window, places, session.published + 1)
        deadline = time.monotonic() + self._login.timeout
        try:
            for begin in range(0, len(places), _PIECE):
                piece = [window.events[at] for at in places[begin : begin + _PIECE]]
                session.publish([self._message(event, session.frame_max) for event in piece])
            while published.left:
                frame = session.next(deadline - time.monotonic())
                if isinstance(frame, PublishConfirm):
                    published.confirm(frame)
                elif isinstance(frame, ReturnedMessage):
                    self._returned(published, frame)
        except ChannelClosed as error:
            published.fail_rest(self._closed(error, alone=len(places) == 1))
            self._resume(session, window)
        except OSError as error:
            window.otherwise = self._lost(session, error, answered=window.accepted > 0)
            self.close()

    def _returned(self, published: _Published, frame: ReturnedMessage) -> None:
        """A queue that we made has been deleted, and is made again; else nobody wants the event."""
        ours = bool(self._addresses.declare_queue.text)
        event = published.returned(
            frame, DeliveryOutcome.FAILED if ours else DeliveryOutcome.REFUSED
        )
        if event is not None:
            self._ready.discard(self._route(event))

    def _message(self, event: Event, frame_max: int) -> bytes:
        about = (event.source, event.schema, event.table, event.op)
        envelope = self._envelopes.get(about)
        if envelope is None:
            route = self._route(event)
            operation = _OPERATIONS[event.op]
            # The id and the time are properties: each header is work for the server.
            headers = {"savegress-operation": operation, "savegress-table": event.table}
            envelope = MessageEnvelope(
                route.exchange, route.key, headers, self._addresses.content_type
            )
            self._envelopes[about] = envelope
        seconds = event.commit_time // 1_000_000
        return envelope.message(event.id, seconds, event.payload or b"", frame_max)

    def _closed(self, error: ChannelClosed, *, alone: bool) -> Reply:
        """Of messages on an AMQP channel that the server closed: one of them was the reason."""
        refused = alone and error.code in (_DENIED, _PRECONDITION)
        return Reply(DeliveryOutcome.REFUSED if refused else DeliveryOutcome.FAILED, error.text)

    def _lost(self, session: AmqpSession, error: OSError, *, answered: bool) -> Reply:
        if not isinstance(error, ReplyTimeout):
            return Reply(DeliveryOutcome.UNREACHABLE, self._unavailable(session, why(error)))
        if session.blocked:
            reason = f"it takes nothing for now: {session.blocked}"
            return Reply(DeliveryOutcome.UNREACHABLE, self._unavailable(session, reason))
        answer = DeliveryOutcome.FAILED if answered else DeliveryOutcome.UNREACHABLE
        reason = f"no answer in {self._login.timeout:g} s"
        return Reply(answer, self._unavailable(session, reason))

    def _unavailable(self, session: AmqpSession, reason: str) -> str:
        return str(unavailable("RabbitMQ", session.host, reason))

    def _resume(self, session: AmqpSession, window: ReplyWindow) -> None:
        """Another AMQP channel after the server closed one; what we had made may be gone."""
        self._ready.clear()
        try:
            session.reopen()
        except OSError as error:
            window.otherwise = self._lost(session, error, answered=False)
            self.close()

    # --- exchanges and queues --------------------------------------------------------------------

    def _prepare(self, session: AmqpSession, window: ReplyWindow) -> list[int]:
        """The places of events whose exchange is there; it and its queue are made if we are to."""
        places, wrong = [], dict[_Route, Reply]()
        for at, event in enumerate(window.events):
            route = self._route(event)
            if route not in self._ready and route not in wrong:
                reply = self._declare(session, route)
                if reply is None:
                    self._ready.add(route)
                else:
                    wrong[route] = reply
            if route in wrong:
                window.fail(at, wrong[route])
            else:
                places.append(at)
        return places

    def _declare(self, session: AmqpSession, route: _Route) -> Reply | None:
        try:
            try:
                self._make(session, route)
            except ChannelClosed as error:
                session.reopen()
                hint = "; create it, or set declare_exchange" if error.code == _NOT_FOUND else ""
                return Reply(DeliveryOutcome.FAILED, f"{error.text}{hint}")
        except OSError as error:
            raise SinkUnavailable(self._lost(session, error, answered=False).reason) from error
        return None

    def _make(self, session: AmqpSession, route: _Route) -> None:
        kind, queue = self._addresses.declare_exchange, commands.Queue
        if route.exchange:
            exchange = commands.Exchange.Declare(
                exchange=route.exchange,
                exchange_type=kind or "direct",
                passive=not kind,
                durable=True,
            )
            session.call(exchange, commands.Exchange.DeclareOk)
        if route.queue:
            arguments: Any = dict(self._addresses.queue_arguments)
            declare = queue.Declare(queue=route.queue, durable=True, arguments=arguments)
            session.call(declare, queue.DeclareOk)
        if route.queue and route.exchange:
            bind = queue.Bind(queue=route.queue, exchange=route.exchange, routing_key=route.key)
            session.call(bind, queue.BindOk)

    def _new_route(self, event: Event) -> _Route:
        addresses = self._addresses
        return _Route(
            within(_filled(addresses.exchange, event), LONGEST_EXCHANGE),
            within(_filled(addresses.routing_key, event), _LONGEST),
            within(_filled(addresses.declare_queue, event), _LONGEST),
        )


def _filled(template: Template, event: Event) -> str:
    return template.fill(source=event.source, schema=event.schema, table=event.table, escape=token)
