"""Keys that rows leave and come to, for whoever knows rows by their keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from ...change.event import PIECE, BeforeKind, Change, Op, Table, change_id, same_columns
from ...formats.key import previous_primary_key

# A row that came to a key is known for so many changes of its transaction, and at most for twice
# as many. Each takes about 200 bytes, and is looked at again wherever reading begins.
REMEMBERED = 2 * PIECE

_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode
_INSERT, _UPDATE, _DELETE = Op.INSERT, Op.UPDATE, Op.DELETE
_FULL = BeforeKind.FULL


class _OldKeyDeleted(Change, frozen=True, gc=False):
    """The DELETE of a row's old key: an event of its own, so it has an id of its own."""

    @property
    def id(self) -> str:
        """Another one than that of the change, and always the same."""
        at = f"{self.transaction.id}|old key"
        return change_id(self.table.origin, self.position, at, self.ordinal)


class _NewKeyInserted(Change, frozen=True, gc=False):
    """The INSERT of a row at its new key; its id is that of the change."""


def place(change: Change) -> int:
    """The place of a change's event: the INSERT follows the DELETE and its tombstone."""
    return 2 if type(change) is _NewKeyInserted else 0


def split(changes: Iterable[Change]) -> Iterator[Change]:
    """Changes, and in place of one that moves a row to another key, two."""
    for change in changes:
        if change.op is _UPDATE and change.before and previous_primary_key(change) is not None:
            yield from _moved(change)
        else:
            yield change


def _moved(change: Change) -> tuple[_OldKeyDeleted, _NewKeyInserted]:
    fields = msgspec.structs.asdict(change)
    assert change.before
    assert change.key
    old = _image(change.before)
    key = _text({name: old[name] for name in _image(change.key)})
    left = {"op": Op.DELETE, "key": key, "after": None, "changed": None, "unchanged": ()}
    came = {"op": Op.INSERT, "before": None, "before_kind": BeforeKind.NONE, "changed": None}
    return _OldKeyDeleted(**(fields | left)), _NewKeyInserted(**(fields | came))


# --- keys with several rows ----------------------------------------------------------------------

_RowHashes = dict[int, tuple[int | None, ...]]
"""By the hash of a key: those of the rows that came to it, in order; None: any row may be it."""


class PassedKeys:
    """Rows that have come to a key in a transaction.

    Where a key is checked at the end of a transaction (and old rows come whole), a row may come to
    the key of another that leaves it later. What happens to the other until then, and its DELETE,
    must not take the new one away from whoever knows rows by their keys.

    A transaction is divided into spans of `REMEMBERED` changes, and what came in the present one
    and in the one before it is known. So what is shown of a change depends on the log alone, and
    not on where reading began, if it has gone `back` first.
    """

    def __init__(self) -> None:
        self._transaction = ""
        self._span = 0
        self._tables: dict[tuple[str, str], _Occupied] = {}
        self._table: Table | None = None  # the last one …
        self._last = _Occupied()  # … and its keys

    @staticmethod
    def back(ordinal: int) -> int:
        """How many changes before this one of its transaction are to be looked at first."""
        span = (ordinal - 1) // REMEMBERED
        return ordinal - 1 - max(span - 1, 0) * REMEMBERED

    def shows(self, change: Change, row: str) -> bool:
        """Whether a change of a row is of the one that has the key now."""
        op = change.op
        if op is _INSERT:
            self._of(change).add(hash(row), _hash(change))
        elif op is _UPDATE or op is _DELETE:
            keys = self._of(change)
            if hash(row) not in keys:
                return True
            if op is _DELETE:
                return keys.leaves(hash(row), _old_hash(change))
            if previous_primary_key(change) is None:
                return keys.leaves(hash(row), _old_hash(change), stays=(_hash(change),))
            keys.add(hash(row), _hash(change))  # it was not split
        return True

    def empty(self, change: Change) -> None:
        """A table has lost its rows, or not: after a TRUNCATE or a SCHEMA."""
        if change.op is Op.TRUNCATE or _drops(change.after or b"{}").dropped:
            self._of(change).clear()

    def _of(self, change: Change) -> _Occupied:
        span = (change.ordinal - 1) // REMEMBERED
        if change.transaction.id != self._transaction:
            self._transaction, self._span = change.transaction.id, span
            self._tables.clear()
            self._table = None
        elif span != self._span:
            for each in self._tables.values():
                each.next_span(adjoins=span == self._span + 1)
            self._span = span
        if change.table is not self._table:
            self._table = change.table
            self._last = self._tables.setdefault(
                (change.table.source, change.table.path), _Occupied()
            )
            self._last.expect(change.table)
        return self._last


class _Occupied:
    """The keys of a table to which rows have come."""

    __slots__ = ("_earlier", "_recent", "_table")

    def __init__(self) -> None:
        self._recent: _RowHashes = {}  # in this span …
        self._earlier: _RowHashes = {}  # … and in the one before it
        self._table: Table | None = None

    def __contains__(self, key: int) -> bool:
        return key in self._recent or key in self._earlier

    def expect(self, table: Table) -> None:
        """Rows come as this version of the table has them."""
        if self._table and not same_columns(self._table.columns, table.columns):
            # Old rows look different from now on: any of them may be the one that came.
            self._recent = _unknown(self._recent)
            self._earlier = _unknown(self._earlier)
        self._table = table

    def next_span(self, *, adjoins: bool) -> None:
        """Forget what is older than the span that ends."""
        self._earlier = self._recent if adjoins else {}
        self._recent = {}

    def clear(self) -> None:
        """No key has a row."""
        self._recent, self._earlier = {}, {}

    def add(self, key: int, row: int | None) -> None:
        """A row has come."""
        self._recent[key] = (*self._recent.get(key, ()), row)

    def leaves(self, key: int, row: int | None, stays: tuple[int | None, ...] = ()) -> bool:
        """A row leaves a key, or `stays` and is another: whether it is the one that came last."""
        last = True
        for rows in (self._recent, self._earlier):
            known = rows.get(key, ())
            for at in reversed(range(len(known))):
                if row is None or known[at] is None or known[at] == row:
                    rows[key] = (*known[:at], *stays, *known[at + 1 :])
                    if not rows[key]:
                        del rows[key]
                    return last and at == len(known) - 1
            last = last and not known
        return last


def _unknown(rows: _RowHashes) -> _RowHashes:
    return {key: (None,) * len(known) for key, known in rows.items()}


def _hash(change: Change) -> int | None:
    """That of a row as it is now; None: not all of it is known."""
    return None if change.unchanged or not change.after else _hash_of(change.after)


def _old_hash(change: Change) -> int | None:
    whole = change.before and change.before_kind is _FULL
    return _hash_of(change.before or b"") if whole else None


def _hash_of(image: bytes) -> int:
    # Whatever the order of its columns is.
    return hash(frozenset([(name, bytes(value)) for name, value in _image(image).items()]))


class _Drop(msgspec.Struct):
    """What a SCHEMA says of a table that is gone."""

    dropped: bool = False


_drops = msgspec.json.Decoder(_Drop).decode
