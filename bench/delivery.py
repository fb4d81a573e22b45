"""Delivery: from a commit to many clients, what a client costs, and one that stops reading."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from headrace.testing import PostgresDatabase, free_port

from . import delivery_peer
from .delivery_clients import Kind, Manner, Task, Told
from .delivery_report import Delay, Idle, Offer, Reached, Slow
from .delivery_server import TABLE, Serving, Shares, Writer, serving
from .process import child, environment, module, next_line

RATE, SUBSCRIBERS, SECONDS = 1000, 100, 15.0  # of the delays
KINDS: tuple[Kind, ...] = ("websocket", "sse")
OFFERS = (Offer(100, 500), Offer(1000, 50), Offer(100, 1000), Offer(1000, 100))
OFFER_SECONDS = 10.0
IDLE, WARM, IDLE_SECONDS = 5000, 200, 10.0
STUCK, FIRST_STUCK, BESIDE = 20, 5, 10  # who stop reading, who did so before, who go on
LARGE, LARGE_RATE = 20_000, 100  # bytes of a row, and rows a second: soon more than is kept
FILL_SECONDS = 30.0  # until the server has in memory all that it keeps for everybody

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """A server, and what is written for it."""

    serving: Serving
    database: PostgresDatabase
    writer: Writer

    def task(self, kind: Kind, subscribers: int, *, manner: Manner, events: int = 0) -> Task:
        """Clients of the server."""
        return Task(
            kind=kind,
            port=self.serving.port,
            table=TABLE,
            key=self.serving.key,
            subscribers=subscribers,
            manner=manner,
            events=events,
        )

    @property
    def resident(self) -> float:
        """KB that the server's process holds."""
        return float(psutil.Process(self.serving.pid).memory_info().rss) / 1024

    @property
    def unsent(self) -> float:
        """KB that the kernel keeps of what the server has sent."""
        port = f":{self.serving.port:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        queues = [row[4].partition(":")[0] for row in rows if row[1].endswith(port)]
        return sum(int(queue, 16) for queue in queues) / 1024


@contextmanager
def place(database: PostgresDatabase, folder: Path) -> Iterator[Place]:
    """A server of its own for one measurement."""
    with serving(database, folder) as served, Writer(database) as writer:
        yield Place(served, database, writer)
    database.drop_slots()
    database.execute("DROP PROCEDURE public.bench_deliver; DROP TABLE public.bench_delivery")


@contextmanager
def bystanders(task: Task) -> Iterator[None]:
    """Clients that are connected for as long as the context lasts."""
    command = module("delivery_clients", task.encode())
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            next_line(process)  # all are subscribed
            yield
        finally:
            process.kill()


# --- commit to client ----------------------------------------------------------------------------


def delays(database: PostgresDatabase, folder: Path, *, seconds: float) -> list[Delay]:
    """A hundred clients of each protocol, at a thousand changes a second."""
    measured = []
    for kind in KINDS:
        (folder / kind).mkdir()
        with place(database, folder / kind) as at:
            measured.append(_delay(at, kind, round(seconds * RATE)))
    return measured


def _delay(at: Place, kind: Kind, changes: int) -> Delay:
    told, used = _delivered(at, Offer(SUBSCRIBERS, RATE), kind, changes=changes, manner="time")
    return Delay(kind, told, used)


def _delivered(
    at: Place, offer: Offer, kind: Kind, *, changes: int, manner: Manner
) -> tuple[Told, dict[str, float]]:
    """What clients are told of some changes, and the seconds of processor time it took."""
    task = at.task(kind, offer.subscribers, manner=manner, events=changes)
    with child(module("delivery_clients", task.encode())) as clients:
        next_line(clients)  # all are subscribed
        shares = Shares.of(at.serving, at.database)
        at.writer.start(changes, offer.rate)
        told = msgspec.json.decode(next_line(clients), type=Told)
        used = shares.seconds()
        at.writer.wait()
    return told, {**used, "clients": told.cpu}


# --- fan-out -------------------------------------------------------------------------------------


def fanout(database: PostgresDatabase, folder: Path, *, seconds: float, say: Say) -> list[Reached]:
    """Each offer to Headrace, then events of the same size to its peer, with the same clients."""
    measured = []
    for number, offer in enumerate(OFFERS):
        (folder / str(number)).mkdir()
        changes = round(seconds * offer.rate)
        with place(database, folder / str(number)) as at:
            told, used = _delivered(at, offer, "websocket", changes=changes, manner="count")
        ours = Reached(offer, "Headrace", told, used)
        peer = _broadcast(offer, changes, size=round(told.size) - 4)  # less the frame's head
        for reached in (ours, peer):
            say(f"fan-out: {offer}: {reached.who} {reached.told.rate:,.0f} deliveries/s")
        measured += [ours, peer]
    return measured


def _broadcast(offer: Offer, events: int, *, size: int) -> Reached:
    port = free_port()
    peer = delivery_peer.Task(
        port=port, subscribers=offer.subscribers, events=events, rate=offer.rate, size=size
    )
    task = Task(
        kind="websocket",
        port=port,
        table=TABLE,
        subscribers=offer.subscribers,
        manner="count",
        events=events,
    )
    with child(module("delivery_peer", peer.encode())) as server:
        next_line(server)
        with child(module("delivery_clients", task.encode())) as clients:
            next_line(clients)
            shares = Shares({"server": lambda: [psutil.Process(server.pid)]})
            told = msgspec.json.decode(next_line(clients), type=Told)
            used = shares.seconds()
    return Reached(offer, "websockets broadcast", told, {**used, "clients": told.cpu})


# --- idle ----------------------------------------------------------------------------------------


def idle(database: PostgresDatabase, folder: Path, *, subscribers: int, seconds: float) -> Idle:
    """What clients cost that are only there."""
    with place(database, folder) as at:
        warm = at.task("websocket", WARM, manner="hold")
        many = at.task("websocket", subscribers, manner="hold")
        with bystanders(warm):
            time.sleep(1)  # what the first ones made the server load is not theirs
            before = at.resident
            with bystanders(many):
                time.sleep(2)
                held = at.resident - before
                shares, began = Shares.of(at.serving, database), time.perf_counter()
                time.sleep(seconds)
                used = shares.seconds()["server"] / (time.perf_counter() - began)
    return Idle(subscribers, held / subscribers, 100 * used)


# --- a reader that stops -------------------------------------------------------------------------


def slow(database: PostgresDatabase, folder: Path, *, seconds: float) -> list[Slow]:
    """Clients of each protocol that stop reading, and others beside them."""
    measured = []
    for kind in KINDS:
        (folder / kind).mkdir()
        with place(database, folder / kind) as at:
            measured.append(_slow(at, kind, seconds))
    return measured


def _slow(at: Place, kind: Kind, seconds: float) -> Slow:
    # First without them: it fills what the server keeps for everybody, and gives the delay
    # that the others have without them.
    alone = _large(at, max(FILL_SECONDS * min(1.0, seconds / SECONDS), 1.0))
    few = at.task(kind, FIRST_STUCK, manner="ignore")
    many = msgspec.structs.replace(few, subscribers=STUCK, first=1 + FIRST_STUCK)
    with bystanders(few):  # what the first ones made the server load is not theirs
        time.sleep(1)
        before, unsent = at.resident, at.unsent
        with bystanders(many):
            beside = _large(at, seconds)
            time.sleep(1)
            kernel = at.unsent - unsent
            held = at.resident - before + kernel
    return Slow(kind, held / STUCK, kernel / STUCK, alone, beside)


def _large(at: Place, seconds: float) -> Told:
    changes = round(seconds * LARGE_RATE)
    # Those who go on begin where the log ends, so they are clients of the WebSocket.
    task = at.task("websocket", BESIDE, manner="time", events=changes)
    with child(module("delivery_clients", task.encode())) as clients:
        next_line(clients)
        at.writer.start(changes, LARGE_RATE, size=LARGE)
        told = msgspec.json.decode(next_line(clients), type=Told)
        at.writer.wait()
    return told
