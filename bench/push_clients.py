"""Events that are ready, sent in a plain loop of the client that Python programs use for a server.

What the loops ask of the server is what the sinks ask: durable, and confirmed before it counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice

import nats
import pika
import redis

from headrace.sinks.push import Event

STREAM = "CDC"
_WINDOW = 1000  # events that are confirmed together, where the client can


def windows(events: Sequence[Event], size: int) -> Iterator[Sequence[Event]]:
    """The events in parts."""
    rest = iter(events)
    while part := list(islice(rest, size)):
        yield part


def by_pika(address: str, events: Sequence[Event]) -> None:
    """RabbitMQ; its plain connection waits for the confirm of each message."""
    host, _, port = address.partition(":")
    with pika.BlockingConnection(pika.ConnectionParameters(host, int(port))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})
        for event in events:
            properties = pika.BasicProperties(
                message_id=event.id,
                delivery_mode=pika.DeliveryMode.Persistent,
                headers={"savegress-event-id": event.id},
            )
            channel.basic_publish("", "orders", event.payload or b"", properties, mandatory=True)


def by_nats(address: str, events: Sequence[Event]) -> None:
    """NATS; a window of messages waits for its answers together."""
    asyncio.run(_by_nats(address, events))


async def _by_nats(address: str, events: Sequence[Event]) -> None:
    client = await nats.connect(f"nats://{address}")
    stream = client.jetstream(publish_async_max_pending=_WINDOW)
    await stream.add_stream(name=STREAM, subjects=["cdc.>"])
    for window in windows(events, _WINDOW):
        waiting = [
            await stream.publish_async(
                "cdc.public.orders", event.payload or b"", headers={"Nats-Msg-Id": event.id}
            )
            for event in window
        ]
        await asyncio.gather(*waiting)
    await client.close()


def by_redis(address: str, events: Sequence[Event]) -> None:
    """Redis; a window of entries is one transaction."""
    host, _, port = address.partition(":")
    with redis.Redis(host, int(port)) as client:
        for window in windows(events, _WINDOW):
            with client.pipeline(transaction=True) as pipeline:
                for event in window:
                    fields = {"id": event.id, "event": event.payload or b""}
                    pipeline.xadd("cdc.public.orders", fields)
                pipeline.execute()
