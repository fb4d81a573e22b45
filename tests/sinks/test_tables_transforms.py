"""Tables that hold what a transform leaves of their source: no more rows, no other values."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.event import BeforeKind, Column, Op
from headrace.secret import Secret
from headrace.transforms import Mask, TableTransform
from tests.deltas import stored
from tests.sinks.lake import ORDERS, Row, change, ordered, put, remove, truncate
from tests.sinks.plain import PlainLake

MASK = Mask(Secret("a key of sixteen or more"))
FULL = (*ORDERS, Column("country", "text"))


@pytest.fixture(params=["rows", "history"])
def keep(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def lake_with(
    patch: pytest.MonkeyPatch, folder: Path, rule: TableTransform, **settings: Any
) -> PlainLake:
    return PlainLake(patch, folder, transforms={"public.orders": rule}, **settings)


def row(number: int, country: str = "DE", **values: Any) -> Row:
    plain = {"id": number, "status": "new", "amount": "1.00", "note": f"n{number}"}
    return {**plain, "country": country, **values}


def current(lake: PlainLake) -> list[Row]:
    rows = [each for each in lake.rows(own=True) if each.get("_current", True)]
    return ordered([{n: v for n, v in each.items() if not n.startswith("_")} for each in rows])


def ids(lake: PlainLake) -> list[Any]:
    return sorted(each["id"] for each in current(lake))


def test_a_row_that_where_no_longer_lets_pass_leaves_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    rule = TableTransform(select=("id", "status"), where="country <> 'XX'")
    lake = lake_with(monkeypatch, tmp_path, rule, keep=keep)
    orders = lake.table("orders", FULL)
    lake.commit(put(orders, **row(1)), put(orders, **row(2, "XX")), put(orders, **row(3)))
    lake.write(lake.log.latest_sequence, 2)
    assert current(lake) == [{"id": 1, "status": "new"}, {"id": 3, "status": "new"}]
    lake.commit(put(orders, Op.UPDATE, **row(1, "XX")))
    lake.commit(put(orders, Op.UPDATE, **row(2, "FR", status="paid")))
    lake.write(lake.log.latest_sequence, 2)
    assert current(lake) == [{"id": 2, "status": "paid"}, {"id": 3, "status": "new"}]
    lake.commit(put(orders, Op.UPDATE, **row(1, "DE")), remove(orders, id=3))
    lake.commit(put(orders, Op.UPDATE, **row(2, "XX")))
    lake.write(lake.log.latest_sequence, 2)
    assert ids(lake) == [1]
    if keep == "history":
        past = [each for each in lake.rows(own=True) if not each["_current"]]
        assert sorted(each["id"] for each in past) == [1, 2, 3]
        assert all(each["_valid_to"] for each in past)
    lake.log.close()


def test_rows_of_a_snapshot_are_filtered_and_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    rule = TableTransform(mask={"note": MASK, "status": None}, where="id > 1")
    lake = lake_with(monkeypatch, tmp_path, rule, keep=keep)
    orders = lake.table("orders", FULL)
    lake.commit(truncate(orders, snapshot=True))
    lake.snapshot(orders, [row(n) for n in range(4)])
    lake.write(lake.log.latest_sequence, 2)
    found = current(lake)
    assert [each["id"] for each in found] == [2, 3]
    assert [each["note"] for each in found] == [MASK.code("n2"), MASK.code("n3")]
    assert {each["status"] for each in found} == {None}
    lake.log.close()


@pytest.mark.parametrize("deletes", ["vectors", "rewrite"])
def test_a_key_that_is_masked_stays_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: str
) -> None:
    rule = TableTransform(mask={"id": MASK})
    lake = lake_with(monkeypatch, tmp_path, rule, deletes=deletes)
    orders = lake.table("orders", FULL)
    lake.snapshot(orders, [row(n) for n in range(10)])
    lake.write(lake.log.latest_sequence, 2)
    lake.commit(put(orders, Op.UPDATE, **row(3, status="paid")), remove(orders, id=4))
    lake.commit(put(orders, Op.UPDATE, was={"id": 5}, **row(50)))
    lake.write(lake.log.latest_sequence, 2)
    codes = {MASK.code(str(n)) for n in (0, 1, 2, 3, 6, 7, 8, 9, 50)}
    assert set(ids(lake)) == codes
    assert len(current(lake)) == len(codes)
    [paid] = [each for each in current(lake) if each["status"] == "paid"]
    assert paid["id"] == MASK.code("3")
    lake.log.close()


@pytest.mark.requirement("P-26")
def test_random_changes_end_in_what_the_transform_leaves_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    rule = TableTransform(
        select=("id", "amount", "note"), mask={"note": MASK}, where="country <> 'XX' AND amount < 5"
    )
    chance = random.Random(7)
    lake = lake_with(monkeypatch, tmp_path, rule, keep=keep)
    orders = lake.table("orders", FULL)
    there: dict[int, Row] = {}
    for _ in range(12):
        for _ in range(chance.randrange(1, 30)):
            number = chance.randrange(20)
            new = row(number, chance.choice(["DE", "XX"]), amount=f"{chance.randrange(8)}.00")
            if number in there and chance.random() < 0.2:
                del there[number]
                lake.commit(remove(orders, id=number))
            elif number in there:
                moved = chance.randrange(20, 40)
                if moved not in there and chance.random() < 0.2:
                    del there[number]
                    there[moved] = new | {"id": moved}
                    lake.commit(put(orders, Op.UPDATE, was={"id": number}, **there[moved]))
                else:
                    there[number] = new
                    lake.commit(put(orders, Op.UPDATE, **new))
            else:
                there[number] = new
                lake.commit(put(orders, **new))
        lake.write(lake.log.latest_sequence, 2)
        assert lake.writer.failed_tables() == []
        expected = [
            (each["id"], each["amount"], MASK.code(each["note"]))
            for each in there.values()
            if each["country"] != "XX" and float(each["amount"]) < 5
        ]
        found = [(each["id"], str(each["amount"]), each["note"]) for each in current(lake)]
        assert sorted(found) == sorted(expected)
    lake.log.close()


# --- rows that come in part ----------------------------------------------------------------------


def part(lake: PlainLake, number: int, **values: Any) -> None:
    """A row of which the source does not send `note`."""
    whole = row(number, **values)
    del whole["note"]
    lake.commit(put(lake.table("orders", FULL), Op.UPDATE, **whole))


def test_a_row_in_part_takes_the_rest_from_the_table_masked_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    rule = TableTransform(mask={"note": MASK}, where="country <> 'XX'")
    lake = lake_with(monkeypatch, tmp_path, rule, keep=keep)
    orders = lake.table("orders", FULL)
    lake.commit(put(orders, **row(1)), put(orders, **row(2)))
    lake.write(lake.log.latest_sequence, 2)
    part(lake, 1, status="paid")
    part(lake, 2, country="XX")
    lake.write(lake.log.latest_sequence, 2)
    assert lake.writer.failed_tables() == []
    [left] = current(lake)
    assert (left["id"], left["status"], left["note"]) == (1, "paid", MASK.code("n1"))
    lake.log.close()


def test_a_row_in_part_that_was_left_out_fails_its_table_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_with(monkeypatch, tmp_path, TableTransform(where="country <> 'XX'"))
    orders = lake.table("orders", FULL)
    lake.commit(put(orders, **row(1, "XX")), put(orders, **row(2)))
    lake.write(lake.log.latest_sequence, 2)
    part(lake, 1, country="XX", status="paid")  # still out, so nothing is missed
    lake.write(lake.log.latest_sequence, 2)
    assert lake.writer.failed_tables() == []
    part(lake, 1, country="DE")
    lake.write(lake.log.latest_sequence, 2)
    [failed] = lake.writer.failed_tables()
    assert "which where needs or had left out" in failed.reason
    assert "REPLICA IDENTITY FULL" in failed.hint
    lake.log.close()


@pytest.mark.parametrize(
    ("rule", "fails"),
    [
        (TableTransform(where="note <> 'n9'"), False),  # it is stored as it is
        (TableTransform(where="note <> 'n9'", select=("id", "status")), True),
        (TableTransform(where="note <> 'n9'", mask={"note": MASK}), True),
    ],
)
def test_where_that_looks_at_what_did_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: TableTransform, *, fails: bool
) -> None:
    lake = lake_with(monkeypatch, tmp_path, rule)
    orders = lake.table("orders", FULL)
    lake.commit(put(orders, **row(1)))
    lake.write(lake.log.latest_sequence, 2)
    part(lake, 1, status="paid")
    lake.write(lake.log.latest_sequence, 2)
    assert bool(lake.writer.failed_tables()) is fails
    if not fails:
        assert current(lake)[0]["status"] == "paid"
    lake.log.close()


@pytest.mark.parametrize(
    "rule",
    [
        TableTransform(select=("id", "status")),
        TableTransform(select=("id", "status"), where="country <> 'XX'"),
        TableTransform(mask={"note": None}),
    ],
)
def test_what_is_not_stored_need_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: TableTransform, keep: str
) -> None:
    lake = lake_with(monkeypatch, tmp_path, rule, keep=keep)
    orders = lake.table("orders", FULL)
    lake.commit(put(orders, **row(1)), put(orders, **row(2, "XX")))
    lake.write(lake.log.latest_sequence, 2)
    part(lake, 1, status="paid")
    part(lake, 2, status="paid")  # it comes in
    lake.write(lake.log.latest_sequence, 2)
    assert lake.writer.failed_tables() == []
    assert [(each["id"], each["status"]) for each in current(lake)] == [(1, "paid"), (2, "paid")]
    lake.log.close()


def test_a_part_of_where_that_fails_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = TableTransform(where="country <> 'XX' AND note <> 'q'", select=("id",))
    lake = lake_with(monkeypatch, tmp_path, rule)
    orders = lake.table("orders", FULL)
    lake.commit(put(orders, **row(1)))
    lake.write(lake.log.latest_sequence, 2)
    part(lake, 1, country="XX")
    lake.write(lake.log.latest_sequence, 2)
    assert (lake.writer.failed_tables(), current(lake)) == ([], [])
    lake.log.close()


def test_a_hidden_row_does_not_take_the_place_of_one_with_the_same_chosen_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    """As rows that are only marked as deleted have it."""
    rule = TableTransform(where="NOT gone")
    keys = {"public.orders": ("email",)}
    lake = lake_with(monkeypatch, tmp_path, rule, keys=keys, keep=keep)
    columns = (Column("id", "bigint", key=True), Column("email", "text"), Column("gone", "boolean"))
    orders = lake.table("orders", columns)
    lake.snapshot(
        orders, [{"id": 1, "email": "a", "gone": False}, {"id": 2, "email": "a", "gone": True}]
    )
    lake.write(lake.log.latest_sequence, 2)
    assert ids(lake) == [1]
    before = msgspec.json.encode({"id": 1, "email": "a", "gone": False})
    left = put(orders, Op.UPDATE, id=1, email="a", gone=True)
    lake.commit(msgspec.structs.replace(left, before=before, before_kind=BeforeKind.FULL))
    lake.commit(put(orders, id=3, email="a", gone=False))
    lake.commit(
        change(
            Op.DELETE,
            orders,
            key=b'{"id":2}',
            before=msgspec.json.encode({"id": 2, "email": "a", "gone": True}),
            before_kind=BeforeKind.FULL,
        )
    )
    lake.write(lake.log.latest_sequence, 2)
    assert lake.writer.failed_tables() == []
    assert ids(lake) == [3]
    lake.log.close()


# --- a transform that does not fit, or changes ---------------------------------------------------


def test_a_transform_that_does_not_fit_fails_its_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_with(monkeypatch, tmp_path, TableTransform(select=("id", "nonsense")))
    orders, parts = lake.table("orders", FULL), lake.table("parts", FULL)
    lake.commit(put(orders, **row(1)), put(parts, **row(1)))
    lake.write(lake.log.latest_sequence, 2)
    [failed] = lake.writer.failed_tables()
    assert failed.table == "public.orders"
    assert "lake.transforms.public.orders: there is no column nonsense" in failed.reason
    assert len(lake.rows("parts")) == 1
    lake.log.close()


def test_another_transform_needs_another_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_with(monkeypatch, tmp_path, TableTransform(mask={"note": MASK}))
    orders = lake.table("orders", FULL)
    lake.commit(put(orders, **row(1)))
    lake.write(lake.log.latest_sequence, 2)
    later = lake_again(monkeypatch, lake, TableTransform(mask={"note": None}))
    lake.commit(put(orders, **row(2)))
    later.write(lake.log.latest_sequence, 2)
    [failed] = later.writer.failed_tables()
    assert "filled with another transform" in failed.reason
    assert "headrace reset lake" in failed.hint
    # A full snapshot replaces all rows, as after a reset.
    lake.commit(truncate(orders, snapshot=True))
    lake.commit(put(orders, **row(1)), put(orders, **row(2)))
    later.write(lake.log.latest_sequence, 2)
    assert later.writer.failed_tables() == []
    assert [each["note"] for each in current(later)] == [None, None]
    lake.log.close()


def test_past_rows_of_another_transform_need_a_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = PlainLake(monkeypatch, tmp_path, keep="history")
    orders = lake.table("orders", FULL)
    lake.commit(put(orders, **row(1)))
    lake.write(lake.log.latest_sequence, 2)
    later = lake_again(monkeypatch, lake, TableTransform(mask={"note": MASK}), keep="history")
    lake.commit(truncate(orders, snapshot=True), put(orders, **row(1)))
    later.write(lake.log.latest_sequence, 2)
    assert "filled with another transform" in later.writer.failed_tables()[0].reason
    later.sink.reset("query-1")
    later.open()
    lake.commit(truncate(orders, snapshot=True), put(orders, **row(1)))
    later.write(lake.log.latest_sequence, 2)
    assert later.writer.failed_tables() == []
    assert {each["note"] for each in lake.rows(own=True)} == {MASK.code("n1")}
    lake.log.close()


def test_a_pattern_that_does_nothing_to_a_table_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = PlainLake(monkeypatch, tmp_path)
    orders = lake.table("orders", FULL)
    lake.commit(put(orders, **row(1)))
    lake.write(lake.log.latest_sequence, 2)
    rule = TableTransform(mask={"password": None})
    later = lake_again(monkeypatch, lake, rule, table="*")
    wider = lake.table("orders", (*FULL, Column("password", "text")))
    lake.commit(put(wider, **row(2), password="hunter2"))
    later.write(lake.log.latest_sequence, 2)
    assert later.writer.failed_tables() == []
    later.open()  # now the column is there
    lake.commit(put(wider, **row(3), password="hunter2"))
    later.write(lake.log.latest_sequence, 2)
    assert later.writer.failed_tables() == []
    assert [each["password"] for each in current(later)] == [None, None, None]
    lake.log.close()


def test_a_row_for_which_where_fails_names_the_transform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_with(monkeypatch, tmp_path, TableTransform(where="cast(note AS int) > 1"))
    lake.commit(put(lake.table("orders", FULL), **row(1, note="Oleander")))
    lake.write(lake.log.latest_sequence, 2)
    [failed] = lake.writer.failed_tables()
    assert failed.reason.startswith("lake.transforms.public.orders: ")
    assert "cannot be evaluated where note is string" in failed.reason
    assert "Oleander" not in failed.reason + failed.hint
    lake.log.close()


def lake_again(
    patch: pytest.MonkeyPatch,
    lake: PlainLake,
    rule: TableTransform,
    table: str = "public.orders",
    **settings: Any,
) -> PlainLake:
    """The same log and tables with another config, as after a restart."""
    later = object.__new__(PlainLake)
    later.__dict__.update(lake.__dict__)
    path = str(lake.path)
    later.sink = type(lake.sink)(name="lake", path=path, transforms={table: rule}, **settings)
    later.open()
    return later


def test_rows_that_exchange_their_keys_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    """A deferrable key is checked when a transaction ends: two rows may have it until then."""
    chance = random.Random(3)
    lake = PlainLake(monkeypatch, tmp_path, keep=keep)
    orders = lake.table("orders", (Column("id", "bigint", key=True), Column("note", "text")))
    there: dict[int, Row] = {n: {"id": n, "note": f"n{n // 2}"} for n in range(8)}
    lake.commit(*(put(orders, **each) for each in there.values()))
    lake.write(lake.log.latest_sequence, 2)

    def moved(was: Row, to: int, note: str) -> Any:
        new = {"id": to, "note": note}
        key, before, after = (msgspec.json.encode(each) for each in ({"id": to}, was, new))
        kind = BeforeKind.FULL
        return change(Op.UPDATE, orders, key=key, before=before, before_kind=kind, after=after), new

    for _ in range(6):
        for _ in range(chance.randrange(1, 3)):
            rows, changes = list(there.values()), []
            ends = chance.sample(range(10), len(rows))
            for _ in range(chance.randrange(1, 3)):  # each row goes somewhere, and then elsewhere
                on_the_way = chance.sample(range(10), len(rows))
                for at, row in chance.sample(list(enumerate(rows)), len(rows)):
                    made, rows[at] = moved(row, on_the_way[at], row["note"])
                    changes.append(made)
            for at, row in enumerate(rows):
                made, rows[at] = moved(row, ends[at], chance.choice([row["note"], "other"]))
                changes.append(made)
            lake.commit(*changes)
            there = {row["id"]: row for row in rows}
        lake.write(lake.log.latest_sequence, 3)
        assert current(lake) == ordered(list(there.values()))
    lake.log.close()


def test_a_key_that_is_renamed_fails_its_table_alone_until_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    lake = PlainLake(monkeypatch, tmp_path, keep=keep)
    note = Column("note", "text")
    orders, other = (
        lake.table(name, (Column("id", "bigint", key=True), note)) for name in ("orders", "other")
    )
    lake.commit(put(orders, id=1, note="a"), put(orders, id=2, note="b"))
    lake.write(lake.log.latest_sequence, 2)
    renamed = lake.table("orders", (Column("uid", "bigint", key=True), note))
    lake.commit(put(renamed, Op.UPDATE, uid=1, note="c"), put(other, id=1, note="d"))
    lake.write(lake.log.latest_sequence, 2)
    [failed] = lake.writer.failed_tables()
    assert failed.reason == "its key is uid now, which its rows do not have"
    assert lake.rows("other", own=False)[0]["note"] == "d"
    lake.commit(truncate(renamed, snapshot=True))
    lake.snapshot(renamed, [{"uid": 1, "note": "c"}, {"uid": 2, "note": "b"}])
    lake.commit(put(renamed, Op.UPDATE, uid=2, note="e"))
    lake.write(lake.log.latest_sequence, 2)
    assert lake.writer.failed_tables() == []
    assert [(each["uid"], each["note"]) for each in current(lake)] == [(1, "c"), (2, "e")]
    lake.log.close()


def test_masked_values_are_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = TableTransform(mask={"note": MASK, "status": None})
    lake = lake_with(monkeypatch, tmp_path, rule, cluster_by={"public.orders": ("note",)})
    orders = lake.table("orders", FULL)
    secrets = {"note": "Oleander-4711", "status": "Rhabarber-0815"}
    lake.snapshot(orders, [row(n, **secrets) for n in range(3)])
    lake.commit(put(orders, Op.UPDATE, **row(1, **secrets)))
    lake.commit(change(Op.DELETE, orders, key=b'{"id":2}'))
    lake.write(lake.log.latest_sequence, 2)
    stored(lake.delta())
    for file in lake.path.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert b"Oleander" not in content, file
        assert b"Rhabarber" not in content, file
        assert b"sixteen" not in content, file
    lake.log.close()
