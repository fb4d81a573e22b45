"""What Spark's tasks return to a sink's driver: rows of one column, a value as JSON in each."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")

RESULT_DDL = "result string"
_RESULT = pa.schema([("result", pa.string())])
_to_json = msgspec.json.Encoder().encode

Batches = Iterator[pa.RecordBatch]


def result(value: msgspec.Struct) -> pa.RecordBatch:
    """A row for the driver."""
    # From buffers: Arrow asks pandas what a list is, and importing it takes most of a second.
    content = _to_json(value)
    offsets = pa.py_buffer(struct.pack("<ii", 0, len(content)))
    texts = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(content)])
    return pa.RecordBatch.from_arrays([texts], schema=_RESULT)


def texts(frame: DataFrame, task: Callable[[Batches], Batches]) -> list[str]:
    """Run a task over the partitions of a DataFrame; returns its results as JSON."""
    task_of_any: Any = task
    return [row["result"] for row in frame.mapInArrow(task_of_any, RESULT_DDL).collect()]


def results(frame: DataFrame, task: Callable[[Batches], Batches], kind: type[T]) -> list[T]:
    """Run a task over the partitions of a DataFrame; returns its results."""
    return [msgspec.json.decode(each, type=kind) for each in texts(frame, task)]
