"""Which files of a table are worth writing anew, and range by range how.

Batches leave small files and dead rows. Small files of about one size are joined, so that a row is
written again only as often as its file has grown eightfold. A file of which a quarter is dead is
written anew with what new files have of its range; when a quarter of the table lies in files that
are not in order with the others, all ranges are.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from ..lake.files import are_many, of_one_size
from ..lake.plan import PlannedFile, TablePlan
from .parquet import FILLED, LOOSE, PAST, SORTED, kind
from .rewrite import KeyRange, RewriteWork, samples

_UNORDERED = 0.25  # of the rows that are in order, before all is put in order
_DEAD = 0.25  # of a file's rows, before they are left out
_FEW_ROWS = 5_000  # that are not worth it
_MOST_SMALL = 64  # files of a partition that are not in order, before there is no more waiting
_TOO_MANY = 1.5  # times the rows that a file should have
_MOST_LOOSE = 2  # files' worth of loose rows that a range takes at once


def due(
    plan: TablePlan, files: Iterable[PlannedFile], *, has_vectors: bool = True
) -> Iterator[RewriteWork]:
    """What is worth doing for a table with these files.

    Without vectors the rows of a file go all at once: every range that has some of them is done.
    """
    of_partition: dict[object, list[PlannedFile]] = defaultdict(list)
    for file in files:
        of_partition[file.partition].append(file)
    for found in of_partition.values():
        yield from _due(plan, found, has_vectors=has_vectors)


def is_behind(files: Sequence[PlannedFile]) -> bool:
    """Whether so much has gathered that readers and batches suffer more than from compaction."""
    dead = sum(file.vector.cardinality for file in files if file.vector)
    partitions = {file.partition for file in files}
    small = [file for file in files if kind(file.path) == LOOSE]
    return dead * 2 > sum(file.rows for file in files) or len(small) > _MOST_SMALL * len(partitions)


def _due(
    plan: TablePlan, files: Sequence[PlannedFile], *, has_vectors: bool
) -> Iterator[RewriteWork]:
    past = [file for file in files if kind(file.path) == PAST]
    yield from _joins(plan, past, PAST)
    current = [file for file in files if kind(file.path) != PAST]
    if not plan.order:  # rows without a key stay in the order in which they came
        yield from _joins(plan, current, LOOSE)
        return
    ordered, loose = _divided(current, plan.file_rows)
    rows, loose_rows = (sum(file.rows for file in some) for some in (ordered, loose))
    much = are_many(loose) or loose_rows > plan.file_rows
    if much and loose_rows > rows * _UNORDERED:
        yield from _in_order(plan, ordered, loose, every=True)
    elif has_vectors and any(_has_many_dead(file) for file in ordered if file.low is not None):
        yield from _in_order(plan, ordered, loose, every=False)
    else:
        joins = list(_joins(plan, loose, LOOSE))
        joined = {file.path for join in joins for file in join.whole}
        yield from joins
        for name, some in ((SORTED, ordered), (LOOSE, loose)):
            for file in some:
                if file.path not in joined and _has_many_dead(file):
                    yield RewriteWork(plan=plan, name=name, whole=(file,))


def _divided(
    files: Sequence[PlannedFile], most: int
) -> tuple[list[PlannedFile], list[PlannedFile]]:
    """The files that are in order, one after the other, and the others.

    Those that a snapshot has filled are so if they do not lie across any other and have not many
    more than `most` rows, which nobody knew before the first were written. Bounds may be wider
    than the values, so those that were put in order stay so whatever their bounds say.
    """
    named = [file for file in files if kind(file.path) in (SORTED, FILLED)]
    filled = [file for file in named if kind(file.path) == FILLED]
    across = {file.path for file in filled if file.rows > most * _TOO_MANY}
    last: PlannedFile | None = None  # the one that reaches farthest
    for file in sorted((file for file in named if file.low is not None), key=_bounds):
        if last is not None and _bounds(file)[0] < _bounds(last)[1]:
            across |= {each.path for each in (last, file) if kind(each.path) == FILLED}
        if last is None or _bounds(file)[1] > _bounds(last)[1]:
            last = file
    ordered = [file for file in named if file.path not in across]
    chosen = {file.path for file in ordered}
    return ordered, [file for file in files if file.path not in chosen]


def _bounds(file: PlannedFile) -> tuple[Any, Any]:
    return file.low, file.high


def _has_many_dead(file: PlannedFile) -> bool:
    dead = file.vector.cardinality if file.vector else 0
    return dead > max(file.rows * _DEAD, _FEW_ROWS)


def _joins(plan: TablePlan, files: Sequence[PlannedFile], name: str) -> Iterator[RewriteWork]:
    """Small files of about one size, joined."""
    small = (file for file in files if file.rows < plan.file_rows / 2)
    for found in of_one_size(small, lambda file: file.rows):
        yield RewriteWork(plan=plan, name=name, whole=tuple(found))


def _in_order(
    plan: TablePlan, ordered: Sequence[PlannedFile], loose: Sequence[PlannedFile], *, every: bool
) -> Iterator[RewriteWork]:
    """Files range by range: those in order whole, of the others the rows of the range.

    Of the ranges, `every` one that has loose rows, or only those with a file of many dead rows.
    """
    rows = sum(file.rows for file in (*ordered, *loose))
    if rows <= plan.file_rows:
        yield RewriteWork(plan=plan, name=SORTED, whole=(*ordered, *loose))
        return
    # What has no bounds is put in order with the loose rows.
    loose = [*loose, *(file for file in ordered if file.low is None)]
    ordered = [file for file in ordered if file.low is not None]
    if ordered:
        groups = _groups(sorted(ordered, key=_low), rows, plan.file_rows)
        begins = [_low(group[0]) for group in groups[1:]]
    else:
        begins = _quantiles(plan, loose, math.ceil(rows / plan.file_rows))
        groups = [[] for _ in (None, *begins)]
    taken = _taken(plan, loose, begins)
    ranges = pairwise([None, *begins, None])
    for at, (group, (low, high)) in enumerate(zip(groups, ranges, strict=True)):
        parts = tuple(file for file, ranges_of in taken if at in ranges_of)
        if any(map(_has_many_dead, group)) or (every and parts):
            yield RewriteWork(
                plan=plan,
                name=SORTED,
                whole=tuple(group),
                parts=parts,
                range=KeyRange(low, high),
            )


def _low(file: PlannedFile) -> Any:
    return file.low


def _groups(ordered: Sequence[PlannedFile], rows: int, most: int) -> list[list[PlannedFile]]:
    """Neighbours that make about one file, with what is loose among them."""
    loose_share = rows / max(sum(file.rows for file in ordered), 1)
    groups: list[list[PlannedFile]] = [[]]
    size = 0.0
    for file in ordered:
        size += file.rows * loose_share
        # No range ends between two files that begin with the same value.
        if groups[-1] and size > most and file.low != groups[-1][-1].low:
            groups.append([])
            size = file.rows * loose_share
        groups[-1].append(file)
    return groups


def _taken(
    plan: TablePlan, loose: Sequence[PlannedFile], begins: Sequence[Any]
) -> list[tuple[PlannedFile, range]]:
    """The loose files that go into the ranges, each with the ranges that it reaches.

    No range takes much more than it has: what is left is for the next round, in which there are
    more ranges.
    """
    load = [0.0] * (len(begins) + 1)
    found = []
    for file in loose:
        reached = range(len(load))
        if file.low is not None and not file.nulls:
            reached = range(bisect_right(begins, file.low), bisect_right(begins, file.high) + 1)
        each = file.rows / len(reached)
        most = _MOST_LOOSE * plan.file_rows
        if all(not load[at] or load[at] + each <= most for at in reached):
            found.append((file, reached))
            for at in reached:
                load[at] += each
    return found


def _quantiles(plan: TablePlan, files: Sequence[PlannedFile], ranges: int) -> list[Any]:
    """Where ranges begin that have about the same number of rows."""
    found = sorted(sample for file in files for sample in samples(plan, file))
    ends = list(accumulate(rows for _, rows in found))
    if not ends:
        return []
    begins = (found[bisect_right(ends, ends[-1] * at / ranges)][0] for at in range(1, ranges))
    return [begin for begin in dict.fromkeys(begins) if begin != found[0][0]]
