"""Events posted to an endpoint: many rows at once, each row in order."""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from ...errors import SinkRefused
from ...retry import Backoff
from ..push import UNSENT, DeliveryOutcome, Event, Reply
from .address import Endpoint
from .pool import ConnectionPool, EndpointUnreachable, ResponseLost, ResponseTimeout
from .request import RequestEncoder, WebhookMessage, batch, single
from .response import HttpResponse, SecretMask, reply_to

if sys.platform == "win32":
    from asyncio import new_event_loop
else:
    from uvloop import new_event_loop

# After which a call begins no more requests, so that what was accepted is recorded now and then.
WINDOW_SECONDS = 2.0
GONE_SECONDS = 10.0  # for which an endpoint that is gone is not tried again


class PostResult(NamedTuple):
    """What became of a request."""

    reply: Reply
    response: HttpResponse | None = None  # None: none came
    unseen: bool = False  # the endpoint closed a kept connection, and may not have read it
    again: bool = False  # it was therefore posted once more


PostMessage = Callable[[WebhookMessage], Awaitable[PostResult]]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How many requests at once, how large, and for how long."""

    concurrency: int  # requests at once
    seconds: float  # for a request
    pauses: Backoff  # after a 429 without Retry-After
    batch_size: int = 0  # events of a request; 0: each goes alone
    batch_bytes: int = 1 << 20


class HttpChannel:
    """The channel of the webhook sink."""

    def __init__(
        self,
        endpoint: Endpoint,
        encoder: RequestEncoder,
        limits: RequestLimits,
        *,
        tls: ssl.SSLContext | None,
        private: bool,
        mask: SecretMask,
    ) -> None:
        self._endpoint = endpoint
        self._encoder = encoder
        self._limits = limits
        self._mask = mask
        self._loop: asyncio.AbstractEventLoop = new_event_loop()
        self._pool = ConnectionPool(self._loop, endpoint, tls=tls, private=private)
        self._paused_until = 0.0  # no request before
        self._why = ""
        self._gone = False  # it is paused because it is gone
        self._throttled = 0  # calls in a row that were throttled, with nothing accepted

    def send(self, events: Sequence[Event]) -> Sequence[Reply]:
        """Post some events; SinkRefused when the endpoint is gone for good.

        If other events of that call have replies, the next call raises it.
        """
        left = self._paused_until - self._loop.time()
        if left > 0:
            if self._gone:
                raise self._refusal()
            return [Reply(DeliveryOutcome.UNSENT, self._why, left)] * len(events)
        least_pause = self._limits.pauses.wait(self._throttled + 1)
        sending = _WindowPoster(self.post, self._limits, events, least_pause)
        self._loop.run_until_complete(sending.run())
        self._gone = sending.gone
        if self._gone and not sending.has_replies:
            raise self._refusal()
        paused = GONE_SECONDS if self._gone else sending.pause
        self._paused_until, self._why = self._loop.time() + paused, sending.others.reason
        self._throttled = self._throttled + 1 if sending.pause and not sending.accepted else 0
        return sending.replies

    def _refusal(self) -> SinkRefused:
        return SinkRefused(
            f"{self._endpoint.origin} answered 410 Gone: the endpoint takes no more events",
            hint="Set the url of one that does, or run `headrace redrive SINK` once it does again.",
        )

    def close(self) -> None:
        """Close its connections."""
        if not self._loop.is_closed():
            self._pool.close()
            # Transports end in the next turn of the loop.
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def post(self, message: WebhookMessage) -> PostResult:
        """Post a message, once more if a kept connection was closed at its beginning."""
        result = await self._post_once(message)
        if not result.unseen:
            return result
        # Many servers close a connection just as it is used again: that is no failure. The message
        # has its id, so that the receiver can drop a repeat.
        result = await self._post_once(message, anew=True)
        return result._replace(again=result.reply.outcome is not DeliveryOutcome.UNREACHABLE)

    async def _post_once(self, message: WebhookMessage, *, anew: bool = False) -> PostResult:
        now, seconds = time.time(), self._limits.seconds
        request = self._encoder.encode(message, int(now))
        try:
            response = await self._pool.request(request, seconds, anew=anew)
        except ResponseTimeout:
            return PostResult(Reply(DeliveryOutcome.FAILED, f"no answer within {seconds:g} s"))
        except ResponseLost as error:
            return PostResult(Reply(DeliveryOutcome.FAILED, str(error)), unseen=error.unseen)
        except EndpointUnreachable as error:
            return PostResult(Reply(DeliveryOutcome.UNREACHABLE, str(error)))
        return PostResult(reply_to(response, now=now, mask=self._mask), response)


class _WindowPoster:
    """Posts the events of one call."""

    def __init__(
        self, post: PostMessage, limits: RequestLimits, events: Sequence[Event], pause: float
    ) -> None:
        self.replies: list[Reply] = [UNSENT] * len(events)
        self.accepted = 0  # requests
        self.others = UNSENT  # the reply for events that were not posted
        self.pause = 0.0  # seconds for which the endpoint wants no requests
        self.gone = False  # for ever
        self._least_pause = pause
        self._post = post
        self._limits = limits
        self._events = events
        self._failed_rows: set[str] = set()  # an event of theirs was not accepted
        self._again: Counter[int] = Counter()  # how often an event was posted once more
        self._over = False  # no further request is begun
        self._until = 0.0  # no request is begun after this time

    @property
    def has_replies(self) -> bool:
        """Whether an event may have been accepted or refused."""
        return any(
            each.outcome is not DeliveryOutcome.UNSENT or each.repeats for each in self.replies
        )

    async def run(self) -> None:
        """Post all events, or as many as the endpoint lets us."""
        self._until = asyncio.get_running_loop().time() + WINDOW_SECONDS
        lanes = self._batched() if self._limits.batch_size else self._alone()
        outcomes = await asyncio.gather(*lanes, return_exceptions=True)
        # Only when all have ended: no request is left on its way.
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        for index, event in enumerate(self._events):
            if self.replies[index] is UNSENT and event.row not in self._failed_rows:
                self.replies[index] = self.others
        for index, times in self._again.items():
            self.replies[index] = self.replies[index]._replace(repeats=times)

    # --- events alone ----------------------------------------------------------------------------

    def _alone(self) -> list[asyncio.Task[None]]:
        rows: dict[str, list[int]] = {}
        for index, event in enumerate(self._events):
            rows.setdefault(event.row, []).append(index)
        waiting = deque(rows.values())
        lanes = min(self._limits.concurrency, len(waiting))
        return [asyncio.ensure_future(self._rows(waiting)) for _ in range(lanes)]

    async def _rows(self, waiting: deque[list[int]]) -> None:
        while waiting:
            for index in waiting.popleft():
                if self._over:
                    return
                reply, _ = await self._posted(single(self._events[index]), [index])
                self._note([index], reply)
                if reply.outcome is not DeliveryOutcome.ACCEPTED:
                    break

    # --- batches ---------------------------------------------------------------------------------

    def _batched(self) -> list[asyncio.Task[None]]:
        """Rows spread over as many lanes as full batches need, so that each row keeps its order."""
        full = -(-len(self._events) // self._limits.batch_size)
        count = min(self._limits.concurrency, full)
        lanes: list[list[int]] = [[] for _ in range(count)]
        for index, event in enumerate(self._events):
            lanes[crc32(event.row.encode()) % count if count > 1 else 0].append(index)
        return [asyncio.ensure_future(self._lane(lane)) for lane in lanes if lane]

    async def _lane(self, indexes: list[int]) -> None:
        # The last one is next: a refused batch goes back in two parts.
        parts = list(reversed(self._cut(indexes)))
        while parts and not self._over:
            part = [i for i in parts.pop() if self._events[i].row not in self._failed_rows]
            if not part:
                continue
            reply, response = await self._posted(batch([self._events[i] for i in part]), part)
            refused = reply.outcome is DeliveryOutcome.REFUSED
            if refused and len(part) > 1 and response is not None and response.splits_batch:
                half = len(part) // 2
                parts += [part[half:], part[:half]]
                continue
            self._note(part, reply)

    def _cut(self, indexes: Sequence[int]) -> list[list[int]]:
        """The events in batches of at most so many, and of so many bytes."""
        parts: list[list[int]] = []
        room = 0
        for index in indexes:
            length = len(self._events[index].payload or b"")
            if not parts or len(parts[-1]) >= self._limits.batch_size or length > room:
                parts.append([])
                room = self._limits.batch_bytes
            parts[-1].append(index)
            room -= length
        return parts

    # --- both ------------------------------------------------------------------------------------

    async def _posted(
        self, message: WebhookMessage, part: Sequence[int]
    ) -> tuple[Reply, HttpResponse | None]:
        accepted = self.accepted
        try:
            reply, response, _, again = await self._post(message)
        except BaseException:
            self._over = True
            raise
        if again:
            self._again.update(part)
        if reply.outcome is DeliveryOutcome.ACCEPTED:
            self.accepted += 1
        elif reply.outcome is DeliveryOutcome.UNREACHABLE:
            self.others, self._over = reply, True
        elif response is None:
            # It is there and sends no response. Unless others were accepted meanwhile, each further
            # event would cost as long a wait.
            self._over |= self.accepted == accepted
        elif response.throttles:
            # It throttles all requests, not this one alone.
            reply = reply._replace(retry_after=max(reply.retry_after, self._least_pause))
            self.pause = max(self.pause, reply.retry_after)
            self.others, self._over = Reply(DeliveryOutcome.UNSENT, reply.reason, self.pause), True
        elif response.gone:
            self.others, self._over, self.gone = reply, True, True
        return reply, response

    def _note(self, part: Sequence[int], reply: Reply) -> None:
        # Only here: a batch that is split goes on until a part of it has a reply.
        self._over |= asyncio.get_running_loop().time() >= self._until
        for index in part:
            self.replies[index] = reply
            if reply.outcome is not DeliveryOutcome.ACCEPTED:
                self._failed_rows.add(self._events[index].row)
