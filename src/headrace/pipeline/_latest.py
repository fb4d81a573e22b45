"""The tasks behind `latest_per_key`: what the changes of a batch add up to, key by key. No I/O."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ..change.arrow import columns_of

PLACE = ("source", "schema", "table")
MOVED_FROM = "_moved_from"  # the key that a row had before this change
BUCKET = "_bucket"

Batches = Iterator[pa.RecordBatch]
Image = Mapping[str, msgspec.Raw]

_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode


def split(batches: Batches) -> Batches:
    """Tell each change the key its row had before, and add a DELETE of that key."""
    for batch in batches:
        moved_from = [_old_key(*row) for row in _images(batch)]
        moved = batch.append_column(MOVED_FROM, pa.array(moved_from, pa.string()))
        yield moved
        left = [at for at, key in enumerate(moved_from) if key is not None]
        if left:
            yield _deletes(moved.take(left))


def _images(batch: pa.RecordBatch) -> Iterator[tuple[str, str | None, str | None, str | None]]:
    # Most changes have no old image, and then there is nothing to look for.
    before = batch["before"] if pc.any(pc.is_valid(batch["before"])).as_py() else None
    if before is None:
        return iter([("", None, None, None)] * batch.num_rows)
    columns = (batch["op"], batch["key"], before, batch["row_schema"])
    return zip(*(column.to_pylist() for column in columns), strict=True)


def _old_key(op: str, key: str | None, before: str | None, row_schema: str | None) -> str | None:
    if op != "UPDATE" or key is None or before is None or row_schema is None:
        return None
    old = _image(before)
    names = [column.name for column in columns_of(row_schema) if column.key]
    if not all(name in old for name in names):
        return None
    # Written as capture writes keys, so that it equals the key of the row's other changes.
    old_key = _text({name: old[name] for name in names}).decode()
    return None if old_key == key else old_key


def _deletes(moved: pa.RecordBatch) -> pa.RecordBatch:
    count = moved.num_rows
    lists = moved.schema.field("unchanged").type
    instead = {
        "op": pa.array(["DELETE"] * count, pa.string()),
        "key": moved[MOVED_FROM],
        "after": pa.nulls(count, pa.string()),
        "changed": pa.nulls(count, lists),
        "unchanged": pa.array([[]] * count, lists),
        MOVED_FROM: pa.nulls(count, pa.string()),
    }
    arrays = [instead.get(name, moved[name]) for name in moved.schema.names]
    return pa.record_batch(arrays, schema=moved.schema)


@dataclass(slots=True)
class _Row:
    """A row as far as the batch has it: where its last change stands, and what was put into it."""

    at: int
    after: str | None
    absent: list[str]
    completed: bool = False


@dataclass(slots=True)
class _Fold:
    """The rows of some keys, change by change."""

    rows: dict[Any, _Row] = field(default_factory=dict)

    def take(self, at: int, change: Mapping[str, Any]) -> None:
        place = tuple(change[name] for name in PLACE)
        key, absent = change["key"], change["unchanged"] or []
        if key is None:
            self.rows[at] = _Row(at, change["after"], absent)
            return
        row = _Row(at, change["after"], absent)
        if absent and change["op"] == "UPDATE":
            known = self.rows.get((place, change[MOVED_FROM] or key))
            row = self._completed(row, known or row)
        self.rows[place, key] = row

    def _completed(self, row: _Row, known: _Row) -> _Row:
        if known is row or known.after is None or row.after is None:
            return row
        earlier, image = _image(known.after), _image(row.after)
        found = {name: earlier[name] for name in row.absent if name in earlier}
        absent = [name for name in row.absent if name not in found]
        return _Row(row.at, _text({**image, **found}).decode(), absent, completed=True)


class Latest:
    """Keeps the last change of each key of a task's changes."""

    def __call__(self, batches: Batches) -> Batches:
        given = list(batches)
        if not given:
            return
        changes = pa.Table.from_batches(given)
        # A move comes before the DELETE that it leaves, which has the same sequence.
        changes = changes.sort_by([("sequence", "ascending"), (MOVED_FROM, "ascending")])
        kept = _kept(changes)
        table = changes.take([row.at for row in kept]).drop_columns([MOVED_FROM, BUCKET])
        if any(row.completed for row in kept):
            table = _replaced(table, "after", [row.after for row in kept])
            table = _replaced(table, "unchanged", [row.absent for row in kept])
        yield from table.to_batches()


def _kept(changes: pa.Table) -> list[_Row]:
    fold = _Fold()
    seen = [*PLACE, "op", "key", "after", "unchanged", MOVED_FROM]
    at = 0
    for batch in changes.select(seen).to_batches(max_chunksize=8192):
        for change in batch.to_pylist():
            fold.take(at, change)
            at += 1
    return list(fold.rows.values())


def _replaced(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(
        at, table.schema.field(at), pa.array(values, table.schema.field(at).type)
    )
