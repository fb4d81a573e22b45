"""What a Delta table tells of itself: how much was written, and what it holds."""

import json
from pathlib import Path
from typing import Any

from deltalake import DeltaTable, QueryBuilder

from .orders import COLUMNS

_NUMBERS = ("bigint", "integer", "numeric(12,2)", "double precision")


def version(table: Path) -> int:
    """The newest version; -1: there is no table yet."""
    return max((int(file.stem) for file in _commits(table)), default=-1)


def bytes_added(table: Path, after: int) -> int:
    """The size of all files that versions after `after` have brought, arranging included."""
    return sum(
        action["add"]["size"]
        for file in _commits(table)
        if int(file.stem) > after
        for action in map(json.loads, file.read_text().splitlines())
        if "add" in action
    )


def rows(table: Path) -> int:
    """How many rows the newest version has, by the word of its files' statistics."""
    if version(table) < 0:
        return 0
    actions: Any = DeltaTable(str(table)).get_add_actions()
    return sum(actions.column("num_records").to_pylist())


def digest(table: Path) -> dict[str, object]:
    """A few figures of every column: two tables that differ will hardly have the same."""
    wanted = ["count(*) AS rows", "count(DISTINCT id) AS keys"]
    for column in COLUMNS:
        name = column.name
        if column.type in _NUMBERS:
            # Sums of fractions depend on the order, so what is summed is whole.
            wanted.append(f"sum(CAST({name} * 100 AS BIGINT) * (id % 1009)) AS {name}")
        else:
            wanted.append(f"sum({_hash(name)} * (id % 1009)) AS {name}")
    query = QueryBuilder().register("lake", DeltaTable(str(table)))
    found: Any = query.execute(f"SELECT {', '.join(wanted)} FROM lake").read_all()
    return {name: found.column(name)[0].as_py() for name in found.schema.names}


def _hash(column: str) -> str:
    """A small number that stands for the text of a value."""
    digits = f"md5(CAST({column} AS VARCHAR))"
    return f"(ascii({digits}) + 100 * ascii(right({digits}, 1)))"


def _commits(table: Path) -> list[Path]:
    return [file for file in (table / "_delta_log").glob("*.json") if file.stem.isdigit()]
