"""The demo's verdict: the database beside what the log replays to, and beside the Delta tables."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..change.event import Change
from ..change.replay import Replay, TableName
from ..log import Log
from .database import Database
from .delta import has_each_once, prove_delta
from .proof import Verdict, prove

PAGE = 10_000


class Lakes(NamedTuple):
    """Where the pipeline's sinks have put what they got."""

    tables: Path
    history: Path


def judge(
    console: Console, log: Log, database: Database, names: Sequence[TableName], lakes: Lakes | None
) -> bool:
    """Compare, show the outcome, and return whether everything is equal."""
    replay, operations = _replayed(log)
    counted = ", ".join(f"{count:,} {op}" for op, count in operations.most_common())
    say(console, f"the log has {operations.total():,} changes: {counted}")
    verdicts = {"log replays to": prove(database, replay, names)}
    if lakes:
        verdicts["Delta table has"] = prove_delta(database, lakes.tables, names)
    console.print(_table(verdicts))
    for column, column_verdicts in verdicts.items():
        _tell_differences(console, column, column_verdicts)
    for surprise in replay.surprises:
        say(console, f"odd: {surprise}")
    replays = _all_equal(verdicts["log replays to"]) and not replay.surprises
    say(console, f"the log {_does(replays, 'replay')} to exactly the database's rows")
    if not lakes:
        return replays
    return _judge_lakes(console, log, lakes, verdicts["Delta table has"]) and replays


def _judge_lakes(console: Console, log: Log, lakes: Lakes, verdicts: list[Verdict]) -> bool:
    tables = _all_equal(verdicts)
    proven = "every Delta table holds exactly its table's rows, in the right types"
    say(console, proven if tables else "the Delta tables do NOT all equal their tables")
    history = has_each_once(lakes.history, [change.sequence for change in _changes(log)])
    say(console, f"the history {_does(history, 'hold')} every change of the log exactly once")
    return tables and history


def _does(so: bool, verb: str) -> str:
    return f"{verb}s" if so else f"does NOT {verb}"


def _all_equal(verdicts: list[Verdict]) -> bool:
    return all(verdict.equal for verdict in verdicts)


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


def _table(verdicts: dict[str, list[Verdict]]) -> Table:
    table = Table("table", "rows in database", *verdicts)
    for of_table in zip(*verdicts.values(), strict=True):
        first = of_table[0]
        table.add_row(str(first.table), f"{first.in_database:,}", *map(_found, of_table))
    return table


def _found(verdict: Verdict) -> Text:
    mark = Text("✓", style="green") if verdict.equal else Text("✗", style="bold red")
    return Text(f"{verdict.found:,} ").append(mark)


def _tell_differences(console: Console, column: str, verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        if not verdict.equal:
            wrong = "; ".join(chain(_rows(verdict), _types(verdict)))
            say(console, f"{verdict.table}, {column}: {wrong}")


def _rows(verdict: Verdict) -> Iterator[str]:
    if verdict.missing or verdict.surplus:
        yield (
            f"{verdict.missing} rows missing, {verdict.surplus} too many, "
            f"they differ in {verdict.example}"
        )


def _types(verdict: Verdict) -> Iterator[str]:
    if verdict.mistyped:
        yield f"other types in columns {', '.join(verdict.mistyped)}"


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
