"""A row that PostgreSQL had is erased from every kind of sink: no file has its values."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import load
from headrace.log import Log, LogReader
from headrace.operate.parts import sink_named
from headrace.pipeline.options import Options
from headrace.pipeline.query import RangesBatch
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.sinks import SinkWriter, Takes
from headrace.testing import PostgresDatabase
from tests.deltas import stored
from tests.sinks.receiver import OK, Receiver, Request, reply
from tests.sources import capturing

pytestmark = [pytest.mark.faults, pytest.mark.live]

MARKER = "zebra-marker"
SECRET = "a key of sixteen or more"


class Everywhere:
    """A captured database, and every kind of sink on its log."""

    def __init__(self, folder: Path, spark: SparkSession, port: int) -> None:
        self.folder, self.spark = folder, spark
        self.written = self.batches = 0
        self.config = folder / "headrace.yaml"
        path = {name: str(folder / "out" / name) for name in _SINKS}
        sinks = {name: {**given, "path": path[name]} for name, given in _SINKS.items()}
        sinks["hook"] = {
            "type": "webhook",
            "url": f"http://127.0.0.1:{port}/",
            "secret": SECRET,
            "allow_private_networks": True,
            "attempts": 1,
        }
        content = {
            "data_dir": str(folder),
            "server": {"port": 9},
            "sources": {"shop": {"type": "sqlite", "path": "shop.db"}},
            "pipeline": {"sinks": sinks},
        }
        self.config.write_text(yaml.safe_dump(content))

    def flow(self) -> None:
        """Let every sink have everything: a batch each, without a query of its own."""
        settings = load(self.config)
        assert settings.pipeline is not None
        with LogReader.open(settings.log_dir) as log:
            epoch, latest = log.epoch, log.latest_sequence
        path = str(settings.log_dir)
        reader = self.spark.read.format("headrace").option("path", path)
        rows = reader.options(startingSequence=self.written + 1, endingSequence=latest).load()
        columns = "epoch string, after long, upto long, part int, parts int"
        ranges = self.spark.createDataFrame([(epoch, self.written, latest, 0, 1)], columns)
        batch = RangesBatch(ranges, PipelineLog(DiskLog(path), Options(path=path)))
        for each in settings.pipeline.sinks:
            sink = sink_named(settings, each.name)
            writer: SinkWriter[Any] = sink.open("query-1")
            writer.write(rows if sink.takes is Takes.ROWS else batch, self.batches)
            writer.close()
        self.written, self.batches = latest, self.batches + 1

    def erased(self, table: str, key: str) -> dict[str, Any]:
        arguments = ["erase", table, key, "--yes", "--json", "--config", str(self.config)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    def having(self, text: str) -> set[str]:
        """The places that have a text: the log as it is read, and every file, decoded."""
        found = set()
        with Log.open(self.folder / "log") as log:
            if any(text in repr(each) for each in log.read(0, limit=10_000)):
                found.add("log")
        for path in self.folder.rglob("*"):
            if path.is_file() and text.encode() in _decoded(path):
                found.add(_place(path.relative_to(self.folder)))
        return found


_SINKS: dict[str, dict[str, Any]] = {
    "rows": {"type": "tables"},
    "past": {"type": "tables", "keep": "history"},
    "masked": {"type": "tables", "transforms": {"*": {"mask": {"id": {"hmac": SECRET}}}}},
    "audit": {"type": "history"},
    "events": {"type": "history", "format": "savegress"},
    "lines": {"type": "files", "compression": "gzip"},
    "debezium": {"type": "files", "format": "debezium"},
    "packed": {"type": "files", "kind": "parquet", "format": ""},
}


def _decoded(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".gz":
        content += gzip.decompress(content)
    if path.suffix == ".parquet":
        rows: pa.Table = pq.ParquetFile(path).read()
        content += repr(rows.to_pylist()).encode()
    return content


def _place(path: Path) -> str:
    if path.parts[0] == "out":
        return path.parts[1]
    return path.parts[1] if path.parts[0] == "pipeline" else path.parts[0]


def refusing(request: Request) -> bytes:
    return reply(400) if MARKER.encode() in request.body else OK


@pytest.fixture
def everywhere(tmp_path: Path, spark: SparkSession) -> Iterator[Everywhere]:
    with Receiver(refusing) as receiver:
        yield Everywhere(tmp_path, spark, receiver.port)


@pytest.mark.requirement("P-37")
def test_a_row_of_postgres_is_erased_everywhere(
    everywhere: Everywhere, tmp_path: Path, pg: PostgresDatabase
) -> None:
    pg.execute("CREATE TABLE users (id bigint PRIMARY KEY, email text, doc jsonb, at timestamptz)")
    pg.execute("ALTER TABLE users REPLICA IDENTITY FULL")
    row = "(%s, %s, jsonb_build_object('name', %s::text), now())"
    for number in range(30, 50):  # so that the row shares its files with others
        mail = f"{MARKER}-{number}"
        pg.execute(f"INSERT INTO users VALUES {row}", (number, mail, f"name-{mail}"))
    with capturing.captured(pg, tmp_path) as feed:
        pg.execute("UPDATE users SET email = 'second-' || email")
        feed.until_caught_up()
    everywhere.flow()
    with capturing.captured(pg, tmp_path) as feed:
        pg.execute("DELETE FROM users WHERE id = 42")
        feed.until_caught_up()
    everywhere.flow()
    other = everywhere.having(f"{MARKER}-43")
    assert everywhere.having(f"{MARKER}-42") >= {"log", *_SINKS, "hook"}
    found = everywhere.erased("public.users", "42")
    assert everywhere.having(f"{MARKER}-42") == set()
    assert everywhere.having(f"{MARKER}-43") == other
    rewritten = {each["place"].partition(":")[0]: each["rewritten"] for each in found["places"]}
    assert [name for name in (*_SINKS, "hook") if not rewritten[f"sink {name}"]] == []
    rows = stored(DeltaTable(str(tmp_path / "out" / "rows" / "public" / "users")))
    assert sorted(rows["id"].to_pylist()) == [number for number in range(30, 50) if number != 42]
