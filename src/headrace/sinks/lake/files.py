"""Which rows go into one file, and which files become one."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

GENERATION = 8  # files of about one size become one when there are so many

_ROW = "\0row"

F = TypeVar("F")


def by_partition(rows: pa.Table, by: Sequence[str]) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """The values of each partition, and its rows in their order; null is a value like others."""
    if not by:
        yield {}, rows
        return
    numbers = pa.array(np.arange(rows.num_rows))
    numbered = rows.select(by).append_column(_ROW, numbers)
    groups = numbered.group_by(list(by), use_threads=False).aggregate([(_ROW, "list")])
    values = groups.select(by).to_pylist()
    for group, own in zip(values, groups[f"{_ROW}_list"], strict=True):
        yield group, rows.take(own.values)


def are_many(files: Sequence[object]) -> bool:
    """Whether there are as many as make a new one."""
    return len(files) >= GENERATION


def of_one_size(files: Iterable[F], size: Callable[[F], int]) -> Iterator[list[F]]:
    """Files that are worth joining.

    They wait for others of about their size, so that a row is written again only as often as its
    file has grown eightfold.
    """
    waiting: dict[Hashable, list[F]] = defaultdict(list)
    for file in files:
        waiting[int(math.log(max(size(file), 1), GENERATION))].append(file)
    for found in waiting.values():
        for at in range(0, len(found) - GENERATION + 1, GENERATION):
            yield found[at : at + GENERATION]
