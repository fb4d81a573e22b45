"""One row's values taken out of the log: found by key, rewritten, and searched for afterwards."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from ..change import record
from ..change.block import BlockRows, RowBlock
from ..change.erasure import (
    KeyValues,
    RowImages,
    ValuePattern,
    columns_in,
    has_raw_row,
    texts_in,
    without_old_values,
    without_values,
)
from ..change.event import Change, Op, Table
from ..change.path import table_path, unquoted
from ..errors import ConfigError, nearest
from .reader import LogReader, Piece
from .writer import Log

COMMON = 100  # changes of others that have a value, beyond which it says nothing of the row
MESSAGES = "messages of the database"

_encode = msgspec.msgpack.Encoder().encode
_TRUNCATE, _MESSAGE = Op.TRUNCATE.value.encode(), Op.MESSAGE.value.encode()
_ROW_OPS = frozenset(op.value for op in (Op.INSERT, Op.READ, Op.UPDATE, Op.DELETE))


class _Fields(NamedTuple):
    """A record of a row, and under which sequence it stands."""

    sequence: int
    fields: tuple[Any, ...]

    @property
    def images(self) -> RowImages:
        found = (self.fields[at] for at in _IMAGES)
        return RowImages._make(found)

    def with_images(self, images: RowImages) -> bytes:
        """The record with other images."""
        changed = dict(zip(_IMAGES, images, strict=True))
        return _encode([changed.get(at, value) for at, value in enumerate(self.fields)])


_IMAGES = (record.BEFORE_KIND, record.BEFORE, record.AFTER, record.UNCHANGED)


@dataclass(frozen=True, slots=True)
class _BlockRows:
    """The rows of a block (from 0) that are one row, and the block's first sequence."""

    first: int
    block: RowBlock
    rows: frozenset[int]

    def rows_but(self, kept: int) -> frozenset[int]:
        """Those whose values go."""
        return self.rows - {kept - self.first}


@dataclass(frozen=True, slots=True)
class RowHistory:
    """What a log has of one row."""

    table: Table  # its newest version
    key: KeyValues
    changes: tuple[Change, ...]  # under this key, in order
    records: tuple[_Fields, ...]  # those of them that are no rows of a block
    blocks: tuple["_BlockRows", ...]
    emptied: int  # the last change that emptied the table; 0: none did
    others: tuple[str, ...]  # keys that the row had before, or has since
    searched: int  # changes
    undecoded: int = 0  # rows of the table that the log keeps as they came: one may be the row
    rekeyed: int = 0  # changes under another key of the table that have the values of this one
    stays: frozenset[str] = frozenset()  # columns by which sinks find their rows, as by the key
    lives_on: frozenset[int] = frozenset()  # changes that gave it another key, which it still has

    @property
    def last(self) -> Change | None:
        """Its last change; None: the log has none."""
        return self.changes[-1] if self.changes else None

    @property
    def gone(self) -> bool:
        """Whether its table no longer has it, as far as the log tells."""
        last = self.last
        if last is None:
            return False
        return last.op is Op.DELETE or last.sequence < self.emptied or not self.key.are_in(last.key)

    @property
    def emptied_away(self) -> bool:
        """Whether it is gone only because its table was emptied, which also begins a snapshot."""
        last = self.last
        return (
            last is not None
            and last.sequence < self.emptied
            and last.op is not Op.DELETE
            and self.key.are_in(last.key)
        )

    @property
    def kept(self) -> int:
        """The sequence of the change whose new values stay, because the row has them; 0: none."""
        return 0 if self.last is None or self.gone else self.last.sequence

    @property
    def places(self) -> list[int]:
        """The sequences under which its values stand."""
        return [*(each.sequence for each in self.records), *(each.first for each in self.blocks)]

    @property
    def sequences(self) -> frozenset[int]:
        """Those of its changes."""
        return frozenset(change.sequence for change in self.changes)

    def values(self) -> set[tuple[str, str]]:
        """The values that are to go: by column, those of old rows and of all rows but the last."""
        found = self._past()
        stays: set[str] = set(self.key.texts.values())
        stays.update(text for name, text in found if name in self.stays)
        if self.last is not None and self.kept:
            stays.update(text for _, text in texts_in(self.last.after, self.key))
        for change in self.changes:
            for name, raw in self._needed(change.sequence).items():
                if name in change.unchanged:
                    stays.update(text for _, text in texts_in(_object(name, raw), self.key))
        return {(name, text) for name, text in found if text not in stays}

    @property
    def staying(self) -> list[str]:
        """The columns that sinks need, those that have a value which would go else."""
        return sorted({name for name, _ in self._past()} & self.stays)

    def _past(self) -> set[tuple[str, str]]:
        """The values, by column, of old rows and of all rows but the last."""
        found: set[tuple[str, str]] = set()
        for change in self.changes:
            found.update(texts_in(change.before, self.key))
            if change.sequence != self.kept and self.key.are_in(change.key):
                found.update(texts_in(change.after, self.key))
        return found

    def _needed(self, sequence: int) -> dict[str, msgspec.Raw]:
        """What a change may lack that was sent before it; none: nobody needs it to be whole.

        Earlier changes lose their values, and a row that is still there has those that they sent.
        """
        sent: dict[str, msgspec.Raw] = {}
        if sequence == self.kept or sequence in self.lives_on:
            for change in self.changes:
                if self.emptied < change.sequence < sequence and self.key.are_in(change.key):
                    sent |= columns_in(change.after)
        return sent

    def erased(self) -> dict[int, bytes]:
        """What stands in the log in place of these changes; only what differs."""
        found: dict[int, bytes] = {}
        for each in self.records:
            moved_away = not self.key.are_in(each.fields[record.KEY])
            if each.sequence == self.kept or moved_away:
                images = without_old_values(
                    each.images, self.key, self._needed(each.sequence), self.stays
                )
            else:
                images = without_values(each.images, self.key, self.stays)
            if images != each.images:
                found[each.sequence] = each.with_images(images)
        for of_block in self.blocks:
            value = of_block.block.without_values(of_block.rows_but(self.kept), self.stays)
            if value != of_block.block.value:
                found[of_block.first] = value
        return found


def _object(name: str, value: msgspec.Raw) -> bytes:
    return msgspec.json.encode({name: value})


def versions_of(log: LogReader, name: str, source: str = "") -> list[Table]:
    """Every version of a table, oldest first; ConfigError: it is not known, or several are."""
    named, name = [each for each in log.tables() if each.name], unquoted(name)
    found = [
        each for each in named if name in (each.name, each.path) and source in ("", each.source)
    ]
    known = sorted({each.path for each in named})
    if not found:
        raise ConfigError(f"the log has no table {name}{nearest(name, known)}")
    tables = sorted({(each.source, each.schema, each.name) for each in found})
    if len(tables) > 1:
        listed = ", ".join(f"{table_path(*path)} of {origin}" for origin, *path in tables)
        raise ConfigError(
            f"{name} may be several tables: {listed}",
            hint="Name the table with its schema, and its source with --source.",
        )
    return found


def former_names(log: LogReader, table: Table) -> dict[str, list[Table]]:
    """The versions of a table under names that it had before, or has since."""
    found: dict[str, list[Table]] = {}
    for each in log.tables():
        same = (each.source, each.origin, each.database, each.relation)
        own = same == (table.source, table.origin, table.database, table.relation)
        if own and each.relation and each.name and _named(each) != _named(table):
            found.setdefault(_named(each), []).append(each)
    return found


def valued(log: LogReader, versions: Sequence[Table], key: KeyValues) -> int:
    """How many changes of these versions have values of a row, or may."""
    history = _found(log, versions, key)
    images = [(change.before, change.after) for change in history.changes]
    return history.rekeyed + sum(any(any(texts_in(i, key)) for i in each) for each in images)


def find(
    log: LogReader,
    versions: Sequence[Table],
    key: KeyValues,
    stays: frozenset[str] = frozenset(),
) -> RowHistory:
    """Everything that a log has of a row; one pass over the log.

    `stays` names columns that sinks need as they need the key, so their values do not go.
    """
    found = _found(log, versions, key)
    moves = [change for change in found.changes if not key.are_in(change.key)]
    lives_on = {
        change.sequence
        for change in moves
        if change.unchanged and _is_there(log, versions, change.key)
    }
    return replace(found, stays=stays, lives_on=frozenset(lives_on))


def _found(log: LogReader, versions: Sequence[Table], key: KeyValues) -> RowHistory:
    search = _Search(log, {each.version: each for each in versions}, key)
    for part in parts(log):
        search.take(part)
    return search.found(versions[-1])


def _is_there(log: LogReader, versions: Sequence[Table], key: bytes | None) -> bool:
    """Whether the table has the row that was given this key, under it or under a later one."""
    seen: set[bytes] = set()
    while key is not None and key not in seen:
        seen.add(key)
        row = _found(log, versions, KeyValues.of(key))
        if not row.gone:
            return True
        last = row.last
        moved = last and last.op is Op.UPDATE and last.sequence > row.emptied
        key = last.key if last and moved else None
    return False


def parts(log: LogReader) -> Iterator[Piece | BlockRows]:
    """The whole log as it is stored."""
    after = log.first_sequence - 1
    while (part := log.stored(after, upto=log.latest_sequence)) is not None:
        yield part
        after = part.last


class _Search:
    def __init__(self, log: LogReader, tables: Mapping[int, Table], key: KeyValues) -> None:
        self._log, self._tables, self._key = log, tables, key
        self._changes: list[Change] = []
        self._records: list[_Fields] = []
        self._blocks: dict[int, _BlockRows] = {}
        self._others: dict[str, None] = {}
        self._emptied = self._searched = self._undecoded = self._rekeyed = 0

    def take(self, part: Piece | BlockRows) -> None:
        self._searched += part.count
        if isinstance(part, BlockRows):
            if part.block.head.table in self._tables:
                self._take_block(part)
        elif self._may_be_in(part.records):
            rows = record.rows(part.records, part.count)
            for sequence, fields in enumerate(rows, part.first):
                if fields[record.TABLE] in self._tables:
                    self._take_record(sequence, fields)

    def _may_be_in(self, records: bytes) -> bool:
        return (
            _TRUNCATE in records
            or _MESSAGE in records
            or all(needle in records for needle in self._key.needles)
        )

    def _take_record(self, sequence: int, fields: tuple[Any, ...]) -> None:
        key, before, op = fields[record.KEY], fields[record.BEFORE], fields[record.OP]
        if op == Op.TRUNCATE.value:
            self._emptied = sequence
        if op == Op.MESSAGE.value and has_raw_row(fields[record.AFTER]):
            self._undecoded += 1
        if op not in _ROW_OPS or key is None:
            return
        owns, owned = self._key.are_in(key), self._key.are_in(before)
        if not (owns or owned):
            if self._has_other_key(fields[record.TABLE]):
                self._rekeyed += any(map(self._key.may_stand_in, (before, fields[record.AFTER])))
            return
        found = _Fields(sequence, fields)
        self._records.append(found)
        self._add(found.sequence)
        old = {n: v for n, v in columns_in(before).items() if n in self._key.texts}
        if old and owns != owned:
            other = _object_text(old) if owns else key.decode()
            self._others[other] = None

    def _has_other_key(self, version: int) -> bool:
        return set(self._tables[version].key) != self._key.texts.keys()

    def _take_block(self, part: BlockRows) -> None:
        block, first = part.block, part.first - part.begin
        names = [column.name for column in block.head.columns if column.key]
        # A trim hides the first rows of a block; they are on the disk all the same.
        keys = enumerate(block.images(names, 0, block.count))
        rows = frozenset(row for row, key in keys if self._key.are_in(key))
        if rows:
            self._blocks[first] = _BlockRows(first, block, rows)
        elif self._has_other_key(block.head.table):
            images = block.images([column.name for column in block.head.columns], 0, block.count)
            self._rekeyed += sum(map(self._key.may_stand_in, images))
        for row in sorted(rows):
            if part.begin <= row < part.begin + part.count:
                self._add(first + row)

    def _add(self, sequence: int) -> None:
        self._changes += self._log.read(sequence - 1, limit=1)

    def found(self, newest: Table) -> RowHistory:
        return RowHistory(
            newest,
            self._key,
            tuple(self._changes),
            tuple(self._records),
            tuple(self._blocks.values()),
            self._emptied,
            tuple(self._others),
            self._searched,
            self._undecoded,
            self._rekeyed,
        )


def _object_text(columns: Mapping[str, msgspec.Raw]) -> str:
    return msgspec.json.encode(columns).decode()


def erase(log: Log, history: RowHistory) -> int:
    """Take the row's values out of the log, and off its disk; returns how many changes had some."""
    values = history.erased()
    if values:
        log.rewrite(values)
    # Also where nothing was left to rewrite: an earlier call may have been interrupted before this.
    blocks = {each.first: each for each in history.blocks}
    log.purge(history.places)
    return sum(
        len(blocks[first].rows_but(history.kept)) if first in blocks else 1 for first in values
    )


# --- searching -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValueSpread:
    """Which of a row's values are its own alone, and where copies of others are."""

    own: frozenset[str]  # no other change has them, so that finding one in a file says whose it is
    copies: Counter[str]  # by table: changes of other rows that have one of the rarer values


def spread(log: LogReader, history: RowHistory) -> ValueSpread:
    """Look through the whole log for the row's values in changes that are not its own.

    A value that is common, such as a country, is looked for only until that is clear.
    """
    texts = ValuePattern(text for _, text in history.values()).texts
    pattern, common, own = ValuePattern(texts), set[str](), history.sequences
    having: dict[str, list[int]] = {text: [] for text in texts}  # versions of tables
    for part in parts(log):
        content = part.block.value if isinstance(part, BlockRows) else part.records
        if not pattern.found_in(content):
            continue
        values = part.records() if isinstance(part, BlockRows) else _single(log, part)
        for sequence, value in enumerate(values, part.first):
            if sequence in own:
                continue
            for text in pattern.found_in(value):
                having[text].append(record.head(value).table)
                if len(having[text]) > COMMON:
                    common.add(text)
                    pattern = ValuePattern(texts - common)
    tables = {each.version: each for each in log.tables()}
    rare = (version for text in texts - common for version in having[text])
    copies = Counter(_named(tables[version]) for version in rare)
    return ValueSpread(frozenset(text for text in texts if not having[text]), copies)


def _named(table: Table) -> str:
    return table.path if table.name else MESSAGES


def _single(log: LogReader, part: Piece) -> list[bytes]:
    return [value for _, value in log.records(part.first - 1, limit=part.count)]


@dataclass(frozen=True, slots=True)
class LogSearch:
    """What a log has after an erasure."""

    left: tuple[int, ...]  # changes of the row that still have a value which was to go
    copies: tuple[int, ...]  # those of which the disk may still have an older value
    annotated: tuple[int, ...]  # those whose transaction has such a value in its annotations
    annotations: frozenset[str]  # these values


def search(log: Log, versions: Sequence[Table], history: RowHistory) -> LogSearch:
    """Look through the whole log for the row, by its key."""
    again, key = find(log, versions, history.key), history.key

    def has_values(image: bytes | None) -> bool:
        return any(name not in history.stays for name, _ in texts_in(image, key))

    left = [
        change.sequence
        for change in again.changes
        if has_values(change.before)
        or (change.sequence != again.kept and key.are_in(change.key) and has_values(change.after))
    ]
    pattern = ValuePattern(text for _, text in history.values())
    annotated = {
        change.sequence: pattern.found_in(change.transaction.metadata or b"")
        for change in again.changes
    }
    return LogSearch(
        tuple(left),
        tuple(log.replaced_copies(history.places)),
        tuple(sequence for sequence, found in annotated.items() if found),
        frozenset().union(*annotated.values()),
    )
