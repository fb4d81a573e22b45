"""What it costs to write a change down, in every format."""

import gc
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from headrace.change.event import BeforeKind, Change, Op, Table, Transaction
from headrace.formats import AnyFormat, StreamFormat, TransactionFormat
from headrace.formats.catalogue import Formats, names
from headrace.sources.postgres.position import PostgresPosition

from .orders import COLUMNS
from .report import Figure, Figures

CHANGES = 2000
PER_TRANSACTION = 10
TURNS = 20  # of each run, all short: what else the machine does falls on most, not on the best
TARGETS = {"savegress": 5, "notification": 5, "changefeed": 5, "entity": 15}  # µs a change
PEER = "msgspec.json.encode, of the decoded change"

_IMAGE = (
    b'{"id":%d,"customer_id":%d,"status":"%b","amount":"%d.95","note":"leave it at the door",'
    b'"created_at":"2025-01-15T10:30:%02d+00:00","paid":%b,"weight":12.75}'
)

T = TypeVar("T")
Work = Callable[[Sequence[Sequence[Change]]], object]


def measure(*, changes: int = CHANGES, turns: int = TURNS) -> Figures:
    """Microseconds a change: of each format the best turn."""
    formats = Formats()
    works: dict[str, Work] = {name: writing(formats.named(name)) for name in names()}
    # Everyone once, then everyone again: what slows the machine for a while slows them all.
    best = dict.fromkeys((*works, PEER), float("inf"))
    for turn in range(turns):
        # Never the same twice: what a format remembers of one change must not help it here.
        transactions = updates(changes, after=turn * changes)
        values = decoded(transactions)
        for name, work in works.items():
            best[name] = min(best[name], _seconds(work, transactions))
        best[PEER] = min(best[PEER], _seconds(_encoding, values))
    figures = [
        Figure(name, seconds / changes * 1e6, "µs", below=TARGETS.get(name))
        for name, seconds in best.items()
    ]
    return Figures("A change in every format: an update of 8 columns, with its old row", figures)


def updates(count: int, *, after: int = 0) -> list[list[Change]]:
    """Transactions of updates that change two columns of eight."""
    table = Table(
        "shop", "postgres", "postgres:7412345678901234567:shop", "shop", "public", "orders", COLUMNS
    )
    table = msgspec.structs.replace(table, identity="full", relation=16384, version=1)
    changes = [_update(table, number) for number in range(after + 1, after + count + 1)]
    return [changes[at : at + PER_TRANSACTION] for at in range(0, count, PER_TRANSACTION)]


def _update(table: Table, number: int) -> Change:
    transaction, ordinal = divmod(number - 1, PER_TRANSACTION)
    committed = 1_736_937_000_123_456 + transaction * 1_237
    old, new = (
        _IMAGE % (number, number % 977, status, number % 1000, number % 60, paid)
        for status, paid in ((b"new", b"false"), (b"paid", b"true"))
    )
    return Change(
        Op.UPDATE,
        table,
        b'{"id":%d}' % number,
        old,
        BeforeKind.FULL,
        new,
        ("status", "paid"),
        (),
        Transaction(str(741 + transaction), committed, committed + 900),
        ordinal + 1,
        PostgresPosition(23_803_904 + transaction * 4096, 23_803_720 + number * 200),
        ordinal + 1 == PER_TRANSACTION,
        number,
    )


def writing(format: AnyFormat) -> Work:
    """What writes transactions down, as a server or a sink would."""
    if isinstance(format, TransactionFormat):
        return lambda transactions: [format.render(each) for each in transactions]
    if isinstance(format, StreamFormat):
        stream = format.open()
        return lambda transactions: [
            stream.encode(change, wanted=True) for each in transactions for change in each
        ]
    return lambda transactions: [format.encode(change) for each in transactions for change in each]


_decode = msgspec.json.decode
_encode = msgspec.json.Encoder().encode


def decoded(transactions: Sequence[Sequence[Change]]) -> list[list[dict[str, object]]]:
    """Changes as one would hold them who works with rows instead of bytes."""
    return [
        [
            {name: getattr(change, name) for name in change.__struct_fields__ if name != "table"}
            | {
                "id": change.id,
                "table": change.table.name,
                "key": _decode(change.key or b"null"),
                "before": _decode(change.before or b"null"),
                "after": _decode(change.after or b"null"),
            }
            for change in transaction
        ]
        for transaction in transactions
    ]


def _encoding(transactions: Sequence[Sequence[object]]) -> list[bytes]:
    return [_encode(change) for transaction in transactions for change in transaction]


def _seconds(work: Callable[[T], object], transactions: T) -> float:
    gc.collect()
    gc.disable()  # as timeit does: what is made here is not garbage until the clock has stopped
    try:
        began = time.perf_counter()
        work(transactions)
        return time.perf_counter() - began
    finally:
        gc.enable()
