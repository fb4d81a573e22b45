"""What the log says of the values in a file, as values of the column's type.

The statistics of our own files enclose their values. Other tools, whose files a table has after
their OPTIMIZE, cut times off after the milliseconds, and write decimals by way of a double.
"""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from ..lake.deltalog import DataFile
from .parquet import kind

# Types whose bounds are exact in a file's statistics.
EXACT = (pa.types.is_integer, pa.types.is_string, pa.types.is_date32)
_DOUBLE_DIGITS = 15  # of a decimal that a double keeps
_CUT_OFF = timedelta(milliseconds=1)


def column_bounds(file: DataFile, column: str, of: pa.DataType) -> tuple[Any, Any] | None:
    """Two values between which all of a column are; None: not known."""
    found = file.bounds(column)
    ours = bool(kind(file.path))
    rounded = not ours and pa.types.is_decimal(of) and of.precision > _DOUBLE_DIGITS
    if found is None or rounded:
        return None
    try:
        low, high = (_typed(each, of) for each in found)
        return low, high + _CUT_OFF if not ours and pa.types.is_timestamp(of) else high
    except (pa.ArrowException, ArithmeticError, ValueError):
        return None  # a value that is written in a way of its own


def _typed(value: Any, of: pa.DataType) -> Any:
    if pa.types.is_decimal(of):
        # A whole number may have more digits than Arrow's.
        return pa.scalar(Decimal(value), of).as_py()
    return pa.scalar(value).cast(of).as_py()
