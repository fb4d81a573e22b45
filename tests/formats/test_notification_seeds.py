"""The notification format's examples, produced by real changes of a real PostgreSQL."""

import json
import re
from pathlib import Path
from typing import Any, LiteralString

import pytest

from headrace.change.event import Change
from headrace.formats.notification import Notification
from headrace.testing import PostgresDatabase
from tests.sources.capturing import captured

SEEDS = Path(__file__).parent / "seeds"
EVENT_ID = re.compile(r"evt_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")

# Every example: what must be there before, and the statement that makes the change.
EXAMPLES: dict[str, tuple[list[LiteralString], LiteralString]] = {
    "s3_cdc_event": (
        [
            "CREATE TABLE orders (id int PRIMARY KEY, customer_id int, total double precision,"
            " status text, created_at timestamp)"
        ],
        "INSERT INTO orders VALUES (12345, 67890, 99.99, 'pending', '2025-11-08 10:30:00')",
    ),
    "s3_insert": (
        ["CREATE TABLE products (id int PRIMARY KEY, name text, price double precision)"],
        "INSERT INTO products VALUES (999, 'New Product', 29.99)",
    ),
    "s3_update": (
        [
            "CREATE TABLE orders (id int PRIMARY KEY, status text, updated_at timestamp)",
            "ALTER TABLE orders REPLICA IDENTITY FULL",
            "INSERT INTO orders VALUES (12345, 'pending', '2025-11-08 10:30:00')",
        ],
        "UPDATE orders SET status = 'shipped', updated_at = '2025-11-08 10:31:00'",
    ),
    "s3_delete": (
        [
            "CREATE TABLE customers (id int PRIMARY KEY, name text, email text)",
            "ALTER TABLE customers REPLICA IDENTITY FULL",
            "INSERT INTO customers VALUES (67890, 'John Doe', 'john@example.com')",
        ],
        "DELETE FROM customers",
    ),
}


def rendered(change: Change) -> dict[str, Any]:
    payload = Notification().encode(change)
    assert payload is not None
    message: dict[str, Any] = json.loads(payload)
    return message


@pytest.mark.requirement("S3-09", "S3-10", "S3-11", "S3-12", "C-22")
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_real_change_is_the_message_of_the_document(
    name: str, pg: PostgresDatabase, tmp_path: Path
) -> None:
    before, statement = EXAMPLES[name]
    for each in before:
        pg.execute(each)
    with captured(pg, tmp_path) as feed:
        pg.execute(statement)
        (change,) = feed.streamed()
    message, expected = rendered(change), json.loads((SEEDS / f"{name}.json").read_text())
    assert list(message) == list(expected)
    # Every server gives its own ids and times.
    assert EVENT_ID.fullmatch(message.pop("eventId"))
    assert TIME.fullmatch(message.pop("timestamp"))
    del expected["eventId"], expected["timestamp"]
    assert message == expected
