"""What Spark's tasks do for tables whose rows Spark computes, before the statement and after it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ..change.arrow import (
    RESCUED,
    arrow_schema,
    columns_of,
    decode,
    rescued_of,
    row_schema,
)
from ..change.arrow.encode import images
from ..change.event import Column, Table
from ..errors import DecodeError, TableFailed
from .rules import described, whole_rows_hint

SEQUENCE = "_sequence"
OWN = pa.schema(
    [
        ("_change_type", pa.string()),
        ("_commit_version", pa.int64()),
        ("_commit_timestamp", pa.timestamp("us", tz="UTC")),
        (SEQUENCE, pa.int64()),
    ]
)
"""The columns that a statement sees beside the table's own."""

ROW_OPS = ("INSERT", "UPDATE", "DELETE", "READ")
LEAVING_OPS = ("INSERT", "UPDATE", "READ")  # that leave a row behind
RESULT = pa.schema([("at", pa.int64()), ("image", pa.string()), ("image_key", pa.string())])
"""A row of the result: the change that it stands for, the row, and its key."""

Unfit = Literal["null", "rescue", "stop"]

HINT = "Correct the transform (`headrace check` tries it), then reset the sink."
_GOES_ON = "Correct the transform (`headrace check` tries it); then the sink goes on from here."

Batches = Iterator[pa.RecordBatch]
_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A table whose rows are computed, as tasks know it."""

    table: Table  # its newest version, with the key that the sink chooses
    place: str  # in the config, for messages
    as_text: frozenset[str] = frozenset()
    exact: bool = False  # a row that is not there is deleted, even if it may never have been
    as_source: bool = False  # the result becomes events, which name the source's connector
    # What the statement sees of a value that its column cannot hold: null, and with "rescue" its
    # text in RESCUED.
    unfit: Unfit = "null"

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the key."""
        return tuple(column.name for column in self.table.columns if column.key)

    @property
    def typed(self) -> pa.Schema:
        """The columns that the statement sees."""
        names = {column.name for column in self.table.columns}
        if taken := names & set(OWN.names):
            raise self.failed(f"the table has a column {min(taken)}, a name that is needed here")
        rescued = [(RESCUED, pa.string())] if self.shows_rescued else []
        return pa.schema([*self._schema(self.table.columns), *rescued, *OWN])

    @property
    def shows_rescued(self) -> bool:
        """Whether the statement sees RESCUED, and what it keeps of it is stored as such."""
        return self.unfit == "rescue" and all(each.name != RESCUED for each in self.table.columns)

    def _schema(self, columns: Sequence[Column]) -> pa.Schema:
        as_text = self.as_text & {column.name for column in columns}
        return arrow_schema(columns, as_text=as_text, connector=self.table.connector)

    def decoded(self, found: Sequence[str | None], columns: Sequence[Column]) -> pa.Table:
        """Columns of some images, which were written by some version of the table."""
        as_text = self.as_text & {column.name for column in columns}
        return decode(
            found,
            columns,
            as_text=as_text,
            connector=self.table.connector,
            rescue=self.unfit != "stop",
        )

    def failed(self, text: str, *, hint: str = HINT) -> TableFailed:
        """Why the table cannot be computed."""
        return TableFailed(f"{self.place}: {text}", hint=hint)

    # Of errors that tasks raise, only the text comes to the driver.

    def no_row(self, text: str) -> TableFailed:
        """What to say of a result that has no row for each change."""
        return self.failed(f"{text}; each row of changes may come out once, or not at all")

    def partial(self, sequence: int, lacking: Sequence[str]) -> TableFailed:
        """What to say of a row that the source did not send whole."""
        lost = f"change {sequence} comes without {', '.join(lacking)}"
        return self.failed(f"{lost}; {whole_rows_hint(self.table.connector)}")


def halting(error: TableFailed) -> TableFailed:
    """What to say to a sink that halts, and that needs no reset."""
    return TableFailed(str(error), hint=_GOES_ON if error.hint == HINT else error.hint)


def _by_version(batch: pa.RecordBatch) -> Iterator[tuple[tuple[Column, ...], pa.RecordBatch]]:
    """The rows of a batch by the columns that their table had."""
    for version in pc.unique(batch["row_schema"]).to_pylist():
        yield columns_of(version), batch.filter(pc.equal(batch["row_schema"], version))


def _fitted(typed: pa.Table, field: pa.Field) -> pa.Array:
    """A column as the newest version of the table has it."""
    if field.name not in typed.column_names:
        return pa.nulls(typed.num_rows, field.type)
    values = typed[field.name].combine_chunks()
    try:
        return values.cast(field.type)
    except pa.ArrowException:
        # Arrow's own message would show the value.
        raise DecodeError(
            f"column {field.name!r} has an earlier value that {field.type} cannot hold"
        ) from None


@dataclass(frozen=True, slots=True)
class TypedRows:
    """Changes to the rows that they leave, as a statement sees them."""

    of: Computation

    def __call__(self, batches: Batches) -> Batches:
        schema = self.of.typed
        for batch in batches:
            for columns, rows in _by_version(batch):
                self._expect_whole(rows)
                known = [each for each in columns if each.name in schema.names]
                typed = self.of.decoded(rows["after"].to_pylist(), known)
                own = _own(rows)
                arrays = [own.get(field.name) for field in schema]
                fitted = [
                    _fitted(typed, field) if array is None else array
                    for array, field in zip(arrays, schema, strict=True)
                ]
                yield pa.record_batch(fitted, schema=schema)

    def _expect_whole(self, rows: pa.RecordBatch) -> None:
        parts = zip(rows["sequence"].to_pylist(), rows["unchanged"].to_pylist(), strict=True)
        for sequence, lacking in parts:
            if lacking:
                raise self.of.partial(sequence, lacking)


def _own(rows: pa.RecordBatch) -> dict[str, pa.Array]:
    kinds = ["update_postimage" if op == "UPDATE" else "insert" for op in rows["op"].to_pylist()]
    ordinals = pc.struct_field(rows["transaction"], "ordinal")
    moments = pc.struct_field(rows["transaction"], "commit_time")
    own = {
        "_change_type": pa.array(kinds, pa.string()),
        "_commit_version": pc.add(pc.subtract(rows["sequence"], ordinals), 1),
        "_commit_timestamp": moments,
        SEQUENCE: rows["sequence"],
    }
    return {name: values.cast(OWN.field(name).type) for name, values in own.items()}


@dataclass(frozen=True, slots=True)
class Encode:
    """Rows of the result to images."""

    of: Computation
    names: tuple[str, ...]  # of the columns after the sequence

    def __call__(self, batches: Batches) -> Batches:
        key = list(self.of.key)
        for batch in batches:
            if batch[SEQUENCE].null_count:
                raise self.of.no_row(f"a row comes out without {SEQUENCE}")
            rows = batch.drop_columns([SEQUENCE]).rename_columns(list(self.names))
            if self.of.shows_rescued and RESCUED in self.names:
                self._expect_rescued(rows[RESCUED])
            keys = images(rows.select(key)) if key else [None] * rows.num_rows
            arrays = [batch[SEQUENCE], pa.array(images(rows)), pa.array(keys, pa.binary())]
            fitted = [each.cast(of.type) for each, of in zip(arrays, RESULT, strict=True)]
            yield pa.record_batch(fitted, schema=RESULT)

    def _expect_rescued(self, texts: pa.Array) -> None:
        try:
            for text in pc.unique(texts.cast(pa.string())).to_pylist():
                rescued_of(text)
        except (msgspec.DecodeError, pa.ArrowException):
            raise self.of.failed(
                f"{RESCUED} comes out as something else than an object of texts"
            ) from None


@dataclass(frozen=True, slots=True)
class Heads:
    """Changes without their rows: the key of each as `Encode` writes it, and the one before.

    So no value that the statement takes away is sent from task to task.
    """

    of: Computation
    table: Table  # as the result has it

    def __call__(self, batches: Batches) -> Batches:
        for batch in batches:
            for columns, rows in _by_version(batch):
                yield self._of(rows, [each for each in columns if each.name in self.of.key])

    def _of(self, rows: pa.RecordBatch, key: Sequence[Column]) -> pa.RecordBatch:
        ops, before = rows["op"].to_pylist(), rows["before"].to_pylist()
        old = [each if _has(each, key) else None for each in before]
        images = zip(ops, rows["after"].to_pylist(), old, rows["key"].to_pylist(), strict=True)
        now = [
            None if op not in ROW_OPS else after if op in LEAVING_OPS else was or given
            for op, after, was, given in images
        ]
        self._expect_keys(rows, now, old, key)
        shown = {
            "key": self._encoded(now, key),
            "before": self._encoded(old, key),
            "before_kind": ["none"] * rows.num_rows,
            "after": [
                None if text is None or op in ROW_OPS else described(text.encode(), self.table)
                for op, text in zip(ops, rows["after"].to_pylist(), strict=True)
            ],
            "changed": [None] * rows.num_rows,
            "unchanged": [[]] * rows.num_rows,
            "row_schema": [None] * rows.num_rows,
        }
        return _with(rows, shown)

    def _expect_keys(
        self,
        rows: pa.RecordBatch,
        now: Sequence[str | None],
        old: Sequence[str | None],
        key: Sequence[Column],
    ) -> None:
        """Expect the key of each row, and the old one where a person has chosen the columns."""
        if not self.of.key:
            return
        chosen = not all(column.key for column in key)
        parts = zip(rows["sequence"].to_pylist(), rows["op"].to_pylist(), now, old, strict=True)
        for sequence, op, image, was in parts:
            lost = op in ROW_OPS and (len(key) < len(self.of.key) or not _has(image, key))
            if lost or (chosen and op == "UPDATE" and was is None):
                raise self.of.partial(sequence, self.of.key)

    def _encoded(self, found: Sequence[str | None], key: Sequence[Column]) -> list[bytes | None]:
        if not key:
            return [None] * len(found)
        typed, schema = self.of.decoded(found, key), self.of.typed
        names = self.of.key
        fitted = [_fitted(typed, schema.field(name)) for name in names]
        keys = images(pa.table(fitted, names=list(names)))
        return [None if image is None else made for image, made in zip(found, keys, strict=True)]


def _has(image: str | None, columns: Sequence[Column]) -> bool:
    """Whether an image has a value for each column."""
    if image is None:
        return False
    there = _image(image)
    return all(column.name in there for column in columns)


@dataclass(frozen=True, slots=True)
class Merge:
    """Heads of changes beside the images of the result: changes of the result."""

    of: Computation
    table: Table  # as the result has it

    def __call__(self, batches: Batches) -> Batches:
        for batch in batches:
            self._expect_rows(batch)
            yield self._merged(batch)

    def _expect_rows(self, rows: pa.RecordBatch) -> None:
        """Expect each row once, for a change that there is, and with the key of the source."""
        names = ("sequence", "images", "image_key", "key")
        for sequence, count, found, key in zip(
            *(rows[name].to_pylist() for name in names), strict=True
        ):
            if sequence is None:
                raise self.of.no_row(f"a row comes out whose {SEQUENCE} no change has")
            if count is not None and count > 1:
                raise self.of.no_row(f"change {sequence} comes out {count} times")
            if found is not None and found != key:
                raise self.of.no_row(f"the key of change {sequence} comes out as another one")

    def _merged(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        ops, passed = rows["op"].to_pylist(), rows["image"].is_valid().to_pylist()
        gone = [not there and op in LEAVING_OPS for op, there in zip(ops, passed, strict=True)]
        now, old = rows["key"].to_pylist(), rows["before"].to_pylist()
        parts = list(zip(ops, gone, now, old, strict=True))
        keys = [was if left and was else key for _, left, key, was in parts]
        before = [
            key if left or op == "DELETE" else was if op == "UPDATE" else None
            for (op, left, _, was), key in zip(parts, keys, strict=True)
        ]
        after = pc.coalesce(rows["image"], rows["after"])  # the latter of no row
        count = rows.num_rows
        shown = {
            "op": ["DELETE" if left else op for op, left, _, _ in parts],
            "key": keys,
            "before": before,
            "before_kind": ["key" if each else "none" for each in before],
            "after": after,
            "connector": [self.table.connector] * count,
            "schema_version": [self.table.version] * count,
            "row_schema": [row_schema(self.table)] * count,
        }
        rest = _with(rows.drop_columns(["at", "images", "image", "image_key"]), shown)
        if self.of.exact and self.of.key:
            return rest
        # A row that was never there needs no DELETE.
        seen = [not left or op == "UPDATE" for op, left, _, _ in parts]
        return rest.filter(pa.array(seen, pa.bool_()))


def _with(rows: pa.RecordBatch, shown: dict[str, Any]) -> pa.RecordBatch:
    """Changes with other values."""
    for name, values in shown.items():
        at = rows.schema.get_field_index(name)
        field = rows.schema.field(at)
        array = values if isinstance(values, pa.Array) else _array(values, field.type)
        rows = rows.set_column(at, field, array.cast(field.type))
    return rows


def _array(values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
    return pa.array([each.decode() if isinstance(each, bytes) else each for each in values], arrow)
