"""A client's connection: frames moved between its socket and its session.

Nothing is queued for a client: the next page is read when its socket has taken the last one.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from glob import escape
from typing import Any, NamedTuple

from uvicorn.protocols.utils import ClientDisconnected

from ...change.event import Op, Table
from ...change.path import unquoted
from ...errors import HeadraceError
from ...formats.notification import Notification, in_default_schema
from ..access import Access, authenticate
from ..filter import Filter, NamedTables, both, named
from ..permissions import Permissions
from ..problems import RequestRefused
from ..service import Service
from ..subscription import FeedPage, Subscription
from .frames import FramesProtocol, framed
from .messages import (
    Auth,
    Code,
    Confirmed,
    Rejected,
    ResumeRequest,
    Subscribe,
    gap,
    request_id,
    subscription_id,
    subscription_rejected,
)
from .resume import ClientSubscription, ClientSubscriptions, ReplayWindow, ResumePoint, Wants
from .session import (
    POLICY,
    Act,
    CheckKey,
    CloseConnection,
    OpenSubscription,
    PauseReading,
    SendMessage,
    SendStatus,
    SessionClock,
    WebSocketSession,
)

logger = logging.getLogger(__name__)

NOTIFICATION = Notification()
ROWS = frozenset({Op.INSERT, Op.READ, Op.UPDATE, Op.DELETE})
PAGE_BYTES = 128 << 10  # of events on their way to one client, besides what its socket has
COUNTED = 1024  # changes that are looked at to count what waits for a client
CLOSE_SECONDS = 2.0  # for a client to take the close frame
FAILED = 1011  # a close code of RFC 6455


class WebSocketStreams:
    """What the connections of clients share, and those that may come back."""

    def __init__(self, service: Service, clock: SessionClock | None = None) -> None:
        self.service = service
        self.clock = clock or SessionClock()
        self.kept = ClientSubscriptions(service.settings.websocket, self.clock.seconds)
        # May look at many changes for each client: one at a time, so that many which come back at
        # once leave room for everybody else.
        self.looking_back = ThreadPoolExecutor(1, thread_name_prefix="resume")


class WebSocketConnection:
    """Moves frames between a client and its session."""

    __slots__ = (
        "_delivery", "_held", "_kept", "_protocol", "_service", "_session", "_streams",
        "_tables", "_timer", "_wants", "access",
    )  # fmt: skip

    def __init__(self, protocol: FramesProtocol, streams: WebSocketStreams) -> None:
        self.access = Access()
        self._protocol = protocol
        self._streams = streams
        self._service = streams.service
        self._held = ExitStack()  # what is let go when the connection ends
        self._session = WebSocketSession(self._service.settings.websocket, streams.clock)
        self._timer: asyncio.Timeout | None = None
        self._delivery: asyncio.Task[None] | None = None
        self._kept: ClientSubscription | None = None
        self._tables = 0
        self._wants: Wants = bool

    async def run(self) -> None:
        """Until the client leaves or must go."""
        try:
            with self._held:
                while await self._turn():
                    pass
        except ClientDisconnected:
            pass  # nobody is left to send to
        except Exception as error:
            await self._do(self._broken(error))
            raise
        finally:
            await self._stop()
            if self._kept is not None:
                self._streams.kept.end(self._kept)

    def stir(self) -> None:
        """Look after the connection now, although nothing came."""
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())

    async def _turn(self) -> bool:
        """Do what follows from the time, or from the next message; False: it is over."""
        session = self._session
        if failure := self._failed():
            return await self._do(self._broken(failure))
        if not self.access.valid():
            if not self._protocol.writable.is_set():  # it would not take the message either
                self._protocol.abort()
                return False
            return await self._do(session.ended())
        if self._streams.clock.seconds() >= session.next_at:
            return await self._do(session.elapse(self._kept.sent if self._kept else None))
        message = await self._next()
        if message is None:
            return True
        if message["type"] == "websocket.disconnect":
            return False
        text = message.get("text")
        going_on = await self._do(session.receive(message["bytes"] if text is None else text))
        if self._kept is not None and session.received is not None:
            self._kept.received = max(self._kept.received, session.received)
        return going_on

    async def _next(self) -> Any:
        """The next message; None when it is time to do something else."""
        wait = max(self._session.next_at - self._streams.clock.seconds(), 0.0)
        try:
            async with asyncio.timeout(wait) as self._timer:
                return await self._protocol.receive()
        except TimeoutError:
            return None
        finally:
            self._timer = None

    async def _do(self, acts: Sequence[Act]) -> bool:
        """Do what the session asks for; False: it was the end."""
        for act in acts:
            if isinstance(act, SendMessage):
                if not await self._send(act.message):
                    return False
            elif isinstance(act, CheckKey):
                return await self._do(self._check(act.auth))
            elif isinstance(act, OpenSubscription):
                return await self._do(await self._subscribe(act.wanted))
            elif isinstance(act, SendStatus):
                return await self._do([await self._status()])
            elif isinstance(act, PauseReading):
                await asyncio.sleep(act.seconds)
            else:
                await self._close(act)
                return False
        return True

    async def _send(self, *messages: bytes) -> bool:
        """Send messages together; False: the client takes nothing any more, and was dropped."""
        seconds = self._service.settings.websocket.pong_seconds
        try:
            async with asyncio.timeout(seconds) as self._timer:
                await self._protocol.write(framed(messages))
        except TimeoutError:
            self._protocol.abort()
            return False
        finally:
            self._timer = None
        return True

    async def _close(self, close: CloseConnection) -> None:
        await self._stop()
        # A client that takes nothing does not take its end either.
        asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._protocol.abort)
        await self._protocol.send(
            {"type": "websocket.close", "code": close.code, "reason": close.reason}
        )

    # --- who it is ---

    def _check(self, auth: Auth) -> Sequence[Act]:
        try:
            self.access = self._authenticated(auth)
            self._held.enter_context(self.access.connected(self.stir))
        except RequestRefused as refused:
            if refused.status_code == 429:
                return self._session.refuse(refused.problem.message)
            return self._session.deny()
        return self._session.admit()

    def _authenticated(self, auth: Auth) -> Access:
        service = self._service
        anybody = not service.settings.key_required and not service.keyring.all()
        if anybody and auth.well_formed:
            # On this machine, until the first key is made, as with requests without a key.
            return Access()
        return authenticate(service, auth.api_key)

    # --- what it wants ---

    async def _subscribe(self, wanted: Subscribe) -> Sequence[Act]:
        try:
            self.access.admit()
            choice = choose_tables(self._service.log.tables(), wanted.tables, self.access.allows)
        except RequestRefused as refused:
            return [self._session.error(Rejected(Code.RATE_LIMITED, refused.problem.message))]
        except Rejected as rejected:
            return [SendMessage(subscription_rejected(rejected))]
        filter = Filter(tables=choice.globs, operations=ROWS)
        wants = _test(filter, Permissions.of(self.access), self._service)
        await self._stop()  # first: where the one before ends is then known
        start, kept = await self._start(wanted.resume, wants)
        if self._kept is not None and self._kept.id != kept.id:
            self._streams.kept.drop(self._kept)
        self._kept, self._tables, self._wants = kept, len(choice.names), wants
        self._streams.kept.begin(kept)
        subscription = Subscription(
            self._service.feed,
            NOTIFICATION,
            filter=filter,
            after=start.after,
            permissions=Permissions.of(self.access),
        )
        confirmed = Confirmed(
            id=kept.id,
            tables=choice.names,
            sequence=start.after,
            epoch=self._service.feed.epoch,
            generation=self._service.feed.generation,
        )
        # What is lost comes in the same breath: clients move on with the confirmation.
        lost = [self._session.error(start.lost).message] if start.lost else []
        if not await self._send(self._session.confirm(confirmed).message, *lost):
            return [CloseConnection(POLICY, "not reading")]
        self._delivery = asyncio.create_task(self._deliver(subscription, kept))
        self._delivery.add_done_callback(lambda _: self.stir())
        return []

    async def _start(
        self, resume: ResumeRequest | None, wants: Wants
    ) -> tuple[ResumePoint, ClientSubscription]:
        log = self._service.log
        owner = self.access.key.holder if self.access.key else None
        if resume is None:
            # What the one before has not sent yet may be wanted by this one too.
            start = ResumePoint(self._kept.sent if self._kept else log.latest_sequence)
            return start, ClientSubscription(subscription_id(), owner, start.after, start.after)
        kept = None
        if resume.subscription_id is not None:
            kept = self._streams.kept.find(resume.subscription_id, owner)
        settings, now = self._service.settings.websocket, self._streams.clock.microseconds()
        window = ReplayWindow(log, wants, settings, now)
        start = await asyncio.get_running_loop().run_in_executor(
            self._streams.looking_back, window.start, resume, kept
        )
        id = kept.id if kept else subscription_id()
        return start, ClientSubscription(id, owner, start.after, start.after)

    # --- what it gets ---

    async def _deliver(self, subscription: Subscription, kept: ClientSubscription) -> None:
        """Send what comes, as fast as the client takes it."""
        feed = self._service.feed
        try:
            while not feed.closing and not subscription.ended:
                page = await subscription.live(room=PAGE_BYTES)
                await self._send_page(page)
                kept.sent, count = page.scanned, len(page.events)
                del page  # it may be large, and nothing may come for long
                await self.access.pay(count)
                await feed.wait(subscription.scanned, math.inf)
        except ClientDisconnected:
            pass  # `receive` reports it

    async def _send_page(self, page: FeedPage) -> None:
        if page.gap:
            lost = gap(
                page.gap.first,
                page.gap.last,
                reason=page.gap.reason,
                log_first=self._service.log.first_sequence,
            )
            await self._protocol.write(framed([self._session.error(lost).message]))
        if page.events:
            await self._protocol.write(page.once(_frames))

    async def _stop(self) -> None:
        """Send no more events."""
        if self._delivery is not None:
            delivery, self._delivery = self._delivery, None
            delivery.cancel()
            await asyncio.wait([delivery])

    def _failed(self) -> BaseException | None:
        """Why no more events come; None: nothing is wrong."""
        delivery = self._delivery
        return delivery.exception() if delivery is not None and delivery.done() else None

    def _broken(self, failure: BaseException) -> Sequence[Act]:
        request = request_id()
        logger.error("request=%s path=/v1/stream", request, exc_info=failure)
        rejected = Rejected(Code.SERVER_ERROR, "the server failed; its log says why")
        if isinstance(failure, HeadraceError):  # something that Headrace stands on
            rejected = Rejected(Code.SERVICE_DEGRADED, str(failure))
        return [
            self._session.error(rejected, request=request),
            CloseConnection(FAILED, "server error"),
        ]

    # --- how it does ---

    async def _status(self) -> SendMessage:
        kept = self._kept
        queued = 0 if kept is None else await self._queued(kept.sent)
        sequence = None if kept is None else kept.sent
        return self._session.status(queued=queued, tables=self._tables, sequence=sequence)

    async def _queued(self, sent: int) -> int:
        """How many events wait for the client.

        Those of the next changes are counted; of what lies beyond, as large a share is assumed.
        """
        latest = self._service.log.latest_sequence
        upto, count, at = min(latest, sent + COUNTED), 0, sent
        while at < upto:
            entries = await self._service.feed.read(at, upto)
            if not entries:
                break
            count += sum(self._wants(entry.change) for entry in entries)
            at = entries[-1].sequence
        seen = max(at - sent, 1)
        return count if at >= latest else count * (latest - sent) // seen


def _frames(page: FeedPage) -> bytes:
    return framed(page.payloads)


def _test(filter: Filter, permissions: Permissions, service: Service) -> Wants:
    entities = service.feed.entities
    test = both(filter.predicate(entities), permissions.predicate(entities))
    assert test is not None  # the filter names tables
    return test


# --- the tables that a client names --------------------------------------------------------------


class ChosenTables(NamedTuple):
    """Tables that may be subscribed to."""

    names: tuple[str, ...]  # as the client wrote them, each table once
    globs: tuple[str, ...]  # the same for a filter; each means one schema and table


def choose_tables(
    known: Sequence[Table], names: Sequence[str], allows: Callable[[Table], bool]
) -> ChosenTables:
    """The tables of these names; Rejected when one does not exist or may not be seen.

    A bare name means the default schema. Only who may see a table learns whether it exists.
    """
    by_name = NamedTables(known)
    found = {name: _meant(by_name, name) for name in names}
    denied = [name for name, tables in found.items() if not any(map(allows, tables or named(name)))]
    if denied:
        raise _rejected(Code.PERMISSION_DENIED, names, denied)
    missing = [name for name, tables in found.items() if not tables]
    if missing:
        raise _rejected(Code.TABLE_NOT_FOUND, names, missing)
    first = {_paths(tables): name for name, tables in reversed(found.items())}
    kept = [(name, paths) for paths, name in reversed(first.items())]
    globs = [escape(path) for _, paths in kept for path in paths]
    return ChosenTables(tuple(name for name, _ in kept), tuple(dict.fromkeys(globs)))


def _meant(known: NamedTables, name: str) -> list[Table]:
    called, path = known.called(name), unquoted(name)
    return [
        table
        for table in called
        if in_default_schema(table) or path in (table.path, f"{table.schema}.{table.name}")
    ]


def _paths(tables: Sequence[Table]) -> tuple[str, ...]:
    return tuple(sorted({table.path for table in tables}))


def _rejected(code: Code, names: Sequence[str], wrong: Sequence[str]) -> Rejected:
    listed = ", ".join(f"'{name}'" for name in wrong)
    noun = "table" if len(wrong) == 1 else "tables"
    message = (
        f"API key does not have permission to subscribe to {listed} {noun}"
        if code is Code.PERMISSION_DENIED
        else f"there is no {listed} {noun}; check the spelling"
    )
    allowed = [name for name in dict.fromkeys(names) if name not in wrong]
    return Rejected(code, message, {"deniedTables": list(wrong), "allowedTables": allowed})
