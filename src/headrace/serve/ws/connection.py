"""A client's connection: frames moved between its socket and its session.

Nothing is queued for a client: the next page is read when its socket has taken the last one.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected

from ...change.event import Op
from ...errors import HeadraceError
from ...formats.notification import Notification
from ..access import Access, authenticate
from ..filter import Filter, both
from ..grant import Grant
from ..problems import Refused
from ..service import Service
from ..subscription import Page, Subscription
from .frames import FramesProtocol, framed
from .messages import (
    Auth,
    Code,
    Confirmed,
    Rejected,
    Resume,
    Subscribe,
    gap,
    request_id,
    subscription_id,
    subscription_rejected,
)
from .resume import Kept, KeptSubscriptions, Start, Wants, Window
from .session import POLICY, Act, Check, Clock, Close, Open, Report, Send, Session, Wait
from .tables import choose

logger = logging.getLogger(__name__)

NOTIFICATION = Notification()
ROWS = frozenset({Op.INSERT, Op.READ, Op.UPDATE, Op.DELETE})
PAGE_BYTES = 128 << 10  # of events on their way to one client, besides what its socket has
COUNTED = 1024  # changes that are looked at to count what waits for a client
CLOSE_SECONDS = 2.0  # for a client to take the news that it must go
FAILED = 1011  # a close code of RFC 6455


class Streams:
    """What the connections of clients share, and those that may come back."""

    def __init__(self, service: Service, clock: Clock | None = None) -> None:
        self.service = service
        self.clock = clock or Clock()
        self.kept = KeptSubscriptions(service.settings.websocket, self.clock.seconds)
        # May look at many changes for each client: one at a time, so that many which come back at
        # once leave room for everybody else.
        self.looking_back = ThreadPoolExecutor(1, thread_name_prefix="resume")


class Connection:
    """Moves frames between a client and its session."""

    __slots__ = (
        "_delivery", "_held", "_kept", "_protocol", "_service", "_session", "_streams",
        "_tables", "_timer", "_wants", "access",
    )  # fmt: skip

    def __init__(self, protocol: FramesProtocol, streams: Streams) -> None:
        self.access = Access()
        self._protocol = protocol
        self._streams = streams
        self._service = streams.service
        self._held = ExitStack()  # what is let go when the connection ends
        self._session = Session(self._service.settings.websocket, streams.clock)
        self._timer: asyncio.Timeout | None = None
        self._delivery: asyncio.Task[None] | None = None
        self._kept: Kept | None = None
        self._tables = 0
        self._wants: Wants = bool

    async def run(self) -> None:
        """Until the client leaves or must go."""
        try:
            with self._held:
                while await self._turn():
                    pass
        except ClientDisconnected:
            pass  # there is nobody to tell
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
            if not self._protocol.writable.is_set():  # it would not take the news either
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
            if isinstance(act, Send):
                if not await self._send(act.message):
                    return False
            elif isinstance(act, Check):
                return await self._do(self._check(act.auth))
            elif isinstance(act, Open):
                return await self._do(await self._subscribe(act.wanted))
            elif isinstance(act, Report):
                return await self._do([await self._status()])
            elif isinstance(act, Wait):
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

    async def _close(self, close: Close) -> None:
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
        except Refused as refused:
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
            choice = choose(self._service.log.tables(), wanted.tables, self.access.allows)
        except Refused as refused:
            return [self._session.error(Rejected(Code.RATE_LIMITED, refused.problem.message))]
        except Rejected as rejected:
            return [Send(subscription_rejected(rejected))]
        filter = Filter(tables=choice.globs, operations=ROWS)
        wants = _test(filter, Grant.of(self.access), self._service)
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
            grant=Grant.of(self.access),
        )
        confirmed = Confirmed(
            id=kept.id, tables=choice.names, sequence=start.after, epoch=self._service.feed.epoch
        )
        # What is lost comes in the same breath: clients move on with the confirmation.
        lost = [self._session.error(start.lost).message] if start.lost else []
        if not await self._send(self._session.confirm(confirmed).message, *lost):
            return [Close(POLICY, "not reading")]
        self._delivery = asyncio.create_task(self._deliver(subscription, kept))
        self._delivery.add_done_callback(lambda _: self.stir())
        return []

    async def _start(self, resume: Resume | None, wants: Wants) -> tuple[Start, Kept]:
        log = self._service.log
        owner = self.access.key.holder if self.access.key else None
        if resume is None:
            # What the one before has not sent yet may be wanted by this one too.
            start = Start(self._kept.sent if self._kept else log.latest_sequence)
            return start, Kept(subscription_id(), owner, start.after, start.after)
        kept = None
        if resume.subscription_id is not None:
            kept = self._streams.kept.find(resume.subscription_id, owner)
        settings, now = self._service.settings.websocket, self._streams.clock.microseconds()
        window = Window(log, wants, settings, now)
        start = await asyncio.get_running_loop().run_in_executor(
            self._streams.looking_back, window.start, resume, kept, self._service.feed.epoch
        )
        id = kept.id if kept else subscription_id()
        return start, Kept(id, owner, start.after, start.after)

    # --- what it gets ---

    async def _deliver(self, subscription: Subscription, kept: Kept) -> None:
        """Send what comes, as fast as the client takes it."""
        feed = self._service.feed
        try:
            while not feed.closing and not subscription.ended:
                page = await subscription.live(room=PAGE_BYTES)
                await self._send_page(page)
                kept.sent, count = page.scanned, len(page.deliveries)
                del page  # it may be large, and nothing may come for long
                await self.access.pay(count)
                await feed.wait(subscription.scanned, math.inf)
        except ClientDisconnected:
            pass  # whoever receives is told

    async def _send_page(self, page: Page) -> None:
        if page.gap:
            lost = gap(*page.gap, log_first=self._service.log.first_sequence)
            await self._protocol.write(framed([self._session.error(lost).message]))
        if page.deliveries:
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
        return [self._session.error(rejected, request=request), Close(FAILED, "server error")]

    # --- how it does ---

    async def _status(self) -> Send:
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


def _frames(page: Page) -> bytes:
    return framed(page.payloads)


def _test(filter: Filter, grant: Grant, service: Service) -> Wants:
    entities = service.feed.entities
    test = both(filter.predicate(entities), grant.predicate(entities))
    assert test is not None  # the filter names tables
    return test
