"""What an operator does to one source or sink reaches it, and what it needs besides."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.config import load
from headrace.operate.control import RunControl
from headrace.operate.reload import ConfigReload
from headrace.run import PipelineProcess, Run
from headrace.serve.service import PartKind
from headrace.sinks.requests import Requests
from headrace.sources import Phase
from headrace.testing import PostgresDatabase, free_port, wait_until

pytestmark = [pytest.mark.live, pytest.mark.requirement("P-14")]


def no_pipeline() -> PipelineProcess:
    raise AssertionError("no pipeline is needed here")


def test_tables_of_a_trimmed_log_are_reset_from_a_new_snapshot(
    tmp_path: Path, pg: PostgresDatabase
) -> None:
    for table in ("users", "orders"):
        pg.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
        pg.execute(f"INSERT INTO {table} VALUES (1)")
    file = tmp_path / "headrace.yaml"
    file.write_text(
        f"sources: {{shop: {{type: postgres, url: '{pg.url}'}}}}\n"
        f"server: {{port: {free_port()}}}\n"
        "pipeline: {sinks: {lake: {type: tables, path: lake, tables: [users]}}}\n"
    )
    requests = Requests(tmp_path / "data/pipeline/lake")
    with Run(load(file)) as run:
        control = RunControl(run, ConfigReload(run, file, no_pipeline))

        def streams() -> bool:
            return run.statuses()[0].phase is Phase.STREAMING

        def read(table: str) -> int:
            changes = run.log.read(run.log.first_sequence - 1, limit=10_000)
            return sum(c.op == "READ" and c.table.name == table for c in changes)

        wait_until(streams, timeout=120, message="it streams")
        whole = control.reset(PartKind.SINK, "lake", "start", dry_run=True)
        assert "new snapshot" not in whole  # the log has every row

        before = run.log.latest_sequence
        pg.execute("INSERT INTO users VALUES (2)")
        wait_until(lambda: run.log.latest_sequence > before, timeout=120, message="captured")
        run.log.trim(run.log.latest_sequence)
        assert read("users") == 0
        effect = control.reset(PartKind.SINK, "lake", "start", dry_run=True)
        assert "shop takes a new snapshot of these tables" in effect
        assert not requests.interrupts
        control.reset(PartKind.SINK, "lake", "start", dry_run=False)
        assert requests.to_reset is not None
        wait_until(lambda: read("users") == 2, timeout=120, message="the rows come again")
        assert read("orders") == 0  # the sink does not get that table


def test_requests_that_come_at_once_are_all_kept(tmp_path: Path) -> None:
    requests = Requests(tmp_path)

    def ask(_: int) -> None:
        requests.resume()
        requests.reset("e", 7)
        assert requests.to_reset

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(400)))
    assert requests.take_resume()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["reset.json"]
