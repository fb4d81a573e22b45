"""Where a database keeps changes until they are captured (`cdc.storage`), and what follows."""

from collections.abc import Mapping

DEFAULT = "postgres_wal"

# Of each storage: sources of which type are captured by which other.
_CAPTURED_BY: Mapping[str, Mapping[str, str]] = {
    DEFAULT: {},
    "event_table": {"postgres": "postgres_events"},
}
_LATER = {"kafka": "it is not supported yet"}


def check(storage: str) -> None:
    """ValueError when there is no such storage."""
    if storage not in _CAPTURED_BY:
        reason = _LATER.get(storage, "there is no such storage")
        raise ValueError(f"storage {storage}: {reason}; set {' or '.join(_CAPTURED_BY)}")


def captured_by(cdc: object) -> Mapping[str, str]:
    """By which type each type of source is captured, after the section `cdc` as it was given."""
    storage = cdc.get("storage") if isinstance(cdc, dict) else None
    return _CAPTURED_BY.get(storage, {}) if isinstance(storage, str) else {}
