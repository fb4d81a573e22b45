"""The triggers of a captured table: their names, and the statements that create and drop them.

Most tables record a statement's rows at once, by transition tables. Three kinds record row by row:

- partitioned tables: triggers of a row are cloned to each partition, new ones too, so no write to a
  partition is missed. Triggers of a statement would be missing there until somebody creates them.
- tables with inheritance parents or children: a statement on the parent has the children's rows in
  its transition tables, cut to the parent's columns.
- every table while logical replication applies rows, which fires no triggers of statements.

Names end with the table's oid, so that a table keeps its triggers when it is attached to another:
the server clones a partitioned table's trigger under its own name. Each function leaves a row to
the trigger of the whole table, so a table can be attached and detached without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...change.path import table_path
from .ddl import filled, quoted, quoted_table

_APPLIED = (
    "pg_catalog.current_setting('session_replication_role') OPERATOR(pg_catalog.=) 'replica'::text"
)
_FIRST = "'@guc@.first_@oid@_'::text OPERATOR(pg_catalog.||) pg_catalog.pg_trigger_depth()::text"

# Evaluated when a row is written: true for the first of a statement, and then remembered, so that
# the other rows cost little. The setting is "", "due", or the turn that the first row has taken.
_IS_FIRST = f"""CASE
        WHEN pg_catalog.current_setting({_FIRST}, true) OPERATOR(pg_catalog.<>) ''::text THEN false
        WHEN {_APPLIED} THEN true
        ELSE pg_catalog.set_config({_FIRST}, 'due', true) IS NOT NULL END"""

_ROWS = "AFTER INSERT OR UPDATE OR DELETE ON @table@ FOR EACH ROW"
_TRUNCATE = (
    "AFTER TRUNCATE ON @table@ FOR EACH STATEMENT\n    EXECUTE FUNCTION @schema@.emit_cdc_event()"
)
_COLUMNS = "BEFORE INSERT OR UPDATE OR DELETE ON @table@ FOR EACH STATEMENT"

_BY_ROW = {
    "rows": f"{_ROWS}\n    EXECUTE FUNCTION @schema@.emit_cdc_event()",
    "truncate": _TRUNCATE,
    "columns": f"{_COLUMNS}\n    EXECUTE FUNCTION @schema@.note_columns()",
}


def _of_statement(event: str, tables: str) -> str:
    return f"""AFTER {event} ON @table@ REFERENCING {tables} FOR EACH STATEMENT
    WHEN (NOT {_APPLIED})
    EXECUTE FUNCTION @schema@.emit_cdc_events()"""


_BY_STATEMENT = {
    "turn": f"{_ROWS}\n    WHEN ({_IS_FIRST})\n"
    "    EXECUTE FUNCTION @schema@.emit_cdc_event('first')",
    "insert": _of_statement("INSERT", "NEW TABLE AS new_rows"),
    "update": _of_statement("UPDATE", "OLD TABLE AS old_rows NEW TABLE AS new_rows"),
    "delete": _of_statement("DELETE", "OLD TABLE AS old_rows"),
    "truncate": _TRUNCATE,
    "columns": f"{_COLUMNS}\n    WHEN ({_APPLIED})\n    EXECUTE FUNCTION @schema@.note_columns()",
}


@dataclass(frozen=True, slots=True)
class TriggerTarget:
    """A table that has triggers of ours, or shall have them."""

    schema: str
    name: str
    oid: int
    by_row: bool  # whether its rows are recorded one by one
    present: frozenset[str] = frozenset()  # the names of the triggers that it has

    @property
    def path(self) -> str:
        """schema.table, as the config and the status write it."""
        return table_path(self.schema, self.name)

    def wanted(self, schema: str) -> frozenset[str]:
        """The names of the triggers that it shall have."""
        return _names(schema, self, _BY_ROW if self.by_row else _BY_STATEMENT)

    def is_current(self, schema: str) -> bool:
        """Whether it has exactly these."""
        return self.present == self.wanted(schema)

    def is_complete(self, schema: str) -> bool:
        """Whether no change of it is missed: triggers for each row never miss one."""
        earlier = frozenset(f"!{schema}_{part}" for part in _BY_ROW)  # the same for all tables
        sets = [_names(schema, self, _BY_ROW), earlier]
        if not self.by_row:
            sets.append(_names(schema, self, _BY_STATEMENT))
        return any(names <= self.present for names in sets)


def _names(schema: str, table: TriggerTarget, parts: dict[str, str]) -> frozenset[str]:
    # Triggers of a row fire in the order of their names: ours before those that change it again,
    # and before those that the server makes for foreign keys.
    return frozenset(f"!{schema}_{part}_{table.oid}" for part in parts)


def create(schema: str, table: TriggerTarget) -> str:
    """The statements that make a table write its changes, in place of triggers it has had.

    ALWAYS: also for rows that replication or a restore writes here.
    """
    statements = [_dropped(table, name) for name in sorted(table.present - table.wanted(schema))]
    for part, what in (_BY_ROW if table.by_row else _BY_STATEMENT).items():
        name = quoted(f"!{schema}_{part}_{table.oid}")
        statements.append(f"CREATE OR REPLACE TRIGGER {name}\n    {what};")
        statements.append(f"ALTER TABLE @table@ ENABLE ALWAYS TRIGGER {name};")
    text = filled("\n".join(statements), schema).replace("@oid@", str(table.oid))
    return text.replace("@table@", quoted_table((table.schema, table.name)))


def drop(table: TriggerTarget) -> str:
    """The statements that drop every trigger of ours that a table has."""
    return "\n".join(_dropped(table, name) for name in sorted(table.present))


def _dropped(table: TriggerTarget, name: str) -> str:
    where = quoted_table((table.schema, table.name))
    return f"DROP TRIGGER IF EXISTS {quoted(name)} ON {where};"
