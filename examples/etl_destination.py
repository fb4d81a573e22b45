"""A destination of one's own: the rows of every table, kept in SQLite.

Set `HEADRACE_URL` to a running server (such as `http://127.0.0.1:3000`) or `HEADRACE_LOG` to the
log's folder on this machine, and `HEADRACE_SQLITE` to the file that shall hold the rows. It takes
what there is and ends; with `HEADRACE_FOLLOW=1` it goes on. Killed at any moment and started
again, it goes on where it was.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.client import Client
from headrace.destination import Checkpoint, Events, LogEvents, ServerEvents, deliver
from headrace.formats.etl import (
    Begin,
    Commit,
    Delete,
    Event,
    Insert,
    OldRow,
    Relation,
    TableRow,
    TableSchema,
    Truncate,
    Unsupported,
    Update,
)
from headrace.log import LogReader

SETUP = """
    CREATE TABLE IF NOT EXISTS tables (
        id INTEGER PRIMARY KEY, schema TEXT, name TEXT, columns TEXT, key TEXT);
    CREATE TABLE IF NOT EXISTS rows (table_id INTEGER, key TEXT, row TEXT);
    CREATE INDEX IF NOT EXISTS rows_by_key ON rows (table_id, key);
    CREATE TABLE IF NOT EXISTS commits (lsn TEXT PRIMARY KEY, microseconds INTEGER);
    CREATE TABLE IF NOT EXISTS checkpoint (sequence INTEGER, epoch TEXT);
    INSERT INTO checkpoint SELECT 0, '' WHERE NOT EXISTS (SELECT 1 FROM checkpoint);
"""


class Rows:
    """Every row as JSON under its table's number and its key."""

    def __init__(self, file: str) -> None:
        self._db = sqlite3.connect(file)
        self._db.executescript(SETUP)
        self._keys: dict[int, list[str]] = {}  # of the tables that were described

    @property
    def checkpoint(self) -> Checkpoint:
        """How far the file is: it says so itself, whatever happened to the program."""
        return Checkpoint(*self._db.execute("SELECT sequence, epoch FROM checkpoint").fetchone())

    def write_events(self, events: list[Event]) -> None:
        """Store events and how far they reach in one transaction: both, or neither."""
        stored = self.checkpoint.sequence
        known = self._db.execute("SELECT id, key FROM tables")
        self._keys = {table: json.loads(key) for table, key in known}
        with self._db:
            for event in events:
                if event.sequence > stored:  # else it comes again
                    self._take(event)
            reached = max(stored, events[-1].sequence)
            self._db.execute("UPDATE checkpoint SET sequence = ?", (reached,))

    def reached(self, checkpoint: Checkpoint) -> None:
        """Remember which log the sequence belongs to, also where it held nothing for us."""
        with self._db:
            self._db.execute("UPDATE checkpoint SET sequence = ?, epoch = ?", checkpoint)

    def _take(self, event: Event) -> None:
        match event:
            case Insert(table_id=table, table_row=row):
                if self._keys[table]:  # a copy that was interrupted may read a row again
                    self._remove(table, row)
                self._add(table, row)
            case Update(table_id=table, table_row=row, old_table_row=old):
                known = self._remove(table, row if old is None else row | old.row)
                self._add(table, known | row)  # what was not sent is as it was
            case Delete(table_id=table, old_table_row=OldRow(row=row)):
                self._remove(table, row)
            case Delete(table_id=table):
                raise ValueError(f"table {table} does not tell which row it deletes")
            case Truncate(rel_ids=tables):
                for table in tables:
                    self._db.execute("DELETE FROM rows WHERE table_id = ?", (table,))
            case Relation(table_schema=schema):
                self._describe(schema)
            case Begin():
                pass  # `with self._db` begins and ends what belongs together here
            case Commit(commit_lsn=lsn, timestamp=time):
                # The parts of a copy are committed at one place; of these the first is kept.
                self._db.execute("INSERT OR IGNORE INTO commits VALUES (?, ?)", (str(lsn), time))
            case Unsupported():
                pass

    def _add(self, table: int, row: TableRow) -> None:
        values = (table, self._key(table, row), _json(row))
        self._db.execute("INSERT INTO rows VALUES (?, ?, ?)", values)

    def _remove(self, table: int, row: TableRow) -> TableRow:
        """Take away the row of this key, or one of those that look like this; returns it."""
        query = "SELECT rowid, row FROM rows WHERE table_id = ? AND key = ? LIMIT 1"
        found = self._db.execute(query, (table, self._key(table, row))).fetchone()
        if found is None:
            return {}
        self._db.execute("DELETE FROM rows WHERE rowid = ?", found[:1])
        known: TableRow = json.loads(found[1])
        return known

    def _key(self, table: int, row: TableRow) -> str:
        names = self._keys[table]
        return _json([row[name] for name in names] if names else row)

    def _describe(self, schema: TableSchema) -> None:
        """Take a table's columns over; rows that are there get or lose what is different."""
        names = [(column.name, column.number) for column in schema.columns]
        key = [column.name for column in schema.columns if column.key]
        query = "SELECT columns, key FROM tables WHERE id = ?"
        known = self._db.execute(query, (schema.id,)).fetchone()
        row = (schema.id, schema.schema, schema.name, _json(names), _json(key))
        self._db.execute("INSERT OR REPLACE INTO tables VALUES (?, ?, ?, ?, ?)", row)
        self._keys[schema.id] = key
        if known is not None and known != row[3:]:
            # A column is known by its number, which a rename leaves as it is; or by its name.
            before = {number or name: name for name, number in json.loads(known[0])}
            query = "SELECT row FROM rows WHERE table_id = ?"
            rows = [json.loads(row) for (row,) in self._db.execute(query, (schema.id,)).fetchall()]
            self._db.execute("DELETE FROM rows WHERE table_id = ?", (schema.id,))
            for row in rows:
                self._add(schema.id, _described(row, before, schema))

    def of(self, schema: str, name: str) -> list[TableRow]:
        """The rows of a table, in no order."""
        # A table that was dropped and made again has a new number.
        query = """SELECT row FROM rows WHERE table_id = (
                       SELECT max(id) FROM tables WHERE schema = ? AND name = ?)"""
        return [json.loads(row) for (row,) in self._db.execute(query, (schema, name))]

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()


def _described(row: TableRow, before: dict[int | str, str], schema: TableSchema) -> TableRow:
    """A row of the columns before with those of now; one that is new has its default."""
    return {
        column.name: row.get(before[column.number or column.name])
        if (column.number or column.name) in before
        else column.initial_default
        for column in schema.columns
    }


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)  # str: numbers that no float can hold


@contextmanager
def source() -> Iterator[tuple[Events, int]]:
    """Where the events come from, and the last sequence that is there now."""
    url, log = os.environ.get("HEADRACE_URL", ""), os.environ.get("HEADRACE_LOG", "data/log")
    if url:
        yield ServerEvents(url), Client(url).health()["log"]["latest_sequence"]
    else:
        with LogReader.open(log) as reader:
            yield LogEvents(reader), reader.latest_sequence


def main() -> None:
    """Deliver events until the destination has them."""
    rows = Rows(os.environ.get("HEADRACE_SQLITE", "rows.sqlite"))
    with source() as (events, latest):
        upto = None if os.environ.get("HEADRACE_FOLLOW") else latest
        limit = int(os.environ.get("HEADRACE_BATCH", "1000"))
        for reached in deliver(events, rows, after=rows.checkpoint, upto=upto, limit=limit):
            rows.reached(reached)
    rows.close()


if __name__ == "__main__":
    main()
