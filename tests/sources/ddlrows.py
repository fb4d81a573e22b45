"""Every table of a database beside what a log replays to, whatever DDL was run meanwhile."""

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
from psycopg import sql

from headrace.change.path import table_path
from headrace.change.replay import Replay, Row
from headrace.sources.postgres.catalog import matches
from headrace.testing import PostgresDatabase

_text = msgspec.json.Encoder(order="deterministic").encode

# The columns that are captured: none that is generated before 18, and then only stored ones.
_COLUMNS = """
    SELECT n.nspname, c.relname, array_agg(a.attname::text ORDER BY a.attnum)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
      AND (a.attgenerated = '' OR a.attgenerated = 's'
           AND current_setting('server_version_num')::int >= 180000)
    WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
      AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'headrace')
    GROUP BY 1, 2"""


def tables_of(database: PostgresDatabase, globs: Sequence[str]) -> dict[str, list[Row]]:
    """The rows of every captured table, as to_jsonb writes them."""
    found: dict[str, list[Row]] = {}
    with database.connect(autocommit=False) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        for schema, table, columns in connection.execute(_COLUMNS).fetchall():
            path = table_path(schema, table)
            if not matches(path, globs):
                continue
            names = [name for name in columns if name is not None]
            shown = sql.SQL(", ").join(
                sql.SQL("to_jsonb({})::text").format(sql.Identifier(name)) for name in names
            )
            kind = connection.execute(
                "SELECT relkind::text FROM pg_class WHERE oid = %s::regclass",
                (sql.Identifier(schema, table).as_string(connection),),
            ).fetchall()[0][0]
            only = sql.SQL("" if kind == "p" else "ONLY ")
            query = sql.SQL("SELECT {} FROM {}{}").format(
                shown, only, sql.Identifier(schema, table)
            )
            found[path] = [
                {
                    name: None if text is None else _decimals(text)
                    for name, text in zip(names, row, strict=True)
                }
                for row in connection.execute(query)
            ]
    return found


_decimals = msgspec.json.Decoder(float_hook=Decimal).decode


def differences(
    replay: Replay, database: PostgresDatabase, globs: Sequence[str] = ("*.*",)
) -> dict[str, str]:
    """The tables that differ, and how."""
    there = tables_of(database, globs)
    replayed = {str(name): replay.rows(name) for name in replay.tables}
    found: dict[str, str] = {}
    for path in sorted(there.keys() | replayed.keys()):
        wanted = Counter(map(_canonical, there.get(path, [])))
        got = Counter(map(_canonical, replayed.get(path, [])))
        if wanted != got:
            missing, surplus = wanted - got, got - wanted
            found[path] = (
                f"{missing.total()} of {wanted.total()} missing: {next(iter(missing), b'')!r}, "
                f"{surplus.total()} surplus: {next(iter(surplus), b'')!r}"
            )
    return found


def _canonical(row: Row) -> bytes:
    return _text({name: _plain(value) for name, value in row.items()})


def _plain(value: Any) -> Any:
    """Numbers as the log writes exact ones, and times without their zone."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    return value.removesuffix("Z") if isinstance(value, str) else value
