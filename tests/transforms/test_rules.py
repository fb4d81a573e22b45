"""Transforms as a config has them, and what they make of a table's columns."""

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.change.event import Column
from headrace.config.reading import parse
from headrace.errors import ConfigError, TableFailed
from headrace.secret import Secret
from headrace.transforms import Mask, TableTransform, Transforms
from headrace.transforms.rules import Selected, TransformNote
from headrace.transforms.shape import fitted, passing, result_schema

KEY = "a key of sixteen or more"
CUSTOMERS = (
    Column("id", "bigint", key=True),
    Column("email", "text"),
    Column("phone", "text"),
    Column("country", "character(2)"),
)


def sink(transforms: Any) -> Any:
    content = {
        "sources": {"shop": {"type": "sqlite", "path": "shop.db"}},
        "pipeline": {
            "sinks": {"lake": {"type": "tables", "path": "lake", "transforms": transforms}}
        },
    }
    config = parse(content, folder=Path("/nowhere"), environment={"MASK_KEY": KEY})
    assert config.pipeline
    return config.pipeline.sinks[0]


def test_a_config_has_transforms_by_table() -> None:
    found = sink(
        {
            "public.customers": {
                "select": ["id", "email", "phone"],
                "mask": {"email": {"hmac": "${MASK_KEY}"}, "phone": None},
                "where": "country <> 'XX'",
            },
            "*": {"mask": {"phone": None}},
        }
    )
    named = found.shaping.of("public", "customers")
    assert named[0] == "public.customers"
    assert named[1].mask == {"email": Mask(Secret(KEY)), "phone": None}
    assert found.shaping.of("public", "orders")[0] == "*"
    assert KEY not in repr(found)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ({}, "at least one of select, mask, where, sql"),
        ({"select": ["id", "id"]}, "select names id twice"),
        ({"select": ["id"], "mask": {"email": None}}, "mask names email, which select leaves out"),
        ({"where": "country <>"}, "no condition"),
        ({"where": "rand() > 1"}, "not understood"),
        ({"mask": {"email": {"hmac": "short"}}}, "at least 16 characters"),
        ({"mask": {"email": {"sha": "x"}}}, "transforms"),
        ({"selects": ["id"]}, "transforms"),
    ],
)
def test_a_transform_that_makes_no_sense_is_refused(transform: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sink({"public.customers": transform})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (TableTransform(select=("id", "mail")), "there is no column mail; there are: id, email"),
        (TableTransform(mask={"fax": None}), "there is no column fax"),
        (TableTransform(select=("email",)), "select leaves out id, which is of the key"),
        (TableTransform(mask={"id": None}), "mask makes id null, which is of the key"),
        (TableTransform(where="land = 'DE'"), "there is no column land; there are: id, email"),
        (TableTransform(where="id = 'x'"), "cannot be evaluated"),
    ],
)
def test_a_transform_that_does_not_fit_names_sink_and_table(
    rule: TableTransform, message: str
) -> None:
    transforms = Transforms({"public.customers": rule}, "lake")
    with pytest.raises(TableFailed, match=rf"lake\.transforms\.public\.customers: .*{message}"):
        fitted(transforms, "public", "customers", CUSTOMERS, "postgres")


@pytest.mark.parametrize("where", ["price > '9'", "coalesce(price, '0') = '1'", "price IN ('1')"])
def test_a_number_that_is_stored_as_text_is_not_compared_as_text(where: str) -> None:
    columns = (Column("id", "bigint", key=True), Column("price", "numeric"))
    rule = TableTransform(where=where)
    with pytest.raises(TableFailed, match="price is numeric, which is text here") as refused:
        fitted(Transforms({"*": rule}), "public", "orders", columns, "postgres")
    assert "cast(price AS double)" in refused.value.hint
    rule = TableTransform(where="cast(price AS double) > 9 OR price IS NULL")
    selected = fitted(Transforms({"*": rule}), "public", "orders", columns, "postgres")
    rows = pa.table({"price": ["10", "9", "NaN", "-Infinity", None]})
    assert selected is not None
    assert passing(selected, rows).to_pylist() == [True, False, False, False, True]


def test_a_pattern_masks_the_columns_that_a_table_has() -> None:
    transforms = Transforms({"*": TableTransform(mask={"phone": None, "fax": None})}, "lake")
    selected = fitted(transforms, "public", "customers", CUSTOMERS, "postgres")
    assert selected
    assert set(selected.masks) == {"phone"}


def test_a_masked_column_is_text() -> None:
    rule = TableTransform(select=("id", "phone"), mask={"id": Mask(Secret(KEY)), "phone": None})
    selected = fitted(Transforms({"*": rule}), "public", "customers", CUSTOMERS, "postgres")
    assert selected
    schema = result_schema(selected, "postgres")
    assert [(field.name, str(field.type)) for field in schema] == [
        ("id", "string"),
        ("phone", "string"),
    ]


def noted(rule: TableTransform) -> TransformNote:
    return Selected.of(rule, CUSTOMERS, exact=False).note


def test_two_transforms_differ_by_what_they_do_and_by_their_keys() -> None:
    rules = [
        TableTransform(mask={"email": Mask(Secret(KEY))}),
        TableTransform(mask={"email": Mask(Secret(KEY + "!"))}),
        TableTransform(mask={"email": None}),
        TableTransform(where="id = 1"),
        TableTransform(select=("id",)),
    ]
    names = [column.name for column in CUSTOMERS]
    for one, other in itertools.permutations(map(noted, rules), 2):
        assert one.differs(other, names)
    assert KEY not in str(noted(rules[0]))


def test_a_transform_without_effect_is_none() -> None:
    nothing = noted(TableTransform(mask={"fax": None}))
    assert nothing == TransformNote()
    masked = noted(TableTransform(mask={"phone": None}))
    assert not nothing.differs(masked, ["id", "email"]), "the column came later"
    assert nothing.differs(masked, ["id", "phone"])
    one, other = (TableTransform(select=names) for names in (("id", "email"), ("email", "id")))
    assert noted(one) == noted(other)


def test_capitals_do_not_count_where_a_column_is_clear() -> None:
    rule = TableTransform(select=("ID", "Phone"), mask={"PHONE": None})
    selected = Selected.of(rule, CUSTOMERS, exact=True)
    assert [column.name for column in selected.columns] == ["id", "phone"]
    assert selected.masks == {"phone": None}
    twins = (*CUSTOMERS, Column("EMAIL", "text"))
    with pytest.raises(ConfigError, match="there is no column Email"):
        Selected.of(TableTransform(mask={"Email": None}), twins, exact=False)
