"""One row's values taken out of a Delta table of the tables sink: past ones, and hidden ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...change.arrow import decode
from ...transforms.shape import masked
from ..erasing import ErasedPlace, ErasedRow
from ..lake.delta import EPOCH, SOURCE
from ..lake.deltalog import DeltaLog
from ..lake.erasure import FileForm, Mask, erase_rows
from ..lake.plan import CURRENT, OWN_COLUMNS, SEQUENCE, TableRef
from .parquet import FILLED, LOOSE, SORTED
from .target import TRANSFORM, finds_key, shaped_columns, texts_of

if TYPE_CHECKING:
    from .sink import Tables


@dataclass(frozen=True, slots=True)
class TableRowEraser:
    """Versions of the row that it no longer has lose their values; the key stays, and when it was.

    Rows that are dead already are left out with their files.
    """

    key: pa.Table  # one row: the key as the table has it
    kept: int  # the sequence of the version that stays; 0: none
    known: bool  # else every row stays that readers see as the row's last version
    chosen: frozenset[str] = frozenset()  # columns that are the table's key instead, and stay
    keep_last: bool = False  # the row may be there still, with its values

    def find(self, rows: pa.Table, dead: Mask) -> Mask:
        """Those with the key that have a value, and are not the version that stays."""
        return self._valued(rows) & ~self._stays(rows, dead)

    def _valued(self, rows: pa.Table) -> Mask:
        """Those with the key that have a value."""
        same = self._same(rows)
        if not same.any():
            return same
        valued = np.zeros(rows.num_rows, dtype=np.bool_)
        for name in self._values(rows):
            valued |= _mask(pc.is_valid(rows[name]))
        return same & valued

    def _same(self, rows: pa.Table) -> Mask:
        """Those with the key."""
        same = np.ones(rows.num_rows, dtype=np.bool_)
        for name in self.key.column_names:
            wanted = self.key[name][0].cast(rows.schema.field(name).type)
            same &= _mask(pc.equal(rows[name], wanted))
        return same

    def has(self, rows: pa.Table) -> bool:
        """Whether one has the key."""
        return bool(self._same(rows).any())

    def _stays(self, rows: pa.Table, dead: Mask) -> Mask:
        if self.known:
            return _mask(pc.equal(rows[SEQUENCE], self.kept))
        return ~dead & _mask(rows[CURRENT]) if CURRENT in rows.column_names else ~dead

    def erased(self, rows: pa.Table, found: Mask) -> pa.Table:
        """All rows; of those that were found, the key and when they were valid."""
        for name in self._values(rows):
            at = rows.schema.get_field_index(name)
            nulls = pa.nulls(1, rows.schema.field(at).type)[0]
            column = pc.if_else(pa.array(found), nulls, rows[name])
            rows = rows.set_column(at, rows.schema.field(at), column)
        return rows

    def unknown(self, rows: pa.Table) -> int:
        """None: every row has its key."""
        return 0

    def left(self, rows: pa.Table, dead: Mask) -> str:
        """The row as readers see it, of which the log has no change that says it is gone."""
        if self.known or self.keep_last or not (self._valued(rows) & self._stays(rows, dead)).any():
            return ""
        return (
            "the row as it is now; the log has no change of it, so it may still be in its source "
            "(--keep-last: these values are to stay)"
        )

    def _values(self, rows: pa.Table) -> list[str]:
        own = {*self.key.column_names, *OWN_COLUMNS, *self.chosen}
        return [name for name in rows.column_names if name not in own]


def _mask(values: pa.ChunkedArray) -> Mask:
    found: Mask = pc.fill_null(values, fill_value=False).to_numpy().astype(np.bool_)
    return found


def erase_in_table(sink: Tables, row: ErasedRow) -> list[ErasedPlace]:
    """Take the row out of the sink's Delta table; one of another source is not looked at.

    The table may be there although the config no longer gives it to the sink.
    """
    ref = TableRef(row.table.source, row.table.schema, row.table.name)
    folder = sink.folder.within(ref.schema, ref.table)
    place = f"sink {sink.name}: {ref}"
    state = DeltaLog(folder).read()
    if state is None:
        return [ErasedPlace(place=place, searched="no table")]
    if state.metadata.configuration.get(SOURCE) != ref.source:
        return []
    schema = state.schema
    key = _stored_key(sink, ref, row)
    lost = [name for name in key.column_names if name not in schema.names]
    if lost:
        left = f"{folder.uri} has no column {lost[0]}, by which the row could be found"
        return [ErasedPlace(place=place, left=(left,))]
    noted = state.metadata.configuration.get(TRANSFORM, "")
    if not finds_key(sink, ref, row.table, noted):
        left = (
            f"{folder.uri} was filled with another mask of its key, so the row cannot be found; "
            f"run `headrace reset {sink.name}`, let it be filled again, then erase the row"
        )
        return [ErasedPlace(place=place, left=(left,))]
    epoch = state.metadata.configuration.get(EPOCH, "")
    known = row.known and epoch in row.epochs
    chosen = frozenset(sink.keys.get(str(ref), ()))
    eraser = TableRowEraser(key, row.kept, known, chosen, row.keep_last)
    # Rows are sorted by their key, which stays, unless the config names other columns, which are
    # null now.
    renamed = {SORTED: LOOSE, FILLED: LOOSE} if str(ref) in sink.cluster_by else {}
    return [erase_rows(place, folder, eraser, FileForm(schema, renamed), sorted(row.texts))]


def _stored_key(sink: Tables, ref: TableRef, row: ErasedRow) -> pa.Table:
    """The key as the table stores it: with its types, and codes where it is masked."""
    _, shape = shaped_columns(sink, ref, row.table.columns, row.table.connector)
    columns = [column for column in row.table.columns if column.key]
    texts = texts_of(sink, ref, shape)
    key = decode([row.key], columns, connector=row.table.connector, as_text=texts)
    return masked(key, shape) if shape else key
