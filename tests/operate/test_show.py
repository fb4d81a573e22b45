"""What a person reads on the terminal says how things are."""

import io
import json
import re

import pytest
from rich.console import Console

from headrace.log import Stats
from headrace.operate.show import (
    Rate,
    RunProgress,
    SinkProgress,
    change_line,
    complaints,
    pipeline_lines,
    sink_line,
    size,
)
from headrace.sinks import FailedTable, SinkPhase, SinkStatus
from headrace.sinks.report import PipelineOverview
from headrace.sources import CopyProgress, Phase, Status

STATS = Stats(count=500, first_sequence=1, latest_sequence=500, total_bytes=2_500_000)
COPYING = Status(
    source="shop",
    phase=Phase.SNAPSHOT,
    position="0/16B3748",
    copies=(
        CopyProgress("public.users", 500, 1000, False),
        CopyProgress("public.orders", 7, -1, False),
        CopyProgress("public.done", 3, 3, True),
    ),
)
STREAMING = Status(source="shop", phase=Phase.STREAMING, position="0/16B3748")


def shown(*statuses: Status, terminal: bool, times: int = 1, always: bool = False) -> str:
    """What `RunProgress` writes."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    with RunProgress(console, footer=["try this"], always=always) as progress:
        for _ in range(times):
            progress.show(statuses, STATS)
    return file.getvalue()


def test_a_terminal_shows_a_bar_for_every_table_of_a_snapshot() -> None:
    text = shown(COPYING, terminal=True)
    assert re.search(r"public\.users +━+", text)
    assert "500 of about 1,000 rows" in text
    assert "7 rows" in text
    assert "public.done" not in text
    assert "1 of 3 tables" in text
    assert "sequence 500" in text
    assert "try this" in text


def test_elsewhere_a_snapshot_is_printed_in_a_line_now_and_then() -> None:
    lines = shown(COPYING, terminal=False, times=3).splitlines()
    assert lines[0] == "try this"
    [line] = lines[1:]
    assert line.startswith("shop: snapshot, snapshot 1 of 3 tables, 510 rows; lag 0 B")


def test_elsewhere_nothing_is_printed_while_all_is_well() -> None:
    assert shown(STREAMING, terminal=False) == "try this\n"
    assert "shop: streaming" in shown(STREAMING, terminal=False, always=True)


def test_what_is_wrong_comes_with_what_to_do() -> None:
    status = Status(
        source="shop",
        phase=Phase.HALTED,
        error="the slot is gone",
        hint="copy it anew",
        errored={"public.users": "a value cannot be read"},
    )
    assert complaints(status) == [
        "shop: the slot is gone",
        "  copy it anew",
        "shop: public.users is not captured: a value cannot be read",
    ]
    assert "the slot is gone" in shown(status, terminal=True)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3 * 10**12, "3.0 TB")]
)
def test_sizes_are_for_people(number: int, text: str) -> None:
    assert size(number) == text


def test_a_rate_is_nothing_until_there_is_time_to_measure() -> None:
    rate = Rate()
    rate.note(100)
    assert rate.per_second == 0


def canonical(**fields: object) -> bytes:
    transaction = {"id": "7", "ordinal": 1, "last": True, "commit_time": 1_736_937_000_123_456}
    change = {
        "sequence": 42,
        "op": "UPDATE",
        "source": "shop",
        "schema": "public",
        "table": "users",
        "before": None,
        "after": None,
        "transaction": transaction,
    }
    return json.dumps(change | fields, separators=(",", ":")).encode()


def test_a_change_is_a_line() -> None:
    line = change_line(canonical(after={"id": 1, "name": "Ada"}))
    assert line == '      42 2025-01-15 10:30:00.123 UPDATE   public.users {"id":1,"name":"Ada"}'


def test_a_deleted_row_is_shown_by_its_old_image() -> None:
    assert change_line(canonical(op="DELETE", before={"id": 1})).endswith('public.users {"id":1}')


def test_a_long_row_is_cut() -> None:
    line = change_line(canonical(after={"text": "x" * 1000}))
    assert len(line) < 300
    assert line.endswith("…")


# --- the pipeline --------------------------------------------------------------------------------

LAKE = SinkStatus(
    sink="lake",
    phase=SinkPhase.STREAMING,
    batch=7,
    changes=120_000,
    changes_per_second=51_234.4,
    sequence=1_200_000,
    lag=3_400,
    failed_tables=(FailedTable("public.users", 8, "its key went", "Copy it anew."),),
    catalog="public.orders is not in the catalog",
    rescued={"public.parts": 1_200},
)


def sinks_shown(*rounds: SinkStatus, terminal: bool) -> str:
    """What `SinkProgress` writes when these come in turn."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    with SinkProgress(console) as progress:
        for status in rounds:
            progress.show([status])
    return file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_sinks_are_shown_beside_the_sources(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    starting = SinkStatus(sink="lake", phase=SinkPhase.STARTING)
    with RunProgress(console, always=True) as progress:
        progress.show([STREAMING], STATS, [starting])
        progress.show([STREAMING], STATS, [LAKE])
    text = file.getvalue()
    assert "3,400" in text, "the last state is printed even if it was not yet time to"
    assert terminal or text.count("shop: streaming") == 1, "nothing is printed twice"
    assert terminal or "lake: starting, nothing stored yet" in text


def test_a_terminal_shows_how_far_each_sink_is_and_what_troubles_it() -> None:
    text = sinks_shown(LAKE, terminal=True)
    for expected in ("lake", "streaming", "1,200,000", "51,234 changes/s", "3,400 changes"):
        assert expected in text
    assert "lake: public.users is not followed: its key went" in text
    assert "Copy it anew." in text
    assert "lake: public.orders is not in the catalog" in text
    assert "lake: public.parts has had 1,200 values that do not fit their columns" in text


def test_a_lag_that_is_not_known_is_shown_as_unknown() -> None:
    starting = SinkStatus(sink="lake", phase=SinkPhase.STARTING)
    behind = SinkStatus(sink="lake", phase=SinkPhase.STARTING, lag=300_000)
    assert "unknown" in sinks_shown(starting, terminal=True)
    assert "300,000 changes" in sinks_shown(behind, terminal=True)
    assert sink_line(starting) == "lake: starting, nothing stored yet; lag unknown"
    assert sink_line(behind) == "lake: starting, nothing stored yet; lag 300,000"


def test_a_halted_sink_shows_with_its_reason_and_its_remedy() -> None:
    halted = SinkStatus(sink="lake", phase=SinkPhase.HALTED, error="taken", hint="Adopt it.")
    seen = PipelineOverview(
        running=True, reported_at=1_730_250_000_000_000, detail="process 7 runs", sinks=[halted]
    )
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        for line in pipeline_lines(seen):
            console.print(line)
    lines = [line.strip() for line in capture.get().splitlines()]
    assert lines[0] == "pipeline: process 7 runs; as of 2024-10-30 01:00:00 UTC:"
    assert lines[-2:] == ["lake: taken", "Adopt it."]
