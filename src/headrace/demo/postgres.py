"""The shop in PostgreSQL."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import psycopg
from psycopg import sql
from psycopg.types.json import set_json_loads

from ..change.replay import Row
from ..errors import HeadraceError
from ..testing import PostgresInstall, PostgresServer, postgres_installs
from .database import Action, Values, alteration
from .verify import json_value

OLDEST_POSTGRES = 15
SCHEMA_NAME = "public"

SCHEMA = """
CREATE TYPE order_status AS ENUM ('new', 'paid', 'shipped', 'delivered');

CREATE TABLE customers (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    email text NOT NULL,
    name text NOT NULL,
    address jsonb NOT NULL,
    interests text[] NOT NULL DEFAULT '{}',
    joined_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE products (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL,
    price numeric(12,2) NOT NULL,
    weight double precision,
    attributes jsonb NOT NULL DEFAULT '{}',
    sizes integer[] NOT NULL DEFAULT '{}',
    active boolean NOT NULL DEFAULT true,
    manual text
);
CREATE TABLE inventory (
    product_id bigint PRIMARY KEY REFERENCES products ON DELETE CASCADE,
    quantity integer NOT NULL,
    counted_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE orders (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    customer_id bigint NOT NULL REFERENCES customers ON DELETE CASCADE,
    status order_status NOT NULL DEFAULT 'new',
    total numeric(12,2) NOT NULL DEFAULT 0,
    placed_on date NOT NULL DEFAULT current_date,
    placed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON orders (customer_id);
CREATE TABLE order_items (
    order_id uuid NOT NULL REFERENCES orders ON DELETE CASCADE,
    line integer NOT NULL,
    product_id bigint NOT NULL REFERENCES products,
    quantity integer NOT NULL,
    price numeric(12,2) NOT NULL,
    PRIMARY KEY (order_id, line)
);
"""

# The manuals do not compress, so that PostgreSQL keeps them out of line and does not send them
# with an update of something else.
SEED = """
INSERT INTO customers (email, name, address, interests, joined_at)
SELECT format('customer%s@example.com', n), 'Customer ' || n,
       jsonb_build_object('city', (ARRAY['Bergen', 'Łódź', 'São Paulo', '大阪'])[1 + n % 4],
                          'zip', lpad((n * 7919 % 100000)::text, 5, '0'),
                          'geo', jsonb_build_array(n / 100.0, -n / 7)),
       CASE WHEN n % 3 = 0 THEN '{}' ELSE ARRAY['books', 'tea "green"', NULL] END,
       now() - n * interval '1 hour'
FROM generate_series(1, 2000) n;
INSERT INTO products (name, price, weight, attributes, sizes, manual)
SELECT 'Product ' || n, (random() * 100)::numeric(12,2), random() * 10,
       jsonb_build_object('color', n % 5, 'fragile', n % 2 = 0), ARRAY[n, n + 2],
       CASE WHEN n % 10 = 0 THEN
           (SELECT string_agg(md5(n::text || m), '') FROM generate_series(1, 300) m) END
FROM generate_series(1, 300) n;
INSERT INTO inventory SELECT id, 1000 FROM products;
INSERT INTO orders (customer_id, status, placed_at)
SELECT 1 + n % 2000, (ARRAY['new', 'paid', 'shipped'])[1 + n % 3]::order_status,
       now() - n * interval '1 minute'
FROM generate_series(1, 4000) n;
INSERT INTO order_items
SELECT o.id, line, 1 + (random() * 299)::int, line, (random() * 100)::numeric(12,2)
FROM orders o CROSS JOIN generate_series(1, 2) line;
ANALYZE;
"""

PLACE_ORDER = """
WITH wanted AS (
    SELECT row_number() OVER (ORDER BY p.id)::int AS line, p.id, p.price
    FROM (SELECT id, price FROM products WHERE active ORDER BY random() LIMIT %(lines)s) p
), placed AS (
    INSERT INTO orders (customer_id, total)
    SELECT c.id, (SELECT sum(price) FROM wanted)
    FROM (SELECT id FROM customers ORDER BY random() LIMIT 1 FOR KEY SHARE) c
    RETURNING id
), taken AS (
    UPDATE inventory SET quantity = quantity - 1 WHERE product_id IN (SELECT id FROM wanted)
)
INSERT INTO order_items SELECT placed.id, line, wanted.id, 1, price FROM placed, wanted
"""

REGISTER = """
INSERT INTO customers (email, name, address)
VALUES (%(name)s || '@example.com', %(name)s, '{"city": "Bergen", "zip": null}')
"""

MOVE_HOUSE = """
UPDATE customers SET address = address || jsonb_build_object('zip', %(name)s::text)
WHERE id = (SELECT id FROM customers ORDER BY random() LIMIT 1)
"""

ADVANCE = """
UPDATE orders SET status = CASE status WHEN 'new' THEN 'paid' WHEN 'paid' THEN 'shipped'
                           ELSE 'delivered' END::order_status
WHERE id IN (SELECT id FROM orders WHERE status <> 'delivered' ORDER BY random() LIMIT 6)
"""

REPRICE = """
UPDATE products SET price = random() * 100, weight = random() * 10
WHERE id = (SELECT id FROM products ORDER BY random() LIMIT 1)
"""

RESTOCK = """
UPDATE inventory SET quantity = 1000, counted_at = clock_timestamp()
WHERE product_id IN (SELECT product_id FROM inventory ORDER BY quantity LIMIT 5)
"""

RENUMBER = """
UPDATE order_items SET line = line + 10
WHERE order_id = (SELECT id FROM orders ORDER BY random() LIMIT 1)
"""

ARCHIVE = (
    "DELETE FROM orders WHERE id IN (SELECT id FROM orders WHERE status = 'delivered' LIMIT 10)"
)

CANCEL = "DELETE FROM orders WHERE id = (SELECT id FROM orders ORDER BY random() LIMIT 1)"

LEAVE = "DELETE FROM customers WHERE id = (SELECT id FROM customers ORDER BY random() LIMIT 1)"

# How often each is done, compared with the others; what comes also goes, so that the shop can stay
# open for days.
ACTIONS: dict[Action, int] = {
    (PLACE_ORDER,): 40,
    (ADVANCE,): 20,
    (MOVE_HOUSE,): 8,
    (REPRICE,): 8,
    (RESTOCK,): 6,
    (REGISTER,): 4,
    (RENUMBER,): 4,
    (CANCEL,): 4,
    (ARCHIVE,): 4,
    (LEAVE,): 2,
}

# The columns are sent with the table's next row, so each alteration comes with one.
AFTER_ALTERATION = {
    "orders": "UPDATE orders SET total = total WHERE id = (SELECT id FROM orders LIMIT 1)",
    "customers": "UPDATE customers SET name = name WHERE id = (SELECT min(id) FROM customers)",
}

_TYPES = {
    "smallint": "int16",
    "integer": "int32",
    "bigint": "int64",
    "real": "float",
    "double precision": "double",
    "boolean": "bool",
    "bytea": "binary",
    "date": "date32[day]",
    "timestamp without time zone": "timestamp[us]",
    "timestamp with time zone": "timestamp[us, tz=UTC]",
}
_numeric = re.compile(r"numeric\((\d+),(\d+)\)").fullmatch

_COLUMNS = """
SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = format('%%I.%%I', %s::text, %s::text)::regclass
  AND attnum > 0 AND NOT attisdropped
"""


@contextmanager
def opened(folder: Path) -> Iterator["PostgresShop"]:
    """An empty database on a server of its own."""
    directory = folder / "postgres"
    directory.mkdir()
    server = PostgresServer(choose_install(), directory)
    server.__enter__()
    try:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE shop")
        yield PostgresShop(server.url("shop"))
    finally:
        server.stop("fast")


def title() -> str:
    """What it runs on."""
    return f"PostgreSQL {choose_install().version}"


def choose_install() -> PostgresInstall:
    """The newest PostgreSQL there is."""
    installs = postgres_installs()
    if not installs or max(installs) < OLDEST_POSTGRES:
        raise HeadraceError(
            f"there is no PostgreSQL {OLDEST_POSTGRES} or later on this machine",
            hint="pip install 'headrace[demo]' brings one along.",
        )
    return installs[max(installs)]


@dataclass(frozen=True, slots=True)
class PostgresShop:
    """A database of PostgreSQL, and what it holds."""

    url: str

    schema: ClassVar[str] = SCHEMA_NAME
    actions: ClassVar[Mapping[Action, int]] = ACTIONS
    register: ClassVar[Action] = (REGISTER,)
    errors: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error,)

    @property
    def source(self) -> dict[str, Any]:
        """The settings of the source that captures it."""
        return {"type": "postgres", "url": self.url}

    @property
    def shell(self) -> str:
        """The command by which a person writes to it."""
        return f"psql {self.url}"

    def build(self) -> None:
        """Create the tables and their first rows."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(SCHEMA)
            connection.execute(SEED)

    def connect(self) -> "_Session":
        """Another session."""
        return _Session(psycopg.connect(self.url, autocommit=True))

    def declared(self, table: str) -> dict[str, str]:
        """A table's columns and their types."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            return dict(connection.execute(_COLUMNS, (self.schema, table)).fetchall())

    def rows(self, table: str) -> list[Row]:
        """What a table holds now."""
        statement = sql.SQL("SELECT * FROM {}").format(sql.Identifier(self.schema, table))
        with psycopg.connect(self.url, autocommit=True) as connection:
            # Digits as written: a float would round what is compared.
            set_json_loads(partial(json.loads, parse_float=Decimal), connection)
            connection.execute("SET TimeZone = 'UTC'")
            cursor = connection.execute(statement)
            names = [column.name for column in cursor.description or []]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def image(self, declared: str, value: Any) -> Any:
        """A value as the documents say that it looks in JSON."""
        return value if self.is_document(declared) else json_value(value)

    def arrow(self, declared: str) -> str:
        """The type that a column of the Delta table should have."""
        if declared.endswith("[]"):
            return f"list<element: {self.arrow(declared.removesuffix('[]'))}>"
        if found := _numeric(declared):
            return f"decimal128({found[1]}, {found[2]})"
        return _TYPES.get(declared, "string")

    def is_document(self, declared: str) -> bool:
        """Whether the column holds JSON."""
        return declared in ("json", "jsonb")


class _Session:
    """A connection of somebody who works in the shop."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._connection = connection
        self.close = connection.close

    def attempt(self, action: Action, values: Values) -> bool:
        try:
            with self._connection.transaction():
                for statement in action:
                    self._connection.execute(statement.encode(), values or None)
        except (psycopg.errors.DeadlockDetected, psycopg.errors.ForeignKeyViolation):
            return False
        return True

    def alter(self, number: int) -> bool:
        table, statement = alteration(number)
        return self.attempt((statement, AFTER_ALTERATION[table]), {})
