"""A destination written in Python, called by the pipeline with ETL events.

    a batch ─▶ one task reads its log range ─▶ events ─▶ write_events, some at a time ─▶ ledger

One task calls the destination, so that events come in the log's order. When a call fails, the task
ends with how far it came; the driver waits, and the next task goes on from there with a new object.
The ledger is written after the whole batch, so a crash before that brings the batch again.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from ..change.event import Change
from ..errors import (
    ConfigError,
    HeadraceError,
    LogReplaced,
    PipelineError,
    SinkFenced,
    SinkRefused,
    SinkUnavailable,
)
from ..formats.etl import Destination, Etl, Event, decode
from ..plugins import Finding
from ..retry import Backoff
from ..transforms.rules import TableTransform, expect_not_computed
from . import DeliveryStatus, LogBatch, LogRange, Progress, Sink, SinkWriter, Takes
from .lake.disk import move_aside, sync_names

LEDGER = "destination.json"

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SHORTEST_SECRET = 4  # a shorter text is in every message


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationSink(Sink):
    """A class of one's own with the method `write_events`, a coroutine or a plain function."""

    takes: ClassVar[Takes] = Takes.LOG_RANGE
    sends: ClassVar[bool] = True

    name: str
    # module:Name; "class" is a keyword of Python.
    class_: str = field(metadata={"name": "class"})
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold passwords
    source: str = ""  # whose changes it gets; "": those of all sources
    tables: tuple[str, ...] = ()  # globs; none: all
    batch_size: int = 1000  # events that are handed over at once, about
    batch_seconds: float = 0.2  # how often to look for new changes
    retry_first_seconds: float = 1.0  # before the second try; doubled each time …
    retry_longest_seconds: float = 60.0  # … up to this
    retry_jitter: float = 0.1  # by which share a wait is longer or shorter, at random
    max_changes_per_batch: int | None = None  # None: the pipeline's
    transforms: Mapping[str, TableTransform] = field(default_factory=dict)  # by table
    # Where the sink keeps its ledger; the pipeline sets it.
    folder: str = field(default="", repr=False, metadata={"setting": False})

    def __post_init__(self) -> None:
        expect_not_computed(self.transforms, "type: destination")
        if not _NAME.fullmatch(self.class_):
            raise ConfigError(f"class must be module:Name, not {self.class_}")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be 1 or more, not {self.batch_size}")
        for name in ("batch_seconds", "retry_first_seconds", "retry_longest_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.retry_jitter < 1:
            raise ConfigError(f"retry_jitter must be from 0 up to 1, not {self.retry_jitter}")
        if (most := self.max_changes_per_batch) is not None and most < 1:
            raise ConfigError(f"max_changes_per_batch must be 1 or more, not {most}")

    @property
    def parallelism(self) -> int | None:
        """One task alone: several could not keep the order of the log."""
        return 1

    @property
    def whole_transactions(self) -> bool:
        """The marks where a transaction begins and ends stand at changes of any table."""
        return True

    def open(self, writer: str, *, adopt: bool = False) -> DestinationWriter:
        """Begin to write."""
        if not self.folder:
            raise PipelineError(f"no folder is set for the ledger of sink {self.name}")
        self.factory()
        return DestinationWriter(self, writer, adopt=adopt)

    def check(self) -> list[Finding]:
        """Whether its class can be imported; it is not called."""
        self.factory()
        return [Finding("class", ok=True, detail=f"{self.class_} can be imported")]

    def reset_effect(self) -> str:
        """What `reset` will do."""
        return "moves its account of what was handed over aside; the class gets events again"

    def reset(self, writer: str) -> None:
        """Move the ledger aside."""
        move_aside(Path(self.folder, LEDGER))

    def factory(self) -> Callable[..., Destination]:
        """What makes the destination; a ConfigError when it cannot be imported."""
        module, _, name = self.class_.partition(":")
        try:
            found: Callable[..., Destination] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"class: {self.class_} cannot be imported: {error}",
                hint="Install its package, or name its folder in PYTHONPATH, wherever the pipeline "
                "and Spark's workers run.",
            ) from error
        return found

    def masked(self, text: str) -> str:
        """A text without the values of `options`, which may be passwords."""
        for secret in sorted(set(_texts(self.options)), key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "***")
        return text


def _texts(options: Any) -> Iterator[str]:
    """Every value in some options, however deep, as a message may show it."""
    if isinstance(options, Mapping):
        options = list(options.values())
    if isinstance(options, list | tuple):
        yield from chain.from_iterable(map(_texts, options))
    elif isinstance(options, str | int | float) and not isinstance(options, bool):
        yield str(options)


# --- on the driver -------------------------------------------------------------------------------


class DestinationLedger(msgspec.Struct, frozen=True, kw_only=True):
    """How far the destination is, as the file beside the checkpoint has it."""

    writer: str
    epoch: str = ""
    sequence: int = 0  # the destination has everything up to it
    generation: str = "0"  # of the log; "": not known


class DestinationWriter(SinkWriter[LogBatch]):
    """A destination while a query sends to it."""

    def __init__(self, sink: DestinationSink, writer: str, *, adopt: bool) -> None:
        self._sink = sink
        self._adopt = adopt
        self._backoff = Backoff(
            sink.retry_first_seconds, sink.retry_longest_seconds, sink.retry_jitter
        )
        self._closed = threading.Event()
        self._status = DeliveryStatus()
        self._file = Path(sink.folder, LEDGER)
        ledger = _read(self._file) or DestinationLedger(writer=writer)
        if ledger.writer != writer and not adopt:
            raise SinkFenced(f"another pipeline writes to the destination of sink {sink.name}")
        self._ledger = msgspec.structs.replace(ledger, writer=writer)
        _write(self._file, self._ledger)

    def progress(self) -> Progress | None:
        """Up to where the destination has everything."""
        ledger = self._ledger
        place = Progress(ledger.epoch, ledger.sequence, ledger.generation)
        return place if ledger.epoch else None

    def continue_in(self, epoch: str, upto: int) -> None:
        """Note the same place under the restored log's name."""
        self._note(epoch, self._ledger.sequence)

    def go_back(self, upto: int) -> None:
        """Note that the destination has this log up to `upto`."""
        self._note(self._ledger.epoch, upto)

    def status(self) -> DeliveryStatus:
        """What was sent, and what waits."""
        return self._status

    def close(self) -> None:
        """End what waits, soon."""
        self._closed.set()

    def write(self, batch: LogBatch, batch_id: int) -> int:
        """Hand over the events that the destination does not have yet."""
        epoch, after, tries, changes = self._ledger.epoch, self._ledger.sequence, 0, 0
        while True:
            task = HandOver(self._sink, epoch, after, adopt=self._adopt)
            found = [msgspec.json.decode(each, type=HandedOver) for each in batch.run(task)]
            if not found:
                return changes  # the batch is empty
            [done] = found
            epoch, after, changes = done.epoch, done.reached, changes + done.changes
            tries = 1 if done.events else tries + 1
            self._count(done)
            if not done.error:
                break
            if done.refused:
                reason = self._sink.masked(done.error)
                hint = self._sink.masked(done.hint)
                raise _ERRORS.get(done.refused, SinkRefused)(reason, hint=hint)
            self._wait(done.error, tries)
        self._note(epoch, after)
        return changes

    def _count(self, done: HandedOver) -> None:
        status = self._status
        sent, requests = status.sent + done.events, status.requests + done.calls
        if done.events or not done.error:  # it accepts events again
            status = DeliveryStatus(retries=status.retries)
        self._status = replace(status, sent=sent, requests=requests)

    def _wait(self, error: str, tries: int) -> None:
        status, reason = self._status, self._sink.masked(error)
        since = status.since or time.time()
        retries = status.retries + 1
        self._status = replace(status, reason=reason, since=since, rounds=tries, retries=retries)
        if self._closed.wait(self._backoff.wait(tries)):
            raise SinkUnavailable(f"{self._sink.name}: {reason}")

    def _note(self, epoch: str, sequence: int) -> None:
        ledger = msgspec.structs.replace(
            self._ledger, epoch=epoch, sequence=sequence, generation=self.generation
        )
        if ledger != self._ledger:
            _write(self._file, ledger)
            self._ledger = ledger


def _read(file: Path) -> DestinationLedger | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=DestinationLedger)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise PipelineError(
            f"the ledger {file} cannot be read",
            hint="Move it away: the pipeline then begins with what its checkpoint knows.",
        ) from error


def _write(file: Path, ledger: DestinationLedger) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    with fresh.open("wb") as opened:
        opened.write(msgspec.json.encode(ledger))
        opened.flush()
        os.fsync(opened.fileno())
    fresh.replace(file)
    sync_names(file.parent)


# --- in a task -----------------------------------------------------------------------------------


class HandedOver(msgspec.Struct):
    """What a task has done."""

    epoch: str
    reached: int  # everything up to this sequence is with the destination
    changes: int = 0
    events: int = 0
    calls: int = 0
    error: str = ""  # why it ended before the end of its range; "": it did not
    refused: str = ""  # the error's class, when no retry can help
    hint: str = ""


_ERRORS: Mapping[str, type[HeadraceError]] = {
    error.__name__: error for error in (ConfigError, LogReplaced, SinkRefused)
}


@dataclass(frozen=True, slots=True)
class HandOver:
    """A task that hands the events of a log range to the destination."""

    sink: DestinationSink
    epoch: str  # of the log that the destination has events of; "": of none yet
    after: int
    adopt: bool

    def __call__(self, wanted: LogRange) -> HandedOver:
        """Hand over what comes after `after`."""
        after = self.after
        if self.epoch not in ("", wanted.epoch):
            after = 0  # sequences of another log
            if not self.adopt:
                error = f"what the sink {self.sink.name} has sent comes from another log"
                return HandedOver(self.epoch, self.after, error=error, refused="LogReplaced")
        wanted = wanted.beyond(after)
        done = HandedOver(wanted.epoch, wanted.after)
        if wanted.after >= wanted.upto:
            return done  # it comes again
        for changes, events in self._portions(wanted):
            if events and not self._called(events, done):
                return done
            done.changes, done.reached = done.changes + len(changes), changes[-1].sequence
        done.reached = wanted.upto
        return done

    def _called(self, events: list[Event], done: HandedOver) -> bool:
        try:
            _calls(self.sink).write(events)
        except HeadraceError as error:
            done.error, done.hint = str(error), error.hint
            done.refused = "" if error.retry else type(error).__name__
        # Whatever a destination raises is tried again; some libraries let a cancellation out.
        except (Exception, asyncio.CancelledError, SystemExit) as error:  # noqa: BLE001
            done.error = f"{type(error).__name__}: {error}"
        if done.error:
            _forget(self.sink)
            return False
        done.events, done.calls = done.events + len(events), done.calls + 1
        return True

    def _portions(self, wanted: LogRange) -> Iterator[tuple[list[Change], list[Event]]]:
        """Changes with their events, which are one stream; the events of a change stay together."""
        stream = Etl().open()
        changes: list[Change] = []
        events: list[Event] = []
        for change, seen in self._shaped(wanted):
            if not changes and change.sequence == wanted.after + 1:
                self._see_earlier(stream, wanted, change)
            changes.append(change)
            if self.sink.source in ("", change.table.source):
                wants = seen and self._wants(change)
                events += map(decode, stream.encode(change, wanted=wants))
            if len(events) >= self.sink.batch_size:
                yield changes, events
                changes, events = [], []
        if changes:
            yield changes, events

    def _see_earlier(self, stream: Any, wanted: LogRange, first: Change) -> None:
        """Let a stream that begins within a TRUNCATE know the tables before its beginning."""
        begin = Etl().begin(first)
        if begin == first.sequence:
            return
        earlier = replace(wanted, after=begin - 1, upto=wanted.after)
        for change, seen in self._shaped(earlier):
            stream.see(change, wanted=seen and self._wants(change))

    def _shaped(self, wanted: LogRange) -> Iterator[tuple[Change, bool]]:
        """The changes of a range as the destination may see them, and whether it may."""
        transactions = chain.from_iterable(wanted.transactions())
        if not self.sink.shaping:
            return ((change, True) for change in chain.from_iterable(transactions))
        # Only here: it needs pyarrow.
        from ..transforms.changes import ShapedChanges  # noqa: PLC0415

        return chain.from_iterable(map(ShapedChanges(self.sink.shaping).each, transactions))

    def _wants(self, change: Change) -> bool:
        tables = self.sink.tables
        return not tables or any(map(change.table.matches, tables))


class DestinationCalls:
    """Calls a destination, whose method is a coroutine or a plain function, on one event loop."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._runner = asyncio.Runner()

    def write(self, events: list[Event]) -> None:
        """Return when the destination has the events."""
        pending = self._destination.write_events(events)
        if inspect.isawaitable(pending):
            self._runner.run(_result(pending))

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()


async def _result(pending: Awaitable[None]) -> None:
    await pending


# Kept for all tasks of a process: a destination may have a connection that takes long to open.
_opened: dict[bytes, DestinationCalls] = {}


def _key(sink: DestinationSink) -> bytes:
    return msgspec.json.encode([sink.name, sink.class_, sink.options])


def _calls(sink: DestinationSink) -> DestinationCalls:
    key = _key(sink)
    if key not in _opened:
        _opened[key] = DestinationCalls(sink.factory()(**sink.options))
    return _opened[key]


def _forget(sink: DestinationSink) -> None:
    """Make a new object for the next try: what failed may be a lost connection."""
    if calls := _opened.pop(_key(sink), None):
        calls.close()
