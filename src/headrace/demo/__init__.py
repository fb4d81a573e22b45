"""The demo: a shop in a real PostgreSQL, captured, served, copied, and proven equal at the end."""

from .play import Demo

__all__ = ["Demo"]
