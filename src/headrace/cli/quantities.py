"""Ages, sizes and moments as people write them."""

import re

import typer

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
BYTES = {"": 1, "B": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def parse_age(text: str) -> float:
    """Seconds from `30d` or `1.5h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if not found:
        raise typer.BadParameter(f"{text!r} is not an age; write 30d, 12h, 15m or 90s.")
    return float(found[1]) * SECONDS[found[2]]


def parse_size(text: str) -> int:
    """Bytes from `10GB` or `500M`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", text.upper())
    if not found:
        raise typer.BadParameter(f"{text!r} is not a size; write 10GB, 500MB or 1000.")
    return int(float(found[1]) * BYTES[found[2]])


def parse_moment(text: str) -> float:
    """Seconds since 1970 from `10m`, so long ago, or from `2026-11-16T09:30`, which is UTC."""
    import time
    from datetime import UTC, datetime

    if re.fullmatch(r"[\d.]+[a-z]", text):
        return time.time() - parse_age(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a time; write 10m, 2h, or 2026-11-16T09:30, which is UTC."
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
