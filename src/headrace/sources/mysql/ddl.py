"""What a statement of the binary log does to tables: SQL text -> effects. No I/O.

Only as much is read as capturing needs: which tables are created, altered, dropped, renamed or
emptied. What the columns are afterwards is asked from the catalogue or told by the table map.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from ...errors import DecodeError

NO_BACKSLASH_ESCAPES = 0x100000
# MariaDB writes sequences and packages with the same words, and events, users, functions … too.
_TABLES = frozenset({"TABLE", "TABLES"})
_DML = frozenset({"INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD", "CALL", "WITH", "DO"})
# What ALTER TABLE … DROP may name beside columns.
_NO_COLUMN = frozenset(
    {"CHECK", "CONSTRAINT", "FOREIGN", "INDEX", "KEY", "PARTITION", "PERIOD", "PRIMARY", "SYSTEM"}
)
_LOSING = frozenset({"TRUNCATE", "EXCHANGE", "IMPORT", "DISCARD"})  # ALTER TABLE … PARTITION


class Path(msgspec.Struct, frozen=True):
    """A table by its names."""

    schema: str
    table: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}"


class Verb(StrEnum):
    """What happens to a table."""

    CREATE = "create"
    REPLACE = "replace"  # CREATE OR REPLACE: dropped, and created
    ALTER = "alter"
    INDEX = "index"  # an index only, or the primary key
    DROP = "drop"
    RENAME = "rename"
    TRUNCATE = "truncate"


class Effect(msgspec.Struct, frozen=True):
    """What a statement does to one table."""

    verb: Verb
    path: Path
    to: Path | None = None  # of RENAME
    maybe: bool = False  # CREATE … IF NOT EXISTS: it may have been there
    loses: bool = False  # rows may have gone that no event tells of
    drops: frozenset[str] = frozenset()  # columns that go, in small letters


class Ddl(msgspec.Struct, frozen=True):
    """A statement that defines something."""

    kind: str  # CREATE_TABLE, ALTER_TABLE …
    effects: tuple[Effect, ...] = ()
    drops_schema: str = ""  # DROP DATABASE


class Dml(msgspec.Struct, frozen=True):
    """A statement that changes rows, which ROW format never has."""

    verb: str
    path: Path | None = None  # the table, where it is plain to see


Statement = Ddl | Dml


def read(sql: str, *, database: str, sql_mode: int = 0, folds: bool = False) -> Statement:
    """What a statement does; names without a database are of `database`.

    `folds`: the server keeps names in small letters, however they are written.
    """
    words = _Words(sql, database, sql_mode, folds)
    first = words.word()
    if first in _DML:
        return _dml(words, first)
    match first:
        case "CREATE":
            return _create(words)
        case "ALTER":
            return _alter(words)
        case "DROP":
            return _drop(words)
        case "RENAME":
            return _rename(words)
        case "TRUNCATE":
            words.skip("TABLE")
            return Ddl("TRUNCATE_TABLE", (Effect(Verb.TRUNCATE, words.path()),))
    return Ddl(first)


def _dml(words: _Words, verb: str) -> Statement:
    # The server writes DELETE FROM t, and nothing else, for a MEMORY table that lost its rows.
    if verb == "DELETE" and words.skip("FROM"):
        path = words.path()
        if words.ended:
            return Ddl("TRUNCATE_TABLE", (Effect(Verb.TRUNCATE, path),))
        return Dml(verb, path)
    if verb in ("INSERT", "REPLACE"):
        while words.peek() in ("LOW_PRIORITY", "DELAYED", "HIGH_PRIORITY", "IGNORE", "INTO"):
            words.next()
        return Dml(verb, words.path())
    return Dml(verb)


def _create(words: _Words) -> Ddl:
    replaces = words.skip("OR") and words.skip("REPLACE")
    temporary = words.skip("TEMPORARY")
    kind = words.word()
    while kind in ("UNIQUE", "FULLTEXT", "SPATIAL", "ONLINE", "OFFLINE"):
        kind = words.word()
    if kind == "INDEX":
        return _index(words, "CREATE_INDEX")
    if kind not in _TABLES or temporary:
        return Ddl(f"CREATE_{kind}")
    maybe = words.skip("IF") and words.skip("NOT") and words.skip("EXISTS")
    verb = Verb.REPLACE if replaces else Verb.CREATE
    return Ddl("CREATE_TABLE", (Effect(verb, words.path(), maybe=maybe),))


def _index(words: _Words, kind: str) -> Ddl:
    while (token := words.next()) is not None:
        if token.upper() == "ON" and not token.quoted:
            return Ddl(kind, (Effect(Verb.INDEX, words.path()),))
    return Ddl(kind)


def _alter(words: _Words) -> Ddl:
    kind = words.word()
    while kind in ("ONLINE", "OFFLINE", "IGNORE"):
        kind = words.word()
    if kind not in _TABLES:
        return Ddl(f"ALTER_{kind}")
    words.skip("IF") and words.skip("EXISTS")
    path = words.path()
    altered = _altered(words, path)
    effects = [msgspec.structs.replace(altered, to=None)]
    if altered.to not in (None, path):
        effects.append(Effect(Verb.RENAME, path, to=altered.to))
    return Ddl("ALTER_TABLE", tuple(effects))


def _altered(words: _Words, path: Path) -> Effect:
    """What the clauses of ALTER TABLE do; `to`: where they move the table."""
    to, loses, drops = None, False, set[str]()
    begins = True  # whether a clause begins here
    while (token := words.next()) is not None:
        word = "" if token.quoted else token.upper()
        if word == "RENAME" and begins:
            to = _renamed(words) or to
        elif begins and word in _LOSING:
            loses = loses or words.peek() in ("PARTITION", "TABLESPACE")
        elif begins and word == "DROP":
            loses = loses or words.peek() == "PARTITION"
            if words.peek() not in _NO_COLUMN:
                words.skip("COLUMN")
                words.skip("IF") and words.skip("EXISTS")
                drops.add(words.name().lower())
        begins = word == "," and words.depth == 0
    return Effect(Verb.ALTER, path, to=to, loses=loses, drops=frozenset(drops))


def _renamed(words: _Words) -> Path | None:
    if words.peek() in ("COLUMN", "INDEX", "KEY"):
        return None
    words.skip("TO") or words.skip("AS") or words.skip("=")
    return words.path()


def _drop(words: _Words) -> Ddl:
    temporary = words.skip("TEMPORARY")
    kind = words.word()
    if kind in ("DATABASE", "SCHEMA"):
        words.skip("IF") and words.skip("EXISTS")
        return Ddl("DROP_DATABASE", drops_schema=words.name())
    if kind == "INDEX":
        return _index(words, "DROP_INDEX")
    if kind not in _TABLES or temporary:
        return Ddl(f"DROP_{kind}")
    words.skip("IF") and words.skip("EXISTS")
    paths = [words.path()]
    while words.skip(","):
        paths.append(words.path())
    return Ddl("DROP_TABLE", tuple(Effect(Verb.DROP, path) for path in paths))


def _rename(words: _Words) -> Ddl:
    kind = words.word()
    if kind not in _TABLES:
        return Ddl(f"RENAME_{kind}")
    words.skip("IF") and words.skip("EXISTS")
    effects = []
    while True:
        path = words.path()
        if words.skip("WAIT"):
            words.next()
        words.skip("NOWAIT")
        words.skip("TO")
        effects.append(Effect(Verb.RENAME, path, to=words.path()))
        if not words.skip(","):
            return Ddl("RENAME_TABLE", tuple(effects))


class _Token(str):
    """A word, a name or a sign; `quoted`: it was written in quotes, so it is no keyword."""

    quoted: bool = False


# Comments that the server executes (/*!50100 … */, /*M! … */) are text like any other.
_PATTERN = r"""
    (?P<space>\s+|\#[^\n]*|--(?=\s|$)[^\n]*|/\*M?!\d*|\*/|/\*(?!M?!).*?(?:\*/|$))
  | `(?P<tick>(?:[^`]|``)*)`
  | "(?P<double>(?:[^"\\]|""|\\.)*)"
  | '(?P<single>(?:[^'\\]|''|\\.)*)'
  | (?P<word>[\w$\u0080-\uffff]+)
  | (?P<sign>.)
"""
_FLAGS = re.VERBOSE | re.DOTALL
_escaping = re.compile(_PATTERN, _FLAGS)
# In this mode a backslash is a letter like any other.
_plain = re.compile(_PATTERN.replace(r"\\", "").replace("|.)*", ")*"), _FLAGS)


class _Words:
    """The words of a statement, one after the other."""

    def __init__(self, sql: str, database: str, sql_mode: int, folds: bool) -> None:
        self._database = database.lower() if folds else database
        self._folds = folds
        self._tokens = self._read(sql, bool(sql_mode & NO_BACKSLASH_ESCAPES))
        self._ahead: list[_Token] = []
        self.depth = 0  # of brackets

    def _read(self, sql: str, plain: bool) -> Iterator[_Token]:
        for match in (_plain if plain else _escaping).finditer(sql):
            kind, text = match.lastgroup or "", match[match.lastgroup or 0]
            if kind == "space":
                continue
            if kind == "tick":
                text = text.replace("``", "`")
            elif kind == "double":
                text = text.replace('""', '"')
            token = _Token(text)
            token.quoted = kind in ("tick", "double", "single")
            yield token

    def next(self) -> _Token | None:
        """The next word; None at the end."""
        token = self._ahead.pop() if self._ahead else next(self._tokens, None)
        if token is not None and not token.quoted:
            self.depth += (token == "(") - (token == ")")
        return token

    def peek(self) -> str:
        """The next word in capitals, which is still to come; "": the end, or a name in quotes."""
        token = self._look()
        return "" if token is None or token.quoted else token.upper()

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        token = self._look()
        return token is None or (token == ";" and not token.quoted)

    def word(self) -> str:
        """The next word in capitals, taken."""
        token = self.next()
        return "" if token is None else token.upper()

    def skip(self, word: str) -> bool:
        """Pass over a word, if it is this one."""
        if self.peek() != word:
            return False
        self.next()
        return True

    def name(self) -> str:
        """The next word as a name."""
        token = self.next()
        if token is None or (not token and not token.quoted):
            raise DecodeError("a statement ends where a name is expected")
        return str(token.lower() if self._folds else token)

    def path(self) -> Path:
        """The next words as a table's name."""
        name = self.name()
        if name == ".":  # .table, of the default database
            return Path(self._database, self.name())
        if not self.skip("."):
            return Path(self._database, name)
        return Path(name, self.name())

    def _look(self) -> _Token | None:
        if not self._ahead:
            token = next(self._tokens, None)
            if token is None:
                return None
            self._ahead.append(token)
        return self._ahead[-1]
