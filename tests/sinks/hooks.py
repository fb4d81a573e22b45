"""What the tests of the webhook sink share: events, and a channel to a receiver."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headrace.formats.facts import Facts
from headrace.formats.savegress import Savegress
from headrace.secret import Secret
from headrace.sinks.push import DeliveryOutcome, Event, Reply
from headrace.sinks.webhook.channel import HttpChannel
from headrace.sinks.webhook.sink import Webhook
from tests.changes import COMMIT_TIME, make_change
from tests.sinks.receiver import Receiver

SECRET, PREVIOUS = "whsec_YSBrZXkgb2YgdHdlbnR5LWZvdXIgYnl0ZQ==", "the secret before"


def event(sequence: int, row: object = "1", payload: bytes | None = None) -> Event:
    """An event of a row, which says its sequence."""
    body = b'{"n":%d}' % sequence if payload is None else payload
    return Event(
        sequence, 0, f"evt_{sequence}", f"shop|public.users:{row}", "INSERT", "shop", "public",
        "users", '{"id":1}', COMMIT_TIME, body,
    )  # fmt: skip


def rendered(sequence: int) -> Event:
    """An event as the format savegress writes it."""
    change = make_change(
        key={"id": sequence}, after={"id": sequence, "name": "x"}, sequence=sequence,
        ordinal=sequence,
    )  # fmt: skip
    payload = Savegress(Facts()).encode(change)
    assert payload is not None
    return event(sequence, sequence, payload)._replace(id=change.id)


def sink(url: str, /, **settings: Any) -> Webhook:
    """The sink, allowed to reach a receiver on this machine."""
    given: dict[str, Any] = {
        "name": "hooks",
        "url": Secret(url),
        "timeout_seconds": 10.0,
        "allow_private_networks": True,
    }
    return Webhook(**(given | settings))


@contextmanager
def channel(to: Receiver | str, **settings: Any) -> Iterator[HttpChannel]:
    """An open channel to a receiver."""
    opened = sink(to if isinstance(to, str) else to.url, **settings).connect()
    try:
        yield opened
    finally:
        opened.close()


def answers(replies: Sequence[Reply]) -> list[DeliveryOutcome]:
    """What became of each event."""
    return [reply.outcome for reply in replies]
