"""Real pgoutput messages, recorded from a live server, and who describes their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.change.event import Column, Table
from headrace.change.lsn import parse_lsn
from headrace.sources.postgres.looks import LookState, Numbering, TableLook, as_relation
from headrace.sources.postgres.pgoutput import WalRelation
from headrace.sources.postgres.rows import Rows
from headrace.sources.postgres.values import SESSION_SETTINGS, TYPES_SQL, PgType, encoder, pg_types
from headrace.testing import PostgresDatabase

WORKLOAD = """
    INSERT INTO things VALUES (1, 'one', '{1,2}', '{"a": 1}', 1.50), (2, NULL, NULL, NULL, NULL);
    UPDATE things SET name = 'uno' WHERE id = 1;
    UPDATE things SET id = 3 WHERE id = 2;
    INSERT INTO full_things VALUES (1, repeat('x', 300), true);
    UPDATE full_things SET flag = false;
    DELETE FROM full_things;
    SELECT pg_logical_emit_message(true, 'headrace', '{"user": "ann"}');
    SELECT pg_logical_emit_message(true, 'other', 'hello');
    SELECT pg_logical_emit_message(false, 'other', '\\xff00'::bytea);
    ALTER TABLE things ADD COLUMN extra bytea;
    INSERT INTO things VALUES (4, 'four', NULL, '[]', 'NaN', '\\x00ff');
    DELETE FROM things WHERE id = 4;
    TRUNCATE things, full_things CASCADE;
"""


@dataclass(frozen=True)
class Recorded:
    """What a server sent, and the types that it knew."""

    messages: list[tuple[int, bytes]]  # LSN, data
    types: dict[int, PgType]


def record(database: PostgresDatabase) -> Recorded:
    """Every kind of message that a server sends for the changes above."""
    database.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    database.execute(
        "CREATE TABLE things"
        " (id int PRIMARY KEY, name text, numbers int[], doc jsonb, price numeric);"
        "CREATE TABLE full_things (id int PRIMARY KEY, note text, flag bool);"
        "ALTER TABLE full_things REPLICA IDENTITY FULL;"
        "CREATE PUBLICATION recorded FOR TABLE things, full_things"
    )
    slot = f"recorded_{database.name}"
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    for statement in WORKLOAD.strip().split(";\n"):
        database.execute(statement)
    with database.connect() as connection:
        for name, value in SESSION_SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        types = pg_types(connection.execute(TYPES_SQL))
        rows = connection.execute(
            "SELECT lsn::text, data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'recorded', 'messages', 'true')",
            (slot,),
        )
        return Recorded([(parse_lsn(lsn), bytes(data)) for lsn, data in rows], types)


class Describing:
    """Describes relations from their messages alone, with the types of a server."""

    def __init__(self, types: Mapping[int, PgType]) -> None:
        self._types = types

    def describe_relation(
        self, relation: WalRelation, *, announced_by: int = 0, known: LookState | None = None
    ) -> tuple[Rows, Numbering]:
        """The decoder for rows that follow it."""
        columns = tuple(
            Column(column.name, "", column.identity, column.type_id, column.modifier)
            for column in relation.columns
        )
        table = Table(
            "shop", "postgres", "origin", "db", relation.schema, relation.name, columns,
            relation.identity, relation.id,
        )  # fmt: skip
        return decoder(table, self._types), Numbering([0] * len(columns), True)

    def describe_look(self, look: TableLook, *, announced_by: int) -> Rows:
        """The decoder for rows that follow a look."""
        return self.describe_relation(as_relation(look))[0]

    def narrowed(self, look: TableLook) -> TableLook:
        """Everything is published."""
        return look

    def gone_leaves(self, leaves: Mapping[int, int]) -> set[int]:
        """All are there."""
        return set()

    def forget_types(self) -> None:
        """They are always the same."""

    def sourceless(self) -> Table:
        """The table of changes that belong to no table."""
        return Table("shop", "postgres", "origin", "db", "", "")


def decoder(table: Table, types: Mapping[int, PgType]) -> Rows:
    """The rows of a table."""
    return Rows(table, [encoder(column.type_id, types) for column in table.columns])


def text_tuple(values: Sequence[bytes | None]) -> bytes:
    """Column values as pgoutput writes a tuple."""
    columns = [
        b"n" if value is None else b"t" + len(value).to_bytes(4, "big") + value for value in values
    ]
    return len(values).to_bytes(2, "big") + b"".join(columns)
