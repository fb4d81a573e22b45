"""Folded changes beside the files of their table: which rows they replace, what they become."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, compress, pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ...change.arrow import RESCUED, decode
from ...change.event import Column
from ...errors import TableFailed
from ...transforms.rules import whole_rows_hint
from ...transforms.shape import Decoder, masked, passing, shaped, verdicts
from ..lake import vectors
from ..lake.conform import conformed
from ..lake.plan import CURRENT, SEQUENCE, VALID_FROM, VALID_TO, PlannedFile, TablePlan
from .fold import Fold, Version
from .keys import Mask, Numbers, bitmap, key_codes, row_numbers
from .lookup import INDEXES
from .parquet import LOOSE, PAST, key_columns, kind, read_in_groups, read_rows
from .rescue import carried_over, rescued_values

_RESCUED_BY_SPARK = Column(RESCUED, "text")


class KeySearch:
    """Keys of a batch, to be found in files."""

    def __init__(self, plan: TablePlan, rows: pa.Table) -> None:
        """`rows` have the columns of the key."""
        self._folder = plan.folder
        self._key = key_columns(plan)
        self._rows = conformed(rows.select(list(self._key.names)), self._key.schema)
        self._codes = self._key.codes(self._rows)
        self._order = np.argsort(self._codes.codes, kind="stable")

    def rows_in(self, file: PlannedFile) -> tuple[Numbers, Numbers]:
        """Which of the keys a file has, and in which rows, dead or not."""
        chosen = self._candidates(file)
        if not len(chosen):
            return chosen, chosen
        index = INDEXES.of(self._folder, file, self._key)
        which, rows = index.find(self._codes.take(chosen))
        return chosen[which], rows

    def _candidates(self, file: PlannedFile) -> Numbers:
        """The keys that a file may have, by its bounds, in the order of their codes."""
        if file.low is None or file.high is None:
            return self._order
        column = self._rows.column(0)
        low, high = pa.scalar(file.low, column.type), pa.scalar(file.high, column.type)
        if self._key.exact:
            ends = key_codes([pa.array([low, high], column.type)], exact=True).codes
            ordered = self._codes.codes[self._order]
            begin, end = (
                np.searchsorted(ordered, ends[0]),
                np.searchsorted(ordered, ends[1], "right"),
            )
            # Bounds say nothing of null, which comes first.
            begin = max(begin, column.null_count)
            return np.concatenate([self._order[: column.null_count], self._order[begin:end]])
        inside = pc.and_(pc.greater_equal(column, low), pc.less_equal(column, high))
        mask: Mask = pc.fill_null(inside, True).to_numpy().astype(np.bool_)
        return self._order[mask[self._order]]


class _Found(NamedTuple):
    """Rows of one file that a window replaces."""

    file: PlannedFile
    keys: Numbers  # which key of the window each has; -1: it goes with a TRUNCATE
    rows: Numbers


class Window:
    """Folded changes beside the files that they are put into."""

    def __init__(self, plan: TablePlan, fold: Fold) -> None:
        self._plan = plan
        self._emptied = fold.emptied_time
        self._texts = list(fold.versions)
        self._versions = [*fold.versions.values()]
        if fold.partial:
            self._versions = [list(map(self._without_unneeded, each)) for each in self._versions]
        self._first = np.array([each[0].sequence for each in self._versions], dtype=np.int64)
        self._outdated = np.zeros(len(self._texts), dtype=np.bool_)
        self._found: list[_Found] = []
        self._waiting: Mask | None = None
        self._left_out: set[int] = set()
        self._bases = self._bases_of_partial() if fold.partial else set[int]()
        self._partial = fold.partial
        self.rescued = 0  # values of the new rows that are so

    def _without_unneeded(self, version: Version) -> Version:
        """A version that lacks no more than what is stored or looked at."""
        shape = self._plan.shape
        if shape is None or not version.absent:
            return version
        needed = {column.name for column in (*shape.columns, *shape.conditions)}
        needed -= {name for name, mask in shape.masks.items() if mask is None} - {
            column.name for column in shape.conditions
        }
        return version._replace(absent=version.absent & needed)

    def _bases_of_partial(self) -> set[int]:
        bases = (each.base for each in chain.from_iterable(self._versions) if each.absent)
        at = {text: number for number, text in enumerate(self._texts)}
        return {at[base] for base in bases if base in at}

    # --- the old rows ----------------------------------------------------------------------------

    def look_up(
        self,
        files: Sequence[PlannedFile],
        dead: dict[str, BitMap],
        waiting: Collection[bytes] = (),
    ) -> None:
        """Find the old rows of all keys, and note them as dead.

        Keys that wait are left out, with their old rows, if they have any: see `left_out`.
        """
        plan = self._plan
        if waiting:
            self._waiting = np.array([text in waiting for text in self._texts], dtype=np.bool_)
        keys = self._masked(self._decoded(self._texts, plan.key)) if plan.key else None
        search = None if keys is None else KeySearch(plan, keys)
        for file in files:
            if search:
                self._note(file, *search.rows_in(file), dead)
            if self._emptied is not None:
                self._note_emptied(file, dead)

    @property
    def left_out(self) -> list[bytes]:
        """The keys that waited and of which a row was found."""
        return [self._texts[at] for at in sorted(self._left_out)]

    def _note(
        self, file: PlannedFile, keys: Numbers, rows: Numbers, dead: dict[str, BitMap]
    ) -> None:
        if not len(rows):
            return
        late = file.newest >= self._first.min()
        if late or self._plan.keep_history or self._bases or self._waiting is not None:
            keys, rows = self._alive(file, keys, rows, dead)
        if late and len(rows):
            stored = self._read(file, rows, [SEQUENCE])[SEQUENCE].to_numpy()
            newer = stored >= self._first[keys]
            self._outdated[keys[newer]] = True
            keys, rows = keys[~newer], rows[~newer]
        if self._waiting is not None and len(rows):
            waits = self._waiting[keys]
            self._left_out.update(keys[waits].tolist())
            self._outdated[keys[waits]] = True
            keys, rows = keys[~waits], rows[~waits]
        self._mark(file, keys, rows, dead)

    def _mark(
        self, file: PlannedFile, keys: Numbers, rows: Numbers, dead: dict[str, BitMap]
    ) -> None:
        if len(rows):
            self._found.append(_Found(file, keys, rows))
            dead[file.path] = dead.get(file.path, BitMap()) | bitmap(rows)

    def _alive(
        self, file: PlannedFile, keys: Numbers, rows: Numbers, dead: dict[str, BitMap]
    ) -> tuple[Numbers, Numbers]:
        gone = dead.get(file.path, BitMap())
        if file.vector is not None:
            gone = gone | vectors.read(self._plan.folder, file.vector)
        alive = ~np.isin(rows, row_numbers(gone))
        if alive.any() and self._plan.keep_history and kind(file.path) in ("", PAST):
            current = self._read(file, rows, [CURRENT])[CURRENT]
            alive &= current.to_numpy(zero_copy_only=False)
        return keys[alive], rows[alive]

    def _note_emptied(self, file: PlannedFile, dead: dict[str, BitMap]) -> None:
        """All other current rows end with a TRUNCATE; one share has all keys then."""
        every = np.arange(file.rows, dtype=np.int64)
        keys, rows = self._alive(file, np.full(file.rows, -1, dtype=np.int64), every, dead)
        self._mark(file, keys, rows, dead)

    # --- the new rows ----------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[str, pa.Table]]:
        """The rows to be written, complete, by what their file is to be called."""
        if not self._plan.keep_history:
            versions = (each[-1] for each in compress(self._versions, (~self._outdated).tolist()))
            for rows in self._tables([each for each in versions if each.image is not None], {}):
                yield LOOSE, rows
            return
        yield from self._history()

    def _history(self) -> Iterator[tuple[str, pa.Table]]:
        rows: list[Version] = []
        ends: list[int | None] = []
        for at, versions in enumerate(self._versions):
            if self._outdated[at]:
                continue
            until = [*(after.commit_time for _, after in pairwise(versions)), None]
            for version, end in zip(versions, until, strict=True):
                if version.image is not None:
                    rows.append(version)
                    ends.append(end)
        moment = self._plan.schema.field(VALID_TO).type
        own = {
            VALID_FROM: pa.array([version.commit_time for version in rows], pa.int64()).cast(
                moment
            ),
            VALID_TO: pa.array(ends, pa.int64()).cast(moment),
            CURRENT: pa.array([end is None for end in ends], pa.bool_()),
        }
        for old in self._closed():
            yield PAST, old
        for whole in self._tables(rows, own):
            current = whole[CURRENT]
            yield LOOSE, whole.filter(current)
            yield PAST, whole.filter(pc.invert(current))

    def _closed(self) -> Iterator[pa.Table]:
        """The rows that were current, as they are past."""
        schema = self._plan.schema
        times = np.array([each[0].commit_time for each in self._versions] + [0], dtype=np.int64)
        for file, keys, rows in self._found:
            for which, old in read_in_groups(self._plan.folder, file, rows, schema):
                ends = times[keys[which]]
                if self._emptied is not None:
                    emptied = keys[which] < 0
                    ends = np.where(emptied, self._emptied, np.minimum(ends, self._emptied))
                until = pa.array(ends, pa.int64()).cast(schema.field(VALID_TO).type)
                past = _with(_with(old, VALID_TO, until), CURRENT, pa.repeat(False, len(ends)))
                # Nobody ever saw what a transaction replaced that had made it.
                yield past.filter(pc.not_equal(past[VALID_FROM], past[VALID_TO]))

    def _tables(self, versions: Sequence[Version], own: dict[str, pa.Array]) -> Iterator[pa.Table]:
        """The rows of versions: whole ones at once, the others as their old rows are read."""
        own = {SEQUENCE: pa.array([each.sequence for each in versions], pa.int64()), **own}
        if not self._partial:
            yield self._table(versions, own)
            return
        partial: dict[bytes, list[int]] = defaultdict(list)
        for at in self._passing_in_part(versions):
            partial[versions[at].base].append(at)
        if whole := [at for at, version in enumerate(versions) if not version.absent]:
            yield self._table(*_chosen(versions, whole, own))
        lacking = set().union(*(versions[at].absent for some in partial.values() for at in some))
        names = [name for name in self._plan.schema.names if name in lacking]
        if names and self._plan.has_rescued:
            names.append(RESCUED)
        for bases, keys in self._base_rows(names) if names else ():
            pairs = [(number, at) for number, key in enumerate(keys) for at in partial.pop(key, ())]
            if pairs:
                numbers, chosen = zip(*pairs, strict=True)
                some, taken = _chosen(versions, chosen, own)
                yield self._completed_table(some, taken, bases.take(numbers))
        if partial:
            raise self._lacking()

    def _table(self, versions: Sequence[Version], own: dict[str, pa.Array]) -> pa.Table:
        """The rows of versions that are whole, those that pass."""
        images, plan = [each.image for each in versions], self._plan
        if plan.shape is None:
            return self._with_own(self._decoded(images, plan.columns), own)
        rows, verdict = shaped(plan.shape, plan.columns, plan.as_text, self._decoder(images))
        return self._with_own(rows, own, verdict)

    def _with_own(
        self, rows: pa.Table, own: dict[str, pa.Array], passed: pa.BooleanArray | None = None
    ) -> pa.Table:
        for name, values in own.items():
            rows = rows.append_column(name, values)
        if passed is not None:
            rows = rows.filter(passed)
        self.rescued += rescued_values(rows, self._plan)
        return conformed(rows, self._plan.schema)

    def _completed_table(
        self, versions: Sequence[Version], own: dict[str, pa.Array], bases: pa.Table
    ) -> pa.Table:
        """The rows of versions with what they lack, those that pass."""
        images, shape = [each.image for each in versions], self._plan.shape
        rows = self._with_own(self._masked(self._decoded(images, self._plan.columns)), own)
        if self._plan.has_rescued:
            absent = [version.absent for version in versions]
            rows = _with(rows, RESCUED, carried_over(rows[RESCUED], bases[RESCUED], absent))
            bases = bases.drop_columns([RESCUED])
        rows = _completed(rows, versions, bases)
        if shape is None or not shape.rule.where:
            return rows
        looked_at = self._decoder(images)(shape.conditions, frozenset())
        known = [name for name in bases.column_names if name in looked_at.column_names]
        looked_at = _completed(looked_at, versions, bases.select(known))
        return rows.filter(passing(shape, looked_at))

    def _passing_in_part(self, versions: Sequence[Version]) -> list[int]:
        """Those that lack columns, without those that cannot pass whatever these are."""
        partial = [at for at, version in enumerate(versions) if version.absent]
        shape = self._plan.shape
        if shape is None or not shape.rule.where:
            return partial
        looked_at = {column.name for column in shape.conditions}
        images = [versions[at].image for at in partial]
        absent = [versions[at].absent for at in partial]
        found = verdicts(shape, images, absent, self._plan.connector, rescue=self._plan.rescue)
        left = [at for at, verdict in zip(partial, found, strict=True) if verdict is not False]
        stored = {column.name for column in shape.columns} - shape.coded - self._plan.as_text
        if any(versions[at].absent & looked_at - stored for at in left):
            raise self._lacking()
        return left

    def _lacking(self) -> TableFailed:
        if self._plan.shape is None or not self._plan.shape.rule.where:
            return TableFailed("a row came in part, and the table does not have the rest of it")
        return TableFailed(
            "a row came in part, and the rest of it, which where needs or had left out, is not "
            "stored",
            hint=f"The way out: {whole_rows_hint(self._plan.connector)}, then run "
            "`headrace snapshot SOURCE TABLE`.",
        )

    def _base_rows(self, names: list[str]) -> Iterator[tuple[pa.Table, list[bytes]]]:
        """Some columns of the old rows that partial ones need, a few at a time, and their keys."""
        wanted = np.array(sorted(self._bases), dtype=np.int64)
        schema = pa.schema([self._plan.schema.field(name) for name in names])
        for file, keys, rows in self._found:
            needed = np.isin(keys, wanted)
            of = keys[needed]
            for which, bases in read_in_groups(self._plan.folder, file, rows[needed], schema):
                yield bases, [self._texts[at] for at in of[which].tolist()]

    def _read(self, file: PlannedFile, rows: Numbers, names: list[str]) -> pa.Table:
        schema = pa.schema([self._plan.schema.field(name) for name in names])
        return read_rows(self._plan.folder, file, rows, schema)

    def _decoded(self, images: Sequence[bytes | None], columns: Sequence[Column]) -> pa.Table:
        return self._decoder(images)(columns, self._plan.as_text)

    def _decoder(self, images: Sequence[bytes | None]) -> Decoder:
        plan = self._plan

        def decoder(columns: Sequence[Column], as_text: frozenset[str]) -> pa.Table:
            text = as_text & {column.name for column in columns}
            if plan.computed and plan.rescue:
                columns = [*columns, _RESCUED_BY_SPARK]
            return decode(
                images, columns, as_text=text, connector=plan.connector, rescue=plan.rescue
            )

        return decoder

    def _masked(self, rows: pa.Table) -> pa.Table:
        return rows if self._plan.shape is None else masked(rows, self._plan.shape)


def _chosen(
    versions: Sequence[Version], chosen: Sequence[int], own: dict[str, pa.Array]
) -> tuple[list[Version], dict[str, pa.Array]]:
    at = pa.array(chosen, pa.int64())
    return [versions[each] for each in chosen], {name: of.take(at) for name, of in own.items()}


def _completed(rows: pa.Table, versions: Sequence[Version], bases: pa.Table) -> pa.Table:
    """Rows with what each of them lacks taken from its old row."""
    for name in bases.column_names:
        absent = pa.array([name in version.absent for version in versions])
        rows = _with(rows, name, pc.if_else(absent, bases[name], rows[name]))
    return rows


def _with(rows: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), values)
