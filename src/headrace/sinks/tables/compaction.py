"""Compaction of a table's files between batches: small ones joined, large buckets split.

The rows stay what they are, so readers see no change, and a crash leaves only files that nobody
knows of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from ..lake.plan import SEQUENCE, BucketFile, part_name
from ..lake.storage import Added, Folder
from .effects import conformed
from .merge import RESULT, RESULT_DDL, split
from .target import TargetTable, level_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_SMALL_FILES = 8  # in a bucket, before they are joined
LARGEST_BUCKET = 2  # files' worth, before it is split


@dataclass(frozen=True, slots=True)
class CompactionWork:
    """Files of one table to be written anew by one task."""

    at: int  # which table
    folder: Folder
    paths: list[str]
    key: list[str]
    level: int
    schema: pa.Schema


class CompactedFiles(msgspec.Struct, frozen=True):
    """What a task made of its files."""

    removed: list[str]
    added: list[Added]


def compact(spark: SparkSession, targets: Sequence[TargetTable], file_bytes: float) -> None:
    """Compact the files of these tables, where that is due."""
    levels = [_level(target, file_bytes) for target in targets]
    work = [
        each
        for at, (target, level) in enumerate(zip(targets, levels, strict=True))
        for each in _work(at, target, level, file_bytes)
    ]
    if not work:
        return
    written: dict[int, list[CompactedFiles]] = defaultdict(list)
    for at, result in _run(spark, work):
        written[at].append(result)
    for at, results in written.items():
        added = [file for each in results for file in each.added]
        removed = [path for each in results for path in each.removed]
        targets[at].compacted(levels[at], added, removed)


def _level(target: TargetTable, file_bytes: float) -> int:
    size = sum(part.size for part in target.parts)
    if size > file_bytes * LARGEST_BUCKET * (1 << target.level):
        return level_for(size, file_bytes)
    return target.level


def _work(at: int, target: TargetTable, level: int, file_bytes: float) -> Iterator[CompactionWork]:
    groups: dict[tuple[int, int], list[BucketFile]] = defaultdict(list)
    for part in target.parts:
        groups[part.level, part.bucket].append(part)
    for (known, _), parts in sorted(groups.items()):
        if known == level:
            parts = _small(parts, file_bytes)  # noqa: PLW2901
        if parts:
            yield CompactionWork(
                at,
                target.delta.folder,
                [part.path for part in parts],
                target.key or [SEQUENCE],
                level,
                target.delta.schema,
            )


def _small(parts: list[BucketFile], file_bytes: float) -> list[BucketFile]:
    """The files of a bucket that are worth joining."""
    small = [part for part in parts if part.size < file_bytes / 2]
    return small if len(small) >= MOST_SMALL_FILES else []


def _run(spark: SparkSession, work: list[CompactionWork]) -> Iterator[tuple[int, CompactedFiles]]:
    numbers = spark.range(len(work), numPartitions=len(work))
    for row in numbers.mapInArrow(_Rewriting(work), RESULT_DDL).collect():
        yield row["at"], msgspec.json.decode(row["result"], type=CompactedFiles)


@dataclass(frozen=True, slots=True)
class _Rewriting:
    """What tasks do with the work whose numbers they get."""

    work: list[CompactionWork]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                work = self.work[number]
                files = msgspec.json.encode(_rewrite(work)).decode()
                row = {"at": work.at, "kind": "compacted", "result": files}
                yield pa.RecordBatch.from_pylist([row], RESULT)


def _rewrite(work: CompactionWork) -> CompactedFiles:
    read = [conformed(work.folder.read(path), work.schema) for path in work.paths]
    rows = pa.concat_tables(read)
    added = [
        work.folder.write(part, part_name(work.level, bucket), {})
        for bucket, part in split(rows, work.key, work.level)
    ]
    return CompactedFiles(work.paths, added)
