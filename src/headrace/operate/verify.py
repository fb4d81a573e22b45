"""`headrace verify` for a sink of tables: compare, keep the result, and repair."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from ..change.event import Op
from ..change.path import path_matches, split_path
from ..config import Config
from ..errors import ConfigError, HeadraceError, PipelineError
from ..log import LogReader
from ..pipeline.session import hide_task_errors, opened_session
from ..pipeline.verify_tables import Look, TablesVerifier, VerifiedTables
from ..sinks import verification
from ..sinks.tables.compare import ComparedTables, RowDifference
from ..sinks.tables.ledger import TablesLedger
from ..sinks.tables.sink import Tables
from ..sinks.verification import TableOutcome, TableVerification, Verification
from .commands import connect, request_snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REPAIR_SECONDS = 3600.0  # for new snapshots
_LOOK_SECONDS = 0.5
_PAGE = 10_000
_NOT_COMPARED = "See `headrace status` for what is captured, and verify again when it is all there."

_SHOWN = {
    TableOutcome.SNAPSHOT: "not compared",
    TableOutcome.INSERTS_ONLY: "captured for inserts only",
    TableOutcome.NOT_CAPTURED: "not captured",
    TableOutcome.FAILED: "not followed",
    TableOutcome.LEFT_OUT: "not compared",
}


def verify_tables(
    config: Config, sink: Tables, tables: Sequence[str], look: Look
) -> VerifiedTables:
    """Compare tables of a sink with their sources, and keep what was found in the sink's folder."""
    if config.remote is not None or (config.pipeline and config.pipeline.url):
        raise ConfigError(
            "the tables are compared where the log and its sources are",
            hint="Run it with the config and on the machine of `headrace run`.",
        )
    began, folder = time.time_ns() // 1000, config.sink_dir(sink.name)
    verifier = TablesVerifier(
        sink=sink,
        sources=config.sources,
        log_dir=config.log_dir,
        folder=config.verify_dir / sink.name,
        session=lambda: _session(config),
        look=look,
    )
    try:
        found = verifier.verify(tables)
    except HeadraceError as error:
        known = verification.noted(folder) or Verification(sink=sink.name)
        failed = msgspec.structs.replace(known, error=str(error), failed_at=began)
        verification.note(folder, failed)
        raise
    before = verification.noted(folder) if tables else None
    verification.note(folder, with_others(found.verification, before))
    return found


def expect_compared(found: Verification, wanted: Sequence[str]) -> None:
    """PipelineError: no table was compared, or none that is meant by one of these patterns."""
    compared = set(found.compared)
    for pattern in wanted or ["*"]:
        meant = [each for each in found.tables if path_matches(*split_path(each.table), pattern)]
        if compared.isdisjoint(meant):
            what = f"no table {pattern}" if wanted else "nothing"
            why = "; ".join(f"{each.table}: {each.reason}" for each in meant)
            raise PipelineError(
                f"{what} was compared: {why or 'there is no table'}", hint=_NOT_COMPARED
            )


def with_others(found: Verification, before: Verification | None) -> Verification:
    """What was found of some tables, and what was known of the others."""
    looked = {(table.source, table.table) for table in found.tables}
    kept = [t for t in before.tables if (t.source, t.table) not in looked] if before else []
    return msgspec.structs.replace(found, tables=(*found.tables, *kept))


@contextmanager
def _session(config: Config) -> "Iterator[SparkSession]":
    """Spark on this machine, where the rows are."""
    section = config.pipeline
    assert section is not None
    settings = {name: value.reveal() for name, value in section.spark.items()}
    master = section.master if section.local else "local[*]"
    journal = config.pipeline_dir / "verify.log"
    with opened_session(
        master, {**settings, "spark.ui.enabled": "false"}, journal=journal
    ) as spark:
        hide_task_errors(spark)
        yield spark


class Repair:
    """New snapshots of the tables that differ."""

    def __init__(self, config: Config, sink: Tables, found: VerifiedTables) -> None:
        self._config = config
        self._sink = sink
        self._tables = found.differing
        with LogReader.open(config.log_dir) as log:
            self._after = log.latest_sequence

    @property
    def tables(self) -> list[str]:
        """What is repaired."""
        return [table for tables in self._tables.values() for table in tables]

    def request(self) -> Iterator[str]:
        """Request them; gives what will be done."""
        for source, tables in self._tables.items():
            yield request_snapshot(self._config, source, tables)

    def wait(self, seconds: float = _REPAIR_SECONDS) -> bool:
        """Wait until the sink has them; False: it has not, or nobody takes them now."""
        if connect(self._config) is None:
            return False
        waiting = {(source, table) for source, some in self._tables.items() for table in some}
        end, after = time.monotonic() + seconds, self._after
        with LogReader.open(self._config.log_dir) as log:
            while time.monotonic() < end:
                # Each begins by emptying its table.
                while changes := log.read(after, limit=_PAGE):
                    after = changes[-1].sequence
                    begun = {each.table for each in changes if each.op is Op.TRUNCATE}
                    waiting -= {(each.source, each.path) for each in begun}
                if not waiting and all(self._done(log, source) for source in self._tables):
                    # One that had failed is followed again only when the sink has come to it.
                    break
                time.sleep(_LOOK_SECONDS)
                log.refresh()
        while time.monotonic() < end:
            if TablesLedger.open(self._sink.folder, "", adopt=True).upto >= after:
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _done(self, log: LogReader, source: str) -> bool:
        status = self._config.source(source).describe(log.resume(source))
        return all(copy.done for copy in status.copies if copy.table in self._tables[source])


# --- what is printed -----------------------------------------------------------------------------


def compared_lines(found: VerifiedTables, *, most: int) -> Iterator[str]:
    """What `verify` prints of tables: keys and columns of `most` rows a table, never a value."""
    verified = found.verification
    compared = {(ref.source, str(ref)): each for ref, each in found.compared.items()}
    for table in verified.tables:
        yield f"{verified.sink}: {table.table}: {_outcome(table)}"
        rows = compared.get((table.source, table.table), ComparedTables())
        for row in rows.examples[:most]:
            yield f"  {_named(row)}"
        left = table.missing + table.surplus + table.repeated + table.differing
        left -= len(rows.examples[:most])
        if left > 0:
            yield f"  and {left:,} more"
    left_out = len(verified.tables) - len(verified.compared)
    yield (
        f"{verified.rows:,} rows of {len(verified.compared)} tables compared in "
        f"{verified.seconds:.1f} s, {verified.rows / (verified.seconds or 1):,.0f} rows/s"
        + (f"; {left_out} tables not compared" if left_out else "")
        + ("" if verified.sound else "; not all are equal")
        + ("; all are equal" if verified.sound and verified.compared else "")
    )


def _outcome(table: TableVerification) -> str:
    if table.outcome is TableOutcome.EQUAL:
        return f"{table.rows:,} rows are equal"
    if table.outcome is not TableOutcome.DIFFERS:
        return f"{_SHOWN[table.outcome]}: {table.reason}"
    counts = (
        (table.missing, "missing"),
        (table.surplus, "surplus"),
        (table.repeated, "repeated"),
        (table.differing, "different"),
    )
    shown = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    return f"of {table.rows:,} rows {shown}"


def _named(row: RowDifference) -> str:
    key = ", ".join(row.key) if row.key else "a row"
    if row.missing:
        return f"{key}: missing"
    if row.surplus:
        return f"{key}: surplus"
    if row.repeated:
        return f"{key}: repeated"
    return f"{key}: different in {', '.join(row.columns)}"
