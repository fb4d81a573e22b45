"""Random DDL of every kind beside random rows, restarts and kills: then the log is compared.

    python -m tests.faults.ddlwork --seeds 50 [--first 1] [--versions 15,16,18] [--steps 120]

All that is done follows from a seed; how the sessions meet does not. What the server refuses (no
such column, a lock not had in time) is part of it.
"""

import argparse
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

import psycopg

from headrace.change.replay import Replay
from headrace.log import LogReader
from headrace.sources import Phase
from headrace.testing import PostgresDatabase, PostgresServer, wait_until
from tests.conftest import SETTINGS, install_of
from tests.everywhere import differences_everywhere
from tests.faults.scenario import Captor, Scenario
from tests.faults.verify import every_change
from tests.sources.ddlrows import differences

Connection = psycopg.Connection[tuple[Any, ...]]

GLOBS = ("public.*", "inside.*")
NAMES = ("spring", "summer", "autumn", "winter")
WHOLES = ("years", "decades")  # partitioned tables
VALUES: dict[str, tuple[str, ...]] = {
    "integer": ("7", "-1", "NULL"),
    "bigint": ("9007199254740993", "0"),
    "text": ("'é \"x\" \\'", "''", "NULL", "'n'"),
    "character varying(40)": ("'vary'", "NULL"),
    "numeric(12,3)": ("1.500", "-0.001", "NULL"),
    "boolean": ("true", "false"),
    "timestamp with time zone": ("'2026-01-02 03:04:05.678+02'", "NULL"),
    "timestamp without time zone": ("'2026-01-02 03:04:05'", "NULL"),
    "integer[]": ("'{1,NULL,3}'", "'{}'"),
    "jsonb": ("""'{"a": ["x", null]}'""", "NULL"),
    "mood": ("(SELECT enumlabel::mood FROM pg_enum LIMIT 1)", "NULL"),
    "pair": ("NULL", "jsonb_populate_record(NULL::pair, '{\"x\": 5}')"),
}
_DEFAULTS = {
    "integer": ("5", "(random() * 100)::int"),
    "text": ("'n, \"q\"'", "clock_timestamp()::text", "current_user"),
    "timestamp with time zone": ("now()", "clock_timestamp()"),
    "integer[]": ("'{1,2}'",),
    "jsonb": ("'{\"d\": 1}'",),
    "boolean": ("true",),
    "numeric(12,3)": ("1.25",),
}

_SETUP = """
    CREATE SCHEMA inside; CREATE SCHEMA outside;
    CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE TYPE pair AS (x int, y mood);
"""

_COLUMNS = """
    SELECT a.attname::text, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a
    WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped
      AND a.attgenerated = '' ORDER BY a.attnum"""

_TABLES = """
    SELECT format('%I.%I', n.nspname, c.relname)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND n.nspname IN ('public', 'inside', 'outside')
      AND NOT c.relispartition ORDER BY 1"""

_PARTITIONS = """
    SELECT i.inhparent::regclass::text, i.inhrelid::regclass::text, c.relkind::text
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE c.relkind IN ('r', 'p') ORDER BY 2"""


class DdlWork:
    """Sessions that write rows, from entering to leaving, and DDL one by one."""

    def __init__(self, database: PostgresDatabase, seed: int, *, traced: bool) -> None:
        """`traced`: the event trigger is there, so nothing is too quick to be noticed."""
        self._database = database
        self._dice = Random(f"{seed}-ddl")
        self._seed = seed
        self._traced = traced
        self._old: set[str] = set()  # partitions that looks have seen
        self._ending = threading.Event()
        self._number = 0
        self.done: list[str] = []  # the statements that were committed
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(2)]
        database.execute(_SETUP)
        for name in NAMES:
            database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, a text, b int, m mood)")
        for name in WHOLES:
            database.execute(
                f"CREATE TABLE {name} (id int PRIMARY KEY, a text, b int) PARTITION BY RANGE (id);"
                f"CREATE TABLE {name}_0 PARTITION OF {name} FOR VALUES FROM (0) TO (100);"
                f"CREATE TABLE {name}_1 PARTITION OF {name} FOR VALUES FROM (100) TO (150)"
            )
        for name in (*NAMES, *WHOLES):
            database.execute(f"INSERT INTO {name} (id, a, b) SELECT n, 'first', n"
                             " FROM generate_series(1, 40) n")  # fmt: skip
        self._connection = self._connect()
        self.settled(self.partitions())

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
        self._stop()
        self._connection.close()

    def _stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def partitions(self) -> set[str]:
        """Those that are there."""
        return {part for _, part, _ in self._database.execute(_PARTITIONS)}

    def settled(self, partitions: set[str]) -> None:
        """These have been looked at."""
        self._old = partitions

    def step(self) -> None:
        """One or some statements, sometimes among rows in one transaction."""
        dice, connection = self._dice, self._connection
        statements = self._statements()
        try:
            if any(word in statements[0] for word in ("VACUUM", "CLUSTER", "ADD VALUE")):
                connection.autocommit = True
                for statement in statements:
                    connection.execute(statement.encode())
            else:
                if dice.random() < 0.4:
                    self._rows(connection, dice)
                for statement in statements:
                    connection.execute(statement.encode())
                    if dice.random() < 0.4:
                        self._rows(connection, dice)
                if dice.random() < 0.1:
                    connection.rollback()
                    return
                connection.commit()
            self.done += statements
        except psycopg.Error:
            connection.rollback()
        finally:
            if connection.autocommit:
                connection.autocommit = False

    def end(self) -> None:
        """Write no more, and give every table a full identity, so that all of it is captured."""
        self._stop()
        for (table,) in self._database.execute(_TABLES):
            self._database.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
        for _, part, _ in self._database.execute(_PARTITIONS):
            self._database.execute(f"ALTER TABLE {part} REPLICA IDENTITY FULL")

    # -- DDL --------------------------------------------------------------------------------------

    def _statements(self) -> list[str]:
        self._number += 1
        kinds: dict[Callable[[], list[str]], int] = {
            self._column: 40,
            self._table: 14,
            self._types: 10,
            self._partition: 14,
            self._storage: 10,
            self._identity: 6,
        }
        (chosen,) = self._dice.choices(list(kinds), list(kinds.values()))
        return chosen()

    def _tables(self) -> list[str]:
        return [table for (table,) in self._database.execute(_TABLES)]

    def _pick(self) -> str:
        return self._dice.choice(self._tables() or ["public.spring"])

    def _columns(self, table: str) -> list[tuple[str, str]]:
        with suppress(psycopg.Error):
            return self._database.execute(_COLUMNS, (table,))
        return []

    def _column(self) -> list[str]:
        dice, table = self._dice, self._pick()
        names = [name for name, _ in self._columns(table) if name != "id"] or ["a"]
        old, new = dice.choice(names), dice.choice("abcdefgh")
        kind = dice.choice(list(VALUES))
        default = f" DEFAULT {dice.choice(_DEFAULTS[kind])}" if kind in _DEFAULTS else ""
        alter = f"ALTER TABLE {table}"
        choices = (
            [f"{alter} ADD {new} {kind}"],
            [f"{alter} ADD {new} {kind}{default}"],
            [f"{alter} ADD {new} {kind}{default}"],
            [f"{alter} DROP {old}"],
            [f"{alter} DROP {old}", f"{alter} ADD {old} {kind}{default}"],
            [f"{alter} DROP {old}, ADD {old} {kind}{default}, ADD {new} text DEFAULT 'two'"],
            [f"{alter} RENAME {old} TO {new}"],
            [f"{alter} RENAME {old} TO swap", f"{alter} RENAME {new} TO {old}",
             f"{alter} RENAME swap TO {new}"],
            [f"{alter} ALTER {old} TYPE text USING 'was ' || {old}::text"],
            [f"{alter} ALTER {old} TYPE text"],
            [f"{alter} ALTER {old} TYPE character varying(40) USING left({old}::text, 40)"],
            [f"{alter} ALTER {old} TYPE timestamp with time zone"],
            [f"{alter} ALTER {old} SET DEFAULT NULL"],
            [f"{alter} ALTER {old} DROP DEFAULT"],
            [f"{alter} ALTER {old} SET NOT NULL"],
            [f"{alter} ALTER {old} DROP NOT NULL"],
            [f"{alter} ADD g{new} int GENERATED ALWAYS AS (id * 2) STORED"],
            [f"{alter} ALTER g{new} DROP EXPRESSION"],
            [f"{alter} ADD {new} serial"],
        )  # fmt: skip
        return dice.choice(choices)

    def _table(self) -> list[str]:
        dice, table = self._dice, self._pick()
        schema, name = table.split(".")
        public = [each for each in self._tables() if each.startswith("public.")]
        other = dice.choice(public or [table])
        fresh = f"extra{self._number}"
        return dice.choice(
            (
                [f"ALTER TABLE {table} RENAME TO {fresh}"],
                [f"ALTER TABLE {table} RENAME TO {fresh}",
                 f"ALTER TABLE {schema}.{fresh} RENAME TO {name}"],
                [f"ALTER TABLE {table} RENAME TO {fresh}",
                 f"CREATE TABLE {table} (id int PRIMARY KEY, a text)"],
                [f"ALTER TABLE {table} RENAME TO {fresh}",
                 f"ALTER TABLE {other} RENAME TO {name}",
                 f"ALTER TABLE {schema}.{fresh} RENAME TO {other.split('.')[1]}"],
                [f"ALTER TABLE {table} SET SCHEMA {dice.choice(('inside', 'outside', 'public'))}"],
                [f"ALTER TABLE {table} SET SCHEMA {dice.choice(('inside', 'outside', 'public'))}"],
                [f"DROP TABLE {table}", f"CREATE TABLE {table} (id int PRIMARY KEY, b int)",
                 f"INSERT INTO {table} VALUES (1, 1), (2, 2)"],
                [f"DROP TABLE {table}"],
                [f"CREATE TABLE {fresh} AS SELECT n AS id, 'as' AS a FROM generate_series(1, 9) n",
                 f"ALTER TABLE {fresh} ADD PRIMARY KEY (id)"],
            )
        )  # fmt: skip

    def _types(self) -> list[str]:
        labels = [each for (each,) in self._database.execute("SELECT enumlabel FROM pg_enum")]
        label = self._dice.choice(labels)
        fields = [name for name, _ in self._columns("pair")] or ["x"]
        field = self._dice.choice(fields)
        return self._dice.choice(
            (
                [f"ALTER TYPE mood ADD VALUE 'mood{self._number}' BEFORE '{label}'"],
                [f"ALTER TYPE mood RENAME VALUE '{label}' TO 'was{self._number}'"],
                [f"ALTER TYPE pair RENAME ATTRIBUTE {field} TO f{self._number}"],
                [f"ALTER TYPE pair ADD ATTRIBUTE f{self._number} text"],
                [f"ALTER TYPE pair DROP ATTRIBUTE {field}"] if len(fields) > 1 else
                [f"ALTER TYPE pair ADD ATTRIBUTE x{self._number} int"],
            )
        )  # fmt: skip

    def _partition(self) -> list[str]:
        dice, number = self._dice, self._number
        found = self._database.execute(_PARTITIONS)
        wholes = [t for (t,) in self._database.execute(
            "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'p' AND NOT relispartition"
        )]  # fmt: skip
        if not wholes:
            return [f"CREATE TABLE years{number} (id int PRIMARY KEY) PARTITION BY RANGE (id)"]
        whole, low = dice.choice(wholes), 1000 + number * 10
        bounds = f"FOR VALUES FROM ({low}) TO ({low + 10})"
        fresh = f"part{number}"
        gone = [(p, part) for p, part, _ in found if self._traced or part in self._old]
        parent, old = dice.choice(gone) if gone else (whole, "none")
        plain = [part for p, part, kind in found if kind == "r" and part in self._old]
        return dice.choice(
            (
                [f"CREATE TABLE {fresh} PARTITION OF {whole} {bounds}",
                 f"INSERT INTO {whole} (id) VALUES ({low})"],
                [f"CREATE TABLE {fresh} PARTITION OF {whole} {bounds} PARTITION BY RANGE (id)",
                 f"CREATE TABLE {fresh}_1 PARTITION OF {fresh} {bounds}",
                 f"INSERT INTO {whole} (id) VALUES ({low})"],
                [f"CREATE TABLE {fresh} (LIKE {whole})",
                 f"INSERT INTO {fresh} (id) VALUES ({low}), ({low + 1})",
                 f"ALTER TABLE {whole} ATTACH PARTITION {fresh} {bounds}"],
                [f"ALTER TABLE {parent} DETACH PARTITION {old}"],
                [f"DROP TABLE {old}"],
                [f"TRUNCATE {dice.choice(plain)}" if plain else f"DROP TABLE {old}"],
            )
        )  # fmt: skip

    def _storage(self) -> list[str]:
        table = self._pick()
        return self._dice.choice(
            ([f"TRUNCATE {table}"], [f"VACUUM FULL {table}"],
             [f"CLUSTER {table} USING {table.split('.')[1]}_pkey"], [f"ANALYZE {table}"])
        )  # fmt: skip

    def _identity(self) -> list[str]:
        table = self._pick()
        name = table.split(".")[1]
        return self._dice.choice(
            ([f"ALTER TABLE {table} REPLICA IDENTITY FULL"],
             [f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT"],
             [f"ALTER TABLE {table} DROP CONSTRAINT {name}_pkey"],
             [f"ALTER TABLE {table} ADD PRIMARY KEY (id)"])
        )  # fmt: skip

    # -- rows -------------------------------------------------------------------------------------

    def _connect(self) -> Connection:
        connection = psycopg.connect(self._database.url)
        connection.execute("SET lock_timeout = '500ms'; SET deadlock_timeout = '100ms'")
        connection.commit()
        return connection

    def _write(self, number: int) -> None:
        dice = Random(f"{self._seed}-rows-{number}")
        with self._connect() as connection:
            while not self._ending.wait(dice.uniform(0, 0.08)):
                try:
                    for _ in range(dice.randrange(1, 4)):
                        self._rows(connection, dice)
                    if dice.random() < 0.1:
                        connection.rollback()
                    else:
                        connection.commit()
                except psycopg.Error:
                    connection.rollback()

    def _rows(self, connection: Connection, dice: Random) -> None:
        (table,) = dice.choice(connection.execute(_TABLES).fetchall())
        columns = connection.execute(_COLUMNS, (table,)).fetchall()
        if not columns:
            return
        key = dice.randrange(140)
        chosen = [each for each in columns if each[0] != "id" and dice.random() < 0.6]
        values = {name: dice.choice(VALUES.get(kind, ("NULL",))) for name, kind in chosen}
        if any(name == "id" for name, _ in columns):
            where = f"id BETWEEN {key} AND {key + 3}"
            values["id"] = str(key)
        else:
            where = f"ctid IN (SELECT ctid FROM {table} LIMIT 2)"
        names, texts = ", ".join(values), ", ".join(values.values())
        changed = ", ".join(f"{n} = {v}" for n, v in values.items() if n != "id")
        statement = dice.choice(
            (
                f"INSERT INTO {table} ({names}) VALUES ({texts}) ON CONFLICT DO NOTHING",
                f"INSERT INTO {table} ({names}) VALUES ({texts}) ON CONFLICT DO NOTHING",
                f"UPDATE {table} SET {changed} WHERE {where}",
                f"UPDATE {table} SET {changed} WHERE {where}",
                f"DELETE FROM {table} WHERE {where}",
            )
        )
        with connection.transaction():  # what is refused undoes nothing else
            connection.execute(statement.encode())


class DdlRun:
    """One seed: DDL and rows, with captors that end in every way."""

    def __init__(self, database: PostgresDatabase, folder: Path, seed: int) -> None:
        self._seed = seed
        self._dice = Random(f"{seed}-run")
        self._ddl = self._dice.random() < 0.5
        self._database = database
        self._scenario = Scenario(database, folder)
        self._work = DdlWork(database, seed, traced=self._ddl)
        self.ended = 0
        self.settings = {"tables": GLOBS, "ddl": self._ddl}

    def run(self, steps: int) -> None:
        """Until everything is equal."""
        with self._scenario, self._work as work:
            captor = self._start()
            for number in range(steps):
                if number % 30 == 29:
                    self._looked(captor)
                work.step()
                time.sleep(self._dice.choice((0, 0, 0, 0.05, 0.3)))
                if self._dice.random() < 0.04:
                    captor = self._interrupted(captor)
            work.end()
            self._until_equal(captor)
            captor.stop()
            self._expect_equal_everywhere()

    @property
    def done(self) -> list[str]:
        """The statements that were committed."""
        return self._work.done

    def _looked(self, captor: Captor) -> None:
        """Let a captor see the partitions that are there: then they may go."""
        known = self._work.partitions()
        self._scenario.catch_up(captor)
        captor.outlast(2.5)
        self._work.settled(known)

    def _start(self) -> Captor:
        captor = self._scenario.start(settings=self.settings)
        captor.wait_for(Phase.STREAMING, after=0)
        return captor

    def _interrupted(self, captor: Captor) -> Captor:
        """Ended in order or killed; DDL goes on meanwhile."""
        self.ended += 1
        if self._dice.random() < 0.5:
            self._scenario.kill(captor)
        else:
            captor.stop()
        for _ in range(self._dice.randrange(0, 12)):
            self._work.step()
        return self._start()

    def _until_equal(self, captor: Captor) -> None:
        found: dict[str, str] = {}

        def equal() -> bool:
            nonlocal found
            self._scenario.catch_up(captor)
            with LogReader.open(self._scenario.log) as log:
                replay = Replay.of(every_change(log))
            found = differences(replay, self._database, GLOBS)
            return not found

        try:
            wait_until(equal, timeout=240, message="the log replays to the database")
        except TimeoutError:
            raise AssertionError(f"{self.settings} {found} {captor.reports[-1:]}") from None

    def _expect_equal_everywhere(self) -> None:
        lake = self._scenario.log.parent / "lake"
        found = differences_everywhere(self._scenario.log, lake, self._seed)
        assert not found, "\n".join(found)


def run_seed(server: PostgresServer, seed: int, *, steps: int) -> None:
    """Everything of one seed, in a database and a folder of its own."""
    with server.database() as database, tempfile.TemporaryDirectory() as folder:
        run = DdlRun(database, Path(folder), seed)
        try:
            run.run(steps)
        except BaseException:
            say("\n    ".join((f"seed {seed} statements:", *run.done)))
            raise
        say(f"seed={seed} {len(run.done)} statements, {run.ended} captors ended, {run.settings}")


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Run seeds; the number of those that differ is shown, and 1 returned if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--versions", default="15,16,18")
    given = parser.parse_args(arguments)
    failed: list[int] = []
    for at, version in enumerate(versions := [int(v) for v in given.versions.split(",")]):
        with PostgresServer(install_of(version), settings=SETTINGS) as server:
            for seed in range(given.first + at, given.first + given.seeds, len(versions)):
                began = time.monotonic()
                try:
                    run_seed(server, seed, steps=given.steps)
                    outcome = "equal"
                except Exception:  # noqa: BLE001 - the next seed goes on
                    failed.append(seed)
                    outcome = f"FAILED\n{traceback.format_exc()}"
                took = time.monotonic() - began
                say(f"seed={seed} postgres={version} {took:.0f}s {outcome}")
    say(f"{given.seeds} seeds, {len(failed)} failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
