"""Comments of the source's tables and columns are in the metadata of their Delta tables."""

from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headrace.change.event import Column, Table
from headrace.secret import Secret
from headrace.sinks.lake.deltalog import DeltaLog
from headrace.sinks.lake.storage import Folder
from headrace.testing import PostgresDatabase
from headrace.transforms import Mask
from headrace.transforms.rules import TableTransform
from tests.sinks.lake import ORDERS, Lake, order, put, schema, truncate
from tests.sources.capturing import captured

NOTE = 'it\'s "free"\ntext \U0001f600'
MASK = Mask(Secret("a key of sixteen or more"))


def commented(lake: Lake, comment: str, **comments: str) -> Table:
    """The table of orders in a version that has these comments."""
    columns = tuple(
        msgspec.structs.replace(each, comment=comments.get(each.name, "")) for each in ORDERS
    )
    plain = msgspec.structs.replace(lake.table("orders", columns), version=0)
    return lake.log.register(msgspec.structs.replace(plain, comment=comment))


def found(table: DeltaTable) -> tuple[str | None, dict[str, str]]:
    """The description of a Delta table, and the comments of its columns, as delta-rs reads them."""
    fields = table.schema().fields
    comments = {
        each.name: each.metadata["comment"] for each in fields if "comment" in each.metadata
    }
    return table.metadata().description, comments


def stored_comments(lake: Lake) -> tuple[str | None, dict[str, str]]:
    return found(lake.delta())


def test_comments_travel_from_the_server_to_the_delta_table(
    pg: PostgresDatabase, spark: SparkSession, tmp_path: Path
) -> None:
    pg.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, status text);"
        "INSERT INTO orders VALUES (1, 'new');"
        "COMMENT ON TABLE orders IS 'what was bought';"
        "COMMENT ON COLUMN orders.status IS 'its state'"
    )
    with captured(pg, tmp_path, ddl=True) as feed:
        copied = feed.log.latest_sequence
        pg.execute(
            "COMMENT ON COLUMN orders.status IS NULL; COMMENT ON COLUMN orders.id IS 'number'"
        )
        feed.until_caught_up()
    lake = Lake(spark, tmp_path)
    lake.write(copied)
    assert stored_comments(lake) == ("what was bought", {"status": "its state"})
    version, files = lake.delta().version(), lake.delta().file_uris()
    lake.write()
    assert stored_comments(lake) == ("what was bought", {"id": "number"})
    assert lake.delta().version() == version + 1, "one commit of metadata"
    assert lake.delta().file_uris() == files
    lake.log.close()


def test_comments_follow_the_source_and_stay_out_of_the_files(lake: Lake) -> None:
    orders = commented(lake, "bought", status="state", note=NOTE)
    lake.commit(put(orders, **order(1)))
    lake.write()
    assert stored_comments(lake) == ("bought", {"status": "state", "note": NOTE})

    orders = commented(lake, "", status="its state")
    lake.commit(schema(orders), put(orders, **order(2)))
    lake.write()
    assert stored_comments(lake) == (None, {"status": "its state"})
    assert lake.rows() == lake.expected()
    assert "headrace.comments" in lake.delta().metadata().configuration
    for path in lake.path.rglob("*.parquet"):
        assert b"state" not in str(pq.read_schema(path).metadata).encode()
        assert not any(each.metadata for each in pq.read_schema(path))
    assert not any(each.metadata for each in lake.target.delta.schema), "what files are made of"

    version = lake.delta().version()
    lake.commit(put(orders, **order(3)))
    lake.write()
    assert lake.delta().version() == version + 1, "the rows, and no comment anew"


def test_comments_stay_when_columns_change(lake: Lake) -> None:
    lake.commit(put(commented(lake, "bought", status="state", note="free"), **order(1)))
    lake.write()
    kept = [
        Column("id", "bigint", key=True, comment="number"),
        Column("status", "text", comment="state"),
        Column("amount", "numeric(14,2)"),  # wider
        Column("at", "date", comment="when"),  # new, and note is gone
    ]
    table = msgspec.structs.replace(lake.table("orders", kept), version=0, comment="bought")
    table = lake.log.register(table)
    lake.commit(schema(table), put(table, id=2, status="new", amount="1.00", at="2025-01-01"))
    lake.write()
    expected = ("bought", {"id": "number", "status": "state", "at": "when"})
    assert stored_comments(lake) == expected
    # A table that is emptied gets its new columns with its first rows.
    table = msgspec.structs.replace(
        table, columns=(*kept[:2], Column("at", "text", comment="as text")), version=0
    )
    table = lake.log.register(table)
    lake.commit(truncate(table), put(table, id=3, status="new", at="now"))
    lake.write()
    assert stored_comments(lake) == ("bought", expected[1] | {"at": "as text"})
    assert lake.rows() == [{"id": 3, "status": "new", "at": "now"}]


def test_what_others_write_stays_where_the_source_has_no_comment(lake: Lake) -> None:
    lake.commit(put(commented(lake, "", status="state"), **order(1)))
    lake.write()
    delta = lake.delta()
    delta.alter.set_table_description("for finance")
    delta.alter.set_column_metadata("note", {"comment": "theirs"})
    delta.alter.set_column_metadata("status", {"comment": "theirs"})
    delta.alter.set_table_properties({"headrace.comments": "theirs"}, raise_if_not_exists=False)
    orders = commented(lake, "", status="state", amount="EUR")
    orders = lake.table("orders", (*orders.columns, Column("at", "date")))
    lake.commit(put(orders, **order(2), at=None))
    lake.write()
    expected = {"status": "state", "note": "theirs", "amount": "EUR"}
    assert stored_comments(lake) == ("for finance", expected)
    assert lake.writer.failed_tables() == []


def test_rows_of_an_earlier_version_bring_no_older_comment(lake: Lake) -> None:
    before = commented(lake, "old")
    lake.commit(put(before, **order(1)))
    lake.write()
    lake.commit(put(commented(lake, "new"), **order(2)))
    lake.write()
    lake.commit(put(before, **order(3)))
    lake.write()
    assert stored_comments(lake)[0] == "new"


def test_a_column_that_is_selected_or_masked_keeps_its_comment(
    spark: SparkSession, tmp_path: Path
) -> None:
    shaped = TableTransform(select=("id", "status", "note"), mask={"note": MASK})
    lake = Lake(spark, tmp_path, transforms={"public.orders": shaped})
    orders = commented(lake, "bought", status="state", amount="EUR", note="free")
    lake.commit(put(orders, **order(1)))
    lake.write()
    assert lake.writer.failed_tables() == []
    assert stored_comments(lake) == ("bought", {"status": "state", "note": "free"})
    lake.log.close()


def test_a_checkpoint_has_the_comments(lake: Lake) -> None:
    lake.commit(put(commented(lake, "bought", note=NOTE), **order(1)))
    lake.write()
    lake.target.delta.checkpoint()
    folder = lake.path / "public" / "orders"
    version = lake.delta().version()
    for commit in (folder / "_delta_log").glob("*.json"):
        commit.unlink()
    state: Any = DeltaLog(Folder.of(str(folder), {})).read()
    assert (state.version, state.metadata.description) == (version, "bought")
    assert found(DeltaTable(str(folder))) == ("bought", {"note": NOTE})
