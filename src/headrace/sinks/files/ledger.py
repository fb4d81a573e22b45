"""Which files a folder has by right: an entry for each batch, in `_headrace` beside the days.

An entry is a small file of JSON with a number. It counts from when it has its name, and of two
writers only one can give a number away; so of a batch there are all files or none, and whoever was
replaced cannot go on. The files themselves are moved to their places after that: what a crash has
cut short is finished by the next who opens the ledger.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ...errors import PipelineError, SinkFenced, SinkUnavailable
from .. import Progress
from ..lake.disk import sync_names

logger = logging.getLogger(__name__)

FOLDER = "_headrace"  # Spark, Hive and Arrow look into nothing that begins so
_STAGING = "staging"
_ENTRY = re.compile(r"(\d{12})\.json")
_KEPT = 100  # entries that stay for whoever wants to look
_MOST = 200
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_FIX = (
    "Bring it back from a copy. Without it, move all files away and run "
    "`headrace pipeline --adopt SINK`: everything in the log is then written again."
)


class File(msgspec.Struct, frozen=True):
    """A file of a batch."""

    staged: str  # where its task has written it, below the staging folder
    path: str  # where it belongs
    first: int  # sequences of its first and its last change
    last: int
    events: int
    size: int  # bytes


class FileSettings(msgspec.Struct, frozen=True):
    """What all files of a folder have in common."""

    kind: str
    format: str
    tenant: str


class WrittenRange(msgspec.Struct, frozen=True):
    """A range of a log that is in the files."""

    epoch: str
    first: int  # sequences of the first and the last change that has an event
    last: int
    events: int
    tables: list[str]  # globs of the tables that were wanted then


class FilesEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder has after a batch."""

    writer: str
    settings: FileSettings = msgspec.field(name="made")
    batch: int = -1
    epoch: str = ""  # the log that was read last
    logs: dict[str, int] = {}  # every log so far, in order, and up to where it is here
    files: list[File] = []  # of this batch
    written: list[WrittenRange] = []  # all batches, those alike as one
    at: int = 0  # microseconds since 1970
    generation: str = "0"  # of the log that was read last; "": not known


def added(written: list[WrittenRange], more: WrittenRange) -> list[WrittenRange]:
    """The ranges with one more, joined to the last if it goes on with it."""
    if written and (written[-1].epoch, written[-1].tables) == (more.epoch, more.tables):
        *before, last = written
        return [
            *before,
            msgspec.structs.replace(last, last=more.last, events=last.events + more.events),
        ]
    return [*written, more]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(FilesEntry).decode


class FilesLedger:
    """The entries, as the one sees them who writes the next."""

    def __init__(self, path: str) -> None:
        self._root = Path(path)
        self._own = self._root / FOLDER
        self._staging = self._own / _STAGING
        self._number = max(self._numbers(), default=0)
        self.entry = self._read() if self._number else None

    @property
    def progress(self) -> Progress:
        """Up to where the log that was read last is in the files."""
        epoch = self.entry.epoch if self.entry else ""
        return Progress(epoch, self.applied(epoch), self.entry.generation if self.entry else "")

    def applied(self, epoch: str) -> int:
        """The sequence of that log up to which everything is here; 0: nothing of it."""
        return self.entry.logs.get(epoch, 0) if self.entry else 0

    # --- entries ---------------------------------------------------------------------------------

    def commit(self, entry: FilesEntry) -> None:
        """Make the files of a batch count, unless somebody else has written here."""
        number = self._number + 1
        with self._reached():
            self._own.mkdir(parents=True, exist_ok=True)
            fresh = self._own / f".{uuid.uuid4().hex}"
            try:
                _write(fresh, _encode(entry))
                self._name(fresh, number)
            finally:
                fresh.unlink(missing_ok=True)
            sync_names(self._own)
            # The number may be free only because its entry was so old that it was deleted.
            if max(self._numbers()) > number:
                self._file(number).unlink()
                raise self._fenced()
        self._number, self.entry = number, entry

    def _name(self, fresh: Path, number: int) -> None:
        try:
            os.link(fresh, self._file(number))  # fails where a rename would replace
        except FileExistsError as error:
            # A file server gets a request again whose response was lost, and then reports this.
            if fresh.stat().st_nlink == 1:
                raise self._fenced() from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise PipelineError(
                f"the file system of {self._root} has no hard links, by which a batch is committed",
                hint="Set a path on another file system.",
            ) from error

    def _fenced(self) -> SinkFenced:
        return SinkFenced(
            f"another pipeline has just written into {self._root}; this batch was not committed"
        )

    def prune(self) -> None:
        """Delete entries of long ago."""
        with self._reached():
            numbers = sorted(self._numbers())
            if len(numbers) > _MOST:
                for number in numbers[:-_KEPT]:
                    self._file(number).unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self._own / f"{number:012}.json"

    def _numbers(self) -> Iterator[int]:
        with self._reached():
            names = os.listdir(self._own) if self._own.exists() else []
        return (int(found[1]) for name in names if (found := _ENTRY.fullmatch(name)))

    def _read(self) -> FilesEntry:
        file = self._file(self._number)
        with self._reached():
            content = file.read_bytes()
        try:
            return _decode(content)
        except msgspec.DecodeError as error:
            raise PipelineError(
                f"{file} cannot be read, and it says which changes the files have", hint=_FIX
            ) from error

    # --- files -----------------------------------------------------------------------------------

    def stage(self) -> Path:
        """A new folder for the files of a batch."""
        with self._reached():
            folder = self._staging / uuid.uuid4().hex
            folder.mkdir(parents=True)
            sync_names(self._staging)
        return folder

    def place(self, *, fresh: bool = False) -> None:
        """Move the files of the last entry to where they belong; done twice, it is done once.

        Of a fresh entry no file may be gone: nobody can have seen it yet.
        """
        files = self.entry.files if self.entry else []
        with self._reached():
            for file in files:
                self._move(file, fresh=fresh)
            for folder in sorted(set(self._touched(files))):
                sync_names(folder)

    def _move(self, file: File, *, fresh: bool) -> None:
        staged, target = self._staging / file.staged, self._root / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            staged.replace(target)
        except FileNotFoundError:
            if staged.exists():
                raise
            if target.exists():
                return
            if fresh:
                raise self._robbed(file) from None
            logger.info("file=%s is gone; whoever reads these files has taken it", file.path)

    def _robbed(self, file: File) -> SinkFenced | PipelineError:
        if max(self._numbers()) > self._number:  # then a reader may have it, from its new writer
            return self._fenced()
        return PipelineError(
            f"{file.path} was deleted in {self._staging} after it was committed",
            hint="Nobody but the sink may delete there. Set another path, to have all changes that "
            "are still in the log written again.",
        )

    def _touched(self, files: Iterable[File]) -> Iterator[Path]:
        for file in files:
            for parent in (self._root / file.path).parents:
                if parent.exists():  # a reader may have taken a whole day away
                    yield parent
                if parent == self._root:
                    break

    def drop(self, folder: Path) -> None:
        """Delete a folder of files that do not count, or are at their places."""
        try:
            shutil.rmtree(folder)
        except OSError as error:
            # They are in nobody's way, and deleted at the next start.
            logger.warning("folder=%s cannot be deleted, error=%s", folder, error.strerror)

    def left(self) -> list[Path]:
        """What other writers have staged; whether it counts is theirs, until we have committed."""
        with self._reached():
            staged = list(self._staging.iterdir()) if self._staging.exists() else []
            return staged + [file for file in self._own.glob(".*") if file.is_file()]

    def sweep(self) -> None:
        """Delete what earlier writers have left; nothing of it counts."""
        for path in self.left():
            if path.is_dir():
                self.drop(path)
            else:
                path.unlink(missing_ok=True)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Say of a file system that fails that it may be there again later."""
        try:
            yield
        except OSError as error:
            raise SinkUnavailable(
                f"{self._root} cannot be read or written: {error.strerror or error}"
            ) from error


def _write(file: Path, content: bytes) -> None:
    with file.open("xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
