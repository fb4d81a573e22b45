"""Tables in the catalogs where people look for them: Unity Catalog, Glue, Spark's own."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType
from pyspark.sql import SparkSession

from headrace.change.event import Column
from headrace.errors import SinkRefused, SinkUnavailable
from headrace.retry import Backoff
from headrace.secret import Secret
from headrace.sinks.history import History
from headrace.sinks.lake.catalog import (
    CatalogEntry,
    GlueCatalog,
    SparkCatalog,
    TableCatalog,
    UnityCatalog,
    check_catalog,
    glue,
    registrar,
)
from headrace.sinks.lake.catalog import unity as unity_module
from headrace.sinks.lake.storage import Folder
from tests.buckets import SECRET, Bucket
from tests.sinks.lake import ORDERS, Lake, order, put, schema
from tests.sinks.unity import TOKEN, UnityServer

REAL = os.environ.get("HEADRACE_UNITY_URL")  # a server with the catalog HEADRACE_UNITY_CATALOG


@pytest.fixture
def unity() -> Iterator[UnityServer]:
    with UnityServer() as server:
        yield server
        server.shutdown()


def catalog_of(server: UnityServer, **settings: Any) -> UnityCatalog:
    return UnityCatalog(url=server.url, catalog="main", **{"token": Secret(TOKEN), **settings})


class Orders:
    """A Delta table with comments, which follows its source."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        key = pa.field("id", pa.int64(), metadata={"comment": "the order's number"})
        rows = pa.table([[7], ["new"]], pa.schema([key, pa.field("status", pa.string())]))
        write_deltalake(folder.uri, rows, description="All orders", storage_options=self._options)

    @property
    def _options(self) -> dict[str, str]:
        return dict(self.folder.options)

    def grow(self) -> None:
        """Another column and another comment."""
        table = DeltaTable(self.folder.uri, storage_options=self._options)
        kind = PrimitiveType("string")
        table.alter.add_columns([Field("note", kind, metadata={"comment": "who called"})])
        table.alter.set_table_description("Orders and notes")

    def entry(self, catalog: TableCatalog, source_schema: str = "public") -> CatalogEntry:
        metadata = registrar._stored(self.folder)
        assert metadata
        name = catalog.name_of(source_schema, "orders")
        return CatalogEntry.of(f"{source_schema}.orders", name, self.folder, metadata)


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(Folder.of(str(tmp_path / "the lake" / "public" / "orders"), {}))


def shown(table: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    return [(each["name"], each["type_text"], each.get("comment")) for each in table["columns"]]


BEFORE = [("id", "bigint", "the order's number"), ("status", "string", None)]
AFTER = [*BEFORE, ("note", "string", "who called")]


@pytest.mark.parametrize("delta_api", [True, False])
def test_unity_has_the_columns_and_comments_of_a_table(orders: Orders, delta_api: bool) -> None:
    with UnityServer(delta_api=delta_api) as server:
        catalog = catalog_of(server)
        assert catalog.check({}).ok
        assert catalog.register(orders.entry(catalog))
        made = server.tables["main.public.orders"]
        assert (shown(made), made["comment"]) == (BEFORE, "All orders")
        assert made["storage_location"] == Path(orders.folder.uri).as_uri()
        assert not catalog.register(orders.entry(catalog))

        orders.grow()
        assert catalog.register(orders.entry(catalog))
        now = server.tables["main.public.orders"]
        assert (shown(now), now["comment"]) == (AFTER, "Orders and notes")
        assert (now["table_id"] == made["table_id"]) == delta_api  # in place, or made anew
        assert not catalog.register(orders.entry(catalog))
        server.shutdown()


@pytest.mark.skipif(not REAL, reason="HEADRACE_UNITY_URL names no server of Unity Catalog")
def test_a_real_unity_server_takes_the_same_requests(orders: Orders) -> None:
    token = os.environ.get("HEADRACE_UNITY_TOKEN")
    catalog = UnityCatalog(
        url=REAL or "",
        catalog=os.environ.get("HEADRACE_UNITY_CATALOG", "unity"),
        schema=f"headrace_{uuid4().hex[:8]}",
        token=Secret(token) if token else None,
    )
    assert catalog.check({}).ok
    assert catalog.register(orders.entry(catalog))
    assert not catalog.register(orders.entry(catalog))
    orders.grow()
    assert catalog.register(orders.entry(catalog))
    assert not catalog.register(orders.entry(catalog))


def test_an_entry_of_another_folder_is_left_as_it_is(
    orders: Orders, unity: UnityServer, tmp_path: Path
) -> None:
    catalog = catalog_of(unity, schema="shop")
    catalog.register(orders.entry(catalog))
    before = dict(unity.tables)
    other = Orders(Folder.of(str(tmp_path / "archive"), {}))
    with pytest.raises(SinkRefused, match="in the catalog is a table in file:") as found:
        catalog.register(other.entry(catalog, "old"))
    assert "catalog.schema or catalog.names" in found.value.hint
    assert unity.tables == before
    renamed = catalog_of(unity, schema="shop", names={"old.orders": "shop.orders_of_old"})
    assert renamed.register(other.entry(renamed, "old"))
    assert set(unity.tables) == {"main.shop.orders", "main.shop.orders_of_old"}


def test_no_error_shows_the_token(orders: Orders, unity: UnityServer) -> None:
    wrong = catalog_of(unity, token=Secret("not-the-right-token"))
    with pytest.raises(SinkRefused, match="401 not Bearer") as found:
        wrong.register(orders.entry(wrong))
    assert "not-the-right-token" not in f"{found.value.explain()} {wrong!r}"
    absent = UnityCatalog(url="http://127.0.0.1:1", catalog="main", token=Secret(TOKEN))
    with pytest.raises(SinkUnavailable, match="127"):
        absent.register(orders.entry(absent))


@pytest.mark.parametrize("page", [b"<html>Sign in</html>", b"[" * 100_000, b"[7]"])
def test_an_answer_of_something_else_is_no_entry(
    orders: Orders, unity: UnityServer, page: bytes
) -> None:
    unity.page = page
    catalog = catalog_of(unity)
    with pytest.raises(SinkRefused, match=r"answers GET .* with something else than JSON"):
        catalog.register(orders.entry(catalog))
    [found] = check_catalog(catalog, {})
    assert (found.ok, "catalog.url" in found.fix) == (False, True)


def test_an_answer_without_an_end_is_read_no_further(
    orders: Orders, unity: UnityServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unity_module, "_MOST_BYTES", 1 << 16)
    unity.page = b" " * (1 << 20)
    catalog = catalog_of(unity)
    with pytest.raises(SinkUnavailable, match="the answer is too long"):
        catalog.register(orders.entry(catalog))


def test_an_address_with_a_password_is_refused_without_showing_it() -> None:
    for make in (
        lambda: UnityCatalog(url="https://ann:s3cret@unity.example", catalog="main"),
        lambda: GlueCatalog(endpoint="https://ann:s3cret@glue.example"),
    ):
        with pytest.raises(ValueError, match="has a user or a password in it") as found:
            make()
        assert "s3cret" not in str(found.value)


def test_a_pipeline_that_ends_starts_no_other_spark(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkSession, "_instantiatedSession", None)
    catalog = SparkCatalog()
    with pytest.raises(SinkUnavailable, match="Spark has ended"):
        catalog.register(orders.entry(catalog))


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with Bucket() as server:
        yield server


def test_glue_has_the_columns_and_comments_of_a_table(bucket: Bucket) -> None:
    boto3 = pytest.importorskip("boto3")
    endpoint = f"http://{bucket.address}"
    catalog = GlueCatalog(endpoint=endpoint, database="shop")
    assert catalog.check(bucket.options).ok
    orders = Orders(bucket.folder("glue/public/orders"))
    assert catalog.register(orders.entry(catalog))
    assert not catalog.register(orders.entry(catalog))
    glue = boto3.client(
        "glue",
        endpoint_url=endpoint,
        region_name="eu-central-1",
        aws_access_key_id="any",
        aws_secret_access_key=SECRET,
    )
    made = glue.get_table(DatabaseName="shop", Name="orders")["Table"]
    glue.update_table(
        DatabaseName="shop",
        TableInput={
            "Name": "orders",
            "StorageDescriptor": made["StorageDescriptor"],
            "Parameters": {**made["Parameters"], "owner": "sales"},
        },
    )
    orders.grow()
    assert catalog.register(orders.entry(catalog))
    assert not catalog.register(orders.entry(catalog))
    now = glue.get_table(DatabaseName="shop", Name="orders")["Table"]
    storage = now["StorageDescriptor"]
    assert storage["Location"] == bucket.uri("glue/public/orders")
    columns = [(each["Name"], each["Type"], each.get("Comment")) for each in storage["Columns"]]
    assert (columns, now["Description"]) == (AFTER, "Orders and notes")
    wanted = {"table_type": "DELTA", "spark.sql.sources.provider": "delta", "owner": "sales"}
    assert wanted.items() <= now["Parameters"].items()

    other = Orders(bucket.folder("glue/old/orders"))
    with pytest.raises(SinkRefused, match="in the catalog is a table in s3:"):
        catalog.register(other.entry(catalog, "old"))
    away = GlueCatalog(endpoint="http://127.0.0.1:1")
    with pytest.raises(SinkUnavailable, match="Glue: Could not connect"):
        away.register(orders.entry(away))


def test_glue_gets_only_characters_that_it_stores(tmp_path: Path) -> None:
    model = pytest.importorskip("botocore.session").get_session().get_service_model("glue")
    field = pa.field("id", pa.int64(), metadata={"comment": "two\r\nlines, a\ttab,\x01 \U0001f600"})
    folder = Folder.of(str(tmp_path / "orders"), {})
    write_deltalake(folder.uri, pa.table([[7]], pa.schema([field])), description="two\nlines\x07")
    metadata = registrar._stored(folder)
    assert metadata
    catalog = GlueCatalog(database="shop")
    name = catalog.name_of("public", "orders")
    made = glue._input(CatalogEntry.of("public.orders", name, folder, metadata))
    [column] = made["StorageDescriptor"]["Columns"]
    assert column["Comment"] == "two lines, a\ttab,  \U0001f600"
    assert made["Description"] == "two\nlines "
    assert "\\n" not in model.shape_for("CommentString").metadata["pattern"]


def test_spark_selects_from_a_table_by_its_name(spark: SparkSession, orders: Orders) -> None:
    database = f"shop_{uuid4().hex[:8]}"
    catalog = SparkCatalog(names={"public.orders": f"{database}.2024"})
    assert catalog.register(orders.entry(catalog))
    assert not catalog.register(orders.entry(catalog))
    name = f"{database}.`2024`"
    assert spark.sql(f"SELECT status FROM {name} WHERE id = 7").collect() == [("new",)]

    orders.grow()  # until it is registered, the columns that the catalog has are read
    assert spark.sql(f"SELECT * FROM {name}").columns == ["id", "status"]
    assert catalog.register(orders.entry(catalog))
    assert [tuple(each) for each in spark.sql(f"DESCRIBE {name}").collect()] == AFTER
    assert spark.sql(f"SELECT * FROM {name}").collect() == [(7, "new", None)]
    spark.sql(f"DROP DATABASE {database} CASCADE")
    assert DeltaTable(orders.folder.uri).version() >= 0  # only the entry is gone


# --- beside the stream ---------------------------------------------------------------------------


@pytest.fixture
def registered(spark: SparkSession, tmp_path: Path, unity: UnityServer) -> Iterator[Lake]:
    made = Lake(spark, tmp_path, catalog=catalog_of(unity))
    yield made
    made.writer.close()
    made.log.close()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_a_batch_that_changes_columns_reaches_the_catalog(
    registered: Lake, unity: UnityServer
) -> None:
    registered.fill(range(1, 3))
    registered.compact()
    assert [each[0] for each in shown(unity.tables["main.public.orders"])][-1] == "_sequence"
    earlier = len(unity.requests)
    registered.fill(range(3, 5))
    registered.compact()
    assert len(unity.requests) == earlier

    grown = registered.table("orders", (*ORDERS, Column("city", "text")))
    registered.commit(schema(grown), put(grown, **order(9), city="Ulm"))
    registered.write()
    registered.compact()
    assert ("city", "string", None) in shown(unity.tables["main.public.orders"])

    unity.tables.clear()  # a pipeline that starts again looks once
    registered.writer.close()
    registered.open().finish()
    assert "main.public.orders" in unity.tables


def test_a_catalog_that_is_away_is_tried_again_and_shown(
    registered: Lake,
    unity: UnityServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "headrace")
    monkeypatch.setattr(registrar, "BACKOFF", Backoff(0.01, 0.01))
    unity.down = True
    registered.fill(range(1, 3))
    registered.compact()
    assert len(registered.rows()) == 2
    failure = registered.writer.catalog_failure()
    assert failure.startswith("public.orders is not in the catalog as it is now: http://127.0.0.1:")
    assert failure.endswith("503 down for maintenance")
    earlier = len(unity.requests)
    until(lambda: len(unity.requests) > earlier + 2)
    assert caplog.text.count("down for maintenance") == 1

    unity.down = False
    until(lambda: not registered.writer.catalog_failure())
    assert "main.public.orders" in unity.tables
    until(lambda: "catalog has all tables again" in caplog.text)


def test_a_catalog_that_never_answers_is_shown_at_the_end(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    class Silent(SparkCatalog, frozen=True, kw_only=True, tag="silent"):
        def register(self, entry: CatalogEntry) -> bool:
            return answers.wait(60)

    monkeypatch.setattr(registrar, "FINISH_SECONDS", 0.05)
    registering = registrar.Registrar(Silent(), "lake")
    registering.offer_stored("public", "orders", orders.folder)
    registering.finish()
    found = registering.failure(), list(caplog.messages)
    registering.close()
    answers.set()
    reason = "public.orders is not in the catalog as it is now: no answer within 0 seconds"
    assert found == (reason, [f"sink=lake catalog={reason}"])


def test_a_history_is_registered_under_the_name_of_its_sink(
    lake: Lake, unity: UnityServer, tmp_path: Path
) -> None:
    path = str(tmp_path / "audit")
    sink = History(name="audit", path=path, catalog=catalog_of(unity, schema="lake"))
    writer = sink.open("query-1")
    changes = lake.spark.read.format("headrace").load(path=str(lake.log.path))
    writer.write(changes, 0)
    writer.maintain()
    writer.finish()
    writer.close()
    names = [each[0] for each in shown(unity.tables["main.lake.audit"])]
    assert {"sequence", "key", "before", "after", "day"} <= set(names)
    assert [each.ok for each in sink.check()] == [True, True]
