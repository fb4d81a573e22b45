"""What a log adds up to in every place that keeps tables: the lake, and consumers of formats.

The replay of the log is what a test compares with the database; the others are compared with it.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from headrace.change.arrow import RESCUED, decode
from headrace.change.event import Change, Table
from headrace.change.replay import Replay, TableName
from headrace.log import LogReader
from headrace.pipeline.options import Options
from headrace.pipeline.reading import DiskLog, PipelineLog, close_reader
from headrace.sinks import LogRange
from headrace.sinks.tables.sink import Tables
from tests.deltas import stored
from tests.formats.consumers import consumed_canonical, consumed_etl
from tests.sinks.plain import PlainBatch

Rows = Mapping[tuple[str, str], list[str]]

_exact = msgspec.json.Encoder(decimal_format="number").encode
# What the lake does not follow, and says so: changes of rows without a key, values in a key.
_NOT_FOLLOWED = ("the table has no key", " cannot hold")


def differences_everywhere(path: Path, folder: Path, seed: int) -> list[str]:
    """Where the tables of a log are not those that it replays to."""
    with LogReader.open(path) as log:
        changes, epoch = log.read(0, limit=1 << 30), log.epoch
    replay = Replay.of(changes)
    newest = {_name(change.table): change.table for change in changes if change.table.name}
    expected = {
        name: _sorted(replay.rows(TableName(table.source, *name))) for name, table in newest.items()
    }
    found = _compared("canonical", _consumed(consumed_canonical(changes)), expected)
    found += _compared("etl", _consumed(consumed_etl(changes)), expected)
    for keep in ("rows", "history"):
        sink = Tables(name="lake", path=str(folder / keep), keep=keep)
        failed = _written(sink, path, epoch, changes, Random(seed))
        close_reader(str(path))
        lake = {
            name: _lake(Path(sink.folder.within(*name).uri), table)
            for name, table in newest.items()
            if table.path not in failed
        }
        typed = {
            name: _decoded(replay.rows(TableName(newest[name].source, *name)), newest[name])
            for name in lake
        }
        found += _compared(keep, lake, typed)
        found += [
            f"{keep}: {table}: {why}"
            for table, why in failed.items()
            if not any(reason in why for reason in _NOT_FOLLOWED)
        ]
    return found


def _name(table: Table) -> tuple[str, str]:
    return table.schema, table.name


def _sorted(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(repr(sorted(row.items(), key=lambda item: item[0])) for row in rows)


def _consumed(tables: Mapping[tuple[str, str], Any]) -> Rows:
    return {name: _sorted(table.rows) for name, table in tables.items()}


def _decoded(rows: Sequence[Mapping[str, Any]], table: Table) -> list[str]:
    images = [_exact(row) for row in rows]
    typed = decode(images, table.columns, connector=table.connector, rescue=True)
    return _sorted([_shown(row, table) for row in typed.to_pylist()])


def _shown(row: Mapping[str, Any], table: Table) -> Mapping[str, Any]:
    """Documents by their values; without the column for values that do not fit, where all do."""
    documents = {column.name for column in table.columns if column.type in ("json", "jsonb")}
    return {
        name: msgspec.json.decode(value) if name in documents and value is not None else value
        for name, value in row.items()
        if name != RESCUED or value is not None
    }


def _written(
    sink: Tables, path: Path, epoch: str, changes: Sequence[Change], dice: Random
) -> dict[str, str]:
    """Bring a log into a lake, in batches of any size; the tables that are not followed."""
    log = PipelineLog(DiskLog(str(path)), Options(path=str(path)))
    ends = [change.sequence for change in changes if change.last]
    chosen = sorted({*(end for end in ends if dice.random() < 0.1), *ends[-1:]})
    after = 0
    with closing(sink.open("query-1")) as writer:
        for number, upto in enumerate(chosen):
            wanted = LogRange(log, epoch, after, upto)
            writer.write(PlainBatch(wanted, dice.randrange(1, 4)), number)
            after = upto
        return {each.table: each.reason for each in writer.failed_tables()}


def _lake(folder: Path, table: Table) -> list[str]:
    if not folder.exists():
        return []
    rows = [row for row in stored(folder).to_pylist() if row.get("_current", True)]
    names = [*(column.name for column in table.columns), RESCUED]
    return _sorted([_shown({name: row.get(name) for name in names}, table) for row in rows])


def _compared(place: str, found: Rows, expected: Rows) -> list[str]:
    differing = [name for name in expected if expected[name] != found.get(name, [])]
    return [
        f"{place}: {'.'.join(name)}: {len(found.get(name, []))} rows "
        f"{_beside(found.get(name, []), expected[name])}, expected {len(expected[name])} "
        f"{_beside(expected[name], found.get(name, []))}"
        for name in differing
    ]


def _beside(rows: Sequence[str], others: Sequence[str]) -> list[str]:
    return [row for row in rows if row not in others][:3]
