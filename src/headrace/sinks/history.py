"""Every change, once, in one Delta table: the audit log.

    a batch ─▶ append (each task writes a file per tenant and day) ─▶ one commit

The table's own marks say which changes it has, so a batch that comes again adds nothing. What is
kept of a change is all its fields, or its event in a format.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..change.arrow import frame
from ..errors import ConfigError, PipelineError
from ..formats.catalogue import Formats
from ..plugins import Finding
from ..transforms.rules import TableTransform
from . import Progress, SinkWriter
from .erasing import ErasedPlace, ErasedRow
from .lake.append import Append, Appended, Join, Joined, due, epoch_of
from .lake.catalog import AnyCatalog, Registrar, check_catalog
from .lake.delta import EPOCH, KEEP, Delta, Marks
from .lake.erasure import FileForm, erase_rows
from .lake.modes import PRIVATE, expect_mode, make_folder
from .lake.shape import DAY, TENANT, Shaped
from .lake.storage import Folder, is_local
from .results import results

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TENANT_COLUMN = "headrace.tenant"
FORMAT = "headrace.format"
CHANGES = "changes"  # what the table keeps
_VACUUM_SECONDS = 3600.0
_NOTHING = Progress("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class History(Shaped):
    """Every change appended to a Delta table, partitioned by tenant and day."""

    name: str
    path: str
    tables: tuple[str, ...] = ()  # globs; none: all
    tenant: str = ""  # the column that says whose a row is; "": the table is split by day alone
    format: str = ""  # what a change is kept as; "": all its fields
    vacuum_hours: float = 24.0  # files that are replaced stay so long, for those who read them
    mode: str = PRIVATE  # of the folder, when it is made; "0755": all users may read it
    transforms: Mapping[str, TableTransform] = field(default_factory=dict)  # by table
    catalog: AnyCatalog | None = None  # in which the table is registered, under the sink's name
    # Options for s3://, az://, gs://; they may be secret, so they do not print.
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)
    formats: Formats = field(default=Formats(), repr=False, metadata={"setting": False})

    def __post_init__(self) -> None:
        expect_mode(self.mode)
        if self.vacuum_hours < 0:
            raise ConfigError("vacuum_hours must not be below 0")
        self.expect_shape("a history")

    @property
    def local_folders(self) -> Mapping[str, str]:
        """Its folder, unless that is an object storage."""
        return {"path": self.path} if is_local(self.path) else {}

    @property
    def folder(self) -> Folder:
        """Where the table lies."""
        return Folder.of(self.path, self.storage)

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The columns that have a folder for each value."""
        return (TENANT, DAY) if self.tenant or self.whole_transactions else (DAY,)

    def open(self, writer: str, *, adopt: bool = False) -> HistoryWriter:
        """Begin to write."""
        make_folder(self.path, self.mode)
        return HistoryWriter(self, writer, adopt=adopt)

    def check(self) -> list[Finding]:
        """Whether its folder or bucket can be written, and its catalog answers."""
        return [self.folder.check("path"), *check_catalog(self.catalog, self.storage)]

    def reset_effect(self) -> str:
        """What `reset` will do."""
        return (
            f"empties the history in {self.folder.uri}; what is no longer in the log is then only "
            f"in the table's earlier versions, which stay for {self.vacuum_hours:g} hours"
        )

    def reset(self, writer: str) -> None:
        """Empty the table."""
        if delta := Delta.open(self.folder, writer, adopt=True, restart=True):
            delta.empty(delta.properties.get(EPOCH, ""))

    def erase(self, row: ErasedRow) -> list[ErasedPlace]:
        """Take the values out of the row's changes; of events in a format, leave the row's out."""
        eraser = self.eraser(row)
        place = f"sink {self.name}"
        return [erase_rows(place, self.folder, eraser, FileForm(), sorted(row.texts))]


class HistoryWriter(SinkWriter["DataFrame"]):
    """The history while a query writes it."""

    def __init__(self, sink: History, writer: str, *, adopt: bool) -> None:
        self._sink = sink
        self._writer = writer
        self._adopt = adopt
        self._delta = Delta.open(sink.folder, writer, adopt=adopt)
        self._spark: SparkSession | None = None
        self._vacuum_due = time.monotonic()
        self._known = _NOTHING
        self._registrar = Registrar(sink.catalog, sink.name) if sink.catalog else None
        if self._delta is not None:
            _check(sink, self._delta)
            _complete(sink, self._delta)
            self._known = _progress(self._delta)
            self._offer(self._delta)

    def _offer(self, delta: Delta) -> None:
        if self._registrar:
            self._registrar.offer("", self._sink.name, delta.folder, delta.metadata)

    def catalog_failure(self) -> str:
        """Why the catalog does not have the table."""
        return self._registrar.failure() if self._registrar else ""

    def finish(self) -> None:
        """Let registration come to its end."""
        if self._registrar:
            self._registrar.finish()

    def close(self) -> None:
        """Register nothing more."""
        if self._registrar:
            self._registrar.close()

    def progress(self) -> Progress | None:
        """Up to where the table has everything."""
        return self._known if self._known.epoch else None

    def continue_in(self, epoch: str, upto: int) -> None:
        """Mark the table."""
        if self._delta is not None:
            self._delta.continue_in(self._known.epoch, epoch, upto, self.generation)
            self._known = _progress(self._delta)

    def go_back(self, upto: int) -> None:
        """Mark the table; what it has beyond stays, as changes of another history."""
        if self._delta is not None:
            marks = Marks(
                batch_id=None,
                epoch=self._known.epoch,
                sequence=upto,
                generation=self.generation,
            )
            self._delta.go_back(marks)
            self._known = _progress(self._delta)

    def write(self, batch: DataFrame, batch_id: int) -> int:
        """Add those changes that the table does not have."""
        self._spark = batch.sparkSession
        # The first batch makes the table, even if it is empty.
        if self._delta is None and batch_id > 0:
            raise PipelineError(
                f"the history in {self._sink.folder.uri} is gone, and {batch_id} batches with it",
                hint="Bring it back from a copy, or run `headrace pipeline --adopt "
                f"{self._sink.name}` to begin a new one with all that is still in the log.",
            )
        appended = self._appended(batch)
        epoch = epoch_of(
            appended, self._known.epoch, adopt=self._adopt, place=self._sink.folder.uri
        )
        delta = self._delta = self._delta or self._created(epoch)
        if epoch != self._known.epoch:
            self._turn_to(delta, epoch)
            if self._known.sequence:
                appended = self._appended(batch)  # some of this log came in an earlier time
        if added := [file for each in appended for file in each.added]:
            marks = Marks(
                batch_id=batch_id,
                epoch=epoch,
                sequence=max(each.last for each in appended),
                generation=self.generation,
            )
            delta.commit(added, [], marks=marks)
            self._known = Progress(epoch, marks.sequence, self.generation)
        return sum(each.changes for each in appended)

    def _turn_to(self, delta: Delta, epoch: str) -> None:
        # Noted before any of its changes come: a crash in between then leaves a table that has
        # nothing of the new log yet, rather than changes of a log that it does not know.
        if delta.properties.get(EPOCH) != epoch:
            delta.note({EPOCH: epoch})
        self._known = _progress(delta)

    def _appended(self, changes: DataFrame) -> list[Appended]:
        sink = self._sink
        task = Append(sink.folder, sink.partition_by, sink.shape, *self._known[:2])
        return results(changes.select(*frame.FIELDS), task, Appended)

    def _created(self, epoch: str) -> Delta:
        sink = self._sink
        properties = {KEEP: CHANGES, TENANT_COLUMN: sink.tenant, FORMAT: sink.format}
        if epoch:
            properties[EPOCH] = epoch
        return Delta.create(
            sink.folder,
            sink.shape.schema,
            properties,
            writer=self._writer,
            partition_by=sink.partition_by,
        )

    def maintain(self) -> None:
        """Join small files, and now and then delete old ones."""
        if self._delta is None:
            return
        self._offer(self._delta)
        self._join(self._delta)
        if time.monotonic() >= self._vacuum_due:
            pause = min(_VACUUM_SECONDS, self._sink.vacuum_hours * 3600)
            self._vacuum_due = time.monotonic() + pause
            self._delta.vacuum(self._sink.vacuum_hours)

    def _join(self, delta: Delta) -> None:
        work = due(delta.files.values())
        if not work or self._spark is None:
            return
        numbers = self._spark.range(len(work), numPartitions=len(work))
        joined = results(numbers, Join(delta.folder, work), Joined)
        delta.commit(
            [file for each in joined for file in each.added],
            [path for each in joined for path in each.removed],
        )


def _progress(delta: Delta) -> Progress:
    epoch = delta.properties.get(EPOCH, "")
    place = delta.place(epoch)
    return place if place.sequence else _NOTHING  # an empty one may follow any log


def _check(sink: History, delta: Delta) -> None:
    noted = delta.properties
    if noted.get(KEEP) != CHANGES:
        raise PipelineError(
            f"{delta.folder.uri} holds a Delta table that is no history",
            hint=f"Set another path for sink {sink.name}.",
        )
    for setting, was, now in (
        ("tenant", noted.get(TENANT_COLUMN, ""), sink.tenant),
        ("format", noted.get(FORMAT, ""), sink.format),
    ):
        if was != now:
            raise PipelineError(
                f"the history in {delta.folder.uri} was made with {setting}: {was or 'none'}, "
                f"and the config says {setting}: {now or 'none'}",
                hint=f"Set another path for sink {sink.name}: what is kept stays as it is.",
            )


def _complete(sink: History, delta: Delta) -> None:
    """Give a table that was made when changes had fewer fields the others."""
    known = delta.schema.names
    if missing := [each for each in sink.shape.schema if each.name not in known]:
        delta.add_columns(missing)
