"""The same small workload on every source but PostgreSQL's own log, as real servers tell it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.change.event import Change, Op
from headrace.secret import Secret
from headrace.sources.postgres_events import PostgresEvents
from headrace.testing import Place, PostgresDatabase, Session, reading, session
from headrace.testing.mysql import MysqlServer
from tests.conftest import Servers
from tests.sources.litedb import SqlitePlace
from tests.sources.myplaces import MysqlPlace
from tests.sources.places import PostgresPlace

SOURCES = ("mysql", "sqlite", "postgres_events")
SESSION = "sess_2f1c4a4e-0f6a-4b1e-9d53-6b8f4a1c7e01"
SAID = f'{{"session_id": "{SESSION}", "user_id": "u1", "trigger": "api_delete"}}'

BEFORE = (
    "CREATE TABLE users (id integer PRIMARY KEY, name varchar(50), total decimal(12,2))",
    "CREATE TABLE posts (id integer PRIMARY KEY, title varchar(50))",
    "INSERT INTO users VALUES (1, 'Ann', 1.5)",
)
MYSQL_ANNOTATIONS = (
    "CREATE TABLE headrace_annotations (id int AUTO_INCREMENT PRIMARY KEY, metadata json NOT NULL)"
)
ANNOTATE = {
    "mysql": f"INSERT INTO headrace_annotations (metadata) VALUES ('{SAID}')",
    "sqlite": f"INSERT INTO headrace_annotations VALUES ('{SAID}')",
    "postgres_events": f"SET LOCAL headrace.metadata = '{SAID}'",
}


@dataclass(frozen=True)
class Told:
    """What was captured, and what the server says of it."""

    kind: str  # of the source
    schema: str
    changes: Sequence[Change]  # all of the log, the marks of `reading` too
    transaction: str  # the id that the server gives the annotated one; "": it gives none

    @property
    def streamed(self) -> list[Change]:
        """Changes of users after the copy, without the one that DDL brings on an event table."""
        users = [change for change in self.changes if change.table.name == "users"]
        copied = next(at for at, change in enumerate(users) if change.op is Op.READ)
        copies = (Op.TRUNCATE, Op.READ) if self.kind == "postgres_events" else ()
        return [change for change in users[copied + 1 :] if change.op not in copies]

    @property
    def rows(self) -> list[Change]:
        """Those that are about rows."""
        return [change for change in self.streamed if change.op is not Op.SCHEMA]


def workload(place: Place, kind: str, folder: Path) -> Told:
    """Insert, update, change of a key, delete, DDL; one transaction says who and why."""
    with session(place) as writer:
        for statement in (*BEFORE, *((MYSQL_ANNOTATIONS,) if kind == "mysql" else ())):
            writer.execute(statement)
    place.altered()
    with reading(place, folder) as feed:
        feed.catch_up()
        _one_each(
            place,
            "INSERT INTO users VALUES (2, 'Bob', 0.1)",
            "UPDATE users SET name = 'Bo' WHERE id = 2",
            "UPDATE users SET id = 3 WHERE id = 2",
        )
        transaction = _annotated(place, kind)
        feed.catch_up()
        _one_each(place, "ALTER TABLE users ADD COLUMN note varchar(20)")
        place.altered()
        feed.catch_up()
        _one_each(place, "INSERT INTO users VALUES (4, 'Cy', NULL, 'new')")
        feed.catch_up()
        return Told(kind, place.schema, feed.log.read(0, limit=1 << 30), transaction)


def _one_each(place: Place, *statements: str) -> None:
    for statement in statements:
        with session(place) as writer:
            writer.execute(statement)


def _annotated(place: Place, kind: str) -> str:
    with session(place) as writer:
        writer.execute(ANNOTATE[kind])
        writer.execute("DELETE FROM users WHERE id = 1")
        writer.execute("INSERT INTO posts VALUES (7, 'Bye')")
        if kind == "mysql":
            writer.commit()
        return _ASK[kind](writer)


_ASK: dict[str, Callable[[Session], str]] = {
    "mysql": lambda writer: str(writer.execute("SELECT @@last_gtid")[0][0]),
    "sqlite": lambda writer: "",
    "postgres_events": lambda writer: str(writer.execute("SELECT txid_current()")[0][0]),
}


def place_of(kind: str, stack: ExitStack, request: pytest.FixtureRequest, folder: Path) -> Place:
    """A fresh database on the server that tests share."""
    if kind == "sqlite":
        return SqlitePlace(folder / "shop.db")
    if kind == "mysql":
        mariadb: MysqlServer = request.getfixturevalue("mariadb")
        return MysqlPlace(stack.enter_context(mariadb.database()))
    servers: Servers = request.getfixturevalue("servers")
    return PostgresPlace(stack.enter_context(servers[16].database()), _events)


def _events(database: PostgresDatabase) -> PostgresEvents:
    return PostgresEvents(name="shop", url=Secret(database.url), tables=("*.*",), poll_seconds=0.02)
