"""A table as its catalogs show it, and what has happened between two looks at it. No I/O.

The server tells of no DDL: a look is compared with the one before. The look itself stands in the
stream (a message of ours, or of the event trigger), so it is exact there; the resume keeps of it
what `LookState` has.

    a file of rows and a definition are new   rows were rewritten: new snapshot
    a file of rows is new, nothing else       VACUUM FULL, CLUSTER, TRUNCATE: nothing
    a definition is new, nothing else         columns from here on: a SCHEMA change
    partitions, or types behind columns       rows read otherwise: new snapshot
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from ...change.path import split_path, table_path
from .pgoutput import RelationColumn, WalRelation

# A message can be written by anybody: numbers are checked before use.
Oid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
AttributeNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 15)]


class LookColumn(msgspec.Struct, frozen=True):
    """A column, as pg_attribute has it."""

    name: str
    type_id: Oid
    modifier: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
    key: bool
    number: AttributeNumber = 0
    captured: bool = True  # the server sends it
    xmin: str = ""  # the transaction that has altered it last
    default: int = 0  # the oid of its default; 0: it has none
    # attmissingval, as text of an array: the value of rows older than the column. The partitions of
    # a table have one each.
    missing: tuple[str, ...] = ()
    # Of the types it is made of: a hash of the composite ones, and one of each enum's label, the
    # oldest first; None: a type that is always printed alike.
    types: tuple[str, tuple[int, ...]] | None = None
    # The last transaction that has altered one of them, of 32 bits; 0: they are as they were made.
    types_xid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0


class LookParts(msgspec.Struct, frozen=True):
    """The partitions of a table: a sum of a hash for each, and the newest ones."""

    count: int
    sum: int
    # The hash of each, and whether it was created as a partition and never rewritten: what it
    # holds came through the stream.
    newest: tuple[tuple[int, bool], ...] = ()


class TableLook(msgspec.Struct, frozen=True):
    """A table; without columns: one that was dropped."""

    oid: Oid
    schema: str
    name: str
    identity: str
    columns: tuple[LookColumn, ...] = ()
    attributes: AttributeNumber = 0  # the highest number that a column ever had
    storage: int = 0  # the file of its rows; 0: it has none of its own
    parts: LookParts | None = None
    constraint: Oid | None = None  # its primary key; 0: it has none; None: not said
    rewritten: bool = False  # the event trigger says that its rows are written anew

    @property
    def numbered(self) -> bool:
        """Whether it says of each column which one it is; older triggers do not."""
        return self.attributes > 0

    @property
    def sent(self) -> tuple[LookColumn, ...]:
        """The columns that a Relation message has."""
        return tuple(column for column in self.columns if column.captured)

    def without(self, numbers: Collection[int]) -> TableLook:
        """The same, where these columns are not sent."""
        columns = tuple(
            msgspec.structs.replace(c, captured=c.captured and c.number not in numbers)
            for c in self.columns
        )
        return msgspec.structs.replace(self, columns=columns)


class LookState(msgspec.Struct, frozen=True, array_like=True):
    """What the resume keeps of a look; the first two follow each version of the columns."""

    numbers: str  # of the columns that are captured, as spans: 1-7,9
    attributes: int
    kept: str = ""  # columns that VACUUM FULL may alter, see `_definition`
    definition: str = ""
    storage: int = 0
    parts: tuple[int, int] | None = None  # their count and sum
    types: tuple[tuple[int, int, str], ...] = ()  # number, labels, hash
    looked: int = 0  # the highest number of a column that was looked at
    constraint: int | None = None  # its primary key, as `TableLook` has it
    keys: str = ""  # the columns by which a row is known, as spans

    @classmethod
    def of(cls, look: TableLook) -> LookState:
        """After a look."""
        kept = {c.number for c in look.columns if c.missing and c.default}
        return cls(
            spans(column.number for column in look.sent),
            look.attributes,
            spans(kept),
            _definition(look, kept),
            look.storage,
            None if look.parts is None else (look.parts.count, look.parts.sum),
            _type_states(look.sent),
            look.attributes,
            look.constraint,
            spans(column.number for column in look.sent if column.key),
        )

    def described(self, numbering: Numbering) -> LookState:
        """After other columns were sent, before a look at them."""
        highest = max(self.attributes, *numbering.numbers, 0)
        looked = tuple(each for each in self.types if each[0] <= self.looked)
        return msgspec.structs.replace(
            self,
            numbers=spans(numbering.numbers),
            attributes=highest,
            types=looked + numbering.types,
        )

    def unseen(self, numbers: Iterable[int]) -> bool:
        """Whether rows have columns that no look has shown, of types that can be altered."""
        typed = {number for number, _, _ in self.types if number > self.looked}
        return not typed.isdisjoint(numbers)


class Comparison(msgspec.Struct, frozen=True):
    """What has happened between two looks."""

    state: LookState  # after it
    reason: str = ""  # why rows must be read anew; "": they need not
    types: bool = False  # whether values are printed in another way


def compare(before: LookState | None, look: TableLook) -> Comparison:
    """What a look shows, after the state that the one before has left."""
    state = LookState.of(look)
    if before is None:
        return Comparison(state)
    types = _altered_types(before, look)
    return Comparison(state, _reason(before, look, types), bool(types))


def _reason(before: LookState, look: TableLook, types: str) -> str:
    defined = _definition(look, numbers_in(before.kept)) != before.definition
    if look.rewritten or (defined and look.storage != before.storage):
        return "DDL has rewritten its rows"
    if not _grown(before.parts, look.parts):
        return "partitions with rows were attached, detached, dropped, truncated or rewritten"
    if types:
        return f"a type of the column {types} was altered"
    if look.identity == "full" and _another_key(before, look):
        return "it has got another primary key"
    known = numbers_in(before.numbers)
    for column in look.sent:
        if column.number <= before.attributes and column.number not in known:
            return f"the column {column.name} was not captured before"
        if column.number > before.attributes and len(column.missing) > 1:
            return f"the partitions have several defaults of the column {column.name}"
    return ""


def _another_key(before: LookState, look: TableLook) -> bool:
    """Whether rows between two looks may have had either key."""
    known = bool(before.constraint and look.constraint)
    return known and before.constraint != look.constraint


def _definition(look: TableLook, kept: Collection[int]) -> str:
    """A hash of everything that is declared.

    VACUUM FULL and CLUSTER write the initial defaults into the rows and alter those columns for it.
    Of columns in `kept` that is passed over: DDL that converts their values renews their default.
    """
    columns = [
        (c.number, c.name, c.type_id, c.modifier, c.captured, c.default)
        + (() if c.number in kept else (c.xmin,))
        for c in look.columns
    ]
    return _hash(msgspec.json.encode((look.attributes, columns)))


def _type_states(columns: Iterable[LookColumn]) -> tuple[tuple[int, int, str], ...]:
    return tuple(
        (column.number, len(column.types[1]), _types(column.types, len(column.types[1])))
        for column in columns
        if column.types is not None
    )


def _types(types: tuple[str, tuple[int, ...]], labels: int) -> str:
    return _hash(msgspec.json.encode((types[0], types[1][:labels])))


def _altered_types(before: LookState, look: TableLook) -> str:
    """The first column that was there before and whose values are printed otherwise."""
    numbers = numbers_in(before.numbers)
    known = {number: (count, sum_) for number, count, sum_ in before.types}
    for column in look.sent:
        unknown = column.number > before.looked and column.number not in known
        if column.number not in numbers or unknown:
            continue
        count, sum_ = known.get(column.number, (0, ""))
        # A label that is added comes last.
        if (_types(column.types, count) if column.types is not None else "") != sum_:
            return column.name
    return ""


def _grown(before: tuple[int, int] | None, parts: LookParts | None) -> bool:
    """Whether nothing but empty partitions has come."""
    if before is None or parts is None:
        return before is None and parts is None
    count, sum_ = before
    added = parts.newest[: parts.count - count] if parts.count > count else ()
    if parts.count - count != len(added) or not all(created for _, created in added):
        return False
    return sum_ == parts.sum - sum(each for each, _ in added)


class Numbering(NamedTuple):
    """The numbers of columns; 0: unknown."""

    numbers: list[int]
    certain: bool
    # Of columns that no look in the stream has shown: what `LookState.types` has of them, as their
    # rows are read.
    types: tuple[tuple[int, int, str], ...] = ()


def numbered(
    state: LookState | None, names: Sequence[str], look: TableLook, *, xid: int = 0
) -> Numbering:
    """The numbers of columns that a Relation message names, which came in the transaction `xid`.

    The look is of now, the message of a moment between `state` and now. A number lives from the
    column's creation to its drop, and columns are sent in the order of their numbers: where nothing
    was dropped meanwhile, there is one way to give them.
    """
    if state is None:
        known = {column.name: column.number for column in look.sent}
        found = [known.get(name, 0) for name in names]
        return Numbering(found if found == sorted(found) else [0] * len(names), True)
    certain = _certain(state, len(names), look)
    if certain is not None:
        return Numbering(certain, True, _unseen_types(state, certain, look, xid))
    before = numbers_in(state.numbers)
    # Most likely it is older than the DDL that makes it uncertain.
    return Numbering(before if len(before) == len(names) else [0] * len(names), False)


def key_names(
    state: LookState | None, names: Sequence[str], numbers: Sequence[int], look: TableLook
) -> set[str]:
    """The columns of the key, for a Relation message that does not say them.

    A key that has come since the last look may be younger than the message: then rows have the one
    before. Without a key they are compared as a whole, which is right at any time.
    """
    if state is None or state.constraint is None or look.constraint in (0, state.constraint):
        return {column.name for column in look.sent if column.key}
    before = numbers_in(state.keys) if state.constraint else []
    found = {name for name, number in zip(names, numbers, strict=True) if number in before}
    return found if len(found) == len(before) else set()


def _unseen_types(
    state: LookState, numbers: Collection[int], look: TableLook, xid: int
) -> tuple[tuple[int, int, str], ...]:
    unseen = [c for c in look.sent if c.number in numbers and c.number > state.looked]
    # Where a type was altered since, rows may have come before that: the next look must differ.
    since = {c.number for c in unseen if xid and c.types_xid and not _older(c.types_xid, xid)}
    return tuple(
        (number, labels, "" if number in since else sum_)
        for number, labels, sum_ in _type_states(unseen)
    )


def _older(xid: int, than: int) -> bool:
    """Whether a transaction has begun before another; their ids may have wrapped around."""
    return 0 < (than - xid) & 0xFFFFFFFF < 1 << 31


def _certain(state: LookState, count: int, look: TableLook) -> list[int] | None:
    sent = {column.number for column in look.sent}
    alive = {column.number for column in look.columns}
    before = numbers_in(state.numbers)
    still = [number for number in before if number in sent]
    dropped = [number for number in before if number not in alive]
    unsent = [number for number in before if number in alive and number not in sent]
    shown = [number for number in sent if number <= state.attributes and number not in before]
    if unsent or shown:
        return None
    new = [
        number
        for number in range(state.attributes + 1, look.attributes + 1)
        if number in sent or number not in alive
    ]
    more = count - len(still)
    if more == 0:
        return still
    if more == len(dropped) + len(new):
        return sorted([*still, *dropped, *new])
    if dropped or not sent.issuperset(new) or not 0 < more < len(new):
        return None
    return still + new[:more]


def spans(numbers: Iterable[int]) -> str:
    """Numbers as spans: 1-7,9."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def numbers_in(text: str) -> list[int]:
    """The numbers of `spans`."""
    found: list[int] = []
    for span in filter(None, text.split(",")):
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def missing_value(text: str) -> str:
    """The one element of an array, which attmissingval is, as its type prints it."""
    inner = text[1:-1]
    if inner[:1] != '"':
        return inner
    return inner[1:-1].replace('\\"', '"').replace("\\\\", "\\")


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()


class DdlMessage(msgspec.Struct, frozen=True):
    """What the event trigger of `ddl` writes."""

    tag: str
    sql: str
    tables: tuple[TableLook, ...]


class LookMessage(msgspec.Struct, frozen=True):
    """What we write into the stream after a look at the catalogs."""

    tables: tuple[TableLook, ...] = ()
    gone: tuple[TableLook, ...] = ()  # by the names they had


def as_relation(look: TableLook) -> WalRelation:
    """What the Relation message will say when the next row comes."""
    columns = tuple(RelationColumn(c.name, c.key, c.type_id, c.modifier) for c in look.sent)
    return WalRelation(look.oid, look.schema, look.name, look.identity, columns)


_Named = TypeVar("_Named", WalRelation, TableLook)


def placed(found: _Named, path: str) -> _Named:
    """The same under the name by which its rows are captured, whatever it is called just now."""
    if path == table_path(found.schema, found.name):
        return found
    schema, name = split_path(path)
    return msgspec.structs.replace(found, schema=schema, name=name)
