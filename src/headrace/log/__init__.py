"""(2) Every change, in order, on disk.

    append -> changefeed:<sequence> ... -> read, follow

One process writes (`Log`), any number read (`LogReader`). Sequences start at 1, are dense and
follow commit order. A reader never sees half a transaction. All cursors are exclusive: "after".
"""

from .ranges import Ranges
from .reader import PIECE_HEAD, Cursor, LogReader, Piece, Stats
from .writer import Log, Trimmed

__all__ = ["PIECE_HEAD", "Cursor", "Log", "LogReader", "Piece", "Ranges", "Stats", "Trimmed"]
