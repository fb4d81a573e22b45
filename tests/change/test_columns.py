"""Which column of a table is which, from one version of it to the next."""

import pytest

from headrace.change.columns import carried_columns, schema_payload
from headrace.change.event import Column, Table


def _names(before: list[Column], after: list[Column]) -> dict[str, str | None]:
    return {
        column.name: was.name if was else None for column, was in carried_columns(before, after)
    }


@pytest.mark.requirement("P-03")
def test_a_renamed_column_keeps_its_values_and_one_of_its_old_name_does_not_get_them() -> None:
    before = [Column("id", "int", key=True, number=1), Column("name", "text", number=2)]
    after = [
        Column("id", "int", key=True, number=1),
        Column("title", "text", number=2),
        Column("name", "text", number=3),
    ]
    assert _names(before, after) == {"id": "id", "title": "name", "name": None}


def test_without_numbers_the_name_decides() -> None:
    before = [Column("id", "int", key=True), Column("name", "text")]
    after = [Column("id", "int", key=True, number=1), Column("name", "text", number=2)]
    assert _names(before, after) == {"id": "id", "name": "name"}


def test_a_schema_change_shows_number_and_initial_default_where_there_are_any() -> None:
    columns = (Column("id", "int", key=True), Column("n", "text", number=3, initial_default='"x"'))
    table = Table("shop", "postgres", "", "", "public", "parcel", columns=columns)
    payload = schema_payload(table)
    assert [sorted(each) for each in payload["columns"]] == [
        ["key", "name", "type"],
        ["initial_default", "key", "name", "number", "type"],
    ]
