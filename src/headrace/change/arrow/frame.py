"""Changes as columns: the schema that Spark and Arrow see, and records turned into it.

Every row explains itself: `row_schema` holds the columns of its table as they were then, `epoch`
the log it comes from, so that a DataFrame of changes can be filtered, stored and read elsewhere,
and its rows become changes again for those who write them down in a format.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress, groupby, starmap
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import ConfigError
from .. import record
from ..connector import PositionsDecoder, position_from_json
from ..event import (
    BeforeKind,
    Change,
    Op,
    Position,
    Table,
    Transaction,
    change_id,
    piece_begin,
)
from . import columns_of, references_of, row_schema

_TIMESTAMP = pa.timestamp("us", tz="UTC")

FIELDS: dict[str, pa.DataType] = {
    "sequence": pa.int64(),
    "id": pa.string(),
    "op": pa.string(),  # INSERT, UPDATE, DELETE, READ, TRUNCATE, SCHEMA, MESSAGE
    "source": pa.string(),
    "connector": pa.string(),
    "origin": pa.string(),  # the server's own identity
    "database": pa.string(),
    "schema": pa.string(),
    "table": pa.string(),
    "key": pa.string(),  # JSON, as are before, after, position, row_schema and metadata
    "before": pa.string(),
    "before_kind": pa.string(),
    "after": pa.string(),
    "changed": pa.list_(pa.string()),
    "unchanged": pa.list_(pa.string()),  # never null
    "transaction": pa.struct(
        [
            pa.field("id", pa.string()),
            pa.field("ordinal", pa.int64()),
            pa.field("last", pa.bool_()),
            pa.field("commit_time", _TIMESTAMP),
        ]
    ),
    "position": pa.string(),
    "captured_at": _TIMESTAMP,
    "schema_version": pa.int32(),
    "row_schema": pa.string(),  # [{"name":"id","type":"bigint","key":true},…]; null: no table
    "metadata": pa.string(),
    "epoch": pa.string(),
}
"""The columns of a change, in order; all may be null but sequence, op, unchanged and epoch."""


def pack(changes: pa.Table | pa.RecordBatch) -> bytes:
    """Changes as bytes."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, changes.schema) as writer:
        writer.write(changes)
    return bytes(stream.getvalue())


def unpack(packed: pa.Array) -> list[pa.Table]:
    """The changes behind a column of packed ones."""
    return [pa.ipc.open_stream(each.as_buffer()).read_all() for each in packed]


def schema(fields: Sequence[str] | None = None) -> pa.Schema:
    """The Arrow schema of changes; `fields` leaves out what nobody will look at."""
    return pa.schema([(name, FIELDS[name]) for name in fields or FIELDS])


@dataclass(frozen=True)
class Framing:
    """Turns records of one log into Arrow, with the requested fields."""

    epoch: str
    tables: Mapping[int, Table]  # by version
    fields: tuple[str, ...] = tuple(FIELDS)
    wanted: tuple[str, ...] = ()  # globs of tables; none: all
    # A table's answer never changes, so each version is looked up once.
    _answers: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)

    def batch(self, first: int, count: int, records: bytes) -> pa.RecordBatch:
        """The changes of wanted tables among `count` neighbouring records, from sequence `first`.

        The records lie one after the other, as the log stores each.
        """
        sequences: Sequence[int] = range(first, first + count)
        rows = record.rows(records, count)
        if self.wanted:
            keep = [self._wants(row[0]) for row in rows]
            sequences, rows = list(compress(sequences, keep)), list(compress(rows, keep))
        if not rows:
            return pa.RecordBatch.from_pylist([], schema=schema(self.fields))
        columns = _Columns(self, sequences, _Fields._make(zip(*rows, strict=True)))
        arrays = [_BUILD[name](columns) for name in self.fields]
        return pa.RecordBatch.from_arrays(arrays, schema=schema(self.fields))

    def _wants(self, version: int) -> bool:
        answer = self._answers.get(version)
        if answer is None:
            table = self.tables[version]
            answer = self._answers[version] = any(map(table.matches, self.wanted))
        return answer


class _Fields(NamedTuple):
    """The fields of several records, a tuple each; names and order are those of a record."""

    table: tuple[int, ...]
    op: tuple[str, ...]
    transaction: tuple[str, ...]
    commit_time: tuple[int, ...]
    captured_at: tuple[int, ...]
    metadata: tuple[bytes | None, ...]
    ordinal: tuple[int, ...]
    last: tuple[bool, ...]
    position: tuple[msgspec.Raw, ...]
    key: tuple[bytes | None, ...]
    before_kind: tuple[str, ...]
    before: tuple[bytes | None, ...]
    after: tuple[bytes | None, ...]
    changed: tuple[tuple[str, ...] | None, ...]
    unchanged: tuple[tuple[str, ...], ...]


class _Columns:
    """What the columns of one batch are built from."""

    def __init__(self, framing: Framing, sequences: Sequence[int], fields: _Fields) -> None:
        self.framing = framing
        self.sequences = sequences
        self.fields = fields
        self.versions = pa.array(fields.table, pa.int32())
        self._tables = self.versions.dictionary_encode()
        versions = self._tables.dictionary.to_pylist()
        self._known = [framing.tables[version] for version in versions]

    def of_table(self, value: Callable[[Table], str | None]) -> pa.Array:
        """What all changes of a table share, worked out once for each."""
        return pa.array(map(value, self._known), pa.string()).take(self._tables.indices)

    def transactions(self) -> pa.Array:
        """Where each change stands in its transaction."""
        fields = self.fields
        parts = (fields.transaction, fields.ordinal, fields.last, fields.commit_time)
        types = FIELDS["transaction"]
        arrays = [pa.array(part, inner.type) for part, inner in zip(parts, types, strict=True)]
        return pa.StructArray.from_arrays(arrays, fields=list(types))

    def positions(self) -> list[Position]:
        """Where each change stands in its source."""
        return list(map(_position, self.fields.position))

    def ids(self) -> pa.Array:
        """A hash for each change: the one column that costs as much as all others."""
        origins = [self.framing.tables[version].origin for version in self.fields.table]
        fields = self.fields
        given = zip(origins, self.positions(), fields.transaction, fields.ordinal, strict=True)
        return pa.array(starmap(change_id, given), pa.string())


_position = PositionsDecoder[Position](lambda position: position, lambda position: position[:1])
_json = msgspec.json.Encoder().encode


def _plain(name: str) -> Callable[[_Columns], pa.Array]:
    """A field as the record has it; JSON goes from its bytes to text without being read."""
    return lambda columns: pa.array(getattr(columns.fields, name), FIELDS[name])


def _shared(value: Callable[[Table], str | None]) -> Callable[[_Columns], pa.Array]:
    return lambda columns: columns.of_table(value)


_BUILD: dict[str, Callable[[_Columns], pa.Array]] = {
    "sequence": lambda columns: pa.array(columns.sequences, pa.int64()),
    "id": _Columns.ids,
    "op": _plain("op"),
    "source": _shared(lambda table: table.source),
    "connector": _shared(lambda table: table.connector),
    "origin": _shared(lambda table: table.origin),
    "database": _shared(lambda table: table.database),
    "schema": _shared(lambda table: table.schema),
    "table": _shared(lambda table: table.name),
    "key": _plain("key"),
    "before": _plain("before"),
    "before_kind": _plain("before_kind"),
    "after": _plain("after"),
    "changed": _plain("changed"),
    "unchanged": _plain("unchanged"),
    "transaction": _Columns.transactions,
    "position": lambda columns: pa.array(
        [_json(position.to_json()) for position in columns.positions()], pa.string()
    ),
    "captured_at": _plain("captured_at"),
    "schema_version": lambda columns: columns.versions,
    "row_schema": _shared(lambda table: row_schema(table) if table.name else None),
    "metadata": _plain("metadata"),
    "epoch": lambda columns: columns.of_table(lambda _: columns.framing.epoch),
}


# --- and back ------------------------------------------------------------------------------------

REQUIRED = tuple(name for name in FIELDS if name not in ("id", "epoch"))
"""The fields that `changes` needs."""

_TABLE = (
    "source",
    "connector",
    "origin",
    "database",
    "schema",
    "table",
    "schema_version",
    "row_schema",
)
_OPS = {op.value: op for op in Op}
_KINDS = {kind.value: kind for kind in BeforeKind}


def changes(framed: pa.Table | pa.RecordBatch) -> list[Change]:
    """The changes behind rows, with all that formats look at; their ids are those of the rows.

    A row lacks what only a stream of the source itself needs: the numbers of tables and
    types, a table's replica identity, where a commit record ends.
    """
    if isinstance(framed, pa.Table):
        return [change for batch in framed.to_batches() for change in changes(batch)]
    expect(framed.schema.names, REQUIRED)
    # Spark gives times in the session's zone; the moments are the same.
    rows = framed.select(REQUIRED).cast(schema(REQUIRED))
    ids, ordinals, lasts, commit_times = rows["transaction"].flatten()
    return list(
        map(
            Change,
            map(_OPS.__getitem__, rows["op"].to_pylist()),
            _tables(rows),
            _texts(rows["key"]),
            _texts(rows["before"]),
            map(_KINDS.__getitem__, rows["before_kind"].to_pylist()),
            _texts(rows["after"]),
            _names(rows["changed"]),
            _names(rows["unchanged"]),
            map(
                Transaction,
                ids.to_pylist(),
                _moments(commit_times),
                _moments(rows["captured_at"]),
                _texts(rows["metadata"]),
            ),
            ordinals.to_pylist(),
            map(
                position_from_json,
                rows["connector"].to_pylist(),
                map(_shown_position, rows["position"].to_pylist()),
            ),
            lasts.to_pylist(),
            rows["sequence"].to_pylist(),
        )
    )


def expect(names: Iterable[str], fields: Sequence[str]) -> None:
    """Refuse changes of which something was left out."""
    missing = [name for name in fields if name not in set(names)]
    if missing:
        raise ConfigError(
            f"the changes have no column {missing[0]}",
            hint='Read them with format("headrace"), and leave these columns in: '
            f"{', '.join(fields)}.",
        )


def whole(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Ordered changes, cut only between transactions.

    Of a very large transaction each piece counts as one; see `event.PIECE`.
    """
    held: list[pa.RecordBatch] = []
    unit: tuple[Any, ...] | None = None
    for batch in batches:
        units = _units(batch)
        if not units:
            continue
        cut = units.index(units[-1])
        if cut or units[-1] != unit:
            ended = pa.Table.from_batches([*held, batch.slice(0, cut)])
            if ended.num_rows:
                yield ended
            held = []
        held.append(batch.slice(cut))
        unit = units[-1]
    if held:
        yield pa.Table.from_batches(held)


def transactions(framed: pa.Table) -> Iterator[list[Change]]:
    """The changes behind ordered rows, transaction by transaction; see `whole`."""
    for _, group in groupby(zip(_units(framed), changes(framed), strict=True), itemgetter(0)):
        yield [change for _, change in group]


def _units(framed: pa.Table | pa.RecordBatch) -> list[tuple[Any, ...]]:
    """What the changes have in common that are taken together: their log, and where they begin."""
    ordinals = pc.struct_field(framed["transaction"], "ordinal").to_pylist()
    begins = map(piece_begin, framed["sequence"].to_pylist(), ordinals)
    return list(zip(framed["epoch"].to_pylist(), begins, strict=True))


def _tables(rows: pa.RecordBatch) -> Iterator[Table]:
    """The table of each row: worked out once for all rows that describe it alike."""
    encoded = [rows[name].dictionary_encode("encode") for name in _TABLE]
    words = [each.dictionary.to_pylist() for each in encoded]
    known: dict[tuple[int, ...], Table] = {}
    for at in zip(*(each.indices.to_pylist() for each in encoded), strict=True):
        if at not in known:
            known[at] = _table(*(word[index] for word, index in zip(words, at, strict=True)))
        yield known[at]


@lru_cache(maxsize=4096)
def _table(*values: Any) -> Table:
    # One value for all batches: formats keep what they have worked out for a table.
    source, connector, origin, database, schema, name, version, text = values
    return Table(
        source,
        connector,
        origin,
        database,
        schema,
        name,
        columns_of(text) if text else (),
        version=version,
        references=references_of(text) if text else (),
    )


def _texts(column: pa.Array) -> list[bytes | None]:
    texts: list[bytes | None] = column.cast(pa.binary()).to_pylist()
    return texts


def _names(column: pa.Array) -> list[tuple[str, ...] | None]:
    return [None if names is None else tuple(names) for names in column.to_pylist()]


def _moments(column: pa.Array) -> list[int]:
    microseconds: list[int] = column.cast(pa.int64()).to_pylist()
    return microseconds


_shown_position = msgspec.json.Decoder(dict[str, Any]).decode
