"""What a Delta table tells of itself: how much was written, and what it holds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder

from headrace.sinks.lake.plan import SEQUENCE

from .orders import COLUMNS

NONE = np.zeros(0, dtype=np.int64)
_NUMBERS = ("bigint", "integer", "numeric(12,2)", "double precision")


def version(table: Path) -> int:
    """The newest version; -1: there is no table yet."""
    return max((int(file.stem) for file in _commits(table)), default=-1)


def bytes_added(table: Path, after: int) -> int:
    """All that versions after `after` have written, arranging, vectors and commits included."""
    total, known = 0, set[str]()
    for file in sorted(_commits(table)):
        adds = [
            each["add"] for each in map(json.loads, file.read_text().splitlines()) if "add" in each
        ]
        if int(file.stem) > after:
            total += file.stat().st_size
            total += sum(add["size"] for add in adds if add["path"] not in known)
            total += sum((add.get("deletionVector") or {}).get("sizeInBytes", 0) for add in adds)
        known |= {add["path"] for add in adds}
    return total


def notes_added(table: Path, at: int, column: str) -> list[str]:
    """A column of the rows that a version has brought."""
    actions = map(json.loads, (table / "_delta_log" / f"{at:020}.json").read_text().splitlines())
    adds = [each["add"] for each in actions if "add" in each]
    new = [add["path"] for add in adds if add["dataChange"] and not add.get("deletionVector")]
    found = [pq.read_table(table / path, columns=[column])[column].to_pylist() for path in new]
    return [value for values in found for value in values]


def dead_rows(table: Path) -> float:
    """The share of the rows that are dead."""
    live: dict[str, dict[str, Any]] = {}
    for file in sorted(_commits(table)):
        for each in map(json.loads, file.read_text().splitlines()):
            if "remove" in each:
                live.pop(each["remove"]["path"], None)
            if "add" in each:
                live[each["add"]["path"]] = each["add"]
    every = sum(json.loads(add["stats"])["numRecords"] for add in live.values())
    dead = sum((add.get("deletionVector") or {}).get("cardinality", 0) for add in live.values())
    return float(dead / every) if every else 0.0


def sequences(table: Path) -> Any:
    """The changes that the rows of the newest version come from."""
    found: Any = DeltaTable(str(table)).scan(columns=[SEQUENCE])
    return np.concatenate([pa.array(batch.column(0)).to_numpy() for batch in found] or [NONE])


def rows(table: Path) -> int:
    """How many rows the newest version has."""
    return len(sequences(table)) if version(table) >= 0 else 0


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
