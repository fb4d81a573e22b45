"""Log → RabbitMQ, NATS and Redis: events through a streaming query, beside loops that only send.

The server is a real one on this machine, and what it costs is part of every figure. The loops have
the same events ready in memory. One hands them to the sink's own channel, a window after the other:
what it takes no pipeline can beat. The other is a plain loop of the client that programs use.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.formats.facts import Facts
from headrace.formats.savegress import Savegress
from headrace.log import Log
from headrace.sinks.nats.sink import Nats
from headrace.sinks.push import ACCEPTED, BrokerSettings, Event, Template
from headrace.sinks.rabbitmq.sink import Rabbitmq
from headrace.sinks.redis import Redis
from headrace.testing.nats import NatsServer
from headrace.testing.processes import ServerProcess
from headrace.testing.rabbitmq import RabbitmqServer
from headrace.testing.redis import RedisServer

from . import push_clients
from .orders import Orders
from .process import MeasurementFailed, Outcome, answer, measure, module
from .push import best, size, through
from .report import Figure, Figures

ROWS = 100_000  # different ones
CHANGES = 100_000  # of a query's batch
BATCHES, WARM_UP = 3, 1
HEADRACE, LOOP = "Headrace", "a loop of the same channel"
TARGET = 20_000  # events a second


class Server(NamedTuple):
    """A server, and the client that programs use for it."""

    start: Callable[[], ServerProcess]
    client: str
    loop: Callable[[str, Sequence[Event]], None]
    events: int  # that the client's loop sends, as it may be slow


SERVERS: Mapping[str, Server] = {
    "RabbitMQ": Server(RabbitmqServer, "a loop of pika", push_clients.by_pika, 10_000),
    "NATS": Server(NatsServer, "a loop of nats-py", push_clients.by_nats, 50_000),
    "Redis": Server(RedisServer, "a loop of redis-py", push_clients.by_redis, 200_000),
}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Which changes are sent where."""

    log: str
    folder: str
    server: str
    address: str
    changes: int  # of a batch of the query
    warm_up: int = WARM_UP

    def encode(self) -> str:
        """As the argument of a child."""
        return msgspec.json.encode(self).decode()

    @property
    def events(self) -> int:
        """How many there are in all."""
        return self.changes * (BATCHES + self.warm_up)

    @property
    def sink(self) -> BrokerSettings:
        """The sink with its defaults; it makes what it needs."""
        given: dict[str, Any] = {"name": "events", "servers": self.address}
        if self.server == "RabbitMQ":
            # The kind that docs/sinks.md advises: a classic queue takes half as many.
            given |= {"declare_exchange": "direct", "declare_queue": Template("${table}")}
            return Rabbitmq(**given, queue_arguments={"x-queue-type": "quorum"})
        return Nats(**given, stream="CDC") if self.server == "NATS" else Redis(**given)


def deliveries(name: str, folder: Path, *, factor: float, runs: int) -> Figures:
    """Events a second to one server, of each the best run; every run has a server of its own."""
    changes, log = size(CHANGES, factor), str(folder / "log")
    Orders(log).update(ROWS, batch=changes, batches=BATCHES, warm_up=WARM_UP)
    server = SERVERS[name]

    def one(who: str, place: Path) -> Outcome:
        with server.start() as running:
            task = Task(
                log=log, folder=str(place), server=name, address=running.address, changes=changes
            )
            return sent(who, task)

    rates = best(folder, runs, one, (HEADRACE, LOOP, server.client))
    figures = [
        Figure(who, rate, "events/s", at_least=TARGET if who == HEADRACE else None)
        for who, rate in rates.items()
    ]
    return Figures(f"Log → {name}: updates of 8 columns, to a server on this machine", figures)


def sent(who: str, task: Task) -> Outcome:
    """One run."""
    return measure(module("push_queues", who, task.encode()), Path(task.folder))


def ready(task: Task, count: int) -> list[Event]:
    """The first events of the log."""
    with Log.open(task.log) as log:
        encode = Savegress(Facts()).encode
        return [
            Event(
                change.sequence,
                0,
                change.id,
                str(change.sequence),
                change.op.value,
                change.table.source,
                change.table.schema,
                change.table.name,
                "{}",
                change.transaction.commit_time,
                encode(change),
            )
            for change in log.read(0, limit=count)
        ]


def bare(task: Task) -> Outcome:
    """Events that are ready, handed to the sink's channel window by window."""
    events = ready(task, task.events)
    sink = task.sink
    channel = sink.connect()
    began = time.perf_counter()
    for window in push_clients.windows(events, sink.batch_size):
        replies = channel.send(window)
        if set(replies) != {ACCEPTED}:
            raise MeasurementFailed(f"events were not accepted: {set(replies)}")
    seconds = time.perf_counter() - began
    channel.close()
    return Outcome(len(events), seconds)


def plain(task: Task) -> Outcome:
    """Events that are ready, sent by the client that programs use."""
    server = SERVERS[task.server]
    events = ready(task, min(task.events, server.events))
    began = time.perf_counter()
    server.loop(task.address, events)
    return Outcome(len(events), time.perf_counter() - began)


def main(who: str, given: str) -> None:
    """Do one task and answer."""
    task = msgspec.json.decode(given, type=Task)
    if who == HEADRACE:
        folder, changes, warm_up = Path(task.folder), task.changes, task.warm_up
        answer(through(task.sink, task.log, folder, changes=changes, warm_up=warm_up))
    else:
        answer(bare(task) if who == LOOP else plain(task))


if __name__ == "__main__":
    main(*sys.argv[1:])
