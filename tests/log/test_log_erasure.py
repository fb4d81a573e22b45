"""A row's values leave the log and its disk; its changes stay, in their order."""

from pathlib import Path

import msgspec
import pytest

from headrace.change.erasure import KeyValues, ValuePattern
from headrace.change.event import BeforeKind, Change, Column, Op, Table
from headrace.errors import ConfigError
from headrace.log import Log
from headrace.log._layout import change_key
from headrace.log.erasure import COMMON, RowHistory, erase, find, search, spread, versions_of
from tests.sinks.lake import Shop, change, put, remove, truncate

MARKER = "zebra-marker-47114"
COLUMNS = (Column("id", "bigint", key=True), Column("email", "text"), Column("note", "text"))
KEY = KeyValues({"id": "42"})


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def put_user(table: Table, number: int, email: str, op: Op = Op.INSERT, note: str = "") -> Change:
    return put(table, op, id=number, email=email, note=note or f"note of {number}")


def full_update(table: Table, number: int, old: str, new: str) -> Change:
    image = '{{"id":{},"email":"{}","note":"x"}}'
    return change(
        Op.UPDATE,
        table,
        key=b'{"id":%d}' % number,
        before=image.format(number, old).encode(),
        before_kind=BeforeKind.FULL,
        after=image.format(number, new).encode(),
        changed=("email",),
    )


def erased(log: Log, key: KeyValues = KEY) -> RowHistory:
    found = find(log, versions_of(log, "public.users"), key)
    erase(log, found)
    assert log.replaced_copies(found.places) == []
    return found


def files_with(folder: Path, text: str = MARKER) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path.name for path in files if text.encode() in path.read_bytes())


def images(log: Log) -> list[tuple[str, bytes | None, bytes | None]]:
    return [(each.op.value, each.before, each.after) for each in log.read(0)]


def test_a_deleted_row_leaves_its_key_and_nothing_else(shop: Shop, tmp_path: Path) -> None:
    users = shop.table("users", COLUMNS)
    shop.commit(put_user(users, 41, "other@example.com"), put_user(users, 42, f"a@{MARKER}"))
    shop.commit(full_update(users, 42, f"a@{MARKER}", f"b@{MARKER}"))
    shop.commit(remove(users, id=42), put_user(users, 43, "third@example.com"))
    before = [(each.sequence, each.id, each.op, each.key, each.last) for each in shop.log.read(0)]
    assert files_with(tmp_path)
    found = erased(shop.log)
    assert (found.gone, found.kept, sorted(found.sequences)) == (True, 0, [2, 3, 4])
    assert images(shop.log) == [
        ("INSERT", None, b'{"id":41,"email":"other@example.com","note":"note of 41"}'),
        ("INSERT", None, b'{"id":42,"email":null,"note":null}'),
        ("UPDATE", b'{"id":42}', b'{"id":42,"email":null,"note":null}'),
        ("DELETE", b'{"id":42}', None),
        ("INSERT", None, b'{"id":43,"email":"third@example.com","note":"note of 43"}'),
    ]
    after = [(each.sequence, each.id, each.op, each.key, each.last) for each in shop.log.read(0)]
    assert after == before
    assert files_with(tmp_path) == []
    shop.log.close()
    with Log.open(tmp_path / "log") as log:
        assert erase(log, find(log, versions_of(log, "users"), KEY)) == 0
    assert files_with(tmp_path) == []


def test_no_copy_stays_in_files_that_rocksdb_had_moved_down(shop: Shop, tmp_path: Path) -> None:
    users = shop.table("users", COLUMNS)
    for start in range(0, 3000, 100):
        shop.commit(*(put_user(users, n, f"{n}@example.com") for n in range(start, start + 100)))
    shop.commit(put_user(users, 42, f"a@{MARKER}", Op.UPDATE))
    shop.log._db.flush()
    shop.log.reclaim(10_000)
    shop.commit(remove(users, id=42))
    assert files_with(tmp_path)
    found = find(shop.log, versions_of(shop.log, "users"), KEY)
    shop.log.rewrite(found.erased())
    assert shop.log.replaced_copies(found.places) == found.places
    erased(shop.log)
    assert files_with(tmp_path) == []
    assert len(shop.log.read(0, limit=10_000)) == 3002
    shop.log.close()


def test_trimmed_changes_leave_the_disk_too(shop: Shop, tmp_path: Path) -> None:
    users = shop.table("users", COLUMNS)
    shop.commit(put_user(users, 42, f"a@{MARKER}"))
    shop.commit(put_user(users, 41, "other@example.com"), remove(users, id=42))
    shop.log._db.flush()
    shop.log.trim(2, force=True)
    assert files_with(tmp_path)
    assert shop.log.replaced_copies([]) == [2]
    erased(shop.log)
    assert files_with(tmp_path) == []
    shop.log.close()


@pytest.mark.parametrize("hidden", [0, 3])
def test_rows_of_a_block_become_null(shop: Shop, tmp_path: Path, hidden: int) -> None:
    users = shop.table("users", COLUMNS)
    rows = [{"id": n, "email": f"{n}@{MARKER}", "note": None} for n in (41, 42, 43, 44)]
    shop.snapshot(users, rows)
    shop.commit(remove(users, id=42))
    if hidden:  # a trim may hide rows of a block, which stay on the disk
        shop.log.trim(hidden, force=True)
    erased(shop.log)
    expected = [rows[0], {"id": 42, "email": None, "note": None}, *rows[2:]]
    stored = shop.log.read(0)[: 4 - max(hidden - 1, 0)]
    assert [msgspec.json.decode(each.after or b"") for each in stored] == expected[-len(stored) :]
    assert files_with(tmp_path, f"42@{MARKER}") == []
    block = shop.log._db.get(change_key(1)) or b""  # RocksDB compresses what is in its files
    assert f"42@{MARKER}".encode() not in block
    assert f"43@{MARKER}".encode() in block
    shop.log.close()


def test_the_last_values_of_a_row_that_is_still_there_stay_and_are_whole(shop: Shop) -> None:
    users = shop.table("users", COLUMNS)
    shop.commit(put_user(users, 42, f"a@{MARKER}", note="a large document"))
    partial = put(users, Op.UPDATE, id=42, email="gone@invalid")
    shop.commit(partial)
    assert shop.log.read(1)[0].unchanged == ("note",)
    found = erased(shop.log)
    assert (found.gone, found.kept) == (False, 2)
    assert found.values() == {("email", f"a@{MARKER}")}
    assert images(shop.log) == [
        ("INSERT", None, b'{"id":42,"email":null,"note":null}'),
        ("UPDATE", None, b'{"id":42,"email":"gone@invalid","note":"a large document"}'),
    ]
    assert shop.log.read(1)[0].unchanged == ()
    shop.log.close()


def test_a_table_that_was_emptied_has_no_row(shop: Shop) -> None:
    users = shop.table("users", COLUMNS)
    shop.commit(put_user(users, 42, f"a@{MARKER}"))
    shop.commit(truncate(users))
    assert erased(shop.log).gone
    assert images(shop.log)[0] == ("INSERT", None, b'{"id":42,"email":null,"note":null}')
    shop.log.close()


def test_a_row_that_changed_its_key_is_named_with_the_other_key(shop: Shop) -> None:
    users = shop.table("users", COLUMNS)
    shop.commit(put_user(users, 42, f"a@{MARKER}"))
    shop.commit(put(users, Op.UPDATE, was={"id": 42}, id=50, email=f"b@{MARKER}", note="n"))
    found = erased(shop.log)
    assert found.gone
    assert found.others == ('{"id":50}',)
    assert images(shop.log) == [
        ("INSERT", None, b'{"id":42,"email":null,"note":null}'),
        ("UPDATE", b'{"id":42}', b'{"id":50,"email":"b@zebra-marker-47114","note":"n"}'),
    ]
    moved = find(shop.log, versions_of(shop.log, "users"), KeyValues({"id": "50"}))
    assert moved.others == ('{"id":42}',)
    shop.log.close()


@pytest.mark.parametrize("hops", [(50,), (50, 60)])
def test_a_row_that_has_another_key_keeps_what_was_sent_under_the_erased_one(
    shop: Shop, hops: tuple[int, ...]
) -> None:
    users = shop.table("users", COLUMNS)
    shop.commit(put_user(users, 42, f"a@{MARKER}", note="a large document"))
    for old, new in zip((42, *hops), hops, strict=False):
        shop.commit(put(users, Op.UPDATE, was={"id": old}, id=new, email="b@example.com"))
    found = erased(shop.log)
    assert found.values() == {("email", f"a@{MARKER}")}
    assert images(shop.log)[:2] == [
        ("INSERT", None, b'{"id":42,"email":null,"note":null}'),
        (
            "UPDATE",
            b'{"id":42}',
            b'{"id":50,"email":"b@example.com","note":"a large document"}',
        ),
    ]
    assert shop.log.read(1)[0].unchanged == ()
    assert search(shop.log, versions_of(shop.log, "users"), found).left == ()
    shop.log.close()


def test_a_row_that_is_gone_under_its_other_key_too_is_given_nothing(shop: Shop) -> None:
    users = shop.table("users", COLUMNS)
    shop.commit(put_user(users, 42, f"a@{MARKER}", note="a large document"))
    shop.commit(put(users, Op.UPDATE, was={"id": 42}, id=50, email="b@example.com"))
    shop.commit(remove(users, id=50))
    assert ("note", "a large document") in erased(shop.log).values()
    assert images(shop.log)[1][2] == b'{"id":50,"email":"b@example.com"}'
    shop.log.close()


def test_the_search_tells_the_values_of_other_rows_apart(shop: Shop) -> None:
    users, orders = shop.table("users", COLUMNS), shop.table("orders", COLUMNS)
    shop.commit(put_user(users, 42, f"a@{MARKER}", note="secret-of-42"))
    shop.commit(put_user(users, 42, "x", Op.UPDATE, note="Germany"))
    others = (put(orders, id=n, email="x", note="Germany") for n in range(COMMON + 1))
    shop.commit(put(orders, id=7, email=f"a@{MARKER}", note="x"), remove(users, id=42), *others)
    versions = versions_of(shop.log, "users")
    found = find(shop.log, versions, KEY)
    assert search(shop.log, versions, found).left == (1, 2)
    where = spread(shop.log, found)
    assert where.own == {"secret-of-42"}
    assert where.copies == {"public.orders": 1}
    erase(shop.log, found)
    seen = search(shop.log, versions, found)
    assert (seen.left, seen.copies, seen.annotated) == ((), (), ())
    shop.log.close()


def test_a_key_may_be_text_or_have_several_columns() -> None:
    assert KeyValues.of('{"tenant":1,"id":"x\\u00fc"}').are_in('{"id":"xü","tenant":1,"n":2}')
    assert not KeyValues.of('{"tenant":1,"id":2}').are_in('{"tenant":1}')
    assert ValuePattern(('say "hello"', "short")).found_in(b'{"a":"say \\"hello\\""}')


def test_a_table_is_named_clearly(shop: Shop) -> None:
    shop.table("users", COLUMNS)
    with pytest.raises(ConfigError, match="the log has no table public"):
        versions_of(shop.log, "public.user")
    shop.log.close()
