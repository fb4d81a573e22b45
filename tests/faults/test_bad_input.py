"""What cannot be decoded stops its table only, and stays that way through kill -9."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import psycopg
import pytest
from psycopg import sql

from headrace.change.event import Op
from headrace.change.replay import Replay, TableName
from headrace.log import LogReader
from headrace.sources import Phase
from headrace.testing import PostgresDatabase, wait_until
from tests.conftest import Servers
from tests.faults.captor import SOURCE
from tests.faults.scenario import Captor, Scenario
from tests.faults.verify import every_change


@pytest.fixture
def careless(servers: Servers) -> Iterator[PostgresDatabase]:
    """A database that checks no encoding, with a table for good texts and one for bad ones."""
    database = PostgresDatabase(servers[16], f"test_{uuid4().hex[:12]}")
    name = sql.Identifier(database.name)
    with psycopg.connect(servers[16].url(), autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} ENCODING 'SQL_ASCII' TEMPLATE template0").format(name)
        )
        database.execute(
            "CREATE TABLE good (id int PRIMARY KEY, word text);"
            "CREATE TABLE bad (id int PRIMARY KEY, word text)"
        )
        yield database
        database.drop_slots()
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def test_a_table_with_an_undecodable_value_stays_errored_through_a_kill_and_keeps_its_bytes(
    careless: PostgresDatabase, tmp_path: Path
) -> None:
    with Scenario(careless, tmp_path) as scenario:
        captor = scenario.start()
        captor.wait_for(Phase.STREAMING)
        write(careless, 1, "fine")
        careless.execute("INSERT INTO bad VALUES (2, E'\\xff')")
        write(careless, 3, "late")
        scenario.catch_up(captor)
        reason = errored(captor)
        scenario.kill(captor)

        write(careless, 4, "while it was dead")
        captor = scenario.start()
        scenario.catch_up(captor)
        assert errored(captor) == reason
        scenario.kill(captor)
        with LogReader.open(scenario.log) as log:
            changes = list(every_change(log))
    replay = Replay.of(changes)
    words = {row["id"]: row["word"] for row in replay.rows(TableName(SOURCE, "public", "good"))}
    assert words == {1: "fine", 3: "late", 4: "while it was dead"}
    kept: list[dict[str, Any]] = [
        msgspec.json.decode(change.after or b"")
        for change in changes
        if change.op is Op.MESSAGE and change.table.name == "bad"
    ]
    assert [(message["error"], message["operation"]) for message in kept] == [
        (reason, "INSERT")
    ] * 3
    assert all(message["pgoutput"] for message in kept)


def write(database: PostgresDatabase, number: int, word: str) -> None:
    """The same row in both tables, in one transaction."""
    database.execute(
        """WITH one AS (INSERT INTO good VALUES (%s, %s) RETURNING *)
           INSERT INTO bad SELECT * FROM one""",
        (number, word),
    )


def errored(captor: Captor) -> str:
    """Why the table `bad` has stopped; no other has."""
    told = wait_until(lambda: captor.reports[-1].errored, message="a table is errored")
    assert list(told) == ["public.bad"]
    return told["public.bad"]
