"""`snapshot_rows_per_second`: a snapshot reads no faster."""

from pathlib import Path
from typing import Any

import apsw
import pytest

from headrace.change.event import Op
from headrace.log import Log
from headrace.secret import Secret
from headrace.sources import Source
from headrace.sources.mysql import Mysql
from headrace.sources.pace import RowPace
from headrace.sources.postgres_events import PostgresEvents
from headrace.sources.sqlite import install
from headrace.testing import PostgresDatabase
from headrace.testing.mysql import MysqlDatabase
from tests.sources.capturing import postgres
from tests.sources.litedb import sqlite
from tests.sources.writing import create


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_limit_nothing_waits() -> None:
    pace = RowPace(None)
    assert pace.piece(4096) == 4096
    assert [pace.delay(1_000_000) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_a_second_has_so_many_rows() -> None:
    clock = Clock()
    pace = RowPace(1000, clock)
    assert pace.piece(4096) == 1000
    assert pace.piece(64) == 64
    began, rows = clock.now, 0
    for batch in (500, 1000, 1, 250, 1000, 1000):
        clock.now += pace.delay(batch)
        rows += batch
    assert clock.now - began == pytest.approx(rows / 1000)


def test_workers_share_the_rows_of_a_second() -> None:
    clock = Clock()
    pace = RowPace(1000, clock)
    assert [pace.delay(1000), pace.delay(1000)] == [1.0, 2.0]


def test_time_in_which_nothing_was_read_is_not_made_up_for() -> None:
    clock = Clock()
    pace = RowPace(1000, clock)
    pace.delay(1000)
    clock.now += 3600
    assert pace.delay(1000) == 1.0


def test_every_source_reads_its_snapshot_in_pieces_of_a_second(
    pg: PostgresDatabase, maria: MysqlDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces are transactions of their own, so the log shows them."""
    monkeypatch.setattr(RowPace, "delay", lambda *_: 0.0)
    create(pg, "users", rows=30)
    maria.execute("CREATE TABLE users (id int PRIMARY KEY)")
    maria.execute("INSERT INTO users SELECT seq FROM seq_1_to_30")
    path = tmp_path / "shop.db"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE users (id INTEGER PRIMARY KEY)")
    connection.execute("INSERT INTO users SELECT value FROM json_each(?)", (str(list(range(30))),))
    connection.close()
    install(str(path), ["*"])
    settings: dict[str, Any] = {"snapshot_rows_per_second": 10}
    sources: dict[str, Source] = {
        "postgres": postgres(pg, tables=("public.*",), **settings),
        "events": PostgresEvents(name="events", url=Secret(pg.url), **settings),
        "mysql": Mysql(name="mysql", url=Secret(maria.url), **settings),
        "sqlite": sqlite(path, name="sqlite", **settings),
    }
    pieces = {name: _pieces(source, tmp_path / name) for name, source in sources.items()}
    assert pieces == {name: [10, 10, 10] for name in sources}


def _pieces(source: Source, folder: Path) -> list[int]:
    """How many rows came together."""
    with Log.open(folder) as log:
        stream = source.open(None, log.register)
        sizes = []
        for batch in stream:
            read = sum(change.op is Op.READ for change in batch.changes)
            sizes += [read] if read else []
            if sum(sizes) == 30:
                stream.close()
    return sizes
