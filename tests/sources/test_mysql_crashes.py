"""A MariaDB that dies while it writes a transaction: the file keeps the beginning of it."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.change.event import Op
from headrace.retry import Backoff
from headrace.testing.mysql import MysqlServer
from tests.mysqls import mysql_of
from tests.sources.mycapturing import captured


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position moves at once, also by what is not captured."""
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.sources.mysql.stream._WAIT_SECONDS", 0.05)
    monkeypatch.setattr("headrace.capture.BACKOFF", Backoff(0.5, 0.5, 0.25))


@pytest.fixture
def server() -> Iterator[MysqlServer]:
    """A MariaDB whose events can be written by hand."""
    with mysql_of("mariadb", {"binlog_checksum": "NONE"}) as server:
        yield server


def events(data: bytes) -> Iterator[bytes]:
    """The events of a piece of a file."""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at + 9)
        yield data[at : at + size]
        at += size


def begin_again(path: Path, begin: int, end: int, *, cut: str) -> None:
    """Write the transaction at a place once more, and not to its end."""
    data = path.read_bytes()
    found = list(events(data[begin:end]))
    for event in found[:-1]:
        data += event[:13] + struct.pack("<I", len(data) + len(event)) + event[17:]
    if cut == "within an event":
        data += found[-1][:-5]
    path.write_bytes(data)


@pytest.mark.parametrize("cut", ["within an event", "between events"])
def test_a_transaction_that_was_cut_off_is_passed_over(
    server: MysqlServer, tmp_path: Path, cut: str
) -> None:
    with server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path) as feed:
            feed.capture.stop()
            file, begin = server.end
            database.execute("INSERT INTO users VALUES (2)")
            server.kill()
            begin_again(server.data / file, begin, (server.data / file).stat().st_size, cut=cut)
            server.start()
            database.execute("INSERT INTO users VALUES (3)")
            feed.start()
            assert [row["id"] for row in feed.rows("users")] == [2, 3]
            assert len(feed.streamed(Op.INSERT)) == 2


def test_one_of_which_a_part_is_stored_halts(
    server: MysqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.mysql.stream._PIECE", 1)
    monkeypatch.setattr("headrace.sources.mysql.dump._RECEIVE", 64)
    with server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path) as feed:
            feed.capture.stop()
            file, begin = server.end
            database.execute("INSERT INTO users VALUES (2), (3), (4)")
            server.kill()
            size = (server.data / file).stat().st_size
            begin_again(server.data / file, begin, size, cut="within an event")
            server.start()
            feed.start()
            assert "of which a part is stored" in feed.until_halted().error
            assert "headrace snapshot" in feed.status.hint
            feed.capture.copy_again([])
            feed.until_streaming()
            assert [row["id"] for row in feed.rows("users", surprises=True)] == [2, 3, 4]
