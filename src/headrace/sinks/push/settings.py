"""The settings that every push sink shares, and its part of the contract of a sink."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from ...errors import ConfigError, PipelineError
from ...formats import TransactionFormat
from ...formats.catalogue import Formats
from ...plugins import Finding
from ...retry import Backoff
from ...transforms.rules import TableTransform, expect_not_computed
from .. import SentEvents, SettledRange, Sink, Takes
from ..erasing import ErasedPlace, ErasedRow
from ..lake.delta import Delta
from ..lake.disk import move_aside
from ..lake.erasure import EventEraser, FileForm, erase_rows
from ..lake.shape import expect_format
from ..lake.storage import Folder, is_local
from . import deadletters, ledger, redrive
from .computing import sweep
from .contract import Channel
from .delivery import Policy
from .events import EventRendering
from .halt import clear_halt
from .ledger import RenderingOptions
from .writer import PushWriter

_DEAD_LETTERS = "dead_letters"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings(Sink):
    """A sink that sends events to another system; a destination is a class derived from it.

    A derived class adds its settings and `connect`. One that checks them in `__post_init__` calls
    `PushSettings.__post_init__(self)` first.
    """

    takes: ClassVar[Takes] = Takes.LOG_RANGE
    sends: ClassVar[bool] = True
    keeps_dead_letters: ClassVar[bool] = True

    name: str
    tables: tuple[str, ...] = ()  # globs; none: all
    format: str = "savegress"  # what a change is sent as
    batch_size: int = 500  # events handed over at once
    batch_bytes: int = 1_000_000  # … unless they are larger than this together
    batch_seconds: float = 0.2  # how often to look for new changes
    attempts: int = 5  # at an event, before it is put aside while others are taken
    retry_first_seconds: float = 0.1  # before the second attempt; doubled each time …
    retry_longest_seconds: float = 30.0  # … up to this
    retry_jitter: float = 0.1  # by which share a wait is longer or shorter, at random
    patience_seconds: float = 3600.0  # how long everything may fail before it is put aside
    # The cost of a batch in Spark hardly depends on its size, and no batch is kept in memory.
    max_changes_per_batch: int | None = None  # None: the pipeline's
    parallelism: int | None = None  # tasks that send; None: as many as there are cores, up to 8
    max_event_bytes: int = 0  # a larger event is not sent as it is; 0: any is
    oversize: Literal["dead_letter", "reference"] = "dead_letter"  # what becomes of it
    transforms: Mapping[str, TableTransform] = field(default_factory=dict)  # by table
    dead_letters: str = ""  # the folder of their Delta table; "": below the checkpoint's
    # Options for s3://, az://, gs:// there; they may be secret, so they do not print.
    dead_letters_storage: Mapping[str, str] = field(default_factory=dict, repr=False)
    formats: Formats = field(default=Formats(), repr=False, metadata={"setting": False})
    # Where the sink keeps its ledger; the pipeline says it.
    folder: str = field(default="", repr=False, metadata={"setting": False})

    def __post_init__(self) -> None:
        expect_format(self.format, self.formats, "a sink that sends events")
        if self.whole_transactions:
            expect_not_computed(self.transforms, f"format: {self.format}")
        for name in ("batch_size", "batch_bytes", "attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("batch_seconds", "retry_first_seconds", "retry_longest_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("patience_seconds", "max_event_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be below 0")
        if self.transforms and self.oversize == "reference":
            raise ConfigError(
                "oversize: reference leads to a change as the log has it, which transforms hide"
            )
        if not 0 <= self.retry_jitter < 1:
            raise ConfigError(f"retry_jitter must be from 0 up to 1, not {self.retry_jitter}")
        for name in ("max_changes_per_batch", "parallelism"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise ConfigError(f"{name} must be 1 or more, not {given}")

    @abstractmethod
    def connect(self) -> Channel:
        """Open the destination, or raise SinkUnavailable; called in a task's process."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        """Where it sends to; a halt ends when this changes."""
        return ""

    @property
    def splits_keys(self) -> bool:
        """Whether a change of a row's key is sent as a DELETE of the old and an INSERT.

        Yes: rows are sent side by side, each in its order, and such a change is of two.
        """
        return True

    @property
    def adds_tombstones(self) -> bool:
        """Whether an event without a payload follows each DELETE."""
        return False

    @property
    def whole_transactions(self) -> bool:
        """Whether its format needs whole transactions."""
        return isinstance(self.formats.named(self.format), TransactionFormat)

    @property
    def rendering(self) -> EventRendering:
        """How changes become events."""
        return EventRendering(
            self.formats,
            self.format,
            self.tables,
            self.splits_keys,
            self.adds_tombstones,
            self.shaping,
        )

    @property
    def rendered(self) -> RenderingOptions:
        """The same as the ledger records it."""
        return RenderingOptions(
            self.format,
            self.tables,
            self.splits_keys,
            self.adds_tombstones,
            self.shaping.rows_digest,
            schema_barriers=True,
        )

    @property
    def policy(self) -> Policy:
        """How events are handed over."""
        schedule = Backoff(self.retry_first_seconds, self.retry_longest_seconds, self.retry_jitter)
        return Policy(
            schedule=schedule,
            attempts=self.attempts,
            batch_size=self.batch_size,
            batch_bytes=self.batch_bytes,
            max_event_bytes=self.max_event_bytes,
            reference=self.oversize == "reference",
            format=self.format,
        )

    @property
    def local_folders(self) -> Mapping[str, str]:
        """That of the dead letters, which tasks write."""
        folder = self.dead_letters or "the default, below checkpoint_dir,"
        return {"dead_letters": folder} if is_local(folder) else {}

    @property
    def letters(self) -> Folder:
        """The folder of the dead letters."""
        folder = self.dead_letters or f"{self.folder}/{_DEAD_LETTERS}"
        return Folder.of(folder, self.dead_letters_storage)

    def erase(self, row: ErasedRow) -> list[ErasedPlace]:
        """Remove the row's dead letters; what was sent cannot be recalled."""
        sent = ("what it has sent cannot be recalled: erase the row there too",)
        eraser = EventEraser(row, row.key_in(self.shaping))
        sweep(self.letters)
        place, texts = f"sink {self.name}: dead letters", sorted(row.texts)
        found = erase_rows(place, self.letters, eraser, FileForm(), texts)
        removed = (f"{found.rewritten} dead letters removed: they will never be sent",)
        notes = (*found.notes, *(removed if found.rewritten else ()), *sent)
        return [msgspec.structs.replace(found, notes=notes)]

    def sent(self) -> SentEvents:
        """What was sent and what waits, from the ledger and the dead letters."""
        letters = self.letters
        entries, files = self._recorded()
        # A file that leaves the table meanwhile can still be read for some hours.
        rows = [row for file in files for row in letters.read(file, ["row"])["row"].to_pylist()]
        return SentEvents(
            [
                self._settled(entry)
                for entry in entries
                if entry.what in ledger.SETTLED and entry.changes
            ],
            len(rows),
            len(set(rows)),
            ledger.redriven(entries, files),
        )

    def _recorded(self) -> tuple[list[ledger.LedgerEntry], list[str]]:
        """The ledger, and the files of the dead letters at the same time."""
        file = Path(self.folder, ledger.FILE)
        entries = ledger.read(file)
        while True:
            files = deadletters.files_of(self.letters)
            before, entries = entries, ledger.read(file)
            # Letters enter the table before the ledger has them: those of batches that were settled
            # since do no harm. A redrive is in the ledger first, and its letters leave then.
            if _redrives(before) == _redrives(entries):
                return before, files

    def _settled(self, entry: ledger.LedgerEntry) -> SettledRange:
        counts, then = entry.counts, entry.rendered
        aside = counts.refused + counts.waiting + counts.skipped
        known = msgspec.structs.asdict(then) if then else {}
        comparable = known.pop("rows_digest", "") == self.shaping.rows_digest
        rendering = replace(self.rendering, **known)
        return SettledRange(
            entry.epoch,
            entry.first,
            entry.last,
            counts.sent,
            aside,
            entry.doubtful,
            counts.retries,
            rendering,
            comparable,
            entry.generation,
        )

    def lost_changes_hint(self) -> str:
        """Events that were not rendered in time cannot be sent any more."""
        return (
            f"Their events were not sent. Run `headrace pipeline --adopt {self.name}`: it goes on "
            "with the oldest change in the log. `headrace snapshot SOURCE` after it sends every "
            "row as it is now."
        )

    def redrive_requested(self) -> bool:
        """Whether a redrive is requested."""
        if redrive.requested(self.folder) is None:
            return False
        clear_halt(self.folder)
        return True

    def decline_redrive(self, reason: str) -> None:
        """Report to a requested redrive that the sink has halted."""
        if request := redrive.requested(self.folder):
            count, _ = deadletters.counted(self.letters)
            why = f"the sink has halted: {reason}"
            result = redrive.RedriveResult(request.id, count, 0, count, why)
            redrive.report_result(self.folder, result)

    def check(self) -> list[Finding]:
        """Connect and log in, and send nothing; whether dead letters can be kept."""
        found = [self._check_connection()]
        if self.dead_letters:
            found.append(self.letters.check("dead_letters"))
        return found

    def _check_connection(self) -> Finding:
        self.connect().close()
        return Finding("connection", ok=True, detail="it answers, and takes the login")

    def reset_effect(self) -> str:
        """What `reset` will do."""
        count, _ = deadletters.counted(self.letters)
        return (
            f"moves its account of what was sent and its {count} dead letters aside; whoever "
            "receives its events gets those again that it has had"
        )

    def reset(self, writer: str) -> None:
        """Move the ledger and the dead letters aside; the ledger last, it says what was sent."""
        clear_halt(self.folder)
        if "://" in self.dead_letters:
            if delta := Delta.open(self.letters, writer, adopt=True):
                delta.empty("")
        else:
            move_aside(Path(self.dead_letters or f"{self.folder}/{_DEAD_LETTERS}"))
        move_aside(Path(self.folder, ledger.FILE))

    def open(self, writer: str, *, adopt: bool = False) -> PushWriter:
        """Begin to send."""
        if not self.folder:
            raise PipelineError(f"the sink {self.name} has no folder for its ledger")
        return PushWriter(self, writer, adopt=adopt)


def _redrives(entries: list[ledger.LedgerEntry]) -> list[ledger.LedgerEntry]:
    return [entry for entry in entries if entry.what == "redriven"]
