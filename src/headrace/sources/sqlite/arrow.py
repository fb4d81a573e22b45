"""Types of SQLite's columns in Arrow: their declared affinity counts."""

import pyarrow as pa
from msgspec import Raw

from ...change.arrow import kinds as read
from ...change.arrow.kinds import ANYTHING, STRING, Kind

# SQLite's own rules, in its order: what a declared type contains says what a column is meant for.
_AFFINITIES = (
    ("INT", Kind(pa.int64(), int, read.plain)),
    ("CHAR", STRING),
    ("CLOB", STRING),
    ("TEXT", STRING),
    ("BLOB", Kind(pa.binary(), bytes, read.plain)),
    ("REAL", Kind(pa.float64(), Raw, read.floats)),
    ("FLOA", Kind(pa.float64(), Raw, read.floats)),
    ("DOUB", Kind(pa.float64(), Raw, read.floats)),
)


def kind(type_text: str) -> Kind:
    """Numbers of any kind, dates and columns without a type are text: they may hold anything."""
    declared = type_text.upper()
    return next((found for part, found in _AFFINITIES if part in declared), ANYTHING)
