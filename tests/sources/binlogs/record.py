"""Writes the files of this folder: runs statements on a server and keeps its binlog.

    python -m tests.sources.binlogs.record NAME SOCKET DATA

NAME is the folder to write to, SOCKET the server's, DATA the folder in which its binlog stands.
Beside each binlog stands what SELECT shows at its end, with the columns as the catalogue has them.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pymysql

from headrace.sources.mysql.decode.columns import DeclaredColumn
from headrace.sources.mysql.decode.values import select_expression

HERE = Path(__file__).parent
SCHEMA = "recorded"


class RecordedTable(msgspec.Struct, frozen=True):
    """A table at the end of a binlog."""

    declared: tuple[DeclaredColumn, ...]
    key: tuple[str, ...]
    rows: list[list[bytes | None]]  # as the text protocol gave them


class Scenario(msgspec.Struct, frozen=True):
    """Statements that become one file."""

    name: str
    statements: tuple[str, ...]
    settings: dict[str, str] = {}  # global ones while they run
    servers: tuple[str, ...] = ("mariadb", "mysql80", "mysql97")


TYPES = """CREATE TABLE types (
    id int PRIMARY KEY, ti tinyint, tu tinyint unsigned, b1 tinyint(1), si smallint,
    su smallint unsigned, mi mediumint, mu mediumint unsigned, iu int unsigned, bi bigint,
    bu bigint unsigned, z int(8) unsigned zerofill, f float, d double, fd float(7,2),
    dd double(12,3), dec1 decimal(12,2), dec2 decimal(65,30), dec3 decimal(5,5), dec4 decimal(9),
    dec5 decimal(20,1), decz decimal(8,2) zerofill, y year, bt bit(1), bt2 bit(17), bt3 bit(64),
    c char(10), vc varchar(50), vl varchar(300), l1 varchar(20) character set latin1,
    uc varchar(20) character set ucs2, sj char(20) character set sjis, bin binary(8),
    vb varbinary(20), tb tinyblob, bl blob, mb mediumblob, lb longblob, tt tinytext,
    tx text character set latin1, mt mediumtext, lt longtext,
    e enum('a','b''c','é','d\\\\e') character set latin1, s set('x','y','z ü'),
    da date, t0 time, t1 time(1), t3 time(3), t6 time(6), dt datetime, dt2 datetime(2),
    dt3 datetime(3), dt6 datetime(6), ts timestamp null, ts1 timestamp(1) null,
    ts4 timestamp(4) null, ts6 timestamp(6) null, g geometry, p point
) CHARACTER SET utf8mb4"""

FIRST = r"""INSERT INTO types VALUES (1,
    -128, 255, 1, -32768, 65535, -8388608, 16777215, 4294967295, -9223372036854775808,
    18446744073709551615, 42, 1.1, 1.1, 12.5, 12.345, -1234567890.12,
    -12345678901234567890123456789012345.123456789012345678901234567890, -0.12345, 999999999,
    -1234567890123456789.5, 12.5, 2024, b'1', b'10000000000000001', 0xFFFFFFFFFFFFFFFF,
    'ab  ', 'é"\n\\%b', 'x', 'é€Ÿ', '日本', '日本語', 'ab', 'ab\0', 0x00FF, 0x01, 0x02, 0x03,
    't', 'é', 'm', 'l', 2, 5, '2024-02-29', '-838:59:59', '-00:00:01.1', '-01:02:03.456',
    '-00:00:00.000001', '2024-02-29 23:59:59', '2024-02-29 23:59:59.12',
    '2024-02-29 23:59:59.123', '2024-02-29 23:59:59.123456', '2024-02-29 23:59:59',
    '2024-02-29 23:59:59.1', '2024-02-29 23:59:59.1234', '2024-02-29 23:59:59.000001',
    ST_GeomFromText('LINESTRING(0 0,1 1)'), Point(1, 2))"""
ZEROS = (
    "INSERT INTO types VALUES (2"
    + ", 0" * 22
    + ", b'0', b'0', b'0'"
    + ", ''" * 18
    + """, '0000-00-00', '00:00:00', '00:00:00', '00:00:00', '00:00:00', '0000-00-00',
    '2000-00-01', '2000-01-00', '0000-00-00', '0000-00-00', '0000-00-00', '1970-01-01 00:00:01',
    '1970-01-01 00:00:01.5', NULL, NULL)"""
)
NULLS = "INSERT INTO types VALUES (3" + ", NULL" * 58 + ")"
LARGEST = """INSERT INTO types VALUES (4,
    127, 1, 2, 32767, 1, 8388607, 1, 1, 9223372036854775807, 1, 99999999,
    3.4028234e38, 1.7976931348623157e308, -99999.99, -1, 99.99,
    0.000000000000000000000000000001, 0.99999, -1, 0.1, 0, 1901, b'0', b'1', b'1', 'a', '日本語🎉',
    REPEAT('y', 300), 'plain', 'ab', 'ab', '', '', '', '', '', '', '', REPEAT('é', 300), '', '',
    'é', '', '9999-12-31', '838:59:59', '838:59:58.9', '23:59:59.999', '838:59:58.999999',
    '9999-12-31 23:59:59', '1000-01-01 00:00:00.99', '0001-01-01', '9999-12-31 23:59:59.999999',
    '2038-01-19 03:14:07', '1970-01-01 00:00:01', '2001-09-09 01:46:40.0001',
    '2001-09-09 01:46:40.999999', ST_GeomFromText('POLYGON((0 0,1 0,1 1,0 0))'), Point(-1, -2))"""

DOCUMENTS = (
    'null', 'true', '-1', '65535', '65536', '-32769', '4294967296', '18446744073709551615',
    '-9223372036854775808', '1.5', '1e100', '1e-7', '0.1', '1.0', '-0.0', '1e15', '1e16', '5e-324',
    '1.7976931348623157e308', '1e-15', '1e-16', '1234567890123456.5', '"a"', '[]', '{}',
    r'"\\u0000\\u001f\\u007f\\u20ac\\"\\\\/\\b\\f\\n\\r\\t"', '"😀"', '[1,[2,[3,{}]]]',
    '{"b":1,"a":{"x":[1,2,3],"y":"z"},"":0}', '{"é":"ü","a b":[true,false,null]}',
)  # fmt: skip
VALUES_IN_DOCUMENTS = (
    "CAST('12.50' AS decimal(10,2))", "CAST('-0.005' AS decimal(10,5))",
    "CAST('2024-01-02' AS date)", "CAST('2024-01-02 03:04:05.123456' AS datetime(6))",
    "CAST('-12:34:56.5' AS time(1))", "CAST('abc' AS binary)", "1e0", "CAST(1 AS unsigned)",
)  # fmt: skip

CHARSETS = (
    "ascii", "armscii8", "big5", "cp1250", "cp1251", "cp1256", "cp1257", "cp850", "cp852", "cp866",
    "cp932", "dec8", "eucjpms", "euckr", "gb2312", "gbk", "geostd8", "greek", "hebrew", "hp8",
    "keybcs2", "koi8r", "koi8u", "latin1", "latin2", "latin5", "latin7", "macce", "macroman",
    "sjis", "swe7", "tis620", "ucs2", "ujis", "utf16", "utf16le", "utf32", "utf8mb3", "utf8mb4",
)  # fmt: skip
SENTENCE = "Aé ж Ω 日本 한 ก ს Ա 中 ü[~]'\\\\"

SHOP = (
    "CREATE TABLE shop (id int PRIMARY KEY, name varchar(20), paid tinyint(1), note text,"
    " picture blob, n int unsigned NOT NULL DEFAULT 7) CHARACTER SET utf8mb4",
    "INSERT INTO shop VALUES (1, 'a', 1, 'note', 'pic', 4000000000), (2, NULL, 0, NULL, NULL, 2)",
    "INSERT INTO shop (id, name) VALUES (3, 'c'), (4, 'd')",
    "UPDATE shop SET name = 'b' WHERE id = 1",
    "UPDATE shop SET note = 'new', paid = NULL WHERE id <= 2",
    "UPDATE shop SET picture = 0x00FF, n = n + 1 WHERE id IN (2, 3)",
    "UPDATE shop SET id = 40 WHERE id = 4",
    "DELETE FROM shop WHERE id = 3",
)

OLDER = ("mariadb", "mysql80")

SCENARIOS = (
    Scenario("types", (TYPES, FIRST, ZEROS, NULLS, LARGEST)),
    Scenario(
        "types-sparse",
        (TYPES, f"{FIRST}, {LARGEST.partition('VALUES')[2]}", ZEROS, NULLS),  # two rows at once
        {"binlog_row_metadata": "MINIMAL"},
        ("mysql80",),
    ),
    Scenario(
        "types-bare",
        (TYPES, FIRST, ZEROS, NULLS, LARGEST),
        {"binlog_row_metadata": "NO_LOG"},
        ("mariadb",),
    ),
    Scenario(
        "documents",
        (
            "CREATE TABLE documents (id int PRIMARY KEY, j json)",
            *(f"INSERT INTO documents VALUES ({n}, '{d}')" for n, d in enumerate(DOCUMENTS)),
            *(
                f"INSERT INTO documents VALUES ({100 + n}, JSON_OBJECT('v', {value}))"
                for n, value in enumerate(VALUES_IN_DOCUMENTS)
            ),
        ),
    ),
    Scenario(
        "charsets",
        (
            "CREATE TABLE charsets (id int PRIMARY KEY, "
            + ", ".join(f"c_{name} varchar(40) CHARACTER SET {name}" for name in CHARSETS)
            + ")",
            # What a character set does not have becomes a question mark.
            f"INSERT INTO charsets VALUES (1{f', {SENTENCE!r}' * len(CHARSETS)})",
        ),
        servers=OLDER,
    ),
    Scenario("full", SHOP, servers=OLDER),
    Scenario("minimal", SHOP, {"binlog_row_image": "MINIMAL"}),
    Scenario("noblob", SHOP, {"binlog_row_image": "NOBLOB"}, OLDER),
    Scenario("unchecked", SHOP, {"binlog_checksum": "NONE"}, OLDER),
    Scenario(
        "compressed",
        SHOP,
        {"log_bin_compress": "ON", "log_bin_compress_min_len": "10"},
        ("mariadb",),
    ),
    Scenario(
        "payload", SHOP, {"binlog_transaction_compression": "ON"}, ("mysql80", "mysql97")
    ),
    Scenario(
        "xa",
        (
            "CREATE TABLE branches (id int PRIMARY KEY)",
            "XA START 'one', 'b', 3",
            "INSERT INTO branches VALUES (1)",
            "XA END 'one', 'b', 3",
            "XA PREPARE 'one', 'b', 3",
            "XA COMMIT 'one', 'b', 3",
            "XA START 'two'",
            "INSERT INTO branches VALUES (2)",
            "XA END 'two'",
            "XA COMMIT 'two' ONE PHASE",
        ),
        servers=OLDER,
    ),
    Scenario(
        "statements",
        (
            "CREATE TABLE `säb` (id int PRIMARY KEY, hidden int INVISIBLE DEFAULT 5)",
            "INSERT INTO `säb` (id) VALUES (1)",
            "ALTER TABLE `säb` ADD COLUMN more int FIRST",
            "INSERT INTO `säb` (id, hidden) VALUES (2, 6)",
            "TRUNCATE TABLE `säb`",
            "INSERT INTO `säb` (id) VALUES (3)",
        ),
        servers=OLDER,
    ),
    Scenario(
        "odd",
        (
            "CREATE TABLE odd (id int PRIMARY KEY, u uuid, i6 inet6, i4 inet4,"
            " vc varchar(100) COMPRESSED, bc text COMPRESSED, vb varbinary(50) COMPRESSED,"
            " twice int GENERATED ALWAYS AS (id * 2) STORED, thrice int AS (id * 3) VIRTUAL)",
            "INSERT INTO odd (id, u, i6, i4, vc, bc, vb) VALUES "
            "(1, '123e4567-e89b-12d3-a456-426655440000', '::1', '1.2.3.4', 'short',"
            " REPEAT('a', 300), 'x'),"
            "(2, '018f4567-e89b-7000-8456-426655440000', '2001:db8::', '0.0.0.0',"
            " REPEAT('z', 100), 'b', REPEAT('q', 50)),"
            "(3, '00000000-0000-0000-0000-000000000000', '::', '255.255.255.0', '', NULL, ''),"
            "(4, 'ffffffff-ffff-ffff-ffff-ffffffffffff', '::ffff:1.2.3.4', NULL, NULL, '', NULL),"
            "(5, NULL, '1:0:2:0:3:0:4:0', NULL, 'é', 'é', 'a'),"
            "(6, NULL, '::1.2.3.4', NULL, '', '', ''), (7, NULL, '1:2:3::', NULL, '', '', '')",
        ),
        servers=("mariadb",),
    ),
    Scenario(
        "tagged",
        (
            "CREATE TABLE tagged (id int PRIMARY KEY)",
            "SET gtid_next = 'AUTOMATIC:nightly'",
            "INSERT INTO tagged VALUES (1)",
            "SET gtid_next = 'AUTOMATIC'",
            "INSERT INTO tagged VALUES (2)",
        ),
        servers=("mysql97",),
    ),
    Scenario(
        "vector",
        (
            "CREATE TABLE vectors (id int PRIMARY KEY, v vector(3))",
            "INSERT INTO vectors VALUES (1, TO_VECTOR('[1,2,3]'))",
        ),
        servers=("mysql97",),
    ),
)  # fmt: skip


def record(server: str, socket: str, data: Path) -> None:
    """Write every scenario of a server."""
    folder = HERE / server
    folder.mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        if server in scenario.servers:
            _record(scenario, socket, data, folder)


def _record(scenario: Scenario, socket: str, data: Path, folder: Path) -> None:
    before = _set(socket, {"binlog_row_metadata": "FULL"} | scenario.settings)
    connection = _connect(socket)
    cursor = connection.cursor()
    cursor.execute(f"DROP DATABASE IF EXISTS {SCHEMA}")
    cursor.execute(f"CREATE DATABASE {SCHEMA}")
    cursor.execute(f"USE {SCHEMA}")
    cursor.execute("FLUSH BINARY LOGS")
    (file, *_), *_ = reversed(_rows(cursor, "SHOW BINARY LOGS"))
    for statement in scenario.statements:
        cursor.execute(statement)
    tables = [row[0].decode() for row in _rows(cursor, "SHOW TABLES")]
    shown = {table: _recorded(cursor, table) for table in tables}
    cursor.execute("FLUSH BINARY LOGS")
    connection.close()
    _set(socket, before)
    (folder / f"{scenario.name}.binlog").write_bytes((data / file.decode()).read_bytes())
    (folder / f"{scenario.name}.json").write_bytes(msgspec.json.encode(shown) + b"\n")


def _connect(socket: str) -> "pymysql.Connection[Any]":
    connection = pymysql.connect(
        unix_socket=socket, user="root", charset="utf8mb4", autocommit=True, conv={},
        use_unicode=False,
    )  # fmt: skip
    connection.cursor().execute("SET time_zone = '+00:00', sql_mode = 'ALLOW_INVALID_DATES'")
    return connection


def _set(socket: str, settings: dict[str, str]) -> dict[str, str]:
    """Global settings; returns what they were."""
    connection = _connect(socket)
    cursor = connection.cursor()
    before = {}
    for name, value in settings.items():
        ((was,),) = _rows(cursor, f"SELECT @@GLOBAL.{name}")
        before[name] = was.decode()
        cursor.execute(f"SET GLOBAL {name} = {value if value.isdigit() else repr(value)}")
    connection.close()
    return before


def _rows(cursor: Any, sql: str) -> list[tuple[bytes, ...]]:
    cursor.execute(sql)
    return list(cursor.fetchall())


def _recorded(cursor: Any, table: str) -> RecordedTable:
    where = f"TABLE_SCHEMA = '{SCHEMA}' AND TABLE_NAME = '{table}'"
    documents = set()
    if _rows(cursor, "SELECT VERSION() LIKE '%MariaDB%'") == [(b"1",)]:
        checks = _rows(
            cursor,
            "SELECT CONSTRAINT_NAME FROM information_schema.CHECK_CONSTRAINTS WHERE"
            f" CONSTRAINT_SCHEMA = '{SCHEMA}' AND CHECK_CLAUSE LIKE 'json_valid%'",
        )
        documents = {name for (name,) in checks}
    declared = tuple(
        DeclaredColumn(name.decode(), kind.decode(), charset.decode(), name in documents)
        for name, kind, charset in _rows(
            cursor,
            "SELECT COLUMN_NAME, COLUMN_TYPE, COALESCE(CHARACTER_SET_NAME, '') FROM"
            f" information_schema.COLUMNS WHERE {where} ORDER BY ORDINAL_POSITION",
        )
    )
    key = _rows(
        cursor,
        "SELECT COLUMN_NAME FROM information_schema.STATISTICS WHERE"
        f" {where} AND INDEX_NAME = 'PRIMARY' ORDER BY SEQ_IN_INDEX",
    )
    shown = ", ".join(select_expression(column, f"`{column.name}`") for column in declared)
    rows: list[list[bytes | None]] = [
        [*row] for row in _rows(cursor, f"SELECT {shown} FROM `{table}` ORDER BY 1")
    ]
    return RecordedTable(declared, tuple(name.decode() for (name,) in key), rows)


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
