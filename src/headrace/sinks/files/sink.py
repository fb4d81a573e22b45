"""Every change, once, in files: JSON Lines or Parquet, a folder a day.

    a batch ─▶ stage (each task writes a file per day) ─▶ commit ─▶ move each file to its day

The commit is an entry in a ledger beside the days, which says what the files of a batch are and up
to where the log is in them; a batch that comes again adds nothing. Whoever reads the days finds
whole files only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...change.arrow import frame
from ...errors import ConfigError, LogReplaced, PipelineError, SinkFenced
from ...formats.catalogue import Formats
from ...plugins import Finding
from ...transforms.rules import TableTransform
from .. import Progress, SentEvents, SettledRange, SinkWriter
from ..erasing import ErasedPlace, ErasedRow
from ..lake.disk import check_folder, move_aside
from ..lake.modes import PRIVATE, expect_mode, make_folder
from ..lake.shape import DAY, TENANT, Shaped
from ..push.events import EventRendering
from ..results import results
from .erasure import erase_in_files
from .ledger import File, FilesEntry, FileSettings, FilesLedger, WrittenRange, added
from .stage import Compression, Kind, Stage, Staged, Style, final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Files(Shaped):
    """Every change in files, a folder a day."""

    name: str
    path: str
    tables: tuple[str, ...] = ()  # globs; none: all
    kind: Kind = "jsonl"
    format: str = "savegress"  # what a change is kept as; "": all its fields, in Parquet
    compression: Compression | None = None  # None: none for JSON Lines, zstd for Parquet
    tenant: str = ""  # the column that says whose a row is; "": days have no folders within
    file_mb: float = 128.0  # of events that a file has at most, before compression
    batch_seconds: float = 2.0  # how often to look for new changes, and so to begin new files
    mode: str = PRIVATE  # of the folder, when it is made; "0755": all users may read it
    transforms: Mapping[str, TableTransform] = field(default_factory=dict)  # by table
    formats: Formats = field(default=Formats(), repr=False, metadata={"setting": False})

    @property
    def local_folders(self) -> Mapping[str, str]:
        """Its folder."""
        return {"path": self.path}

    def __post_init__(self) -> None:
        expect_mode(self.mode)
        if "://" in self.path:
            raise ConfigError(
                f"path: {self.path} is no folder; an object storage cannot rename files, so use "
                "a sink of type history for it"
            )
        for name in ("file_mb", "batch_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.kind == "parquet" and self.compression == "gzip":
            raise ConfigError("compression: gzip is for kind: jsonl; Parquet takes none or zstd")
        if not self.format and self.kind == "jsonl":
            raise ConfigError(
                "format: a line of kind: jsonl is an event; name a format, or set kind: parquet"
            )
        self.expect_shape("a sink of files")

    @property
    def by(self) -> tuple[str, ...]:
        """What folders are named by."""
        return (DAY, TENANT) if self.tenant or self.whole_transactions else (DAY,)

    @property
    def style(self) -> Style:
        """What files look like."""
        usual: Compression = "zstd" if self.kind == "parquet" else "none"
        return Style(self.kind, self.compression or usual, int(self.file_mb * _MEGABYTE))

    @property
    def rendering(self) -> EventRendering:
        """How changes become events; all fields of each change are as many as in canonical."""
        kept = self.format or "canonical"
        return EventRendering(self.formats, kept, self.tables, transforms=self.shaping)

    def sent(self) -> SentEvents:
        """What the files have, by the ledger beside them."""
        entry = FilesLedger(os.path.abspath(self.path)).entry
        return SentEvents(
            [
                SettledRange(
                    each.epoch,
                    each.first,
                    each.last,
                    each.events,
                    rendering=replace(self.rendering, tables=tuple(each.tables)),
                )
                for each in (entry.written if entry else [])
            ]
        )

    def open(self, writer: str, *, adopt: bool = False) -> FilesWriter:
        """Begin to write."""
        make_folder(self.path, self.mode)
        return FilesWriter(self, writer, adopt=adopt)

    def check(self) -> list[Finding]:
        """Whether its folder can be written."""
        return [check_folder("path", Path(os.path.abspath(self.path)))]

    def reset_effect(self) -> str:
        """What `reset` will do."""
        return f"renames the folder {self.path} to {self.path}-until-TIME, and begins a new one"

    def reset(self, writer: str) -> None:
        """Move the folder aside, with its ledger."""
        move_aside(Path(os.path.abspath(self.path)))

    def erase(self, row: ErasedRow) -> list[ErasedPlace]:
        """Write the files anew that have events of the row."""
        return [erase_in_files(self, row)]


class FilesWriter(SinkWriter["DataFrame"]):
    """The files while a query writes them."""

    def __init__(self, sink: Files, writer: str, *, adopt: bool) -> None:
        self._sink = sink
        self._writer = writer
        self._adopt = adopt
        # A task runs in another folder than the driver.
        self._path = os.path.abspath(sink.path)
        self._settings = FileSettings(sink.kind, sink.format, sink.tenant)
        self._ledger = self._taken()
        self._placed = True  # whether the files of the last entry are all at their places

    def _taken(self) -> FilesLedger:
        """The ledger, ours alone from now on.

        One who wrote before us may still live, cut off from the rest, and just be committing what
        it has staged. So nothing of that is deleted until an entry of ours is in its way.
        """
        while True:
            ledger = FilesLedger(self._path)
            entry = ledger.entry
            if entry is not None:
                if entry.writer != self._writer and not self._adopt:
                    raise SinkFenced(f"another pipeline writes the files in {self._path}")
                _check(self._sink, self._path, entry.settings)
                ledger.place()
            if ledger.left() or (entry is not None and entry.writer != self._writer):
                mine = entry or FilesEntry(writer=self._writer, settings=self._settings)
                mine = msgspec.structs.replace(mine, writer=self._writer, files=[], at=_now())
                try:
                    ledger.commit(mine)
                except SinkFenced:
                    continue  # it was faster, and what it has committed is ours to place
                ledger.sweep()
            return ledger

    @property
    def _begun(self) -> bool:
        """Whether a batch was ever committed; the first is, even if it is empty."""
        return self._ledger.entry is not None and self._ledger.entry.batch >= 0

    def progress(self) -> Progress | None:
        """Up to where the files have everything."""
        known = self._ledger.progress
        return known if known.epoch else None

    def continue_in(self, epoch: str, upto: int) -> None:
        """Write an entry that has the same under the restored log's name."""
        self._place()
        known, entry = self._ledger.progress, self._ledger.entry
        if entry is not None:
            logs = {**entry.logs, epoch: known.sequence}
            self._ledger.commit(self._renamed(entry, epoch, logs))

    def go_back(self, upto: int) -> None:
        """Write an entry in which what is there is of another log: names of files stay apart."""
        self._place()
        entry = self._ledger.entry
        if entry is not None and entry.epoch:
            past = f"{entry.epoch}~{entry.generation}"
            logs = {past if log == entry.epoch else log: has for log, has in entry.logs.items()}
            written = [
                msgspec.structs.replace(each, epoch=past)
                if each.epoch == entry.epoch and each.last > upto
                else each
                for each in entry.written
            ]
            entry = msgspec.structs.replace(entry, written=written)
            self._ledger.commit(self._renamed(entry, entry.epoch, {**logs, entry.epoch: upto}))

    def _renamed(self, entry: FilesEntry, epoch: str, logs: dict[str, int]) -> FilesEntry:
        return msgspec.structs.replace(
            entry, epoch=epoch, logs=logs, files=[], at=_now(), generation=self.generation
        )

    def write(self, batch: DataFrame, batch_id: int) -> int:
        """Add those changes that the files do not have."""
        if not self._begun and batch_id > 0:
            raise PipelineError(
                f"the ledger in {self._path} is gone, and with it what {batch_id} batches wrote",
                hint="Bring the folder back from a copy, or move what is left of it away and run "
                f"`headrace pipeline --adopt {self._sink.name}` to begin anew with all that is "
                "still in the log.",
            )
        self._place()
        folder, staged = self._staged(batch, self._ledger.progress)
        epoch = self._epoch(staged)
        if epoch != self._ledger.progress.epoch and (applied := self._ledger.applied(epoch)):
            self._ledger.drop(folder)
            folder, staged = self._staged(batch, Progress(epoch, applied))  # it came once before
        files = [file for each in staged for file in each.files]
        if files or not self._begun or epoch != self._ledger.progress.epoch:
            last = max((each.last for each in staged), default=0)
            self._commit(batch_id, Progress(epoch, last), files)
        self._ledger.drop(folder)
        return sum(each.changes for each in staged)

    def _staged(self, changes: DataFrame, known: Progress) -> tuple[Path, list[Staged]]:
        sink, folder = self._sink, self._ledger.stage()
        task = Stage(folder, sink.by, sink.shape, sink.style, known)
        try:
            staged = results(changes.select(*frame.FIELDS), task, Staged)
            self._epoch(staged)
        except BaseException:
            self._ledger.drop(folder)
            raise
        return folder, staged

    def _commit(self, batch_id: int, reached: Progress, files: list[File]) -> None:
        before = self._ledger.entry
        logs = dict(before.logs) if before else {}
        if reached.epoch:
            logs[reached.epoch] = max(reached.sequence, logs.get(reached.epoch, 0))
        log = list(logs).index(reached.epoch) + 1 if reached.epoch else 0
        named = [final(file, log, self._sink.style) for file in files]
        written = before.written if before else []
        if files:
            written = added(written, _range(reached.epoch, named, self._sink.tables))
        entry = FilesEntry(
            writer=self._writer,
            settings=self._settings,
            batch=batch_id,
            epoch=reached.epoch,
            logs=logs,
            files=sorted(named, key=lambda file: (file.first, file.path)),
            written=written,
            at=_now(),
            generation=self.generation,
        )
        self._ledger.commit(entry)
        self._placed = False
        self._place(fresh=True)

    def _place(self, *, fresh: bool = False) -> None:
        """Move the files of the last entry, unless they are where they belong."""
        if not self._placed:
            self._ledger.place(fresh=fresh)
            self._placed = True

    def _epoch(self, staged: list[Staged]) -> str:
        """The log that the batch comes from."""
        epochs = set().union(*(each.epochs for each in staged))
        if len(epochs) > 1:
            raise PipelineError(
                "the batch holds changes of several logs, and their sequences have no common order",
                hint="Give each log files of its own.",
            )
        known = self._ledger.progress.epoch
        epoch = epochs.pop() if epochs else known
        if known not in ("", epoch) and not self._adopt:
            raise LogReplaced(f"the files in {self._path} come from another log")
        return epoch

    def maintain(self) -> None:
        """Keep the ledger short; the files themselves stay until their owner deletes them."""
        self._ledger.prune()


def _range(epoch: str, files: list[File], tables: tuple[str, ...]) -> WrittenRange:
    return WrittenRange(
        epoch,
        min(file.first for file in files),
        max(file.last for file in files),
        sum(file.events for file in files),
        list(tables),
    )


def _check(sink: Files, path: str, then: FileSettings) -> None:
    for setting in FileSettings.__struct_fields__:
        was, now = getattr(then, setting), getattr(sink, setting)
        if was != now:
            raise PipelineError(
                f"the files in {path} were made with {setting}: {was or 'none'}, "
                f"and the config says {setting}: {now or 'none'}",
                hint=f"Set another path for sink {sink.name}: what is kept stays as it is.",
            )


def _now() -> int:
    return time.time_ns() // 1000
