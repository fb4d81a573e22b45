"""Columns that never reach the log: left out, or masked, before anything is stored.

This runs in the source's own process. The source knows its tables as they are; the log knows them
with the columns that are left, under the same versions. Of what is no row, a source with such
rules hands over only what cannot show a value: no DDL text and no raw bytes, of any table, since
a statement may name several.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from ..change import glob, record
from ..change.block import LARGEST, MARK, RowBlock, json_text
from ..change.event import Batch, Column, Op, Table
from ..change.path import path_part, path_parts, split_path, table_path, unquoted
from ..change.record import Records
from ..errors import ConfigError
from ..transforms.rules import Mask, coded_column, described, value_text
from . import Register, Source, Status, Stream

ColumnMask = Mask | Literal["keep"] | None
"""What stands for the values of a column: a code, themselves, or null."""

_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_to_json = msgspec.json.Encoder().encode
_to_record = msgspec.msgpack.Encoder().encode
_ROW_OPS = frozenset((Op.INSERT, Op.UPDATE, Op.DELETE, Op.READ))
_OUTBOX = "outbox"  # the schema of the events that an outbox's rows become
_OUR_MESSAGES = "headrace."  # prefix of messages that Headrace's own triggers write, such as DDL


class OutboxColumns(Protocol):
    """An outbox, whose rows become events of other tables."""

    @property
    def table(self) -> str:
        """schema.table."""
        ...

    @property
    def aggregate_type(self) -> str:
        """The column whose value is the name of an event's table."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """The columns that have another name in an event."""
        ...


@dataclass(frozen=True, slots=True)
class ColumnRules:
    """Which columns of a source are left out, and which are masked; patterns of names.

    A name is `schema.table.column`, `table.column` or `column`; capitals do not count. What is
    left out is so whatever `mask` says; of the masks the first that matches counts.
    """

    exclude: tuple[str, ...] = ()
    mask: Mapping[str, ColumnMask] = field(default_factory=dict)
    outbox: OutboxColumns | None = None

    @classmethod
    def of_source(cls, source: object) -> "ColumnRules":
        """Those of a source's settings; one of somebody else's may have none."""
        return cls(
            getattr(source, "exclude_columns", ()),
            getattr(source, "mask", {}),
            getattr(source, "outbox", None),
        )

    def __bool__(self) -> bool:
        return bool(self.exclude or self.mask)

    def unmatched(self, tables: Sequence[Table]) -> list[str]:
        """The patterns that no column matches."""
        return [
            pattern
            for pattern in (*self.exclude, *self.mask)
            if not any(
                self._means(pattern, table, name) for table in tables for name in _names(table)
            )
        ]

    def copies(self, tables: Sequence[Table]) -> Iterator[tuple[str, str]]:
        """Columns that no rule is about, and the hidden ones whose values foreign keys have."""
        hidden = {table.path: self.of(table).stored.hidden for table in tables}
        for table in tables:
            for key in table.references:
                parent = table_path(key.schema, key.table)
                for name, named in zip(key.columns, key.parent_columns, strict=True):
                    if named in hidden.get(parent, ()) and not self._decides(table, name):
                        yield f"{table.path}.{name}", f"{parent}.{named}"

    def of(self, table: Table) -> "RedactedTable":
        """What happens to a table; ConfigError: its key would be lost."""
        names = _names(table)
        excluded = [name for name in names if self._matching(self.exclude, table, name)]
        masks = {name: self._mask(table, name) for name in names if name not in excluded}
        hidden = {name: mask for name, mask in masks.items() if mask != "keep"}
        for name in table.key:
            if name in excluded or hidden.get(name, "keep") is None:
                setting = "exclude_columns" if name in excluded else "mask"
                raise ConfigError(
                    f"{setting} takes {name} away, which is of the key of {table.path}",
                    hint="A key may be masked with hmac, and neither be left out nor be null.",
                )
        if self.outbox and table.path == self.outbox.table:
            self._expect_names(self.outbox, {*excluded, *hidden})
        return RedactedTable.of(table, frozenset(excluded), hidden)

    def hides(self, schema: str, table: str, column: str) -> bool:
        """Whether a column's values are not stored as they are."""
        only = Table("", "", "", "", schema, table, (Column(column, ""),))
        return bool(self.of(only).stored.hidden)

    def masks_key(self, schema: str, table: str, key: Sequence[str]) -> bool:
        """Whether the key of a table is not stored as it is."""
        columns = tuple(Column(name, "", key=True) for name in key)
        return bool(self.of(Table("", "", "", "", schema, table, columns)).masks)

    def expect_no_rename(self, known: Sequence[Table], table: Table) -> None:
        """ConfigError: what was hidden may have another name now, under which it would be stored.

        `known`: the versions of tables in the log, the latest last; `table` as it would be stored.
        """
        for same in (_same_name, _same_number):
            before = next((each for each in reversed(known) if same(each, table)), None)
            if before is not None and before.hidden:
                self._expect_known(before, table)

    def _expect_known(self, before: Table, table: Table) -> None:
        names = _names(table)
        gone = [name for name in before.hidden if name not in {*names, *table.hidden}]
        had = {*_names(before), *before.hidden}
        moved = before.path != table.path  # what was hidden has its name in another table
        swapped = _swapped(before, table)
        for name in [*swapped, *names]:
            suspect = (gone and name not in had) or (moved and name in before.hidden)
            if (suspect or name in swapped) and not self._decides(table, name):
                own = name if name in before.hidden else next(iter(gone), "")
                former = own if suspect else swapped[name]
                raise ConfigError(
                    f"{table.path}.{name} may be {before.path}.{former} renamed, whose values "
                    "must not be stored",
                    hint=f"Add {table.path}.{name} to exclude_columns or to mask of SOURCE; with "
                    "`keep` as its mask, its values are stored.",
                )

    def _decides(self, table: Table, name: str) -> bool:
        """Whether a rule is about a column, be it to keep it."""
        return bool(self._matching((*self.exclude, *self.mask), table, name))

    def _mask(self, table: Table, name: str) -> ColumnMask:
        matching = self._matching(self.mask, table, name)
        return self.mask[matching[0]] if matching else "keep"

    def _matching(
        self, patterns: Sequence[str] | Mapping[str, ColumnMask], table: Table, name: str
    ) -> list[str]:
        return [pattern for pattern in patterns if self._means(pattern, table, name)]

    def _means(self, pattern: str, table: Table, column: str) -> bool:
        """Whether a pattern means a column of a table, or of the outbox that it comes from."""
        if _matches(pattern, (table.schema, table.name, column)):
            return True
        if self.outbox is None or table.schema != _OUTBOX:
            return False
        former = {event: own for own, event in self.outbox.names.items()}.get(column, column)
        schema, name = split_path(self.outbox.table)
        return _matches(pattern, (schema, name, former))

    def _expect_names(self, outbox: OutboxColumns, hidden: set[str]) -> None:
        if outbox.aggregate_type in hidden:
            raise ConfigError(
                f"{outbox.table}.{outbox.aggregate_type} cannot be left out or masked: it is the "
                "name of the events' table",
                hint="Leave the outbox out of `tables`, or let the column be stored.",
            )


def _matches(pattern: str, place: tuple[str, str, str]) -> bool:
    if '"' in (pattern := unquoted(pattern)):  # they say which dots belong to a name
        named = place[-len([*path_parts(pattern)]) :]
        return glob.matches(".".join(map(path_part, named)).lower(), pattern.lower())
    named = place[-(min(pattern.count("."), 2) + 1) :]
    return glob.matches(".".join(named).lower(), pattern.lower())


def _names(table: Table) -> list[str]:
    return [column.name for column in table.columns]


def _swapped(before: Table, table: Table) -> dict[str, str]:
    """Columns that stand where a hidden one would stand, which has its name elsewhere now.

    A column that is renamed keeps its place, so a name that is hidden and has moved may have been
    given to another column: by exchanging two names, or by adding a column of that name.
    """
    old, new = before.order, table.order
    plain = [name for name in old if name in new and name not in before.hidden]
    found: dict[str, str] = {}
    for each in (name for name in before.hidden if name in old and name in new):
        was, now = old.index(each), new.index(each)
        passed = [n for n in plain if (old.index(n) < was) != (new.index(n) < now)]
        last = max((new.index(n) for n in plain if new.index(n) < now), default=-1)
        between = new if passed else new[last + 1 : now]
        found |= dict.fromkeys([*(n for n in between if n not in old), *passed], each)
    return found


def _same_name(one: Table, other: Table) -> bool:
    return (one.source, one.path) == (other.source, other.path)


def _same_number(one: Table, other: Table) -> bool:
    """Whether two versions are of one table of the database, whatever its name is."""
    numbers = [(each.source, each.origin, each.database, each.relation) for each in (one, other)]
    return other.relation != 0 and numbers[0] == numbers[1]


@dataclass(frozen=True, slots=True)
class RedactedTable:
    """One version of a table as it is stored, and what is made of its changes."""

    stored: Table
    excluded: frozenset[str]
    masks: Mapping[str, Mask | None]

    @classmethod
    def of(
        cls, table: Table, excluded: frozenset[str], masks: Mapping[str, Mask | None]
    ) -> "RedactedTable":
        """A table without these columns, and with codes or null in those."""
        kept = [each for each in table.columns if each.name not in excluded]
        columns = tuple(
            coded_column(each, masks[each.name]) if each.name in masks else each for each in kept
        )
        plain = {each.name for each in kept} - masks.keys()
        hidden = tuple(name for name in _names(table) if name not in plain)
        stored = msgspec.structs.replace(
            table,
            columns=columns,
            references=tuple(each for each in table.references if plain >= set(each.columns)),
            hidden=hidden,
            order=tuple(_names(table)) if hidden else (),
        )
        return cls(stored, excluded, masks)

    def record(self, value: bytes, op: str) -> bytes:
        """The record of a change, with what may be stored of it."""
        if op in _ROW_OPS and not self.stored.hidden:
            return value
        [fields] = record.rows(value, 1)
        made: list[Any] = list(fields)
        if op not in _ROW_OPS:
            made[record.AFTER] = self._content(fields[record.AFTER])
            return _to_record(made)
        for at in (record.KEY, record.BEFORE, record.AFTER):
            made[at] = self._redacted(fields[at])
        for at in (record.CHANGED, record.UNCHANGED):
            listed = fields[at]
            made[at] = listed and tuple(name for name in listed if name not in self.excluded)
        return _to_record(made)

    def block(self, block: RowBlock) -> list[bytes]:
        """The values of the log that stand for the rows of a block."""
        if not self.stored.hidden:
            return [block.value]
        columns = []
        for each in block.head.columns:
            if each.name in self.excluded:
                continue
            if each.name in self.masks:
                images = map(_image, block.images([each.name], 0, block.count))
                codes = [self._code(each.name, bytes(image[each.name])) for image in images]
                text = json_text([_to_json(code) for code in codes])
            else:
                text = block.column(each.name)
            assert text is not None
            columns.append((each, text))
        packed = block.packed_with(columns)
        if len(packed) <= LARGEST:
            return [packed]
        # Codes are longer than most values.
        return [self.record(value, Op.READ) for value in block.records(0, block.count)]

    def _content(self, after: bytes | None) -> bytes | None:
        """What a change says that is not of a row; a message of the application says all."""
        prefix = "" if self.stored.name else msgspec.json.decode(after or b"{}").get("prefix", "")
        if prefix and not prefix.startswith(_OUR_MESSAGES):
            return after
        return after and described(after, self.stored)

    def _redacted(self, image: bytes | None) -> bytes | None:
        if image is None:
            return None
        values: dict[str, Any] = _image(image)
        for name in self.excluded & values.keys():
            del values[name]
        for name in self.masks.keys() & values.keys():
            values[name] = self._code(name, bytes(values[name]))
        return _to_json(values)

    def _code(self, name: str, value: bytes) -> str | None:
        """What stands for a value, which is JSON."""
        mask = self.masks[name]
        return None if mask is None or value == b"null" else mask.code(value_text(value))


def stored_tables(source: Source) -> list[Table]:
    """The tables that would be captured now, as the log would know them."""
    rules = ColumnRules.of_source(source)
    return [rules.of(table).stored for table in source.captured_tables()]


def open_redacted(source: Source, resume: bytes | None, register: Register) -> Stream:
    """Open a source; its batches have only what its settings let be stored."""
    redaction = Redaction.of_source(source, register)
    if redaction is None:
        return source.open(resume, register)
    return _RedactedStream(source.open(resume, redaction.register), redaction)


def unexpected(error: BaseException, rules: ColumnRules) -> str:
    """How an error of ours is reported; its text may have a value, which rules may be about."""
    if not rules:
        return repr(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


class Redaction:
    """What a source's settings make of its batches; it knows the tables of a stream, by version."""

    def __init__(self, rules: ColumnRules, register: Register) -> None:
        self._rules = rules
        self._register = register
        self._redacted: dict[int, RedactedTable] = {}
        self._stored: dict[int, Table] = {}

    @classmethod
    def of_source(cls, source: object, register: Register) -> "Redaction | None":
        """That of a source's settings; None: all may be stored."""
        rules = ColumnRules.of_source(source)
        return cls(rules, register) if rules else None

    def register(self, table: Table) -> Table:
        """The table with the version that its stored columns have."""
        found = self._rules.of(table)
        known = self._register(found.stored)
        self._redacted[known.version], self._stored[known.version] = found, known
        return msgspec.structs.replace(table, version=known.version)

    def batch(self, batch: Batch) -> Batch:
        """A batch with what may be stored of it."""
        values, runs = record.encode_runs(batch.changes)
        made = [each for value in values for each in self._values(value)]
        return Batch(Records(made, self._stored, runs), batch.resume)

    def _values(self, value: bytes) -> list[bytes]:
        # A version that was not registered here is an error: nobody knows what to hide of it.
        if value[0] == MARK:
            block = RowBlock(value)
            return self._redacted[block.head.table].block(block)
        [head] = record.heads(value, 1)
        return [self._redacted[head.table].record(value, head.op)]


class _RedactedStream:
    """A stream of batches that may be stored."""

    def __init__(self, stream: Stream, redaction: Redaction) -> None:
        self._stream = stream
        self._redaction = redaction

    def __iter__(self) -> Iterator[Batch]:
        yield from map(self._redaction.batch, self._stream)

    def ack(self, resume: bytes) -> None:
        """Everything up to `resume` is durable."""
        self._stream.ack(resume)

    def status(self) -> Status:
        """How it is doing."""
        return self._stream.status()

    def close(self) -> None:
        """End the iteration."""
        self._stream.close()
