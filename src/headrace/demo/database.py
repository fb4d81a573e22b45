"""What the demo needs of a database: a shop in it, sessions that change it, and its rows."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..change.replay import Row

TABLES = ("customers", "products", "inventory", "orders", "order_items")

Values = Mapping[str, str | int]
Action = tuple[str, ...]
"""Statements that are done in one transaction."""

# Each round adds a column to two tables and drops both again. Without a default: adding one with a
# default changes old rows without a change event. With a new name each time: a table that drops a
# column and adds it again within one batch is more than the pipeline can follow.
ALTERED = (
    ("orders", "ALTER TABLE orders ADD COLUMN {} text"),
    ("customers", "ALTER TABLE customers ADD COLUMN {} integer"),
    ("orders", "ALTER TABLE orders DROP COLUMN {}"),
    ("customers", "ALTER TABLE customers DROP COLUMN {}"),
)
# PostgreSQL counts dropped columns too, and takes 1600.
MOST_ALTERATIONS = 1500 * len(ALTERED)


def alteration(number: int) -> tuple[str, str]:
    """Which table is altered, and how."""
    round_, step = divmod(number, len(ALTERED))
    table, statement = ALTERED[step]
    return table, statement.format(f"note_{round_ + 1}")


class ShopSession(Protocol):
    """A connection that changes rows of the shop."""

    def attempt(self, action: Action, values: Values) -> bool:
        """Do it in one transaction; False when others were in the way."""
        ...

    def alter(self, number: int) -> bool:
        """Alter a table, and change a row of it: some sources send columns with the next row."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class ShopDatabase(Protocol):
    """A database with the shop in it, on a server of its own."""

    @property
    def schema(self) -> str:
        """The schema of its tables."""
        ...

    @property
    def source(self) -> dict[str, Any]:
        """The settings of the source that captures it."""
        ...

    @property
    def shell(self) -> str:
        """The command by which a person writes to it."""
        ...

    @property
    def actions(self) -> Mapping[Action, int]:
        """The transactions of the shop, each with its weight."""
        ...

    @property
    def register(self) -> Action:
        """The one that makes a customer of a given `name`."""
        ...

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What a session raises when it cannot go on."""
        ...

    def build(self) -> None:
        """Create the tables and their first rows."""
        ...

    def connect(self) -> ShopSession:
        """Another session."""
        ...

    def declared(self, table: str) -> dict[str, str]:
        """A table's columns and their types."""
        ...

    def rows(self, table: str) -> list[Row]:
        """What a table holds now, as Python's values; documents are taken apart."""
        ...

    def image(self, declared: str, value: Any) -> Any:
        """A value as the documents say that it looks in JSON."""
        ...

    def arrow(self, declared: str) -> str:
        """The type that a column of the Delta table should have, as Arrow prints it."""
        ...

    def is_document(self, declared: str) -> bool:
        """Whether the column holds JSON, which is text in a Delta table."""
        ...


def weighted(actions: Mapping[Action, int]) -> tuple[Sequence[Action], Sequence[int]]:
    """What may be done, and how often."""
    return list(actions), list(actions.values())
