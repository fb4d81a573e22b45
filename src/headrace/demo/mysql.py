"""The shop in MariaDB: as in PostgreSQL, in the types and the words of MySQL.

What InnoDB deletes by itself is not in its binary log, so nothing here hangs on a cascade.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

from ..change.replay import Row
from ..errors import ConfigError, HeadraceError
from . import first_rows
from .database import Action, Values, alteration
from .verify import json_value

try:
    import pymysql
    from pymysql.constants import ER

    from ..testing.mariadb import MariadbDatabase, MariadbServer, mariadb_install
except ImportError as error:  # pragma: no cover - it is there wherever tests run
    raise ConfigError(
        "a demo with MariaDB needs PyMySQL", hint="Run: pip install 'headrace[mysql]'"
    ) from error

SCHEMA_NAME = "shop"

SCHEMA = """
CREATE TABLE customers (
    id bigint AUTO_INCREMENT PRIMARY KEY,
    email varchar(200) NOT NULL,
    name varchar(200) NOT NULL,
    address json NOT NULL,
    interests set('books', 'tea', 'music') NOT NULL DEFAULT '',
    joined_at timestamp(6) NOT NULL DEFAULT current_timestamp(6)
);
CREATE TABLE products (
    id bigint AUTO_INCREMENT PRIMARY KEY,
    name varchar(200) NOT NULL,
    price decimal(12,2) NOT NULL,
    weight double,
    attributes json NOT NULL,
    sold bigint unsigned NOT NULL DEFAULT 0,
    active boolean NOT NULL DEFAULT true,
    manual mediumtext
);
CREATE TABLE inventory (
    product_id bigint PRIMARY KEY REFERENCES products (id),
    quantity int NOT NULL,
    counted_at datetime(6) NOT NULL DEFAULT current_timestamp(6)
);
CREATE TABLE orders (
    id char(36) PRIMARY KEY,
    customer_id bigint NOT NULL REFERENCES customers (id),
    status enum('new', 'paid', 'shipped', 'delivered') NOT NULL DEFAULT 'new',
    total decimal(12,2) NOT NULL DEFAULT 0,
    placed_on date NOT NULL DEFAULT current_date,
    placed_at timestamp(6) NOT NULL DEFAULT current_timestamp(6)
);
CREATE TABLE order_items (
    order_id char(36) NOT NULL REFERENCES orders (id),
    line int NOT NULL,
    product_id bigint NOT NULL REFERENCES products (id),
    quantity int NOT NULL,
    price decimal(12,2) NOT NULL,
    PRIMARY KEY (order_id, line)
);
"""
DOCUMENTS = ("address", "attributes")

PLACE_ORDER = (
    "INSERT INTO orders (id, customer_id) SELECT %(id)s, id FROM customers ORDER BY rand() LIMIT 1",
    """INSERT INTO order_items
    SELECT %(id)s, row_number() OVER (ORDER BY id), id, 1, price
    FROM (SELECT id, price FROM products WHERE active ORDER BY rand() LIMIT %(lines)s) wanted""",
    """UPDATE inventory JOIN order_items USING (product_id)
    SET inventory.quantity = inventory.quantity - 1 WHERE order_id = %(id)s""",
    """UPDATE products JOIN order_items ON product_id = products.id
    SET sold = sold + 1 WHERE order_id = %(id)s""",
    """UPDATE orders SET total =
    (SELECT sum(price) FROM order_items WHERE order_id = %(id)s) WHERE id = %(id)s""",
)
REGISTER = (
    """INSERT INTO customers (email, name, address, interests)
    VALUES (concat(%(name)s, '@example.com'), %(name)s, '{"city": "Bergen", "zip": null}',
            'music')""",
)
_A_CUSTOMER = "SET @who = (SELECT id FROM customers ORDER BY rand() LIMIT 1)"
_AN_ORDER = "SET @which = (SELECT id FROM orders ORDER BY rand() LIMIT 1)"
MOVE_HOUSE = (
    _A_CUSTOMER,
    "UPDATE customers SET address = json_set(address, '$.zip', %(name)s) WHERE id = @who",
)
ADVANCE = (
    """UPDATE orders JOIN (SELECT id FROM orders WHERE status <> 'delivered'
                          ORDER BY rand() LIMIT 6) chosen USING (id)
    SET status = status + 1""",
)
REPRICE = (
    "UPDATE products SET price = rand() * 100, weight = rand() * 10 ORDER BY rand() LIMIT 1",
)
RESTOCK = (
    "UPDATE inventory SET quantity = 1000, counted_at = current_timestamp(6)"
    " ORDER BY quantity LIMIT 5",
)
RENUMBER = (
    _AN_ORDER,
    "UPDATE order_items SET line = line + 10 WHERE order_id = @which ORDER BY line DESC",
)
CANCEL = (
    _AN_ORDER,
    "DELETE FROM order_items WHERE order_id = @which",
    "DELETE FROM orders WHERE id = @which",
)
ARCHIVE = (
    "SET @which = (SELECT id FROM orders WHERE status = 'delivered' LIMIT 1)",
    *CANCEL[1:],
)
LEAVE = (
    _A_CUSTOMER,
    """DELETE order_items FROM order_items JOIN orders ON order_id = orders.id
    WHERE customer_id = @who""",
    "DELETE FROM orders WHERE customer_id = @who",
    "DELETE FROM customers WHERE id = @who",
)

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
    ARCHIVE: 30,  # one at a time
    LEAVE: 2,
}

# An update that changes nothing is not in the binary log.
AFTER_ALTERATION = {
    "orders": "UPDATE orders SET placed_at = current_timestamp(6) ORDER BY id LIMIT 1",
    "customers": "UPDATE customers SET joined_at = current_timestamp(6) ORDER BY id LIMIT 1",
}

_TYPES = {
    "bigint": "int64",
    "bigint unsigned": "decimal128(20, 0)",
    "int": "int32",
    "tinyint(1)": "bool",
    "double": "double",
    "date": "date32[day]",
    "datetime": "timestamp[us]",
    "timestamp": "timestamp[us, tz=UTC]",
}
_decimal = re.compile(r"decimal\((\d+),(\d+)\)").fullmatch
_width = re.compile(r"(?<!tinyint)\(\d+\)").sub  # what bigint(20) and datetime(6) say besides

_COLUMNS = """
SELECT column_name, column_type FROM information_schema.columns
WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position
"""
_IN_THE_WAY = (
    ER.LOCK_DEADLOCK,
    ER.LOCK_WAIT_TIMEOUT,
    ER.ROW_IS_REFERENCED_2,
    ER.NO_REFERENCED_ROW_2,
)


def title() -> str:
    """What it runs on."""
    install = mariadb_install()
    if install is None:
        raise HeadraceError(
            "there is no MariaDB on this machine; install it (Debian: apt-get install "
            "mariadb-server), or choose another --source"
        )
    return f"MariaDB {install.version}"


@contextmanager
def opened(folder: Path) -> Iterator["MysqlShop"]:
    """An empty database on a server of its own."""
    directory = folder / "mariadb"
    directory.mkdir()
    with MariadbServer(directory) as server:
        server.execute(f"CREATE DATABASE {SCHEMA_NAME} CHARACTER SET utf8mb4")
        yield MysqlShop(MariadbDatabase(server, SCHEMA_NAME))


@dataclass(frozen=True, slots=True)
class MysqlShop:
    """A database of MariaDB, and what it holds."""

    database: MariadbDatabase

    schema: ClassVar[str] = SCHEMA_NAME
    actions: ClassVar[Mapping[Action, int]] = ACTIONS
    register: ClassVar[Action] = REGISTER
    errors: ClassVar[tuple[type[Exception], ...]] = (pymysql.Error,)

    @property
    def source(self) -> dict[str, Any]:
        """The settings of the source that captures it."""
        return {"type": "mysql", "url": self.database.url}

    @property
    def shell(self) -> str:
        """The command by which a person writes to it."""
        return f"mariadb -h 127.0.0.1 -P {self.database.server.port} -u root {self.schema}"

    def build(self) -> None:
        """Create the tables and their first rows."""
        self.database.execute(SCHEMA)
        with closing(self._connected(autocommit=False)) as connection:
            with connection.cursor() as cursor:
                _fill(cursor)
            connection.commit()

    def connect(self) -> "_Session":
        """Another session."""
        return _Session(self._connected(autocommit=False))

    def _connected(self, **options: Any) -> "pymysql.Connection[Any]":
        # With the usual isolation, a statement that looks at a table locks all that it looks at.
        setting = "SET time_zone = '+00:00', tx_isolation = 'READ-COMMITTED'"
        return self.database.connect(init_command=setting, **options)

    def declared(self, table: str) -> dict[str, str]:
        """A table's columns and their types; MariaDB says of documents only that they are text."""
        found = self.database.execute(_COLUMNS, self.schema, table)
        return {name: "json" if name in DOCUMENTS else kind for name, kind in found}

    def rows(self, table: str) -> list[Row]:
        """What a table holds now."""
        kinds = self.declared(table)
        with closing(self._connected()) as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {table}")
            return [
                {
                    name: None if value is None else _value(kind, value)
                    for (name, kind), value in zip(kinds.items(), row, strict=True)
                }
                for row in cursor.fetchall()
            ]

    def image(self, declared: str, value: Any) -> Any:
        """A value as the documents say that it looks in JSON."""
        match value:
            case datetime(tzinfo=None):
                return value.strftime("%Y-%m-%d %H:%M:%S.%f")
            case datetime():
                return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            case float():
                return Decimal(repr(value))
            case Decimal() if _is_large(declared):
                return int(value)
        return value if self.is_document(declared) else json_value(value)

    def arrow(self, declared: str) -> str:
        """The type that a column of the Delta table should have."""
        if found := _decimal(declared):
            return f"decimal128({found[1]}, {found[2]})"
        if declared.startswith("set("):
            return "list<element: string>"
        return _TYPES.get(_width("", declared), "string")

    def is_document(self, declared: str) -> bool:
        """Whether the column holds JSON."""
        return declared == "json"


def _is_large(declared: str) -> bool:
    """Whether its numbers are larger than those of Arrow, which takes them for decimals."""
    return _width("", declared) == "bigint unsigned"


def _value(declared: str, value: Any) -> Any:
    """A value of the driver as Python would have it."""
    if declared == "json":
        return json.loads(value, parse_float=Decimal)
    if declared == "tinyint(1)":
        return bool(value)
    if declared.startswith("set("):
        return value.split(",") if value else []
    if _is_large(declared):
        return Decimal(value)
    return value.replace(tzinfo=UTC) if declared.startswith("timestamp") else value


def _fill(cursor: Any) -> None:
    cursor.executemany(
        "INSERT INTO customers VALUES (%s, %s, %s, %s, %s, %s)",
        [(*each[:4], ",".join(each.interests), each.joined_at) for each in first_rows.customers()],
    )
    cursor.executemany(
        "INSERT INTO products (id, name, price, weight, attributes, manual)"
        " VALUES (%s, %s, %s, %s, %s, %s)",
        list(first_rows.products()),
    )
    cursor.execute("INSERT INTO inventory (product_id, quantity) SELECT id, 1000 FROM products")
    orders = list(first_rows.orders())
    cursor.executemany(
        "INSERT INTO orders (id, customer_id, status, placed_at) VALUES (%s, %s, %s, %s)",
        [each[:4] for each in orders],
    )
    cursor.executemany(
        "INSERT INTO order_items VALUES (%s, %s, %s, %s, %s)",
        [
            (each.id, line, 1 + (at + line) % first_rows.PRODUCTS, line, price)
            for at, each in enumerate(orders)
            for line, price in enumerate(each.prices, 1)
        ],
    )


class _Session:
    """A connection of somebody who works in the shop."""

    def __init__(self, connection: "pymysql.Connection[Any]") -> None:
        self._connection = connection
        self.close = connection.close

    def attempt(self, action: Action, values: Values) -> bool:
        try:
            with self._connection.cursor() as cursor:
                for statement in action:
                    cursor.execute(statement, values if "%(" in statement else None)
            self._connection.commit()
        except (pymysql.OperationalError, pymysql.IntegrityError) as error:
            if error.args[0] not in _IN_THE_WAY:
                raise
            self._connection.rollback()
            return False
        return True

    def alter(self, number: int) -> bool:
        table, statement = alteration(number)
        # DDL is a transaction of its own, so the row that follows may be tried again.
        if not self.attempt((statement,), {}):
            return False
        while not self.attempt((AFTER_ALTERATION[table],), {}):
            pass
        return True
