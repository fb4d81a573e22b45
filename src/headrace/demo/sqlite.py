"""The shop in SQLite: as in PostgreSQL, with what SQLite has of types."""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

from ..change.replay import Row
from ..errors import ConfigError, SourceUnavailable
from . import first_rows
from .database import Action, Values, alteration

try:
    import apsw

    from ..sources.sqlite import alter, install
except ImportError as error:  # pragma: no cover - it is there wherever tests run
    raise ConfigError(
        "a demo with SQLite needs apsw", hint="Run: pip install 'headrace[sqlite]'"
    ) from error

SCHEMA_NAME = "main"
BUSY_MILLISECONDS = 30_000  # there is one writer at a time, and the others wait

SCHEMA = """
CREATE TABLE customers (
    id INTEGER PRIMARY KEY,
    email TEXT NOT NULL,
    name TEXT NOT NULL,
    address TEXT NOT NULL,
    interests TEXT NOT NULL DEFAULT '[]',
    joined_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ'))
);
CREATE TABLE products (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    price REAL NOT NULL,
    weight REAL,
    attributes TEXT NOT NULL DEFAULT '{}',
    active INTEGER NOT NULL DEFAULT 1,
    manual BLOB
);
CREATE TABLE inventory (
    product_id INTEGER PRIMARY KEY REFERENCES products ON DELETE CASCADE,
    quantity INTEGER NOT NULL,
    counted_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ'))
);
CREATE TABLE orders (
    id TEXT PRIMARY KEY NOT NULL,
    customer_id INTEGER NOT NULL REFERENCES customers ON DELETE CASCADE,
    status TEXT NOT NULL DEFAULT 'new',
    total REAL NOT NULL DEFAULT 0,
    placed_on TEXT NOT NULL DEFAULT current_date,
    placed_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ'))
) WITHOUT ROWID;
CREATE INDEX orders_of ON orders (customer_id);
CREATE TABLE order_items (
    order_id TEXT NOT NULL REFERENCES orders ON DELETE CASCADE,
    line INTEGER NOT NULL,
    product_id INTEGER NOT NULL REFERENCES products,
    quantity INTEGER NOT NULL,
    price REAL NOT NULL,
    PRIMARY KEY (order_id, line)
);
"""

_A_CUSTOMER = "(SELECT id FROM customers ORDER BY random() LIMIT 1)"
_AN_ORDER = "(SELECT id FROM orders ORDER BY random() LIMIT 1)"

PLACE_ORDER = (
    f"INSERT INTO orders (id, customer_id) VALUES (:id, {_A_CUSTOMER})",
    """INSERT INTO order_items
    SELECT :id, row_number() OVER (ORDER BY id), id, 1, price
    FROM (SELECT id, price FROM products WHERE active ORDER BY random() LIMIT :lines)""",
    """UPDATE inventory SET quantity = quantity - 1
    WHERE product_id IN (SELECT product_id FROM order_items WHERE order_id = :id)""",
    """UPDATE orders SET total = (SELECT sum(price) FROM order_items WHERE order_id = :id)
    WHERE id = :id""",
)
REGISTER = (
    """INSERT INTO customers (email, name, address)
    VALUES (:name || '@example.com', :name, '{"city": "Bergen", "zip": null}')""",
)
MOVE_HOUSE = (
    f"UPDATE customers SET address = json_set(address, '$.zip', :name) WHERE id = {_A_CUSTOMER}",
)
ADVANCE = (
    """UPDATE orders SET status = CASE status WHEN 'new' THEN 'paid' WHEN 'paid' THEN 'shipped'
                                  ELSE 'delivered' END
    WHERE id IN (SELECT id FROM orders WHERE status <> 'delivered' ORDER BY random() LIMIT 6)""",
)
REPRICE = (
    """UPDATE products SET price = abs(random() % 10000) / 100.0, weight = abs(random() % 99) / 7.0
    WHERE id = (SELECT id FROM products ORDER BY random() LIMIT 1)""",
)
RESTOCK = (
    """UPDATE inventory SET quantity = 1000, counted_at = strftime('%Y-%m-%dT%H:%M:%fZ')
    WHERE product_id IN (SELECT product_id FROM inventory ORDER BY quantity LIMIT 5)""",
)
RENUMBER = (f"UPDATE order_items SET line = line + 10 WHERE order_id = {_AN_ORDER}",)
ARCHIVE = (
    "DELETE FROM orders WHERE id IN (SELECT id FROM orders WHERE status = 'delivered' LIMIT 10)",
)
CANCEL = (f"DELETE FROM orders WHERE id = {_AN_ORDER}",)
LEAVE = (f"DELETE FROM customers WHERE id = {_A_CUSTOMER}",)

# As in PostgreSQL's shop.
ACTIONS: dict[Action, int] = {
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

AFTER_ALTERATION = {
    "orders": "UPDATE orders SET total = total WHERE id = (SELECT min(id) FROM orders)",
    "customers": "UPDATE customers SET name = name WHERE id = (SELECT min(id) FROM customers)",
}

_TYPES = {"INTEGER": "int64", "REAL": "double", "BLOB": "binary"}


def title() -> str:
    """What it runs on."""
    return f"SQLite {apsw.sqlite_lib_version()}"


@contextmanager
def opened(folder: Path) -> Iterator["SqliteShop"]:
    """An empty database in a file."""
    directory = folder / "sqlite"
    directory.mkdir()
    yield SqliteShop(str(directory / "shop.db"))


@dataclass(frozen=True, slots=True)
class SqliteShop:
    """A database of SQLite, and what it holds."""

    path: str

    schema: ClassVar[str] = SCHEMA_NAME
    actions: ClassVar[Mapping[Action, int]] = ACTIONS
    register: ClassVar[Action] = REGISTER
    errors: ClassVar[tuple[type[Exception], ...]] = (apsw.Error, SourceUnavailable)

    @property
    def source(self) -> dict[str, Any]:
        """The settings of the source that captures it."""
        return {"type": "sqlite", "path": self.path}

    @property
    def shell(self) -> str:
        """The command by which a person writes to it."""
        return f"sqlite3 {self.path}"

    def build(self) -> None:
        """Create the tables and their first rows, and the triggers that record changes."""
        with closing(self._connected()) as connection, connection:
            connection.execute(SCHEMA)
            _fill(connection)
        install(self.path, ["*"])

    def connect(self) -> "_Session":
        """Another session."""
        return _Session(self.path, self._connected())

    def _connected(self) -> apsw.Connection:
        connection = apsw.Connection(self.path)
        connection.set_busy_timeout(BUSY_MILLISECONDS)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def declared(self, table: str) -> dict[str, str]:
        """A table's columns and their types."""
        with closing(self._connected()) as connection:
            found = connection.execute("SELECT name, type FROM pragma_table_info(?)", (table,))
            return {str(name): str(kind).upper() for name, kind in found}

    def rows(self, table: str) -> list[Row]:
        """What a table holds now."""
        names = list(self.declared(table))
        with closing(self._connected()) as connection:
            found = connection.execute(f"SELECT {', '.join(names)} FROM {table}").fetchall()
        return [dict(zip(names, row, strict=True)) for row in found]

    def image(self, declared: str, value: Any) -> Any:
        """A value as the documents say that it looks in JSON."""
        match value:
            case bytes():
                return base64.b64encode(value).decode()
            case float():
                return Decimal(repr(value))
        return value

    def arrow(self, declared: str) -> str:
        """The type that a column of the Delta table should have."""
        return _TYPES.get(declared, "string")

    def is_document(self, declared: str) -> bool:
        """A document is text like any other."""
        return False


def _fill(connection: apsw.Connection) -> None:
    connection.executemany(
        "INSERT INTO customers VALUES (?, ?, ?, ?, ?, ?)",
        (
            (*each[:4], json.dumps(each.interests), each.joined_at.isoformat())
            for each in first_rows.customers()
        ),
    )
    connection.executemany(
        "INSERT INTO products (id, name, price, weight, attributes, manual)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (
            (
                each.id,
                each.name,
                float(each.price),
                each.weight,
                each.attributes,
                each.manual.encode() if each.manual else None,
            )
            for each in first_rows.products()
        ),
    )
    connection.execute("INSERT INTO inventory (product_id, quantity) SELECT id, 1000 FROM products")
    for at, order in enumerate(first_rows.orders()):
        connection.execute(
            "INSERT INTO orders (id, customer_id, status, placed_at) VALUES (?, ?, ?, ?)",
            (*order[:3], order.placed_at.isoformat()),
        )
        connection.executemany(
            "INSERT INTO order_items VALUES (?, ?, ?, ?, ?)",
            (
                (order.id, line, 1 + (at + line) % first_rows.PRODUCTS, line, float(price))
                for line, price in enumerate(order.prices, 1)
            ),
        )


class _Session:
    """A connection of somebody who works in the shop."""

    def __init__(self, path: str, connection: apsw.Connection) -> None:
        self._path = path
        self._connection = connection
        self.close = connection.close

    def attempt(self, action: Action, values: Values) -> bool:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in action:
                self._connection.execute(statement, dict(values))
            self._connection.execute("COMMIT")
        except apsw.ConstraintError:
            self._connection.execute("ROLLBACK")
            return False
        return True

    def alter(self, number: int) -> bool:
        table, statement = alteration(number)
        try:
            alter(self._path, statement)
        except SourceUnavailable:  # the others had no pause
            return False
        self.attempt((AFTER_ALTERATION[table],), {})
        return True
