"""Consumers of canonical and etl that keep tables, as docs/formats.md tells their reader to."""

import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from headrace.change.event import Change
from headrace.formats.canonical import Canonical
from headrace.formats.etl import Etl

Row = dict[str, Any]
Names = tuple[str, str]
Columns = list[dict[str, Any]]


class ConsumedTable:
    """The rows of one table, by the columns that a consumer was told of."""

    def __init__(self) -> None:
        self.name: Names = ("", "")
        self.columns: Columns = []
        self.foreign_keys: list[dict[str, Any]] = []
        self.rows: list[Row] = []

    def follow(self, columns: Columns) -> None:
        """Carry rows over to other columns: by number, else by name."""
        before, self.columns = self.columns, columns
        numbers = {each["number"]: each["name"] for each in before if "number" in each}
        unnumbered = {each["name"] for each in before if "number" not in each}
        names = {each["name"] for each in before}

        def value(row: Row, column: dict[str, Any]) -> Any:
            if column.get("number") in numbers:
                return row.get(numbers[column["number"]])
            if column["name"] in unnumbered or ("number" not in column and column["name"] in names):
                return row.get(column["name"])
            return column.get("initial_default")

        if before:
            self.rows = [{each["name"]: value(row, each) for each in columns} for row in self.rows]

    def put(self, row: Row) -> None:
        """A row that is new, or copied."""
        self.rows.append(row)

    def take(self, old: Row) -> Row:
        """The row that was so, or had this key; it is gone."""
        for at, row in enumerate(self.rows):
            if all(row.get(name) == value for name, value in old.items()):
                return self.rows.pop(at)
        return {}

    def key_of(self, row: Row) -> Row:
        """What identifies a row: its key, or all of it."""
        keys = [each["name"] for each in self.columns if each["key"]]
        return {name: row[name] for name in keys} if keys else row


def cascade(tables: Iterable[ConsumedTable], parent: Names, old: Row, new: Row | None) -> None:
    """Do to rows what the database has done by itself, when one went (`new`: None) or changed."""
    action = "on_delete" if new is None else "on_update"
    for table in tables:
        for key in table.foreign_keys:
            named = [old.get(each) for each in key["parent_columns"]]
            given = [new.get(each) for each in key["parent_columns"]] if new else named
            same = new is not None and given == named
            if (
                (key["schema"], key["table"]) != parent
                or action not in key
                or None in named
                or same
            ):
                continue
            for row in [each for each in table.rows if [each[n] for n in key["columns"]] == named]:
                if not any(row is each for each in table.rows):
                    continue  # it followed from another
                table.rows[:] = [each for each in table.rows if each is not row]
                sets_null = key[action] == "set null"
                values = [None] * len(given) if sets_null else given
                becomes = {**row, **dict(zip(key["columns"], values, strict=True))}
                if sets_null or new is not None:
                    table.rows.append(becomes)
                    cascade(tables, table.name, row, becomes)
                else:
                    cascade(tables, table.name, row, None)


def consumed_canonical(changes: Iterable[Change]) -> dict[tuple[str, str], ConsumedTable]:
    """The tables of who reads `canonical`."""
    tables: dict[tuple[str, str], ConsumedTable] = {}
    for change in changes:
        event = _read(Canonical().encode(change))
        name = (event["schema"], event["table"])
        table = tables.setdefault(name, ConsumedTable())
        table.name = name
        match event["op"]:
            case "SCHEMA" if event["after"].get("dropped"):
                tables[name] = ConsumedTable()
            case "SCHEMA":
                table.follow(event["after"]["columns"])
                table.foreign_keys = event["after"].get("foreign_keys", [])
            case "TRUNCATE":
                table.rows.clear()
            case "INSERT" | "READ":
                table.put(event["after"])
            case "DELETE":
                old = table.take(event["before"] or event["key"])
                cascade(tables.values(), name, old, None)
            case "UPDATE":
                old = table.take(event["before"] or event["key"])
                kept = {each: old.get(each) for each in event["unchanged"]}
                new = {**kept, **event["after"]}
                table.put(new)
                cascade(tables.values(), name, old, new)
    return {name: table for name, table in tables.items() if name[1]}


def consumed_etl(changes: Iterable[Change]) -> dict[tuple[str, str], ConsumedTable]:
    """The tables of who reads `etl`."""
    tables: dict[int, ConsumedTable] = {}
    stream = Etl().open()
    for change in changes:
        for event in map(_read, stream.encode(change, wanted=True)):
            match event["type"]:
                case "Relation":
                    schema = event["table_schema"]
                    # Behind the others: of two that have had a name, the newer one has it.
                    table = tables.pop(schema["id"], None) or ConsumedTable()
                    tables[schema["id"]] = table
                    table.name = (schema["schema"], schema["name"])
                    table.follow(schema["columns"])
                    table.foreign_keys = schema.get("foreign_keys", [])
                case "Truncate":
                    for number in event["rel_ids"]:
                        tables[number].rows.clear()
                case "Insert":
                    tables[event["table_id"]].put(event["table_row"])
                case "Delete":
                    table = tables[event["table_id"]]
                    gone = table.take(event["old_table_row"]["row"])
                    cascade(tables.values(), table.name, gone, None)
                case "Update":
                    table, row = tables[event["table_id"]], event["table_row"]
                    sent = event["old_table_row"]
                    old = table.take(sent["row"] if sent else table.key_of(row))
                    new = {**{n: old.get(n) for n in event.get("unchanged", ())}, **row}
                    table.put(new)
                    cascade(tables.values(), table.name, old, new)
    return {table.name: table for table in tables.values()}


def _read(line: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line, parse_float=Decimal)
    return found
