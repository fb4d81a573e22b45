"""What the log remembers of an event table between two runs.

How far it has come is no number: transactions do not commit in the order of their numbers. It is
a snapshot, as PostgreSQL prints one: which transactions had committed. What another, later
snapshot sees and this one does not is what comes next, however late it was committed.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ..postgres.resume import PostgresTablesResume


class TransactionSnapshot(NamedTuple):
    """A snapshot: every transaction below `after` that is not among `open` is in it."""

    oldest: int  # every transaction below has ended
    after: int
    open: tuple[int, ...]

    @classmethod
    def of(cls, snapshot: str) -> TransactionSnapshot:
        """Read PostgreSQL's text for it: 10:20:10,14,15."""
        oldest, after, open_ = snapshot.split(":")
        return cls(int(oldest), int(after), tuple(int(xid) for xid in open_.split(",") if xid))


class EventResume(PostgresTablesResume, frozen=True, kw_only=True):
    """Which event table of which server, and which of its transactions are in the log."""

    installation: str  # an event table made anew has another
    seen: str  # the snapshot whose transactions are in the log
    triggers: dict[str, str]  # schema.table -> which triggers write its changes
    # While what lies between two snapshots is handed over: the later one, and the last entry of
    # the last transaction that is in the log. They come in the order of their last entries.
    target: str = ""
    entry: int = 0
    # Where the write-ahead log stood at the two snapshots; from one to the other each transaction
    # in the log counts one more, which is less than any of them has written.
    lsn: int = 0
    target_lsn: int = 0
    # The triggers of the event table that notice removed events; "": not known yet.
    guards: str = ""

    @property
    def reached(self) -> str:
        """The snapshot, as PostgreSQL writes one."""
        return self.seen

    def reaching(self, target: str, lsn: int) -> EventResume:
        """On the way to a later snapshot."""
        return msgspec.structs.replace(self, target=target, target_lsn=lsn, entry=0)

    def arrived(self) -> EventResume:
        """With everything that the later snapshot sees."""
        return msgspec.structs.replace(
            self,
            seen=self.target or self.seen,
            lsn=max(self.lsn, self.target_lsn),
            target="",
            target_lsn=0,
            entry=0,
        )


class _Seen(msgspec.Struct, frozen=True):
    seen: str


def seen_in(stored: bytes) -> TransactionSnapshot:
    """The snapshot alone, passing over everything else."""
    return TransactionSnapshot.of(msgspec.json.decode(stored, type=_Seen).seen)
