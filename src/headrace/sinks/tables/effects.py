"""What a batch does to the keys of a bucket, as Arrow columns beside the files it is put into.

    changes in order ─▶ fold ─▶ versions of each key, and whether the table was emptied before them

A version that lacks columns (the source did not send them) takes them from the version before it
in the batch; what the batch does not have is left to the row that the table holds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...change.arrow import decode
from ...change.event import Column
from ...errors import TableFailed
from ..lake.plan import CURRENT, SEQUENCE, VALID_FROM, VALID_TO, TablePlan
from .keys import Numbers, positions

_NEVER = np.iinfo(np.int64).max
_NO_ROWS = pa.array(["TRUNCATE", "SCHEMA"])
_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode


# --- the fold ------------------------------------------------------------------------------------


class Routed(NamedTuple):
    """A change as the fold takes it."""

    sequence: int
    op: str
    key: str  # JSON; "" for TRUNCATE and SCHEMA
    old_key: str | None  # where an update comes from when it moves a row that is not whole
    after: str | None
    absent: list[str] | None  # columns that `after` lacks; None or []: none
    commit_time: int


class Version(NamedTuple):
    """A row as it is from a change on; `image` None: it is gone."""

    sequence: int
    commit_time: int
    image: str | None
    absent: frozenset[str] = frozenset()  # to be taken from the table's row …
    base: str = ""  # … of this key


@dataclass(slots=True)
class Folded:
    """The outcome of a batch for some keys."""

    emptied: bool = False  # whether there was a TRUNCATE
    emptied_time: int = 0  # the commit time of the first one
    versions: dict[str, list[Version]] = field(default_factory=dict)


def fold(changes: Iterable[Routed], *, every_version: bool) -> Folded:
    """Take changes in order; without `every_version` only the last of each key is kept."""
    folded = Folded()
    versions = folded.versions
    for change in changes:
        if change.op == "TRUNCATE":
            _empty(folded, change, every_version=every_version)
            continue
        if change.op == "SCHEMA":
            continue
        version = _version(versions, change)
        known = versions.get(change.key)
        if known is None or not every_version:
            versions[change.key] = [version]
        elif known[-1].commit_time == version.commit_time:
            known[-1] = version  # nobody ever saw the state within a transaction
        else:
            known.append(version)
    return folded


def _empty(folded: Folded, change: Routed, *, every_version: bool) -> None:
    if not folded.emptied:
        folded.emptied, folded.emptied_time = True, change.commit_time
    if not every_version:
        folded.versions.clear()
        return
    gone = Version(change.sequence, change.commit_time, None)
    for known in folded.versions.values():
        if known[-1].image is not None:
            known.append(gone)


def _version(versions: dict[str, list[Version]], change: Routed) -> Version:
    if change.op == "DELETE":
        return Version(change.sequence, change.commit_time, None)
    if not change.absent or change.after is None:
        return Version(change.sequence, change.commit_time, change.after)
    return _completed(versions, change, change.after)


def _completed(versions: dict[str, list[Version]], change: Routed, after: str) -> Version:
    """A version with as many of its absent columns as the batch knows."""
    base = change.old_key or change.key
    absent = frozenset(change.absent or ())
    known_versions = versions.get(base)
    earlier = known_versions[-1] if known_versions else None
    if earlier is None or earlier.image is None:
        return Version(change.sequence, change.commit_time, after, absent, base)
    known = _image(earlier.image)
    image = _image(after)
    image.update({name: known[name] for name in absent if name in known})
    lacking = absent & earlier.absent
    return Version(
        change.sequence, change.commit_time, _text(image).decode(), lacking, earlier.base
    )


# --- its outcome beside the files ----------------------------------------------------------------


class _Key(NamedTuple):
    """One key, and the rows that the batch makes of it, in order."""

    sequence: int  # of its first change
    commit_time: int
    rows: list[Version]
    ends: list[int | None]  # when each row ends; None: it is the current one


class Effects:
    """The outcome of a batch for the keys of a bucket."""

    def __init__(self, plan: TablePlan, changes: pa.Table) -> None:
        """Of routed changes in their order."""
        self._plan = plan
        self.emptied = False
        self._emptied_time = 0
        self._bases: list[pa.Table] = []
        self._base_of: dict[str, int] = {}  # key -> row number in all bases together
        self._outdated: list[Numbers] = []
        if _plain(plan, changes):
            self._take_last(changes)
        else:
            self._fold(changes)

    @property
    def count(self) -> int:
        """How many keys the batch is about."""
        return len(self._texts)

    def where(self, keys: list[Any]) -> Numbers:
        """Which key of the batch each stored row has; -1: none."""
        if not self._texts:
            return np.full(len(keys[0]), -1, dtype=np.int64)
        return positions(keys, self._keys)

    def older(self, stored: Numbers, where: Numbers) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which stored rows the batch replaces; where it is not newer, it changes nothing."""
        touched = where >= 0
        newer = touched & (stored >= self._sequences[where])
        if newer.any():
            self._outdated.append(where[newer])
        return touched & ~newer

    def remember(self, rows: pa.Table, where: Numbers, replaced: np.ndarray[Any, Any]) -> None:
        """Keep those replaced rows from which a change in part takes its other columns."""
        if not self._needed:
            return
        wanted = replaced & np.isin(where, self._needed)
        count = sum(len(bases) for bases in self._bases)
        for number, at in enumerate(where[wanted].tolist(), count):
            self._base_of[self._texts[at]] = number
        self._bases.append(rows.filter(pa.array(wanted)))

    def end_times(self, where: Numbers, replaced: np.ndarray[Any, Any]) -> Numbers:
        """When each stored row ends, in microseconds; meaningless for rows that do not."""
        times = self._times[np.where(replaced, where, -1)]
        return np.minimum(times, self._emptied_time) if self.emptied else times

    def new_rows(self) -> pa.Table:
        """The rows to be written, complete."""
        chosen = np.ones(len(self._images), dtype=np.bool_)
        if self._outdated:
            chosen = ~np.isin(self._key_of_row, np.concatenate(self._outdated))
        rows = _table(self._plan, self._images, self._own).filter(pa.array(chosen))
        rows = conformed(rows, self._plan.schema)
        if not self._partial:
            return rows
        numbers = np.flatnonzero(chosen).tolist()
        partial = [(at, self._partial[n]) for at, n in enumerate(numbers) if n in self._partial]
        return self._completed(rows, partial)

    def _take_last(self, changes: pa.Table) -> None:
        """The usual batch, of whole rows: the last change of each key is all that counts."""
        last = dict(zip(changes["key"].to_pylist(), range(changes.num_rows), strict=True))
        chosen = changes.take(pa.array(list(last.values()), pa.int64()))
        self._texts = chosen["key"].to_pylist()
        self._keys = _typed(self._plan, self._texts)
        alive = chosen.filter(pc.is_valid(chosen["after"]))
        self._sequences = _with_none(chosen["sequence"].to_numpy(), 0)
        self._times = np.zeros(0, dtype=np.int64)
        self._images = alive["after"].to_pylist()
        self._key_of_row = np.flatnonzero(pc.is_valid(chosen["after"]).to_numpy())
        self._own = {SEQUENCE: alive["sequence"]}
        self._partial: dict[int, Version] = {}
        self._needed: list[int] = []

    def _fold(self, changes: pa.Table) -> None:
        """Any batch: rows that are not whole, tables emptied on the way, every version kept."""
        folded = fold(_routed(changes), every_version=self._plan.keep_history)
        self.emptied, self._emptied_time = folded.emptied, folded.emptied_time
        self._texts = list(folded.versions)
        self._keys = _typed(self._plan, self._texts)
        keys = [_key(folded.versions[text]) for text in self._texts]
        self._sequences = _with_none([key.sequence for key in keys], 0)
        self._times = _with_none([key.commit_time for key in keys], _NEVER)
        versions = list(chain.from_iterable(key.rows for key in keys))
        self._images = [version.image for version in versions]
        self._key_of_row = np.repeat(np.arange(len(keys)), [len(key.rows) for key in keys])
        self._own = {SEQUENCE: pa.array([v.sequence for v in versions], pa.int64())}
        if self._plan.keep_history:
            self._own |= _period(versions, list(chain.from_iterable(key.ends for key in keys)))
        self._partial = {at: each for at, each in enumerate(versions) if each.absent}
        at_key = {text: at for at, text in enumerate(self._texts)}
        bases = {version.base for version in self._partial.values()}
        self._needed = [at_key[base] for base in bases if base in at_key]

    def _completed(self, rows: pa.Table, partial: list[tuple[int, Version]]) -> pa.Table:
        """The rows with absent columns taken from the rows that the table had."""
        if any(version.base not in self._base_of for _, version in partial):
            raise TableFailed("a row came in part, and the table does not have the rest of it")
        bases = pa.concat_tables(self._bases)
        for name in sorted({name for _, version in partial for name in version.absent}):
            index = rows.schema.get_field_index(name)
            if index < 0:
                continue
            sources: list[int | None] = [None] * rows.num_rows
            for at, version in partial:
                if name in version.absent:
                    sources[at] = self._base_of[version.base]
            taken = bases[name].take(pa.array(sources, pa.int64()))
            lacking = pa.array([source is not None for source in sources])
            whole = pc.if_else(lacking, taken, rows[name])
            rows = rows.set_column(index, rows.schema.field(name), whole)
        return rows


def conformed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows with the columns of another version: missing ones null, widened ones cast."""
    if rows.schema.equals(schema):
        return rows
    columns = []
    for each in schema:
        if each.name in rows.column_names:
            columns.append(rows[each.name].cast(each.type))
        else:
            columns.append(pa.nulls(rows.num_rows, each.type))
    return pa.table(columns, schema=schema)


def _plain(plan: TablePlan, changes: pa.Table) -> bool:
    if plan.keep_history or pc.any(pc.is_in(changes["op"], value_set=_NO_ROWS)).as_py():
        return False
    return not pc.any(pc.greater(pc.list_value_length(changes["absent"]), 0)).as_py()


def _routed(changes: pa.Table) -> Sequence[Routed]:
    columns = [changes[name].to_pylist() for name in Routed._fields]
    return list(map(Routed._make, zip(*columns, strict=True)))


def _key(versions: list[Version]) -> _Key:
    ends = [*(after.commit_time for _, after in pairwise(versions)), None]
    pairs = [(each, end) for each, end in zip(versions, ends, strict=True) if each.image]
    rows, row_ends = [each for each, _ in pairs], [end for _, end in pairs]
    return _Key(versions[0].sequence, versions[0].commit_time, rows, row_ends)


def _period(versions: list[Version], ends: list[int | None]) -> dict[str, pa.Array]:
    moment = pa.timestamp("us", tz="UTC")
    return {
        VALID_FROM: pa.array([version.commit_time for version in versions], moment),
        VALID_TO: pa.array(ends, moment),
        CURRENT: pa.array([end is None for end in ends], pa.bool_()),
    }


def _table(plan: TablePlan, images: list[str | None], own: dict[str, Any]) -> pa.Table:
    rows = _decoded(plan, images, plan.columns)
    for name, values in own.items():
        rows = rows.append_column(name, values)
    return rows


def _typed(plan: TablePlan, texts: list[str]) -> list[pa.Array]:
    if not plan.key:
        return [pa.array([int(text) for text in texts], pa.int64())]
    return [column.combine_chunks() for column in _decoded(plan, texts, plan.key).columns]


def _decoded(
    plan: TablePlan, images: Sequence[str | None], columns: tuple[Column, ...]
) -> pa.Table:
    names = {column.name for column in columns}
    return decode(images, columns, as_text=plan.as_text & names, connector=plan.connector)


def _with_none(numbers: Any, none: int) -> Numbers:
    """Numbers with one more at the end, which -1 finds: the one of rows that no change is about."""
    return np.append(np.asarray(numbers, dtype=np.int64), none)
