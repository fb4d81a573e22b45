"""A small Delta table as a sink writes it, and its rows as others read them."""

import threading
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyroaring import BitMap

from headrace.sinks.lake.delta import Delta, Marks
from headrace.sinks.lake.objects import Objects
from headrace.sinks.lake.storage import Added, Folder

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
WRITER = "query-1"


class Written:
    """A table of the numbers from 0, a hundred in each file."""

    def __init__(self, path: Path, *, files: int = 2, vectors: bool = True) -> None:
        self.path = path
        self.folder = Folder.of(str(path), {})
        self.delta = Delta.create(self.folder, SCHEMA, {}, writer=WRITER, vectors=vectors)
        self.batches = 0
        self.added = [self.file(range(at * 100, at * 100 + 100)) for at in range(files)]
        self.commit(self.added)

    def file(self, numbers: Iterable[int]) -> Added:
        """A file that nobody knows of."""
        rows = {"id": list(numbers)}
        rows["name"] = [f"n{number}" for number in rows["id"]]  # type: ignore[misc]
        return self.folder.write(pa.table(rows, schema=SCHEMA), "part", {})

    def marks(self) -> Marks:
        """Of the next batch."""
        self.batches += 1
        return Marks(batch_id=self.batches, epoch="e", sequence=self.batches * 10)

    def commit(self, added: Iterable[Added] = (), dead: dict[str, list[int]] | None = None) -> None:
        """A batch that adds files and kills rows of others."""
        positions = {path: BitMap(rows).serialize() for path, rows in (dead or {}).items()}
        self.delta.commit(list(added), [], dead=positions, marks=self.marks())

    def kill(self, at: int, *positions: int) -> None:
        """A batch that kills rows of a file."""
        self.commit(dead={self.added[at].path: list(positions)})

    def open(self) -> Delta:
        """The table as a process that starts sees it."""
        found = Delta.open(self.folder, WRITER)
        assert found
        self.delta = found
        return found

    def ids(self) -> list[int]:
        """The rows as delta-rs reads them."""
        return ids(self.path)

    @property
    def log(self) -> list[str]:
        """The files of the log."""
        return sorted(file.name for file in (self.path / "_delta_log").iterdir())


def ids(path: Path) -> list[int]:
    """The numbers in a table as delta-rs reads it."""
    return sorted(pa.table(query(path, "select id from t"))["id"].to_pylist())


def query(path: Path, sql: str) -> pa.Table:
    """What delta-rs answers."""
    found = QueryBuilder().register("t", DeltaTable(str(path))).execute(sql)
    return pa.table(found.read_all())


def without(count: int, *gone: int) -> list[int]:
    """The numbers up to a count but some."""
    return [number for number in range(count) if number not in gone]


def expect_one_creator(objects: Objects) -> None:
    """Expect that of several that create one object at once, one does, with its content."""
    won, ready = list[int](), threading.Barrier(8)

    def create(number: int) -> None:
        ready.wait()
        if objects.create("_delta_log/1", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = won
    assert objects.read("_delta_log/1") == b"%d" % winner
