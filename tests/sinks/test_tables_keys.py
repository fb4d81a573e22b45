"""Keys as numbers, and the rows that have them."""

import tempfile
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from headrace.sinks.lake.plan import PlannedFile
from headrace.sinks.lake.storage import Folder
from headrace.sinks.tables import lookup
from headrace.sinks.tables.keys import is_exact, key_codes
from headrace.sinks.tables.lookup import KeyColumns, KeyIndex, KeyIndexes

VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.string(): st.text(max_size=8),
    pa.binary(): st.binary(max_size=8),
    pa.bool_(): st.booleans(),
    pa.decimal128(12, 2): st.decimals(-(10**9), 10**9, places=2),
    pa.date32(): st.dates(),
}


@st.composite
def columns(draw: st.DrawFn, nulls: bool) -> tuple[list[pa.DataType], list[tuple[Any, ...]]]:
    """Types of key columns, and some different keys."""
    types = draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=3))
    values = [VALUES[kind] | st.none() if nulls else VALUES[kind] for kind in types]
    return types, draw(st.lists(st.tuples(*values), unique=True, max_size=40))


def codes(types: list[pa.DataType], keys: list[tuple[Any, ...]], *, exact: bool) -> Any:
    arrays = [pa.array([key[at] for key in keys], kind) for at, kind in enumerate(types)]
    return key_codes(arrays, exact=exact)


@given(columns(nulls=True), st.data())
def test_each_key_is_found_where_it_is_and_no_other(
    given_keys: tuple[list[pa.DataType], list[tuple[Any, ...]]], data: st.DataObject
) -> None:
    types, keys = given_keys
    stored = data.draw(st.permutations(keys))[: len(keys) // 2]
    index = KeyIndex.of(codes(types, stored, exact=False))
    which, rows = index.find(codes(types, keys, exact=False))
    found = {keys[key]: int(row) for key, row in zip(which, rows, strict=True)}
    assert found == {key: row for row, key in enumerate(stored)}


@given(st.lists(VALUES[pa.int64()], unique=True), st.data())
def test_whole_numbers_are_their_own_codes(keys: list[int], data: st.DataObject) -> None:
    stored = data.draw(st.permutations(keys))[: len(keys) // 2]
    index = KeyIndex.of(codes([pa.int64()], [(key,) for key in stored], exact=True))
    which, rows = index.find(codes([pa.int64()], [(key,) for key in keys], exact=True))
    found = {keys[key]: int(row) for key, row in zip(which, rows, strict=True)}
    assert found == {key: row for row, key in enumerate(stored)}


def test_a_wider_number_has_the_same_code() -> None:
    narrow = key_codes([pa.array([1, -2], pa.int16())], exact=True)
    wide = key_codes([pa.array([1, -2], pa.int64())], exact=True)
    assert (narrow.codes == wide.codes).all()
    assert is_exact([pa.int16()])
    assert not is_exact([pa.string()])
    assert not is_exact([pa.int16(), pa.int16()])


def test_a_key_that_a_file_has_twice_is_found_twice() -> None:
    index = KeyIndex.of(codes([pa.string()], [("a",), ("b",), ("a",)], exact=False))
    _, rows = index.find(codes([pa.string()], [("a",)], exact=False))
    assert sorted(rows.tolist()) == [0, 2]


@pytest.mark.parametrize(
    ("kind", "value"),
    [(pa.int64(), lambda n: n * 7 % 1000), (pa.string(), lambda n: str(uuid.UUID(int=n)))],
)
def test_the_index_of_a_large_file_is_kept_on_disk_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, value: Any
) -> None:
    monkeypatch.setattr(lookup, "ON_DISK", 100)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    lookup._cache_folder.cache_clear()
    folder = Folder(str(tmp_path / "table"))
    rows = pa.table({"id": pa.array([value(n) for n in range(1000)], kind)})
    added = folder.write(rows, "rows", {})
    file, key = PlannedFile(added.path, added.rows, 0), KeyColumns(("id",), (kind,))
    wanted = key.codes(rows.take([500, 3]))
    found = KeyIndexes().of(folder, file, key).find(wanted)
    (cache,) = tmp_path.glob("headrace-keys-*")
    assert cache.stat().st_mode & 0o777 == 0o700
    (stored,) = cache.iterdir()
    (tmp_path / "table" / added.path).unlink()  # from now on only the index knows
    again = KeyIndexes().of(folder, file, key).find(wanted)
    for which, numbers in (found, again):
        assert sorted(zip(which.tolist(), numbers.tolist(), strict=True)) == [(0, 500), (1, 3)]
    # What was written in part is not believed.
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(Exception, match=added.path):
        KeyIndexes().of(folder, file, key)
    lookup._cache_folder.cache_clear()


def test_a_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lookup._cache_folder.cache_clear()
    mine = lookup._cache_folder()
    assert mine is not None
    mine.chmod(0o777)
    lookup._cache_folder.cache_clear()
    assert lookup._cache_folder() is None
    lookup._cache_folder.cache_clear()


def test_decimals_compare_by_their_value_at_the_scale_of_the_column() -> None:
    kind = pa.decimal128(12, 2)
    stored = key_codes([pa.array([Decimal("1.50"), Decimal(2)], kind)], exact=False)
    wanted = key_codes([pa.array([Decimal("1.5")], kind)], exact=False)
    _, rows = KeyIndex.of(stored).find(wanted)
    assert rows.tolist() == [0]
    assert np.all(stored.check is not None)
