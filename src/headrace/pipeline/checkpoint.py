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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid4, uuid5

from ..errors import CheckpointUnreadable, PipelineInUse
from ..log.folder import locked
from ..sinks import Progress
from ..sinks.lake.disk import move_aside
from ..sinks.report import batch_offset, committed_offset, last_entry

logger = logging.getLogger(__name__)

_WRITER = "writer.json"
_BEGINNING = "beginning.json"  # where a query begins that an operator has reset
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class QueryCheckpoint:
    """The checkpoint of one sink."""

    sink: str
    within: Path  # the folder that has one folder a sink

    @property
    def folder(self) -> Path:
        """What Spark calls the checkpoint location."""
        return self.within / self.sink / "checkpoint"

    @property
    def new(self) -> bool:
        """Whether no batch has ever been stored, so that Spark still asks where to begin."""
        return last_entry(self.folder / "commits") is None

    def writer(self) -> str:
        """The name of the query for its sink, the same until the checkpoint is another one."""
        file = self.folder / _WRITER
        if file.exists():
            return str(json.loads(file.read_text())["writer"])
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.sink}-{uuid4()}"
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps({"writer": name}))
        fresh.replace(file)
        return name

    def sequence(self) -> int:
        """The last change that the sink is known to have; 0: not known."""
        committed = last_entry(self.folder / "commits")
        return 0 if committed is None else committed_offset(self.folder, committed).sequence

    def batch(self, number: int) -> tuple[Progress, Progress] | None:
        """After what a batch begins and where it ends; None: it is the first one."""
        try:
            before, end = (batch_offset(self.folder, each) for each in (number - 1, number))
        except FileNotFoundError:
            return None
        return before, end

    def set_aside(self) -> Path | None:
        """Begin anew; returns where the notes so far were moved, None: there were none."""
        return move_aside(self.folder)

    def begin_after(self, epoch: str, sequence: int) -> None:
        """Begin anew, and with what follows a change of that log."""
        # A query that was never started has left nothing; its writer's name may be in use already.
        if any((self.folder / name).exists() for name in ("metadata", "offsets", "commits")):
            self.set_aside()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _BEGINNING).write_text(json.dumps({"epoch": epoch, "after": sequence}))

    def beginning(self, epoch: str) -> int | None:
        """The first change of a log that a reset query needs; None: the log's first."""
        file = self.folder / _BEGINNING
        noted = json.loads(file.read_text()) if file.exists() else {}
        return int(noted["after"]) + 1 if noted and noted["epoch"] == epoch else None

    def examine(self) -> None:
        """Raise CheckpointUnreadable where Spark would stumble."""
        if not self.folder.exists():
            return
        try:
            self._read()
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointUnreadable(
                f"the checkpoint of sink {self.sink} in {self.folder} cannot be read; "
                "nothing that the sink has stored is lost, and it knows itself how far it is",
                hint=f"Run `headrace pipeline --adopt {self.sink}`: it moves the checkpoint aside "
                "and goes on where the sink is.",
            ) from error

    def _read(self) -> None:
        if last_entry(self.folder / "offsets") is None and not (self.folder / _WRITER).exists():
            return
        if not json.loads((self.folder / _WRITER).read_text())["writer"]:
            raise ValueError("no writer")
        offsets, commits = last_entry(self.folder / "offsets"), last_entry(self.folder / "commits")
        if offsets is not None:
            json.loads((self.folder / "metadata").read_text())["id"]
            _read_entry(offsets, lines=2)
        if commits is not None:
            _read_entry(commits, lines=1)
            self.sequence()


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


def _read_entry(file: Path, *, lines: int) -> None:
    """An entry has a line with its version, then lines of JSON; `-` stands for an absent one."""
    version, *rest = file.read_text().splitlines()
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
