"""A block of rows reads as the single changes it stands for."""

import msgspec
import pytest

from headrace.change import record
from headrace.change.block import ColumnText, RowBlock, column_text, json_text, pack, row_count
from headrace.change.printed import Printed
from tests.changes import make_table
from tests.log.blocks import as_block, rows

TABLE = make_table(version=3)


@pytest.mark.requirement("C-28")
@pytest.mark.parametrize("size", [1, 2, 300])
def test_a_block_is_a_sequence_of_changes(size: int) -> None:
    changes = rows(TABLE, 1, size)
    block = as_block(changes, TABLE, 1)
    assert len(block) == size
    assert list(block) == changes
    assert (block[0], block[-1], list(block[1:])) == (changes[0], changes[-1], changes[1:])
    assert record.encode_runs(block)[1] == record.encode_runs(changes)[1]
    [value] = block.encoded
    assert row_count(value) == size
    assert RowBlock(value).records(0, size) == record.encode(changes)
    assert len(value) < sum(map(len, record.encode(changes))) + 200


def test_where_a_row_stands_is_what_its_record_says() -> None:
    changes = rows(TABLE, 1, 5)
    [value] = as_block(changes, TABLE, 1).encoded
    heads = [record.head(each) for each in record.encode(changes)]
    assert [record.head_in(RowBlock(value), row) for row in range(5)] == heads
    assert record.last_head(value) == heads[-1]
    assert record.captured_at(value) == heads[-1].captured_at
    assert list(record.transactions([value])) == list(record.transactions(record.encode(changes)))


@pytest.mark.parametrize(
    ("values", "printed"),
    [
        ([b"a\\tb"], Printed.TEXT),  # escaped by COPY
        ([b"\\\\N"], Printed.TEXT),
        ([b"a\tb"], Printed.TEXT),
        ([b"\\N", b"\\N\\N"], Printed.TEXT),
        ([b"\xff"], Printed.TEXT),
        ([b"\xff"], Printed.PLAIN),
        ([b"t", b"yes"], Printed.BOOLEAN),
        ([b"t", b""], Printed.BOOLEAN),
        ([b"", b"1.5"], Printed.FLOAT),
        ([b""], Printed.FLOAT),
    ],
)
def test_what_a_block_cannot_keep_as_it_was_printed_is_refused(
    values: list[bytes], printed: Printed
) -> None:
    assert column_text(values, printed) is None


@pytest.mark.parametrize(
    ("values", "printed"),
    [
        ([b"\\N", b"", b"N", b"null"], Printed.TEXT),
        ([b"\\N"], Printed.TEXT),
        (["é水".encode(), b'"', b"\x01"], Printed.TEXT),
        ([b"1", b"\\N"], Printed.PLAIN),
        ([b"t", b"\\N", b"f"], Printed.BOOLEAN),
        ([b"NaN", b"\\N", b"-0"], Printed.FLOAT),
    ],
)
def test_null_is_no_text(values: list[bytes], printed: Printed) -> None:
    found = column_text(values, printed)
    assert found is not None
    images = _block(found.printed, found.text, len(values)).images(["name"], 0, len(values))
    for value, image in zip(values, images, strict=True):
        assert (msgspec.json.decode(image)["name"] is None) is (value == b"\\N")


def test_a_tab_in_json_is_refused() -> None:
    assert json_text([b"[1,\t2]"]) is None


def test_a_table_without_columns_has_empty_objects() -> None:
    [value] = as_block(rows(TABLE, 1, 3), TABLE, 1).encoded
    assert RowBlock(value).images([], 0, 3) == [b"{}"] * 3
    assert RowBlock(value).images(["unknown"], 1, 3) == [b"{}"] * 2


def _block(printed: Printed, text: bytes, count: int) -> RowBlock:
    table = make_table(key=(), version=1)
    change = rows(table, 1, 1)[0]
    positions = change.position, change.position
    return RowBlock(pack(table, change.transaction, positions, [ColumnText(printed, text)], count))
