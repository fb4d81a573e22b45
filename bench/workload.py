"""The data that everyone is measured on, made inside the server so that making it is no work here.

The backlog: transactions of 10 inserts, 5 updates and 1 delete on a table of 8 columns.
The copy: one table of the same columns that is read whole. Both are made of the same rows.
"""

from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from headrace.change.lsn import parse_lsn
from headrace.testing import PostgresDatabase

CHANGES_PER_TRANSACTION = 16
FULL_TRANSACTIONS = 30_000
FULL_ROWS = 1_000_000

BACKLOG_TABLE = "public.bench_backlog"
COPY_TABLE = "public.bench_copy"
PUBLICATION = "bench"

_COLUMNS: LiteralString = """
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer int NOT NULL,
    name text NOT NULL,
    price numeric(12,2) NOT NULL,
    tags jsonb NOT NULL,
    active boolean NOT NULL,
    note text,
    created_at timestamptz NOT NULL DEFAULT now()
"""

_ROWS: LiteralString = """
    (customer, name, price, tags, active, note)
    SELECT g, 'customer name ' || g, g * 1.25,
           jsonb_build_object('a', g, 'b', 'text ' || g, 'c', jsonb_build_array(1, 2, 3)),
           g % 2 = 0, 'note for row ' || g
"""

_TABLES: LiteralString = f"""
    CREATE TABLE public.bench_backlog ({_COLUMNS});
    CREATE TABLE public.bench_copy ({_COLUMNS});
    CREATE PUBLICATION bench FOR TABLE public.bench_backlog;
"""

_PROCEDURE: LiteralString = f"""
    CREATE PROCEDURE public.bench_load(transactions int) LANGUAGE plpgsql AS $$
    DECLARE first bigint;
    BEGIN
        FOR i IN 1..transactions LOOP
            INSERT INTO public.bench_backlog {_ROWS} FROM generate_series(i * 10, i * 10 + 9) g;
            first := currval('public.bench_backlog_id_seq') - 9;
            UPDATE public.bench_backlog SET price = price + 1, note = 'updated'
                WHERE id BETWEEN first AND first + 4;
            DELETE FROM public.bench_backlog WHERE id = first + 9;
            COMMIT;
        END LOOP;
    END $$;
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much work a run does: 1 is the full size, on which results are compared."""

    factor: float = 1.0

    @property
    def transactions(self) -> int:
        """Transactions of the backlog."""
        return max(1, round(FULL_TRANSACTIONS * self.factor))

    @property
    def changes(self) -> int:
        """Row changes of the backlog."""
        return self.transactions * CHANGES_PER_TRANSACTION

    @property
    def operations(self) -> dict[str, int]:
        """Row changes of the backlog, by what they do."""
        parts = {"INSERT": 10, "UPDATE": 5, "DELETE": 1}
        return {op: self.transactions * count for op, count in parts.items()}

    @property
    def rows(self) -> int:
        """Rows of the table that is copied, and of the one large transaction."""
        return max(1, round(FULL_ROWS * self.factor))


def create(database: PostgresDatabase) -> None:
    """Make the tables, empty, and the publication that the peers read."""
    database.execute(_TABLES)
    database.execute(_PROCEDURE)


def load_backlog(database: PostgresDatabase, transactions: int) -> str:
    """Commit the backlog; return the position of its end in the server's write-ahead log."""
    database.execute("CALL public.bench_load(%s)", (transactions,))
    return current_lsn(database)


def load_copy(database: PostgresDatabase, rows: int) -> None:
    """Fill the table that is copied."""
    _insert(database, COPY_TABLE, rows)
    # Statistics and hint bits now, so that no reader pays for them.
    database.execute("VACUUM (ANALYZE, FREEZE) public.bench_copy")


def load_one_transaction(database: PostgresDatabase, rows: int) -> None:
    """Insert many rows in a single transaction."""
    _insert(database, BACKLOG_TABLE, rows)


def _insert(database: PostgresDatabase, table: str, rows: int) -> None:
    name = sql.Identifier(*table.split("."))
    statement = sql.SQL(f"INSERT INTO {{}} {_ROWS} FROM generate_series(1, {{}}) g")
    database.execute(statement.format(name, sql.Literal(rows)))


def create_slot(database: PostgresDatabase, slot: str) -> None:
    """Make a replication slot that begins here."""
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))


def drop_slot(database: PostgresDatabase, slot: str) -> None:
    """Let the server forget a slot."""
    database.execute("SELECT pg_drop_replication_slot(%s)", (slot,))


def confirmed(database: PostgresDatabase, slot: str) -> int:
    """How far a slot's reader says it has come."""
    query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return parse_lsn(str(database.execute(query, (slot,))[0][0]))


def current_lsn(database: PostgresDatabase) -> str:
    """The end of the server's write-ahead log."""
    return str(database.execute("SELECT pg_current_wal_insert_lsn()::text")[0][0])
