"""The benchmark's arithmetic and its page; the measurements themselves are never timed tests."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from bench import delta, formats, lake_peer, lake_run, lake_transaction, lake_whole
from bench.family import Family, Peaks, Used, spent
from bench.lake import Lake, Measured, Size
from bench.lake_task import BATCH_BYTES, BATCH_SECONDS, BYTES, LARGEST, SLOWEST, Lap, Task, outcome
from bench.latency import Reading, figures, percentile
from bench.orders import Orders, Written
from bench.process import MeasurementFailed, Outcome
from bench.report import Figure, Figures, Race, Runner, Target, markdown, terminal
from bench.workload import Scale
from headrace.formats.catalogue import Formats, names
from headrace.log import Log
from headrace.testing import wait_until


def race(headrace: float, *, at_least: float = 4.0, aim: float | None = 5.0) -> Race:
    """A race in which Debezium makes 10 rows/s and the limit is 100."""
    return Race(
        "Changes → durable log",
        [
            Runner("Headrace", [Outcome(1000, 1000 / headrace)]),
            Runner("Debezium", [Outcome(100, 10.0), Outcome(100, 20.0)]),
            Runner("pg_recvlogical", [Outcome(1000, 10.0)]),
        ],
        [Target("Debezium", at_least, aim=aim)],
    )


def test_the_best_run_counts_for_everyone() -> None:
    assert Runner("Debezium", [Outcome(100, 20.0), Outcome(100, 10.0)]).best == Outcome(100, 10.0)


def test_a_ratio_compares_rows_a_second_not_seconds() -> None:
    found = race(headrace=50.0)
    assert found.ratio("Headrace", "Debezium") == pytest.approx(5.0)
    assert found.ratio("Headrace", "pg_recvlogical") == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("headrace", "verdict"),
    [(39.9, "missed"), (40.0, "reached"), (49.0, "reached"), (50.0, "reached, and the aim")],
)
def test_a_target_is_missed_below_its_bound_and_reached_at_it(
    headrace: float, verdict: str
) -> None:
    (line,) = race(headrace).verdicts()
    assert line.endswith(f": {verdict}.")


def test_the_page_holds_every_runner_with_its_ratios_and_runs() -> None:
    page = markdown([race(headrace=50.0)], {"Date": "today"})
    assert "- Date: today\n" in page
    assert (
        "| | rows | seconds | rows/s | × Debezium | × pg_recvlogical | all runs, rows/s |" in page
    )
    assert "| Headrace | 1,000 | 20.00 | 50 | 5.00 | 0.50 | 50 |" in page
    assert "| Debezium | 100 | 10.00 | 10 | 1.00 | 0.10 | 10, 5 |" in page
    assert "- Headrace is 5.00 × Debezium; the target is 4 ×, the aim is 5 ×" in page


def test_further_figures_of_the_best_run_are_on_the_page() -> None:
    noted = Runner("Debezium", [Outcome(100, 10.0, {"rows/s in the second half": 15.0})])
    page = markdown([Race("Snapshot", [noted], [])], {})
    assert "- Debezium, rows/s in the second half: 15." in page


def test_a_figure_without_a_target_gets_no_verdict() -> None:
    measured = Figures("Latency", [Figure("p50", 3.0, "ms", below=10), Figure("worst", 80.0, "ms")])
    page = markdown([measured], {})
    assert "| p50 | 3.0 ms | < 10 ms | reached |" in page
    assert "| worst | 80.0 ms | | |" in page


def test_a_figure_at_its_bound_has_missed_it() -> None:
    assert Figure("p50", 10.0, "ms", below=10).met is False


def test_a_rate_that_was_not_kept_up_is_missed() -> None:
    spread = figures(Reading([1.0], 1.0), rate=600.0)
    assert "| written | 600.0 changes/s | ≥ 980 changes/s | missed |" in markdown([spread], {})


def test_the_terminal_shows_as_many_rows_as_the_page() -> None:
    assert terminal(race(headrace=50.0)).row_count == 3


def test_a_percentile_is_a_delay_that_was_measured() -> None:
    delays = [float(number) for number in range(1, 1001)]
    assert percentile(delays, 50) == 500.0
    assert percentile(delays, 99) == 990.0
    assert percentile(delays, 99.9) == 999.0
    assert percentile([7.0], 99) == 7.0


def test_delays_are_sorted_before_they_are_ranked() -> None:
    spread = figures(Reading([9.0, 1.0, 2.0], 1.0), rate=1000.0)
    assert {figure.name: figure.value for figure in spread.figures} == {
        "p50": 2.0,
        "p99": 9.0,
        "p99.9": 9.0,
        "worst": 9.0,
        "changes": 3.0,
        "written": 1000.0,
    }


def test_the_full_backlog_is_480_000_changes_in_30_000_transactions() -> None:
    full = Scale()
    assert (full.transactions, full.changes, full.rows) == (30_000, 480_000, 1_000_000)
    assert full.operations == {"INSERT": 300_000, "UPDATE": 150_000, "DELETE": 30_000}


def lake_task(folder: Path, who: str, written: Written, *, batch: int, warm_up: int) -> Task:
    """A stretch of the log for one runner."""
    (folder / who).mkdir(exist_ok=True)
    return Task(
        log=str(folder / "log"),
        folder=str(folder / who),
        after=written.after,
        upto=written.upto,
        batch=batch,
        warm_up=warm_up,
        rows=written.rows,
    )


@pytest.mark.slow
def test_the_lake_and_its_peer_have_the_same_rows_after_the_same_changes(
    spark: SparkSession, tmp_path: Path
) -> None:
    orders = Orders(str(tmp_path / "log"))
    rows = orders.insert(2_000)
    filling = {
        who: lake_task(tmp_path, who, rows, batch=2_000, warm_up=0) for who in ("ours", "theirs")
    }
    filled = lake_run.apply(spark, filling["ours"]), lake_peer.apply(filling["theirs"])
    assert [done.rows for done in filled] == [2_000, 2_000]

    updates = orders.update(2_000, batch=1_000, batches=1, warm_up=1)
    changing = {
        who: lake_task(tmp_path, who, updates, batch=1_000, warm_up=1) for who in ("ours", "theirs")
    }
    changed = lake_run.apply(spark, changing["ours"]), lake_peer.apply(changing["theirs"])

    assert [done.rows for done in changed] == [1_000, 1_000]
    assert all(done.notes[BYTES] > 0 for done in changed)
    digests = [delta.digest(tmp_path / who / "lake" / "public" / "orders") for who in changing]
    assert digests[0] == digests[1]
    assert digests[0]["rows"] == 2_000
    assert delta.rows(tmp_path / "ours" / "lake" / "public" / "orders") == 2_000


def test_a_peer_takes_deletes_and_the_last_of_several_changes(tmp_path: Path) -> None:
    changes = pa.table(
        {
            "sequence": [1, 2, 3],
            "op": ["UPDATE", "UPDATE", "DELETE"],
            "key": ['{"id":1}', '{"id":1}', '{"id":2}'],
            "after": ['{"id":1,"status":"new"}', '{"id":1,"status":"paid"}', None],
        }
    )
    latest = lake_peer.typed(lake_peer.latest(changes))
    assert latest.select(["id", "status", "_op"]).to_pylist() == [
        {"id": 1, "status": "paid", "_op": "UPDATE"},
        {"id": 2, "status": None, "_op": "DELETE"},
    ]


def laps(*ends: float) -> list[Lap]:
    """A start at 0, then batches of 100 changes that ended at these times."""
    return [Lap(0.0, 0, -1), *(Lap(end, 100, 0, 0.5) for end in ends)]


def test_batches_of_the_warm_up_are_not_counted(tmp_path: Path) -> None:
    task = lake_task(tmp_path, "ours", Written(0, 400, 150), batch=100, warm_up=2)
    found = outcome(task, laps(50.0, 60.0, 61.0, 64.0))
    assert (found.rows, found.seconds) == (200, 4.0)
    assert (found.notes[BATCH_SECONDS], found.notes[SLOWEST]) == (2.0, 3.0)


def test_a_run_that_misses_changes_is_no_measurement(tmp_path: Path) -> None:
    task = lake_task(tmp_path, "ours", Written(0, 400, 150), batch=100, warm_up=1)
    with pytest.raises(MeasurementFailed, match="300 changes came, not 400"):
        outcome(task, laps(1.0, 2.0, 3.0))


def lake_of(headrace: float, *, batch: int = 100_000) -> Lake:
    """The lake's table of a million rows, on which the peer makes 20,000 changes/s."""

    def runner(name: str, rate: float, **memory: float) -> Runner:
        notes = {BATCH_SECONDS: 1.5, SLOWEST: 2.0, BYTES: 1234.0, BATCH_BYTES: 99_500.0, **memory}
        return Runner(name, [Outcome(1_000_000, 1_000_000 / rate, notes)])

    ours = runner("Headrace", headrace, driver=200.0, JVM=900.0, workers=300.0)
    theirs = runner("delta-rs MERGE", 20_000, driver=700.0)
    filled = {1_000_000: {"Headrace": Outcome(1_000_000, 10.0)}}
    return Lake([Measured(1_000_000, batch, [ours, theirs])], filled)


@pytest.mark.parametrize("batch", [1, 10, 999, 1000, 2500, 250_000])
def test_transactions_of_the_lake_fit_into_its_batches(tmp_path: Path, batch: int) -> None:
    orders = Orders(str(tmp_path / "log"))
    orders.insert(10)
    written = orders.update(10, batch=batch, batches=1, warm_up=1)
    with Log.open(tmp_path / "log") as log:
        ends = [
            change.sequence - written.after
            for change in log.read(written.after, limit=10**6)
            if change.last
        ]
    assert {batch, 2 * batch} <= set(ends)


@pytest.mark.parametrize("write", [Orders.insert_at_once, Orders.update_at_once])
def test_a_large_transaction_of_the_lake_is_one(
    tmp_path: Path, write: Callable[[Orders, int], Written]
) -> None:
    rows = 25_000  # more than are appended at once
    written = write(Orders(str(tmp_path / "log")), rows)
    with Log.open(tmp_path / "log") as log:
        changes = log.read(written.after, limit=10**6)
    assert [change.ordinal for change in changes] == list(range(1, rows + 1))
    assert [change.last for change in changes] == [False] * (rows - 1) + [True]
    assert len({change.transaction.id for change in changes}) == 1
    assert len({change.key for change in changes}) == written.rows == rows


def test_memory_is_judged_by_the_largest_worker() -> None:
    notes = {LARGEST: 1000.0, "driver": 200.0, "JVM": 400.0}
    worker, *others = lake_transaction.figures("updates", Outcome(10, 2.0, notes))
    assert worker.met is False
    assert [other.value for other in others] == [200.0, 400.0, 5.0]


def test_the_lake_has_tables_and_batches_of_several_sizes() -> None:
    assert Size.scaled(1_000_000, 1.0).batches == (1, 10, 100, 1_000, 100_000, 250_000)
    assert Size.scaled(1_000_000, 1.0).slow == 100_000
    assert Size.scaled(10_000_000, 1.0) == Size(10_000_000, (100_000,), 1_000_000)
    assert Size.scaled(1_000_000, 0.001).batches == (1, 100, 250)


@pytest.mark.parametrize(("rate", "verdict"), [(119_000, "missed"), (121_000, "reached")])
def test_the_lake_must_take_120_000_changes_a_second(rate: float, verdict: str) -> None:
    first, second = lake_of(rate).verdicts()
    assert first.endswith(f"the target is at least 120,000: {verdict}.")
    assert second.endswith("× delta-rs MERGE; the target is at least 1.2: reached.")


def test_a_small_batch_of_the_lake_must_be_quick_and_write_little() -> None:
    seconds, written = lake_of(60_000, batch=1).verdicts()
    assert seconds.endswith("1.50 s a batch; the target is at most 0.5: missed.")
    assert written.endswith("99,500 bytes a batch; the target is at most 100,100: reached.")


def test_the_lake_shows_memory_by_kind_of_process() -> None:
    page = markdown([lake_of(60_000)], {})
    ours = "| Headrace | 60,000 | 1.50 | 2.00 | 99.5 | 1,234 | 200 | 900 | 300 | 3.00 | 60,000 |"
    assert ours in page
    assert "| delta-rs MERGE | 20,000 | 1.50 | 2.00 | 99.5 | 1,234 | 700 | | | | 20,000 |" in page
    assert "- 1,000,000 rows, filling by Headrace: 100,000 rows/s" in page


def test_an_idle_pipeline_is_judged_without_the_server_beside_it() -> None:
    spread = lake_whole.figures(
        {"server": 9.0, "driver": 1.0, "JVM": 2.5, "workers": 1.0}, seconds=60
    )
    page = markdown([spread], {})
    assert "| the pipeline | 4.5 % of a core | < 5 % of a core | reached |" in page
    assert "| capture and server beside it | 9.0 % of a core | | |" in page


def test_a_family_is_known_by_what_started_whom() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            members = {of.pid: kind for kind, of in Family(os.getpid(), "server").members()}
            assert members[os.getpid()] == members[process.pid] == "server"
            own = Family(os.getpid(), "server").peaks()
            assert own["server", os.getpid()] > 10
            with Peaks(Family(os.getpid(), "server")) as peaks:
                wait_until(lambda: peaks.highest["server"] > peaks.largest("server") > 10)
        finally:
            process.kill()


def test_a_worker_that_ended_while_it_was_watched_is_no_negative_work() -> None:
    before: Used = {("workers", 1): 9.0, ("workers", 2): 1.0, ("JVM", 3): 5.0}
    after: Used = {("workers", 2): 1.5, ("workers", 4): 0.25, ("JVM", 3): 6.0}
    assert spent(before, after) == {"workers": 0.75, "JVM": 1.0}


def test_every_format_has_a_figure_and_writes_every_change() -> None:
    measured = formats.measure(changes=20, turns=1)
    assert [figure.name for figure in measured.figures] == [*names(), formats.PEER]
    assert all(figure.value > 0 for figure in measured.figures)
    transactions = formats.updates(20)
    assert [len(transaction) for transaction in transactions] == [10, 10]
    assert [transaction[-1].last for transaction in transactions] == [True, True]
    for name in names():
        written = str(formats.writing(Formats().named(name))(transactions))
        assert written.count("12.75") in (20, 40), name  # of the new row, and of the old one
