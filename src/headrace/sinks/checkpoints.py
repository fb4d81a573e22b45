"""The files of Spark's checkpoints: where they are, and how far a query is by them.

offsets/7   where batch 7 ends, written before it begins
commits/7   batch 7 is stored
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from . import Progress
from .lake.disk import move_aside

_POSITION = "position.json"
_FIRST_GENERATION = "0"


class CheckpointFiles(Protocol):
    """The files of one query's checkpoint."""

    @property
    def location(self) -> str:
        """The address of their folder, as Spark takes it."""

    def names(self, folder: str) -> list[str]:
        """What is in one of the folders; nothing, if it is not there."""

    def exists(self, name: str = "") -> bool:
        """Whether a file or folder is there, by default the whole."""

    def read(self, name: str) -> str:
        """What a file holds; a FileNotFoundError when it is not there."""

    def write(self, name: str, text: str) -> None:
        """Replace a file: nobody sees a part of it."""

    def move_aside(self) -> str | None:
        """Rename the whole; returns where it is then, None: there was nothing."""


@dataclass(frozen=True, slots=True)
class LocalCheckpointFiles:
    """A checkpoint on a disk of this machine."""

    folder: Path

    @property
    def location(self) -> str:
        """The address of the folder, as Spark takes it."""
        return self.folder.as_uri()

    def names(self, folder: str) -> list[str]:
        """What is in one of the folders; nothing, if it is not there."""
        return [path.name for path in (self.folder / folder).glob("*")]

    def exists(self, name: str = "") -> bool:
        """Whether a file or folder is there, by default the whole."""
        return (self.folder / name).exists()

    def read(self, name: str) -> str:
        """What a file holds; a FileNotFoundError when it is not there."""
        return (self.folder / name).read_text()

    def write(self, name: str, text: str) -> None:
        """Replace a file: nobody sees a part of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / name
        fresh = file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(file)

    def move_aside(self) -> str | None:
        """Rename the whole; returns where it is then, None: there was nothing."""
        aside = move_aside(self.folder)
        return None if aside is None else str(aside)


def last_entry(files: CheckpointFiles, log: str) -> int | None:
    """The newest batch in one of Spark's logs, `offsets` or `commits`."""
    return max((int(name) for name in files.names(log) if name.isdigit()), default=None)


def batch_offset(files: CheckpointFiles, batch: int) -> Progress:
    """Where a batch ends that Spark has begun."""
    *_, offset = files.read(f"offsets/{batch}").splitlines()
    return offset_progress(offset)


def offset_progress(offset: str) -> Progress:
    """What an offset of Spark's means."""
    known = json.loads(offset)
    # Earlier versions noted no generation.
    generation = str(known.get("generation", _FIRST_GENERATION))
    return Progress(str(known["epoch"]), int(known["sequence"]), generation)


def committed(files: CheckpointFiles) -> Progress | None:
    """Where a query goes on; None: no batch was stored."""
    last = last_entry(files, "commits")
    return None if last is None else batch_offset(files, last)


def note_position(folder: Path, progress: Progress | None) -> None:
    """Note in a sink's folder how far it is, where its checkpoint is out of this machine's reach.

    Never ahead of the checkpoint, or changes could leave the log that the sink has not stored.
    None: that is not known.
    """
    if progress is None:
        (folder / _POSITION).unlink(missing_ok=True)
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = folder / f"{_POSITION}.new"
    fresh.write_bytes(msgspec.json.encode(progress._asdict()))
    fresh.replace(folder / _POSITION)


def noted_position(folder: Path) -> Progress | None:
    """What `note_position` noted; a FileNotFoundError when there is nothing."""
    return offset_progress((folder / _POSITION).read_text())


def noting_sinks(within: Path) -> list[str]:
    """The sinks that have left a checkpoint or a noted position in a folder of sinks."""
    found = [*within.glob("*/checkpoint"), *within.glob(f"*/{_POSITION}")]
    return sorted({path.parent.name for path in found})
