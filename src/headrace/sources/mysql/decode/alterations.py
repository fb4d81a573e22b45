"""What ALTER TABLE does to the columns of a table and to the rows that are there. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .columns import DeclaredColumn, DeclaredType, declared_type
from .definitions import INTEGERS, TEXTS, ColumnDefinition, definition, normal
from .words import SqlToken, SqlWords

# What ADD and DROP may name beside columns.
NO_COLUMN = frozenset(
    {"CHECK", "CONSTRAINT", "FOREIGN", "INDEX", "KEY", "PARTITION", "PERIOD", "PRIMARY", "SYSTEM"}
)
_INDEXES = frozenset({"UNIQUE", "FULLTEXT", "SPATIAL"})
# Clauses and options of a table after which its rows have the same values.
_HARMLESS = frozenset({
    "ALGORITHM", "ANALYZE", "AUTOEXTEND_SIZE", "AUTO_INCREMENT", "AVG_ROW_LENGTH",
    "CHARACTER", "CHARSET", "CHECK", "CHECKSUM", "COALESCE", "COLLATE", "COMMENT", "COMPRESSION",
    "DATA", "DEFAULT", "DELAY_KEY_WRITE", "DISABLE", "ENABLE", "ENCRYPTED", "ENCRYPTION",
    "ENCRYPTION_KEY_ID", "ENGINE", "FORCE", "INDEX", "INSERT_METHOD", "KEY_BLOCK_SIZE",
    "LOCK", "MAX_ROWS", "MIN_ROWS", "OPTIMIZE", "ORDER", "PACK_KEYS", "PAGE_CHECKSUM",
    "PAGE_COMPRESSED", "PAGE_COMPRESSION_LEVEL", "PARTITION", "REBUILD", "REMOVE", "REORGANIZE",
    "ROW_FORMAT", "SECONDARY_ENGINE", "SECONDARY_LOAD", "SECONDARY_UNLOAD", "STATS_AUTO_RECALC",
    "STATS_PERSISTENT", "STATS_SAMPLE_PAGES", "TABLESPACE", "TRANSACTIONAL", "WITH", "WITHOUT",
    "", ";",
})  # fmt: skip
_KEEPING = frozenset({"innodb", "myisam", "aria", "rocksdb", "tokudb", "ndbcluster", "memory"})
_CHARSETS = frozenset({"CHARACTER", "CHARSET", "COLLATE"})
_TEXT_TYPES = frozenset({"char", "varchar", *TEXTS, "enum", "set"})


class AddedColumn(msgspec.Struct, frozen=True):
    """ADD COLUMN."""

    name: str
    definition: ColumnDefinition
    maybe: bool = False  # IF NOT EXISTS


class ModifiedColumn(msgspec.Struct, frozen=True):
    """MODIFY and CHANGE."""

    name: str  # before, in small letters
    definition: ColumnDefinition


class Alteration(msgspec.Struct, frozen=True):
    """What the clauses of one ALTER TABLE do, all at once: names are those before it."""

    added: tuple[AddedColumn, ...] = ()
    dropped: frozenset[str] = frozenset()  # in small letters
    renamed: dict[str, str] = {}  # from small letters to the new name as it is written
    modified: tuple[ModifiedColumn, ...] = ()
    rekeyed: bool = False  # another primary key
    recharged: bool = False  # another default character set for columns to come
    related: bool = False  # other foreign keys
    acting: bool = False  # a new one changes rows by itself
    strict: bool = False  # a value that does not fit is an error
    unclear: str = ""  # a clause that may change rows, and is not followed here

    @property
    def changes_columns(self) -> bool:
        """Whether the columns behind the statement are others than before it."""
        return bool(self.added or self.dropped or self.renamed or self.modified)

    def rewrites(self, before: Sequence[DeclaredColumn], key: Sequence[str], charset: str) -> str:
        """Why rows that are there may have other values now; "": their values are followed.

        `charset`: that of columns whose definition has none; "": it is not known.
        """
        known = {column.name.lower(): column for column in before}
        if self.rekeyed or self.dropped & {name.lower() for name in key}:
            return "it has another primary key"
        if self.unclear:
            return self.unclear
        for added in self.added:
            taken = added.maybe and added.name.lower() in known
            if not taken and (
                added.definition.initial is None or self._maybe_bytes(added, charset)
            ):
                return f"only the server knows what the new column {added.name} has in old rows"
        for each in self.modified:
            was = known.get(each.name)
            if was is not None and not self._keeps(was, each.definition, charset):
                return f"the values of the column {was.name} may have been converted"
        if self.modified and any("generated" in column.extra for column in before):
            return "a generated column may have other values"
        return ""

    def _maybe_bytes(self, added: AddedColumn, charset: str) -> bool:
        """Whether a text may have become bytes, by the character set of its table."""
        now = added.definition
        is_text = not now.odd and now.kind.base in _TEXT_TYPES and not now.charset
        return is_text and bool(now.initial) and (self.recharged or charset in ("", "binary"))

    def _keeps(self, was: DeclaredColumn, now: ColumnDefinition, charset: str) -> bool:
        """Whether every value of a column stays as it is."""
        if now.odd or now.generated or now.key or was.json or "generated" in was.extra:
            return False
        if now.auto_increment and "auto_increment" not in was.extra:
            return False  # it numbers rows that have 0
        if now.not_null and was.nullable and not self.strict:
            return False
        before, after = normal(declared_type(was.type)), now.kind
        if after.base == "timestamp" and was.nullable and not now.nullable:
            return False
        if after.base in _TEXT_TYPES:
            charset = "" if self.recharged else charset
            if _plain(now.charset or charset) != _plain(was.charset):
                return False
        return _widened(before, after)

    def applied(
        self, before: Sequence[DeclaredColumn], last: int, charset: str
    ) -> tuple[tuple[DeclaredColumn, ...], int]:
        """The columns behind the statement, and the last number that one of them ever had.

        `before` may be of a later time, and have columns already that the statement brings.
        """
        charset = "" if self.recharged else charset
        names = {column.name.lower() for column in before}
        changed = {each.name: each.definition for each in self.modified}
        brought = {each.name.lower() for each in self.added if not each.maybe}
        brought |= {name.lower() for name in self.renamed.values()}
        found: list[DeclaredColumn] = []
        for column in before:
            old = column.name.lower()
            if old in self.dropped or (old in brought and old not in self.renamed):
                continue
            now = changed.get(old)
            same = msgspec.structs.replace(column, name=self.renamed.get(old, column.name))
            found.append(same if now is None else _redefined(same, now, charset))
        for added in self.added:
            if added.maybe and added.name.lower() in names - self.dropped:
                continue
            last += 1
            initial = added.definition.initial or ""
            new = DeclaredColumn(added.name, "", number=last, initial_default=initial)
            found.append(_redefined(new, added.definition, charset))
        return tuple(found), last


def _redefined(column: DeclaredColumn, now: ColumnDefinition, charset: str) -> DeclaredColumn:
    """A column by its new definition; what that does not have is not known."""
    charset = now.charset or (charset if now.type and now.kind.base in _TEXT_TYPES else "")
    return msgspec.structs.replace(
        column,
        type=now.type if charset != "binary" else "",
        charset=charset,
        nullable=not now.not_null,
        default=None,
        extra="auto_increment" if now.auto_increment else "generated" if now.generated else "",
    )


def _plain(charset: str) -> str:
    return "utf8mb3" if charset == "utf8" else charset


def _widened(before: DeclaredType, after: DeclaredType) -> bool:
    """Whether a type has every value of another one, and shows it in the same way."""
    if before == after:
        return True
    if before.base in INTEGERS and after.base in INTEGERS:
        # A signed type has all values of an unsigned one that is smaller.
        needed = INTEGERS[before.base] + (before.unsigned and not after.unsigned)
        plain = not before.boolean and not after.boolean
        return plain and needed <= INTEGERS[after.base] and before.unsigned >= after.unsigned
    if before.base != after.base or before.unsigned != after.unsigned:
        return False
    if before.base == "varchar":
        return int(before.arguments) <= int(after.arguments)
    if before.base == "decimal":
        (size, scale), (wider, same) = (
            map(int, kind.arguments.split(",")) for kind in (before, after)
        )
        return size <= wider and scale == same
    if before.base in ("enum", "set"):
        return after.labels[: len(before.labels)] == before.labels
    return False


def relates(tokens: Sequence[SqlToken]) -> bool:
    """Whether a definition has a foreign key."""
    return any(token.upper() == "REFERENCES" for token in tokens if not token.quoted)


def acts(tokens: Sequence[SqlToken]) -> bool:
    """Whether a definition may have a foreign key that changes rows by itself."""
    words = ["" if token.quoted else token.upper() for token in tokens]
    return relates(tokens) and ("CASCADE" in words or "SET" in words)


class AlterationReader:
    """Collects the clauses of one ALTER TABLE."""

    def __init__(self, words: SqlWords) -> None:
        self._words = words
        self._added: list[AddedColumn] = []
        self._dropped: set[str] = set()
        self._renamed: dict[str, str] = {}
        self._modified: list[ModifiedColumn] = []
        self._rekeyed = False
        self._recharged = False
        self._related = False
        self._acting = False
        self._defaulted: set[str] = set()  # columns that get another default, in small letters
        self._unclear = ""

    def alteration(self) -> Alteration:
        """What they do together."""
        if not self._defaulted.isdisjoint(each.name.lower() for each in self._added):
            self._unclear = "a column was added and given another default at once"
        return Alteration(
            tuple(self._added),
            frozenset(self._dropped),
            self._renamed,
            tuple(self._modified),
            self._rekeyed,
            self._recharged,
            self._related,
            self._acting,
            self._words.strict,
            self._unclear,
        )

    def read(self, word: str) -> None:
        """Take a clause that begins with this word; it is about no other table."""
        words = self._words
        match word:
            case "ADD":
                self._add()
            case "DROP":
                self._drop()
            case "MODIFY":
                words.skip("COLUMN")
                words.skip("IF") and words.skip("EXISTS")
                self._modify(self._name())
            case "CHANGE":
                words.skip("COLUMN")
                words.skip("IF") and words.skip("EXISTS")
                old = self._name()
                self._renamed[old.lower()] = self._name()
                self._modify(old)
            case "RENAME":
                self._rename()
            case "ALTER":
                words.skip("COLUMN")
                self._defaulted.add(self._name().lower())
            case _ if word in _HARMLESS:
                self._options(word)
            case _:
                self._unclear = "it was altered in a way that is not followed here"

    def _options(self, word: str) -> None:
        """Options of a table; several may stand in one clause."""
        tokens = self._words.clause()
        read = [word, *("" if token.quoted else token.upper() for token in tokens)]
        self._recharged |= not _CHARSETS.isdisjoint(read)
        values = [str(token).lower() for token in tokens if token != "="]
        if "ENGINE" in read and _KEEPING.isdisjoint(values):
            self._unclear = "its storage engine is another one"

    def _add(self) -> None:
        words = self._words
        named = words.skip("COLUMN")
        follows = words.peek()
        if not named and (follows in NO_COLUMN or follows in _INDEXES):
            tokens = self._clause()
            self._rekeyed |= any(t.upper() == "PRIMARY" for t in tokens if not t.quoted)
            if follows in ("PERIOD", "SYSTEM"):
                self._unclear = "it keeps its history now"
            return
        maybe = words.skip("IF") and words.skip("NOT") and words.skip("EXISTS")
        if not words.skip("("):
            self._add_column(maybe=maybe)
            return
        while True:
            if words.peek() in NO_COLUMN or words.peek() in _INDEXES:
                self._unclear = "columns and indexes were added together"
            self._add_column(maybe=maybe)
            if not words.skip(","):
                return

    def _add_column(self, *, maybe: bool) -> None:
        name = self._name()
        found = definition(self._clause())
        self._rekeyed |= found.key
        self._added.append(AddedColumn(name, found, maybe))

    def _drop(self) -> None:
        words = self._words
        follows = words.peek()
        if follows not in NO_COLUMN:
            words.skip("COLUMN")
            words.skip("IF") and words.skip("EXISTS")
            self._dropped.add(self._name().lower())
            return
        words.next()
        words.skip("IF") and words.skip("EXISTS")
        self._related |= follows in ("CONSTRAINT", "FOREIGN")
        if follows in ("CONSTRAINT", "INDEX", "KEY"):
            self._rekeyed |= self._name().lower() == "primary"
        elif follows == "PRIMARY":
            self._rekeyed = True
        elif follows in ("PERIOD", "SYSTEM"):
            self._unclear = "it keeps no history any more"

    def _modify(self, name: str) -> None:
        found = definition(self._clause())
        self._rekeyed |= found.key
        self._modified.append(ModifiedColumn(name.lower(), found))

    def _rename(self) -> None:
        if not self._words.skip("COLUMN"):
            return  # an index
        self._words.skip("IF") and self._words.skip("EXISTS")
        old = self._name().lower()
        self._words.skip("TO")
        self._renamed[old] = self._name()

    def _clause(self) -> list[SqlToken]:
        """The rest of a clause that may have a foreign key."""
        tokens = self._words.clause()
        self._related |= relates(tokens)
        self._acting |= acts(tokens)
        return tokens

    def _name(self) -> str:
        """The next word as it is written: names of columns keep their case."""
        return str(self._words.next() or "")
