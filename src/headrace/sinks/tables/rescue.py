"""Values that their columns cannot hold: null in a row, and their text in its RESCUED.

The column is there from the first such value on, so most tables never have it. A task that meets
that value ends; the driver adds the column, and the batch is done again.
"""

from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa

from ...change.arrow import RESCUED, rescued_of, rescued_text, rescued_under
from ..lake.plan import CURRENT, TablePlan
from .evolution import Carry


class NoRescuedColumn(Exception):
    """There is a text to be kept, and the table has no RESCUED yet."""


def rescued_values(rows: pa.Table, plan: TablePlan) -> int:
    """How many values of new rows are in RESCUED; NoRescuedColumn: the table has none."""
    if not plan.rescue or RESCUED not in rows.column_names:
        return 0
    texts = rows[RESCUED].drop_null().to_pylist()
    if texts and not plan.has_rescued:
        raise NoRescuedColumn
    return sum(len(rescued_of(text)) for text in texts)


def carried_over(
    now: pa.ChunkedArray, before: pa.ChunkedArray, absent: Sequence[Collection[str]]
) -> pa.ChunkedArray | pa.Array:
    """RESCUED of rows, with what their old rows have there of the columns that they lack."""
    if before.null_count == len(before):
        return now
    pairs = zip(now.to_pylist(), before.to_pylist(), absent, strict=True)
    return pa.array((_carried(*pair) for pair in pairs), pa.string())


def _carried(now: str | None, before: str | None, absent: Collection[str]) -> str | None:
    if before is None:
        return now
    kept = {name: text for name, text in rescued_of(before).items() if name in absent}
    return rescued_text({**kept, **rescued_of(now)})


def with_carried_rescues(
    rows: pa.Table, names: Collection[str], plan: TablePlan, carry: Carry
) -> pa.Table:
    """Rows of a file with columns `names`: RESCUED follows those that are gone, renamed or new."""
    changed = bool(carry) or bool(set(names) - set(plan.schema.names))
    if not plan.has_rescued or not changed or not (RESCUED in names or carry.rescued):
        return rows
    at = rows.schema.get_field_index(RESCUED)
    later = {was: name for name, was in carry.renamed.items()}
    later |= {
        name: name
        for name in plan.schema.names
        if name not in later and name not in carry.renamed and name not in carry.filled
    }
    texts = rescued_under(rows[RESCUED], later)
    if carry.rescued:
        texts = _with_defaults(texts, carry.rescued, rows)
    return rows.set_column(at, rows.schema.field(at), texts)


def _with_defaults(texts: pa.Array, added: Mapping[str, str], rows: pa.Table) -> pa.Array:
    """The same with the texts of new columns; what is past did not have them."""
    there = rows[CURRENT].to_pylist() if CURRENT in rows.column_names else [True] * rows.num_rows
    pairs = zip(texts.to_pylist(), there, strict=True)
    found = [rescued_text({**rescued_of(text), **added}) if now else text for text, now in pairs]
    return pa.array(found, pa.string())
