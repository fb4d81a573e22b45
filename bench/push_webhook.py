"""Log → webhook: requests of one event and of a batch, beside a loop that only posts.

The receiver is a process of its own on the same machine, and what it costs is part of every figure.
The loop has the same events ready in memory and posts them over the same kind of connections, as
many at once, with the same signatures; what it takes no pipeline can beat.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httptools
import msgspec
import uvloop

from headrace.formats.facts import Facts
from headrace.formats.savegress import Savegress
from headrace.log import Log
from headrace.secret import Secret
from headrace.sinks.push import Event
from headrace.sinks.webhook.address import endpoint
from headrace.sinks.webhook.pool import ConnectionPool
from headrace.sinks.webhook.request import JSON, RequestEncoder, batch, single
from headrace.sinks.webhook.sink import Webhook

from .orders import Orders
from .process import MeasurementFailed, Outcome, answer, environment, measure, module, next_line
from .push import WHO, best, size, through
from .report import Figure, Figures

ROWS = 10_000  # different ones
ALONE, TOGETHER = 20_000, 100_000  # changes of a query's batch
BATCHES, WARM_UP = 3, 1
CONCURRENCY, SECRET = 16, "a secret of the bench"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_SIZE = re.compile(rb'"batch_size":(\d+)')


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Which changes are posted where, and how."""

    log: str
    folder: str
    together: bool
    changes: int  # of a batch of the query
    port: int = 0
    warm_up: int = WARM_UP

    def encode(self) -> str:
        """As the argument of a child."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        return "batches of events" if self.together else "an event a request"

    @property
    def url(self) -> str:
        """Where the receiver is."""
        return f"http://127.0.0.1:{self.port}/events"

    @property
    def sink(self) -> Webhook:
        """The sink with its defaults."""
        return Webhook(
            name="hooks",
            url=Secret(self.url),
            secret=Secret(SECRET),
            batch=self.together,
            allow_private_networks=True,
        )


def deliveries(folder: Path, *, factor: float, runs: int) -> Figures:
    """Events a second, of each the best run."""
    headrace, loop = WHO
    figures = []
    for together, count, least in ((False, ALONE, 2_000), (True, TOGETHER, 20_000)):
        place = folder / str(together)
        place.mkdir()
        log, changes = str(place / "log"), size(count, factor)
        Orders(log).update(ROWS, batch=changes, batches=BATCHES, warm_up=WARM_UP)
        task = Task(log=log, folder="", together=together, changes=changes)
        rates = best(place, runs, partial(posted, task))
        figures += [
            Figure(f"{headrace}: {task}", rates[headrace], "/s", at_least=least),
            Figure(f"{loop}: {task}", rates[loop], "/s"),
        ]
    return Figures("Log → webhook: updates of 8 columns, to a receiver on this machine", figures)


def posted(task: Task, who: str, place: Path) -> Outcome:
    """One run; every event must have come."""
    with receiver() as (port, count):
        task = msgspec.structs.replace(task, port=port, folder=str(place))
        outcome = measure(module("push_webhook", who, task.encode()), place)
        wanted = task.changes * (BATCHES + task.warm_up)
        if (came := count()) != wanted:
            raise MeasurementFailed(f"{came} events came, not {wanted}")
    return outcome


# --- the receiver --------------------------------------------------------------------------------


@contextmanager
def receiver() -> Iterator[tuple[int, Counting]]:
    """A process that takes whatever is posted; its port, and what has come."""
    command = module("push_webhook", "receiver")
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            port = int(next_line(process))
            yield port, Counting(process)
        finally:
            process.kill()


class Counting:
    """Asks a receiver how many events have come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self) -> int:
        """The events so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(next_line(self._process))


class Taking(asyncio.Protocol):
    """A connection of the receiver; httptools calls its `on_…` methods."""

    events = 0  # of all connections

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        found = _SIZE.search(self._body[0][:200])
        Taking.events += int(found[1]) if found else 1
        self._body.clear()
        self._transport.write(_OK)  # type: ignore[attr-defined]


async def take() -> None:
    """Listen, and tell how many have come whenever a line is read."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Taking, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(Taking.events, flush=True)


# --- Headrace ------------------------------------------------------------------------------------


def headrace(task: Task) -> Outcome:
    """The real query."""
    folder, changes = Path(task.folder), task.changes
    return through(task.sink, task.log, folder, changes=changes, warm_up=task.warm_up)


# --- the loop ------------------------------------------------------------------------------------


def bare(task: Task) -> Outcome:
    """Events that are ready, posted by as many coroutines as the sink has requests at once."""
    with Log.open(task.log) as log:
        encode = Savegress(Facts()).encode
        events = [
            Event(0, 0, change.id, "", "", "", "", "", None, change.transaction.commit_time, told)
            for change in log.read(0, limit=task.changes * (BATCHES + task.warm_up))
            if (told := encode(change)) is not None
        ]
    return uvloop.run(_post_all(task, events))


async def _post_all(task: Task, events: Sequence[Event]) -> Outcome:
    place = endpoint(task.url, private=True)
    post = RequestEncoder(place, JSON, secrets=[Secret(SECRET)], headers={})
    pool = ConnectionPool(asyncio.get_running_loop(), place, tls=None, private=True)
    size = task.sink.batch_size
    messages = (
        (batch(part) for part in batched_of(events, size)) if task.together else map(single, events)
    )

    async def lane() -> None:
        for message in messages:
            reply = await pool.request(post.encode(message, int(time.time())), 30.0)
            if reply.status != 200:
                raise MeasurementFailed(f"the receiver answered {reply.status}")

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(CONCURRENCY)))
    pool.close()
    return Outcome(len(events), time.perf_counter() - began)


def batched_of(events: Sequence[Event], size: int) -> Iterator[Sequence[Event]]:
    """The events in parts."""
    return (events[at : at + size] for at in range(0, len(events), size))


def main(who: str, encoded: str = "") -> None:
    """Be the receiver, or do one task and answer."""
    if who == "receiver":
        uvloop.run(take())
        return
    task = msgspec.json.decode(encoded, type=Task)
    answer(headrace(task) if who == WHO[0] else bare(task))


if __name__ == "__main__":
    main(*sys.argv[1:])
