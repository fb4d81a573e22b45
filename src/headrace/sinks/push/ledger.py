"""The ledger of a push sink: what it has sent, batch by batch, in lines of JSON in its folder.

A batch has an entry when it begins, one with its checkpoints if it takes long or waits, and one
when it is settled, which is on disk before the batch counts as stored.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ...errors import PipelineError, SinkFenced
from .. import Progress
from ..lake.disk import sync_names
from .delivery import Counts, DeliveryCheckpoint

if TYPE_CHECKING:
    from .events import Chunk, EventRendering

FILE = "sent.jsonl"
SETTLED = ("settled", "earlier")  # the entries that count events
_KEPT = 1000  # settled batches; those before them are joined into one entry
_MOST_LINES = 5000


class RenderingOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings that decide how many events the changes of a batch become. On disk."""

    format: str
    tables: tuple[str, ...] = ()
    splits_keys: bool = False
    adds_tombstones: bool = False
    rows_digest: str = ""  # of the transforms, see `Transforms.rows_digest`
    schema_barriers: bool = False  # an earlier version had none


def versioned(options: RenderingOptions | EventRendering) -> dict[str, Any]:
    """The options that no setting decides, but the version of Headrace that began a batch."""
    return {"splits_keys": options.splits_keys, "schema_barriers": options.schema_barriers}


class ReadChanges(msgspec.Struct):
    """The changes that a task has read. On disk."""

    changes: int = 0
    first: int = 0
    last: int = 0
    epochs: set[str] = set()

    def add(self, chunk: Chunk) -> None:
        """Count these too."""
        self.changes += chunk.changes
        self.first = self.first or chunk.first
        self.last = max(self.last, chunk.last)
        self.epochs |= {chunk.epoch}

    def copy(self) -> ReadChanges:
        """The same, which does not change with it."""
        return ReadChanges(self.changes, self.first, self.last, set(self.epochs))


class LedgerEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the file."""

    what: Literal["writer", "begun", "paused", "settled", "earlier", "redriven", "continued"]
    writer: str = ""  # whose batch it is
    batch: int = -1
    epoch: str = ""
    first: int = 0  # sequences of the changes that were there
    last: int = 0
    changes: int = 0
    counts: Counts = msgspec.field(default_factory=Counts)
    at: int = 0  # microseconds since 1970
    tasks: int = 0  # in how many parts the batch is sent …
    points: dict[int, DeliveryCheckpoint] = {}  # … and the checkpoints of those not settled,
    read: dict[int, ReadChanges] = {}  # … which need not read these changes again
    batches: int = 1  # how many it stands for
    # Events that may have arrived twice: a reply was lost, or a process was killed.
    doubtful: int = msgspec.field(default=0, name="again")
    rendered: RenderingOptions | None = None  # how changes became events
    closed: bool = False  # it waited, and its process has ended without sending more
    files: list[str] = []  # of dead letters that a redrive removes from their table
    generation: str = "0"  # of the log; "": not known
    barrier: int = 0  # the last TRUNCATE or SCHEMA before which everything is settled …
    alone: bool = False  # … and which is sent now, and nothing else but its like


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LedgerEntry).decode


class PushLedger:
    """The file, open for its one writer."""

    def __init__(self, file: Path, writer: str) -> None:
        self._file = file
        self._writer = writer
        self._count = 0  # of entries
        self._size = 0  # in bytes, of whole entries
        self._last: LedgerEntry | None = None
        self._last_size = 0
        self.epochs: list[str] = []  # the logs that were followed, in order
        self._settled: LedgerEntry | None = None  # the last one, of any writer
        self._own: LedgerEntry | None = None  # the last one of this writer
        self._paused: LedgerEntry | None = None
        self._begun = 0  # how often the batch after it began without a known end
        self._last_redriven: LedgerEntry | None = None

    @classmethod
    def open(cls, folder: str, writer: str, *, adopt: bool) -> PushLedger:
        """Open the sink's ledger; that of another writer is refused."""
        file = Path(folder, FILE)
        file.parent.mkdir(parents=True, exist_ok=True)
        ledger = cls(file, writer)
        ledger._size = _truncate_partial(file)
        entries = read(file)
        owner = next(
            (entry.writer for entry in reversed(entries) if entry.what == "writer"), writer
        )
        if owner != writer and not adopt:
            raise SinkFenced(f"another pipeline has sent what is recorded in {file}")
        for entry in entries:
            ledger._take(entry)
        if not entries or owner != writer:
            ledger._append(LedgerEntry("writer", writer), sync=True)
        return ledger

    @property
    def epoch(self) -> str:
        """The epoch of the log that was followed so far; "": none yet."""
        return self._settled.epoch if self._settled else ""

    def progress(self) -> Progress | None:
        """Up to where every change is settled; None: nothing is."""
        entry = self._settled
        if entry is None or not entry.last:
            return None
        return Progress(entry.epoch, entry.last, entry.generation)

    def settled(self, batch: int) -> LedgerEntry | None:
        """The entry of a settled batch of this writer; None: it is not settled."""
        own = self._own
        return own if own is not None and batch <= own.batch else None

    def paused(self, batch: int) -> LedgerEntry | None:
        """The entry of an interrupted batch; None: no interruption is recorded."""
        entry = self._paused
        return entry if entry is not None and entry.batch == batch else None

    @property
    def interrupted(self) -> bool:
        """Whether a batch was begun and is to be sent to its end."""
        return self._paused is not None or self._begun > 0

    @property
    def unsure(self) -> bool:
        """Whether more of the batch may have been sent than is known."""
        return self._begun > 1

    def begin(self, batch: int, at: int) -> None:
        """Record that a batch begins."""
        self._append(LedgerEntry("begun", self._writer, batch, at=at), sync=False)

    def pause(self, entry: LedgerEntry) -> None:
        """Record how far a batch is; it replaces the last such entry of the batch."""
        last = self._last
        if last is not None and (last.what, last.batch) == (entry.what, entry.batch):
            self._replace(entry)
        else:
            self._append(entry, sync=True)

    def settle(self, entry: LedgerEntry) -> None:
        """Record that a batch is settled, or that dead letters were sent again."""
        self._append(entry, sync=True)

    def withdraw(self, kept: Collection[str]) -> None:
        """Revoke the last redrive if the table still has all of its dead letters."""
        if (entry := undone(self._last_redriven, kept)) is not None:
            less = Counts(sent=-entry.counts.sent)
            self.settle(LedgerEntry("redriven", self._writer, counts=less, at=entry.at))

    def _append(self, entry: LedgerEntry, *, sync: bool) -> None:
        begin = self._size
        encoded = _encode(entry) + b"\n"
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            # What follows is the beginning of an entry for which the disk had no room.
            file.truncate(begin)
            file.seek(begin)
            file.write(encoded)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        self._size, self._last_size = begin + len(encoded), len(encoded)
        self._take(entry)

    def _replace(self, entry: LedgerEntry) -> None:
        """Replace the last entry, which stays if the disk has no room."""
        begin = self._size - self._last_size
        encoded = _encode(entry) + b"\n"
        self._rewrite(self._file.read_bytes()[:begin] + encoded)
        self._size, self._last_size = begin + len(encoded), len(encoded)
        self._take(entry)

    def _rewrite(self, content: bytes) -> None:
        fresh = self._file.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._file)
        finally:
            fresh.unlink(missing_ok=True)
        sync_names(self._file.parent)

    def _take(self, entry: LedgerEntry) -> None:
        self._count += 1
        self._last = entry
        if entry.what in SETTLED:
            if entry.last and entry.epoch not in self.epochs:
                self.epochs.append(entry.epoch)
            self._settled = self._merged(entry)
            self._paused, self._begun = None, 0
            if entry.writer == self._writer:
                self._own = entry
        elif entry.what == "begun":
            self._begun += 1
        elif entry.what == "paused" and entry.writer == self._writer:
            self._paused = entry
            self._begun = 0 if entry.closed else self._begun
        elif entry.what == "redriven":
            self._last_redriven = entry
        elif entry.what == "continued":
            self._continue(entry)
        elif entry.what == "writer":
            self._paused, self._begun = None, 0

    def _continue(self, entry: LedgerEntry) -> None:
        """The log has another name, because it was restored; its sequences are the same."""
        epoch = entry.epoch
        self.epochs.append(epoch)
        if self._settled is not None:
            place = {"epoch": epoch, "generation": entry.generation}
            self._settled = msgspec.structs.replace(self._settled, **place)
        if self._paused is not None:
            read = {
                part: ReadChanges(each.changes, each.first, each.last, {epoch})
                for part, each in self._paused.read.items()
            }
            self._paused = msgspec.structs.replace(self._paused, read=read)

    def _merged(self, entry: LedgerEntry) -> LedgerEntry:
        # A batch without changes says nothing of the log.
        known = self._settled
        if known is None or entry.last:
            return entry
        place = {"epoch": known.epoch, "last": known.last, "generation": known.generation}
        return msgspec.structs.replace(entry, **place)

    def compact(self) -> None:
        """Keep the file short: old batches become one entry."""
        if self._count > _MOST_LINES:
            kept = joined(read(self._file))
            content = b"".join(_encode(entry) + b"\n" for entry in kept)
            self._rewrite(content)
            self._count, self._size = len(kept), len(content)
            self._last = None  # nothing is replaced of what was rewritten


def read(file: Path) -> list[LedgerEntry]:
    """The entries of a ledger; none: there is no such file."""
    try:
        # The end of the last entry may not be there yet, or never have come.
        *whole, _ = file.read_bytes().split(b"\n")
        return [_decode(entry) for entry in whole]
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise PipelineError(
            f"{file} cannot be read, and it says what was sent",
            hint="Bring it back from a copy, or remove it and run `headrace pipeline --adopt SINK`:"
            " everything in the log is then sent again.",
        ) from error


def redriven(entries: Sequence[LedgerEntry], kept: Collection[str]) -> int:
    """How many dead letters were sent again and have left their table, which has these files."""
    found = [entry for entry in entries if entry.what == "redriven"]
    doubtful = undone(found[-1], kept) if found else None
    total = sum(entry.counts.sent for entry in found)
    return total - (doubtful.counts.sent if doubtful else 0)


def undone(entry: LedgerEntry | None, kept: Collection[str]) -> LedgerEntry | None:
    """The entry, if its dead letters are all still in the table; only the last one may be so."""
    # It is written before they leave, and its process may have been killed in between.
    return entry if entry and entry.files and set(entry.files) <= set(kept) else None


def _truncate_partial(file: Path) -> int:
    """Remove a last entry that a crash has cut short; returns the size of the file."""
    if not file.exists():
        return 0
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with file.open("r+b") as opened:
            opened.truncate(whole)
            os.fsync(opened.fileno())
    return whole


def joined(entries: list[LedgerEntry]) -> list[LedgerEntry]:
    """The same in fewer entries: old batches are added up."""
    counted = [entry for entry in entries if entry.what in (*SETTLED, "redriven", "continued")]
    old, kept = counted[:-_KEPT], counted[-_KEPT:]
    summary: list[LedgerEntry] = []
    redriven: list[LedgerEntry] = []
    for entry in old:
        if entry.what == "redriven":
            redriven = [_added(redriven[-1], entry) if redriven else entry]
            continue
        if entry.what == "continued":
            summary.append(entry)
            continue
        if not entry.changes and summary:
            continue
        if summary and summary[-1].what == "earlier" and _group(summary[-1]) == _group(entry):
            summary[-1] = _added(summary[-1], entry)
        else:
            summary.append(msgspec.structs.replace(entry, what="earlier"))
    owner = [entry for entry in entries if entry.what == "writer"][-1:]
    waiting = [entry for entry in entries[-1:] if entry.what == "paused"]
    return [*owner, *redriven, *summary, *kept, *waiting]


def _group(entry: LedgerEntry) -> tuple[object, ...]:
    return entry.epoch, entry.writer, entry.rendered


def _added(one: LedgerEntry, other: LedgerEntry) -> LedgerEntry:
    counts = {
        name: getattr(one.counts, name) + getattr(other.counts, name)
        for name in Counts.__struct_fields__
    }
    return msgspec.structs.replace(
        one,
        batch=other.batch,
        last=other.last or one.last,
        generation=other.generation if other.last else one.generation,
        changes=one.changes + other.changes,
        counts=Counts(**counts),
        at=other.at,
        batches=one.batches + other.batches,
        doubtful=one.doubtful + other.doubtful,
        files=[],
    )
