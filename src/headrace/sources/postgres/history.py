"""Whether a server has the history that the log has followed.

A server that was put back from a copy of its files has the same identity and timeline, and its log
may have grown past our position with other transactions. Its slot is as old as the copy. So where
the slot stands before our position, the stream begins at the last transaction that the log has
received: exactly this one must come, and nothing else before our position. A server that has
crashed, whose slot is older than our position as well, passes this test.
"""

from __future__ import annotations

from ...change.lsn import format_lsn
from ...errors import SourceReplaced
from .pgoutput import WalBegin
from .resume import LastCommit


class HistoryProof:
    """Compares what a server sends again with what the log has received. No I/O."""

    def __init__(
        self, position: int, commit: LastCommit | None = None, *, confirmed: int = 0
    ) -> None:
        """`confirmed` is where the slot stands; no commit: there is nothing to compare."""
        # A slot that stands where we do was moved there by us, on this very server.
        self.proven = commit is None or confirmed >= position
        self._position = position
        self._commit = commit or LastCommit(0, 0, 0)
        self._awaited = not self.proven and confirmed <= self._commit.lsn
        self.start = position if self.proven else max(confirmed, self._commit.lsn)

    def began(self, begin: WalBegin) -> None:
        """A transaction comes, which commits later than those before it."""
        known, at = self._commit, begin.commit_lsn
        if (at, begin.xid, begin.commit_time) == (known.lsn, known.xid, known.time):
            self._awaited = False
        elif self._awaited:
            raise self._another(at)
        elif at >= self._position:
            self.proven = True
        elif at >= known.until:
            raise self._another(at)

    def reached(self, lsn: int) -> None:
        """Every transaction that commits before `lsn` has come."""
        if self._awaited and lsn > self._commit.lsn:
            raise self._another(lsn)
        if lsn >= self._position:
            self.proven = True

    def _another(self, lsn: int) -> SourceReplaced:
        return SourceReplaced(
            f"at {format_lsn(lsn)}, before the log's position {format_lsn(self._position)}, the "
            "server has another history than the one that the log has followed: it was put back "
            "from an older copy of its files, and has written since"
        )
