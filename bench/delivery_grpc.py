"""Deliveries over gRPC: to one subscriber and to twenty, beside a bare server of prebuilt bytes.

Every subscriber reads the same stretch of a log from its start, on a connection of its own.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import uvloop

from headrace.change.event import Batch
from headrace.formats.facts import Facts
from headrace.formats.protobuf import Protobuf
from headrace.log import Log
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.serve.grpc import NAME, EventMessages
from headrace.v1 import changefeed_pb2 as v1

from .formats import updates
from .process import Outcome, answer, environment, measure, module, next_line
from .report import Figure, Figures

SUBSCRIBERS = (1, 20)
ALONE, TOGETHER = 20_000, 200_000  # deliveries of a run, with an event a message and with many
LONGEST = 20_000  # changes of the log
JOINED = 256  # events of a message of the bare server, as of Headrace's
WHO = ("Headrace", "bare grpc.aio")
_METHOD = f"/{NAME}/Subscribe"
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each subscriber
)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Who reads how much."""

    log: str
    subscribers: int
    together: bool
    events: int  # that each of them reads
    target: str = ""  # where the server answers

    def encode(self) -> str:
        """As the argument of a child."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        many = "1 subscriber" if self.subscribers == 1 else f"{self.subscribers} subscribers"
        return f"{many}, {'events together' if self.together else 'an event a message'}"


def deliveries(folder: Path, *, factor: float, runs: int) -> Figures:
    """Deliveries a second: of each the best run."""
    log, longest = str(folder / "log"), max(JOINED, round(LONGEST * min(1.0, factor)))
    _write(log, longest)
    figures = []
    for together, count in ((False, ALONE), (True, TOGETHER)):
        for subscribers in SUBSCRIBERS:
            events = min(max(JOINED, round(count * factor / subscribers)), longest)
            task = Task(log=log, subscribers=subscribers, together=together, events=events)
            best = dict.fromkeys(WHO, 0.0)
            for _ in range(runs):
                for who in WHO:
                    best[who] = max(best[who], _read(who, task, folder).rate)
            figures += [Figure(f"{who}: {task}", rate, "/s") for who, rate in best.items()]
    return Figures("Deliveries over gRPC: updates of 8 columns, with their old rows", figures)


def _write(path: str, changes: int) -> None:
    transactions = updates(changes)
    with Log.open(path) as log:
        unknown = msgspec.structs.replace(transactions[0][0].table, version=0)
        table = log.register(unknown)
        told = [
            msgspec.structs.replace(each, table=table) for some in transactions for each in some
        ]
        log.append(table.source, Batch(told, b"bench"))


def _read(who: str, task: Task, folder: Path) -> Outcome:
    with _serving("headrace" if who == WHO[0] else "bare", task) as target:
        reading = msgspec.structs.replace(task, target=target)
        return measure(module("delivery_grpc", "read", reading.encode()), folder)


@contextmanager
def _serving(role: str, task: Task) -> Iterator[str]:
    """A server in a process of its own, new for each run: it has encoded nothing yet."""
    with subprocess.Popen(
        module("delivery_grpc", role, task.encode()),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield next_line(process).strip()
        finally:
            process.kill()


# --- in a process of their own -------------------------------------------------------------------


def _serve_headrace(task: Task) -> None:
    settings = ServerSettings(port=0, grpc_port=0)
    with Log.open(task.log) as log:
        app = create_app(log, statuses=list, copy_again=None, settings=settings)
        with BackgroundServer(app, settings) as server:
            print(server.grpc_target, flush=True)
            sys.stdin.read()


async def _serve_bare(task: Task) -> None:
    messages = _messages(task)

    async def subscribe(request: bytes, context: Any) -> None:
        for message in messages:
            await context.write(message)

    server = grpc.aio.server()
    methods: dict[str, Any] = {"Subscribe": grpc.unary_stream_rpc_method_handler(subscribe)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def _messages(task: Task) -> Sequence[bytes]:
    """What Headrace sends, made before anybody asks."""
    format = EventMessages(Protobuf(Facts()))
    changes = [change for some in updates(task.events) for change in some]
    events = [event for event in map(format.encode, changes) if event is not None]
    if not task.together:
        return events
    return [b"".join(events[at : at + JOINED]) for at in range(0, len(events), JOINED)]


async def _read_all(task: Task) -> Outcome:
    began = time.perf_counter()
    sizes = await asyncio.gather(*(_subscriber(task) for _ in range(task.subscribers)))
    seconds = time.perf_counter() - began
    assert len(set(sizes)) == 1, "not all were told the same"
    return Outcome(task.events * task.subscribers, seconds)


async def _subscriber(task: Task) -> int:
    """Reads everything without looking into it; returns how many bytes came."""
    request = v1.SubscribeRequest(limit=task.events, together=task.together).SerializeToString()
    async with grpc.aio.insecure_channel(task.target, options=_OPTIONS) as channel:
        call: Any = channel.unary_stream(_METHOD)  # which leaves messages as they are
        size = 0
        async for message in call(request):
            size += len(message)
        return size


def main(role: str, encoded: str) -> None:
    """One of the processes of a run."""
    task = msgspec.json.decode(encoded, type=Task)
    match role:
        case "headrace":
            _serve_headrace(task)
        case "bare":
            uvloop.run(_serve_bare(task))
        case "read":
            answer(uvloop.run(_read_all(task)))


if __name__ == "__main__":
    main(*sys.argv[1:])
