"""`verify` compares every row of a lake's tables with the source, and names what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from headrace.errors import ConfigError
from headrace.pipeline.verify_tables import state_at
from headrace.sinks.lake.delta import applied_mark
from headrace.sinks.lake.deltalog import DeltaLog
from headrace.sinks.lake.storage import Folder
from headrace.sinks.tables.codes import value_codes
from headrace.sinks.tables.compare import RowDifference
from headrace.sinks.verification import TableOutcome
from headrace.testing import Place, wait_until
from headrace.transforms import TableTransform
from tests.conftest import Servers
from tests.pipeline.verifying import FollowingLake, places_of, run
from tests.sinks.deltas import Written
from tests.sources.capturing import postgres
from tests.sources.redacting import MASK

pytestmark = pytest.mark.requirement("P-11")

KINDS = ("postgres", "postgres_events", "mysql", "sqlite")
BEFORE = (
    "CREATE TABLE items (id integer PRIMARY KEY, name varchar(9), price decimal(12,2), ratio real)",
    "CREATE TABLE pairs (a integer, b varchar(9), n integer, PRIMARY KEY (a, b))",
    "INSERT INTO items VALUES (1, 'one', 1.10, 0.5), (2, 'two', 2.20, 0.25), (3, NULL, NULL, NULL)",
    "INSERT INTO items VALUES (4, 'four', 4.40, 4), (5, 'five', 5.50, 5)",
    "INSERT INTO pairs VALUES (1, 'x', 1), (1, 'y', 2)",
)


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    """Fresh databases."""
    with ExitStack() as stack:
        yield places_of(stack, request, tmp_path)


@pytest.mark.live
@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_behind_our_back_is_named_by_its_key_and_columns(
    kind: str, places: Callable[[str], Place], spark: SparkSession, tmp_path: Path
) -> None:
    place = places(kind)
    run(place, *BEFORE)
    place.altered()
    # Without vectors, so that delta-rs can damage the tables.
    lake = FollowingLake(spark, tmp_path, place.source(), deletes="rewrite")
    with lake.running():
        run(place, "UPDATE items SET name = 'zwei' WHERE id = 2", "DELETE FROM pairs WHERE n = 2")
        sound = lake.verify().verification
        assert [(each.table, each.outcome, each.rows) for each in sound.tables] == [
            (f"{place.schema}.items", TableOutcome.EQUAL, 5),
            (f"{place.schema}.pairs", TableOutcome.EQUAL, 1),
        ]
        items = DeltaTable(str(lake.path / place.schema / "items"))
        items.delete("id = 1")
        items.update({"price": "2.21", "name": "NULL"}, predicate="id = 2")
        rows = pa.table(items.to_pyarrow_table())
        four = rows.filter(pc.equal(rows["id"], 4))
        nine = four.set_column(0, "id", pa.array([9], four.schema.field("id").type))
        write_deltalake(items, pa.concat_tables([four, nine]), mode="append")
        found = lake.verify(f"{place.schema}.items")
    [table] = found.verification.tables
    assert not found.verification.sound
    assert (table.missing, table.surplus, table.repeated, table.differing) == (1, 1, 1, 1)
    [compared] = found.compared.values()
    assert list(compared.examples) == [
        RowDifference(("1",), missing=True),
        RowDifference(("2",), columns=("name", "price")),
        RowDifference(("4",), repeated=True),
        RowDifference(("9",), surplus=True),
    ]
    assert found.differing == {lake.source.name: [f"{place.schema}.items"]}


@pytest.mark.live
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_a_dropped_table_has_left_are_found(
    kind: str, places: Callable[[str], Place], spark: SparkSession, tmp_path: Path
) -> None:
    place = places(kind)
    run(place, *BEFORE)
    place.altered()
    lake = FollowingLake(spark, tmp_path, place.source(), deletes="rewrite")
    gone = f"{place.schema}.pairs"
    with lake.running():
        lake.verify()
        pairs = DeltaTable(str(lake.path / place.schema / "pairs"))
        rows = pa.table(pairs.to_pyarrow_table())
        run(place, "DROP TABLE pairs")

        def emptied() -> bool:
            pairs.update_incremental()
            return not pairs.to_pyarrow_table().num_rows

        wait_until(emptied, timeout=60)
        assert lake.verify().verification.sound
        write_deltalake(pairs, rows, mode="append", schema_mode="merge")
        found = lake.verify(gone).verification
    assert [(each.table, each.outcome, each.surplus) for each in found.tables] == [
        (gone, TableOutcome.DIFFERS, 2)
    ]


def test_a_table_that_nobody_has_is_no_equal_table(
    places: Callable[[str], Place], spark: SparkSession, tmp_path: Path
) -> None:
    place = places("sqlite")
    run(place, *BEFORE)
    place.altered()
    lake = FollowingLake(spark, tmp_path, place.source())
    with lake.running(), pytest.raises(ConfigError, match=r"has no table main\.itmes"):
        lake.verify("main.itmes", "main.items")


def test_transforms_masks_history_and_rows_without_a_key_are_compared_as_the_sink_has_them(
    servers: Servers, spark: SparkSession, tmp_path: Path
) -> None:
    with servers[16].database() as database:
        for statement in (
            "CREATE TABLE odd (id int PRIMARY KEY, secret text, price numeric, at timestamptz)",
            "CREATE TABLE pile (n int, ratio float8)",
            "ALTER TABLE pile REPLICA IDENTITY FULL",
            "CREATE TABLE bare (n int)",
            "INSERT INTO odd SELECT i, 's' || i, i / 3.0, now() FROM generate_series(1, 50) i",
            "INSERT INTO pile VALUES (1, 0), (1, 0), (1, '-0'), (2, 'NaN'), (2, NULL)",
            "INSERT INTO bare VALUES (1)",
        ):
            database.execute(statement)
        transform = TableTransform(where="id > 10", mask={"secret": MASK})
        source = postgres(database, mask={"odd.secret": MASK})
        settings: dict[str, Any] = {"keep": "history", "as_text": ("public.odd.price",)}
        transforms = {"public.odd": transform}
        lake = FollowingLake(spark, tmp_path, source, transforms=transforms, **settings)
        with lake.running():
            database.execute("UPDATE odd SET price = price + 1 WHERE id < 20")
            database.execute("UPDATE odd SET id = id + 100 WHERE id IN (1, 11)")
            database.execute("INSERT INTO pile VALUES (2, NULL)")
            found = lake.verify().verification
            shown = {each.table: (each.outcome, each.rows) for each in found.tables}
            assert shown == {
                "public.odd": (TableOutcome.EQUAL, 41),
                "public.bare": (TableOutcome.INSERTS_ONLY, 0),
                "public.pile": (TableOutcome.EQUAL, 6),
            }
            assert found.sound
            # Nothing of it shows a value, not even that of a key.
            assert "s11" not in repr(found)


def test_what_a_history_keeps_of_dropped_columns_is_no_difference(
    servers: Servers, spark: SparkSession, tmp_path: Path
) -> None:
    with servers[16].database() as database:
        database.execute("CREATE TABLE kept (id int PRIMARY KEY, a date, b date, c text)")
        database.execute("INSERT INTO kept VALUES (1, 'infinity', 'infinity', 'c')")
        lake = FollowingLake(spark, tmp_path, postgres(database), keep="history")
        with lake.running():
            database.execute("ALTER TABLE kept RENAME a TO z")
            database.execute("ALTER TABLE kept DROP COLUMN b, DROP COLUMN c")
            database.execute("INSERT INTO kept VALUES (3, 'infinity')")
            found = lake.verify()
            assert found.verification.sound, found.compared
            delta = DeltaTable(str(lake.path / "public" / "kept"))
            assert {"b", "c"} <= {*delta.schema().to_arrow().names}


def test_a_table_is_taken_as_it_was_when_it_had_everything_up_to_a_sequence(tmp_path: Path) -> None:
    table = Written(tmp_path / "t", files=1)  # which has everything up to 10
    version = table.delta.version
    log, mark = DeltaLog(table.folder), applied_mark("e")
    table.delta.note({"headrace.noted": "yes"})  # says nothing of sequences
    table.kill(0, 1)  # up to 20
    table.kill(0, 2)  # up to 30
    found = {upto: state_at(log, mark, upto) for upto in (9, 10, 19, 20, 29, 30, 99)}
    versions = {upto: state.version if state else None for upto, state in found.items()}
    assert versions == {
        9: version - 1,
        10: version + 1,
        19: version + 1,
        20: version + 2,
        29: version + 2,
        30: version + 3,
        99: version + 3,
    }
    assert state_at(DeltaLog(Folder.of(str(tmp_path / "none"), {})), mark, 10) is None


def test_values_are_hashed_by_their_bytes() -> None:
    pairs = [
        (pa.float64(), 0.0, -0.0),
        (pa.float64(), float("nan"), None),
        (pa.decimal128(30, 2), Decimal("1.10"), Decimal("18446744073709551617.10")),
        (pa.timestamp("us"), 1, 2),
        (pa.bool_(), True, False),
        (pa.string(), "", None),
        (pa.binary(), b"\x00", b""),
        (pa.list_(pa.int32()), [1, None], [1]),
        (pa.date32(), 1, 2),
    ]
    for kind, one, other in pairs:
        rows = pa.table({"value": pa.array([one, other, one], kind)})
        for some in (rows, rows.slice(1)):
            codes = value_codes(some)["value"].tolist()
            assert len(set(codes)) == 2, kind
        assert value_codes(rows)["value"][0] == value_codes(rows)["value"][2], kind
