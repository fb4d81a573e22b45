"""(2) Every change, in order, on disk.

    append -> changefeed:<sequence> ... -> read, follow

One process writes (`Log`), any number read (`LogReader`). Sequences start at 1, are dense and
follow commit order. A reader never sees half a transaction. All cursors are exclusive: "after".
"""

from .holding import ChangeRemoval, Cursor, Holder, RemovalReason
from .lineage import (
    FIRST_GENERATION,
    UNKNOWN_GENERATION,
    Ancestor,
    Generation,
    shared_upto,
)
from .ranges import Ranges
from .reader import PIECE_HEAD, LogReader, Piece, Stats
from .retention import LogRetention, RetentionSettings, RetentionStatus
from .writer import Log, Trimmed

__all__ = [
    "FIRST_GENERATION",
    "PIECE_HEAD",
    "UNKNOWN_GENERATION",
    "Ancestor",
    "ChangeRemoval",
    "Cursor",
    "Generation",
    "Holder",
    "Log",
    "LogReader",
    "LogRetention",
    "Piece",
    "Ranges",
    "RemovalReason",
    "RetentionSettings",
    "RetentionStatus",
    "Stats",
    "Trimmed",
    "shared_upto",
]
