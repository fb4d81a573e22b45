"""Databases and tables whose names have dots, and how a resume keeps many tables."""

import base64
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.event import Change, Op, Reference
from headrace.change.replay import Replay, TableName
from headrace.secret import Secret
from headrace.sources.mysql import Mysql
from headrace.sources.mysql import resume as resumes
from headrace.sources.mysql.decode.columns import DeclaredColumn
from headrace.sources.mysql.decode.path import TablePath
from headrace.sources.mysql.resume import (
    DeclaredTable,
    MysqlRestart,
    MysqlResume,
    MysqlTableSnapshot,
    ResumeEncoder,
    decode,
    packed,
)
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.sources.mycapturing import captured, image

_DROPPED = "dropped"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position moves at once, also by what is not captured."""
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.sources.mysql.stream._WAIT_SECONDS", 0.05)


def rows(changes: list[Change], schema: str, name: str) -> list[int]:
    """The keys of a table, as the log adds up."""
    found = Replay.of(changes).rows(TableName("shop", schema, name))
    return sorted(row["id"] for row in found)


def test_a_database_is_not_taken_for_another_whose_name_goes_on_after_a_dot(
    own_my: MysqlServer, tmp_path: Path
) -> None:
    own_my.execute("CREATE DATABASE my; CREATE DATABASE `my.db`")
    own_my.execute(
        "CREATE TABLE my.`db.t` (id int PRIMARY KEY); INSERT INTO my.`db.t` VALUES (1);"
        "CREATE TABLE `my.db`.t (id int PRIMARY KEY); INSERT INTO `my.db`.t VALUES (2)"
    )
    database = MysqlDatabase(own_my, "my")
    with captured(database, tmp_path, tables=("*.*",)) as feed:
        own_my.execute("INSERT INTO my.`db.t` VALUES (3); INSERT INTO `my.db`.t VALUES (4)")
        found = feed.changes()
        assert rows(found, "my", "db.t") == [1, 3]
        assert rows(found, "my.db", "t") == [2, 4]
        copied = {each.transaction.id for each in found if each.op is Op.READ}
        assert len(copied) == 2
        feed.restart()
        feed.until_streaming()
        own_my.execute("DROP DATABASE my; INSERT INTO `my.db`.t VALUES (5)")
        found = feed.changes()
        dropped = [each for each in found if each.op is Op.SCHEMA and _DROPPED in image(each.after)]
        assert [(each.table.schema, each.table.name) for each in dropped] == [("my", "db.t")]
        assert rows(found, "my.db", "t") == [2, 4, 5]
        assert list(feed.resume.snapshots) == [("my.db", "t")]


@pytest.mark.parametrize(
    ("globs", "wanted"),
    [
        (("*",), {("my", "t"), ("my", "db.t")}),
        (("my.*",), {("my", "t"), ("my", "db.t")}),
        (("my.db.t",), {("my", "db.t"), ("my.db", "t")}),
        (("my.db.*",), {("my", "db.t"), ("my.db", "t")}),
        (("*.t",), {("my", "t"), ("my.db", "t")}),
        (("t",), {("my", "t")}),
    ],
)
def test_a_bare_name_and_a_database_mean_no_other_database(
    globs: tuple[str, ...], wanted: set[tuple[str, str]]
) -> None:
    source = Mysql(name="shop", url=Secret("mysql://h/my"), tables=globs)
    there = [("my", "t"), ("my", "db.t"), ("my.db", "t")]
    assert {each for each in there if source.wants(*each)} == wanted


def of_tables(count: int) -> MysqlResume:
    """A resume of many tables."""
    paths = [TablePath("shop", f"table_{number}") for number in range(count)]
    columns = tuple(DeclaredColumn(f"c{at}", "varchar(100)", "utf8mb4") for at in range(10))
    return MysqlResume(
        server="mysql:1",
        origin="mysql:1",
        file="mysql-bin.000001",
        position=4,
        born=1,
        gtids="0-1-3",
        snapshots={path: MysqlTableSnapshot(begun=True, done=True, rows=7) for path in paths},
        errored={paths[0]: "why"},
        versions=dict.fromkeys(paths, 1),
        catalogue=packed(dict.fromkeys(paths, DeclaredTable(columns, ("c0",)))),
        former=(TablePath("my.db", "t"),),
        pending_ddl={paths[1]: [{"ddl_type": "ALTER_TABLE"}]},
        prepared={"61..1": ("mysql-bin.000001", 4)},
        moved=True,
    )


def test_a_resume_is_read_as_it_was_written() -> None:
    resume = of_tables(3)
    assert decode(resume.encode()) == resume
    restart = MysqlRestart(resume.former)
    assert decode(restart.encode()) == restart


# Bytes that a log on disk may have: written by the first release of this format.
_STORED = base64.b64decode(
    "m6ZyZXN1bWXZKm15c3FsOjNlMTFmYTQ3LTcxY2EtMTFlMS05ZTMzLWM4MGFhOTQyOTU2Mq5teXNxbDo2YjZlMWEy"
    "Y7BteXNxbC1iaW4uMDAwMDA3zwAAAAEAAACbzmVT8QDZKDNlMTFmYTQ3LTcxY2EtMTFlMS05ZTMzLWM4MGFhOTQy"
    "OTU2MjoxLTXEgXgBm9o0aUlxRn7BsvyilNSi4qmHD/NwHZq0NLdSLyVpcaJe0tRDhxj+H25EElmWl6+QnVrZiKKP"
    "eSKEuyQ9Py8VVWpi04qUlJz4ksqC1NWOPiGuQfEhjk4+rqtBgsn5ubmJeSk3FcASCmAJBYhLFBxdXBTy8ktSFUpS"
    "K0oAAbFHQsSWeAE1zjEOgjAUxvE4eQ1H3TRx8Dam0KfF0FfS95rgSMIF6OJqTKGb8QxwMbGG/ff/8jU+kDLVYKwE"
    "Sw/fBhQaXoUMfK/gUyBvD/vdxiEVVwQZcyUsAT/DjQyOfx3QMCQfGGpeTHR8OensmOjUzZtdG3NTOo3UpWagXIEW"
    "6UHPIiuh/03RuxIWkM8LntPRr+vV9AU3T0+Fgak2MTYyLjYzLjGSsG15c3FsLWJpbi4wMDAwMDbNASzD"
)
_STORED_RESTART = base64.b64decode("kqdyZXN0YXJ0kpKkc2hvcKZvcmRlcnOSpW15LmRio2EuYg==")


def test_a_resume_on_disk_stays_readable_and_what_is_written_only_has_more() -> None:
    orders, dotted = TablePath("shop", "orders"), TablePath("my.db", "a.b")
    columns = (
        DeclaredColumn("id", "int(10) unsigned"),
        DeclaredColumn("note", "text", "utf8mb4", True),
    )
    reference = Reference(("note",), "shop", "notes", ("id",))
    declared = DeclaredTable(columns, ("id",), (reference,), False, (7, 120), 1, True)
    resume = MysqlResume(
        "mysql:3e11fa47-71ca-11e1-9e33-c80aa9429562",
        "mysql:6b6e1a2c",
        "mysql-bin.000007",
        (1 << 32) + 155,
        1_700_000_000,
        "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5",
        {orders: MysqlTableSnapshot(True, True, 12, 10), dotted: MysqlTableSnapshot(replaces=True)},
        {dotted: "no key"},
        {orders: 3},
        packed({orders: declared}),
        (TablePath("shop", "gone"),),
        {orders: [{"ddl_type": "ALTER_TABLE", "ddl_command": "ALTER TABLE orders ADD note text"}]},
        {"6162.63.1": ("mysql-bin.000006", 300)},
        True,
    )
    found = decode(_STORED)
    assert isinstance(found, MysqlResume)
    assert found == msgspec.structs.replace(resume, catalogue=found.catalogue)
    assert found.declared() == {orders: declared}
    assert without_ranges(resume.encode()) == without_ranges(_STORED)
    assert decode(_STORED_RESTART) == MysqlRestart((orders, dotted))
    assert MysqlRestart((orders, dotted)).encode() == _STORED_RESTART


def without_ranges(stored: bytes) -> list[Any]:
    """The fields of a stored resume, without those that came later."""
    fields: list[Any] = msgspec.msgpack.decode(stored)
    catalogue = msgspec.msgpack.decode(zlib.decompress(fields[8]), strict=False)
    fields[8] = {
        path: [[{"charset": "", "json": False} | each for each in columns], *rest[:6]]
        for path, (columns, *rest) in catalogue.items()
    }
    snapshots, *tables = msgspec.msgpack.decode(zlib.decompress(fields[7]))
    fields[7] = [{path: progress[:5] for path, progress in snapshots.items()}, *tables]
    return fields


def test_tables_that_stay_as_they_are_are_not_packed_with_every_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packs: list[object] = []
    compressed = resumes._compressed

    def counted(value: object) -> bytes:
        packs.append(value)
        return compressed(value)

    monkeypatch.setattr(resumes, "_compressed", counted)
    resume = of_tables(5000)
    del packs[:]
    encoder = ResumeEncoder()
    for position in range(10):
        resume = msgspec.structs.replace(resume, position=position)
        assert len(encoder.encode(resume)) < 250_000
    assert len(packs) == 1
    resume = resume.with_error(TablePath("shop", "table_2"), "why")
    assert decode(encoder.encode(resume)) == resume
    assert len(packs) == 2
