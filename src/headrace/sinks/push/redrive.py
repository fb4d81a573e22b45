"""Redrives: dead letters sent again, requested with a file in the sink's folder.

The process that requests need not be the one that sends. The file `redrive.json` is the request,
`redriven.json` the result of the last one. The driver does a redrive between batches, step by step,
so that it can be stopped. A step sends some dead letters and is then saved, first in the ledger and
then in the table of the dead letters; saving may be retried until it succeeds.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...change.path import without_schema
from ...errors import SinkRefused
from ..lake.delta import Marks
from ..lake.storage import Added, Folder
from ..results import Batches, result, results
from .channels import ReconnectingChannel
from .contract import Event, PushDestination
from .deadletters import (
    EARLIER,
    FILE,
    REFUSED,
    SCHEMA,
    DeadLetters,
    are_of_tables,
    events_of,
    ranks,
)
from .delivery import Counts, DeadLetterRange, EventDelivery, Policy, Position
from .events import part_of
from .ledger import LedgerEntry, PushLedger
from .spill import discard
from .tasks import DestinationRefusal, TaskReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .settings import PushSettings

logger = logging.getLogger(__name__)

_REQUEST_FILE, _RESULT_FILE = "redrive.json", "redriven.json"

MOST_LETTERS = 5000  # sent again before it is noted, and others get their turn
_MOST_BYTES = 32_000_000
_MOST_REASONS = 20
_CHUNK = 1000
SLICE = "redrive"  # the name of the file that tasks read letters from
_PLACE = ["epoch", "row", "sequence", "at"]
_POSITION = ("epoch", "sequence", "at")
_TABLE = ("op", "source", "schema", "table")  # by which a letter of a whole table is known
_MOST_PARTS = 8
_SMALLEST_PART = 500  # letters; to send fewer is not worth a task
_MOST_IDLE_STEPS = 3  # in a row in which nothing was settled; then the redrive ends


class RedriveRequest(msgspec.Struct, frozen=True):
    """Which dead letters to send again; the content of `redrive.json`."""

    id: str
    keys: list[str] = []  # table:key, as in a dead letter's row; none: all
    at: int = 0  # microseconds since 1970


class RedriveResult(msgspec.Struct, frozen=True):
    """What a redrive has done; the content of `redriven.json`."""

    id: str
    letters: int = 0  # that were there
    sent: int = 0  # and were accepted
    left: int = 0  # that are there now
    reason: str = ""  # why it stopped before its end
    done: bool = True  # False: it has begun
    refused: int = 0  # of those that were sent again, refused again …
    waiting: int = 0  # … and behind these
    reasons: dict[str, int] = {}  # why, each with how many


def request_redrive(folder: str, keys: Sequence[str] = ()) -> RedriveRequest:
    """Write a request; one that was not begun yet is replaced."""
    request = RedriveRequest(uuid.uuid4().hex, list(keys), time.time_ns() // 1000)
    _write(Path(folder, _REQUEST_FILE), request)
    return request


def requested(folder: str) -> RedriveRequest | None:
    """The request that waits; None: there is none."""
    file = Path(folder, _REQUEST_FILE)
    try:
        return msgspec.json.decode(file.read_bytes(), type=RedriveRequest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        logger.warning("file=%s cannot be read and is removed; ask once more", file)
        file.unlink(missing_ok=True)
        return None


def report_result(folder: str, result: RedriveResult) -> None:
    """Write a result; the request is removed when it is done."""
    _write(Path(folder, _RESULT_FILE), result)
    if result.done:
        _remove_request(Path(folder, _REQUEST_FILE), result.id)


def _remove_request(file: Path, request_id: str) -> None:
    """Remove a request that is done; one that has just replaced it stays."""
    aside = file.with_suffix(f".{uuid.uuid4().hex}")
    try:
        file.rename(aside)
    except FileNotFoundError:
        return
    try:
        known = msgspec.json.decode(aside.read_bytes(), type=RedriveRequest)
        if known.id != request_id and not file.exists():
            os.link(aside, file)
    except (FileExistsError, msgspec.DecodeError) as error:
        # A still newer request is there, or the file was no request.
        logger.debug("file=%s was dropped, error=%s", file, type(error).__name__)
    finally:
        aside.unlink()


def result_of(folder: str, request: RedriveRequest) -> RedriveResult | None:
    """The result of a request; None: it was not begun yet."""
    try:
        last = msgspec.json.decode(Path(folder, _RESULT_FILE).read_bytes(), type=RedriveResult)
    except FileNotFoundError:
        return None
    return last if last.id == request.id else None


def _write(file: Path, content: RedriveRequest | RedriveResult) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(content))
    fresh.replace(file)


# --- the letters that come next ------------------------------------------------------------------


class RedriveSlice(NamedTuple):
    """Some dead letters that are sent again together."""

    letters: pa.Table  # in order
    files: list[str]  # of the table, which they are in
    last: bool  # no others are to be sent again

    @property
    def of_table(self) -> str:
        """The table of which it is a TRUNCATE or a SCHEMA; "": it is none."""
        return str(self.letters["row"][0]) if are_of_tables(self.letters) == [True] else ""


@dataclass(slots=True)
class RedriveRun:
    """A redrive that is running, slice by slice."""

    request: RedriveRequest
    letters: int  # that were there
    index: LetterIndex
    sent: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    reason: str = ""  # why it stopped before its end
    # Rows of which a letter was refused again: the rest of their letters is not tried.
    stuck: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)  # tables of which such a letter has to wait

    def wants(self, row: str) -> bool:
        """Whether a row's letters are to be sent."""
        if self.closed and any(row == each or row.startswith(f"{each}:") for each in self.closed):
            return False
        if row in self.stuck or not self.request.keys:
            return row not in self.stuck
        # source|schema.table:key
        name = row.partition("|")[2]
        return name in self.request.keys or without_schema(name) in self.request.keys

    def close(self, table: str) -> None:
        """Leave a letter of a whole table, and what follows it, where it is."""
        self.closed.add(table)
        self.index.keep(self.wants)

    def add(self, report: RedriveReport) -> None:
        """Count what a task has done."""
        self.sent += len(report.sent)
        self.refused += len(report.refused)
        self.reasons.update(each.reason for each in report.refused if each.reason)
        stuck = {each.row for each in report.refused} - self.stuck
        self.stuck |= stuck
        self.index.forget(stuck)
        self.reason = self.reason or report.delivery.reason

    def result(self, left: int, waiting: int, *, done: bool = True) -> RedriveResult:
        """The result so far."""
        return RedriveResult(
            self.request.id,
            self.letters,
            self.sent,
            left,
            self.reason,
            done,
            self.refused,
            waiting,
            dict(self.reasons.most_common(_MOST_REASONS)),
        )


class LetterLocation(NamedTuple):
    """The order of a letter, and its file."""

    rank: int  # of its log
    sequence: int
    at: int
    number: int  # among the letters of its file
    file: int  # which one of those that make up the table


_ORDER = [(name, "ascending") for name in LetterLocation._fields[:3]]


@dataclass(slots=True)
class LetterIndex:
    """Where the letters of a request are; no file ever changes, so each is listed once."""

    folder: Folder
    ranks: dict[str, int]  # of the logs, in the order in which they were followed
    _files: dict[str, pa.Table] = field(default_factory=dict)  # by file: its letters, in order

    def chosen(self, files: Sequence[str], wants: Callable[[str], bool]) -> RedriveSlice:
        """The first letters of wanted rows, in the order of the logs."""
        known = self._files
        self._files = {
            file: known[file] if file in known else self._listed(file, wants) for file in files
        }
        heads = [
            table.slice(0, MOST_LETTERS).append_column("file", pa.repeat(pa.scalar(at), count))
            for at, table in enumerate(self._files.values())
            if (count := min(table.num_rows, MOST_LETTERS))
        ]
        first = _places(pa.concat_tables(heads)) if heads else []
        letters = _before_table(_within(self._read(files, first)))
        opened = [files[at] for at in sorted({place.file for place in first})]
        wanted = sum(table.num_rows for table in self._files.values())
        return RedriveSlice(letters, opened, letters.num_rows == wanted)

    def keep(self, wants: Callable[[str], bool]) -> None:
        """Leave out the letters of rows that are no longer wanted."""
        for file, table in self._files.items():
            wanted = [wants(row) for row in table["row"].to_pylist()]
            self._files[file] = table.filter(pa.array(wanted, pa.bool_()))

    def forget(self, rows: Collection[str]) -> None:
        """Leave out the letters of rows that are no longer wanted."""
        if rows:
            left_out = pa.array(rows, pa.string())
            for file, table in self._files.items():
                self._files[file] = table.filter(pc.invert(pc.is_in(table["row"], left_out)))

    def _listed(self, file: str, wants: Callable[[str], bool]) -> pa.Table:
        letters = self.folder.read(file, [*_PLACE, *_TABLE])
        for epoch in letters["epoch"].unique().to_pylist():
            self.ranks.setdefault(epoch, len(self.ranks))  # one that is new is the latest
        ranks = [self.ranks[epoch] for epoch in letters["epoch"].to_pylist()]
        rows = zip(letters["row"].to_pylist(), are_of_tables(letters), strict=True)
        # One of a whole table that is not wanted closes the table for those that are.
        wanted = [wants(row) or of_table for row, of_table in rows]
        columns = {
            "rank": pa.array(ranks, pa.int32()),
            "sequence": letters["sequence"],
            "at": letters["at"],
            "number": pa.array(range(letters.num_rows), pa.int64()),
            "row": letters["row"],
        }
        return pa.table(columns).filter(pa.array(wanted, pa.bool_())).sort_by(_ORDER)

    def _read(self, files: Sequence[str], places: Sequence[LetterLocation]) -> pa.Table:
        """The letters at some places, in their order."""
        if not places:
            return SCHEMA.empty_table()
        parts, order = [], list[int]()
        for file in sorted({place.file for place in places}):
            own = [at for at, place in enumerate(places) if place.file == file]
            numbers = pa.array([places[at].number for at in own], pa.int64())
            parts.append(self.folder.read(files[file]).take(numbers))
            order += own
        return pa.concat_tables(parts).take(pa.array(_inverse(order), pa.int64()))


def _places(listed: pa.Table) -> list[LetterLocation]:
    """The first of those that are listed, in order."""
    first = listed.sort_by(_ORDER).slice(0, MOST_LETTERS)
    columns = [first[name].to_pylist() for name in LetterLocation._fields]
    return [LetterLocation(*each) for each in zip(*columns, strict=True)]


def _rows(letters: pa.Table) -> Iterator[tuple[str, str, int, int]]:
    return zip(*(letters[name].to_pylist() for name in _PLACE), strict=True)


def _inverse(numbers: Sequence[int]) -> list[int]:
    """The places of the numbers, from the least number to the largest."""
    return sorted(range(len(numbers)), key=numbers.__getitem__)


def _before_table(letters: pa.Table) -> pa.Table:
    """The letters before the first one of a whole table; that one alone, where it is the first."""
    of_tables = are_of_tables(letters)
    return letters.slice(0, max(of_tables.index(True), 1)) if True in of_tables else letters


def _within(letters: pa.Table) -> pa.Table:
    """As many of the letters as a task may have in memory, and at least one."""
    total = 0
    for count, event in enumerate(letters["event"]):
        total += len(event.as_buffer()) if event.is_valid else 0
        if total > _MOST_BYTES and count:
            return letters.slice(0, count)
    return letters


class RewrittenFiles(NamedTuple):
    """What replaces files whose letters were sent again."""

    removed: list[str]
    added: list[Added]


def rewritten(
    folder: Folder, files: Sequence[str], reports: Sequence[RedriveReport]
) -> RewrittenFiles:
    """Files without the letters that were accepted, and with the reasons of those refused again."""
    gone = {tuple(place) for each in reports for place in each.sent}
    again = {(each.epoch, each.sequence, each.at): each for one in reports for each in one.refused}
    result = RewrittenFiles([], [])
    for file in files:
        letters = folder.read(file)
        places = [(epoch, sequence, at) for epoch, _, sequence, at in _rows(letters)]
        if not any(place in gone or place in again for place in places):
            continue
        letters = _with_new_reasons(letters, [again.get(place) for place in places])
        kept = letters.filter(pa.array([place not in gone for place in places], pa.bool_()))
        result.removed.append(file)
        if kept.num_rows:
            result.added.append(folder.write(kept, FILE, {}))
    return result


def _with_new_reasons(letters: pa.Table, refused: Sequence[RefusedAgain | None]) -> pa.Table:
    if not any(refused):
        return letters
    now = time.time_ns() // 1000
    columns = {
        "status": [each and REFUSED for each in refused],
        "reason": [each and each.reason for each in refused],
        "attempts": [each and each.attempts for each in refused],
        "refused_at": [each and now for each in refused],
    }
    for name, values in columns.items():
        at = SCHEMA.get_field_index(name)
        known = letters[name].combine_chunks()
        fresh = pa.array(values, SCHEMA.field(name).type)
        column = [
            new if each else old for each, new, old in zip(refused, fresh, known, strict=True)
        ]
        letters = letters.set_column(
            at, SCHEMA.field(name), pa.array([value.as_py() for value in column], fresh.type)
        )
    return letters


# --- tasks ---------------------------------------------------------------------------------------


class RefusedAgain(msgspec.Struct, frozen=True):
    """A dead letter that was refused again."""

    epoch: str
    sequence: int
    at: int
    row: str
    reason: str
    attempts: int


class RedriveReport(msgspec.Struct):
    """What a task of a redrive reports to the driver."""

    delivery: TaskReport
    sent: list[tuple[str, int, int]] = []  # log, sequence and place of what was accepted
    refused: list[RefusedAgain] = []


class _RefusedLetters:
    """Takes what is refused again; what waits behind it stays as it is."""

    def __init__(self, epoch: str, report: RedriveReport) -> None:
        self.places: set[Position] = set()
        self._epoch = epoch
        self._report = report

    def add(self, event: Event, status: str, reason: str, attempts: int) -> None:
        self.places.add((event.sequence, event.at))
        if status == REFUSED:
            place = self._epoch, event.sequence, event.at
            self._report.refused.append(RefusedAgain(*place, event.row, reason, attempts))


@dataclass(frozen=True, slots=True)
class RedriveTask:
    """A task that sends dead letters, in order; those not accepted stay in the table."""

    destination: PushDestination
    policy: Policy
    folder: Folder
    file: str
    parts: int

    def __call__(self, batches: Batches) -> Batches:
        """Send those of a part."""
        for part in (part for batch in batches for part in batch.column(0).to_pylist()):
            yield result(self.sent(part))

    def sent(self, part: int) -> RedriveReport:
        """Send the letters of a part, until one log's are not settled."""
        report = RedriveReport(TaskReport(part, self.parts))
        blocked: dict[str, DeadLetterRange] = {}
        own = (
            (epoch, event)
            for epoch, event in events_of(self.folder.read(self.file))
            if part_of(event.row, self.parts) == part
        )
        for epoch, events in groupby(own, itemgetter(0)):
            self._send(report, epoch, blocked, [event for _, event in events])
            if report.delivery.open or report.delivery.refusal:
                break
            blocked = dict.fromkeys(blocked, EARLIER)
        return report

    def _send(
        self,
        report: RedriveReport,
        epoch: str,
        blocked: dict[str, DeadLetterRange],
        events: list[Event],
    ) -> None:
        task, letters = report.delivery, _RefusedLetters(epoch, report)
        channel = ReconnectingChannel(self.destination)
        delivery = EventDelivery(channel.send, self.policy, letters, blocked, counts=task.counts)
        try:
            delivery.run(events[at : at + _CHUNK] for at in range(0, len(events), _CHUNK))
        except SinkRefused as error:
            task.refusal = DestinationRefusal(str(error), error.hint)
        task.stopped = delivery.stopped
        unsettled = letters.places | _unsettled(delivery, events)
        places = [(event.sequence, event.at) for event in events]
        report.sent += [(epoch, *place) for place in places if place not in unsettled]


def _unsettled(delivery: EventDelivery, events: Sequence[Event]) -> set[Position]:
    if delivery.stopped is None:
        return set()
    checkpoint = delivery.stopped.checkpoint
    pending = {(each.sequence, each.at) for each in checkpoint.pending}
    places = {(event.sequence, event.at) for event in events}
    end = checkpoint.sequence, checkpoint.at
    return {place for place in places if place in pending or place > end}


# --- the driver ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Unsaved:
    """What a step has sent and is not yet in the ledger or the table."""

    files: list[str]
    reports: list[RedriveReport]
    change: RewrittenFiles | None = (
        None  # of the table; computed once, so that it is not done twice
    )
    in_ledger: bool = False


class RedriveRunner:
    """Does the redrives of a sink, on the driver."""

    def __init__(
        self, sink: PushSettings, ledger: PushLedger, letters: DeadLetters, writer: str
    ) -> None:
        self._sink = sink
        self._ledger = ledger
        self._letters = letters
        self._writer = writer
        self._run: RedriveRun | None = None
        self._unsaved: _Unsaved | None = None
        self._ended = False
        self._idle_steps = 0

    @property
    def unsaved(self) -> bool:
        """Whether a step is still to be saved."""
        return self._unsaved is not None

    def step(self, spark: SparkSession, request: RedriveRequest) -> list[TaskReport]:
        """Send some more dead letters; returns what the tasks report."""
        if self._run is None or self._run.request.id != request.id:
            self._begin(request)
        assert self._run is not None
        piece = self._next_piece(self._run)
        reports = self._sent(spark, piece) if piece.letters.num_rows else []
        for each in reports:
            self._run.add(each)
        if piece.of_table and any(each.refused for each in reports):
            self._run.close(piece.of_table)
        settled = any(each.sent or each.refused for each in reports)
        self._idle_steps = 0 if settled else self._idle_steps + 1
        if self._idle_steps >= _MOST_IDLE_STEPS:
            self._run.reason = self._run.reason or "nothing was accepted"
        # What is stuck stays; what a part had no time for is chosen next.
        over = piece.last and not any(each.delivery.open for each in reports)
        self._ended = over or bool(self._run.reason)
        self._unsaved = _Unsaved(piece.files, reports)
        return [each.delivery for each in reports]

    def _next_piece(self, run: RedriveRun) -> RedriveSlice:
        """The next letters; one of a whole table is sent when none of its rows comes before it."""
        while True:
            piece = run.index.chosen(self._letters.files, run.wants)
            table = piece.of_table
            if not table:
                return piece
            epoch, sequence, at = (piece.letters[name][0].as_py() for name in _POSITION)
            behind = self._letters.has_before(table, (epoch, (sequence, at)), run.index.ranks)
            if run.wants(table) and not behind:
                return piece
            run.close(table)

    def failed(self, request: RedriveRequest, reason: str) -> RedriveResult:
        """The result of a request that ended with an error."""
        count = self._letters.count
        if self._run is None or self._run.request.id != request.id:
            return RedriveResult(request.id, count, left=count, reason=reason)
        # If its last step can be saved later, the result is reported once more.
        self._run.reason, self._ended = reason, True
        return self._run.result(count, 0)

    def _begin(self, request: RedriveRequest) -> None:
        letters, count = self._letters, self._letters.count
        order = ranks(letters.folder, letters.files, self._ledger.epochs)
        self._run = RedriveRun(request, count, LetterIndex(letters.folder, order))
        self._ended, self._idle_steps = False, 0
        report_result(self._sink.folder, RedriveResult(request.id, count, left=count, done=False))

    def _sent(self, spark: SparkSession, piece: RedriveSlice) -> list[RedriveReport]:
        sink, folder = self._sink, self._letters.folder
        most = sink.parallelism or min(spark.sparkContext.defaultParallelism, _MOST_PARTS)
        parts = max(1, min(most, piece.letters.num_rows // _SMALLEST_PART))
        file = folder.write(piece.letters, SLICE, {}).path
        resend = RedriveTask(sink, sink.policy, folder, file, parts)
        try:
            numbers = spark.range(parts, numPartitions=parts)
            return results(numbers, resend, RedriveReport)
        finally:
            discard(folder, file)

    def save(self) -> None:
        """Record what the last step has sent, if that is still to be done."""
        unsaved = self._unsaved
        if unsaved is None:
            return
        if any(each.sent or each.refused for each in unsaved.reports):
            if (change := unsaved.change) is None:
                change = rewritten(self._letters.folder, unsaved.files, unsaved.reports)
                unsaved.change = change
            if not unsaved.in_ledger:
                # Before they leave the table: a process killed in between sends them twice, and
                # none is missed when they are counted.
                sent = Counts(sent=sum(len(each.sent) for each in unsaved.reports))
                entry = LedgerEntry(
                    "redriven", self._writer, counts=sent, at=time.time_ns() // 1000
                )
                self._ledger.settle(msgspec.structs.replace(entry, files=change.removed))
                unsaved.in_ledger = True
            marks = Marks(batch_id=None, epoch=self._ledger.epoch, sequence=0)
            self._letters.commit(change.added, change.removed, marks=marks)
        self._unsaved = None

    def result(self) -> RedriveResult:
        """The result of the running redrive, which ends here if all is done."""
        assert self._run is not None
        run, left = self._run, self._letters.count
        waiting = self._letters.count_of(run.stuck) - run.refused if self._ended else 0
        result = run.result(left, max(waiting, 0), done=self._ended)
        if self._ended:
            self._run = None
        return result
