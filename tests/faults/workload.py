"""A random workload from several connections, the same for the same seed.

What a writer asks for follows from its seed alone; how the writers interleave is up to the server.
A transaction that the server refuses (a key taken, a deadlock, a restart) is part of the workload.
"""

import threading
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Any, Self

import psycopg

from headrace.testing import PostgresDatabase, wait_until

Connection = psycopg.Connection[tuple[Any, ...]]

TABLES = ("accounts", "audit", "bulk", "documents", "journal", "lines", "pages")

SCHEMA = """
    CREATE TABLE accounts (
        id int PRIMARY KEY, balance numeric(14, 2), note text, changed timestamptz DEFAULT now());
    ALTER TABLE accounts ALTER note SET STORAGE EXTERNAL;
    CREATE TABLE documents (
        id bigint PRIMARY KEY, body jsonb, attachment text, made timestamptz, weight numeric);
    ALTER TABLE documents ALTER attachment SET STORAGE EXTERNAL;
    CREATE TABLE lines (
        order_id int, line_no int, amount numeric, label text, PRIMARY KEY (order_id, line_no));
    CREATE TABLE audit (id bigserial PRIMARY KEY, what text, long text, at timestamptz);
    ALTER TABLE audit ALTER long SET STORAGE EXTERNAL;
    ALTER TABLE audit REPLICA IDENTITY FULL;
    CREATE TABLE journal (what text, amount numeric);
    ALTER TABLE journal REPLICA IDENTITY FULL;
    CREATE TABLE bulk (id int PRIMARY KEY, amount numeric, at timestamptz);
    CREATE TABLE pages (id int PRIMARY KEY, filling text, scan text, visits int DEFAULT 0);
    ALTER TABLE pages ALTER filling SET STORAGE PLAIN, ALTER scan SET STORAGE EXTERNAL;

    INSERT INTO accounts SELECT n, n * 1.25, repeat('n', n % 4000) FROM generate_series(1, 1000) n;
    INSERT INTO documents
        SELECT n, jsonb_build_object('n', n, 'tags', jsonb_build_array('a', 0.10, null)),
               repeat('d', 2500), now(), n / 7.0 FROM generate_series(1, 300) n;
    INSERT INTO lines SELECT n / 5, n % 5, n * 0.01, 'line ' || n FROM generate_series(1, 1000) n;
    INSERT INTO audit (what, long, at)
        SELECT 'was there', repeat('t', 2500), now() FROM generate_series(1, 200);
    INSERT INTO journal SELECT 'entry ' || n, n FROM generate_series(1, 500) n;
"""

ACCOUNTS, DOCUMENTS, ORDERS, BULK = 1500, 500, 300, 12_000
PAGE = 1200  # bytes; six rows a block
LARGE = 9000  # rows; more than one piece


def create(database: PostgresDatabase, *, pages: int) -> None:
    """The tables with their first rows; `pages` of 1200 bytes are what a copy takes time for."""
    database.execute(SCHEMA)
    database.execute(
        """INSERT INTO pages
           SELECT n, repeat('p', %s) || n, CASE WHEN n %% 10 = 0 THEN repeat('s', 2500) END
           FROM generate_series(1, %s) n""",
        (PAGE, pages),
    )


def touch(database: PostgresDatabase) -> None:
    """Change something in every table, after which the stream need not describe any of them."""
    database.execute("INSERT INTO bulk VALUES (0)")
    database.execute("; ".join(f"DELETE FROM {table} WHERE ctid = '(0,1)'" for table in TABLES))


class Workload:
    """Writers that change a database from entering to leaving."""

    def __init__(
        self, database: PostgresDatabase, seed: int, *, writers: int = 3, truncating: bool = True
    ) -> None:
        self._stopping = threading.Event()
        pages = database.execute("SELECT max(id) FROM pages")[0][0]
        self._writers = [
            Writer(database.url, Random(f"{seed}-{n}"), self._stopping, pages=pages)
            for n in range(writers)
        ]
        for writer in self._writers:
            writer.truncating = truncating
        self._threads = [threading.Thread(target=writer.run) for writer in self._writers]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    @property
    def committed(self) -> int:
        """How many transactions the server has taken so far."""
        return sum(writer.committed for writer in self._writers)

    def wait_for_more(self, transactions: int) -> None:
        """Wait until so many more are committed."""
        enough = self.committed + transactions
        wait_until(lambda: self.committed >= enough, timeout=120, message="the workload goes on")


class Writer:
    """One connection's share of the workload; connects again when the server goes away."""

    def __init__(self, url: str, random: Random, stopping: threading.Event, *, pages: int) -> None:
        self.committed = 0
        self.truncating = True
        self._url = url
        self._random = random
        self._stopping = stopping
        self._pages = pages
        self._new_ids = random.randrange(1, 1000) * 1_000_000
        weighed: dict[Callable[[Connection], None], int] = {
            self._insert: 60,
            self._update: 90,
            self._update_pages: 45,
            self._delete: 30,
            self._change_key: 18,
            self._across_tables: 36,
            self._with_savepoint: 24,
            self._annotate: 9,
            self._truncate: 1,
            self._many_rows: 2,
        }
        self._actions, self._weights = list(weighed), list(weighed.values())

    def run(self) -> None:
        """Work until told to stop."""
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self._url, connect_timeout=5) as connection:
                    self._work(connection)
            except psycopg.OperationalError:
                # The server is stopped or starting: the workload goes on when it answers.
                self._stopping.wait(0.05)

    def _work(self, connection: Connection) -> None:
        while not self._stopping.wait(self._random.uniform(0, 0.04)):
            (action,) = self._random.choices(self._actions, self._weights)
            aborts = self._random.random() < 0.08
            try:
                with connection.transaction(force_rollback=aborts):
                    action(connection)
            except (psycopg.OperationalError, psycopg.IntegrityError):
                # A deadlock, a lock not had in time, a key that is taken, or the server is gone.
                if connection.broken:
                    return
                continue
            self.committed += 1

    # -- what a transaction does ------------------------------------------------------------------

    def _insert(self, connection: Connection) -> None:
        pick = self._random.randrange
        for _ in range(pick(1, 4)):
            connection.execute(
                "INSERT INTO accounts VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
                (pick(ACCOUNTS), pick(10**6) / 100, "i" * pick(5000)),
            )
            connection.execute(
                """INSERT INTO documents VALUES (%s, %s::jsonb, %s, now(), %s)
                   ON CONFLICT DO NOTHING""",
                (pick(DOCUMENTS), self._json(), "j" * pick(6000), self._numeric()),
            )
            connection.execute(
                "INSERT INTO journal VALUES (%s, %s)", (f"w {pick(300)}", self._numeric())
            )

    def _update(self, connection: Connection) -> None:
        """Mostly without touching the large columns, whose values the server then leaves out."""
        pick = self._random.randrange
        connection.execute(
            "UPDATE accounts SET balance = %s, changed = clock_timestamp() WHERE id = %s",
            (pick(10**6) / 100, pick(ACCOUNTS)),
        )
        connection.execute(
            "UPDATE documents SET body = %s::jsonb, weight = %s WHERE id BETWEEN %s AND %s",
            (self._json(), self._numeric(), *self._span(DOCUMENTS, 4)),
        )
        connection.execute(
            "UPDATE audit SET at = clock_timestamp() WHERE id %% 97 = %s", (pick(97),)
        )
        connection.execute(
            "UPDATE journal SET amount = %s WHERE what = %s", (self._numeric(), f"w {pick(300)}")
        )
        if self._random.random() < 0.3:
            connection.execute(
                "UPDATE accounts SET note = %s WHERE id = %s",
                (None if pick(5) == 0 else "u" * pick(5000), pick(ACCOUNTS)),
            )

    def _update_pages(self, connection: Connection) -> None:
        """Each new version of a page lands in another block."""
        spans = [self._span(self._pages, 8) for _ in range(3)]
        for low, high in spans:
            connection.execute(
                "UPDATE pages SET visits = visits + 1 WHERE id BETWEEN %s AND %s", (low, high)
            )

    def _delete(self, connection: Connection) -> None:
        pick = self._random.randrange
        connection.execute("DELETE FROM accounts WHERE id = %s", (pick(ACCOUNTS),))
        connection.execute("DELETE FROM documents WHERE id = %s", (pick(DOCUMENTS),))
        connection.execute("DELETE FROM lines WHERE order_id = %s", (pick(ORDERS),))
        connection.execute("DELETE FROM audit WHERE id %% 101 = %s", (pick(101),))
        connection.execute("DELETE FROM journal WHERE what = %s", (f"w {pick(300)}",))
        connection.execute("DELETE FROM pages WHERE id = %s", (pick(self._pages),))

    def _change_key(self, connection: Connection) -> None:
        pick = self._random.randrange
        for table, limit in (("accounts", ACCOUNTS), ("pages", self._pages)):
            connection.execute(
                f"UPDATE {table} SET id = %s WHERE id = %s", (self._new_id(), pick(limit))
            )
        connection.execute(
            "UPDATE lines SET line_no = line_no + 100 WHERE order_id = %s AND line_no < 100",
            (pick(ORDERS),),
        )

    def _across_tables(self, connection: Connection) -> None:
        pick = self._random.randrange
        order = pick(ORDERS)
        for line in range(pick(1, 6)):
            connection.execute(
                """INSERT INTO lines VALUES (%s, %s, %s, %s)
                   ON CONFLICT (order_id, line_no) DO UPDATE SET amount = excluded.amount""",
                (order, line, self._numeric(), f"line {line}"),
            )
        connection.execute(
            "UPDATE accounts SET balance = balance - 1 WHERE id BETWEEN %s AND %s",
            self._span(ACCOUNTS, 5),
        )
        connection.execute(
            "INSERT INTO audit (what, long, at) VALUES (%s, %s, clock_timestamp())",
            (f"order {order}", "l" * pick(4000)),
        )

    def _with_savepoint(self, connection: Connection) -> None:
        self._insert(connection)
        with connection.transaction(force_rollback=True):
            self._update(connection)
            self._delete(connection)
        with connection.transaction():
            self._across_tables(connection)

    def _annotate(self, connection: Connection) -> None:
        connection.execute("SELECT pg_logical_emit_message(true, 'headrace', '{\"by\": \"test\"}')")
        self._update(connection)

    def _truncate(self, connection: Connection) -> None:
        # Not in a queue that holds up the other writers until a copy has ended.
        if self.truncating:
            connection.execute("SET LOCAL lock_timeout = '50ms'")
            connection.execute("TRUNCATE lines, audit")
            self._across_tables(connection)

    def _many_rows(self, connection: Connection) -> None:
        write_many(connection, self._random.choice((1000, 1000, 3000, LARGE)), self._numeric())

    # -- values -----------------------------------------------------------------------------------

    def _span(self, limit: int, width: int) -> tuple[int, int]:
        low = self._random.randrange(limit)
        return low, low + self._random.randrange(width)

    def _new_id(self) -> int:
        self._new_ids += 1
        return self._new_ids

    def _numeric(self) -> str:
        digits = self._random.randrange(10**18)
        return self._random.choice((str(digits), f"-{digits}.{digits}", "0.000", "NaN"))

    def _json(self) -> str:
        return f'{{"n": {self._random.random()}, "s": "ü\\n{self._random.random()}", "e": []}}'


def write_many(connection: Connection, rows: int, amount: str = "1.5") -> None:
    """One transaction of at least `rows` changes."""
    connection.execute("DELETE FROM bulk WHERE id %% 2 = %s", (rows % 2,))
    connection.execute(
        """INSERT INTO bulk SELECT n, %s, clock_timestamp() FROM generate_series(1, %s) n
           ON CONFLICT (id) DO UPDATE SET amount = excluded.amount""",
        (amount, rows),
    )
