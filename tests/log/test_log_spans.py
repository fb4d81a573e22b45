"""What the log knows of spans of changes without reading them."""

from pathlib import Path

import msgspec
import pytest

from headrace.change.block import BlockRows
from headrace.change.event import Batch
from headrace.change.record import Records, encode
from headrace.log import Log, LogReader, writer
from headrace.log import _layout as layout
from tests.log.blocks import stored_block
from tests.log.transactions import SOURCE, known_table, stored, transaction


def test_every_mark_ends_a_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MARK_CHANGES", 10)
    with Log.open(tmp_path) as log:
        for number in range(1, 10):
            stored(log, number, 5)
        with LogReader.open(tmp_path) as reader:
            spans = reader.spans(0, 44)
            places = [(span.after, span.upto) for span in spans]
            assert places == [(0, 10), (10, 20), (20, 30), (30, 40)]
            assert [(part.changes, part.last) for part in spans[1].tables] == [(10, 20)]
            assert reader.spans(10, 39) == spans[1:3]
            assert reader.spans(9, 40) == spans[1:]
            assert reader.spans(11, 40) == spans[2:]
        log.trim(12)
        assert log.spans(0, 40) == spans[2:]


def test_a_span_knows_of_the_snapshots_whose_blocks_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_MARK_CHANGES", 10)
    with Log.open(tmp_path) as log:
        stored(log, 1, 10)
        stored(log, 2, 4)
        stored_block(log, 3, 6)
        stored_block(log, 4, 10)
        records, mixed, block = log.spans(0, 30)
        assert [(part.last, part.last_of_row) for part in mixed.tables] == [(20, 14)]
        assert [(part.last_of_row, part.changes) for part in block.tables] == [(0, 10)]
        seen = [set(part.snapshots) for span in (records, mixed, block) for part in span.tables]
        positions = [
            {bytes(rows.block.head.position)}
            for after in (14, 20)
            if isinstance(rows := log.stored(after, upto=30), BlockRows)
        ]
        assert seen == [set(), *positions]
        assert positions[0] != positions[1]


def test_changes_that_nobody_counted_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_MARK_CHANGES", 10)
    with Log.open(tmp_path) as log:
        table = known_table(log)
        changes = Records(encode(transaction(table, 1, 10)), {table.version: table})
        log.append(SOURCE, Batch(changes, b"1"))
        assert log.latest_sequence == 10
        assert log.spans(0, 10) == []


def test_a_span_of_very_many_tables_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_MARK_CHANGES", 65)
    with Log.open(tmp_path) as log:
        for number in range(65):
            changes = transaction(known_table(log, f"t{number}"), number + 1)
            log.append(SOURCE, Batch(changes, b"%d" % number))
        stored(log, 100, 65)
        assert [(span.after, span.upto) for span in log.spans(0, 130)] == [(65, 130)]


def test_marks_of_an_earlier_version_know_of_no_span(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        stored(log, 1, 10)
        log._put(layout.mark_key(10), msgspec.msgpack.encode([1, 1000]))
    with Log.open(tmp_path) as log:
        assert log.spans(0, 10) == []
        assert log.before_time(2) == 11
        stored(log, 2, 1024)
        assert [(span.after, span.upto) for span in log.spans(0, 2000)] == [(10, 1034)]
