"""Conditions in SQL, worked out by Arrow."""

from datetime import UTC, date, datetime
from decimal import Decimal

import duckdb
import pyarrow as pa
import pytest

from headrace.errors import ConfigError
from headrace.transforms.where import columns_of, conjuncts, parse, passes

ROWS = pa.table(
    {
        "id": pa.array([1, 2, 3, None], pa.int64()),
        "country": ["DE", "XX", None, "FR"],
        "padded": ["  DE", "XX  ", None, "\tFR"],
        "day": pa.array([date(2024, 1, 1), date(2025, 1, 1), None, date(2026, 1, 1)]),
        "seen": pa.array(
            [datetime(2024, 1, 1, tzinfo=UTC), datetime(2025, 1, 1, tzinfo=UTC), None, None],
            pa.timestamp("us", tz="UTC"),
        ),
        "local": pa.array([date(2024, 1, 1), date(2025, 1, 1), None, None], pa.date32()).cast(
            pa.timestamp("us")
        ),
        "amount": [Decimal("1.50"), Decimal("2.00"), None, Decimal("-3.25")],
        "score": pa.array([1.5, 2.0, None, -1.0], pa.float64()),
        "active": [True, False, None, True],
    }
)

CONDITIONS = [
    "country <> 'XX'",
    "NOT country = 'XX'",
    "id > 1",
    "id IN (1, 3)",
    "id NOT IN (1, 3)",
    "country IN ('DE', NULL)",
    "country IS NULL",
    "country IS NOT NULL AND id >= 2",
    "country IS NULL OR id = 1",
    "day >= DATE '2025-01-01'",
    "day >= '2025-01-01'",
    "day < cast('2025-06-01' AS date)",
    "seen > TIMESTAMP '2024-06-01 00:00:00'",
    "local > TIMESTAMP '2024-06-01 00:00:00'",
    "local > '2024-06-01'",
    "seen >= local",
    "amount > 1.5",
    "amount = 2",
    "amount <> 1.5",
    "score > 1.5",
    "score = 2",
    "active",
    "NOT active",
    "active IS TRUE",
    "active IS NOT TRUE",
    "country LIKE 'D%'",
    "country ILIKE 'd_'",
    "country NOT LIKE 'D%'",
    "country NOT ILIKE 'd_'",
    "id > 1e0",
    " OR ".join(f"id = {n}" for n in range(600)),
    "lower(country) = 'de'",
    "upper(country) = 'DE'",
    "length(trim(padded)) = 2",
    "coalesce(country, '') = ''",
    "id BETWEEN 1 AND 2",
    "id + 1 = 2",
    "id * 2 - 1 = 3",
    "-id < -1",
    "abs(amount) > 3",
    "cast(id AS string) = '3'",
    "COUNTRY = 'DE'",
    "country = NULL",
    "(id = 1 OR id = 2) AND NOT (country = 'XX' AND active)",
    "TRUE",
]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_means_what_it_means_to_another_engine(condition: str) -> None:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("changes", ROWS)
    found = connection.execute(f"SELECT coalesce({condition}, false) FROM changes").fetchall()
    assert passes(condition, ROWS).to_pylist() == [row[0] for row in found]


def test_a_number_is_not_rounded_to_what_a_short_column_holds() -> None:
    """As in Spark and PostgreSQL; DuckDB rounds it."""
    rows = pa.table({"short": pa.array([0.1, 0.5, None], pa.float32())})
    assert passes("short = 0.1", rows).to_pylist() == [False, False, False]
    assert passes("short > 0.1", rows).to_pylist() == [True, True, False]
    assert passes("short IN (0.5, 16777217)", rows).to_pylist() == [False, True, False]


def test_a_pattern_is_one_of_spark() -> None:
    assert passes("country RLIKE '^(D|F)'", ROWS).to_pylist() == [True, False, False, True]
    assert passes("country NOT RLIKE '^(D|F)'", ROWS).to_pylist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("current_date() > day", "'CURRENT_DATE' is not understood"),
        ("rand() > 0.5", "not understood"),
        ("id IN (SELECT 1)", "not understood"),
        ("id % 2 = 1", "not understood"),
        ("ltrim(country) = 'DE'", "not understood"),
        ("trim(BOTH 'x' FROM country) = 'DE'", "not understood"),
        ("other.id = 1", "not understood"),
        ("1 = 1; DROP TABLE x", "not one condition"),
        ("id >", "no condition"),
        ("country RLIKE '('", "no regular expression"),
        ("id BETWEEN SYMMETRIC 2 AND 1", "condition"),
        ("", "not one condition"),
        ("(" * 5000 + "id" + ")" * 5000, "at most"),
        ("(" * 3000 + "id = 1" + ")" * 3000, "condition"),
    ],
)
def test_what_is_not_understood_is_refused_before_any_row(condition: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(condition)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("nothing = 1", "no column nothing; there are: id"),
        ("country", "is string, and must be true or false"),
        ("day = 'soon'", "'soon' is no valid date32"),
        ("id > 'many'", "cannot be evaluated where id is int64"),
        ("amount < 'Infinity'", "no valid decimal"),
        ("cast(score AS string) = '1'", "more than one way"),
        ("country = 5", "cannot be evaluated where country is string"),
        ("country + 1 = 2", "cannot be evaluated where country is string"),
    ],
)
def test_what_does_not_fit_the_columns_is_refused(condition: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        passes(condition, ROWS.slice(0, 0))


def test_a_value_that_cannot_be_evaluated_is_not_shown() -> None:
    rows = pa.table({"text": ["secret-4711"]})
    with pytest.raises(ConfigError) as refused:
        passes("cast(text AS int) = 1", rows)
    assert "4711" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_columns_of_a_condition() -> None:
    assert columns_of("a = 1 AND (b IS NULL OR lower(a) = 'x')") == ("a", "b")


def test_a_large_whole_number_is_compared_exactly() -> None:
    rows = pa.table({"x": [2**53 + 1]})
    assert passes("x > 1e10", rows).to_pylist() == [True]
    assert passes("x = 9007199254740992", rows).to_pylist() == [False]


def test_a_condition_is_what_its_parts_are_together() -> None:
    assert conjuncts("a = 1 AND (b = 2 OR c = 3) AND NOT d") == [
        "a = 1",
        "b = 2 OR c = 3",
        "NOT d",
    ]
    assert conjuncts("a = 1 OR b = 2") == ["a = 1 OR b = 2"]
