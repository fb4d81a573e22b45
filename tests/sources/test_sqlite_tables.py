"""The tables sink keeps Delta tables equal to a SQLite database."""

from pathlib import Path

import apsw
from pyspark.sql import SparkSession

from headrace.sources.sqlite import alter, install
from tests.deltas import stored
from tests.sinks.lake import Lake
from tests.sources.litedb import captured


def test_delta_tables_equal_the_database(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(20_000)  # Headrace writes too
    connection.execute(
        "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, n REAL, b BLOB, at DATETIME)"
    )
    connection.execute("INSERT INTO users VALUES (1, 'ann', 0.1, x'00', '2024-02-29')")
    install(str(path), ["*"])
    with captured(path, tmp_path) as feed:
        connection.execute("INSERT INTO users VALUES (9007199254740993, NULL, 2, NULL, 7)")
        connection.execute("REPLACE INTO users VALUES (1, 'bob', -1e300, x'ff', 1.5)")
        alter(str(path), "ALTER TABLE users ADD COLUMN note TEXT")
        connection.execute("INSERT INTO users (id, note) VALUES (3, 'n')")
        connection.execute("UPDATE users SET id = 4 WHERE id = 3")
        feed.catch_up()
    connection.close()
    lake = Lake(spark, tmp_path)
    lake.write()
    lake.log.close()
    table = stored(lake.path / "main" / "users")
    names = ["id", "name", "n", "b", "at", "note"]
    assert sorted(table.select(names).to_pylist(), key=lambda row: int(row["id"])) == [
        dict(zip(names, (1, "bob", -1e300, b"\xff", "1.5", None), strict=True)),
        dict(zip(names, (4, None, None, None, None, "n"), strict=True)),
        dict(zip(names, (9007199254740993, None, 2.0, None, "7", None), strict=True)),
    ]
