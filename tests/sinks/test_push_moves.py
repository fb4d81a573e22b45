"""Which changes of a key with several rows have an event, wherever reading begins; no Spark."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.change.event import BeforeKind, Change, Column, Op, Table
from headrace.formats.catalogue import Formats
from headrace.pipeline.options import Options
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.sinks import LogRange
from headrace.sinks.push import Event, moves
from headrace.sinks.push.delivery import Counts, DeliveryCheckpoint
from headrace.sinks.push.events import Barrier, EventRendering, part_of
from headrace.sinks.push.ledger import LedgerEntry, PushLedger
from headrace.sinks.push.writer import PushWriter
from headrace.transforms.rules import TableTransform, Transforms
from tests.sinks.lake import Row, Shop, change, put, remove, schema, truncate
from tests.sinks.push_harness import USERS
from tests.sinks.socket_sink import kind
from tests.sinks.test_push_writer import Local, post, refusing

__all__ = ["post"]  # a fixture

RENDERING = EventRendering(Formats(), "canonical", splits_keys=True)
SHAPED = Transforms({"users": TableTransform(where="id < 95")}, "post")


class Books(Shop):
    """A log, read from anywhere."""

    def events(
        self, after: int = 0, rendering: EventRendering = RENDERING, **part: int
    ) -> list[Event]:
        """The events of what follows a change."""
        path = str(self.log.path)
        log = PipelineLog(DiskLog(path), Options(path=path))
        wanted = LogRange(log, self.log.epoch, after, self.log.latest_sequence, **part)
        return [event for chunk in rendering.events(wanted) for event in chunk.events]


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    made = Books(tmp_path)
    yield made
    made.log.close()


def whole(shop: Shop, columns: tuple[Column, ...] = USERS, name: str = "users") -> Table:
    """A table whose old rows come whole."""
    return shop.log.register(replace(shop.table(name, columns), identity="full", version=0))


def moved(table: Table, was: Row, now: Row) -> Change:
    return old(put(table, Op.UPDATE, was=was, **now), was)


def old(found: Change, was: Row) -> Change:
    return replace(found, before=msgspec.json.encode(was), before_kind=BeforeKind.FULL)


def gone(table: Table, was: Row) -> Change:
    return old(remove(table, id=was["id"]), was)


def user(key: int, name: str) -> Row:
    return {"id": key, "name": name}


def shown(events: list[Event]) -> list[tuple[int, str]]:
    return [(event.sequence, event.op) for event in events]


def shift(table: Table, keys: list[int]) -> Iterator[Change]:
    """UPDATE … SET id = id + 1, in this order."""
    for key in keys:
        yield moved(table, user(key, f"n{key}"), user(key + 1, f"n{key}"))


@pytest.mark.requirement("P-38")
@pytest.mark.parametrize("transforms", [Transforms({}, "post"), SHAPED], ids=["plain", "shaped"])
@pytest.mark.parametrize("parts", [1, 3])
def test_events_are_the_same_wherever_in_a_transaction_reading_begins(
    books: Books, monkeypatch: pytest.MonkeyPatch, parts: int, transforms: Transforms
) -> None:
    monkeypatch.setattr(moves, "REMEMBERED", 7)
    users, others = whole(books), whole(books, name="others")
    keys = random.Random(5).sample(range(20), 20)
    books.commit(put(users, id=90, name="before"))
    books.commit(*shift(users, keys), truncate(others), schema(users), *shift(others, keys))
    rendering = EventRendering(Formats(), "canonical", splits_keys=True, transforms=transforms)
    for part in range(parts):
        all_of_it = books.events(rendering=rendering, part=part, parts=parts)
        for after in range(books.log.latest_sequence):
            found = books.events(after, rendering, part=part, parts=parts)
            assert found == [event for event in all_of_it if event.sequence > after]


def test_a_delete_that_is_not_sent_is_not_sent_by_a_batch_that_begins_later(post: Local) -> None:
    post.reopen(moves=True)
    users = whole(post)
    post.commit(put(users, id=1, name="old"))
    post.commit(put(users, id=1, name="new"), gone(users, user(1, "old")))
    post.write(upto=2)
    post.write()
    assert [event.op for event in post.office.taken] == ["INSERT", "INSERT"]


def test_nor_behind_the_truncate_of_another_table(post: Local) -> None:
    post.reopen(moves=True)
    users, others = whole(post), whole(post, name="others")
    post.commit(put(users, id=1, name="old"))
    post.commit(put(users, id=1, name="new"), truncate(others), gone(users, user(1, "old")))
    post.write(parts=3)
    assert [event.op for event in post.office.taken] == ["INSERT", "INSERT", "TRUNCATE"]


@pytest.mark.parametrize("ends", ["TRUNCATE", "DROP"])
def test_rows_of_a_table_that_was_emptied_keep_no_key(books: Books, ends: str) -> None:
    users = whole(books)
    drop = change(Op.SCHEMA, users, after=b'{"dropped":true}')
    books.commit(
        put(users, id=1, name="first"),
        truncate(users) if ends == "TRUNCATE" else drop,
        gone(users, user(1, "other")),
    )
    for part in range(3):
        assert all(event.sequence in (1, 2, 3) for event in books.events(part=part, parts=3))
    assert [sequence for sequence, _ in shown(books.events())] == [1, 2, 3]
    behind = [event for part in range(3) for event in books.events(2, part=part, parts=3)]
    assert shown(behind) == [(3, "DELETE")]


def test_an_update_of_a_row_whose_key_another_one_has_now_is_not_sent(books: Books) -> None:
    users = whole(books)
    books.commit(
        moved(users, user(1, "a"), user(2, "a")),
        old(put(users, Op.UPDATE, **user(2, "b2")), user(2, "b")),
        moved(users, user(2, "b2"), user(3, "b2")),
        old(put(users, Op.UPDATE, **user(2, "a2")), user(2, "a")),
    )
    assert shown(books.events()) == [(1, "DELETE"), (1, "INSERT"), (3, "INSERT"), (4, "UPDATE")]


def test_a_row_that_was_altered_since_it_came_is_deleted(books: Books) -> None:
    users = whole(books)
    more = whole(books, (*USERS, Column("size", "int", initial_default="1")))
    books.commit(put(users, id=1, name="a"), schema(more), gone(more, user(1, "a") | {"size": 1}))
    assert shown(books.events()) == [(1, "INSERT"), (2, "SCHEMA"), (3, "DELETE")]


def test_a_row_is_forgotten_after_so_many_changes_of_its_transaction(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "REMEMBERED", 5)
    users = whole(books)
    # Two rows come to keys of others, which leave them later.
    came = [put(users, id=key, name="new") for key in (1, 2)]
    books.commit(
        *came,
        *(put(users, id=key, name="-") for key in range(10, 17)),
        gone(users, user(1, "old")),  # the tenth: in the span behind theirs
        gone(users, user(2, "old")),  # the eleventh: no longer
    )
    assert shown(books.events())[9:] == [(11, "DELETE")]


def test_of_a_large_transaction_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "REMEMBERED", 10_000)
    table = Table("shop", "postgres", "o", "shop", "public", "t", USERS, identity="full")
    keys, row = moves.PassedKeys(), put(table, id=1, name="")
    tracemalloc.start()
    for ordinal in range(1, 100_001):
        came = replace(row, ordinal=ordinal, after=b'{"id":%d,"name":"%b"}' % (ordinal, b"x" * 500))
        assert keys.shows(came, f"shop|public.t:{ordinal}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000 * 400, "the images alone had 50 MB"


# --- barriers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "met", "last"),
    [
        ("canonical", 2, 4),
        ("savegress", 2, 4),
        ("cloudevents", 2, 4),
        ("debezium", 3, 4),  # has no event of a SCHEMA
        ("changefeed", 0, 0),  # … nor of a TRUNCATE
        ("notification", 0, 0),
    ],
)
def test_reading_ends_at_changes_of_tables_that_have_events(
    books: Books, format: str, met: int, last: int
) -> None:
    users, others = books.table("users", USERS), books.table("others", USERS)
    books.commit(put(users, id=1, name="a"), schema(users), truncate(users), schema(others))
    books.commit(put(users, id=1, name="b"), truncate(users))
    path = str(books.log.path)
    log, barrier = PipelineLog(DiskLog(path), Options(path=path)), Barrier()
    rendering = EventRendering(Formats(), format, splits_keys=True)
    wanted = LogRange(log, books.log.epoch, 0, books.log.latest_sequence)
    chunks = list(rendering.events(wanted, barrier))
    assert (barrier.met, barrier.last) == (met, last)
    assert chunks[-1].last == (met - 1 if met else books.log.latest_sequence)


def test_a_batch_that_an_earlier_version_began_ends_without_barriers_at_schemas(
    post: Local,
) -> None:
    users = post.table("users", USERS)
    post.commit(*(put(users, id=key, name="a") for key in range(9)), schema(users))
    post.commit(*(put(users, id=key, name="b") for key in range(9)))
    options = replace(post.sink.rendered, schema_barriers=False)
    # All parts but one have sent everything, and that one nothing.
    counts = Counts(sent=sum(part_of(event.row, 3) != 1 for event in _earlier(post)))
    points = {1: DeliveryCheckpoint()}
    entry = LedgerEntry("paused", "query-1", 0, counts=counts, tasks=3, points=points)
    ledger = PushLedger.open(post.sink.folder, "query-1", adopt=False)
    ledger.begin(0, 0)
    ledger.pause(replace(entry, rendered=options, closed=True))
    post.reopen()
    post.write(parts=3)
    assert {part_of(event.row, 3) for event in post.office.taken} == {1}
    assert counts.sent + len(post.office.taken) == 19
    assert post.lines("settled")[-1].rendered == options


def _earlier(post: Local) -> list[Event]:
    path = str(post.log.path)
    wanted = LogRange(
        PipelineLog(DiskLog(path), Options(path=path)),
        post.log.epoch,
        0,
        post.log.latest_sequence,
    )
    earlier = EventRendering(Formats(), "savegress", schema_barriers=False)
    return [event for chunk in earlier.events(wanted) for event in chunk.events]


def test_a_schema_that_is_refused_holds_up_its_table_until_it_is_redriven(post: Local) -> None:
    users, others = post.table("users", USERS), post.table("others", USERS)
    post.commit(put(users, id=1, name="a"), schema(users), put(users, id=1, name="b"))
    post.commit(put(others, id=1, name="-"))
    post.office.judge = refusing(2)
    post.write(parts=3)
    assert post.sequences() == [1, 4]
    waiting = [(letter["sequence"], letter["status"]) for letter in post.letters()]
    assert waiting == [(2, "refused"), (3, "waiting")]
    post.office.judge = kind
    assert post.redrive().sent == 2
    assert post.sequences() == [1, 4, 2, 3]


def test_many_schemas_in_a_row_are_sent_in_one_round(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = list[int]()
    known = PushWriter._round

    def counted(self: PushWriter, *given: Any) -> None:
        rounds.append(1)
        known(self, *given)

    monkeypatch.setattr(PushWriter, "_round", counted)
    tables = [post.table(f"t{number}", USERS) for number in range(30)]
    post.commit(*map(schema, tables), *map(truncate, tables))
    post.commit(*(put(table, id=1, name="a") for table in tables))
    post.write(parts=3)
    assert len(post.office.taken) == 90
    assert len(rounds) == 3, "before them, they, and behind them"
