"""Transforms as a config has them: by table, without knowing any table yet."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..change.columns import schema_payload
from ..change.event import Column, Table
from ..change.path import table_path
from ..errors import ConfigError
from ..secret import Secret

_LEAST_KEY = 16  # characters; a shorter one can be guessed
_QUERY = re.compile(r"\s*\(?\s*(select|with|from)\b", re.IGNORECASE)
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Mask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands for a value: a code that only who has the key can make of it.

    Equal values have equal codes, so that tables can still be joined. A hash without a key could be
    undone by hashing every phone number.
    """

    hmac: Secret

    def __post_init__(self) -> None:
        if len(self.hmac.reveal()) < _LEAST_KEY:
            raise ConfigError(f"a key of hmac has at least {_LEAST_KEY} characters")

    def code(self, text: str) -> str:
        """The code of a value's text."""
        return hmac.digest(self.hmac.reveal().encode(), text.encode(), "sha256").hex()


class TableTransform(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to the rows of a table: where, mask and select, in this order.

    Or they are computed by Spark: by a statement that reads `changes`, or by a function that gets
    a DataFrame and returns one.
    """

    select: tuple[str, ...] = ()  # the columns that are kept; none: all
    mask: Mapping[str, Mask | None] = {}  # by column; None: the value becomes null
    where: str = ""  # rows that do not fulfil it are not there
    sql: str = ""
    function: str = ""  # module:name

    def __post_init__(self) -> None:
        given = [bool(self.select or self.mask or self.where), bool(self.sql), bool(self.function)]
        if not any(given):
            raise ConfigError("a transform has at least one of select, mask, where, sql, function")
        if sum(given) > 1:
            raise ConfigError(
                "a transform is select, mask and where, or sql, or function",
                hint="Put all of it into the statement, or into the function.",
            )
        if self.sql and not _QUERY.match(self.sql):
            raise ConfigError("sql is a query: it begins with SELECT, WITH or FROM")
        if self.function and not _FUNCTION.fullmatch(self.function):
            raise ConfigError(f"function must be module:name, not {self.function}")
        if twice := [name for name in self.select if self.select.count(name) > 1]:
            raise ConfigError(f"select names {twice[0]} twice")
        kept = [name.lower() for name in self.select]
        if kept and (left := [name for name in self.mask if name.lower() not in kept]):
            raise ConfigError(f"mask names {left[0]}, which select leaves out")
        if self.where:
            _expect_condition(self.where)

    def __hash__(self) -> int:
        return hash((self.select, tuple(self.mask.items()), self.where, self.sql, self.function))

    @property
    def computes(self) -> str:
        """The statement or the function that Spark computes rows with; "": neither."""
        return self.sql or self.function

    @property
    def computed_note(self) -> "TransformNote":
        """What it does to a table; a statement may hold what nobody else is to read."""
        digest = hashlib.sha256(self.computes.encode()).hexdigest()
        return TransformNote(computes=digest[:16])


_WHOLE_ROWS = {
    "mysql": "set binlog_row_image = FULL on the server",
    "postgres": "run ALTER TABLE … REPLICA IDENTITY FULL on the server",
}


def whole_rows_hint(connector: str) -> str:
    """How a source is made to send whole rows."""
    return _WHOLE_ROWS.get(connector, "have the source send whole rows")


def _expect_condition(text: str) -> None:
    # Only here: who has no pipeline has neither pyarrow nor sqlglot.
    from .where import parse  # noqa: PLC0415

    parse(text)


CODE_TYPE = "text"  # of a column that holds codes, as every source would declare it
# What a change of a table itself may say: no raw row, and no DDL text, which may hold values.
_OF_DDL = ("columns", "dropped", "ddl_type")
_OF_TRUNCATE = ("snapshot", "cascade", "restart_identity", "relations")
_OF_MESSAGES = ("error", "operation", "prefix", "transactional")
_SHOWN = frozenset((*_OF_DDL, *_OF_TRUNCATE, *_OF_MESSAGES))


def value_text(value: bytes) -> str:
    """The text of a value, which is JSON and not null: what a mask makes a code of."""
    return msgspec.json.decode(value, type=str) if value[:1] == b'"' else value.decode()


def coded_column(column: Column, mask: Mask | None) -> Column:
    """A column whose values are codes, or null where there is no mask."""
    initial = column.initial_default
    if initial:
        initial = "" if mask is None else f'"{mask.code(value_text(initial.encode()))}"'
    return Column(
        column.name,
        CODE_TYPE,
        column.key,
        comment=column.comment,
        number=column.number,
        initial_default=initial,
    )


def described(after: bytes, table: Table) -> bytes:
    """What a change of a table itself says, without what may show a value: raw rows, DDL text.

    `table` has the columns that are shown, and the foreign keys over those that are not hidden.
    """
    content: dict[str, Any] = msgspec.json.decode(after)
    shown = {name: value for name, value in content.items() if name in _SHOWN}
    if "columns" in content:
        shown |= schema_payload(table)
    return msgspec.json.encode(shown)


class Transforms(msgspec.Struct, frozen=True):
    """The transforms of a sink, by table; the name of a table comes before a pattern."""

    by_table: Mapping[str, TableTransform] = {}
    sink: str = ""

    def __bool__(self) -> bool:
        return bool(self.by_table)

    def __hash__(self) -> int:
        return hash((tuple(self.by_table.items()), self.sink))

    @property
    def computes(self) -> bool:
        """Whether Spark computes the rows of some table."""
        return any(each.computes for each in self.by_table.values())

    @property
    def rows_digest(self) -> str:
        """What tells two transforms apart that let other rows pass; "": all rows do."""
        chosen = {
            pattern: each.where or each.computes
            for pattern, each in self.by_table.items()
            if each.where or each.computes
        }
        return hashlib.sha256(msgspec.json.encode(chosen)).hexdigest()[:16] if chosen else ""

    def of(self, schema: str, table: str) -> tuple[str, TableTransform] | None:
        """The transform of a table, and how the config names it; None: it has none."""
        if not table:
            return None  # a message of the database, which belongs to none
        name = table_path(schema, table)
        if found := self.by_table.get(name):
            return name, found
        probe = Table("", "", "", "", schema, table)
        return next(
            ((pattern, each) for pattern, each in self.by_table.items() if probe.matches(pattern)),
            None,
        )

    def place(self, pattern: str, table: str) -> str:
        """Where the config has the transform of a table, for messages, which name the table."""
        where = f"{self.sink}.transforms.{pattern}" if self.sink else pattern
        return where if pattern == table else f"{where} ({table})"

    def computed(self, schema: str, table: str) -> tuple[str, TableTransform] | None:
        """The transform of a table that Spark computes, and its place; None: it has no such."""
        found = self.of(schema, table)
        if found is None or not found[1].computes:
            return None
        return self.place(found[0], table_path(schema, table)), found[1]


def expect_not_computed(transforms: Mapping[str, TableTransform], taker: str) -> None:
    """Refuse rows that Spark computes, where whole transactions are needed."""
    for pattern, each in transforms.items():
        if each.computes:
            raise ConfigError(
                f"transforms.{pattern}: sql and function do not go with {taker}, which needs whole "
                "transactions",
                hint="Here, select, where and mask can be used.",
            )


NO_TRANSFORMS = Transforms()


class TransformNote(msgspec.Struct, frozen=True):
    """What a transform does to a table, to be stored beside its rows; nothing of its keys."""

    select: list[str] = []
    where: str = ""
    mask: dict[str, str | None] = {}  # what tells two keys apart; None: null
    computes: str = ""  # what tells two statements or functions apart

    def differs(self, other: "TransformNote", columns: Iterable[str]) -> bool:
        """Whether rows with these columns could be others."""
        mine, theirs = (
            (of.select, of.where, of.computes, {name: of.mask.get(name, "") for name in columns})
            for of in (self, other)
        )
        return mine != theirs


class Selected(msgspec.Struct, frozen=True):
    """A transform for the columns of one version of a table."""

    rule: TableTransform
    place: str  # in the config, for messages
    columns: tuple[Column, ...]  # those that are kept, with the source's types
    masks: Mapping[str, Mask | None]
    conditions: tuple[Column, ...]  # what `where` looks at

    @classmethod
    def of(
        cls, rule: TableTransform, columns: Sequence[Column], *, exact: bool, place: str = ""
    ) -> "Selected":
        """`exact`: the config names the table, so each column that it names must be there."""
        names = _Names(columns)
        select = [name for each in rule.select if (name := names.find(each, needed=exact))]
        masks = {
            name: mask
            for each, mask in rule.mask.items()
            if (name := names.find(each, needed=exact))
        }
        kept = [each for each in columns if not rule.select or each.name in select]
        if not kept:
            raise ConfigError("select leaves no column")
        keys = [each.name for each in columns if each.key]
        if lost := [name for name in keys if name not in {each.name for each in kept}]:
            raise ConfigError(f"select leaves out {lost[0]}, which is of the key")
        if nulls := [name for name in keys if name in masks and masks[name] is None]:
            raise ConfigError(f"mask makes {nulls[0]} null, which is of the key")
        looked_at = {names.find(each, needed=True) for each in _columns_of(rule.where)}
        conditions = tuple(each for each in columns if each.name in looked_at)
        return cls(rule, place, tuple(kept), masks, conditions)

    @property
    def coded(self) -> frozenset[str]:
        """The columns that hold codes or nothing instead of values; all are text."""
        return frozenset(self.masks)

    @property
    def note(self) -> TransformNote:
        """What it does to the table."""
        masks = {
            name: mask.code("headrace")[:16] if mask else None for name, mask in self.masks.items()
        }
        return TransformNote(sorted(self.rule.select), self.rule.where, masks)


class _Names:
    """Finds columns; capitals do not count where that is clear."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._names = [column.name for column in columns]

    def find(self, name: str, *, needed: bool) -> str:
        """The column that is meant; "": there is none, and it is not `needed`."""
        if name in self._names:
            return name
        same = [each for each in self._names if each.lower() == name.lower()]
        if len(same) == 1:
            return same[0]
        if needed or same:
            raise ConfigError(f"there is no column {name}; there are: {', '.join(self._names)}")
        return ""


def _columns_of(where: str) -> tuple[str, ...]:
    if not where:
        return ()
    from .where import columns_of  # noqa: PLC0415

    return columns_of(where)
