"""Changes on their way to the tasks that own their keys: each gets a table and a bucket.

Runs inside Spark's tasks on Arrow batches. What the driver must decide (a table, a version of its
columns or a case that the plan does not cover) is reported to it instead of being routed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...change.arrow import columns_of, decode
from ...change.arrow.frame import PACKED, pack, unpack
from ...change.event import Column
from ...errors import TableFailed
from ..lake.plan import APPLY_ERRORS, TableFailure, TablePlan, TableRef, VersionSummary, failure_of
from .keys import buckets

FIELDS = (
    "sequence",
    "op",
    "source",
    "connector",
    "schema",
    "table",
    "key",
    "before",
    "after",
    "unchanged",
    "schema_version",
    "row_schema",
    "epoch",
)

ROUTED = pa.schema(
    [
        ("at", pa.int32()),  # which plan; -1: `key` holds a `VersionSummary`
        ("bucket", pa.int32()),
        ("sequence", pa.int64()),
        ("op", pa.string()),
        ("key", pa.string()),
        ("old_key", pa.string()),
        ("after", pa.string()),
        ("absent", pa.list_(pa.string())),
        ("commit_time", pa.int64()),
    ]
)
# Between the tasks they travel as Arrow's own bytes, many in a row: taking them apart into rows
# for the JVM, and putting them together again, would cost more than everything else.
TASK = "task"
_SENT = pa.schema([(TASK, pa.int32()), *PACKED])
SENT_DDL = "task int, packed binary"

_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode
_ROW_OPS = pa.array(["INSERT", "READ", "UPDATE", "DELETE"])


def unpacked(batches: Iterator[pa.RecordBatch]) -> pa.Table:
    """All changes of a task."""
    parts = [each for batch in batches for each in unpack(batch.column("packed"))]
    return pa.concat_tables(parts) if parts else ROUTED.empty_table()


def _tables(batches: Iterator[pa.RecordBatch], *, packed: bool) -> Iterator[pa.Table]:
    """Changes, whether they come packed or as rows."""
    for batch in batches:
        if packed:
            yield from unpack(batch.column(0))
        else:
            yield pa.Table.from_batches([batch])


class _Described(NamedTuple):
    """What all changes of a version of a table share."""

    ref: TableRef
    connector: str
    version: int
    row_schema: str
    epoch: str


class ChangeRouter:
    """Sends every change of a batch where the plans say."""

    def __init__(
        self,
        plans: list[TablePlan],
        *,
        keys: Mapping[str, Sequence[str]],
        only_planned: bool,
        tasks: int,
        packed: bool,
    ) -> None:
        """`packed`: whether changes come as `frame.PACKED`, else as rows."""
        self._plans = {plan.ref: (at, plan) for at, plan in enumerate(plans)}
        counts = [len(plan.buckets) for plan in plans]
        self._first_task = np.cumsum(
            [0, *counts]
        )  # of each plan; the last is that of `VersionSummary`s
        self._tasks = tasks
        self._keys = dict(keys)  # schema.table: the columns that are its key instead of its own
        self._packed = packed
        self._only_planned = only_planned  # other tables have been dealt with already

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        seen: dict[int, VersionSummary] = {}
        described: dict[int, _Described] = {}  # by what the first change of each version has
        for changes in _tables(batches, packed=self._packed):
            versions = pc.unique(changes["schema_version"]).to_pylist()
            for version in versions:
                of_version = changes
                if len(versions) > 1:
                    of_version = changes.filter(pc.equal(changes["schema_version"], version))
                if version not in described:
                    described[version] = _described(of_version, version)
                if described[version].ref.table:
                    for routed in self._routed(of_version, described[version], seen):
                        yield from self._sent(routed)
        yield from self._sent(self._everywhere())
        yield from self._sent(_reported(seen))

    def _sent(self, routed: pa.Table) -> Iterator[pa.RecordBatch]:
        """Routed changes by their tasks: one bucket is one task's, and tasks share them out."""
        buckets = self._first_task[routed["at"].to_numpy()] + routed["bucket"].to_numpy()
        tasks = buckets % self._tasks
        for task in np.unique(tasks):
            part = routed.filter(pa.array(tasks == task)) if self._tasks > 1 else routed
            yield pa.record_batch([[int(task)], [pack(part)]], schema=_SENT)

    def _routed(
        self, changes: pa.Table, described: _Described, seen: dict[int, VersionSummary]
    ) -> Iterator[pa.Table]:
        ref, version = described.ref, described.version
        at, plan = self._plans.get(ref, (-1, None))
        if plan is None and self._only_planned:
            return
        if plan is not None:
            changes = changes.filter(pc.greater(changes["sequence"], plan.applied))
            if not changes.num_rows:
                return
        known = _look(seen, changes, described)
        chosen = self._keys.get(str(ref), ())
        try:
            if chosen:
                known.row_schema = rekeyed(known.row_schema, chosen)
            if plan is None or version not in plan.versions:
                return
            yield from _Routing(at, plan, known, rekey=bool(chosen)).of(changes)
        except APPLY_ERRORS as error:
            first = changes["sequence"][0].as_py()
            known.failure = known.failure or failure_of(error, first)

    def _everywhere(self) -> pa.Table:
        """A row for every bucket of a table whose files must all be written anew."""
        rows = [
            {"at": at, "bucket": bucket, "sequence": 0, "op": "SCHEMA", "key": ""}
            for at, plan in self._plans.values()
            if plan.rewrite
            for bucket in plan.buckets
        ]
        return pa.Table.from_pylist(rows, ROUTED)


class _Routing:
    """The changes of one version of one table's columns."""

    def __init__(self, at: int, plan: TablePlan, seen: VersionSummary, *, rekey: bool) -> None:
        self._at = at
        self._plan = plan
        self._seen = seen
        self._key = [column for column in columns_of(seen.row_schema) if column.key]
        self._rekey = rekey

    def of(self, changes: pa.Table) -> Iterator[pa.Table]:
        if self._plan.upto:
            changes = changes.filter(pc.less_equal(changes["sequence"], self._plan.upto))
        is_row = pc.is_in(changes["op"], value_set=_ROW_OPS)
        rows = changes.filter(is_row)
        if rows.num_rows:
            yield from self._rows(rows)
        if rows.num_rows < changes.num_rows:
            yield self._about_tables(changes.filter(pc.invert(is_row)))

    def _rows(self, rows: pa.Table) -> Iterator[pa.Table]:
        if not self._key:
            yield self._keyless(rows)
            return
        if self._rekey:
            rows = with_keys(rows, self._key)
        rows, moved = self._moved(rows)
        yield self._placed(rows, rows["key"], rows.column("old_key"), rows["op"], rows["after"])
        if moved.num_rows:
            gone = pa.array(["DELETE"] * moved.num_rows)
            nothing = pa.nulls(moved.num_rows, pa.string())
            yield self._placed(moved, moved["left_key"], nothing, gone, nothing)

    def _moved(self, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
        """The rows with their keys complete, and those that left another key behind."""
        with_before = pc.and_(pc.is_valid(rows["before"]), pc.equal(rows["op"], "UPDATE"))
        nothing = pa.nulls(rows.num_rows, pa.string())
        if not pc.any(with_before).as_py() and rows["key"].null_count == 0:
            return rows.append_column("old_key", nothing), rows.slice(0, 0)
        keys: list[str | None] = rows["key"].to_pylist()
        left: list[str | None] = [None] * rows.num_rows
        old = left.copy()
        befores, absents = rows["before"].to_pylist(), rows["unchanged"].to_pylist()
        for at in np.flatnonzero(pc.is_valid(rows["before"]).to_numpy()).tolist():
            before = self._key_of(befores[at])
            keys[at] = keys[at] or before
            if with_before[at].as_py() and before is not None and before != keys[at]:
                left[at] = before
                if absents[at]:
                    old[at] = before
        if None in keys:
            sequence = rows["sequence"][keys.index(None)].as_py()
            raise _failed("a change comes without its key", sequence, self._seen)
        if any(old) and not self._plan.together:
            self._seen.moves = True
        rows = rows.set_column(rows.column_names.index("key"), "key", pa.array(keys, pa.string()))
        rows = rows.append_column("old_key", pa.array(old, pa.string()))
        leaving = rows.append_column("left_key", pa.array(left, pa.string()))
        return rows, leaving.filter(pc.is_valid(leaving["left_key"]))

    def _key_of(self, image: str) -> str | None:
        """The key within an old image, written as capture writes keys; None: not all of it."""
        values = _image(image)
        if not all(column.name in values for column in self._key):
            return None
        return _text({column.name: values[column.name] for column in self._key}).decode()

    def _keyless(self, rows: pa.Table) -> pa.Table:
        """Rows without a key can only be added; each is known by its sequence."""
        other = pc.invert(pc.is_in(rows["op"], value_set=pa.array(["INSERT", "READ"])))
        if pc.any(other).as_py():
            sequence = rows.filter(other)["sequence"][0].as_py()
            raise _failed("a row was changed, and the table has no key", sequence, self._seen)
        nothing = pa.nulls(rows.num_rows, pa.string())
        key = pc.cast(rows["sequence"], pa.string())
        return self._table(rows, self._bucket([rows["sequence"]], rows.num_rows), key, nothing)

    def _placed(self, rows: pa.Table, key: Any, old_key: Any, op: Any, after: Any) -> pa.Table:
        names = frozenset(column.name for column in self._key)
        typed = decode(
            key.to_pylist(),
            self._key,
            as_text=self._plan.as_text & names,
            connector=self._plan.connector,
        )
        bucket = self._bucket(typed.columns, rows.num_rows)
        rows = rows.set_column(rows.column_names.index("op"), "op", _chunked(op))
        rows = rows.set_column(rows.column_names.index("after"), "after", _chunked(after))
        return self._table(rows, bucket, key, old_key)

    def _bucket(self, key: list[Any], rows: int) -> Any:
        level = 0 if self._plan.together else self._plan.level
        return pa.array(buckets(key, rows, level), pa.int32())

    def _table(self, rows: pa.Table, bucket: Any, key: Any, old_key: Any) -> pa.Table:
        return pa.table(
            [
                pa.array(np.full(rows.num_rows, self._at, np.int32)),
                bucket,
                rows["sequence"],
                rows["op"],
                key,
                old_key,
                rows["after"],
                _or_null(rows["unchanged"]),
                _commit_time(rows),
            ],
            schema=ROUTED,
        )

    def _about_tables(self, changes: pa.Table) -> pa.Table:
        """TRUNCATE goes to every bucket, and so does a DROP, after which there are no rows."""
        routed = []
        for change in changes.select(["sequence", "op", "after"]).to_pylist():
            details: Mapping[str, object] = msgspec.json.decode(change["after"] or "{}")
            if change["op"] == "MESSAGE":
                reason = f"the source could not read a row: {details.get('error', 'unknown')}"
                raise _failed(reason, change["sequence"], self._seen)
            if change["op"] == "TRUNCATE" or details.get("dropped"):
                routed += [
                    {
                        "at": self._at,
                        "bucket": bucket,
                        "sequence": change["sequence"],
                        "op": "TRUNCATE",
                        "key": "",
                        "commit_time": _time_of(changes, change["sequence"]),
                    }
                    for bucket in self._plan.buckets
                ]
        return pa.Table.from_pylist(routed, ROUTED)


def _described(changes: pa.Table, version: int) -> _Described:
    names = ("source", "schema", "table", "connector", "row_schema", "epoch")
    source, schema, table, connector, text, epoch = (
        changes[name][0].as_py() or "" for name in names
    )
    return _Described(TableRef(source, schema, table), connector, version, text, epoch)


def _look(
    seen: dict[int, VersionSummary], changes: pa.Table, described: _Described
) -> VersionSummary:
    sequences = changes["sequence"]
    known = seen.get(described.version)
    if known is None:
        known = seen[described.version] = VersionSummary(
            ref=described.ref,
            connector=described.connector,
            version=described.version,
            row_schema=described.row_schema,
            epoch=described.epoch,
            first_sequence=sequences[0].as_py(),
            last_sequence=0,
            changes=0,
            size=0,
        )
    known.last_sequence = max(known.last_sequence, pc.max(sequences).as_py())
    known.changes += changes.num_rows
    known.size += pc.sum(pc.binary_length(changes["after"])).as_py() or 0
    emptied = changes.filter(pc.equal(changes["op"], "TRUNCATE"))["sequence"]
    known.emptied_at = max(known.emptied_at, pc.max(emptied).as_py() or 0)
    return known


def _reported(seen: dict[int, VersionSummary]) -> pa.Table:
    rows = [
        {
            "at": -1,
            "bucket": 0,
            "sequence": each.first_sequence,
            "op": "SEEN",
            "key": _text(each).decode(),
        }
        for each in seen.values()
    ]
    return pa.Table.from_pylist(rows, ROUTED)


def _failed(reason: str, sequence: int, seen: VersionSummary) -> TableFailed:
    error = TableFailed(reason)
    seen.failure = TableFailure(sequence, reason, error.hint)
    return error


def _commit_time(rows: pa.Table) -> Any:
    """In microseconds; 0 where the column was left out."""
    if "transaction" not in rows.column_names:
        return pa.array(np.zeros(rows.num_rows, np.int64))
    return pc.cast(pc.struct_field(rows["transaction"], "commit_time"), pa.int64())


def _time_of(rows: pa.Table, sequence: int) -> int:
    at = pc.index(rows["sequence"], sequence).as_py()
    return int(_commit_time(rows)[at].as_py())


def _or_null(lists: Any) -> Any:
    """Null for an empty list, which costs more to carry."""
    return pc.if_else(pc.equal(pc.list_value_length(lists), 0), None, lists)


def _chunked(column: Any) -> pa.ChunkedArray:
    return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])


# --- tables whose rows are identified by other columns than their key ----------------------------

_FULL = (
    "Run `ALTER TABLE … REPLICA IDENTITY FULL` on the server, "
    "then `headrace snapshot SOURCE TABLE`."
)


def rekeyed(row_schema: str, key: Sequence[str]) -> str:
    """The columns of a table, these ones marked as its key."""
    columns = columns_of(row_schema)
    missing = set(key) - {column.name for column in columns}
    if missing:
        raise TableFailed(
            f"keys names column {min(missing)}, and the table has none of this name",
            hint="Correct keys in the config, then run `headrace snapshot SOURCE TABLE`.",
        )
    marked = [{"name": c.name, "type": c.type, "key": c.name in key} for c in columns]
    return _text(marked).decode()


def with_keys(rows: pa.Table, key: Sequence[Column]) -> pa.Table:
    """Changes of rows whose `key` and `before` are made of the chosen columns."""
    names = [column.name for column in key]
    given = (rows[name].to_pylist() for name in ("sequence", "op", "key", "before", "after"))
    keys: list[str] = []
    befores: list[str | None] = []
    for sequence, op, source_key, before, after in zip(*given, strict=True):
        # A source that sends no old row has not changed its own key.
        old = {} if op in ("INSERT", "READ") else _image(before or source_key or "{}")
        new = old if op == "DELETE" else {**old, **_image(after)}
        befores.append(None if op in ("INSERT", "READ") else _key_text(names, old, sequence))
        keys.append(_key_text(names, new, sequence))
    return _replaced(_replaced(rows, "key", keys), "before", befores)


def _key_text(names: Sequence[str], image: Mapping[str, msgspec.Raw], sequence: int) -> str:
    for name in names:
        if name not in image:
            raise TableFailed(
                f"change {sequence} comes without the value of {name}, which keys names",
                hint=_FULL,
            )
    return _text({name: image[name] for name in names}).decode()


def _replaced(rows: pa.Table, name: str, values: Sequence[Any]) -> pa.Table:
    return rows.set_column(rows.column_names.index(name), name, pa.array(values, pa.string()))
