"""Times as events show them."""

from datetime import UTC, datetime
from functools import lru_cache


@lru_cache(maxsize=1024)  # all changes of a transaction tell the same times
def iso(microseconds: int) -> str:
    """Microseconds since 1970 as ISO 8601 in UTC: 2025-01-15T10:30:00.123456Z."""
    seconds, rest = divmod(microseconds, 1_000_000)
    return f"{_second(seconds)}.{rest:06d}Z"


@lru_cache(maxsize=1024)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
