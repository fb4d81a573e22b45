"""Trying again: how long to wait before the next attempt, and a clock that tests can move."""

from .backoff import Backoff
from .clock import DeliveryClock, SystemClock

__all__ = ["Backoff", "DeliveryClock", "SystemClock"]
