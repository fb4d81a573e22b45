"""What a sink would see of a table's newest changes, without the sink; without Spark, if it can."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..change import record
from ..change.arrow import arrow_schema
from ..change.event import Change, Op, Table
from ..errors import ConfigError
from ..sinks import Sink
from ..transforms.changes import ShapedChanges
from .reading import LogAccess, SequenceRange

if TYPE_CHECKING:
    from .computed import Session

_WINDOW = 10_000  # changes that are read at once, from the end of the log backwards …
_WINDOWS = 100  # … at most so often
_ROW_OPS = frozenset((Op.INSERT, Op.UPDATE, Op.DELETE, Op.READ))


class Preview(msgspec.Struct, frozen=True):
    """The newest changes of a table as a sink sees them."""

    table: str
    columns: dict[str, str]  # names and types
    rows: list[dict[str, Any]]  # the operation and the sequence, then the values
    hidden: int = 0  # changes that were read and are not for the sink


def preview(
    sink: Sink,
    log: LogAccess,
    name: str,
    *,
    limit: int,
    address: Mapping[str, str] | None = None,
    session: "Session | None" = None,
) -> Preview:
    """Up to `limit` changes, the newest last.

    What Spark computes is read from `address`, the source's options that say where the log is.
    """
    tables = [_keyed(sink, table) for table in log.tables()]
    table = _newest(tables, name)
    if sink.tables and not any(map(table.matches, sink.tables)):
        raise ConfigError(f"the sink {sink.name} does not get the table {name}")
    if sink.shaping.computed(table.schema, table.name):
        return _computed(sink, table, log, address or {}, limit=limit, session=session)
    shaped = ShapedChanges(sink.shaping)
    seen, hidden = _seen(log, table, tables, shaped, limit)
    columns = arrow_schema(shaped.table(table).columns, connector=table.connector)
    return Preview(
        table.path,
        {each.name: str(each.type) for each in columns},
        [_shown(change) for change in seen],
        hidden,
    )


def _computed(
    sink: Sink,
    table: Table,
    log: LogAccess,
    address: Mapping[str, str],
    *,
    limit: int,
    session: "Session | None",
) -> Preview:
    # Only here: the rest needs no Spark.
    from .computed import computed_table, newest, own_session  # noqa: PLC0415

    now = log.ranges(0, upto=0)
    computed = computed_table(sink, table)
    assert computed  # that is why it is here
    rows: list[tuple[str, int, str | None]] = []
    with (session or own_session)() as spark:
        columns = computed.result_table(spark).columns
        for window in (_WINDOW, 10 * _WINDOW, _WINDOWS * _WINDOW):
            first = max(now.latest_sequence - window + 1, now.first_sequence)
            reader = spark.read.format("headrace").options(**address, startingSequence=str(first))
            rows = newest(computed, reader.load(), limit)
            if len(rows) >= limit or first == now.first_sequence:
                break
    types = {each.name: each.type for each in columns}
    shown = [
        {"op": op, "sequence": sequence, **msgspec.json.decode(image or "{}")}
        for op, sequence, image in rows
    ]
    return Preview(table.path, types, shown)


def _keyed(sink: Sink, table: Table) -> Table:
    columns = sink.keyed(table.path, table.columns)
    return msgspec.structs.replace(table, columns=columns) if table.name else table


def _newest(tables: Sequence[Table], name: str) -> Table:
    found = [table for table in tables if table.name and table.matches(name)]
    names = sorted({table.path for table in found})
    if not found:
        raise ConfigError(f"the log has no table {name}")
    if len(names) > 1:
        raise ConfigError(f"{name} may be {' or '.join(names)}", hint="Name its schema too.")
    return found[-1]


def _seen(
    log: LogAccess, table: Table, tables: Sequence[Table], shaped: ShapedChanges, limit: int
) -> tuple[list[Change], int]:
    """The newest changes that pass, in order, and how many of those read do not."""
    now = log.ranges(0, upto=0)
    seen: list[Change] = []
    hidden, upto = 0, now.latest_sequence
    versions = {each.version: each for each in tables}
    for _ in range(_WINDOWS):
        if len(seen) >= limit or upto < now.first_sequence:
            break
        after = max(upto - _WINDOW, now.first_sequence - 1)
        changes = [
            record.change(sequence, each, versions[each.table])
            for piece in log.pieces(SequenceRange(now.epoch, after, upto))
            for sequence, each in enumerate(record.several(piece.records, piece.count), piece.first)
            if _is_of(table, versions.get(each.table)) and each.op in _ROW_OPS
        ]
        passed = shaped(changes)
        hidden += len(changes) - len(passed)
        seen = passed + seen
        upto = after
    return seen[-limit:], hidden


def _is_of(table: Table, other: Table | None) -> bool:
    return other is not None and (other.source, other.schema, other.name) == (
        table.source,
        table.schema,
        table.name,
    )


def _shown(change: Change) -> dict[str, Any]:
    image = change.after or change.before or change.key or b"{}"
    return {"op": change.op.value, "sequence": change.sequence, **msgspec.json.decode(image)}
