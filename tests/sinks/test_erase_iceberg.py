"""A row's values are erased from an Iceberg history, and its exactly-once marks stay."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from headrace.change.event import Change, Column, Op
from headrace.config import load
from headrace.log import Log
from headrace.operate.erase import EraseRequest, Erasure, erase
from headrace.sinks import Progress
from headrace.sinks.erasing import ErasedPlace
from headrace.sinks.iceberg.table import IcebergTable
from headrace.testing.iceberg import IcebergServer
from tests.sinks.icebergs import Glacier
from tests.sinks.lake import SOURCE, put, remove

MARKER = "zebra-marker-47114"
SYNC = 16  # bytes between two blocks of an Avro file
USERS = (Column("id", "bigint", key=True), Column("email", "text"), Column("city", "text"))
ERASED = {"id": 42, "email": None, "city": None}


class Erasable(Glacier):
    """A log and an Iceberg history of users, of which a row is to be erased."""

    def __init__(self, folder: Path, server: IcebergServer) -> None:
        super().__init__(folder, server)
        self.users = self.other("users", USERS)
        self.config = folder / "headrace.yaml"
        audit = {"type": "iceberg_history", "uri": server.uri, "namespace": self.namespace}
        content = {
            "data_dir": str(folder),
            "sources": {SOURCE: {"type": "sqlite", "path": "shop.db"}},
            "server": {"port": 9},
            "pipeline": {"sinks": {"audit": audit}},
        }
        self.config.write_text(yaml.safe_dump(content))

    def user(self, number: int, email: str, op: Op = Op.INSERT) -> Change:
        return put(self.users, op, email=email, id=number, city="Germany")

    def flow(self, *changes: Change) -> None:
        """A transaction that the history has."""
        self.commit(*changes)
        self.write()

    def erased(self, *, keep_last: bool = False) -> tuple[Erasure, ErasedPlace]:
        """Erase the row 42, with nothing else running; what was done, and in the history."""
        self.log.close()
        request = EraseRequest(table="public.users", key="42", keep_last=keep_last)
        done = erase(load(self.config), request)
        self.log = Log.open(self.folder / "log")
        [own] = [each for each in done.places if each.place == "sink audit: public.users"]
        return done, own

    def images(self) -> list[dict[str, Any]]:
        """The rows of the history: sequence, images and typed columns."""
        return [
            {name: row[name] for name in ("sequence", "op", "before", "after", "row")}
            for row in self.rows("public_users")
        ]


@pytest.fixture
def glacier(tmp_path: Path, iceberg_server: IcebergServer) -> Iterator[Erasable]:
    made = Erasable(tmp_path, iceberg_server)
    yield made
    made.log.close()


def content_of(path: Path) -> bytes:
    """What a file has, without compression."""
    content = path.read_bytes()
    if path.suffix == ".parquet":
        return content + repr(pq.read_table(path, partitioning=None).to_pylist()).encode()
    if path.suffix != ".avro":
        return content
    found = [content]
    for block in content.split(content[-SYNC:])[1:-1]:
        for size in range(1, 20):  # of two numbers before each block
            unpacked = zlib.decompressobj(-15)
            try:
                found.append(unpacked.decompress(block[size:]))
            except zlib.error:
                continue
    return b"".join(found)


def places_with(folder: Path, text: str = MARKER[:6]) -> list[str]:
    """Files below a folder that have the beginning of a value: bounds have no more of a row."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [str(path.relative_to(folder)) for path in files if text.encode() in content_of(path)]


def test_a_deleted_row_leaves_nothing_but_its_key(glacier: Erasable) -> None:
    glacier.flow(*(glacier.user(n, f"{n}@example.com") for n in range(40, 44)))
    glacier.flow(glacier.user(42, f"{MARKER}@a", Op.UPDATE), glacier.user(50, "x@example.com"))
    glacier.flow(remove(glacier.users, id=42))
    warehouse = glacier.server.warehouse / glacier.namespace
    others = [each for each in glacier.images() if '"id":42' not in str(each["after"])]
    assert {Path(each).suffix for each in places_with(warehouse)} == {".avro", ".parquet"}
    done, own = glacier.erased()
    assert done.complete
    assert own.left == ()
    assert own.rewritten == 2
    assert places_with(warehouse) == []
    assert places_with(glacier.folder) == []
    assert glacier.snapshots("public_users") == 1
    found = glacier.images()
    assert [each["sequence"] for each in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [each for each in found if each in others] == others
    of_row = [each for each in found if each not in others]
    assert [json.loads(each["after"]) for each in of_row] == [ERASED, ERASED]
    assert [each["row"] for each in of_row] == [ERASED, ERASED]

    # The sink goes on where it was, and a batch that comes again adds nothing.
    glacier.open()
    assert glacier.writer.progress() == Progress(glacier.log.epoch, 7)
    glacier.flow(glacier.user(51, "later@example.com"))
    glacier.writer.write(glacier.changes(0, 8), 0)
    assert glacier.sequences("public_users") == [1, 2, 3, 4, 5, 6, 7, 8]
    again, own = glacier.erased()
    assert (again.complete, own.rewritten, own.has_row) == (True, 0, True)


def test_the_last_values_of_a_row_that_is_there_stay(glacier: Erasable) -> None:
    glacier.flow(glacier.user(42, f"{MARKER}@a"))
    glacier.flow(glacier.user(42, "anonymous@invalid", Op.UPDATE))
    done, own = glacier.erased(keep_last=True)
    assert (done.complete, own.rewritten) == (True, 1)
    assert [each["row"]["email"] for each in glacier.images()] == [None, "anonymous@invalid"]
    assert places_with(glacier.server.warehouse / glacier.namespace) == []


def test_a_commit_of_another_in_between_is_kept(
    glacier: Erasable, monkeypatch: pytest.MonkeyPatch
) -> None:
    glacier.flow(glacier.user(42, f"{MARKER}@a"))
    glacier.flow(remove(glacier.users, id=42))
    swap, first = IcebergTable._swap, [True]

    def late(self: IcebergTable, *arguments: Any) -> None:
        if first:
            first.pop()
            other = glacier.iceberg("public_users")
            other.append(other.scan().to_arrow())
        swap(self, *arguments)

    monkeypatch.setattr(IcebergTable, "_swap", late)
    done, own = glacier.erased()
    assert (done.complete, own.left) == (True, ())
    assert glacier.sequences("public_users") == [1, 1, 2, 2]
    assert places_with(glacier.server.warehouse / glacier.namespace) == []


def test_what_still_has_the_values_is_named(glacier: Erasable) -> None:
    glacier.flow(glacier.user(42, f"{MARKER}@a"))
    table = glacier.iceberg("public_users")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    table.manage_snapshots().create_tag(snapshot.snapshot_id, "audit-2026").commit()
    [file] = glacier.files()
    file.with_name("killed.parquet").write_bytes(file.read_bytes())
    glacier.flow(remove(glacier.users, id=42))
    done, own = glacier.erased()
    assert not done.complete
    assert "the tag audit-2026 keeps an earlier snapshot; remove it" in str(own.left)
    assert "killed.parquet: an equal value, in a file of no snapshot; delete it" in str(own.left)
    glacier.iceberg("public_users").manage_snapshots().remove_tag("audit-2026").commit()
    file.with_name("killed.parquet").unlink()
    done, own = glacier.erased()
    assert (done.complete, own.left) == (True, ())
    assert places_with(glacier.server.warehouse / glacier.namespace) == []
