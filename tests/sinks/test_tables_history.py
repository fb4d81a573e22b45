"""`keep: history`: every version of a row, with the time it was valid."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.change.event import Column, Op
from tests.sinks.lake import ORDERS, Lake, Row, put, remove, schema, truncate


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(spark, tmp_path, keep="history")
    yield made
    made.log.close()


def order(number: int, status: str, note: str = "-") -> Row:
    return {"id": number, "status": status, "amount": "1.00", "note": note}


def versions(lake: Lake, number: int) -> list[Row]:
    """The versions of a row, oldest first."""
    rows = [row for row in lake.rows(own=True) if row["id"] == number]
    return sorted(rows, key=lambda row: row["_sequence"])


def follow_one_another(rows: list[Row]) -> bool:
    """Whether each version begins when the one before it ends."""
    ends = [row["_valid_to"] for row in rows]
    return ends[:-1] == [row["_valid_from"] for row in rows[1:]]


def test_each_version_ends_when_the_next_begins(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1, "new")), put(orders, **order(2, "new")))
    lake.write()
    lake.commit(put(orders, Op.UPDATE, **order(1, "paid")))
    lake.commit(put(orders, Op.UPDATE, **order(1, "sent")))
    lake.write()
    rows = versions(lake, 1)
    assert [row["status"] for row in rows] == ["new", "paid", "sent"]
    assert [row["_current"] for row in rows] == [False, False, True]
    assert follow_one_another(rows)
    assert rows[-1]["_valid_to"] is None
    assert [row["_current"] for row in versions(lake, 2)] == [True]


def test_a_deleted_row_stays_as_past(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1, "new")))
    lake.write()
    lake.commit(remove(orders, id=1))
    lake.commit(put(orders, **order(1, "again")))
    lake.write()
    rows = versions(lake, 1)
    assert [row["status"] for row in rows] == ["new", "again"]
    assert rows[0]["_valid_to"] < rows[1]["_valid_from"]
    assert [row["_current"] for row in rows] == [False, True]


def test_what_a_transaction_did_on_its_way_is_no_version(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1, "a")), put(orders, Op.UPDATE, **order(1, "b")))
    lake.write()
    assert [row["status"] for row in versions(lake, 1)] == ["b"]


def test_a_row_in_part_completes_each_version(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1, "new", "long")))
    lake.write()
    lake.commit(put(orders, Op.UPDATE, id=1, status="paid", amount="1.00"))
    lake.commit(put(orders, Op.UPDATE, id=1, status="sent", amount="1.00"))
    lake.write()
    rows = versions(lake, 1)
    assert [(row["status"], row["note"]) for row in rows] == [
        ("new", "long"),
        ("paid", "long"),
        ("sent", "long"),
    ]


def test_a_truncate_ends_every_row(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1, "new")), put(orders, **order(2, "new")))
    lake.write()
    lake.commit(put(orders, Op.UPDATE, **order(1, "paid")))
    lake.commit(truncate(orders))
    lake.commit(put(orders, **order(2, "back")))
    lake.write()
    assert [(row["status"], row["_current"]) for row in versions(lake, 1)] == [
        ("new", False),
        ("paid", False),
    ]
    assert [(row["status"], row["_current"]) for row in versions(lake, 2)] == [
        ("new", False),
        ("back", True),
    ]


def test_a_repeated_batch_adds_no_version(lake: Lake) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1, "new")))
    lake.write()
    lake.commit(put(orders, Op.UPDATE, **order(1, "paid")))
    lake.write()
    before = lake.rows(own=True)
    lake.open()
    lake.writer.write(lake.changes(0, 2), 1)
    assert lake.rows(own=True) == before


def test_a_truncate_ends_rows_without_a_key_too(lake: Lake) -> None:
    notes = lake.table("orders", [Column("id", "bigint"), Column("status", "text")])
    lake.commit(put(notes, id=1, status="a"), put(notes, id=1, status="a"))
    lake.write()
    lake.commit(put(notes, id=1, status="b"))
    lake.commit(truncate(notes))
    lake.commit(put(notes, id=1, status="c"))
    lake.write()
    rows = versions(lake, 1)
    assert [(row["status"], row["_current"]) for row in rows] == [
        ("a", False),
        ("a", False),
        ("b", False),
        ("c", True),
    ]
    assert len({row["_valid_to"] for row in rows[:3]}) == 1
    assert rows[0]["_valid_to"] < rows[3]["_valid_from"]


def test_past_versions_in_files_of_others_stay_as_they_are(lake: Lake) -> None:
    """OPTIMIZE by another tool puts versions of all ages together, as did earlier Headraces."""
    orders = lake.table("orders")
    lake.commit(*(put(orders, **order(n, "new")) for n in range(4)))
    lake.write()
    for status in ("paid", "sent"):
        lake.commit(*(put(orders, Op.UPDATE, **order(n, status)) for n in range(4)))
        lake.write()
    assert lake.delta().optimize.compact()["numFilesAdded"] == 1
    lake.open()
    before = versions(lake, 1)
    # A wider type has all files written anew.
    wider = lake.table(
        "orders", [ORDERS[0], ORDERS[1], Column("amount", "numeric(20,4)"), ORDERS[3]]
    )
    lake.commit(schema(wider), put(wider, Op.UPDATE, **order(1, "back")))
    lake.write()
    after = versions(lake, 1)
    assert [row["status"] for row in after] == ["new", "paid", "sent", "back"]
    assert [row["_valid_to"] for row in after[:2]] == [row["_valid_to"] for row in before[:2]]
    assert follow_one_another(after)
