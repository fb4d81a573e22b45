"""Every kind of sink keeps the contract of sinks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import SparkSession

from headrace.sinks.destination import DestinationSink, _opened
from headrace.sinks.files.sink import Files
from headrace.sinks.history import History
from headrace.sinks.iceberg import IcebergHistory
from headrace.sinks.tables.sink import Tables
from headrace.testing import SinkContract, SinkTrial
from headrace.testing.iceberg import IcebergServer
from tests.deltas import stored as delta_rows
from tests.sinks.destinations import stored as rows_in
from tests.sinks.socket_sink import Courier, opened_office


class TestTables(SinkContract):
    @pytest.fixture
    def trial(self, spark: SparkSession, tmp_path: Path) -> SinkTrial:
        folder = tmp_path / "lake"

        def stored() -> Iterator[tuple[str, int]]:
            for path in folder.glob("public/*"):
                rows = delta_rows(path)["id"].to_pylist()
                yield from ((path.name, number) for number in rows)

        return SinkTrial(Tables(name="lake", path=str(folder)), stored, spark)


class TestHistory(SinkContract):
    @pytest.fixture
    def trial(self, spark: SparkSession, tmp_path: Path) -> SinkTrial:
        folder = tmp_path / "audit"

        def stored() -> Iterator[tuple[str, int]]:
            for row in delta_rows(folder).to_pylist():
                yield row["table"], json.loads(row["key"])["id"]

        return SinkTrial(History(name="audit", path=str(folder)), stored, spark)


class TestIcebergHistory(SinkContract):
    @pytest.fixture
    def trial(self, spark: SparkSession, iceberg_server: IcebergServer) -> SinkTrial:
        uri = iceberg_server.uri
        namespace = f"audit_{uuid4().hex[:8]}"

        def stored() -> Iterator[tuple[str, int]]:
            catalog = RestCatalog("reader", uri=uri)
            for name in catalog.list_tables(namespace):
                for row in catalog.load_table(name).scan().to_arrow().to_pylist():
                    if row["op"] == "INSERT":
                        yield row["table"], row["row"]["id"]

        sink = IcebergHistory(name="audit", uri=uri, namespace=namespace)
        return SinkTrial(sink, stored, spark)


class TestFiles(SinkContract):
    @pytest.fixture
    def trial(self, spark: SparkSession, tmp_path: Path) -> SinkTrial:
        folder = tmp_path / "files"

        def stored() -> Iterator[tuple[str, int]]:
            for file in folder.glob("day=*/*.jsonl.gz"):
                for line in gzip.decompress(file.read_bytes()).splitlines():
                    event = json.loads(line)
                    yield event["table"], event["after"]["id"]

        sink = Files(name="files", path=str(folder), compression="gzip")
        return SinkTrial(sink, stored, spark)


class TestPush(SinkContract):
    @pytest.fixture
    def trial(self, tmp_path: Path) -> Iterator[SinkTrial]:
        with opened_office() as office:
            sink = Courier(name="post", port=office.port, folder=str(tmp_path / "post"))

            def stored() -> Iterator[tuple[str, int]]:
                for event in office.taken:
                    yield event.table, json.loads(event.key or "{}")["id"]

            yield SinkTrial(sink, stored)


class TestDestination(SinkContract):
    @pytest.fixture
    def trial(self, tmp_path: Path) -> Iterator[SinkTrial]:
        file = tmp_path / "rows.db"
        sink = DestinationSink(
            name="mine",
            class_="tests.sinks.destinations:Rows",
            options={"file": str(file)},
            folder=str(tmp_path / "mine"),
        )

        def stored() -> Iterator[tuple[str, int]]:
            for table, rows in rows_in(file).items():
                yield from ((table, number) for number in rows)

        yield SinkTrial(sink, stored)
        while _opened:
            _opened.popitem()[1].close()
