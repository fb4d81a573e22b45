"""The words of an SQL statement, one after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ....errors import DecodeError
from .path import TablePath

ANSI_QUOTES = 4
NO_BACKSLASH_ESCAPES = 0x100000
_STRICT = 0x200000 | 0x400000  # STRICT_TRANS_TABLES, STRICT_ALL_TABLES


class SqlToken(str):
    """A word, a name or a sign; `quoted`: it was written in quotes, so it is no keyword."""

    quoted: bool = False
    literal: bool = False  # a string, and no name; what it escapes is still escaped


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


class SqlWords:
    """The words of a statement, one after the other."""

    def __init__(self, sql: str, database: str, sql_mode: int, folds: bool) -> None:
        self.sql_mode = sql_mode
        self._database = database.lower() if folds else database
        self._folds = folds
        self._tokens = self._read(sql, bool(sql_mode & NO_BACKSLASH_ESCAPES))
        self._ahead: list[SqlToken] = []
        self.depth = 0  # of brackets

    def _read(self, sql: str, plain: bool) -> Iterator[SqlToken]:
        for match in (_plain if plain else _escaping).finditer(sql):
            kind, text = match.lastgroup or "", match[match.lastgroup or 0]
            if kind == "space":
                continue
            if kind == "tick":
                text = text.replace("``", "`")
            elif kind == "double":
                text = text.replace('""', '"')
            token = SqlToken(text)
            token.quoted = kind in ("tick", "double", "single")
            ansi = bool(self.sql_mode & ANSI_QUOTES)
            token.literal = kind == "single" or (kind == "double" and not ansi)
            yield token

    @property
    def strict(self) -> bool:
        """Whether a value that does not fit is an error, and not made to fit."""
        return bool(self.sql_mode & _STRICT)

    def next(self) -> SqlToken | None:
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

    def skip_waiting(self) -> None:
        """Pass over how long to wait for a lock."""
        if self.skip("WAIT"):
            self.next()
        self.skip("NOWAIT")

    def pass_over(self, *sequence: str) -> bool:
        """Pass over all up to these words outside of brackets, and over them; False: none came."""
        depth = self.depth
        while (token := self.next()) is not None:
            if token.quoted or token.upper() != sequence[0] or self.depth != depth:
                continue
            if all(self.skip(word) for word in sequence[1:]):
                return True
        return False

    def clause(self) -> list[SqlToken]:
        """The words up to the next comma outside of brackets, or the end; the comma is left."""
        depth, found = self.depth, list[SqlToken]()
        while (token := self._look()) is not None:
            ends = token == "," or (token == ")" and self.depth == depth)
            if not token.quoted and self.depth == depth and ends:
                break
            self.next()
            found.append(token)
        return found

    def name(self) -> str:
        """The next word as a name."""
        token = self.next()
        if token is None or (not token and not token.quoted):
            raise DecodeError("a statement ends where a name is expected")
        return str(token.lower() if self._folds else token)

    def path(self) -> TablePath:
        """The next words as a table's name."""
        name = self.name()
        if name == ".":  # .table, of the default database
            return TablePath(self._database, self.name())
        if not self.skip("."):
            return TablePath(self._database, name)
        return TablePath(name, self.name())

    def _look(self) -> SqlToken | None:
        if not self._ahead:
            token = next(self._tokens, None)
            if token is None:
                return None
            self._ahead.append(token)
        return self._ahead[-1]
