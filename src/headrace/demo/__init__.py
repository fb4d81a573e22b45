"""The demo: a shop in a real PostgreSQL, captured, served, replicated, and compared at the end."""

from .demo import Demo

__all__ = ["Demo"]
