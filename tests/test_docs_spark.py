"""The examples for Spark in the pages run as they stand, on a session."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from headrace.change.event import Column, Op
from headrace.config import parse
from headrace.pipeline.computed import check_computed
from headrace.serve import BackgroundServer, ServerSettings, create_app
from tests.sinks.lake import ORDERS, Lake, order, put, remove

ROOT = Path(__file__).parent.parent
ADDRESS = "http://127.0.0.1:3000"
TESTED = (*ORDERS, Column("created_at", "timestamp with time zone"), Column("test", "boolean"))


def blocks(page: str, language: str = "python") -> list[str]:
    """The examples of a page in a language, those that are not marked as something else."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@contextmanager
def served(lake: Lake) -> Iterator[str]:
    settings = ServerSettings(port=0)
    app = create_app(lake.log, statuses=list, copy_again=None, settings=settings)
    with BackgroundServer(app, settings) as server:
        yield server.url


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    """Orders that have changed."""
    made = Lake(spark, tmp_path)
    orders = made.table("orders")
    made.commit(*(put(orders, **order(number)) for number in range(4)))
    made.commit(put(orders, Op.UPDATE, id=1, status="paid"), remove(orders, id=2))
    yield made
    made.log.close()


def ran(code: str, lake: Lake, **names: Any) -> dict[str, Any]:
    """What an example leaves behind; a query that would go on is stopped when it has all."""
    own = code.replace("query.awaitTermination()\n", "")
    for name in ("lake", "checkpoints"):  # the current folder of Spark's Java is another one
        own = own.replace(f'"{name}', f'"{lake.folder}/{name}')
    left = {"spark": lake.spark, **names}
    with served(lake) as url:
        exec(compile(own.replace(ADDRESS, url), "example", "exec"), left)
        if query := left.get("query"):
            try:
                query.processAllAvailable()
            finally:
                query.stop()
    return left


def test_the_examples_of_the_spark_page(lake: Lake) -> None:
    stream, sink, reader, _, entities = blocks("docs/spark.md")
    orders = ran(stream, lake)["orders"]
    assert orders.isStreaming
    assert orders.columns[:2] == ["id", "status"]
    ran(sink, lake)
    assert lake.rows() == lake.expected()
    read = ran(reader, lake)["orders"]
    assert sorted(row.id for row in read.collect()) == [0, 1, 3]
    changes = lake.spark.read.format("headrace").option("path", str(lake.log.path)).load()
    assert "entity_type" in ran(entities, lake, changes=changes)["events"].columns


@pytest.mark.parametrize("page", ["README.md", "docs/lake.md"])
def test_the_examples_of_other_pages(lake: Lake, page: str) -> None:
    [code] = blocks(page)
    left = ran(code, lake)
    assert left["changes"].isStreaming
    if "query" in left:
        assert lake.rows() == lake.expected()


def test_the_transforms_of_the_transforms_page_fit_the_tables_that_they_name(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    [function] = blocks("docs/transforms.md")
    package = lake.folder / "shop"
    package.mkdir()
    (package / "rules.py").write_text(function)
    monkeypatch.syspath_prepend(lake.folder)
    chosen, computed, source, _ = blocks("docs/transforms.md", "yaml")
    environment = {"MASK_KEY": "a key of sixteen or more", "SHOP_URL": "postgresql://db/shop"}
    sources = {"sources": {"shop": {"type": "sqlite", "path": "shop.db"}}}
    for text in (chosen, source):
        parse(sources | yaml.safe_load(text), folder=lake.folder, environment=environment)
    config = parse(sources | yaml.safe_load(computed), folder=lake.folder, environment={})
    tables = [lake.table("orders", TESTED), lake.table("items")]

    @contextmanager
    def session() -> Iterator[SparkSession]:
        yield lake.spark

    assert config.pipeline
    try:
        found = check_computed(config.pipeline.sinks, tables, session)
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "shop"]:
            del sys.modules[name]
    assert [each.ok for each in found] == [True, True], found
    assert found[0].detail.endswith(", day date")
    assert found[1].detail.endswith(", cleaned boolean")
