"""Tables that a write to themselves may write to once more before its own AFTER triggers run.

Foreign keys do so whose actions come back to the table, and triggers of the application that run
BEFORE the row is written. Triggers that run AFTER it do not: Headrace's come before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import apsw

from .connections import rows

_KEYS = """
    SELECT s.name, k."table", k.on_update, k.on_delete
    FROM main.sqlite_schema AS s, pragma_foreign_key_list(s.name, 'main') AS k
    WHERE s.type = 'table'"""
_TRIGGERS = """
    SELECT tbl_name, sql FROM main.sqlite_schema
    WHERE type = 'trigger' AND name NOT GLOB 'headrace_[0-9]*_*'"""
_ACTIONS = ("CASCADE", "SET NULL", "SET DEFAULT")

_token = re.compile(
    r"""--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]|\w+""", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class WriteBacks:
    """Tables by their names in lower case."""

    nested: frozenset[str]  # that are written to between their BEFORE and AFTER triggers
    rewritten: frozenset[str]  # of these, those where ON UPDATE may change the updated row itself


def written_back(connection: apsw.Connection) -> WriteBacks:
    """What the foreign keys and triggers of a database lead to."""
    always: dict[str, set[str]] = {}  # table -> what writing to it writes to
    within: dict[str, set[str]] = {}  # the same, of what comes before its AFTER triggers
    updated: dict[str, set[str]] = {}  # the same, by ON UPDATE alone
    for child, parent, on_update, on_delete in rows(connection, _KEYS):
        if on_update in _ACTIONS or on_delete in _ACTIONS:
            always.setdefault(parent.lower(), set()).add(child.lower())
            within.setdefault(parent.lower(), set()).add(child.lower())
        if on_update in _ACTIONS:
            updated.setdefault(parent.lower(), set()).add(child.lower())
    for table, sql in rows(connection, _TRIGGERS):
        runs_before, targets = trigger_writes(sql)
        always.setdefault(table.lower(), set()).update(targets)
        if runs_before:
            within.setdefault(table.lower(), set()).update(targets)
    return WriteBacks(_returning(within, always), _returning(updated, always))


def _returning(first: dict[str, set[str]], always: dict[str, set[str]]) -> frozenset[str]:
    """The tables that their own first writes lead back to."""
    return frozenset(table for table, targets in first.items() if table in _led(targets, always))


def _led(targets: Iterable[str], always: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    open_ = list(targets)
    while open_:
        table = open_.pop()
        if table not in found:
            found.add(table)
            open_ += always.get(table, ())
    return found


def trigger_writes(sql: str) -> tuple[bool, set[str]]:
    """Whether a trigger runs before a row is inserted or updated; the tables it writes to."""
    tokens = [token for token in _token.findall(sql) if not token.startswith(("--", "/*", "'"))]
    words = [token.lower() for token in tokens]
    begin = words.index("begin") if "begin" in words else len(words)
    head = words[:begin]
    runs_before = "after" not in head and "delete" not in head
    targets = set()
    for at in range(begin, len(words) - 1):
        if words[at] == "into" or words[at - 1 : at + 1] == ["delete", "from"]:
            targets.add(_unquoted(tokens[at + 1]))
        elif words[at] == "update":
            behind = at + (3 if words[at + 1] == "or" else 1)
            targets.update(_unquoted(token) for token in tokens[behind : behind + 1])
    return runs_before, targets


def _unquoted(name: str) -> str:
    quote = name[0]
    if quote == "[":
        name = name[1:-1]
    elif quote in '"`':
        name = name[1:-1].replace(quote * 2, quote)
    return name.lower()
