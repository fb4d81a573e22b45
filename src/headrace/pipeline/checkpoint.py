"""A query's notes of how far it is, and the name under which its sink knows it.

Spark numbers the batches of a checkpoint from 0, and a sink remembers the number of the last batch
under the writer's name. So a new checkpoint needs a new name, or its first batches would count as
stored already: the name lies inside the checkpoint, and is lost with it.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TextIO
from urllib.parse import unquote, urlsplit
from uuid import NAMESPACE_URL, uuid4, uuid5

from ..errors import CheckpointUnavailable, CheckpointUnreadable, PipelineInUse
from ..log.folder import locked
from ..sinks import Progress
from ..sinks.checkpoints import (
    CheckpointFiles,
    LocalCheckpointFiles,
    batch_offset,
    committed,
    last_entry,
    note_position,
)

logger = logging.getLogger(__name__)

_CHECKPOINT = "checkpoint"
_WRITER = "writer.json"
_DRIVER = "driver.json"  # which pipeline works with a checkpoint in a storage
_BEGINNING = "beginning.json"  # where a query begins that an operator has reset
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class QueryCheckpoint:
    """The checkpoint of one sink."""

    sink: str
    within: Path  # the folder of this machine that has one folder a sink
    address: str = ""  # of such a folder in a storage that only Spark reaches; "": it is here
    reached: CheckpointFiles | None = None  # … with Spark; None: it has not been started

    @property
    def notes(self) -> Path:
        """The sink's own folder on this machine."""
        return self.within / self.sink

    @property
    def location(self) -> str:
        """What Spark calls the checkpoint location."""
        return self._files.location

    @property
    def _files(self) -> CheckpointFiles:
        if not self.address:
            return LocalCheckpointFiles(self.notes / _CHECKPOINT)
        if self.reached is None:
            raise CheckpointUnavailable(
                f"the checkpoint of sink {self.sink} is in {self.address}, which only "
                "Spark can read"
            )
        return self.reached

    def reached_by(self, files_of: Callable[[str], CheckpointFiles]) -> Self:
        """The checkpoint for who can say what the files at an address are."""
        if not self.address:
            return self
        return replace(self, reached=files_of(f"{self.address}/{self.sink}/{_CHECKPOINT}"))

    @property
    def new(self) -> bool:
        """Whether no batch has ever been stored, so that Spark still asks where to begin."""
        return last_entry(self._files, "commits") is None

    def writer(self) -> str:
        """The name of the query for its sink, the same until the checkpoint is another one."""
        files = self._files
        if files.exists(_WRITER):
            return str(json.loads(files.read(_WRITER))["writer"])
        name = f"{self.sink}-{uuid4()}"
        files.write(_WRITER, json.dumps({"writer": name}))
        return name

    def committed(self) -> Progress | None:
        """Where the query goes on; None: no batch was stored."""
        return committed(self._files)

    def sequence(self) -> int:
        """The last change that the sink is known to have; 0: not known."""
        progress = self.committed()
        return 0 if progress is None else progress.sequence

    def batch(self, number: int) -> tuple[Progress, Progress] | None:
        """After what a batch begins and where it ends; None: it is the first one."""
        if not number:
            return None
        files = self._files
        try:
            before, end = (batch_offset(files, each) for each in (number - 1, number))
        except FileNotFoundError:
            return None
        return before, end

    def generation(self, number: int) -> str:
        """The generation of the log that a batch ends in; "": Spark has not noted the batch."""
        try:
            return batch_offset(self._files, number).generation
        except FileNotFoundError:
            return ""

    def set_aside(self) -> str | None:
        """Begin anew; returns where the notes so far were moved, None: there were none."""
        return self._files.move_aside()

    def begin_after(self, epoch: str, sequence: int) -> None:
        """Begin anew, and with what follows a change of that log."""
        # A query that was never started has left nothing; its writer's name may be in use already.
        files = self._files
        if any(files.exists(name) for name in ("metadata", "offsets", "commits")):
            self.set_aside()
        files.write(_BEGINNING, json.dumps({"epoch": epoch, "after": sequence}))

    def beginning(self, epoch: str) -> int | None:
        """The first change of a log that a reset query needs; None: the log's first."""
        files = self._files
        noted = json.loads(files.read(_BEGINNING)) if files.exists(_BEGINNING) else {}
        return int(noted["after"]) + 1 if noted and noted["epoch"] == epoch else None

    def examine(self) -> None:
        """Raise CheckpointUnreadable where Spark would stumble."""
        files = self._files
        if not files.exists():
            return
        try:
            _read(files)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointUnreadable(
                f"the checkpoint of sink {self.sink} in {_shown(files.location)} cannot be read; "
                "nothing that the sink has stored is lost, and it knows itself how far it is",
                hint=f"Run `headrace pipeline --adopt {self.sink}`: it moves the checkpoint aside "
                "and goes on where the sink is.",
            ) from error

    def claim(self, driver: str) -> None:
        """Take a checkpoint that no lock of this machine protects: from now on for this driver."""
        if self.address:
            self._files.write(_DRIVER, json.dumps({"driver": driver}))

    def expect_claimed(self, driver: str) -> None:
        """Raise PipelineInUse when another driver has taken the checkpoint since."""
        if not self.address:
            return
        try:
            holder = json.loads(self._files.read(_DRIVER))["driver"]
        except (FileNotFoundError, ValueError, LookupError):
            holder = ""  # somebody else has begun anew
        if holder != driver:
            raise PipelineInUse(
                f"another pipeline has taken over the checkpoint of sink {self.sink} in "
                f"{self.address}",
                hint="Stop one of the two; a pipeline that is started takes the checkpoint over.",
            )

    def note(self, progress: Progress | None) -> None:
        """Note on this machine how far the query is, where its checkpoint is elsewhere."""
        if self.address:
            note_position(self.notes, progress)


def _read(files: CheckpointFiles) -> None:
    """Read what Spark would read; an error of many kinds when something is not as it should be."""
    offsets, commits = last_entry(files, "offsets"), last_entry(files, "commits")
    if offsets is None and not files.exists(_WRITER):
        return
    if not json.loads(files.read(_WRITER))["writer"]:
        raise ValueError("no writer")
    if offsets is not None:
        json.loads(files.read("metadata"))["id"]
        _read_entry(files.read(f"offsets/{offsets}"), lines=2)
    if commits is not None:
        _read_entry(files.read(f"commits/{commits}"), lines=1)
        batch_offset(files, commits)


def _shown(location: str) -> str:
    address = urlsplit(location)
    return unquote(address.path) if address.scheme == "file" else location


@contextmanager
def alone_in(
    folder: Path, *, stopping: threading.Event | None = None, seconds: float = 0.0
) -> Iterator[None]:
    """Keep every other pipeline out of a folder of checkpoints.

    One that is there is waited for so long, unless `stopping` is set: it may be about to end.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with (folder / "lock").open("a+") as lock:
        waited = False
        while not locked(lock):
            if time.monotonic() >= deadline or (stopping is not None and stopping.is_set()):
                raise PipelineInUse(f"{_holder(lock)} works with the checkpoints in {folder}")
            if not waited:
                logger.warning("waiting until %s ends, it works in %s", _holder(lock), folder)
            waited = True
            time.sleep(_LOOK_SECONDS)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _holder(lock: TextIO) -> str:
    lock.seek(0)
    pid = lock.read(20)
    return f"another pipeline (process {pid})" if pid.isdecimal() else "another pipeline"


def in_use(folder: Path) -> bool:
    """Whether a pipeline works with the checkpoints of a folder."""
    try:
        with (folder / "lock").open("a+") as lock:
            return not locked(lock)
    except FileNotFoundError:
        return False


def _read_entry(text: str, *, lines: int) -> None:
    """An entry has a line with its version, then lines of JSON; `-` stands for an absent one."""
    version, *rest = text.splitlines()
    if not version.startswith("v") or len(rest) < lines:
        raise ValueError("cut short")
    for line in rest:
        if line != "-":
            json.loads(line)


def writer_of(checkpoint: str | os.PathLike[str]) -> str:
    """The name under which the tables know a query of somebody's own.

    It follows from where the checkpoint is, which may be a storage that only Spark can reach. A
    query whose checkpoint was deleted then still owns its tables, and since these know which
    changes they have, it may begin at the log's first one again.
    """
    place = os.fspath(checkpoint)
    if not (address := urlsplit(place)).scheme:
        place = os.path.abspath(place)
    elif address.scheme == "file":
        place = os.path.abspath(address.path)
    return f"apply-{uuid5(NAMESPACE_URL, place.rstrip('/'))}"
