"""What the measurements of sinks that send events share: the real query over a log, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from headrace.pipeline.query import PipelineInput, Stored
from headrace.pipeline.run import plans
from headrace.pipeline.session import opened_session
from headrace.sinks import Sink

from .process import Outcome

MASTER = "local[2]"
WHO = ("Headrace", "a loop of the same client")


def through(sink: Sink, log: str, folder: Path, *, changes: int, warm_up: int) -> Outcome:
    """The real query, in batches of so many changes, with all that Spark does between them.

    Those after the warm-up count.
    """
    feed = PipelineInput(address={"path": log}, max_changes_per_batch=changes)
    [plan] = plans([sink], feed, checkpoints=folder, once=True)
    stored: list[Stored] = []
    ends = [0.0]

    def note(batch: Stored) -> None:
        stored.append(batch)
        ends.append(time.perf_counter())

    with opened_session(MASTER, {}, journal=folder / "spark.log") as spark:
        writer = plan.sink.open(plan.checkpoint.writer())
        batches = plan.batches(writer, note)
        ends[0] = time.perf_counter()
        plan.start(spark, batches, plan.starting(writer)).awaitTermination()
    if batches.error is not None:
        raise batches.error
    times = [end - begin for begin, end in pairwise(ends)][warm_up:]
    counted = stored[warm_up:]
    storing = sum(each.seconds for each in counted)
    return Outcome(
        sum(each.changes for each in counted), sum(times), {"seconds in storing": storing}
    )


def best(
    folder: Path, runs: int, one: Callable[[str, Path], Outcome], who: Sequence[str] = WHO
) -> dict[str, float]:
    """The best rate of each, who take turns; each run has a folder of its own."""
    rates = dict.fromkeys(who, 0.0)
    for run in range(runs):
        for number, each in enumerate(who):
            place = folder / f"run-{run}-{number}"
            place.mkdir(parents=True)
            rates[each] = max(rates[each], one(each, place).rate)
    return rates


def size(changes: int, factor: float) -> int:
    """How many changes a batch has, of a measurement that is to be so much smaller or larger."""
    return max(1000, round(changes * factor) // 1000 * 1000)
