"""Trying again: how long to wait before the next attempt."""

from .backoff import Backoff

__all__ = ["Backoff"]
