"""Push sinks: changes sent to another system as events. This is the contract of a channel.

    a batch ─▶ events ─▶ by row ─▶ windows ─▶ replies ─▶ ledger, dead letters

A push sink is a class derived from `PushSettings`. Its fields are its settings, and its `connect`
opens a `Channel`, which sends events and returns a `Reply` for each. All else is done here.

- Ordered: the events of one row. A channel gets them in the order of the log, and the next event
  of a row is sent only after the one before it was accepted. Rows are independent of each other.
- May repeat: an event whose reply was lost is sent again with the same id. Consumers drop repeats
  by the id.
- May run at once: the channels of several tasks, each with rows of its own. A channel gets one
  call at a time.
- Settled: an event is settled when the destination has accepted it or when the dead letters have
  it. The later events of a row that has dead letters wait behind them, until a redrive sends them.

`BrokerSettings` adds servers, login and TLS, `Template` is an address with `${table}` in it.
`headrace.testing.ChannelContract` has these promises as tests.

Inside: `events` renders changes and `delivery` sends them, in Spark's `tasks`, through `channels`
that stay open. On the driver `writer` repeats until every event is settled, `ledger` records what
was sent, `deadletters` keeps what was refused and `redrive` sends that again.
"""

from .broker import BrokerSettings, without_secrets
from .contract import ACCEPTED, UNSENT, Channel, DeliveryOutcome, Event, PushDestination, Reply
from .delivery import Policy
from .routing import OperationNames, Routes, Template, escaped, token, within
from .settings import PushSettings
from .window import ReplyWindow, waves
from .wire import client_context

__all__ = [
    "ACCEPTED",
    "UNSENT",
    "BrokerSettings",
    "Channel",
    "DeliveryOutcome",
    "Event",
    "OperationNames",
    "Policy",
    "PushDestination",
    "PushSettings",
    "Reply",
    "ReplyWindow",
    "Routes",
    "Template",
    "client_context",
    "escaped",
    "token",
    "waves",
    "within",
    "without_secrets",
]
