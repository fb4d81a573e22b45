"""Destinations kept open in one of Spark's Python processes, from task to task."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from ...errors import SinkUnavailable
from .contract import ACCEPTED, Channel, DeliveryOutcome, Event, PushDestination, Reply

logger = logging.getLogger(__name__)

_MOST = 8  # open at once; a process works for few sinks

# In the order of their last use. Compared and not hashed: settings may hold what has no hash.
_open: list[tuple[PushDestination, Channel]] = []
_lock = threading.Lock()


class ReconnectingChannel:
    """Sends to a destination; connects when needed, and again after the connection was lost."""

    def __init__(self, destination: PushDestination) -> None:
        self._destination = destination

    def send(self, events: Sequence[Event]) -> Sequence[Reply]:
        """Hand over a window; a destination that cannot be connected to is UNREACHABLE."""
        try:
            channel = _take(self._destination)
        except SinkUnavailable as error:
            return [Reply(DeliveryOutcome.UNREACHABLE, str(error))] * len(events)
        try:
            replies = channel.send(events)
        except SinkUnavailable as error:
            _close(channel)
            return [Reply(DeliveryOutcome.UNREACHABLE, str(error))] * len(events)
        except BaseException:
            _close(channel)
            raise
        if _lost(replies):
            _close(channel)
        else:
            _give_back(self._destination, channel)
        return replies


def _lost(replies: Sequence[Reply]) -> bool:
    if replies.count(ACCEPTED) == len(replies):  # far quicker than to look at each
        return False
    return any(reply.outcome is DeliveryOutcome.UNREACHABLE for reply in replies)


def _take(destination: PushDestination) -> Channel:
    """The open channel of a destination, or a new one; it is the caller's alone."""
    with _lock:
        for at, (known, channel) in enumerate(_open):
            if known == destination:
                del _open[at]
                return channel
    return destination.connect()


def _give_back(destination: PushDestination, channel: Channel) -> None:
    with _lock:
        _open.append((destination, channel))
        surplus = [_open.pop(0)[1] for _ in range(len(_open) - _MOST)]
    for each in surplus:
        _close(each)


def _close(channel: Channel) -> None:
    try:
        channel.close()
    except (OSError, SinkUnavailable) as error:
        # What was lost with it is sent again.
        logger.debug("a channel did not close, error=%s", type(error).__name__)


def close_all() -> None:
    """Close every channel of this process."""
    with _lock:
        channels: list[Any] = [channel for _, channel in _open]
        _open.clear()
    for channel in channels:
        _close(channel)
