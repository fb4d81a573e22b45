"""Records become Arrow columns that say what the changes say, and changes again."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.arrow import frame
from headrace.change.arrow.frame import FIELDS, REQUIRED, Framing, schema, transactions, whole
from headrace.change.event import BeforeKind, Change, Column, Op, Table, Transaction
from headrace.change.record import encode
from headrace.errors import ConfigError
from headrace.sources.postgres.position import PostgresPosition
from tests.changes import make_change, make_table
from tests.formats import generated

USERS = make_table(version=1)
ORDERS = make_table("orders", schema="sales", key=("id", "line"), version=2)
NOWHERE = Table("shop", "postgres", "origin-1", "shop", "", "", version=3)
TABLES = {table.version: table for table in (USERS, ORDERS, NOWHERE)}


def framed(changes: Sequence[Change], **settings: Any) -> list[dict[str, Any]]:
    """Changes with sequences from 1 on, through their records to rows."""
    framing = Framing("epoch-1", TABLES, **settings)
    batch = framing.batch(1, len(changes), b"".join(encode(changes)))
    batch.validate(full=True)
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def text(image: bytes | None) -> str | None:
    return None if image is None else image.decode()


def moment(microseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


def row_schema(table: Table) -> str | None:
    columns = [{"name": c.name, "type": c.type, "key": c.key} for c in table.columns]
    return json.dumps(columns, separators=(",", ":")) if table.name else None


def expected(change: Change, sequence: int) -> dict[str, Any]:
    """The row of a change, put together field by field."""
    table, transaction = change.table, change.transaction
    return {
        "sequence": sequence,
        "id": change.id,
        "op": change.op.value,
        "source": table.source,
        "connector": table.connector,
        "origin": table.origin,
        "database": table.database,
        "schema": table.schema,
        "table": table.name,
        "key": text(change.key),
        "before": text(change.before),
        "before_kind": change.before_kind.value,
        "after": text(change.after),
        "changed": None if change.changed is None else list(change.changed),
        "unchanged": list(change.unchanged),
        "transaction": {
            "id": transaction.id,
            "ordinal": change.ordinal,
            "last": change.last,
            "commit_time": moment(transaction.commit_time),
        },
        "position": json.dumps(change.position.to_json(), separators=(",", ":")),
        "captured_at": moment(transaction.captured_at),
        "schema_version": table.version,
        "row_schema": row_schema(table),
        "metadata": text(transaction.metadata),
        "epoch": "epoch-1",
    }


rows = st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=2)
names = st.lists(st.text(max_size=5), max_size=2).map(tuple)
times = st.integers(0, 4_000_000_000_000_000)
changes = st.builds(
    make_change,
    st.sampled_from(Op),
    table=st.sampled_from(list(TABLES.values())),
    key=rows,
    before=rows,
    after=rows,
    before_kind=st.sampled_from(BeforeKind),
    changed=st.none() | names,
    unchanged=names,
    transaction=st.builds(
        Transaction, st.text(max_size=9), times, times, st.none() | st.just(b'{"by":"\xc3\xa9"}')
    ),
    ordinal=st.integers(1, 2**40),
    position=st.builds(PostgresPosition, st.integers(0, 2**63), st.integers(0, 2**63)),
    last=st.booleans(),
)


@given(st.lists(changes, min_size=1, max_size=20))
def test_every_field_says_what_the_change_says(batch: list[Change]) -> None:
    assert framed(batch) == [expected(change, n) for n, change in enumerate(batch, 1)]


@given(st.lists(st.sampled_from(list(FIELDS)), unique=True, min_size=1))
def test_only_the_fields_asked_for_are_there_in_the_order_asked(fields: list[str]) -> None:
    change = make_change(after={"id": "1"})
    (row,) = framed([change], fields=tuple(fields))
    assert list(row) == fields
    assert row == {name: expected(change, 1)[name] for name in fields}


@pytest.mark.parametrize(
    ("globs", "kept"),
    [
        (("users",), [1, 4]),
        (("sales.*",), [2]),
        (("*",), [1, 2, 3, 4]),
        (("public.*", "orders"), [1, 2, 4]),
        (("nothing",), []),
    ],
)
def test_globs_choose_tables_and_sequences_stay(globs: tuple[str, ...], kept: list[int]) -> None:
    tables = [USERS, ORDERS, NOWHERE, USERS]
    batch = [make_change(table=table) for table in tables]
    assert [row["sequence"] for row in framed(batch, wanted=globs)] == kept


def test_a_batch_without_rows_still_has_its_columns() -> None:
    framing = Framing("epoch-1", TABLES, ("sequence", "changed"), ("nothing",))
    batch = framing.batch(1, 1, encode([make_change()])[0])
    assert (batch.num_rows, batch.schema) == (0, schema(["sequence", "changed"]))


def test_the_columns_of_a_table_are_told_as_they_were() -> None:
    table = Table(
        "shop",
        "postgres",
        "o",
        "shop",
        "public",
        "t",
        (Column("id", "bigint", key=True), Column('a"b', "text")),
        version=9,
    )
    framing = Framing("e", {9: table}, ("row_schema",))
    (row,) = framing.batch(1, 1, encode([make_change(table=table)])[0]).to_pylist()
    assert row["row_schema"] == (
        '[{"name":"id","type":"bigint","key":true},{"name":"a\\"b","type":"text","key":false}]'
    )


def test_the_schema_has_every_field_and_allows_nulls() -> None:
    assert schema().names == list(FIELDS)
    assert all(field.nullable for field in schema())
    assert schema(["epoch", "op"]) == pa.schema([("epoch", pa.string()), ("op", pa.string())])


# --- and back ------------------------------------------------------------------------------------


def batch_of(changes: Sequence[Change], epoch: str = "epoch-1") -> pa.RecordBatch:
    """The rows of neighbouring changes."""
    tables = {change.table.version: change.table for change in changes}
    framing = Framing(epoch, tables)
    return framing.batch(changes[0].sequence, len(changes), b"".join(encode(changes)))


def as_told(change: Change) -> Change:
    """A change without what its row does not tell, and no format asks of a row."""
    table, position = change.table, change.position
    columns = tuple(Column(each.name, each.type, each.key) for each in table.columns)
    replace = msgspec.structs.replace
    return replace(
        change,
        table=replace(table, columns=columns, identity="default", relation=0),
        position=PostgresPosition(position.commit, position.own),
    )


@given(generated.transactions())
def test_rows_become_the_changes_they_were(given: list[Change]) -> None:
    rows = batch_of(given)
    told = frame.changes(rows)
    assert told == [as_told(change) for change in given]
    assert [change.id for change in told] == rows["id"].to_pylist()
    assert len({id(each.table) for each in told}) == len({each.table.version for each in told})


def test_rows_may_come_in_any_zone_and_in_many_chunks() -> None:
    given = [make_change(sequence=number, ordinal=number) for number in (1, 2, 3)]
    rows = batch_of(given).to_pylist()
    tokyo = pa.timestamp("us", tz="Asia/Tokyo")
    inner = [each for each in FIELDS["transaction"] if each.name != "commit_time"]
    transaction = pa.struct([*inner, pa.field("commit_time", tokyo)])
    fields = FIELDS | {"transaction": transaction, "captured_at": tokyo, "key": pa.large_string()}
    chunks = [pa.RecordBatch.from_pylist([row], pa.schema(list(fields.items()))) for row in rows]
    assert frame.changes(pa.Table.from_batches(chunks)) == given


@pytest.mark.parametrize("name", REQUIRED)
def test_rows_of_which_something_was_left_out_are_refused(name: str) -> None:
    rows = batch_of([make_change()])
    assert frame.changes(rows.drop_columns(["id", "epoch"])) == [make_change()]
    with pytest.raises(ConfigError, match=f"no column {name}") as raised:
        frame.changes(rows.drop_columns([name]))
    assert name in raised.value.hint


Log = list[list[Change]]  # transactions


def log_of(*sizes: int) -> Log:
    """Transactions of so many changes."""
    sequences = iter(range(1, sum(sizes) + 1))
    return [
        [
            make_change(
                sequence=next(sequences),
                ordinal=ordinal,
                last=ordinal == size,
                transaction=Transaction(str(number), 0, 0),
            )
            for ordinal in range(1, size + 1)
        ]
        for number, size in enumerate(sizes)
    ]


def in_batches(log: Log, size: int) -> list[pa.RecordBatch]:
    rows = pa.Table.from_batches([batch_of([change for each in log for change in each])])
    return list(rows.to_batches(max_chunksize=size))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 8))
def test_batches_are_cut_between_transactions_wherever_they_end(
    sizes: list[int], size: int
) -> None:
    log = log_of(*sizes)
    tables = list(whole(in_batches(log, size)))
    assert [each for table in tables for each in transactions(table)] == log
    # Nothing waits longer than it must.
    assert max(table.num_rows for table in tables) <= size + 2 * max(sizes)


def test_what_a_filter_leaves_of_transactions_stays_together() -> None:
    log = log_of(3, 1, 4)
    kept = [[each for each in transaction if each.ordinal % 2 == 0] for transaction in log]
    batches = [batch_of([change]) for transaction in kept for change in transaction]
    tables = whole([batch_of([make_change()]).slice(0, 0), *batches])
    assert [each for table in tables for each in transactions(table)] == [kept[0], kept[2]]


def test_equal_sequences_of_two_logs_are_two_transactions() -> None:
    log = log_of(2)
    batches = [batch_of(log[0], epoch) for epoch in ("one", "two")]
    assert [table["epoch"].to_pylist() for table in whole(batches)] == [["one"] * 2, ["two"] * 2]
    assert list(transactions(pa.Table.from_batches(batches))) == [log[0], log[0]]


def test_a_large_transaction_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.change.event.PIECE", 3)
    log = log_of(2, 8, 3)
    tables = list(whole(in_batches(log, 4)))
    assert [len(each) for table in tables for each in transactions(table)] == [2, 3, 3, 2, 3]
    assert max(table.num_rows for table in tables) <= 5
