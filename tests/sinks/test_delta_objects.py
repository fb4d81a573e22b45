"""The small files of a table, in a folder and in a bucket alike."""

import errno
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyroaring import BitMap

from headrace.sinks.lake.delta import Delta, Marks
from headrace.sinks.lake.storage import Folder
from tests.sinks.deltas import SCHEMA, WRITER, expect_one_creator
from tests.sinks.s3 import bucket


@pytest.fixture(params=["folder", "bucket"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Folder]:
    if request.param == "folder":
        yield Folder.of(str(tmp_path), {})
        return
    with bucket() as found:
        yield found


def test_files_are_read_listed_and_deleted(folder: Folder) -> None:
    objects = folder.objects
    assert objects.read("a/b") is None
    assert list(objects.entries("a")) == []
    for name in ("a/1", "a/2", "a/3", "b"):
        objects.write(name, f"content of {name}".encode())
    objects.write("b", b"another")
    assert objects.read("b") == b"another"
    assert objects.read("a/1", 3, 4) == b"tent"
    assert sorted(each.path for each in objects.entries("a", "a/1")) == ["a/2", "a/3"]
    found = list(objects.entries(""))
    assert sorted(each.path for each in found) == ["a/1", "a/2", "a/3", "b"]
    assert all(abs(each.modified - datetime.now(UTC)) < timedelta(minutes=5) for each in found)
    objects.delete(["a/1", "a/2"])
    objects.delete(["a/1"])
    objects.delete([])
    assert sorted(each.path for each in objects.entries("")) == ["a/3", "b"]


def test_one_of_many_creates_a_file(folder: Folder) -> None:
    expect_one_creator(folder.objects)
    assert [each.path for each in folder.objects.entries("")] == ["_delta_log/1"]


def test_a_table_lives_in_a_bucket() -> None:
    with bucket() as folder:
        assert Delta.open(folder, WRITER) is None
        delta = Delta.create(folder, SCHEMA, {}, writer=WRITER, vectors=True)
        rows = pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]}, schema=SCHEMA)
        file = folder.write(rows, "part", {})
        delta.commit([file], [], marks=Marks(batch_id=0, epoch="e", sequence=3))
        dead = {file.path: BitMap([1]).serialize()}
        delta.commit([], [], dead=dead, marks=Marks(batch_id=1, epoch="e", sequence=4))
        delta.checkpoint()
        again = Delta.open(folder, WRITER)
        assert again
        assert again._state == delta._state
        assert list(again.dead(file.path)) == [1]
        table = DeltaTable(folder.uri, storage_options=dict(folder.options))
        found = QueryBuilder().register("t", table).execute("select id from t order by id")
        assert pa.table(found.read_all())["id"].to_pylist() == [1, 3]
        dead = {file.path: BitMap([0, 2]).serialize()}
        again.commit([], [], dead=dead, marks=Marks(batch_id=2, epoch="e", sequence=5))
        assert [again.vacuum(0), again.vacuum(0)] == [0, 2]  # the data file and its vector
        assert [e.path for e in folder.objects.entries("") if e.path.endswith(".bin")] == []


@pytest.mark.parametrize("options", [{}, {"timeout": "30s"}])
def test_a_storage_may_be_described_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    with bucket() as folder:
        for name, value in folder.options.items():
            monkeypatch.setenv(name, value)
        described = Folder.of(folder.uri, options)
        described.objects.write("a", b"1")
        assert folder.objects.read("a") == b"1"


def test_a_file_system_without_links_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(OSError, match="no hard links"):
        Folder.of(str(tmp_path), {}).objects.create("a", b"")
    assert list(tmp_path.iterdir()) == []
