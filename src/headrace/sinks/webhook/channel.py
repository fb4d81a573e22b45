"""Events handed to an endpoint: many rows at once, each row's in order."""

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
from ..push import UNSENT, Answer, Event, Verdict
from ..push.retry import Schedule
from .address import Endpoint
from .answer import Reply, verdict
from .connection import Late, Lost
from .hiding import Hidden
from .pool import Pool, Unreached
from .request import Message, Post, batch, single

if sys.platform == "win32":
    from asyncio import new_event_loop
else:
    from uvloop import new_event_loop

# After which a call begins no more requests, so that what was accepted is noted now and then.
WINDOW_SECONDS = 2.0
GONE_SECONDS = 10.0  # for which an endpoint is not asked again that is gone


class Asked(NamedTuple):
    """What became of a request."""

    said: Verdict
    reply: Reply | None = None  # None: there was none
    unseen: bool = False  # the endpoint closed a kept connection, and may not have seen it
    again: bool = False  # it was posted once more for that


Ask = Callable[[Message], Awaitable[Asked]]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is asked of an endpoint, and for how long."""

    concurrency: int  # requests at once
    seconds: float  # for a request
    pauses: Schedule  # after answers that there are too many, which do not say until when
    batch_size: int = 0  # events of a request; 0: each goes alone
    batch_bytes: int = 1 << 20


class HttpChannel:
    """An endpoint, open in one process."""

    def __init__(
        self,
        endpoint: Endpoint,
        post: Post,
        limits: Limits,
        *,
        tls: ssl.SSLContext | None,
        private: bool,
        hidden: Hidden,
    ) -> None:
        self._endpoint = endpoint
        self._post = post
        self._limits = limits
        self._hidden = hidden
        self._loop: asyncio.AbstractEventLoop = new_event_loop()
        self._pool = Pool(self._loop, endpoint, tls=tls, private=private)
        self._rests_until = 0.0  # the endpoint wants not to be asked before
        self._why = ""
        self._gone = False  # it rests because it is gone
        self._tired = 0  # calls in a row that it took nothing of, being asked too much

    def send(self, events: Sequence[Event]) -> Sequence[Verdict]:
        """Post some events; SinkRefused when the endpoint is gone for good.

        If there is something to tell of other events of that call, that is raised by the next one.
        """
        left = self._rests_until - self._loop.time()
        if left > 0:
            if self._gone:
                raise self._refusal()
            return [Verdict(Answer.UNSENT, self._why, left)] * len(events)
        pause = self._limits.pauses.wait(self._tired + 1)
        sending = _Sending(self.post, self._limits, events, pause)
        self._loop.run_until_complete(sending.run())
        self._gone = sending.gone
        if self._gone and not sending.telling:
            raise self._refusal()
        rest = GONE_SECONDS if self._gone else sending.rest
        self._rests_until, self._why = self._loop.time() + rest, sending.others.reason
        self._tired = self._tired + 1 if sending.rest and not sending.accepted else 0
        return sending.verdicts

    def _refusal(self) -> SinkRefused:
        return SinkRefused(
            f"{self._endpoint.origin} answered 410 Gone: the endpoint takes no more events",
            hint="Set the url of one that does, or run `headrace redrive SINK` once it does again.",
        )

    def close(self) -> None:
        """Let go of its connections."""
        if not self._loop.is_closed():
            self._pool.close()
            # Transports tell their end in the next turn of the loop.
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def post(self, message: Message) -> Asked:
        """What becomes of a message."""
        asked = await self._asked(message)
        if not asked.unseen:
            return asked
        # Many servers close a connection just as it is used again: that is no failure. The message
        # has its id, so that one which did arrive is known by it.
        asked = await self._asked(message, anew=True)
        return asked._replace(again=asked.said.answer is not Answer.UNREACHABLE)

    async def _asked(self, message: Message, *, anew: bool = False) -> Asked:
        now, seconds = time.time(), self._limits.seconds
        request = self._post.written(message, int(now))
        try:
            reply = await self._pool.ask(request, seconds, anew=anew)
        except Late:
            return Asked(Verdict(Answer.FAILED, f"no answer within {seconds:g} s"))
        except Lost as error:
            return Asked(Verdict(Answer.FAILED, str(error)), unseen=error.unseen)
        except Unreached as error:
            return Asked(Verdict(Answer.UNREACHABLE, str(error)))
        return Asked(verdict(reply, now=now, hidden=self._hidden), reply)


class _Sending:
    """One call's events on their way."""

    def __init__(self, post: Ask, limits: Limits, events: Sequence[Event], pause: float) -> None:
        self.verdicts: list[Verdict] = [UNSENT] * len(events)
        self.accepted = 0  # requests
        self.others = UNSENT  # what is said of events that were not begun
        self.rest = 0.0  # seconds for which the endpoint wants no more
        self.gone = False  # for ever
        self._pause = pause  # the least that it gets then
        self._post = post
        self._limits = limits
        self._events = events
        self._held: set[str] = set()  # rows of which an event was not accepted
        self._again: Counter[int] = Counter()  # how often events were posted once more
        self._over = False  # nothing more is begun
        self._until = 0.0  # after which nothing more is

    @property
    def telling(self) -> bool:
        """Whether anybody may have taken something, or refused it."""
        return any(each.answer is not Answer.UNSENT or each.repeats for each in self.verdicts)

    async def run(self) -> None:
        """Send all, or as many as the endpoint lets us."""
        self._until = asyncio.get_running_loop().time() + WINDOW_SECONDS
        lanes = self._batched() if self._limits.batch_size else self._alone()
        outcomes = await asyncio.gather(*lanes, return_exceptions=True)
        # Only when all have come to an end: no request is left on its way.
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        for index, event in enumerate(self._events):
            if self.verdicts[index] is UNSENT and event.row not in self._held:
                self.verdicts[index] = self.others
        for index, times in self._again.items():
            self.verdicts[index] = self.verdicts[index]._replace(repeats=times)

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
                said, _ = await self._ask(single(self._events[index]), [index])
                self._note([index], said)
                if said.answer is not Answer.ACCEPTED:
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
        # The last is the next: what was refused goes back in two parts.
        parts = list(reversed(self._cut(indexes)))
        while parts and not self._over:
            part = [i for i in parts.pop() if self._events[i].row not in self._held]
            if not part:
                continue
            said, reply = await self._ask(batch([self._events[i] for i in part]), part)
            refused = said.answer is Answer.REFUSED
            if refused and len(part) > 1 and reply is not None and reply.parted:
                half = len(part) // 2
                parts += [part[half:], part[:half]]
                continue
            self._note(part, said)

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

    async def _ask(self, message: Message, part: Sequence[int]) -> tuple[Verdict, Reply | None]:
        accepted = self.accepted
        try:
            said, reply, _, again = await self._post(message)
        except BaseException:
            self._over = True
            raise
        if again:
            self._again.update(part)
        if said.answer is Answer.ACCEPTED:
            self.accepted += 1
        elif said.answer is Answer.UNREACHABLE:
            self.others, self._over = said, True
        elif reply is None:
            # It is there and says nothing. Unless others were taken meanwhile, each further
            # event would cost as long a wait.
            self._over |= self.accepted == accepted
        elif reply.tired:
            # The whole endpoint rests: others would only be told the same.
            said = said._replace(after=max(said.after, self._pause))
            self.rest = max(self.rest, said.after)
            self.others, self._over = Verdict(Answer.UNSENT, said.reason, self.rest), True
        elif reply.gone:
            self.others, self._over, self.gone = said, True, True
        return said, reply

    def _note(self, part: Sequence[int], said: Verdict) -> None:
        # Only here: a batch that is parted goes on until something is known of a part.
        self._over |= asyncio.get_running_loop().time() >= self._until
        for index in part:
            self.verdicts[index] = said
            if said.answer is not Answer.ACCEPTED:
                self._held.add(self._events[index].row)
