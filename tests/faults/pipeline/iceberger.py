"""A process that carries a log into Iceberg tables, and kills itself at a named point.

python -m tests.faults.pipeline.iceberger FOLDER URI
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path

from headrace.sinks.iceberg import IcebergHistory
from headrace.sinks.iceberg.table import IcebergTable
from headrace.sinks.iceberg.writer import IcebergHistoryWriter
from tests.faults.pipeline.dying import Killer, serve

NAMESPACE = "audit"


class Point(StrEnum):
    """Where the process may die."""

    WRITTEN = "the tasks have written files, and nothing is committed"
    ONE_COMMITTED = "one table has its snapshot, and others may not"
    COMMITTED = "all tables have their snapshots, and the ledger does not know"


def main(folder: Path, uri: str) -> int:
    """Run for each line of standard input."""
    killer = Killer()
    killer.around(IcebergHistoryWriter, "_commit", before=Point.WRITTEN, after=Point.COMMITTED)
    killer.around(IcebergTable, "append", after=Point.ONE_COMMITTED)
    sink = IcebergHistory(name="audit", uri=uri, namespace=NAMESPACE, batch_seconds=0.1)
    return serve(folder, sink, killer)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
