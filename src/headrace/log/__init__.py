"""(2) Every change, in order, on disk.

    append -> changefeed:<sequence> ... -> read, follow

One process writes (`Log`), any number read (`LogReader`). Sequences start at 1, are dense and
follow commit order. A reader never sees half a transaction. All cursors are exclusive: "after".
"""

from .reader import Cursor, LogReader, Stats
from .writer import Log, Trimmed

__all__ = ["Cursor", "Log", "LogReader", "Stats", "Trimmed"]
