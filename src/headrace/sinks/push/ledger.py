"""What a push sink has sent, batch by batch: lines of JSON in the sink's own folder.

A batch has a line when it begins, one that says how far it is if it takes long or waits, and one
when it is settled, which is on disk before the batch counts as stored.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ...errors import PipelineError, SinkFenced
from .. import Progress
from ..lake.disk import sync_names
from .delivery import Counts, Point

if TYPE_CHECKING:
    from .events import Chunk

FILE = "sent.jsonl"
SETTLED = ("settled", "earlier")  # what a line is called that counts events
_KEPT = 1000  # settled batches; those before them are joined into one line
_MOST_LINES = 5000


class Rendered(msgspec.Struct, frozen=True, omit_defaults=True):
    """What decides how many events changes become; settings may differ later."""

    format: str
    tables: tuple[str, ...] = ()
    splits_keys: bool = False
    adds_tombstones: bool = False


class Seen(msgspec.Struct):
    """The changes that a task has read."""

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

    def copy(self) -> Seen:
        """The same, which does not change with it."""
        return Seen(self.changes, self.first, self.last, set(self.epochs))


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line."""

    what: Literal["writer", "begun", "paused", "settled", "earlier", "redriven"]
    writer: str = ""  # whose batch it is
    batch: int = -1
    epoch: str = ""
    first: int = 0  # sequences of the changes that were there
    last: int = 0
    changes: int = 0
    counts: Counts = msgspec.field(default_factory=Counts)
    at: int = 0  # microseconds since 1970
    tasks: int = 0  # in how many parts the batch is sent …
    points: dict[int, Point] = {}  # … and where those stand that are not settled,
    read: dict[int, Seen] = {}  # … which need not read these changes again
    batches: int = 1  # how many it stands for
    # Events that may have come twice, because nobody knew that they had been sent.
    doubtful: int = msgspec.field(default=0, name="again")  # as files that are there say
    rendered: Rendered | None = None  # what events the changes stood for
    closed: bool = False  # it waited, and whoever sent it has ended without doing more
    files: list[str] = []  # of dead letters, which leave their table with what was sent of them


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode


class Ledger:
    """The file, as its writer sees it."""

    def __init__(self, file: Path, writer: str) -> None:
        self._file = file
        self._writer = writer
        self._count = 0  # of lines
        self._size = 0  # in bytes, of whole lines
        self._last: Line | None = None
        self._last_size = 0
        self.epochs: list[str] = []  # the logs that were followed, in order
        self._settled: Line | None = None  # the last one, of any writer
        self._own: Line | None = None  # the last one of this writer
        self._paused: Line | None = None
        self._begun = 0  # how often the batch after it was, as far as its end is not known
        self._last_redriven: Line | None = None

    @classmethod
    def open(cls, folder: str, writer: str, *, adopt: bool) -> Ledger:
        """The sink's ledger; that of another writer is refused."""
        file = Path(folder, FILE)
        file.parent.mkdir(parents=True, exist_ok=True)
        ledger = cls(file, writer)
        ledger._size = _mend(file)
        lines = read(file)
        owner = next((line.writer for line in reversed(lines) if line.what == "writer"), writer)
        if owner != writer and not adopt:
            raise SinkFenced(f"another pipeline has sent what {file} tells of")
        for line in lines:
            ledger._take(line)
        if not lines or owner != writer:
            ledger._append(Line("writer", writer), sync=True)
        return ledger

    @property
    def epoch(self) -> str:
        """The log that was followed so far; "": none yet."""
        return self._settled.epoch if self._settled else ""

    def progress(self) -> Progress | None:
        """Up to where every change is settled; None: nothing is."""
        line = self._settled
        return Progress(line.epoch, line.last) if line and line.last else None

    def settled(self, batch: int) -> Line | None:
        """The line of a batch of this writer that is settled; None: it is not."""
        own = self._own
        return own if own is not None and batch <= own.batch else None

    def paused(self, batch: int) -> Line | None:
        """Where a batch was interrupted; None: it was not, as far as is known."""
        line = self._paused
        return line if line is not None and line.batch == batch else None

    @property
    def interrupted(self) -> bool:
        """Whether a batch was begun and is to be sent to its end."""
        return self._paused is not None or self._begun > 0

    @property
    def unsure(self) -> bool:
        """Whether more of the batch may have been sent than is known."""
        return self._begun > 1

    def begin(self, batch: int, at: int) -> None:
        """Note that a batch begins."""
        self._append(Line("begun", self._writer, batch, at=at), sync=False)

    def pause(self, line: Line) -> None:
        """Note how far a batch is; it takes the place of what was noted of it just before."""
        last = self._last
        if last is not None and (last.what, last.batch) == (line.what, line.batch):
            self._replace(line)
        else:
            self._append(line, sync=True)

    def settle(self, line: Line) -> None:
        """Note that a batch is settled, or that dead letters were sent again."""
        self._append(line, sync=True)

    def withdraw(self, kept: Collection[str]) -> None:
        """Take back that dead letters were sent again, if their table still has them all."""
        if (line := undone(self._last_redriven, kept)) is not None:
            less = Counts(sent=-line.counts.sent)
            self.settle(Line("redriven", self._writer, counts=less, at=line.at))

    def _append(self, line: Line, *, sync: bool) -> None:
        begin = self._size
        encoded = _encode(line) + b"\n"
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            # What follows is the beginning of a line for which there was no room.
            file.truncate(begin)
            file.seek(begin)
            file.write(encoded)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        self._size, self._last_size = begin + len(encoded), len(encoded)
        self._take(line)

    def _replace(self, line: Line) -> None:
        """Put a line in the place of the last one, which stays if there is no room for it."""
        begin = self._size - self._last_size
        encoded = _encode(line) + b"\n"
        self._rewrite(self._file.read_bytes()[:begin] + encoded)
        self._size, self._last_size = begin + len(encoded), len(encoded)
        self._take(line)

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

    def _take(self, line: Line) -> None:
        self._count += 1
        self._last = line
        if line.what in SETTLED:
            if line.last and line.epoch not in self.epochs:
                self.epochs.append(line.epoch)
            self._settled = self._merged(line)
            self._paused, self._begun = None, 0
            if line.writer == self._writer:
                self._own = line
        elif line.what == "begun":
            self._begun += 1
        elif line.what == "paused" and line.writer == self._writer:
            self._paused = line
            self._begun = 0 if line.closed else self._begun
        elif line.what == "redriven":
            self._last_redriven = line
        elif line.what == "writer":
            self._paused, self._begun = None, 0

    def _merged(self, line: Line) -> Line:
        # A batch without changes says nothing of the log.
        known = self._settled
        if known is None or line.last:
            return line
        return msgspec.structs.replace(line, epoch=known.epoch, last=known.last)

    def tend(self) -> None:
        """Keep the file short: old batches become one line."""
        if self._count > _MOST_LINES:
            kept = joined(read(self._file))
            content = b"".join(_encode(line) + b"\n" for line in kept)
            self._rewrite(content)
            self._count, self._size = len(kept), len(content)
            self._last = None  # nothing is replaced of what was rewritten


def read(file: Path) -> list[Line]:
    """The lines of a ledger; none: there is no such file."""
    try:
        # The end of the last line may not be there yet, or never have come.
        *whole, _ = file.read_bytes().split(b"\n")
        return [_decode(line) for line in whole]
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise PipelineError(
            f"{file} cannot be read, and it says what was sent",
            hint="Bring it back from a copy, or remove it and run `headrace pipeline --adopt SINK`:"
            " everything in the log is then sent again.",
        ) from error


def redriven(lines: Sequence[Line], kept: Collection[str]) -> int:
    """How many dead letters were sent again and have left their table, which has these files."""
    told = [line for line in lines if line.what == "redriven"]
    doubtful = undone(told[-1], kept) if told else None
    total = sum(line.counts.sent for line in told)
    return total - (doubtful.counts.sent if doubtful else 0)


def undone(line: Line | None, kept: Collection[str]) -> Line | None:
    """A line that tells of dead letters which are all still there; only the last one may."""
    # It is written before they leave, and whoever wrote it may have been killed between.
    return line if line and line.files and set(line.files) <= set(kept) else None


def _mend(file: Path) -> int:
    """Take away the end of a line that a crash has cut short; returns how large the file is."""
    if not file.exists():
        return 0
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with file.open("r+b") as opened:
            opened.truncate(whole)
            os.fsync(opened.fileno())
    return whole


def joined(lines: list[Line]) -> list[Line]:
    """The same in fewer lines: of old batches only what they add up to."""
    told = [line for line in lines if line.what in (*SETTLED, "redriven")]
    old, kept = told[:-_KEPT], told[-_KEPT:]
    summary: list[Line] = []
    redriven: list[Line] = []
    for line in old:
        if line.what == "redriven":
            redriven = [_added(redriven[-1], line) if redriven else line]
            continue
        if not line.changes and summary:
            continue
        if summary and _alike(summary[-1]) == _alike(line):
            summary[-1] = _added(summary[-1], line)
        else:
            summary.append(msgspec.structs.replace(line, what="earlier"))
    owner = [line for line in lines if line.what == "writer"][-1:]
    waiting = [line for line in lines[-1:] if line.what == "paused"]
    return [*owner, *redriven, *summary, *kept, *waiting]


def _alike(line: Line) -> tuple[object, ...]:
    return line.epoch, line.writer, line.rendered


def _added(one: Line, other: Line) -> Line:
    counts = {
        name: getattr(one.counts, name) + getattr(other.counts, name)
        for name in Counts.__struct_fields__
    }
    return msgspec.structs.replace(
        one,
        batch=other.batch,
        last=other.last or one.last,
        changes=one.changes + other.changes,
        counts=Counts(**counts),
        at=other.at,
        batches=one.batches + other.batches,
        doubtful=one.doubtful + other.doubtful,
        files=[],
    )
