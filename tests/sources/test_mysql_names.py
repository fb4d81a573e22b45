"""Databases and tables whose names have dots, and how a resume keeps many tables."""

from pathlib import Path

import msgspec
import pytest

from headrace.change.event import Change, Op
from headrace.change.replay import Replay, TableName
from headrace.secret import Secret
from headrace.sources.mysql import Mysql
from headrace.sources.mysql import resume as resumes
from headrace.sources.mysql.columns import DeclaredColumn
from headrace.sources.mysql.path import Path as TablePath
from headrace.sources.mysql.resume import Copy, Declared, Encoder, Restart, Resume, decode, packed
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
        assert list(feed.resume.copies) == [("my.db", "t")]


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


def of_tables(count: int) -> Resume:
    """A resume of many tables."""
    paths = [TablePath("shop", f"table_{number}") for number in range(count)]
    columns = tuple(DeclaredColumn(f"c{at}", "varchar(100)", "utf8mb4") for at in range(10))
    return Resume(
        server="mysql:1",
        origin="mysql:1",
        file="mysql-bin.000001",
        position=4,
        born=1,
        gtids="0-1-3",
        copies={path: Copy(begun=True, done=True, rows=7) for path in paths},
        errored={paths[0]: "why"},
        versions=dict.fromkeys(paths, 1),
        catalogue=packed(dict.fromkeys(paths, Declared(columns, ("c0",)))),
        former=(TablePath("my.db", "t"),),
        told_later={paths[1]: [{"ddl_type": "ALTER_TABLE"}]},
        prepared={"61..1": ("mysql-bin.000001", 4)},
        moved=True,
    )


def test_a_resume_is_read_as_it_was_written() -> None:
    resume = of_tables(3)
    assert decode(resume.encode()) == resume
    restart = Restart(resume.former)
    assert decode(restart.encode()) == restart


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
    encoder = Encoder()
    for position in range(10):
        resume = msgspec.structs.replace(resume, position=position)
        assert len(encoder.encode(resume)) < 250_000
    assert len(packs) == 1
    resume = resume.with_error(TablePath("shop", "table_2"), "why")
    assert decode(encoder.encode(resume)) == resume
    assert len(packs) == 2
