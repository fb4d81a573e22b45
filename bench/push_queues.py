"""Log → RabbitMQ, NATS and Redis: events through a streaming query, beside a loop that only sends.

The server is a real one on this machine, and what it costs is part of every figure. The loop has
the same events ready in memory and hands them to the same channel, a window after the other; what
it takes no pipeline can beat.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.formats.facts import Facts
from headrace.formats.savegress import Savegress
from headrace.log import Log
from headrace.sinks._broker import BrokerSettings
from headrace.sinks._push import ACCEPTED, Event
from headrace.sinks._template import Template
from headrace.sinks.nats import Nats
from headrace.sinks.rabbitmq import Rabbitmq
from headrace.sinks.redis import Redis
from headrace.testing.nats import NatsServer
from headrace.testing.processes import ServerProcess
from headrace.testing.rabbitmq import RabbitmqServer
from headrace.testing.redis import RedisServer

from .orders import Orders
from .process import MeasurementFailed, Outcome, answer, measure, module
from .push import best, size, through
from .report import Figure, Figures

ROWS = 100_000  # different ones
CHANGES = 50_000  # of a query's batch
BATCHES, WARM_UP = 4, 2
WHO = ("Headrace", "a loop of the same channel")
TARGET = 20_000  # events a second

SERVERS: Mapping[str, Callable[[], ServerProcess]] = {
    "RabbitMQ": RabbitmqServer,
    "NATS": NatsServer,
    "Redis": RedisServer,
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
            queue = Template("${table}")
            return Rabbitmq(**given, declare_exchange="topic", declare_queue=queue)
        return Nats(**given, stream="CDC") if self.server == "NATS" else Redis(**given)


def deliveries(folder: Path, *, factor: float, runs: int) -> list[Figures]:
    """Events a second, of each the best run; every run has a server of its own."""
    changes = size(CHANGES, factor)
    log = str(folder / "log")
    Orders(log).update(ROWS, batch=changes, batches=BATCHES, warm_up=WARM_UP)
    return [_figures(name, folder, log, changes, runs) for name in SERVERS]


def _figures(name: str, folder: Path, log: str, changes: int, runs: int) -> Figures:
    def one(who: str, place: Path) -> Outcome:
        with SERVERS[name]() as server:
            task = Task(
                log=log, folder=str(place), server=name, address=server.address, changes=changes
            )
            return measure(module("push_queues", who, task.encode()), place)

    rates = best(folder / name, runs, one, WHO)
    headrace, loop = WHO
    figures = [
        Figure(headrace, rates[headrace], "events/s", at_least=TARGET),
        Figure(loop, rates[loop], "events/s"),
    ]
    return Figures(f"Log → {name}: updates of 8 columns, to a server on this machine", figures)


def bare(task: Task) -> Outcome:
    """Events that are ready, handed over window by window."""
    with Log.open(task.log) as log:
        encode = Savegress(Facts()).encode
        events = [
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
            for change in log.read(0, limit=task.events)
        ]
    sink = task.sink
    channel = sink.connect()
    began = time.perf_counter()
    for begin in range(0, len(events), sink.batch_size):
        verdicts = channel.send(events[begin : begin + sink.batch_size])
        if set(verdicts) != {ACCEPTED}:
            raise MeasurementFailed(f"events were not accepted: {set(verdicts)}")
    seconds = time.perf_counter() - began
    channel.close()
    return Outcome(len(events), seconds)


def main(who: str, given: str) -> None:
    """Do one task and answer."""
    task = msgspec.json.decode(given, type=Task)
    if who == WHO[0]:
        folder, changes, warm_up = Path(task.folder), task.changes, task.warm_up
        answer(through(task.sink, task.log, folder, changes=changes, warm_up=warm_up))
    else:
        answer(bare(task))


if __name__ == "__main__":
    main(*sys.argv[1:])
