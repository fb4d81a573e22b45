"""The demo's shop: its tables, its first rows, and the people who keep changing them."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg import sql

TABLES = ("customers", "products", "inventory", "orders", "order_items")

Values = dict[str, str | int]
Connection = psycopg.Connection[tuple[Any, ...]]
Statement = tuple[LiteralString | sql.Composed, Values | None]

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
ACTIONS: dict[LiteralString, int] = {
    PLACE_ORDER: 40,
    ADVANCE: 20,
    MOVE_HOUSE: 8,
    REPRICE: 8,
    RESTOCK: 6,
    REGISTER: 4,
    RENUMBER: 4,
    CANCEL: 4,
    ARCHIVE: 4,
    LEAVE: 2,
}

# Each round adds a column to two tables and drops both again. Without a default: adding one with a
# default changes old rows without telling anybody. With a new name each time: a table that drops a
# column and adds it again within one batch is more than the pipeline can follow.
ALTERED: tuple[tuple[LiteralString, LiteralString], ...] = (
    ("orders", "ALTER TABLE orders ADD COLUMN {} text"),
    ("customers", "ALTER TABLE customers ADD COLUMN {} integer"),
    ("orders", "ALTER TABLE orders DROP COLUMN {}"),
    ("customers", "ALTER TABLE customers DROP COLUMN {}"),
)
# PostgreSQL counts dropped columns too, and takes 1600.
MOST_ROUNDS = 1500

# The columns are told with the table's next row, so each alteration comes with one.
AFTER_ALTERATION: dict[str, LiteralString] = {
    "orders": "UPDATE orders SET total = total WHERE id = (SELECT id FROM orders LIMIT 1)",
    "customers": "UPDATE customers SET name = name WHERE id = (SELECT min(id) FROM customers)",
}


class Shop:
    """Several people at work in the shop, each with a connection and a thread."""

    def __init__(self, url: str, *, writers: int = 4, per_second: float = 10.0) -> None:
        """Describe the work; `per_second` is how much each of the writers does."""
        self._url = url
        self._pause = 1 / per_second
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        works = [self._trade] * writers + [self._alter]
        self._threads = [
            threading.Thread(target=self._work, args=(work, number), name=f"shop-{number}")
            for number, work in enumerate(works)
        ]

    def start(self) -> None:
        """Open the shop."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Close the shop: when this returns, nobody writes any more."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    @property
    def error(self) -> BaseException | None:
        """What ended a writer that was not told to stop."""
        return self._error

    def _work(self, work: Callable[[Connection, random.Random], None], number: int) -> None:
        try:
            with psycopg.connect(self._url, autocommit=True) as connection:
                work(connection, random.Random(number))
        except psycopg.Error as error:
            self._error = error

    def _trade(self, connection: Connection, chance: random.Random) -> None:
        statements, weights = list(ACTIONS), list(ACTIONS.values())
        while not self._stopping.wait(chance.expovariate(1 / self._pause)):
            [statement] = chance.choices(statements, weights)
            values: Values = {"lines": chance.randint(1, 4), "name": f"n{chance.randrange(10**9)}"}
            _attempt(connection, [(statement, values)])

    def _alter(self, connection: Connection, chance: random.Random) -> None:
        number = 0
        while number < MOST_ROUNDS * len(ALTERED) and not self._stopping.wait(
            1.5 + chance.random()
        ):
            # Counted only when done: a column can be neither added nor dropped twice.
            number += _attempt(connection, _alteration(number))


def build(url: str) -> None:
    """Create the tables and their first rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(SCHEMA)
        connection.execute(SEED)


def _alteration(number: int) -> list[Statement]:
    """An alteration, and the row that tells of it."""
    round_, step = divmod(number, len(ALTERED))
    table, statement = ALTERED[step]
    column = sql.Identifier(f"note_{round_ + 1}")
    return [(sql.SQL(statement).format(column), None), (AFTER_ALTERATION[table], None)]


def _attempt(connection: Connection, statements: Sequence[Statement]) -> bool:
    """Do it in one transaction; False when others were in the way."""
    try:
        with connection.transaction():
            for statement, values in statements:
                connection.execute(statement, values)
    except (psycopg.errors.DeadlockDetected, psycopg.errors.ForeignKeyViolation):
        return False
    return True
