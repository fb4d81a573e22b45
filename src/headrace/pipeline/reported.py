"""What a sink has reported, for the progress of its query: Spark gives a sink no place in it.

The pipeline writes the same report for `headrace status`, every two seconds.
"""

from pathlib import Path
from typing import Any

import msgspec

from ..sinks import SinkStatus
from ..sinks.report import PipelineReport

_decode = msgspec.json.Decoder(PipelineReport).decode


def last_reported(file: str, sink: str) -> dict[str, Any]:
    """How a sink was doing by the last report; empty: there is none."""
    try:
        report = _decode(Path(file).read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return next((_shown(each) for each in report.sinks if each.sink == sink), {})


def _shown(status: SinkStatus) -> dict[str, Any]:
    """As Spark writes names in a query's progress."""
    return {
        "phase": status.phase.value,
        "changes": status.changes,
        "changesPerSecond": status.changes_per_second,
        "batchSeconds": status.batch_seconds,
        "sentEvents": status.sent,
        "retriedEvents": status.retries,
        "deadLetters": status.dead_letters,
        "waitingRows": status.waiting_rows,
        "failedTables": {each.table: each.reason for each in status.failed_tables},
        "rescuedValues": status.rescued,
        "error": status.error,
    }
