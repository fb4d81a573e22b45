"""What a batch does to the rows of a table: changes in their order, folded key by key.

    changes ─▶ Fold ─▶ versions of each key, and whether the table was emptied before them

A version that lacks columns (the source did not send them) takes them from the version before it
in the batch; what the batch does not have is left to the row that the table holds.

Each task folds the keys of its own share. A row that changes its key leaves one and takes another,
which may be in another share: each does its part.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self
from zlib import crc32

import msgspec

from ...change.event import Column
from ...change.record import AFTER, BEFORE, COMMIT_TIME, KEY, OP, UNCHANGED
from ...errors import TableFailed

ROW_OPS = frozenset(("INSERT", "READ", "UPDATE", "DELETE"))
_NEW = frozenset(("INSERT", "READ"))
_NOTHING: frozenset[str] = frozenset()
_MOST_DISPLACED = 100_000  # rows that the next fold knows of
_new_tuple = tuple.__new__  # past the constructor of a NamedTuple, which takes twice as long

_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode


SequencedRecord = tuple[int, tuple[Any, ...]]
"""A change as tasks take it: its sequence, and the fields of its record (`record.rows`)."""


class RowChange(NamedTuple):
    """What is looked at of a change."""

    sequence: int
    op: str
    key: bytes | None
    before: bytes | None
    after: bytes | None
    absent: Sequence[str]  # columns that `after` lacks
    commit_time: int

    @classmethod
    def of(cls, sequence: int, fields: Sequence[Any]) -> Self:
        """What a record of the log has of it."""
        positions = (OP, KEY, BEFORE, AFTER, UNCHANGED, COMMIT_TIME)
        return cls(sequence, *(fields[at] for at in positions))

    def as_record(self) -> SequencedRecord:
        """The change of a DataFrame in the form of the log's; fields that nobody reads are None."""
        fields: list[Any] = [None] * (UNCHANGED + 1)
        fields[OP], fields[COMMIT_TIME], fields[KEY] = self.op, self.commit_time, self.key
        fields[BEFORE], fields[AFTER], fields[UNCHANGED] = self.before, self.after, self.absent
        return self.sequence, tuple(fields)


class Version(NamedTuple):
    """A row as it is from a change on; `image` None: it is gone."""

    sequence: int
    commit_time: int
    image: bytes | None
    absent: frozenset[str] = _NOTHING  # to be taken from the table's row …
    base: bytes = b""  # … of this key


class _Displaced(NamedTuple):
    """What a key had when another row took it, in the middle of a transaction."""

    commit_time: int
    versions: list[Version] | None
    top: bytes | None = None  # the other row, where an earlier fold of the transaction has it …
    replaced: bool = False  # … and has put it in place of the row that the table had


class Share(NamedTuple):
    """Which keys a task has, of how many shares."""

    number: int
    of: int

    def has(self, key: bytes) -> bool:
        """Whether a key is in this share."""
        return share_of(key, self.of) == self.number


def share_of(key: bytes, shares: int) -> int:
    """The number of the share that a key is in."""
    return crc32(key) % shares


class RowKey:
    """The key of a table's rows: its own, or columns that a person chose."""

    def __init__(self, columns: Sequence[Column], *, chosen: bool) -> None:
        self.names = [column.name for column in columns]
        self.chosen = chosen
        self._read = _reader(self.names)

    def keys(self, change: RowChange) -> tuple[bytes, bytes | None]:
        """The key of a change's row, and the one that the row had before, if that is another."""
        key, old = self._chosen_keys(change) if self.chosen else self._own_keys(change)
        if key is None:
            raise TableFailed("a change comes without its key")
        return key, old if old != key else None

    def _own_keys(self, change: RowChange) -> tuple[bytes | None, bytes | None]:
        if change.before is None:
            return change.key, None
        old = self._read(change.before)
        return change.key or old, old if change.op == "UPDATE" else None

    def _chosen_keys(self, change: RowChange) -> tuple[bytes, bytes | None]:
        if change.op in _NEW:
            return self._complete(_image(change.after or b"{}"), change), None
        # A source that sends no old row has not changed its own key.
        old = _image(change.before or change.key or b"{}")
        was = self._complete(old, change)
        if change.op == "DELETE":
            return was, None
        return self._complete({**old, **_image(change.after or b"{}")}, change), was

    def _complete(self, image: Mapping[str, msgspec.Raw], change: RowChange) -> bytes:
        for name in self.names:
            if name not in image:
                raise TableFailed(
                    f"change {change.sequence} comes without the value of {name}, which keys names",
                    hint="Run `ALTER TABLE … REPLICA IDENTITY FULL` on the server, then "
                    "`headrace snapshot SOURCE TABLE`.",
                )
        return _text({name: image[name] for name in self.names})


def _reader(names: Sequence[str]) -> Callable[[bytes], bytes | None]:
    """Finds the key within an image, written as capture writes keys; None: not all of it."""

    def read(image: bytes) -> bytes | None:
        values = _image(image)
        if not all(name in values for name in names):
            return None
        return _text({name: values[name] for name in names})

    return read


class Fold:
    """The changes of one table in one share, folded."""

    def __init__(
        self, key: RowKey, share: Share, *, emptied: frozenset[int], every_version: bool
    ) -> None:
        """`emptied`: changes that empty the table; else than `every_version`: only the last."""
        self._emptied = emptied
        self._key = key
        self._share = share
        self._every = every_version
        self._plain = bool(key.names) and not key.chosen
        self.versions: dict[bytes, list[Version]] = {}
        self.emptied_time: int | None = None  # the commit time of the first TRUNCATE
        self.moves = False  # a row that is not whole has come from another share
        self.partial = False  # some version lacks columns
        self.size = 0  # bytes of images, about
        self._displaced: dict[bytes, _Displaced] = {}

    def extend(self, changes: Iterable[SequencedRecord]) -> None:
        """Take changes of rows in their order."""
        number, of = self._share
        plain, every, versions = self._plain, self._every, self.versions
        for sequence, fields in changes:
            key = fields[KEY]
            if (
                plain
                and key is not None
                and fields[BEFORE] is None
                and not fields[UNCHANGED]
                and (op := fields[OP]) in ROW_OPS
            ):
                # The usual change, and as often as there are changes.
                if crc32(key) % of == number:
                    image = fields[AFTER] if op != "DELETE" else None
                    whole = (sequence, fields[COMMIT_TIME], image, _NOTHING, b"")
                    version: Version = _new_tuple(Version, whole)
                    if every:
                        self._put(key, version)
                    else:
                        versions[key] = [version]
                        self.size += len(image or b"")
            else:
                self.add(RowChange.of(sequence, fields))

    def add(self, change: RowChange) -> None:
        """Take the next change."""
        sequence, op, key, before, after, absent, commit_time = change
        if op not in ROW_OPS:
            if sequence in self._emptied:
                self._empty(sequence, commit_time)
            return
        if not self._key.names:
            self._add_keyless(change)
            return
        left = None
        if before is not None or key is None or self._key.chosen:
            key, left = self._key.keys(change)
        if left is None and self._displaced and self._stays_below(key, change):
            return
        if left is not None and not self._key.chosen and self._share.has(key):
            known = self.versions.get(key)
            self._displaced[key] = _Displaced(commit_time, known and list(known))
        if self._share.has(key):
            image = None if op == "DELETE" else after
            if not absent or image is None:
                version = Version(sequence, commit_time, image)
            else:
                version = self._completed(change, image, left or key)
            self._put(key, version)
        elif left is not None and absent and self._share.has(left):
            self.moves = True
        # After the row at its new key, which may need what was there.
        if left is not None and self._share.has(left):
            self._leave(left, change)

    def _leave(self, key: bytes, change: RowChange) -> None:
        """Take a row from a key that it leaves for another one."""
        if not self._stays_below(key, change._replace(op="DELETE")):
            self._put(key, Version(change.sequence, change.commit_time, None))

    def _stays_below(self, key: bytes, change: RowChange) -> bool:
        """Whether a change is of one of two rows that have a key, and this is seen to.

        Where a key is checked at the end of a transaction, two rows may have it for a moment, as
        when two rows exchange their keys. The old row says which of them is meant.
        """
        known = self._displaced.get(key)
        if known is None or known.commit_time != change.commit_time or change.before is None:
            return False
        above = self.versions[key][-1].image if key in self.versions else known.top
        old, now = _image(change.before), _image(above or b"{}")
        if len(old) < len(now):
            return False  # the key alone, which is then always checked at once
        sequence, gone = change.sequence, change.op == "DELETE"
        if any(old[name] != now[name] for name in old if name in now):
            absent = _NOTHING if gone else frozenset(change.absent)
            self.partial = self.partial or bool(absent)
            image = None if gone else change.after
            below = Version(sequence, change.commit_time, image, absent, key)
            earlier = [each for each in known.versions or () if self._every]
            if earlier and earlier[-1].commit_time == change.commit_time:
                earlier.pop()
            self._displaced[key] = known._replace(versions=[*earlier, below])
            return True
        if gone:
            del self._displaced[key]
            self.versions.pop(key, None)
            if known.top is None and known.versions:
                self.versions[key] = known.versions
            elif known.versions:  # the table has the other one, which this now follows
                below = known.versions[-1]
                self.versions[key] = [
                    below._replace(sequence=sequence, commit_time=change.commit_time)
                ]
            elif known.replaced:
                raise TableFailed(
                    f"change {sequence} moves one of two rows with one key, in a transaction of "
                    "more rows than can be looked at together"
                )
            elif known.top is not None:
                return False  # the table has it, and loses it
        return gone

    def go_on_from(self, before: Self, replaced: Collection[bytes]) -> None:
        """Know which keys two rows may have, since the fold before this one has ended.

        `replaced` are keys of which the table had a row.
        """
        for key, below in list(before._displaced.items())[-_MOST_DISPLACED:]:
            known = before.versions.get(key)
            if (top := known[-1].image if known else below.top) is not None:
                lost = below.replaced or (below.top is None and key in replaced)
                self._displaced[key] = below._replace(top=top, replaced=lost)

    @property
    def shared(self) -> Collection[bytes]:
        """Keys that two rows may have."""
        return self._displaced.keys()

    def _put(self, key: bytes, version: Version) -> None:
        self.size += len(version.image or b"")
        known = self.versions.get(key)
        if known is None or not self._every:
            self.versions[key] = [version]
        elif known[-1].commit_time == version.commit_time:
            known[-1] = version  # nobody ever saw the state within a transaction
        else:
            known.append(version)

    def _add_keyless(self, change: RowChange) -> None:
        """Rows without a key can only be added; each is known by its sequence."""
        if change.op not in _NEW:
            raise TableFailed("a row was changed, and the table has no key")
        key = b"%d" % change.sequence
        if self._share.has(key):
            self._put(key, Version(change.sequence, change.commit_time, change.after))

    def _empty(self, sequence: int, commit_time: int) -> None:
        if self.emptied_time is None:
            self.emptied_time = commit_time
        self._displaced.clear()
        gone = Version(sequence, commit_time, None)
        for known in self.versions.values():
            if known[-1].image is None:
                continue
            if known[-1].commit_time == commit_time:
                known[-1] = gone  # as in _put
            else:
                known.append(gone)

    def _completed(self, change: RowChange, after: bytes, base: bytes) -> Version:
        """A version with as many of its absent columns as the batch knows."""
        if not self._share.has(base):
            self.moves = True
        absent = frozenset(change.absent)
        known = self.versions.get(base)
        earlier = known[-1] if known else None
        if earlier is None or earlier.image is None:
            self.partial = True
            return Version(change.sequence, change.commit_time, after, absent, base)
        values, image = _image(earlier.image), _image(after)
        image.update({name: values[name] for name in absent if name in values})
        lacking = absent & earlier.absent
        self.partial = self.partial or bool(lacking)
        return Version(change.sequence, change.commit_time, _text(image), lacking, earlier.base)


def rekeyed(columns: Sequence[Column], key: Sequence[str]) -> tuple[Column, ...]:
    """The columns of a table, these ones marked as its key."""
    missing = set(key) - {column.name for column in columns}
    if missing:
        raise TableFailed(
            f"keys names column {min(missing)}, and the table has none of this name",
            hint="Correct keys in the config, then run `headrace snapshot SOURCE TABLE`.",
        )
    marked: Any = [msgspec.structs.replace(each, key=each.name in key) for each in columns]
    return tuple(marked)
