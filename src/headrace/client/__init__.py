"""A client of a running Headrace, for programs: every change once, over any transport.

    for event in Client("http://127.0.0.1:3000").changes(["orders"], cursor="billing"):
        ...                               # what is to be done with it
        client.ack("billing", event)      # and never again

It reconnects by itself and goes on where it was. `AsyncClient` is the same for asyncio.
"""

from .aio import AsyncClient
from .client import Client
from .messages import MissedChanges as Gap
from .messages import ReceivedEvent as Event
from .trust import TlsTrust

__all__ = ["AsyncClient", "Client", "Event", "Gap", "TlsTrust"]
