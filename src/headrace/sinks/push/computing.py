"""What Spark has computed for the events of a range of the log: files, which tasks read beside it.

A task reads the log as ever. Of a change whose table is computed it takes the operation and the
images from here, and all else from the record; a change that is not here has no event. A range is
computed once, so what is sent again of it is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...change.event import BeforeKind, Change, Op, Table
from ..lake.storage import Folder
from ..results import result
from .spill import discard

SPAN = 8192  # sequences of which a table's changes are in one file
FIELDS = ("sequence", "op", "key", "before", "before_kind", "after")
_NAME = "computed"


class ComputedFile(msgspec.Struct, frozen=True):
    """A file of computed changes."""

    span: int  # the number of the span that they are of
    path: str


@dataclass(frozen=True, slots=True)
class ComputedChanges:
    """All that was computed of a range; can be sent to tasks."""

    folder: Folder
    tables: Mapping[int, Table]  # as events show them, by the version that a record names
    files: Mapping[int, Sequence[str]]  # by span

    def remove(self) -> None:
        """Delete the files: no task needs them any more."""
        for paths in self.files.values():
            for path in paths:
                discard(self.folder, path)


def sweep(folder: Folder) -> None:
    """Delete what a process has left that was killed; no other one may write."""
    with folder.reached(_NAME):
        left = [each.path for each in folder.objects.entries("") if _is_ours(each.path)]
        folder.objects.delete(left)


def _is_ours(path: str) -> bool:
    return path.startswith(f"{_NAME}-")


@dataclass(frozen=True, slots=True)
class StageComputed:
    """Writes computed changes down, which come in order and with whole spans."""

    folder: Folder

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held: list[pa.RecordBatch] = []
        current = -1
        for batch in batches:
            spans = pc.divide(batch["sequence"], SPAN)
            for span in pc.unique(spans).to_pylist():
                if held and span != current:
                    yield self._written(current, held)
                    held = []
                held.append(batch.filter(pc.equal(spans, span)))
                current = span
        if held:
            yield self._written(current, held)

    def _written(self, span: int, held: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        rows = pa.Table.from_batches(held)
        return result(ComputedFile(span, self.folder.write(rows, _NAME, {}).path))


class ComputedImages(NamedTuple):
    """What the event of a change shows."""

    op: Op
    key: bytes | None
    before: bytes | None
    before_kind: BeforeKind
    after: bytes | None

    def of(self, change: Change) -> Change:
        """The change as events show it."""
        return msgspec.structs.replace(change, **self._asdict(), changed=None, unchanged=())


class ComputedReader:
    """Finds what was computed, for one who goes through a range in order."""

    def __init__(self, computed: ComputedChanges) -> None:
        self._computed = computed
        self._span = -1
        self._known: dict[int, ComputedImages] = {}  # of this span, by sequence

    def find(self, sequence: int) -> ComputedImages | None:
        """What a change has become; None: its row does not come out."""
        if (span := sequence // SPAN) != self._span:
            paths = self._computed.files.get(span, ())
            self._known = {at: images for path in paths for at, images in self._read(path)}
            self._span = span
        return self._known.get(sequence)

    def _read(self, path: str) -> Iterator[tuple[int, ComputedImages]]:
        rows = self._computed.folder.read(path)
        for sequence, op, key, before, kind, after in zip(
            *(rows[name].to_pylist() for name in FIELDS), strict=True
        ):
            yield (
                sequence,
                ComputedImages(
                    Op(op), _bytes(key), _bytes(before), BeforeKind(kind), _bytes(after)
                ),
            )


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
