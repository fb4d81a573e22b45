"""Two looks at a table say what has happened to its rows; a message's columns get their numbers."""

from typing import Any

import msgspec
import pytest

from headrace.sources.postgres.looks import (
    LookColumn,
    LookParts,
    LookState,
    Numbering,
    TableLook,
    compare,
    missing_value,
    numbered,
    numbers_in,
    spans,
)


def look(*numbers: int, attributes: int = 0, **more: Any) -> TableLook:
    """A table with these columns; the highest number that one ever had is `attributes`."""
    columns = tuple(LookColumn(f"c{n}", 25, -1, n == 1, n, xmin="9") for n in numbers)
    highest = max(attributes, *numbers)
    return TableLook(7, "public", "t", "default", columns, highest, storage=1, **more)


@pytest.mark.parametrize(
    ("before", "now", "count", "found"),
    [
        (look(1, 2), look(1, 2), 2, [1, 2]),
        (look(1, 2), look(1, 2, 3, 4), 2, [1, 2]),
        (look(1, 2), look(1, 2, 3, 4), 3, [1, 2, 3]),
        (look(1, 2, 3), look(1, 3), 2, [1, 3]),
        (look(1, 2, 3), look(1, 3), 3, [1, 2, 3]),
        (look(1, 2), look(1, 3), 3, [1, 2, 3]),
        (look(1, 2), look(1, 3), 1, [1]),
        (look(1, 2, 3, 4), look(1, 4), 2, [1, 4]),
        (look(1, 2), look(1, 2, 4), 3, None),  # the third was dropped, or is the fourth
        (look(1, 2), look(1, 3), 2, None),  # before or after both
        (look(1, 2, 3, 4), look(1, 4), 3, None),  # the second or the third was dropped first
        (look(1, 2), look(1, 2), 3, None),  # the catalogs do not show it yet
    ],
)
def test_columns_get_the_numbers_that_only_they_can_have(
    before: TableLook, now: TableLook, count: int, found: list[int] | None
) -> None:
    given = numbered(LookState.of(before), ["x"] * count, now)
    assert given.certain is (found is not None)
    assert found is None or given.numbers == found


def test_without_a_look_before_names_count() -> None:
    assert numbered(None, ["c1", "c3"], look(1, 2, 3)) == Numbering([1, 3], True)
    assert numbered(None, ["c3", "c1"], look(1, 2, 3)) == Numbering([0, 0], True)


PARTS = LookParts(2, 30, ((20, True), (10, True)))


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (LookParts(2, 30, ((20, True), (10, True))), ""),
        (LookParts(3, 35, ((5, True), (20, True), (10, True))), ""),
        (LookParts(3, 35, ((5, False), (20, True), (10, True))), "attached"),
        (LookParts(1, 20, ((20, True),)), "detached"),
        (LookParts(2, 31, ((21, True), (10, True))), "truncated"),
        (None, "partitions"),
    ],
)
def test_only_empty_partitions_may_come(now: LookParts | None, why: str) -> None:
    before = LookState.of(look(1, parts=PARTS))
    assert why in compare(before, look(1, parts=now)).reason
    assert bool(why) is bool(compare(before, look(1, parts=now)).reason)


def test_a_file_or_a_definition_alone_rewrites_nothing() -> None:
    before = LookState.of(look(1, 2))
    other_file = msgspec.structs.replace(look(1, 2), storage=2)
    assert not compare(before, other_file).reason
    assert not compare(before, look(1, 2, 3)).reason
    assert compare(before, msgspec.structs.replace(look(1, 2, 3), storage=2)).reason


def typed(*labels: int) -> TableLook:
    """A table whose second column has an enum of these labels."""
    seen = look(1, 2)
    mood = msgspec.structs.replace(seen.columns[1], types=("", labels))
    return msgspec.structs.replace(seen, columns=(seen.columns[0], mood))


def test_a_type_altered_between_the_first_row_of_its_column_and_the_first_look_is_noticed() -> None:
    before = LookState.of(look(1))
    described = before.described(numbered(before, ["c1", "c2"], typed(5, 6)))
    assert described.unseen([1, 2])
    assert not compare(described, typed(5, 6, 7)).reason  # a label more
    assert "c2" in compare(described, typed(8, 6)).reason
    assert not compare(described, typed(5, 6)).state.unseen([1, 2])


@pytest.mark.parametrize(("xid", "noticed"), [(99, True), (100, True), (101, False), (7, False)])
def test_a_type_altered_after_the_first_row_of_its_column_is_noticed_by_the_first_look(
    xid: int, noticed: bool
) -> None:
    before, now = LookState.of(look(1)), typed(5, 6)
    altered = 100 if xid > 50 else (1 << 32) - 1  # ids begin anew after the last one
    mood = msgspec.structs.replace(now.columns[1], types_xid=altered)
    now = msgspec.structs.replace(now, columns=(now.columns[0], mood))
    described = before.described(numbered(before, ["c1", "c2"], now, xid=xid))
    assert ("c2" in compare(described, now).reason) is noticed


def test_a_state_comes_back_from_the_resume_as_it_was() -> None:
    state = LookState.of(look(1, 2, 5, parts=PARTS))
    assert msgspec.json.decode(msgspec.json.encode(state), type=LookState) == state
    assert len(msgspec.json.encode(state)) < 100


def test_numbers_are_written_as_spans() -> None:
    for numbers in ([], [1], [1, 2, 3], [1, 3, 4, 9]):
        assert numbers_in(spans(numbers)) == numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{n}", "n"),
        (r'{"x,\"y\\"}', 'x,"y\\'),
        ('{"{1,2}"}', "{1,2}"),
        ("{(1,1),(0,0)}", "(1,1),(0,0)"),
    ],
)
def test_an_initial_default_is_the_one_element_of_its_array(text: str, value: str) -> None:
    assert missing_value(text) == value
