"""Where the rows of keys are: a key index for each file, made when it is first needed.

An index is the file's keys as sorted numbers, and the row of each. Those of large files are kept on
the local disk of each machine and mapped into memory, so that a look-up of a few keys among
millions reads a few pages. A file never changes, so neither does its index.
"""

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from ..lake.conform import conformed
from ..lake.plan import PlannedFile
from ..lake.storage import Folder
from .keys import KeyCodes, Numbers, is_exact, key_codes

ON_DISK = 50_000  # rows; a smaller file's index is kept in the process alone
_KEPT = 4096  # indexes of a process …
_KEPT_BYTES = 64_000_000  # … and what they may take of its memory
_UNUSED_SECONDS = 6 * 3600.0  # after which an index is removed from the disk
_ROW = np.dtype(np.uint32)
_CODE = np.dtype(np.int64)

Rows = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """The keys of a file in the order of their codes, and the row of each."""

    codes: KeyCodes
    rows: Rows

    @classmethod
    def of(cls, keys: KeyCodes) -> Self:
        """The index of keys that stand in a file in this order."""
        if bool((keys.codes[1:] >= keys.codes[:-1]).all()):
            order = np.arange(len(keys), dtype=np.int64)
        else:
            order = np.argsort(keys.codes, kind="stable")
            keys = keys.take(order)
        return cls(keys, order.astype(_ROW))

    @property
    def size(self) -> int:
        """What it takes of memory; what is mapped from a disk takes none."""
        if isinstance(self.rows, np.memmap):
            return 0
        parts = (self.codes.codes, self.codes.check, self.rows)
        return sum(part.nbytes for part in parts if part is not None)

    def find(self, wanted: KeyCodes) -> tuple[Numbers, Numbers]:
        """Which of the wanted keys the file has, and in which rows."""
        found: list[Numbers] = []
        rows: list[Numbers] = []
        codes, check = self.codes.codes, self.codes.check
        which = np.arange(len(wanted), dtype=np.int64)
        at = np.searchsorted(codes, wanted.codes)
        while len(which):
            inside = at < len(codes)
            which, at = which[inside], at[inside]
            same = codes[at] == wanted.codes[which]
            which, at = which[same], at[same]
            exact = np.ones(len(at), dtype=np.bool_)
            if check is not None and wanted.check is not None:
                exact = check[at] == wanted.check[which]
            found.append(which[exact])
            rows.append(self.rows[at[exact]].astype(np.int64))
            at = at + 1  # the next one may have the same code
        return np.concatenate([*found, _NONE]), np.concatenate([*rows, _NONE])


_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class KeyColumns:
    """The columns that identify rows, with the types that they have now."""

    names: tuple[str, ...]
    types: tuple[pa.DataType, ...]
    nullable: bool = False  # chosen by a person, so null may occur

    @property
    def exact(self) -> bool:
        """Whether a key is its own code."""
        return not self.nullable and is_exact(self.types)

    @property
    def schema(self) -> pa.Schema:
        """The columns alone."""
        return pa.schema(list(zip(self.names, self.types, strict=True)))

    def codes(self, rows: pa.Table) -> KeyCodes:
        """The codes of rows that have these columns."""
        return key_codes([rows[name] for name in self.names], exact=self.exact)


class KeyIndexes:
    """The indexes that a process has, or finds on its disk."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, KeyColumns], KeyIndex] = OrderedDict()
        self._bytes = 0

    def of(self, folder: Folder, file: PlannedFile, key: KeyColumns) -> KeyIndex:
        """The index of a file."""
        path, rows = file.path, file.rows
        name = (folder.uri, path, key)
        if (known := self._known.get(name)) is None:
            stored = _Stored(name, rows) if rows >= ON_DISK else None
            known = stored.read() if stored else None
            if known is None:
                read = folder.read(path, list(key.names))
                known = KeyIndex.of(key.codes(conformed(read, key.schema, file.partition)))
                if stored:
                    known = stored.write(known)
        self.keep(folder, path, key, known)
        return known

    def keep(self, folder: Folder, path: str, key: KeyColumns, index: KeyIndex) -> None:
        """Remember the index of a file that was just written or used."""
        name = (folder.uri, path, key)
        if name not in self._known:
            self._bytes += index.size
        self._known[name] = index
        self._known.move_to_end(name)
        while len(self._known) > _KEPT or (self._bytes > _KEPT_BYTES and len(self._known) > 1):
            self._bytes -= self._known.popitem(last=False)[1].size


INDEXES = KeyIndexes()
"""Those of this process."""


# --- on disk -------------------------------------------------------------------------------------


class _Stored:
    """An index in the local cache."""

    def __init__(self, name: tuple[str, str, KeyColumns], rows: int) -> None:
        uri, path, key = name
        text = "\n".join((uri, path, str(key.exact), *key.names, *map(str, key.types)))
        self._name = hashlib.sha256(text.encode()).hexdigest()[:40]
        self._rows = rows
        self._lanes = 1 if key.exact else 2

    def read(self) -> KeyIndex | None:
        folder = _cache_folder()
        if folder is None:
            return None
        try:
            whole = np.memmap(folder / self._name, dtype=np.uint8, mode="r")
        except (OSError, ValueError):
            return None
        begin = self._rows * _CODE.itemsize
        if len(whole) != self._lanes * begin + self._rows * _ROW.itemsize:
            return None
        with suppress(OSError):
            os.utime(folder / self._name)
        lanes = [whole[at * begin : (at + 1) * begin].view(_CODE) for at in range(self._lanes)]
        return KeyIndex(KeyCodes(*lanes), whole[self._lanes * begin :].view(_ROW))

    def write(self, index: KeyIndex) -> KeyIndex:
        """The index, mapped from the disk if that has room for it."""
        folder = _cache_folder()
        if folder is None:
            return index
        temporary = folder / f"{self._name}.{os.getpid()}"
        try:
            with temporary.open("wb") as file:
                for part in (index.codes.codes, index.codes.check, index.rows):
                    if part is not None:
                        file.write(np.ascontiguousarray(part).data)
            temporary.replace(folder / self._name)
            _tidy(folder)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            return index
        return self.read() or index


@cache
def _cache_folder() -> Path | None:
    """A folder of this user's on the local disk, for as long as the machine is up; None: no disk.

    What was written before a crash of the machine may be there in part, so every start of the
    machine has a folder of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return None
    place, own = Path(tempfile.gettempdir()), f"headrace-keys-{os.getuid()}-"
    folder = place / f"{own}{boot}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o77:
        return None  # somebody else has made it: what is in it may be anything
    for other in place.glob(f"{own}*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _tidy(folder: Path) -> None:
    """Remove the indexes of files that nobody asks for any more, most of which are gone."""
    oldest = time.time() - _UNUSED_SECONDS
    for entry in os.scandir(folder):
        with suppress(OSError):
            if entry.stat().st_mtime < oldest:
                os.unlink(entry)
