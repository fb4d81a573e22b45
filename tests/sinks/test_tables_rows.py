"""Changes that come as rows of a DataFrame end in the same tables as a range of the log does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.change.arrow.frame import Framing
from headrace.change.event import Op
from headrace.sinks.lake.plan import ShareResult, TablePlan
from headrace.sinks.tables.input import LogInput, _ApplySent, _by_plan, _parallelism, _Send
from headrace.sinks.tables.sink import TablesWriter
from tests.sinks.lake import order, ordered, put, remove, truncate
from tests.sinks.plain import PlainLake

SHARES = 2


class SentInput(LogInput):
    """A range of the log, of which every change is sent to the task of its key."""

    def run(self, plans: Sequence[TablePlan]) -> dict[int, list[ShareResult]]:
        """What `RowsInput` does, without Spark."""
        whole = self._batch.whole
        assert whole
        framing = Framing(whole.epoch, whole.log.tables(whole.epoch))
        pieces = whole.log.pieces(whole.epoch, whole.after, whole.upto)
        send, task = _Send(tuple(plans), SHARES), _ApplySent(tuple(plans), SHARES)
        sent = pa.Table.from_batches(send(framing.batch(*piece) for piece in pieces))
        results = []
        for share in range(SHARES):
            own = sent.filter(pa.array([each == share for each in sent["share"].to_pylist()]))
            results += [text for each in task(iter(own.to_batches())) for text in each["result"]]
        return _by_plan([text.as_py() for text in results])


@pytest.mark.parametrize("keep", ["rows", "history"])
def test_one_batch_has_changes_of_several_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    monkeypatch.setattr(
        TablesWriter, "_input", lambda writer, batch: SentInput(batch, writer._wants)
    )
    lake = PlainLake(monkeypatch, tmp_path, keep=keep)
    names = ("orders", "parts", "users")
    for batch in range(3):
        for table in map(lake.table, names):
            start = batch * 10
            lake.commit(*(put(table, **order(start + number)) for number in range(10)))
            lake.commit(
                put(table, Op.UPDATE, id=start, status="paid"),  # the rest is unchanged
                put(table, Op.UPDATE, was={"id": start + 1}, **order(start + 500)),
                remove(table, id=start + 2),
            )
        if batch == 1:
            lake.commit(truncate(lake.table("parts")))
        lake.write(lake.log.latest_sequence, 1)
        assert lake.writer.failed_tables() == []
        for name in names:
            current = [row for row in lake.rows(name, own=True) if row.get("_current", True)]
            kept = [{key: row[key] for key in row if not key.startswith("_")} for row in current]
            assert ordered(kept) == lake.expected(name)
    lake.log.close()


def test_executors_that_come_and_go_are_counted_anew_for_each_batch() -> None:
    class Cluster:
        defaultParallelism = 2  # noqa: N815 - as Spark calls it

        @property
        def sparkContext(self) -> "Cluster":  # noqa: N802
            return self

    spark: Any = Cluster()
    assert _parallelism(spark) == 2
    spark.defaultParallelism = 40
    assert _parallelism(spark) == 40
