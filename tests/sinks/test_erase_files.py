"""Lines of the files sink that are one row's are removed, whatever the format says of them."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headrace.change.erasure import KeyValues
from headrace.change.event import Column, Op, Table
from headrace.formats.catalogue import Formats
from headrace.log.erasure import find, versions_of
from headrace.operate.erase import erased_row, key_of
from headrace.sinks.erasing import ErasedPlace, ErasedRow
from headrace.sinks.files.ledger import FilesEntry, FileSettings, FilesLedger
from headrace.sinks.files.sink import Files
from headrace.sinks.lake.erasure import ChangeEraser
from headrace.transforms.rules import TableTransform, Transforms
from tests.sinks.lake import Shop, put, remove

USERS = (Column("id", "bigint", key=True), Column("email", "text"))
EMAIL = "zebra@example.com"


class Drawer(Shop):
    """A log, and a file of its events in a format."""

    def __init__(self, folder: Path, format: str) -> None:
        super().__init__(folder)
        self.sink = Files(name="lines", path=str(folder / "out"), format=format)
        users = self.table("users", USERS)
        self.commit(put(users, id=41, email="other@example.com"), put(users, id=42, email=EMAIL))
        self.commit(put(users, Op.UPDATE, id=42, email=f"new-{EMAIL}"), remove(users, id=42))
        encode = Formats().of_log(self.log.epoch).named(format).encode  # type: ignore[union-attr]
        self.lines: list[bytes] = [encode(change) or b"" for change in self.log.read(0)]
        self.file = folder / "out" / "day=2026-11-14" / f"log0001-{1:019}-{4:019}.jsonl.gz"
        self.file.parent.mkdir(parents=True)
        self.file.write_bytes(gzip.compress(b"".join(line + b"\n" for line in self.lines)))

    def erased(self) -> ErasedPlace:
        versions = versions_of(self.log, "users")
        history = find(self.log, versions, key_of(versions[-1], "42"))
        row = erased_row(self.log, history, frozenset({EMAIL}))
        [place] = self.sink.erase(row)
        return place


@pytest.mark.parametrize("format", ["savegress", "changefeed", "debezium", "canonical"])
def test_lines_of_the_row_are_removed(tmp_path: Path, format: str) -> None:
    drawer = Drawer(tmp_path, format)
    done = drawer.erased()
    assert done.rewritten == 2
    # The DELETE has no value of the row, so whoever reads the files still learns of it.
    left = gzip.decompress(drawer.file.read_bytes()).splitlines()
    assert left == [drawer.lines[0], drawer.lines[3]]
    assert drawer.erased().rewritten == 0
    drawer.log.close()


def test_a_file_that_the_log_does_not_know_is_left(tmp_path: Path) -> None:
    drawer = Drawer(tmp_path, "savegress")
    (tmp_path / "out-until-20260101T000000").mkdir()
    left = drawer.erased().left
    assert "2 events that are older than the log" in left[0]  # nothing says which log it is of
    assert "what the sink had before a reset" in left[1]
    drawer.log.close()


@pytest.mark.parametrize(("format", "unknown"), [("debezium", 4), ("savegress", 0)])
def test_computed_lines_that_do_not_name_their_change_are_left(
    tmp_path: Path, format: str, unknown: int
) -> None:
    drawer = Drawer(tmp_path, format)
    written = b"".join(line.replace(b"zebra", b"ZEBRA") + b"\n" for line in drawer.lines)
    drawer.file.write_bytes(gzip.compress(written))
    rule = TableTransform(sql="SELECT _sequence, id, upper(email) AS email FROM changes")
    drawer.sink = replace(drawer.sink, transforms={"public.users": rule})
    settings = FileSettings("jsonl", format, "")
    epoch = drawer.log.epoch
    ledger = FilesLedger(drawer.sink.path)
    ledger.commit(FilesEntry(writer="query-1", settings=settings, epoch=epoch, logs={epoch: 4}))
    left = [each for each in drawer.erased().left if "cannot tell whose" in each]
    message = (
        f"{unknown} events that Spark has computed and that have no id, so it cannot tell whose"
    )
    assert [message in each for each in left] == [True] * bool(unknown)
    drawer.log.close()


def test_a_change_is_found_by_its_sequence_however_its_key_is_written(tmp_path: Path) -> None:
    drawer = Drawer(tmp_path, "savegress")
    versions = versions_of(drawer.log, "users")
    history = find(drawer.log, versions, KeyValues({"id": "42"}))
    row = erased_row(drawer.log, history, frozenset())
    after = ['{"id":"code-41","email":"x"}', f'{{"id":"code-42","email":"{EMAIL}"}}']
    rows = pa.table(
        {
            "sequence": [1, 2],
            "epoch": [drawer.log.epoch] * 2,
            "source": ["shop"] * 2,
            "schema": ["public"] * 2,
            "table": ["users"] * 2,
            "key": ['{"id":"code-41"}', '{"id":"code-42"}'],
            "before_kind": ["none"] * 2,
            "before": pa.nulls(2, pa.string()),
            "after": after,
        }
    )
    eraser = ChangeEraser(row, KeyValues({"id": "42"}))
    found = eraser.find(rows, np.zeros(2, dtype=np.bool_))
    assert found.tolist() == [False, True]
    erased = eraser.erased(rows, found)["after"].to_pylist()
    assert erased == [after[0], '{"id":"code-42","email":null}']
    drawer.log.close()


def test_changes_that_could_not_be_decoded_are_left(tmp_path: Path) -> None:
    drawer = Drawer(tmp_path, "savegress")
    versions = versions_of(drawer.log, "users")
    row = erased_row(drawer.log, find(drawer.log, versions, KeyValues({"id": "42"})), frozenset())
    names = ("op", "source", "schema", "table", "after")
    kept = [
        ("MESSAGE", "shop", "public", "users", '{"operation":"INSERT","binlog":"emVicmE="}'),
        ("MESSAGE", "shop", "public", "users", '{"operation":"INSERT"}'),
        ("MESSAGE", "shop", "public", "orders", '{"operation":"INSERT","binlog":"emVicmE="}'),
        ("INSERT", "shop", "public", "users", '{"id":41,"email":"x"}'),
    ]
    rows = pa.Table.from_pylist([dict(zip(names, each, strict=True)) for each in kept])
    dead = np.zeros(len(kept), dtype=np.bool_)
    left = ChangeEraser(row, KeyValues({"id": "42"})).left(rows, dead)
    assert left == "1 rows of the table that could not be decoded"
    drawer.log.close()


def test_the_key_of_a_computed_row_is_the_one_that_spark_writes() -> None:
    columns = (Column("at", "datetime", key=True), Column("price", "decimal(6,2)", key=True))
    table = Table("shop", "mysql", "", "shop", "shop", "bids", columns)
    key = b'{"at":"2024-01-01 00:00:00","price":"1.50"}'
    row = ErasedRow(table=table, key=key, kept=0, known=True, epochs={}, first=1)
    computed = Transforms({"shop.bids": TableTransform(sql="SELECT * FROM changes")})
    assert row.key_in(computed).texts == {"at": "2024-01-01T00:00:00Z", "price": "1.50"}
    assert row.key_in(Transforms()).texts == {"at": "2024-01-01 00:00:00", "price": "1.50"}
