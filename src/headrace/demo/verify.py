"""The demo's comparison: the database beside what the log replays to, and beside the Delta tables.

The database's side is read with SELECT and turned into JSON values from Python's own types. So it
shares no line of code with the capture that it checks.
"""

import base64
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..change.event import Change
from ..change.replay import Replay, Row, TableName
from ..log import Log
from .database import ShopDatabase

PAGE = 10_000

_canonical = msgspec.json.Encoder(order="deterministic").encode


class TableComparison(NamedTuple):
    """How one table compares."""

    table: TableName
    in_database: int
    found: int  # rows on the other side: replayed, or in the Delta table
    missing: int  # rows of the database that are not there
    surplus: int  # rows that the database does not have
    example: str = ""  # one such row's columns that differ, never their values
    mistyped: tuple[str, ...] = ()  # columns whose type is not the one it should be

    @property
    def equal(self) -> bool:
        """Whether both sides hold the same rows, of the same types."""
        return not (self.missing or self.surplus or self.mistyped)


class SinkFolders(NamedTuple):
    """Where the pipeline's sinks have put what they got."""

    tables: Path
    history: Path


def compare_all(
    console: Console,
    log: Log,
    database: ShopDatabase,
    names: Sequence[TableName],
    folders: SinkFolders | None,
) -> bool:
    """Compare, show the result, and return whether everything is equal."""
    replay, operations = _replayed(log)
    counted = ", ".join(f"{count:,} {op}" for op, count in operations.most_common())
    say(console, f"the log has {operations.total():,} changes: {counted}")
    comparisons = {"log replays to": compare_log(database, replay, names)}
    if folders:
        # Here, since what reads Delta is installed only with Spark.
        from .delta import compare_delta  # noqa: PLC0415

        comparisons["Delta table has"] = compare_delta(database, folders.tables, names)
    console.print(_table(comparisons))
    for column, column_comparisons in comparisons.items():
        _show_differences(console, column, column_comparisons)
    for surprise in replay.surprises:
        say(console, f"odd: {surprise}")
    replays = _all_equal(comparisons["log replays to"]) and not replay.surprises
    say(console, f"the log {_does(replays, 'replay')} to exactly the database's rows")
    if not folders:
        return replays
    return _compare_sinks(console, log, folders, comparisons["Delta table has"]) and replays


def _compare_sinks(
    console: Console, log: Log, folders: SinkFolders, comparisons: list[TableComparison]
) -> bool:
    from .delta import has_each_once  # noqa: PLC0415

    tables = _all_equal(comparisons)
    equal = "every Delta table holds exactly its table's rows, in the right types"
    say(console, equal if tables else "the Delta tables do NOT all equal their tables")
    history = has_each_once(folders.history, [change.sequence for change in _changes(log)])
    say(console, f"the history {_does(history, 'hold')} every change of the log exactly once")
    return tables and history


def _does(so: bool, verb: str) -> str:
    return f"{verb}s" if so else f"does NOT {verb}"


def _all_equal(comparisons: list[TableComparison]) -> bool:
    return all(comparison.equal for comparison in comparisons)


def _replayed(log: Log) -> tuple[Replay, Counter[str]]:
    replay, operations = Replay(), Counter[str]()
    for change in _changes(log):
        replay.apply(change)
        operations[change.op] += 1
    return replay, operations


def _changes(log: Log) -> Iterator[Change]:
    after = 0
    while changes := log.read(after, limit=PAGE):
        yield from changes
        after = changes[-1].sequence


def _table(comparisons: dict[str, list[TableComparison]]) -> Table:
    table = Table("table", "rows in database", *comparisons)
    for of_table in zip(*comparisons.values(), strict=True):
        first = of_table[0]
        table.add_row(str(first.table), f"{first.in_database:,}", *map(_found, of_table))
    return table


def _found(comparison: TableComparison) -> Text:
    mark = Text("✓", style="green") if comparison.equal else Text("✗", style="bold red")
    return Text(f"{comparison.found:,} ").append(mark)


def _show_differences(console: Console, column: str, comparisons: list[TableComparison]) -> None:
    for comparison in comparisons:
        if not comparison.equal:
            wrong = "; ".join(chain(_rows(comparison), _types(comparison)))
            say(console, f"{comparison.table}, {column}: {wrong}")


def _rows(comparison: TableComparison) -> Iterator[str]:
    if comparison.missing or comparison.surplus:
        yield (
            f"{comparison.missing} rows missing, {comparison.surplus} too many, "
            f"they differ in {comparison.example}"
        )


def _types(comparison: TableComparison) -> Iterator[str]:
    if comparison.mistyped:
        yield f"other types in columns {', '.join(comparison.mistyped)}"


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


# --- the log ----------------------------------------------------------------------------------


def compare_log(
    database: ShopDatabase, replay: Replay, tables: Iterable[TableName]
) -> list[TableComparison]:
    """Compare every table of the database with its rows in the replay."""
    return [compare_rows(name, images(database, name.name), replay.rows(name)) for name in tables]


def images(database: ShopDatabase, table: str) -> list[Row]:
    """What a table holds now, as the log should have it."""
    kinds = database.declared(table)
    return [
        {name: database.image(kinds[name], value) for name, value in row.items()}
        for row in database.rows(table)
    ]


def compare_rows(name: TableName, database: list[Row], found: list[Row]) -> TableComparison:
    """Compare two sets of rows, in any order."""
    here = Counter(map(_canonical, database))
    there = Counter(map(_canonical, found))
    missing, surplus = here - there, there - here
    example = _difference(missing, surplus) if missing or surplus else ""
    return TableComparison(
        name, len(database), len(found), missing.total(), surplus.total(), example
    )


def _difference(missing: Counter[bytes], surplus: Counter[bytes]) -> str:
    wanted = msgspec.json.decode(next(iter(missing), b"{}"), type=dict[str, Any])
    found = msgspec.json.decode(next(iter(surplus), b"{}"), type=dict[str, Any])
    if not wanted or not found:
        return "whole rows"
    columns = [name for name in wanted | found if wanted.get(name) != found.get(name)]
    return f"columns {', '.join(columns)}"


def json_value(value: Any) -> Any:
    """A value of Python as the documents say it looks in JSON."""
    match value:
        case list():
            return [json_value(item) for item in value]
        case float():
            # PostgreSQL writes 3.0 as 3.
            return int(value) if value.is_integer() else Decimal(repr(value))
        case Decimal():
            return format(value, "f")
        case datetime():
            return _timestamp(value)
        case date():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode()
        case bool() | int() | str() | None:
            return value
        case _:
            return str(value)


def _timestamp(value: datetime) -> str:
    seconds, _, fraction = value.replace(tzinfo=None).isoformat().partition(".")
    zone = "Z" if value.tzinfo is None else "+00:00"
    return f"{seconds}.{fraction.rstrip('0')}{zone}" if fraction else f"{seconds}{zone}"
