"""The limit of a fan-out: a bare `websockets` server that broadcasts events of a given size.

It keeps nothing, reads no log, filters nothing, and writes whether or not a client keeps up.
"""

import asyncio
import sys

import msgspec
import uvloop
from websockets.asyncio.server import ServerConnection, broadcast, serve

from .delivery_clients import END
from .process import answer


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is broadcast, and how often."""

    port: int
    subscribers: int
    events: int
    rate: float  # events a second
    size: int  # bytes of an event

    def encode(self) -> str:
        """As the argument of a child."""
        return msgspec.json.encode(self).decode()


def event(size: int) -> str:
    """A text of so many bytes that ends as an event does."""
    return "x" * (size - len(END)) + END.decode()


class Peer:
    """Greets clients as the protocol has it, then tells them all the same."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._subscribed: set[ServerConnection] = set()
        self._complete = asyncio.Event()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Until the last client has left."""
        task = self._task
        async with serve(self._greet, "127.0.0.1", task.port, compression=None, ping_interval=None):
            answer({"ready": True})
            await self._complete.wait()
            await asyncio.sleep(1)  # for the clients' process to be ready to read
            answer({"seconds": await self._broadcast()})
            await self._over.wait()

    async def _greet(self, connection: ServerConnection) -> None:
        for word in ("auth_success", "subscription_confirmed"):
            await connection.recv()
            await connection.send(f'{{"type":"{word}"}}')
        self._subscribed.add(connection)
        if len(self._subscribed) == self._task.subscribers:
            self._complete.set()
        await connection.wait_closed()
        self._subscribed.discard(connection)
        if not self._subscribed:
            self._over.set()

    async def _broadcast(self) -> float:
        now, task = asyncio.get_running_loop().time, self._task
        text, began = event(task.size), now()
        for number in range(task.events):
            await asyncio.sleep(max(0.0, began + number / task.rate - now()))
            broadcast(self._subscribed, text)
        return now() - began


if __name__ == "__main__":
    uvloop.run(Peer(msgspec.json.decode(sys.argv[1], type=Task)).run())
