"""Column definitions of DDL: SQL text -> what they make of rows that are there. No I/O.

Only what is certain is read: `odd` says that a definition has more to it than is known here, and
whoever asks must then look at the rows themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .columns import DeclaredType, declared_type
from .words import SqlToken

_number = re.compile(r"[-+]?\d+(?:\.\d+)?").fullmatch
_day = re.compile(r"[1-9]\d{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])").fullmatch
_moment = re.compile(
    r"([1-9]\d{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01]) [0-2]\d:[0-5]\d:[0-5]\d)(?:\.(\d+))?"
).fullmatch

INTEGERS = {"tinyint": 1, "smallint": 2, "mediumint": 3, "int": 4, "bigint": 8}  # in bytes
TEXTS = ("tinytext", "text", "mediumtext", "longtext")
_BITS = {name: 8 * size for name, size in INTEGERS.items()}
_NAMES = {"bool": "tinyint(1)", "boolean": "tinyint(1)", "dec": "decimal", "fixed": "decimal"}
_KNOWN = frozenset({*INTEGERS, "integer", "bool", "boolean", "decimal", "numeric", "dec", "fixed"}
                   | {"double", "float", "char", "varchar", *TEXTS, "enum", "set", "date"}
                   | {"datetime", "timestamp", "time", "year", "bit", "binary", "varbinary"}
                   | {"tinyblob", "blob", "mediumblob", "longblob"})  # fmt: skip
_SIZED = frozenset({"text", "blob"})  # TEXT(100) is whatever has room for it
_WITH_WORD = frozenset({"STORAGE", "COLUMN_FORMAT", "COMMENT", "AFTER", "SRID"})
_FLAGS = {
    "AUTO_INCREMENT": "auto_increment",
    "KEY": "key",  # by itself it is the primary one
    "NULL": "nullable",
    "PRIMARY": "key",
}
_ALONE = frozenset({"FIRST", "VISIBLE", "INVISIBLE", "SIGNED", "COMPRESSED", ";"})


class ColumnDefinition(msgspec.Struct, frozen=True):
    """What stands behind a column's name."""

    type: str = ""  # as information_schema writes it, but for display widths
    not_null: bool = False
    nullable: bool = False  # NULL is written
    # A literal as JSON would have it: a string, or the text of a number; None: there is none.
    default: str | None = None
    quoted: bool = False  # the default is a string
    expression: bool = False  # the default is no literal
    charset: str = ""  # as it is written; "": that of the table
    auto_increment: bool = False
    key: bool = False  # PRIMARY KEY
    generated: bool = False
    odd: bool = False

    @property
    def kind(self) -> DeclaredType:
        """The type, taken apart."""
        return normal(declared_type(self.type))

    @property
    def initial(self) -> str | None:
        """JSON of what rows have that are there already; "": null. None: the server knows it."""
        if self.odd or self.generated or self.auto_increment or self.key or self.expression:
            return None
        kind = self.kind
        if self.default is not None:
            return _converted(kind, self.default, quoted=self.quoted)
        if kind.base == "timestamp" and not self.nullable:
            return None  # it may be NOT NULL, with a default of its own
        return implicit(kind) if self.not_null else ""


def implicit(kind: DeclaredType) -> str | None:
    """JSON of what a column that is NOT NULL and has no default gets; None: it is not known."""
    found = _IMPLICIT.get(_family(kind))
    return None if found is None else found(normal(kind))


def normal(kind: DeclaredType) -> DeclaredType:
    """A type by the words that the catalogue has for it."""
    base, arguments = kind.base, kind.arguments.replace(" ", "")
    if base in INTEGERS:
        arguments = "1" if kind.boolean else ""
    elif base == "decimal":
        arguments = f"{arguments or 10},0" if "," not in arguments else arguments
    elif base in ("char", "binary", "bit"):
        arguments = arguments or "1"
    elif base in ("datetime", "timestamp", "time"):
        arguments = arguments or "0"
    elif base in ("enum", "set"):
        arguments = kind.arguments
    return DeclaredType(base, arguments, kind.unsigned, kind.zerofill)


def _family(kind: DeclaredType) -> str:
    if kind.boolean:
        return "boolean"
    if kind.base in INTEGERS:
        return "integer"
    return "text" if kind.base in TEXTS else kind.base


_IMPLICIT: dict[str, Callable[[DeclaredType], str | None]] = {
    "boolean": lambda kind: "false",
    "integer": lambda kind: "0",
    "decimal": lambda kind: _converted(kind, "0", quoted=False),
    "double": lambda kind: "0.0",
    "float": lambda kind: "0.0",
    "char": lambda kind: '""',
    "varchar": lambda kind: '""',
    "text": lambda kind: '""',
    "enum": lambda kind: _text(kind.labels[0]) if kind.labels[0].isascii() else None,
    "set": lambda kind: "[]",
}  # fmt: skip


def _converted(kind: DeclaredType, literal: str, *, quoted: bool) -> str | None:
    """A literal as a column of this type has it; None: only the server knows."""
    if kind.zerofill:
        return None
    match _family(kind):
        case "boolean":
            return {"0": "false", "1": "true"}.get(literal) or _integer(kind, literal)
        case "integer":
            return _integer(kind, literal)
        case "decimal":
            return _decimal(kind, literal)
        case "double" if _number(literal) and not kind.arguments:
            return msgspec.json.encode(float(literal)).decode()
        case "char" | "varchar" | "text" | "enum":
            return _letters(kind, literal) if quoted else None
        case "date" if quoted and _day(literal) and literal[8:] <= "28":
            return _text(literal)
        case "datetime" if quoted and (found := _moment(literal)):
            return _datetime(kind, found[1], found[2] or "")
    return None


def _integer(kind: DeclaredType, literal: str) -> str | None:
    if not re.fullmatch(r"[-+]?\d{1,18}", literal):
        return None
    value, bits = int(literal), _BITS[kind.base]
    low, high = (0, 1 << bits) if kind.unsigned else (-(1 << bits - 1), 1 << bits - 1)
    return str(value) if low <= value < high else None


def _decimal(kind: DeclaredType, literal: str) -> str | None:
    if not _number(literal) or kind.unsigned:
        return None
    precision, scale = map(int, kind.arguments.split(","))
    sign = "-" if literal.startswith("-") else ""
    whole, _, fraction = literal.lstrip("-+").partition(".")
    whole = whole.lstrip("0") or "0"
    if len(fraction) > scale or len(whole) > max(precision - scale, 1):
        return None
    if whole == "0" and (precision == scale or not fraction.strip("0")):
        sign = "" if not fraction.strip("0") else sign
    digits = fraction.ljust(scale, "0")
    return _text(f"{sign}{whole}.{digits}" if scale else f"{sign}{whole}")


def _letters(kind: DeclaredType, literal: str) -> str | None:
    if not literal.isascii() or "\\" in literal or literal.endswith(" "):
        return None
    if kind.base == "enum":
        return _text(literal) if literal in kind.labels else None
    if kind.base in ("char", "varchar") and len(literal) > int(kind.arguments or 0):
        return None
    return _text(literal)


def _datetime(kind: DeclaredType, moment: str, fraction: str) -> str | None:
    digits = int(kind.arguments or 0)
    if len(fraction) > digits or moment[8:10] > "28" or moment[11:13] > "23":
        return None
    return _text(f"{moment}.{fraction.ljust(digits, '0')}" if digits else moment)


def _text(value: str) -> str:
    return msgspec.json.encode(value).decode()


# --- reading -------------------------------------------------------------------------------------


def definition(tokens: Sequence[SqlToken]) -> ColumnDefinition:
    """What stands behind a column's name, up to the end of its clause."""
    reader = _Reader(tokens)
    kind = reader.type()
    if kind is None:
        return ColumnDefinition(odd=True)
    reader.attributes()
    found = dict(reader.found)
    if found.get("charset") == "binary":  # CHAR is BINARY, TEXT is BLOB
        return ColumnDefinition(odd=True)
    modifiers = [each for each in ("unsigned", "zerofill") if found.pop(each, False)]
    return ColumnDefinition(" ".join([kind, *modifiers]), **found)


class _Reader:
    """Reads one definition."""

    def __init__(self, tokens: Sequence[SqlToken]) -> None:
        self._tokens = list(tokens)
        self.found: dict[str, Any] = {}

    def type(self) -> str | None:
        """The type with its arguments; None: it is another one than is known here."""
        base = self._word().lower()
        if base not in _KNOWN:
            return None
        if base == "double":
            self._skip("PRECISION")
        if self._peek() != "(":
            return None if base == "varchar" else _NAMES.get(base, base)
        arguments = self._brackets()
        if base in _SIZED or base in ("float", "double") or arguments is None:
            return None
        return f"{_NAMES.get(base, base)}({arguments})"

    def attributes(self) -> None:
        """All that follows the type."""
        while self._tokens and not self.found.get("odd"):
            if not self._attribute(self._word()):
                self.found["odd"] = True

    def _attribute(self, word: str) -> bool:
        """Take what a word begins; False: it is not known here."""
        if word in _FLAGS:
            self.found[_FLAGS[word]] = True
            return True
        match word:
            case "UNSIGNED" | "ZEROFILL":
                self.found |= {"unsigned": True, word.lower(): True}
            case "NOT" if self._skip("NULL"):
                self.found["not_null"] = True
            case "DEFAULT":
                self._default()
            case "AS" | "GENERATED":
                self.found["generated"] = True
                self._tokens.clear()
            case "CHARACTER" | "CHARSET":
                self._skip("SET")
                self.found["charset"] = self._take().lower()
            case "COLLATE":
                self.found.setdefault("charset", self._take().lower().partition("_")[0])
            case "ON" | "CHECK" | "REFERENCES" | "UNIQUE":
                self._constraint(word)
            case _ if word in _WITH_WORD:
                self._take()
            case _:
                return word in _ALONE
        return True

    def _default(self) -> None:
        token = self._tokens.pop(0) if self._tokens else SqlToken()
        if token.literal:
            self.found |= {"default": token.replace("''", "'"), "quoted": True}
            return
        word = "" if token.quoted else token.upper()
        if word == "NULL":
            return
        if word in ("TRUE", "FALSE"):
            self.found["default"] = str(int(word == "TRUE"))
            return
        sign = word if word in ("-", "+") else ""
        digits = self._take() if sign else word
        if self._peek() == ".":
            self._take()
            digits += f".{self._take()}"
        if _number(digits):
            self.found["default"] = ("-" if sign == "-" else "") + digits
            return
        if word == "(":
            self._tokens.insert(0, token)
        self.found["expression"] = True
        self._pass_brackets()

    def _constraint(self, word: str) -> None:
        match word:
            case "UNIQUE":
                self._skip("KEY")
            case "REFERENCES":
                self._tokens.clear()
            case "ON":  # UPDATE current_timestamp(6)
                self._take()
                self._take()
        self._pass_brackets()

    def _brackets(self) -> str | None:
        """What stands in the brackets that begin here, as the catalogue writes it."""
        self._take()
        parts: list[str] = []
        while self._tokens:
            token = self._tokens.pop(0)
            if token == ")" and not token.quoted:
                return "".join(parts)
            if "\\" in token or "'" in token.replace("''", "") or token == "(":
                return None
            parts.append(f"'{token}'" if token.literal else token)
        return None

    def _pass_brackets(self) -> None:
        if self._peek() != "(":
            return
        depth = 0
        while self._tokens:
            token = self._tokens.pop(0)
            if not token.quoted:
                depth += (token == "(") - (token == ")")
            if not depth:
                return

    def _peek(self) -> str:
        return self._tokens[0].upper() if self._tokens and not self._tokens[0].quoted else ""

    def _word(self) -> str:
        token = self._tokens.pop(0) if self._tokens else SqlToken()
        return "" if token.quoted else token.upper()

    def _take(self) -> str:
        return str(self._tokens.pop(0)) if self._tokens else ""

    def _skip(self, word: str) -> bool:
        if self._peek() != word:
            return False
        self._tokens.pop(0)
        return True
