"""Rows that tasks store as they come, and one process takes in order."""

import random
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.change.arrow import frame
from headrace.sinks.lake.storage import Folder
from headrace.sinks.tables import staged
from headrace.sinks.tables.staged import ChangeStage, StagedInput, StagedPart


def batch_of(sequences: list[int]) -> pa.RecordBatch:
    described = {"epoch": "e", "source": "s", "schema": "public", "table": "t", "row_schema": "[]"}
    row = {**described, "connector": "postgres", "op": "INSERT", "schema_version": 1, "key": "{}"}
    return pa.RecordBatch.from_pylist(
        [{**row, "sequence": each, "after": "{}"} for each in sequences], schema=frame.schema()
    )


def stored(folder: Folder, sequences: list[int], rows: int = 10) -> StagedPart:
    cuts = range(0, len(sequences), rows)
    return ChangeStage(folder, "q").store(batch_of(sequences[at : at + rows]) for at in cuts)


def taken(folder: Folder, part: StagedPart) -> list[int]:
    return [sequence for sequence, _, _ in StagedInput(folder, [part])._merged()]


def test_rows_in_any_order_become_few_runs_and_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path))
    sequences = list(range(1, 1001))
    random.Random(7).shuffle(sequences)
    part = stored(folder, sequences)
    assert len(part.runs) <= 2
    [version] = part.versions
    assert (version["first"], version["last"], version["changes"]) == (1, 1000, 1000)
    assert taken(folder, part) == sorted(sequences)
    monkeypatch.setattr(staged, "_SORTED_BYTES", 20_000)
    part = stored(folder, sequences)
    assert 2 < len(part.runs) < 50
    assert taken(folder, part) == sorted(sequences)


def test_rows_in_order_are_one_run(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    part = stored(folder, list(range(1, 101)))
    assert len(part.runs) == 1
    assert taken(folder, part) == list(range(1, 101))
