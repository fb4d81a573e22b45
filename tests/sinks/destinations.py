"""Destinations for tests: the rows of every table in SQLite, with faults that a file asks for."""

import asyncio
import json
import os
import sqlite3
from pathlib import Path

from headrace.errors import SinkRefused
from headrace.formats.etl import Delete, Event, Insert, Relation, Truncate, Update

SETUP = """
    CREATE TABLE IF NOT EXISTS rows (table_id INTEGER, id INTEGER, row TEXT,
                                     PRIMARY KEY (table_id, id));
    CREATE TABLE IF NOT EXISTS calls (first INTEGER, last INTEGER, events INTEGER, kinds TEXT);
    CREATE TABLE IF NOT EXISTS tables (id INTEGER PRIMARY KEY, name TEXT);
"""


_ERRORS = {"cancel": asyncio.CancelledError(), "exit": SystemExit(3)}


class Rows:
    """Each row under its id, so that events that come again change nothing."""

    def __init__(self, file: str, password: str = "") -> None:
        self._file = Path(file)
        self._password = password
        self._db = sqlite3.connect(file)
        self._db.executescript(SETUP)

    def write_events(self, events: list[Event]) -> None:
        """Store events in one transaction, and note the call."""
        self._fail("before")
        with self._db:
            for event in events:
                self._take(event)
            kinds = json.dumps([type(event).__name__ for event in events])
            call = (events[0].sequence, events[-1].sequence, len(events), kinds)
            self._db.execute("INSERT INTO calls VALUES (?, ?, ?, ?)", call)
        self._fail("after")

    def _take(self, event: Event) -> None:
        match event:
            case Insert(table_id=table, table_row=row) | Update(table_id=table, table_row=row):
                values = (table, row["id"], json.dumps(row))
                self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", values)
            case Delete(table_id=table, old_table_row=old) if old:
                self._db.execute(
                    "DELETE FROM rows WHERE table_id = ? AND id = ?", (table, old.row["id"])
                )
            case Truncate(rel_ids=tables):
                for table in tables:
                    self._db.execute("DELETE FROM rows WHERE table_id = ?", (table,))
            case Relation(table_schema=schema):
                named = (schema.id, schema.name)
                self._db.execute("INSERT OR REPLACE INTO tables VALUES (?, ?)", named)

    def _fail(self, when: str) -> None:
        """Do what the file beside the database says, so many times."""
        file = self._file.with_suffix(f".{when}")
        if not file.exists():
            return
        fault, times = file.read_text().split()
        if int(times) > 1:
            file.write_text(f"{fault} {int(times) - 1}")
        else:
            file.unlink()
        if fault == "kill":
            os._exit(9)
        if fault == "refuse":
            raise SinkRefused("the account is closed", hint="Open it.")
        if fault in _ERRORS:
            raise _ERRORS[fault]
        raise ConnectionError(f"no connection with password {self._password}")


class AsyncRows(Rows):
    """The same, with a coroutine that needs one event loop for all calls."""

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def write_events(self, events: list[Event]) -> None:  # type: ignore[override]
        """Store events after another task of the loop has run."""
        loop = asyncio.get_running_loop()
        assert self._loop in (None, loop)
        self._loop = loop
        await asyncio.sleep(0)
        super().write_events(events)


def stored(file: Path) -> dict[str, dict[int, str]]:
    """The rows of each table, by their id."""
    with sqlite3.connect(file) as database:
        names = dict(database.execute("SELECT id, name FROM tables"))
        found: dict[str, dict[int, str]] = {name: {} for name in names.values()}
        for table, number, row in database.execute("SELECT * FROM rows"):
            found[names[table]][number] = json.loads(row).get("name", "")
    return found


def calls(file: Path) -> list[tuple[int, int, int, list[str]]]:
    """Every call: the sequences of the first and last event, how many, and their kinds."""
    with sqlite3.connect(file) as database:
        return [
            (first, last, count, json.loads(kinds))
            for first, last, count, kinds in database.execute("SELECT * FROM calls")
        ]
