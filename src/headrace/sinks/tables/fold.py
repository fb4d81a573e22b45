"""What a batch does to the rows of a table: changes in their order, folded key by key.

    changes ─▶ Fold ─▶ versions of each key, and whether the table was emptied before them

A version that lacks columns (the source did not send them) takes them from the version before it
in the batch; what the batch does not have is left to the row that the table holds.

Where a key is checked at the end of a transaction, several rows may have it until then. Sources
then send whole old rows, and each says which of the rows leaves: one that came in the transaction,
or the one that was there before it.

Each task folds the keys of its own share. A row that changes its key leaves one and takes another,
which may be in another share: each does its part.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self
from zlib import crc32

import msgspec

from ...change.event import Column
from ...change.record import AFTER, BEFORE, COMMIT_TIME, KEY, OP, UNCHANGED
from ...errors import TableFailed

ROW_OPS = frozenset(("INSERT", "READ", "UPDATE", "DELETE"))
_NEW = frozenset(("INSERT", "READ"))
_NOTHING: frozenset[str] = frozenset()
_ABOVE = b"above"  # as a version's `base`: the key may still have the row that it had before
_MOST_HANDED_ON = 512_000_000  # bytes of keys with several rows, about
_PER_KEY = 500  # bytes that a key takes beside its images, about
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
        self,
        key: RowKey,
        share: Share,
        *,
        emptied: frozenset[int],
        every_version: bool,
        whole_rows: bool = True,
    ) -> None:
        """`emptied`: changes that empty the table; else than `every_version`: only the last.

        `whole_rows`: old rows come whole, so that a new row may have the key of another.
        """
        self._emptied = emptied
        self._key = key
        self._share = share
        self._every = every_version
        self._plain = bool(key.names) and not key.chosen
        self._whole_rows = whole_rows
        self.versions: dict[bytes, list[Version]] = {}
        self.emptied_time: int | None = None  # the commit time of the first TRUNCATE
        self.moves = False  # a row that is not whole has come from another share
        self.partial = False  # some version lacks columns
        self.size = 0  # bytes of images, about
        self.handed_on = 0  # keys that the fold before has left to this one
        self._handed_bytes = 0
        self._time = 0  # when the last change was committed
        # By key: other rows that have come to it in the transaction, beside its last version.
        self._others: dict[bytes, list[Version]] = {}

    def extend(self, changes: Iterable[SequencedRecord]) -> None:
        """Take changes of rows in their order."""
        number, of = self._share
        plain, every, versions = self._plain, self._every, self.versions
        inserts = self._whole_rows
        fields: tuple[Any, ...] | None = None
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
                    if inserts and op == "INSERT":
                        self._come(key, _new_tuple(Version, (*whole[:4], _ABOVE)))
                    elif every:
                        self._put(key, version)
                    else:
                        versions[key] = [version]
                        self.size += len(image or b"")
            else:
                self.add(RowChange.of(sequence, fields))
        if fields is not None:
            self._time = fields[COMMIT_TIME]

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
        if not absent and not self._key.chosen:
            self._add_whole(change, key, left)
            return
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
            self._put(left, Version(sequence, commit_time, None))

    # --- several rows with one key ---------------------------------------------------------------

    def _add_whole(self, change: RowChange, key: bytes, left: bytes | None) -> None:
        """Take a change whose row is whole: the old row leaves its key, the new one comes."""
        sequence, op, _, before, after, _, commit_time = change
        if left is None and op == "UPDATE" and self._share.has(key):
            known = self.versions.get(key)
            if known is None or known[-1].commit_time != commit_time:
                self._put(key, Version(sequence, commit_time, after))
                return
            if known[-1].image == before and key not in self._others:
                known[-1] = Version(sequence, commit_time, after, _NOTHING, known[-1].base)
                self.size += len(after or b"")
                return
        if op not in _NEW and self._share.has(left or key):
            self._leave(left or key, change)
        if op != "DELETE" and self._share.has(key):
            self._come(key, Version(sequence, commit_time, after, _NOTHING, _ABOVE))

    def _come(self, key: bytes, version: Version) -> None:
        """Put a row to a key, where another may be."""
        known = self.versions.get(key)
        if known is None:
            self.versions[key] = [version]
            self.size += len(version.image or b"")
            return
        top = known[-1]
        if top.image is None:
            self._put(key, version._replace(base=b""))
            return
        self.size += len(version.image or b"")
        if top.commit_time == version.commit_time:
            self._others.setdefault(key, []).append(top)
            known[-1] = version._replace(base=top.base)
        else:
            self.versions[key] = [*(known if self._every else [top]), version]

    def _leave(self, key: bytes, change: RowChange) -> None:
        """Take the row from a key that a change calls its old one."""
        gone = Version(change.sequence, change.commit_time, None)
        known = self.versions.get(key)
        top = known[-1] if known else gone
        if known is None or top.image is None or top.commit_time != change.commit_time:
            self._put(key, gone)  # it was there before the transaction
            return
        rows = [each for each in self._others.pop(key, ()) if each.commit_time == top.commit_time]
        rows.append(top)
        base, which = top.base, _equal(rows, change.before)
        if which is not None:
            del rows[which]
        elif base is _ABOVE and _is_whole(change.before, top):
            base = b""
        else:
            rows.pop(0)
        if rows:
            known[-1] = rows.pop()._replace(base=base)
            if rows:
                self._others[key] = rows
        elif base is _ABOVE and which is not None:
            known.pop()
            if not known:
                del self.versions[key]
        else:
            known[-1] = gone

    def hand_on(self, to: "Fold") -> set[bytes]:
        """Leave keys to the next fold that have several rows, while the transaction goes on.

        Returns keys that have one more if the table has a row of them.
        """
        now = self._time
        unsettled = [
            key
            for key, known in self.versions.items()
            if known[-1].base is _ABOVE and known[-1].commit_time == now
        ]
        several = {key for key in unsettled if len(self.versions[key]) > 1}
        several |= {key for key, rows in self._others.items() if rows[-1].commit_time == now}
        self.hand_over(several, to)
        return set(unsettled) - several

    def hand_over(self, keys: Iterable[bytes], to: "Fold") -> None:
        """Leave keys to the next fold."""
        for key in keys:
            to.versions[key] = rows = self.versions.pop(key)
            if key in self._others:
                to._others[key] = self._others.pop(key)
                rows = [*rows, *to._others[key]]
            to.handed_on += 1
            to._handed_bytes += _PER_KEY + sum(len(each.image or b"") for each in rows)
        if to._handed_bytes > _MOST_HANDED_ON:
            raise TableFailed(
                f"a transaction has {to.handed_on} keys with several rows, more than can be looked "
                "at together"
            )

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
        self._others.clear()
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


def _equal(rows: Sequence[Version], before: bytes | None) -> int | None:
    """Which of the rows is the one that an old image shows; the last one, where several are."""
    for at in range(len(rows) - 1, -1, -1):
        if rows[at].image == before:
            return at
    old = _image(before or b"{}")
    for at in range(len(rows) - 1, -1, -1):
        now = _image(rows[at].image or b"{}")
        # Columns may have come or gone since. An image of the key alone means all rows of it.
        if all(old[name] == now[name] for name in old if name in now):
            return at
    return None


def _is_whole(before: bytes | None, row: Version) -> bool:
    """Whether an old image has all columns of a row."""
    return len(_image(before or b"{}")) >= len(_image(row.image or b"{}"))


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
