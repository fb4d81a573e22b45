"""What a batch has of which table: seen before the tasks begin, so that they are planned once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...change import record
from ...change.arrow import columns_of, references_of
from ...change.cascade import acts
from ...change.event import Table
from ...change.span import LogSpan
from ...errors import TableFailed
from .. import LogBlock, LogRange
from ..lake.plan import TableFailure, TableRef, VersionSummary
from .fold import ROW_OPS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Summaries = dict[int, VersionSummary]  # by version


def scan_log(changes: LogRange, wanted: Callable[[Table], bool]) -> Summaries:
    """What a range of the log has, of wanted tables; only what is not known of it is read."""
    seen: Summaries = {}
    after = changes.after
    for span in changes.spans():
        _note_read(seen, replace(changes, after=after, upto=span.after), wanted)
        _note_span(seen, span, changes, wanted)
        after = span.upto
    _note_read(seen, changes.beyond(after), wanted)
    return seen


def _note_span(
    seen: Summaries, span: LogSpan, changes: LogRange, wanted: Callable[[Table], bool]
) -> None:
    tables = changes.tables()
    for part in span.tables:
        if (table := tables[part.version]).name and wanted(table):
            known = seen.get(part.version) or _summary(seen, table, part.first)
            known.last_sequence = part.last
            known.changes += part.changes
            known.last_record = part.last_of_row or known.last_record
            known.snapshots.update(part.snapshots)
    for sequence in span.others:
        for first, count, records in replace(changes, after=sequence - 1, upto=sequence).pieces():
            _note_others(seen, _others(first, record.rows(records, count)))


def _note_read(seen: Summaries, changes: LogRange, wanted: Callable[[Table], bool]) -> None:
    tables = changes.tables()
    for part in changes.blocks() if changes.after < changes.upto else ():
        if isinstance(part, LogBlock):
            _note_block(seen, part, wanted)
            continue
        first, count, records = part
        heads = record.heads(records, count)
        versions = np.fromiter((head.table for head in heads), dtype=np.int64, count=count)
        others = bool({head.op for head in heads} - ROW_OPS)
        for version in np.unique(versions).tolist():
            if (table := tables[version]).name and wanted(table):
                places = np.flatnonzero(versions == version)
                known = seen.get(version) or _summary(seen, table, first + int(places[0]))
                known.last_sequence = first + int(places[-1])
                known.changes += len(places)
                of_rows = (
                    [at for at in places.tolist() if heads[at].op in ROW_OPS] if others else places
                )
                known.last_record = first + int(of_rows[-1]) if len(of_rows) else known.last_record
        if others:
            _note_others(seen, _others(first, record.rows(records, count)))


def _note_block(seen: Summaries, block: LogBlock, wanted: Callable[[Table], bool]) -> None:
    table = block.described
    if wanted(table):
        known = seen.get(table.version) or _summary(seen, table, block.first)
        known.last_sequence = block.last
        known.changes += block.count
        known.snapshots.add(bytes(block.rows.block.head.position))


def _others(first: int, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, int, str, bytes]]:
    for sequence, row in enumerate(rows, first):
        if row[record.OP] not in ROW_OPS:
            yield row[record.TABLE], sequence, row[record.OP], row[record.AFTER]


def scan_rows(changes: "DataFrame") -> tuple[Summaries, set[str]]:
    """What a DataFrame of changes has, and the logs that it comes from."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # as everybody calls them

    names = ("source", "schema", "table", "connector", "row_schema")
    versions = changes.groupBy("schema_version", "epoch").agg(
        F.min("sequence").alias("first"),
        F.max("sequence").alias("last"),
        F.count("*").alias("changes"),
        *(F.max(name).alias(name) for name in names),
    )
    rows = [row.asDict() for row in versions.collect()]
    others = changes.where(~F.col("op").isin(*ROW_OPS))
    found = others.select("schema_version", "sequence", "op", "after").collect()
    return summed(rows, [tuple(row) for row in found]), {row["epoch"] for row in rows}


def summed(versions: Iterable[Mapping[str, Any]], others: Iterable[tuple[Any, ...]]) -> Summaries:
    """What parts of a batch come to; `others` are the changes that are no change of a row."""
    seen: Summaries = {}
    for row in versions:
        if not row["table"]:
            continue
        known = seen.get(row["schema_version"])
        if known is None:
            known = seen[row["schema_version"]] = VersionSummary(
                ref=TableRef(row["source"], row["schema"], row["table"]),
                connector=row["connector"],
                version=row["schema_version"],
                columns=columns_of(row["row_schema"]),
                cascades=any(map(acts, references_of(row["row_schema"]))),
                first_sequence=row["first"],
                last_sequence=row["last"],
                changes=0,
            )
        known.first_sequence = min(known.first_sequence, row["first"])
        known.last_sequence = max(known.last_sequence, row["last"])
        known.changes += row["changes"]
    _note_others(seen, sorted(others, key=itemgetter(1)))
    return seen


def _summary(seen: Summaries, table: Table, first: int) -> VersionSummary:
    seen[table.version] = VersionSummary(
        ref=TableRef(table.source, table.schema, table.name),
        connector=table.connector,
        version=table.version,
        columns=table.columns,
        first_sequence=first,
        last_sequence=first,
        changes=0,
        comment=table.comment,
        whole_rows=table.identity == "full",
        cascades=any(map(acts, table.references)),
    )
    return seen[table.version]


def _note_others(seen: Summaries, others: Iterable[tuple[Any, ...]]) -> None:
    """Note what is no change of a row: the table emptied or dropped, a row that was not read."""
    for version, sequence, op, after in others:
        if (known := seen.get(version)) is None:
            continue
        details: Mapping[str, object] = msgspec.json.decode(after or "{}")
        if op == "MESSAGE" and known.failure is None:
            reason = f"the source could not read a row: {details.get('error', 'unknown')}"
            known.failure = TableFailure(sequence, reason, TableFailed.hint)
        elif op == "TRUNCATE" or details.get("dropped"):
            known.emptied.append(sequence)
            known.dropped = sequence if details.get("dropped") else known.dropped
