"""The benchmark's arithmetic and its page; the measurements themselves are never timed tests."""

import pytest

from bench.latency import Reading, figures, percentile
from bench.process import Outcome
from bench.report import Figure, Figures, Race, Runner, Target, markdown, terminal
from bench.workload import Scale


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
