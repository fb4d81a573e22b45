"""`option("table", …)`: one table's changes with the table's own columns."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from headrace.change.event import BeforeKind, Column, Op
from headrace.errors import ColumnsChanged, ConfigError, DecodeError
from headrace.pipeline.options import Options
from headrace.pipeline.reading import DiskLog, SequenceRange, read_typed
from headrace.pipeline.source import ChangeStreamReader
from headrace.pipeline.transforms import log_table
from headrace.pipeline.typed import TypedTable
from headrace.serve import BackgroundServer, ServerSettings, create_app
from tests.sinks.lake import ORDERS, Shop, change, order, put, remove, schema, truncate

OWN = ["_change_type", "_commit_version", "_commit_timestamp", "_sequence", "_absent", "_rescued"]
COMMENTED = (ORDERS[0], msgspec.structs.replace(ORDERS[1], comment="new, paid"), *ORDERS[2:])
WIDER = (*ORDERS, Column("seen", "timestamp with time zone"))


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.log.close()


def found(shop: Shop, **given: str) -> TypedTable:
    options = Options.read({"path": str(shop.log.path), "table": "public.orders", **given})
    return TypedTable.versions(options, shop.log.tables())[-1]


def rows(shop: Shop, table: TypedTable | None = None, **given: str) -> list[dict[str, Any]]:
    """All changes, as a task reads them."""
    path, log = str(shop.log.path), shop.log
    options = Options.read({"path": path, "table": "public.orders", **given})
    wanted = SequenceRange(log.epoch, log.first_sequence - 1, log.latest_sequence)
    batches = read_typed(DiskLog(path), wanted, options, table or found(shop, **given))
    return [row for batch in batches for row in batch.to_pylist()]


def briefly(given: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["_change_type"], row["id"], row["status"], row["_sequence"]) for row in given]


def test_changes_have_the_columns_of_the_table_and_ours_behind_them(shop: Shop) -> None:
    orders = shop.table("orders")
    shop.commit(put(orders, **order(1)), put(orders, **order(2)))
    shop.commit(put(orders, Op.UPDATE, id=1, status="paid"), remove(orders, id=2))
    shop.commit(truncate(orders))
    assert found(shop).schema.names == ["id", "status", "amount", "note", *OWN]
    assert found(shop).schema.field("amount").type == pa.decimal128(12, 2)
    all_rows = rows(shop)
    assert briefly(all_rows) == [
        ("insert", 1, "new", 1),
        ("insert", 2, "new", 2),
        ("update_postimage", 1, "paid", 3),
        ("delete", 2, None, 4),
        ("truncate", None, None, 5),
    ]
    assert [row["_commit_version"] for row in all_rows] == [1, 1, 3, 3, 5]
    assert all_rows[0]["amount"] == Decimal("1.00")
    assert all_rows[2]["_absent"] == ["amount", "note"]
    assert all_rows[3]["_absent"] == ["status", "amount", "note"], "a delete with the key alone"
    assert abs((datetime.now(UTC) - all_rows[0]["_commit_timestamp"]).total_seconds()) < 600


def test_an_update_has_the_row_before_it_where_the_source_sent_all_of_it(shop: Shop) -> None:
    orders = shop.table("orders")
    image = b'{"id":1,"status":"%b","amount":"1.00","note":"n"}'
    shop.commit(
        change(
            Op.UPDATE,
            orders,
            key=b'{"id":1}',
            before=image % b"new",
            before_kind=BeforeKind.FULL,
            after=image % b"paid",
        )
    )
    assert briefly(rows(shop)) == [
        ("update_preimage", 1, "new", 1),
        ("update_postimage", 1, "paid", 1),
    ]


def test_an_update_of_the_key_says_which_row_is_gone(shop: Shop) -> None:
    orders = shop.table("orders")
    shop.commit(put(orders, Op.UPDATE, was={"id": 1}, **order(2)))
    [before, after] = rows(shop)
    assert (before["_change_type"], before["id"]) == ("update_preimage", 1)
    assert before["_absent"] == ["status", "amount", "note"]
    assert (after["_change_type"], after["id"], after["_absent"]) == ("update_postimage", 2, [])


def test_rows_of_a_snapshot_are_inserts_of_one_commit(shop: Shop) -> None:
    orders = shop.table("orders")
    shop.snapshot(orders, [order(number) for number in range(3)])
    shop.commit(put(orders, **order(7)))
    assert briefly(rows(shop)) == [
        *(("insert", number, "new", number + 1) for number in range(3)),
        ("insert", 7, "new", 4),
    ]
    assert [row["_commit_version"] for row in rows(shop)] == [1, 1, 1, 4]
    assert {tuple(row["_absent"]) for row in rows(shop)} == {()}


@pytest.mark.requirement("P-05")
def test_a_value_that_does_not_fit_is_null_with_its_text_beside_it(shop: Shop) -> None:
    odd = shop.table("orders", (Column("until", "date", key=True), *ORDERS[1:]))
    shop.snapshot(odd, [{**order(1), "until": "infinity"}])
    shop.commit(put(odd, until="2024-01-01", status="new", amount="NaN", note=""))
    copied, streamed = rows(shop, columns="until,amount,_rescued")
    assert copied == {
        "until": None,
        "amount": Decimal("1.00"),
        "_rescued": '{"until":"infinity"}',
    }
    assert (streamed["amount"], streamed["_rescued"]) == (None, '{"amount":"NaN"}')


def test_other_tables_and_messages_are_left_out(shop: Shop) -> None:
    orders, customers = shop.table("orders"), shop.table("customers")
    shop.commit(put(customers, **order(1)), put(orders, **order(2)), schema(orders))
    shop.snapshot(customers, [order(5)])
    assert [row["id"] for row in rows(shop)] == [2]


def test_earlier_changes_are_shown_with_the_newest_columns(shop: Shop) -> None:
    narrow = (Column("id", "integer", key=True), *ORDERS[1:], Column("gone", "text"))
    shop.commit(put(shop.table("orders", narrow), **order(1), gone="x"))
    shop.snapshot(shop.table("orders", narrow), [order(2) | {"gone": "x"}])
    shop.commit(put(shop.table("orders", WIDER), **order(3), seen="2026-01-31T10:30:00+00:00"))
    read = rows(shop)
    assert [row["id"] for row in read] == [1, 2, 3]
    assert [row["seen"] for row in read] == [None, None, datetime(2026, 1, 31, 10, 30, tzinfo=UTC)]
    assert "gone" not in read[0]


def test_an_earlier_value_that_the_new_type_cannot_hold_is_an_error_without_it(shop: Shop) -> None:
    shop.commit(put(shop.table("orders"), **order(1, "secret")))
    numbers = (ORDERS[0], Column("status", "integer"), *ORDERS[2:])
    shop.commit(put(shop.table("orders", numbers), **(order(2) | {"status": 5})))
    with pytest.raises(
        DecodeError, match=r"column .status. of public\.orders has an earlier"
    ) as raised:
        rows(shop)
    assert "secret" not in str(raised.value)
    assert [row["status"] for row in rows(shop, asText="status")] == ["secret", "5"]


def test_later_columns_end_the_query(shop: Shop) -> None:
    shop.commit(put(shop.table("orders"), **order(1)))
    begun = found(shop)
    same = shop.log.register(
        begun.table.__class__(
            **{
                **{name: getattr(begun.table, name) for name in begun.table.__struct_fields__},
                "relation": 8,
            }
        )
    )
    shop.commit(put(same, **order(2)))
    assert [row["id"] for row in rows(shop, begun)] == [1, 2]
    shop.commit(put(shop.table("orders", WIDER), **order(3), seen=None))
    with pytest.raises(ColumnsChanged, match="by sequence 3: seen timestamp with time zone is new"):
        rows(shop, begun)
    assert [row["id"] for row in rows(shop)] == [1, 2, 3]


def test_a_comment_ends_no_query(shop: Shop) -> None:
    shop.commit(put(shop.table("orders"), **order(1)))
    begun = found(shop)
    shop.commit(put(shop.table("orders", COMMENTED), **order(2)))
    assert [row["id"] for row in rows(shop, begun)] == [1, 2]


def test_columns_are_chosen(shop: Shop) -> None:
    shop.commit(put(shop.table("orders"), **order(1)))
    assert rows(shop, columns="_sequence,id") == [{"_sequence": 1, "id": 1}]


def test_a_condition_chooses_changes_by_any_column(shop: Shop) -> None:
    orders = shop.table("orders")
    shop.snapshot(orders, [order(number) for number in range(3)])
    shop.commit(put(orders, Op.UPDATE, id=1, status="paid"), remove(orders, id=2))
    shop.commit(truncate(orders))
    condition = "_change_type <> 'insert' OR ID >= 2 AND amount < 1.5"
    assert rows(shop, where=condition, columns="id") == [{"id": id_} for id_ in (2, 1, 2, None)]
    assert rows(shop, where="status = 'paid'", columns="id,note") == [{"id": 1, "note": None}]


def test_a_table_of_the_log_is_found_by_its_name(shop: Shop) -> None:
    shop.table("orders")
    shop.table("orders", WIDER)
    assert log_table("public.orders", path=str(shop.log.path)).columns == WIDER


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"where": "statu = 'x'"}, "the option where: there is no column statu; there are: id,"),
        ({"where": "status >"}, "the option where: .* is no condition"),
        ({"table": "public.order"}, "the log has no table public.order; there are: public.orders"),
        ({"table": "orders"}, "the option table must be schema.table, not 'orders'"),
        ({"columns": "id,op"}, "the option columns names 'op'; there are: id, status, amount"),
        ({"asText": "ids"}, "the option asText names 'ids'; there are: id, status, amount, note"),
        ({"tables": "public.*"}, "only one of the options table and tables"),
        ({"source": "other"}, "the log has no table public.orders"),
    ],
)
def test_what_does_not_fit_is_refused(shop: Shop, given: dict[str, str], message: str) -> None:
    shop.commit(put(shop.table("orders"), **order(1)))
    with pytest.raises(ConfigError, match=message):
        found(shop, **given)


def test_a_table_that_is_dropped_is_empty(shop: Shop) -> None:
    orders = shop.table("orders")
    dropped = change(Op.SCHEMA, orders, after=b'{"ddl":"DROP TABLE orders","dropped":true}')
    shop.commit(put(orders, **order(1)), schema(orders), dropped)
    assert briefly(rows(shop)) == [("insert", 1, "new", 1), ("truncate", None, None, 3)]


def test_a_stream_does_not_begin_in_the_future(shop: Shop) -> None:
    shop.commit(put(shop.table("orders"), **order(1)))
    for moment, refused in ((datetime.now(UTC), False), (datetime(9999, 1, 1, tzinfo=UTC), True)):
        given = {"path": str(shop.log.path), "startingTimestamp": moment.isoformat()}
        reader = ChangeStreamReader(Options.read(given))
        with pytest.raises(ConfigError, match="to come") if refused else nullcontext():
            assert reader.initialOffset()["sequence"] == 1


def test_moments_are_found_in_the_log(shop: Shop) -> None:
    orders = shop.table("orders")
    assert shop.log.since(0) == 1
    moments = []
    for number in range(50):
        shop.commit(put(orders, **order(2 * number)), put(orders, **order(2 * number + 1)))
        moments.append(shop.log.read(2 * number, limit=1)[0].transaction.captured_at)
    for number, moment in enumerate(moments):
        first = moments.index(moment)
        assert shop.log.since(moment) == 2 * first + 1, number
    assert shop.log.since(moments[-1] + 1) == 101
    shop.log.trim(40, force=True)
    assert shop.log.since(0) == shop.log.first_sequence


# --- on Spark ------------------------------------------------------------------------------------


def read(spark: SparkSession, **options: str) -> DataFrame:
    return spark.read.format("headrace").options(table="public.orders", **options).load()


def serving(shop: Shop, stack: ExitStack) -> str:
    settings = ServerSettings(port=0)
    app = create_app(shop.log, statuses=list, copy_again=None, settings=settings)
    return stack.enter_context(BackgroundServer(app, settings)).url


@pytest.mark.parametrize("remote", [False, True])
def test_spark_reads_a_table_from_a_moment_to_another(
    spark: SparkSession, shop: Shop, *, remote: bool
) -> None:
    orders = shop.table("orders", COMMENTED)
    for number in range(6):
        shop.commit(put(orders, **order(number)))
    moments = [each.transaction.captured_at for each in shop.log.read(0)]
    with ExitStack() as stack:
        where = {"url": serving(shop, stack)} if remote else {"path": str(shop.log.path)}
        frame = read(spark, **where)
        assert frame.schema.simpleString().startswith(
            "struct<id:bigint,status:string,amount:decimal(12,2),note:string,_change_type:string"
        )
        comments = {each.name: each.metadata for each in frame.schema if each.metadata}
        assert comments == {"status": {"comment": "new, paid"}}
        assert sorted(row.id for row in frame.where("amount > 0").collect()) == list(range(6))
        begin, end = (
            datetime.fromtimestamp(moments[at] / 1_000_000, UTC).isoformat() for at in (2, 4)
        )
        some = read(spark, **where, startingTimestamp=begin, endingTimestamp=end)
        expected = [at for at, moment in enumerate(moments) if moments[2] <= moment < moments[4]]
        assert sorted(row.id for row in some.collect()) == expected


def test_a_stream_ends_with_new_columns_and_goes_on_with_them(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []

    def start() -> Any:
        changes = spark.readStream.format("headrace").option("table", "public.orders")
        return (
            changes.option("path", str(shop.log.path))
            .load()
            .writeStream.foreachBatch(
                lambda frame, _: seen.extend(row.asDict() for row in frame.collect())
            )
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(processingTime="0 seconds")
            .start()
        )

    shop.commit(put(shop.table("orders"), **order(1)))
    query = start()
    try:
        query.processAllAvailable()
        assert [row["id"] for row in seen] == [1]
        shop.commit(put(shop.table("orders", WIDER), **order(2), seen="2026-01-31T10:30:00+00:00"))
        with pytest.raises(PySparkException, match=r"the columns of public\.orders have changed"):
            query.awaitTermination(60)
    finally:
        query.stop()
    query = start()
    try:
        query.processAllAvailable()
        assert [(row["id"], "seen" in row) for row in seen] == [(1, False), (2, True)]
    finally:
        query.stop()


def test_a_filter_on_sequences_reads_that_part_alone(spark: SparkSession, shop: Shop) -> None:
    orders = shop.table("orders")
    for number in range(1, 11):
        shop.commit(put(orders, **order(number)))
    shop.log.trim(5, force=True)
    some = read(spark, path=str(shop.log.path), startingSequence="1").where("_sequence >= 7")
    with pytest.raises(PySparkException, match="ChangesLost"):  # the whole log is read
        some.collect()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        some = read(spark, path=str(shop.log.path), startingSequence="1").where("_sequence >= 7")
        assert sorted(row.id for row in some.collect()) == [7, 8, 9, 10]
        one = read(spark, path=str(shop.log.path)).where("_sequence = 8 AND status = 'new'")
        assert [row.id for row in one.collect()] == [8]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
