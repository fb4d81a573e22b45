"""What a comparison of a sink's tables with their sources has found, as it is noted for others.

Counts and names of tables, never a key: keys may be somebody's name, and this is shown by pages
and kept in files.
"""

import time
from enum import StrEnum
from pathlib import Path

import msgspec

ROWS_PREFIX = "rows-"  # of a folder with rows that are being compared …
ROWS_LOCK = "lock"  # … and of the file beside it which whoever compares them has locked
_FILE = "verified.json"


class TableOutcome(StrEnum):
    """How a table compares."""

    EQUAL = "equal"
    DIFFERS = "differs"
    FAILED = "failed"  # its source or the sink does not follow it
    SNAPSHOT = "snapshot"  # a snapshot of it is being taken, so there is nothing to compare yet
    INSERTS_ONLY = "inserts_only"  # only its inserts are captured, so it need not be equal
    NOT_CAPTURED = "not_captured"
    LEFT_OUT = "left_out"  # its rows cannot be read without keeping others waiting


class TableVerification(msgspec.Struct, frozen=True, kw_only=True):
    """One table."""

    source: str
    table: str  # schema.table
    outcome: TableOutcome
    at: int = 0  # when it was looked at, in microseconds since 1970
    rows: int = 0  # of the source that were compared
    missing: int = 0  # that the table does not have
    surplus: int = 0  # that only the table has
    repeated: int = 0  # that the table has once more
    differing: int = 0  # with other values
    reason: str = ""  # why it was not compared

    @property
    def sound(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return self.outcome not in (TableOutcome.DIFFERS, TableOutcome.FAILED)


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The last comparison of a sink's tables.

    One that could not be made leaves what the one before has found, with the error beside it.
    """

    sink: str
    at: int = 0  # when it began, in microseconds since 1970; 0: there was none yet
    seconds: float = 0.0
    tables: tuple[TableVerification, ...] = ()
    error: str = ""  # why none could be made since …
    failed_at: int = 0  # … and when that was tried

    @property
    def sound(self) -> bool:
        """Whether no difference is known."""
        return all(table.sound for table in self.tables)

    @property
    def tried_at(self) -> int:
        """When the last one began, also if it found nothing out."""
        return max(self.at, self.failed_at)

    @property
    def compared(self) -> list[TableVerification]:
        """The tables whose rows were compared."""
        both = (TableOutcome.EQUAL, TableOutcome.DIFFERS)
        return [table for table in self.tables if table.outcome in both]

    @property
    def oldest(self) -> int:
        """When the table was compared that was not compared for the longest time."""
        return min((table.at or self.at for table in self.compared), default=self.at)

    @property
    def rows(self) -> int:
        """How many rows were compared."""
        return sum(table.rows for table in self.tables)

    @property
    def differences(self) -> int:
        """How many rows are not equal."""
        return sum(
            each.missing + each.surplus + each.repeated + each.differing for each in self.tables
        )

    def summary(self, now: float | None = None) -> str:
        """A sentence about it."""
        now = time.time() if now is None else now
        failed = f"{_ago(now - self.failed_at / 1e6)} it could not be verified: {self.error}"
        if not self.at:
            return failed
        wrong = [table.table for table in self.tables if not table.sound]
        found = (
            f"not equal to the source: {', '.join(wrong)}"
            if wrong
            else f"{self.rows:,} rows of {len(self.compared)} tables equal the source"
        )
        verified = f"verified {_ago(now - self.oldest / 1e6)}: {found}"
        return f"{verified}; {failed}" if self.error else verified


def note(folder: Path, found: Verification) -> None:
    """Keep the last one in a sink's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{_FILE}.new"
    fresh.write_bytes(msgspec.json.encode(found))
    fresh.replace(folder / _FILE)


def noted(folder: Path) -> Verification | None:
    """The last one; None: there was none, or it cannot be read."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=Verification)
    except (OSError, msgspec.DecodeError):
        return None


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
