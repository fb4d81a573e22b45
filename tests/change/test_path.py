"""A table's path is a text that no other table has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.event import Table
from headrace.change.path import (
    path_matches,
    path_parts,
    qualified,
    split_path,
    table_path,
    without_schema,
)
from headrace.sinks.lake.storage import folder_name

names = st.text('ab.".', min_size=1, max_size=6)


@given(names, names)
def test_a_path_is_split_into_what_it_was_made_of(schema: str, name: str) -> None:
    path = table_path(schema, name)
    assert split_path(path) == (schema, name)
    assert qualified(path, "") == path
    assert len([*path_parts(path)]) == 2
    assert split_path(f"main.{without_schema(path)}") == ("main", name)
    assert path_matches(schema, name, path)


@given(st.tuples(names, names), st.tuples(names, names))
def test_two_tables_have_two_paths_and_two_folders(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    same = one == other
    assert (table_path(*one) == table_path(*other)) is same
    assert (list(map(folder_name, one)) == list(map(folder_name, other))) is same


@given(st.text("ab*", min_size=1), st.text('ab"', min_size=1))
def test_names_without_dots_are_written_as_they_are(schema: str, name: str) -> None:
    if not name.startswith('"'):
        assert table_path(schema, name) == f"{schema}.{name}"


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ('"x.y".z', {("x.y", "z")}),
        ('x."y.z"', {("x", "y.z")}),
        ("x.y.z", {("x.y", "z"), ("x", "y.z")}),
        ("x.*", {("x", "y.z"), ("x", "Z")}),
        ('"x.y".*', {("x.y", "z")}),
        ('"y.z"', {("x", "y.z")}),
        ("z", {("x.y", "z")}),
        ('"x"."Z"', {("x", "Z")}),
        ('"Z"', {("x", "Z")}),
        ("*", {("x.y", "z"), ("x", "y.z"), ("x", "Z")}),
    ],
)
def test_quotes_in_a_pattern_say_which_dots_belong_to_a_name(
    pattern: str, meant: set[tuple[str, str]]
) -> None:
    tables = [("x.y", "z"), ("x", "y.z"), ("x", "Z")]
    found = [Table("shop", "postgres", "", "", schema, name) for schema, name in tables]
    assert {(each.schema, each.name) for each in found if each.matches(pattern)} == meant
