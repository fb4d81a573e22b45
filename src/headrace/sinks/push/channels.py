"""Destinations kept open in one of Spark's Python processes, from task to task."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from ...errors import SinkUnavailable
from . import ACCEPTED, Answer, Channel, Destination, Event, Verdict

logger = logging.getLogger(__name__)

_MOST = 8  # open at once; a process works for few sinks

# In the order of their last use. Compared and not hashed: settings may hold what has no hash.
_open: list[tuple[Destination, Channel]] = []
_lock = threading.Lock()


class Line:
    """A destination as delivery uses it: connected when needed, and again after it was lost."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    def send(self, events: Sequence[Event]) -> Sequence[Verdict]:
        """Hand over some events."""
        try:
            channel = _take(self._destination)
        except SinkUnavailable as error:
            return [Verdict(Answer.UNREACHABLE, str(error))] * len(events)
        try:
            verdicts = channel.send(events)
        except SinkUnavailable as error:
            _close(channel)
            return [Verdict(Answer.UNREACHABLE, str(error))] * len(events)
        except BaseException:
            _close(channel)
            raise
        if _lost(verdicts):
            _close(channel)
        else:
            _give_back(self._destination, channel)
        return verdicts


def _lost(verdicts: Sequence[Verdict]) -> bool:
    if verdicts.count(ACCEPTED) == len(verdicts):  # far quicker than to look at each
        return False
    return any(verdict.answer is Answer.UNREACHABLE for verdict in verdicts)


def _take(destination: Destination) -> Channel:
    """The open channel of a destination, or a new one; it is the caller's alone."""
    with _lock:
        for at, (known, channel) in enumerate(_open):
            if known == destination:
                del _open[at]
                return channel
    return destination.connect()


def _give_back(destination: Destination, channel: Channel) -> None:
    with _lock:
        _open.append((destination, channel))
        surplus = [_open.pop(0)[1] for _ in range(len(_open) - _MOST)]
    for each in surplus:
        _close(each)


def _close(channel: Channel) -> None:
    try:
        channel.close()
    except (OSError, SinkUnavailable) as error:
        # It is given up in any case; whatever was lost with it is sent again.
        logger.debug("a channel did not close, error=%s", type(error).__name__)


def close_all() -> None:
    """Let go of every destination of this process."""
    with _lock:
        channels: list[Any] = [channel for _, channel in _open]
        _open.clear()
    for channel in channels:
        _close(channel)
