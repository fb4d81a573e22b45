"""The WAL that a server keeps for a slot: how much, when to warn, and when to give the slot up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import SourceError
from ..retained import ServerRetained
from .catalog import Catalog
from .settings import PostgresSettings

_GB = 10**9
_WARNING_SHARE = 0.5  # of a limit
_WARNING_BYTES = 10 * _GB  # where there is no limit

_KEPT = """
    SELECT coalesce(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
                         ELSE pg_current_wal_lsn() END - restart_lsn, 0)::bigint,
           coalesce(wal_status, ''),
           (SELECT setting::bigint * 1048576 FROM pg_settings
            WHERE name = 'max_slot_wal_keep_size')
    FROM pg_replication_slots WHERE slot_name = %s"""

# The reader would connect again at once: it is ended and the slot dropped in one go.
_END_READER = """
    SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots
    WHERE slot_name = %s AND active_pid IS NOT NULL"""
_DROP = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"


@dataclass(frozen=True, slots=True)
class KeptWal:
    """What the server says of a slot."""

    bytes: int
    state: str  # reserved, extended, unreserved, lost
    server_limit: int  # max_slot_wal_keep_size; negative: none


def warnings(kept: KeptWal, slot: str, max_wal_gb: float | None) -> Iterator[str]:
    """What an operator should know before it does harm."""
    size = f"the server keeps {kept.bytes / _GB:.1f} GB of WAL for slot {slot}"
    own = max_wal_gb * _GB if max_wal_gb is not None else None
    if own is not None and kept.bytes >= own * _WARNING_SHARE:
        yield f"{size}; at max_wal_gb, {max_wal_gb:g} GB, the slot is given up for a new snapshot"
    limit = kept.server_limit
    near = limit >= 0 and kept.bytes >= limit * _WARNING_SHARE
    if near or kept.state == "unreserved":
        yield (
            f"{size}; at max_slot_wal_keep_size, {limit / _GB:.1f} GB, the server invalidates the "
            "slot, and a new snapshot is needed"
        )
    if own is None and limit < 0 and kept.bytes >= _WARNING_BYTES:
        yield f"{size}, and nothing limits it: its disk can fill; set max_wal_gb of the source"


class WalLook:
    """Looks at the slot of a source, and gives it up at `max_wal_gb`."""

    def __init__(self, source: PostgresSettings) -> None:
        self._source = source
        self._catalog: Catalog | None = None

    def look(self) -> ServerRetained:
        """What the server keeps for the slot now."""
        try:
            if self._catalog is None:
                self._catalog = Catalog(self._source.address.connect(), source=self._source.name)
            return self._looked(self._catalog)
        except SourceError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the server."""
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    def _looked(self, catalog: Catalog) -> ServerRetained:
        slot, most = self._source.slot_name, self._source.max_wal_gb
        found = catalog.rows(_KEPT, slot)
        if not found:
            return ServerRetained(begun=False)
        kept = KeptWal(*found[0])
        if most is None or kept.bytes <= most * _GB:
            return ServerRetained(True, kept.bytes, tuple(warnings(kept, slot, most)))
        catalog.rows(_END_READER, slot)
        catalog.rows(_DROP, slot)
        return ServerRetained(
            begun=False,
            given_up=f"slot {slot} was given up: the server kept {kept.bytes / _GB:.2f} GB of WAL "
            f"for it, max_wal_gb is {most:g}; a new snapshot follows",
        )
