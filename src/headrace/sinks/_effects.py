"""The folded changes of a bucket as Arrow columns, beside the files they are put into."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import decode
from ..errors import TableTroubled
from ._fold import Folded, Version
from ._keys import Numbers, positions
from ._plan import CURRENT, SEQUENCE, VALID_FROM, VALID_TO, TablePlan

_NEVER = np.iinfo(np.int64).max


class Effects:
    """What a batch does to the keys of a bucket."""

    def __init__(self, plan: TablePlan, folded: Folded) -> None:
        self._plan = plan
        self._schema = plan.schema
        self._texts, self._versions, self._keys = _distinct(plan, folded)
        self._at = {text: at for at, text in enumerate(self._texts)}
        self._outdated: set[int] = set()
        self._bases: list[pa.Table] = []
        self._base_of: dict[int, int] = {}  # effect -> row number in all bases together
        self._needed = self._needed_bases()
        self.emptied = folded.emptied
        self._emptied_time = folded.emptied_time
        # One more at the end: -1, for rows that no change is about, finds it.
        firsts = [versions[0].sequence for versions in self._versions]
        self.first_sequences: Numbers = np.array([*firsts, 0], dtype=np.int64)

    @property
    def count(self) -> int:
        """How many keys the batch is about."""
        return len(self._versions)

    def where(self, keys: list[Any]) -> Numbers:
        """Which effect each stored row's key has; -1: none."""
        if not self._versions:
            return np.full(len(keys[0]), -1, dtype=np.int64)
        return positions(keys, self._keys)

    def outdate(self, effects: Numbers) -> None:
        """Forget effects that the table already has, or has something newer than."""
        self._outdated.update(effects.tolist())

    def remember(self, rows: pa.Table, where: Numbers, replaced: np.ndarray[Any, Any]) -> None:
        """Keep those replaced rows from which a change in part takes its other columns."""
        if not self._needed:
            return
        wanted = replaced & np.isin(where, self._needed)
        count = sum(len(bases) for bases in self._bases)
        for number, effect in enumerate(where[wanted].tolist(), count):
            self._base_of[effect] = number
        self._bases.append(rows.filter(pa.array(wanted)))

    def end_times(self, where: Numbers, superseded: np.ndarray[Any, Any]) -> Numbers:
        """When each stored row ends, in microseconds; meaningless for rows that do not."""
        firsts = [versions[0].commit_time for versions in self._versions]
        times = np.array([*firsts, _NEVER], dtype=np.int64)[np.where(superseded, where, -1)]
        return np.minimum(times, self._emptied_time) if self.emptied else times

    def new_rows(self) -> pa.Table:
        """The rows to be written, complete."""
        chosen = [
            (version, nothing_after)
            for at, versions in enumerate(self._versions)
            if at not in self._outdated
            for version, nothing_after in self._alive(versions)
        ]
        versions = [version for version, _ in chosen]
        as_text = self._plan.as_text & {column.name for column in self._plan.columns}
        rows = decode([v.image for v in versions], self._plan.columns, as_text=as_text)
        own: dict[str, Any] = {SEQUENCE: [version.sequence for version in versions]}
        if self._plan.keep_history:
            own[VALID_FROM] = [version.commit_time for version in versions]
            own[VALID_TO] = [end for _, end in chosen]
            own[CURRENT] = [end is None for _, end in chosen]
        for name, values in own.items():
            kind = self._schema.field(name).type
            rows = rows.append_column(name, pa.array(values).cast(kind) if values else
                                      pa.array([], kind))  # fmt: skip
        return self._completed(conformed(rows, self._schema), versions)

    def _alive(self, versions: list[Version]) -> list[tuple[Version, int | None]]:
        """The versions that are rows, each with the time at which it ends."""
        if not self._plan.keep_history:
            return [(versions[-1], None)] if versions[-1].image is not None else []
        ends = [after.commit_time for _, after in pairwise(versions)]
        pairs = zip(versions, [*ends, None], strict=True)
        return [(version, end) for version, end in pairs if version.image is not None]

    def _needed_bases(self) -> list[int]:
        bases = {v.base for versions in self._versions for v in versions if v.absent}
        return [self._at[base] for base in bases if base in self._at]

    def _completed(self, rows: pa.Table, versions: list[Version]) -> pa.Table:
        """The rows with absent columns taken from the rows that the table had."""
        partial = [(at, version) for at, version in enumerate(versions) if version.absent]
        if not partial:
            return rows
        found = {at: self._base_of.get(self._at.get(v.base, -1)) for at, v in partial}
        if None in found.values():
            raise TableTroubled("a row came in part, and the table does not have the rest of it")
        bases = pa.concat_tables(self._bases)
        for name in sorted({name for _, version in partial for name in version.absent}):
            index = self._schema.get_field_index(name)
            if index < 0:
                continue
            sources: list[int | None] = [None] * len(versions)
            for at, version in partial:
                if name in version.absent:
                    sources[at] = found[at]
            taken = bases[name].take(pa.array(sources, pa.int64()))
            lacking = pa.array([source is not None for source in sources])
            whole = pc.if_else(lacking, taken, rows[name])
            rows = rows.set_column(index, self._schema.field(name), whole)
        return rows


def _distinct(
    plan: TablePlan, folded: Folded
) -> tuple[list[str], list[list[Version]], list[pa.Array]]:
    """Keys, their versions and the keys' values, each key once.

    Two texts are one key only after a key column got another type within the batch.
    """
    texts = list(folded.versions)
    keys = _typed(plan, texts)
    if texts and keys:
        same = positions(keys, keys)
        if (same != np.arange(len(texts))).any():
            for at, first in enumerate(same.tolist()):
                if first != at:
                    joined = folded.versions[texts[first]] + folded.versions.pop(texts[at])
                    joined.sort(key=lambda version: version.sequence)
                    folded.versions[texts[first]] = joined
            return _distinct(plan, folded)
    return texts, [folded.versions[text] for text in texts], keys


def _typed(plan: TablePlan, texts: list[str]) -> list[pa.Array]:
    if not plan.key:
        return [pa.array([int(text) for text in texts], pa.int64())]
    names = frozenset(column.name for column in plan.key)
    typed = decode(texts, plan.key, as_text=plan.as_text & names)
    return [column.combine_chunks() for column in typed.columns]


def conformed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Stored rows with the columns of another version: missing ones null, widened ones cast."""
    if rows.schema.equals(schema):
        return rows
    columns = []
    for field in schema:
        if field.name in rows.column_names:
            columns.append(rows[field.name].cast(field.type))
        else:
            columns.append(pa.nulls(rows.num_rows, field.type))
    return pa.table(columns, schema=schema)
