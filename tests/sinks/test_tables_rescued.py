"""A value that its column cannot hold stops no table: null there, and its text in _rescued."""

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.arrow import RESCUED
from headrace.change.event import Column, Op
from headrace.secret import Secret
from headrace.sources.postgres import Postgres
from headrace.testing import Place, PostgresDatabase, reading, session
from headrace.transforms import Mask, TableTransform
from tests.conftest import Servers
from tests.deltas import stored
from tests.formats.other_sources import place_of
from tests.sinks.lake import Row, put, remove, schema, truncate
from tests.sinks.plain import PlainLake
from tests.sources.places import PostgresPlace

COLUMNS = (
    Column("id", "bigint", key=True),
    Column("amount", "numeric(6,2)"),
    Column("day", "date"),
    Column("at", "timestamp with time zone"),
    Column("grid", "integer[]"),
    Column("note", "text"),
)
FIT: dict[str, Any] = {
    "amount": "1.50",
    "day": "2024-02-29",
    "at": "2024-02-29T01:02:03+00:00",
    "grid": [1, 2],
    "note": "-",
}
UNFIT: dict[str, tuple[Any, ...]] = {
    "amount": ("NaN", "-Infinity", "12345.00", "1.234"),
    "day": ("infinity", "0044-03-15 BC", "10000-01-01"),
    "at": ("-infinity", "0044-03-15 00:00:00+00 BC", "294276-12-31 00:00:00+00"),
    "grid": ([[1], [2]],),
}

pytestmark = pytest.mark.requirement("P-05")


@pytest.fixture(params=["rows", "history"])
def keep(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def row(number: int, **values: Any) -> Row:
    return {"id": number, **FIT, **values}


def text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def write(lake: PlainLake) -> None:
    lake.write(lake.log.latest_sequence, 2)


def current(lake: PlainLake, name: str = "orders") -> dict[int, Row]:
    """Rows as they are now, `_rescued` read."""
    rows = [each for each in lake.rows(name, own=True) if each.get("_current", True)]
    assert len({each["id"] for each in rows}) == len(rows)
    return {
        each["id"]: {**each, RESCUED: msgspec.json.decode(each.get(RESCUED) or "{}")}
        for each in rows
    }


def test_the_cell_is_null_and_its_text_is_kept_until_a_value_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    lake = PlainLake(monkeypatch, tmp_path, keep=keep)
    orders = lake.table("orders", COLUMNS)
    lake.commit(truncate(orders, snapshot=True))
    lake.snapshot(orders, [row(1), row(2)])
    write(lake)
    assert RESCUED not in lake.delta().schema().to_arrow().names, "until it is needed"
    lake.snapshot(orders, [row(3), row(4, amount="NaN")], point=2)
    lake.commit(put(orders, **row(5, day="infinity", grid=[[1], [2]])))
    write(lake)
    lake.commit(put(orders, Op.UPDATE, **row(2, at="0044-03-15 00:00:00+00 BC")))
    lake.commit(put(orders, Op.UPDATE, **row(5, grid=[[1], [2]])))
    write(lake)
    lake.repeat(2)
    found = current(lake)
    assert {number: each[RESCUED] for number, each in found.items()} == {
        1: {},
        2: {"at": "0044-03-15 00:00:00+00 BC"},
        3: {},
        4: {"amount": "NaN"},
        5: {"grid": "[[1],[2]]"},
    }
    assert (found[4]["amount"], found[4]["note"]) == (None, "-")
    assert lake.writer.failed_tables() == []
    assert lake.writer.rescued_values() == {"public.orders": 5}
    lake.open()
    assert lake.writer.rescued_values() == {"public.orders": 5}
    lake.log.close()


@pytest.mark.parametrize("deletes", ["vectors", "rewrite"])
def test_random_values_in_random_changes_are_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str, deletes: str
) -> None:
    chance = random.Random(11)
    lake = PlainLake(monkeypatch, tmp_path, keep=keep, deletes=deletes)
    orders = lake.table("orders", COLUMNS)
    there: dict[int, Row] = {}

    def cells(names: list[str]) -> Row:
        odd = {name: chance.choice((FIT[name], *UNFIT.get(name, ()))) for name in names}
        return {name: odd[name] if chance.random() < 0.3 else FIT[name] for name in names}

    for _ in range(12):
        for _ in range(chance.randrange(1, 25)):
            number = chance.randrange(20)
            if number not in there:
                there[number] = {"id": number, **cells(list(FIT))}
                lake.commit(put(orders, **there[number]))
            elif chance.random() < 0.15:
                del there[number]
                lake.commit(remove(orders, id=number))
            else:  # what it does not send is as it was, also under another key
                free = [each for each in range(20, 40) if each not in there]
                to = chance.choice(free) if chance.random() < 0.2 else number
                sent = {"id": to, **cells(chance.sample(list(FIT), chance.randrange(len(FIT))))}
                there[to] = {**there.pop(number), **sent}
                was = {"id": number} if to != number else None
                lake.commit(put(orders, Op.UPDATE, was=was, **sent))
        if chance.random() < 0.1:
            there.clear()
            lake.commit(truncate(orders))
        write(lake)
        assert lake.writer.failed_tables() == []
        found = current(lake)
        assert found.keys() == there.keys()
        for number, wanted in there.items():
            unfit = {name: text(wanted[name]) for name in FIT if wanted[name] != FIT[name]}
            assert found[number][RESCUED] == unfit
            assert {name for name in FIT if found[number][name] is None} == unfit.keys()
        lake.compact()
    assert lake.writer.rescued_values()["public.orders"] > 20
    lake.log.close()


def test_in_a_key_it_stops_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = PlainLake(monkeypatch, tmp_path)
    keyed = (Column("id", "bigint", key=True), Column("until", "date", key=True))
    streamed, copied = lake.table("streamed", keyed), lake.table("copied", keyed)
    lake.commit(put(streamed, id=1, until="infinity"))
    lake.snapshot(copied, [{"id": 1, "until": "infinity"}])
    write(lake)
    failed = {each.table: each for each in lake.writer.failed_tables()}
    assert failed.keys() == {"public.streamed", "public.copied"}
    assert all("column 'until'" in each.reason for each in failed.values())
    assert all("as_text" in each.hint for each in failed.values())
    lake.log.close()


def test_it_stops_the_table_where_the_config_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = PlainLake(monkeypatch, tmp_path, unfit="stop")
    lake.commit(put(lake.table("orders", COLUMNS), **row(1, amount="NaN")))
    write(lake)
    [failed] = lake.writer.failed_tables()
    assert "column 'amount'" in failed.reason
    assert "NaN" not in failed.reason
    lake.log.close()


def test_text_shows_no_column_that_a_transform_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    mask = Mask(Secret("a key of sixteen or more"))
    rule = TableTransform(
        select=("id", "amount", "at"),
        mask={"at": mask},
        where="note <> 'hidden' AND (day IS NULL OR day < DATE '2030-01-01')",
    )
    lake = PlainLake(monkeypatch, tmp_path, keep=keep, transforms={"public.orders": rule})
    orders = lake.table("orders", COLUMNS)
    odd = {"amount": "NaN", "day": "infinity", "at": "-infinity"}
    lake.commit(put(orders, **row(1, **odd)), put(orders, **row(2, **odd, note="hidden")))
    lake.snapshot(orders, [row(3, **odd), row(4, **odd, note="hidden")])
    write(lake)
    found = current(lake)
    assert found.keys() == {1, 3}, "to where, it is null"
    for each in found.values():
        assert (each[RESCUED], each["at"]) == ({"amount": "NaN"}, mask.code("-infinity"))
    lake.log.close()


def test_what_a_dropped_column_had_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = PlainLake(monkeypatch, tmp_path)
    lake.commit(put(lake.table("orders", COLUMNS), **row(1, amount="NaN", day="infinity")))
    write(lake)
    lake.commit(schema(lake.table("orders", [each for each in COLUMNS if each.name != "amount"])))
    write(lake)
    lake.commit(schema(lake.table("orders", COLUMNS)))
    write(lake)
    found = current(lake)[1]
    assert (found["amount"], found[RESCUED]) == (None, {"day": "infinity"})
    lake.log.close()


def test_rows_that_were_there_have_the_text_of_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    lake = PlainLake(monkeypatch, tmp_path, keep=keep)
    before = lake.table("orders", COLUMNS)
    lake.commit(put(before, **row(1)), put(before, **row(2, amount="NaN")))
    lake.commit(put(before, Op.UPDATE, **row(1, note="later")))
    write(lake)
    until = Column("until", "date", initial_default='"infinity"')
    columns = (*COLUMNS, until, Column("bid", "numeric(6,2)", initial_default='"NaN"'))
    after = lake.table("orders", columns)
    lake.commit(schema(after), put(after, **row(3, until="2024-01-01", bid="1.00")))
    write(lake)
    lake.commit(put(after, Op.UPDATE, id=1, note="untouched", bid="2.00"))
    write(lake)
    found = current(lake)
    assert {number: each[RESCUED] for number, each in found.items()} == {
        1: {"until": "infinity"},
        2: {"amount": "NaN", "bid": "NaN", "until": "infinity"},
        3: {},
    }
    past = [each for each in lake.rows(own=True) if not each.get("_current", True)]
    assert all(each[RESCUED] is None for each in past if each["note"] == "-")
    assert lake.writer.failed_tables() == []
    assert lake.writer.rescued_values() == {"public.orders": 1 + 4}
    lake.log.close()


def test_texts_are_stored_in_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    lake = PlainLake(monkeypatch, tmp_path, keep=keep)
    columns = [
        Column("id", "bigint", key=True, number=1),
        Column("a", "date", number=2),
        Column("b", "date", number=3),
    ]
    before = lake.table("orders", columns)
    lake.commit(*(put(before, id=at, a="infinity", b="infinity") for at in (1, 2)))
    write(lake)
    columns[1] = Column("z", "date", number=2)
    after = lake.table("orders", columns)
    lake.commit(schema(after), put(after, id=3, z="infinity", b="infinity"))
    lake.commit(
        put(after, Op.UPDATE, id=2, b="-infinity"), put(after, Op.UPDATE, id=2, b="infinity")
    )
    write(lake)
    rows = [each for each in lake.rows(own=True) if each.get("_current", True)]
    assert [each[RESCUED] for each in rows] == ['{"b":"infinity","z":"infinity"}'] * 3
    lake.log.close()


def test_a_column_of_the_source_may_have_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = PlainLake(monkeypatch, tmp_path)
    own = lake.table("orders", (*COLUMNS, Column(RESCUED, "integer")))
    lake.commit(put(own, **row(1, **{RESCUED: 7})))
    other = lake.table("others", COLUMNS)
    lake.commit(put(other, **row(1, amount="NaN")))
    write(lake)
    [found] = lake.rows(own=True)
    assert found[RESCUED] == 7
    lake.commit(put(own, **row(2, amount="NaN", **{RESCUED: 8})))
    later = lake.table("others", (*COLUMNS, Column(RESCUED, "integer")))
    lake.commit(schema(later), put(later, **row(2, **{RESCUED: 9})))
    write(lake)
    reasons = {each.table: each.reason for each in lake.writer.failed_tables()}
    assert reasons.keys() == {"public.orders", "public.others"}
    assert f"a column {RESCUED}, a name that Headrace uses" in reasons["public.others"]
    lake.log.close()


# --- what real servers send ----------------------------------------------------------------------

GRID = "(SELECT array_agg(ARRAY[n, n]) FROM generate_series(1, 2000) n)"
SQUARE = "[" + ",".join(f"[{n},{n}]" for n in range(1, 2001)) + "]"
TABLE = {
    "postgres": (
        "CREATE TABLE odd (id int PRIMARY KEY, a numeric(20,4), b date, c timestamptz, d int[])",
        "ALTER TABLE odd ALTER COLUMN d SET STORAGE EXTERNAL",
    ),
    "mysql": ("CREATE TABLE odd (id int PRIMARY KEY, a decimal(20,4), b date, c datetime)",),
    "sqlite": ("CREATE TABLE odd (id INTEGER PRIMARY KEY, a INTEGER, b REAL, c TEXT, d BLOB)",),
}
ODD = {
    "postgres": f"'NaN', 'infinity', '0044-03-15 10:00:00+00 BC', {GRID}",
    "mysql": "1, '2024-00-15', '0000-01-01 10:00:00'",
    "sqlite": "'many', 'about 7', x'00ff', 'none'",
}
TEXTS = {
    "postgres": {
        "a": "NaN",
        "b": "infinity",
        "c": "0044-03-15 10:00:00+00 BC",
        "d": SQUARE,
    },
    "mysql": {"b": "2024-00-15", "c": "0000-01-01 10:00:00"},
    "sqlite": {
        "a": "many",
        "b": "about 7",
        "c": '{"base64":"AP8="}',
        "d": '{"text":"none"}',
    },
}


@pytest.mark.live
@pytest.mark.parametrize("kind", TABLE)
def test_every_source_may_send_such_values(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*statements: str) -> None:
        for statement in statements:
            with session(place) as writer:
                if kind == "mysql":
                    writer.execute("SET SESSION sql_mode = ''")
                writer.execute(statement)

    with ExitStack() as stack:
        place = _place(kind, stack, request, tmp_path)
        run(*TABLE[kind], f"INSERT INTO odd VALUES (1, {ODD[kind]})")
        place.altered()
        with reading(place, tmp_path) as feed:
            feed.catch_up()
            copied = feed.log.latest_sequence
            run(f"INSERT INTO odd VALUES (2, {ODD[kind]})", "UPDATE odd SET a = 7 WHERE id = 1")
            feed.catch_up()
        lake = PlainLake(monkeypatch, tmp_path)
        lake.write(copied, 2)
        write(lake)
        lake.log.close()
    assert lake.writer.failed_tables() == []
    found = stored(lake.path / place.schema / "odd").sort_by("id").to_pylist()
    rest = {name: each for name, each in TEXTS[kind].items() if name != "a"}
    assert [msgspec.json.decode(each[RESCUED]) for each in found] == [rest, TEXTS[kind]]
    assert found[0]["a"] == 7
    for each in found:
        assert not [name for name in msgspec.json.decode(each[RESCUED]) if each[name] is not None]


def _place(kind: str, stack: ExitStack, request: pytest.FixtureRequest, folder: Path) -> Place:
    if kind != "postgres":
        return place_of(kind, stack, request, folder)
    servers: Servers = request.getfixturevalue("servers")
    return PostgresPlace(stack.enter_context(servers[16].database()), _source)


def _source(database: PostgresDatabase) -> Postgres:
    return Postgres(name="shop", url=Secret(database.url))
