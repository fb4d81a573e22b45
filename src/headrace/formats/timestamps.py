"""Times as events show them."""

from datetime import UTC, datetime
from functools import lru_cache


def iso(microseconds: int) -> str:
    """Microseconds since 1970 as ISO 8601 in UTC: 2025-01-15T10:30:00.123456Z."""
    seconds, rest = divmod(microseconds, 1_000_000)
    return f"{second(seconds).decode()}.{rest:06d}Z"


@lru_cache(maxsize=1024)  # not whole times: most transactions are short, and each has its own
def second(seconds: int) -> bytes:
    """Seconds since 1970, as they are written before the fraction: 2025-01-15T10:30:00."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()
