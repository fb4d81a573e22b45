"""The tables sink: after every batch each Delta table equals its source."""

from decimal import Decimal
from pathlib import Path

import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from headrace.change.event import Column, Op
from headrace.sinks import Progress
from headrace.sinks.lake.plan import TableRef
from headrace.sinks.tables.ledger import TablesLedger
from tests.deltas import stored
from tests.sinks.lake import ORDERS, Lake, Row, change, put, remove, schema, truncate


def order(number: int, status: str = "new", amount: str = "1.00", note: str = "-") -> Row:
    return {"id": number, "status": status, "amount": amount, "note": note}


@pytest.mark.requirement("S2-22")
def test_inserts_updates_and_deletes_end_in_the_tables(lake: Lake) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(put(orders, **order(1)), put(customers, **order(7)), put(orders, **order(2)))
    assert lake.write() == 3
    lake.commit(put(orders, Op.UPDATE, **order(1, "paid", "2.50")), remove(orders, id=2))
    lake.commit(put(orders, **order(3)))
    lake.write()
    assert lake.rows() == lake.expected()
    assert lake.rows("customers") == lake.expected("customers")
    assert [row["amount"] for row in lake.rows() if row["id"] == 1] == [Decimal("2.50")]


def test_a_repeated_batch_changes_nothing(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)), put(orders, **order(2)))
    lake.write()
    lake.commit(remove(orders, id=1))
    lake.write()
    version = lake.delta().version()
    lake.open()  # as after a crash that came before Spark noted the batch as done
    lake.writer.write(lake.changes(0, 2), 0)
    lake.writer.write(lake.changes(2, 3), 1)
    assert lake.delta().version() == version
    assert lake.rows() == lake.expected()


def test_a_batch_without_a_change_of_a_table_costs_no_commit(lake: Lake) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(put(orders, **order(1)), put(customers, **order(1)))
    lake.write()
    version = lake.delta("customers").version()
    lake.commit(put(orders, **order(2)))
    lake.write()
    assert lake.delta("customers").version() == version


def test_a_moved_row_leaves_its_old_key(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(*(put(orders, **order(n)) for n in range(20)))
    lake.write()
    lake.commit(put(orders, Op.UPDATE, was={"id": 3}, **order(103, "moved")))
    lake.write()
    assert lake.rows() == lake.expected()
    assert {row["id"] for row in lake.rows()} == {*range(20), 103} - {3}


def test_a_moved_row_that_came_in_part_keeps_what_it_had(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(*(put(orders, **order(n, note=f"n{n}")) for n in range(20)))
    lake.write()
    part = {"status": "moved", "amount": "3.00"}
    lake.commit(put(orders, Op.UPDATE, was={"id": 3}, id=103, **part))
    lake.commit(put(orders, Op.UPDATE, was={"id": 103}, id=203, **part))
    lake.write()
    assert lake.rows() == lake.expected()
    assert [row["note"] for row in lake.rows() if row["id"] == 203] == ["n3"]


def test_absent_columns_keep_the_value_of_the_table(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1, note="kept")), put(orders, **order(2, note="old")))
    lake.write()
    lake.commit(put(orders, Op.UPDATE, id=1, status="paid", amount="1.00"))
    lake.commit(put(orders, Op.UPDATE, id=2, status="paid", amount="1.00", note="new"))
    lake.commit(put(orders, Op.UPDATE, id=2, status="sent", amount="9.00"))
    lake.write()
    assert lake.rows() == lake.expected()
    assert {row["id"]: row["note"] for row in lake.rows()} == {1: "kept", 2: "new"}


def test_a_truncate_is_a_barrier_within_the_batch(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)), put(orders, **order(2)))
    lake.write()
    lake.commit(put(orders, **order(3)))
    lake.commit(truncate(orders))
    lake.commit(put(orders, **order(2, "again")))
    lake.write()
    assert lake.rows() == lake.expected()
    assert [row["id"] for row in lake.rows()] == [2]


def test_columns_come_go_and_grow(lake: Lake) -> None:
    first = lake.table("orders")
    lake.commit(put(first, **order(1, note="goes")), put(first, **order(2)))
    lake.write()
    grown = [Column("id", "bigint", key=True), Column("status", "text")]
    grown += [Column("amount", "numeric(20,4)"), Column("note", "text"), Column("tag", "integer[]")]
    second = lake.table("orders", grown)
    lake.commit(schema(second), put(second, **order(3, amount="1.5000"), tag=[1, None]))
    lake.write()
    assert lake.rows() == lake.expected()
    third = lake.table("orders", [*grown[:3], grown[4]])
    lake.commit(schema(third))
    lake.write()
    assert lake.rows() == lake.expected()
    fourth = lake.table("orders", grown)
    lake.commit(schema(fourth), put(fourth, **order(4, amount="2.0000"), tag=[]))
    lake.write()
    assert lake.rows() == lake.expected()
    assert {row["id"]: row["note"] for row in lake.rows()} == {1: None, 2: None, 3: None, 4: "-"}


def test_a_change_that_cannot_be_followed_stops_one_table_until_a_full_copy(lake: Lake) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(put(orders, **order(1)), put(customers, **order(1)))
    lake.write()
    before = lake.rows()
    other = lake.table("orders", [ORDERS[0], Column("status", "integer"), *ORDERS[2:]])
    lake.commit(schema(other))
    lake.commit(put(customers, **order(2)))
    lake.write()
    (trouble,) = lake.writer.failed_tables()
    assert trouble.table == "public.orders"
    assert "status" in trouble.reason
    assert "headrace snapshot" in trouble.hint
    assert lake.rows() == before
    assert lake.rows("customers") == lake.expected("customers")
    lake.open()
    assert lake.writer.failed_tables() == [trouble]
    lake.commit(change(Op.READ, other, key=b'{"id":1}', after=b'{"id":1,"status":5}'))
    lake.write()
    assert lake.rows() == before


def test_a_full_copy_brings_a_troubled_table_back(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.write()
    said = b'{"error":"bad bytes"}'
    lake.commit(change(Op.MESSAGE, orders, after=said))
    lake.write()
    assert [each.reason for each in lake.writer.failed_tables()] == [
        "the source could not read a row: bad bytes"
    ]
    lake.commit(truncate(orders, snapshot=True))
    lake.commit(put(orders, Op.READ, **order(2)))
    lake.write()
    assert lake.writer.failed_tables() == []
    assert [row["id"] for row in lake.rows()] == [2]


def test_a_table_with_two_key_columns(lake: Lake) -> None:
    columns = [Column("a", "integer", key=True), Column("b", "text", key=True), ORDERS[1]]
    pairs = lake.table("pairs", columns)
    lake.commit(*(put(pairs, a=a, b=b, status="x") for a in range(3) for b in "xyz"))
    lake.write()
    lake.commit(put(pairs, Op.UPDATE, a=1, b="y", status="changed"), remove(pairs, a=2, b="x"))
    lake.commit(put(pairs, Op.UPDATE, was={"a": 0, "b": "z"}, a=9, b="z", status="moved"))
    lake.write()
    assert lake.rows("pairs") == lake.expected("pairs")


def test_a_table_without_a_key_takes_rows_and_stops_at_the_first_update(lake: Lake) -> None:
    columns = [Column("line", "text")]
    notes = lake.table("notes", columns)
    lake.commit(put(notes, line="a"), put(notes, line="a"))
    lake.write()
    assert [row["line"] for row in lake.rows("notes")] == ["a", "a"]
    lake.commit(change(Op.DELETE, notes, before=b'{"line":"a"}'))
    lake.write()
    assert "no key" in lake.writer.failed_tables()[0].reason


def test_files_stay_few_however_many_batches_add_rows(lake: Lake) -> None:
    orders = lake.table("orders")
    for n in range(12):
        lake.commit(put(orders, **order(n)))
        lake.write()
        lake.writer.maintain()
    assert len(lake.delta().file_uris()) < 8
    assert lake.rows() == lake.expected()


def test_another_key_within_a_batch_moves_no_row_and_loses_none(lake: Lake) -> None:
    first = lake.table("orders")
    lake.commit(*(put(first, **order(n, note=f"n{n}")) for n in range(6)))
    lake.write()
    other = [Column("id", "bigint"), *ORDERS[1:3], Column("note", "text", key=True)]
    second = lake.table("orders", other)
    lake.commit(put(first, Op.UPDATE, **order(1, "paid", note="n1")), remove(first, id=2))
    lake.commit(schema(second), put(second, Op.UPDATE, **order(3, "sent", note="n3")))
    lake.commit(remove(second, note="n4"))
    lake.write()
    assert lake.rows() == lake.expected()
    assert {row["id"]: row["status"] for row in lake.rows()} == {
        0: "new",
        1: "paid",
        3: "sent",
        5: "new",
    }


def test_a_column_that_goes_and_comes_again_in_one_batch_has_lost_its_values(lake: Lake) -> None:
    first = lake.table("orders")
    lake.commit(put(first, **order(1, note="old")), put(first, **order(2, note="old")))
    lake.write()
    second = lake.table("orders", ORDERS[:3])
    lake.commit(schema(second), put(second, Op.UPDATE, id=1, status="paid", amount="2.00"))
    lake.commit(schema(first), put(first, **order(3, note="new")))
    lake.write()
    assert lake.rows() == lake.expected()
    assert {row["id"]: row["note"] for row in lake.rows()} == {1: None, 2: None, 3: "new"}


def test_a_full_copy_follows_even_a_type_that_could_not_be_followed(lake: Lake) -> None:
    first = lake.table("orders")
    lake.commit(put(first, **order(1)))
    lake.write()
    other = lake.table("orders", [ORDERS[0], Column("status", "integer"), *ORDERS[2:]])
    lake.commit(schema(other))
    lake.write()
    assert lake.writer.failed_tables()
    row: Row = {"id": 2, "status": 5, "amount": "1.00", "note": "-"}
    lake.commit(truncate(other, snapshot=True))
    lake.commit(put(other, Op.READ, **row))
    lake.write()
    assert lake.writer.failed_tables() == []
    assert [each["status"] for each in lake.rows()] == [5]


def test_trouble_and_the_copy_that_mends_it_may_come_in_one_batch(
    lake: Lake, caplog: pytest.LogCaptureFixture
) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.write()
    lake.commit(change(Op.MESSAGE, orders, after=b'{"error":"bad bytes"}'))
    lake.commit(truncate(orders, snapshot=True))
    lake.commit(put(orders, Op.READ, **order(2)))
    lake.write()
    assert lake.writer.failed_tables() == []
    assert [row["id"] for row in lake.rows()] == [2]
    assert "changes are left out" in caplog.text


def test_no_name_of_a_table_leads_out_of_the_lake(lake: Lake) -> None:
    for name in ("../../escaped", "orders/x", "a%41", "Ä b"):
        lake.commit(put(lake.table(name), **order(1)))
    lake.write()
    assert not (lake.path.parent / "escaped").exists()
    assert sorted(path.name for path in (lake.path / "public").iterdir()) == [
        "..~2F..~2Fescaped",
        "a~2541",
        "orders~2Fx",
        "~C3~84~20b",
    ]


def test_a_moment_at_the_end_of_time_has_its_place(lake: Lake) -> None:
    columns = [ORDERS[0], Column("until", "timestamp with time zone")]
    terms = lake.table("terms", columns)
    lake.commit(put(terms, id=1, until="9999-12-31T23:59:59.999999+00:00"))
    lake.write()
    assert [row["until"].year for row in lake.rows("terms")] == [9999]


def test_whoever_adopts_the_lake_owns_also_the_tables_that_do_not_change(lake: Lake) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(put(orders, **order(1)), put(customers, **order(1)))
    lake.write()
    lake.open("query-2", adopt=True)
    lake.commit(put(orders, **order(2)))
    lake.write()
    lake.open("query-2")
    lake.commit(put(customers, **order(2)))
    lake.write()
    assert lake.rows("customers") == lake.expected("customers")


@pytest.mark.parametrize("kind", ["date", "integer"])
def test_a_key_without_a_value_is_one_too(lake: Lake, kind: str) -> None:
    """As the zero date of MySQL, or what SQLite permits."""
    days = lake.table("days", [Column("day", kind, key=True), Column("name", "text")])
    others = ["1970-01-01", "2020-01-01"] if kind == "date" else [0, 7]
    lake.commit(*(put(days, day=day, name="a") for day in [None, *others]))
    lake.write()
    lake.commit(put(days, Op.UPDATE, day=None, name="b"))
    lake.write()
    assert lake.rows("days") == lake.expected("days")
    lake.commit(remove(days, day=None))
    lake.write()
    assert lake.rows("days") == lake.expected("days")


@pytest.mark.parametrize("columns", [1, 2])
def test_an_array_may_be_the_key(lake: Lake, columns: int) -> None:
    key = [Column("path", "integer[]", key=True), Column("tags", "text[]", key=True)][:columns]
    nodes = lake.table("nodes", [*key, Column("name", "text")])
    whole: Row = {"path": [1, 2], "tags": ["a", None]}
    row = {column.name: whole[column.name] for column in key}
    lake.commit(put(nodes, **row, name="a"))
    lake.write()
    lake.commit(put(nodes, Op.UPDATE, **row, name="b"))
    lake.write()
    assert lake.writer.failed_tables() == []
    assert [each["name"] for each in lake.rows("nodes")] == ["b"]


def test_rows_of_a_snapshot_with_equal_chosen_keys_become_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, tmp_path, keys={"public.tags": ("name",)})
    tags = lake.table("tags", [Column("name", "text"), Column("note", "text")])
    lake.snapshot(tags, [{"name": "a", "note": note} for note in ("x", "y")])
    lake.write()
    assert lake.rows("tags") == [{"name": "a", "note": "y"}]
    lake.log.close()


def test_a_table_that_another_tool_has_spoilt_fails_alone(lake: Lake) -> None:
    orders, others = lake.table("orders"), lake.table("others")
    lake.commit(put(orders, **order(1)), put(others, **order(1)))
    lake.write()
    write_deltalake(lake.delta(), stored(lake.delta()), mode="append")
    lake.commit(put(orders, **order(2)), put(others, **order(2)))
    lake.write()
    assert [failed.table for failed in lake.writer.failed_tables()] == ["public.orders"]
    assert lake.rows("others") == lake.expected("others")
    lake.commit(truncate(orders, snapshot=True), put(orders, **order(3)))
    lake.write()
    assert lake.writer.failed_tables() == []
    assert lake.rows() == lake.expected()


def test_rows_that_another_tool_has_written_anew_complete_those_in_part(lake: Lake) -> None:
    """The DELETE of delta-rs leaves texts of another type in its files."""
    orders = lake.table("orders")
    lake.commit(*(put(orders, **order(n, note=f"n{n}")) for n in range(5)))
    lake.write()
    lake.delta().delete("id = 3")
    lake.open()
    lake.commit(put(orders, Op.UPDATE, id=4, status="paid", amount="2.00"))
    lake.write()
    assert lake.writer.failed_tables() == []
    assert lake.rows() == [row for row in lake.expected() if row["id"] != 3]


def test_the_ledger_has_room_for_thousands_of_tables(lake: Lake) -> None:
    names = [f"table_{number}_{'x' * 40}" for number in range(1_500)]
    ledger = TablesLedger.open(lake.sink.folder, "query-1", adopt=False)
    for name in names:
        ledger.note(TableRef("shop", "public", name), None)
    ledger.reach(Progress(lake.log.epoch, 1_500))
    ledger.save()
    again = TablesLedger.open(lake.sink.folder, "query-1", adopt=False)
    assert len(list(again.refs)) == 1_500
