"""What a statement of the binary log does to tables: SQL text -> effects.

Only as much is read as capturing needs: which tables are created, altered, dropped, renamed or
emptied. The columns afterwards come from the catalogue or the table map.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from ....errors import ProtocolError
from .alterations import Alteration, AlterationReader, acts, relates
from .path import TablePath
from .words import SqlToken, SqlWords

# MariaDB writes sequences and packages with the same words, and events, users, functions … too.
_TABLES = frozenset({"TABLE", "TABLES"})
# What changes no rows of a table. A SELECT may, by a function that it calls, so may all the rest.
_HARMLESS = (
    *("ANALYZE", "CACHE", "CHANGE", "CHECK", "CHECKSUM", "FLUSH", "GRANT", "INSTALL", "KILL"),
    *("LOCK", "OPTIMIZE", "PURGE", "RELEASE", "REPAIR", "RESET", "REVOKE", "SAVEPOINT", "SET"),
    *("START", "STOP", "UNINSTALL", "UNLOCK", "USE", "XA"),
)
# What stands before the KEY of an index that is not primary.
_KEYS = frozenset({"(", ",", "UNIQUE", "FOREIGN", "FULLTEXT", "SPATIAL"})
_LOSING = frozenset({"DROP", "TRUNCATE", "EXCHANGE", "CONVERT"})  # ALTER TABLE … PARTITION
_UNDERLYING = frozenset({"IMPORT", "DISCARD"})  # ALTER TABLE … TABLESPACE, or PARTITION


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
    path: TablePath
    to: TablePath | None = None  # of RENAME
    maybe: bool = False  # CREATE … IF NOT EXISTS: it may have been there
    loses: bool = False  # rows may have come or gone without an event
    alteration: Alteration = Alteration()  # of CREATE only what its foreign keys do
    keyless: bool = False  # of CREATE: it surely has no primary key


class DdlStatement(msgspec.Struct, frozen=True):
    """A statement that defines something."""

    kind: str  # CREATE_TABLE, ALTER_TABLE …
    effects: tuple[Effect, ...] = ()
    drops_schema: str = ""  # DROP DATABASE


class DmlStatement(msgspec.Struct, frozen=True):
    """A statement that changes rows, which ROW format never has."""

    verb: str
    path: TablePath | None = None  # the table, where it is plain to see


Statement = DdlStatement | DmlStatement


def read(sql: str, *, database: str, sql_mode: int = 0, folds: bool = False) -> Statement:
    """What a statement does; names without a database are of `database`.

    `folds`: the server keeps names in small letters, however they are written.
    """
    words = SqlWords(sql, database, sql_mode, folds)
    first = words.word()
    if first == "SET" and words.skip("STATEMENT"):  # SET STATEMENT lock_wait_timeout = 5 FOR …
        words.pass_over("FOR")
        first = words.word()
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
            return DdlStatement("TRUNCATE_TABLE", (Effect(Verb.TRUNCATE, words.path()),))
    return DdlStatement(first) if not first or first in _HARMLESS else _dml(words, first)


def _dml(words: SqlWords, verb: str) -> Statement:
    # The server writes DELETE FROM t, and nothing else, for a MEMORY table that lost its rows.
    if verb == "DELETE" and words.skip("FROM"):
        path = words.path()
        if words.ended:
            return DdlStatement("TRUNCATE_TABLE", (Effect(Verb.TRUNCATE, path),))
        return DmlStatement(verb, path)
    if verb in ("INSERT", "REPLACE"):
        while words.peek() in ("LOW_PRIORITY", "DELAYED", "HIGH_PRIORITY", "IGNORE", "INTO"):
            words.next()
        return DmlStatement(verb, words.path())
    if verb == "UPDATE":
        words.skip("LOW_PRIORITY")
        words.skip("IGNORE")
        path = words.path()
        return DmlStatement(verb, path if words.peek() == "SET" else None)
    return DmlStatement(verb)


def _create(words: SqlWords) -> DdlStatement:
    replaces = words.skip("OR") and words.skip("REPLACE")
    temporary = words.skip("TEMPORARY")
    kind = words.word()
    while kind in ("UNIQUE", "FULLTEXT", "SPATIAL", "ONLINE", "OFFLINE"):
        kind = words.word()
    if kind == "INDEX":
        return _index(words, "CREATE_INDEX")
    if kind not in _TABLES or temporary:
        return DdlStatement(f"CREATE_{kind}")
    maybe = words.skip("IF") and words.skip("NOT") and words.skip("EXISTS")
    verb, path = Verb.REPLACE if replaces else Verb.CREATE, words.path()
    rest = list(iter(words.next, None))
    foreign_keys = Alteration(related=relates(rest), acting=acts(rest))
    effect = Effect(verb, path, maybe=maybe, alteration=foreign_keys, keyless=_keyless(rest))
    return DdlStatement("CREATE_TABLE", (effect,))


def _keyless(tokens: Sequence[SqlToken]) -> bool:
    """Whether the rest of CREATE TABLE says that there is no primary key."""
    before, defines = "", tokens[:1] == ["("]
    for token in tokens:
        word = "" if token.quoted else token.upper()
        # KEY behind a type is the primary one.
        if word in ("PRIMARY", "LIKE", "SELECT", "AS") or (word == "KEY" and before not in _KEYS):
            return False
        before = word
    return defines


def _index(words: SqlWords, kind: str) -> DdlStatement:
    words.skip("IF") and (words.skip("NOT"), words.skip("EXISTS"))
    name = words.name()
    if not words.pass_over("ON"):
        return DdlStatement(kind)
    alteration = Alteration(rekeyed=name.upper() == "PRIMARY")
    return DdlStatement(kind, (Effect(Verb.INDEX, words.path(), alteration=alteration),))


def _alter(words: SqlWords) -> DdlStatement:
    kind = words.word()
    ignores = False
    while kind in ("ONLINE", "OFFLINE", "IGNORE"):
        ignores = ignores or kind == "IGNORE"
        kind = words.word()
    if kind not in _TABLES:
        return DdlStatement(f"ALTER_{kind}")
    words.skip("IF") and words.skip("EXISTS")
    path = words.path()
    words.skip_waiting()
    clauses = _Clauses(words)
    loses = clauses.loses or ignores  # a new UNIQUE then deletes rows
    effects = [Effect(Verb.ALTER, path, loses=loses, alteration=clauses.columns.alteration())]
    effects += clauses.others
    if clauses.to is not None and clauses.to != path:
        effects.append(Effect(Verb.RENAME, path, to=clauses.to))
    return DdlStatement("ALTER_TABLE", tuple(effects))


class _Clauses:
    """What the clauses of ALTER TABLE do."""

    def __init__(self, words: SqlWords) -> None:
        self.to: TablePath | None = None  # where they move the table
        self.loses = False  # whether rows come or go without an event
        self.columns = AlterationReader(words)
        self.others: list[Effect] = []  # on tables that give or take its partitions
        begins = True  # whether a clause begins here
        while (token := words.next()) is not None:
            word = "" if token.quoted else token.upper()
            if begins:
                self._read(word, words)
            begins = word == "," and words.depth == 0

    def _read(self, word: str, words: SqlWords) -> None:
        follows = words.peek()
        if word == "RENAME" and follows not in ("COLUMN", "INDEX", "KEY"):
            words.skip("TO") or words.skip("AS") or words.skip("=")
            self.to = words.path()
        elif word in _UNDERLYING:
            self.loses = self.loses or follows in ("PARTITION", "TABLESPACE")
        elif word in _LOSING and follows == "PARTITION":
            self.loses = True
            self._read_partition(word, words)
        elif word == "CONVERT" and words.skip("TABLE"):
            self.loses = True
            self.others.append(Effect(Verb.DROP, words.path()))
        else:
            self.columns.read(word)

    def _read_partition(self, word: str, words: SqlWords) -> None:
        if word == "EXCHANGE" and words.pass_over("WITH", "TABLE"):
            self.others.append(Effect(Verb.ALTER, words.path(), loses=True))
        elif word == "CONVERT" and words.pass_over("TO", "TABLE"):
            self.others.append(Effect(Verb.CREATE, words.path(), loses=True))


def _drop(words: SqlWords) -> DdlStatement:
    temporary = words.skip("TEMPORARY")
    kind = words.word()
    if kind in ("DATABASE", "SCHEMA"):
        words.skip("IF") and words.skip("EXISTS")
        return DdlStatement("DROP_DATABASE", drops_schema=words.name())
    if kind == "INDEX":
        return _index(words, "DROP_INDEX")
    if kind not in _TABLES or temporary:
        return DdlStatement(f"DROP_{kind}")
    words.skip("IF") and words.skip("EXISTS")
    paths = [words.path()]
    while words.skip(","):
        paths.append(words.path())
    return DdlStatement("DROP_TABLE", tuple(Effect(Verb.DROP, path) for path in paths))


def _rename(words: SqlWords) -> DdlStatement:
    kind = words.word()
    if kind not in _TABLES:
        return DdlStatement(f"RENAME_{kind}")
    words.skip("IF") and words.skip("EXISTS")
    effects = []
    while True:
        path = words.path()
        words.skip_waiting()
        words.skip("TO")
        effects.append(Effect(Verb.RENAME, path, to=words.path()))
        if not words.skip(","):
            return DdlStatement("RENAME_TABLE", tuple(effects))


# --- statements about transactions ----------------------------------------------------------------

_IGNORING_CASE = re.IGNORECASE | re.DOTALL
SAVEPOINT = re.compile(r"SAVEPOINT\s+(?P<name>.+)", _IGNORING_CASE)
ROLLBACK_TO = re.compile(
    r"ROLLBACK\s+(?:WORK\s+)?TO\s+(?:SAVEPOINT\s+)?(?P<name>.+)", _IGNORING_CASE
)
XA = re.compile(r"XA\s+(?P<verb>START|BEGIN|END|COMMIT|ROLLBACK)\s+(?P<xid>[^ ]+)", re.IGNORECASE)
_PART = re.compile(r"(?P<hex>x?)'(?P<text>[^']*)'", re.IGNORECASE)


def savepoint(text: str) -> str:
    """The name of a savepoint, in whatever quotes it is; the server ignores case and accents."""
    text = text.strip().rstrip(";").strip()
    if text[:1] in ("`", '"') and text[-1:] == text[0]:
        text = text[1:-1].replace(text[0] * 2, text[0])
    letters = unicodedata.normalize("NFD", text.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def changes_kept_by(known: Mapping[str, int], text: str, where: str) -> int:
    """How many changes of a transaction a ROLLBACK TO leaves."""
    name = savepoint(text)
    if name not in known:
        raise ProtocolError(
            f"{where}: nothing is known of the savepoint {name}",
            hint="Run `headrace snapshot SOURCE` to start again from a new snapshot.",
        )
    return known[name]


def xid(text: str) -> str:
    """The name of an XA transaction, however it is written: X'6162',X'',1."""
    parts = [
        part["text"].lower() if part["hex"] else part["text"].encode().hex()
        for part in _PART.finditer(text)
    ]
    number = text.rpartition(",")[2]
    gtrid, bqual = [*parts, "", ""][:2]
    return f"{gtrid}.{bqual}.{number if number.isdecimal() else 1}"
