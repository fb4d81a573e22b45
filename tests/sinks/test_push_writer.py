"""The driver's side of sending, with tasks that run in this process: storage that fails, stops."""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pytest
from pyspark import cloudpickle as _cloudpickle

from headrace.errors import ConfigError, PipelineError, SinkUnavailable
from headrace.formats.catalogue import Formats
from headrace.pipeline import query
from headrace.pipeline import redrive as asking
from headrace.pipeline.options import Options
from headrace.pipeline.query import RangesBatch
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.pipeline.source import LOG_RANGES
from headrace.retry import Backoff
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.sinks import LogRange
from headrace.sinks.lake.delta import Marks
from headrace.sinks.lake.storage import Folder
from headrace.sinks.push import Event, PushSettings, redrive, spill
from headrace.sinks.push import ledger as ledgers
from headrace.sinks.push import writer as writers
from headrace.sinks.push.deadletters import DeadLetterBuffer, DeadLetters, ranks
from headrace.sinks.push.delivery import Counts, DeliveryCheckpoint
from headrace.sinks.push.ledger import LedgerEntry, PushLedger
from headrace.testing import wait_until
from tests.sinks.lake import put
from tests.sinks.push_harness import USERS, Post
from tests.sinks.socket_sink import Taken, kind, opened_office

cloudpickle: Any = _cloudpickle

Judge = Callable[[Taken], tuple[str, str, float]]


class Frame:
    """Rows on which tasks run here, with a copy of their function as Spark would make it."""

    def __init__(self, rows: list[pa.RecordBatch], task: Any = None) -> None:
        self._rows = rows
        self._task = task
        self.rdd = SimpleNamespace(getNumPartitions=lambda: len(rows))
        self.sparkSession = Here()

    def where(self, condition: str) -> Frame:
        return self  # every part has a range

    def mapInArrow(self, task: Any, schema: str) -> Frame:  # noqa: N802
        return Frame(self._rows, task)

    def collect(self) -> list[dict[str, str]]:
        said: list[dict[str, str]] = []
        for rows in self._rows:
            if self._task is None:
                said += rows.to_pylist()
                continue
            own = pickle.loads(cloudpickle.dumps(self._task))
            said += [row for batch in own(iter([rows])) for row in batch.to_pylist()]
        return said


class Here:
    """As much of Spark as a redrive needs."""

    sparkContext = SimpleNamespace(defaultParallelism=2)  # noqa: N815

    def range(self, count: int, **_: int) -> Frame:
        return Frame([pa.record_batch([[n]], ["id"]) for n in range(count)])


class Local(Post):
    """A post whose tasks run here."""

    def batch(self, after: int, upto: int, parts: int = 1) -> RangesBatch:
        path = str(self.log.path)
        ranges = [(self.log.epoch, after, upto, part, parts) for part in range(parts)]
        rows = [
            pa.record_batch([[value] for value in each], LOG_RANGES)
            for each in (ranges if after < upto else [])
        ]
        frame: Any = Frame(rows)
        return RangesBatch(frame, PipelineLog(DiskLog(path), Options(path=path)))

    def lines(self, *what: str) -> list[LedgerEntry]:
        """Of the ledger, those of some kinds."""
        return [each for each in ledgers.read(self.ledger) if each.what in what]

    @property
    def ledger(self) -> Path:
        return self.folder / "post" / ledgers.FILE

    def sequences(self) -> list[int]:
        return [event.sequence for event in self.office.taken]

    def redrive(self) -> redrive.RedriveResult:
        """All of them, as a running pipeline does."""
        request = redrive.request_redrive(self.sink.folder)
        here: Any = Here()

        def done() -> redrive.RedriveResult | None:
            self.writer.serve_requests(here)
            told = redrive.result_of(self.sink.folder, request)
            return told if told and told.done else None

        told = wait_until(done, timeout=120)
        assert told is not None
        return told


@pytest.fixture
def post(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.setattr(writers, "BACKOFF", Backoff(0.01, 60.0))
    with opened_office() as office:
        none: Any = None
        made = Local(none, tmp_path, office)
        yield made
        made.log.close()


def refusing(*sequences: int) -> Judge:
    def judge(event: Taken) -> tuple[str, str, float]:
        return ("refused", "no thanks", 0.0) if event.sequence in sequences else kind(event)

    return judge


def failing(method: Callable[..., Any], times: int, error: Exception) -> Callable[..., Any]:
    """A method that fails so many times before it does what it should."""
    left = [times]

    def wrapped(*given: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return method(*given, **named)

    return wrapped


def in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivery stops after each window."""
    policy: Any = PushSettings.policy
    whole = policy.fget
    assert whole
    short = property(lambda self: msgspec.structs.replace(whole(self), seconds=0.0))
    monkeypatch.setattr(PushSettings, "policy", short)


# --- storage that fails --------------------------------------------------------------------------


@pytest.mark.parametrize("held", [8_000_000, 1])
def test_dead_letters_that_cannot_be_written_make_nothing_go_out_twice(
    post: Local, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr("headrace.sinks.push.deadletters._BUFFERED_BYTES", held)
    post.users(*((n % 20, "-") for n in range(100)))
    post.office.judge = refusing(3, 7)
    wrong = failing(Folder.write, 3, SinkUnavailable("the disk is full"))
    monkeypatch.setattr(Folder, "write", wrong)
    post.write(parts=2)
    aside = {n for n in range(1, 101) if n % 20 in (3, 7)}
    assert sorted(post.sequences()) == sorted(set(range(1, 101)) - aside), "none twice"
    assert [each["sequence"] for each in post.letters()] == sorted(aside)
    [settled] = post.lines("settled")
    counts = settled.counts
    assert (counts.sent, counts.refused, counts.waiting, counts.skipped) == (90, 2, 8, 0)


def test_whoever_waits_for_the_storage_says_so_and_can_be_stopped(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.users((1, "-"), (2, "-"))
    post.office.judge = refusing(1)
    full = SinkUnavailable("the disk is full")
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "write", failing(Folder.write, 10**9, full))
        failed: list[BaseException] = []

        def write() -> None:
            try:
                post.write()
            except SinkUnavailable as error:
                failed.append(error)

        writing = threading.Thread(target=write)
        writing.start()
        wait_until(lambda: "the disk is full" in post.writer.status().reason, timeout=120)
        post.writer.close()
        writing.join()
        assert failed
    post.reopen()
    post.write()
    assert post.sequences() == [2]
    assert len(post.letters()) == 1


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (DeadLetters, "commit", SinkUnavailable("it did not take a commit")),
        (PushLedger, "settle", OSError(28, "No space left on device")),
        (PushLedger, "pause", OSError(28, "No space left on device")),
        (PushLedger, "begin", OSError(28, "No space left on device")),
    ],
)
def test_what_the_driver_notes_is_tried_until_it_is_noted(
    post: Local, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: Exception
) -> None:
    in_slices(monkeypatch)
    post.users(*((n, "-") for n in range(30)))
    post.office.judge = refusing(2)
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), 2, error))
    post.write()
    assert len(post.sequences()) == 29
    assert [each["sequence"] for each in post.letters()] == [2]
    assert post.writer.status().reason == ""


def test_a_commit_whose_answer_was_lost_is_not_done_twice(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.users((1, "-"), (2, "-"))
    post.office.judge = refusing(1)
    lost = failing(DeadLetters._load, 1, SinkUnavailable("no answer"))
    monkeypatch.setattr(DeadLetters, "_load", lost)
    post.write()
    assert [each["sequence"] for each in post.letters()] == [1]
    assert post.writer.status().dead_letters == 1


def test_a_line_that_was_cut_short_is_overwritten(tmp_path: Path) -> None:
    ledger = PushLedger.open(str(tmp_path), "query-1", adopt=False)
    with (tmp_path / ledgers.FILE).open("ab") as file:
        file.write(b'{"what":"settled","wri')  # the disk was full
    ledger.settle(LedgerEntry("settled", "query-1", 0, "A", 1, 9, 9))
    assert [line.what for line in ledgers.read(tmp_path / ledgers.FILE)] == ["writer", "settled"]


# --- slices --------------------------------------------------------------------------------------


def test_a_long_batch_is_noted_as_it_goes_and_reads_nothing_again(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_slices(monkeypatch)
    monkeypatch.setattr(writers, "BACKOFF", Backoff(60.0, 60.0))  # it would be waited for
    read: list[int] = []
    pieces = LogRange.pieces

    def looked(self: LogRange) -> Iterator[tuple[int, int, bytes]]:
        read.append(self.after)
        return pieces(self)

    monkeypatch.setattr(LogRange, "pieces", looked)
    monkeypatch.setattr("headrace.log.reader._PIECE_BYTES", 1000)
    post.users(*((n, "-") for n in range(60)))
    assert post.write() == 60
    assert post.sequences() == list(range(1, 61))
    assert len(read) > 3
    assert read[-1] > 30, "it goes on near where it was"
    assert len(post.lines("paused")) == 1, "each takes the place of the one before"
    [line] = post.lines("settled")
    assert (line.first, line.last, line.changes, line.doubtful) == (1, 60, 60, 0)


def test_a_stop_is_heard_after_a_slice_and_nothing_comes_twice(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_slices(monkeypatch)
    post.users(*((n, "-") for n in range(100)))
    post.office.judge = lambda event: (
        post.writer.close() if event.sequence == 35 else None,  # type: ignore[func-returns-value]
        kind(event),
    )[1]
    with pytest.raises(SinkUnavailable, match="interrupted"):
        post.write(parts=2)
    before = len(post.sequences())
    assert 0 < before < 100
    post.reopen()
    post.write(parts=2)
    assert sorted(post.sequences()) == list(range(1, 101)), "nothing twice"
    assert post.lines("settled")[-1].doubtful == 0


def test_a_redrive_is_done_in_slices_with_batches_between_them(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive, "MOST_LETTERS", 4)
    post.users(*((n % 5, "-") for n in range(20)))
    post.office.judge = refusing(1, 2, 3, 4, 5)
    post.write()
    assert len(post.letters()) == 20
    post.office.judge = refusing(2)
    request = redrive.request_redrive(post.sink.folder)
    here: Any = Here()
    post.writer.serve_requests(here)
    told = redrive.result_of(post.sink.folder, request)
    assert told is not None
    assert (told.sent, told.left, told.done) == (3, 17, False)
    post.users((0, "later"), (9, "later"))
    post.write()  # not behind the whole redrive
    assert post.sequences()[-1] == 22
    told = post.redrive()
    assert (told.left, told.refused, told.waiting) == (4, 1, 3)
    assert told.reasons == {"no thanks": 1}
    assert [each["status"] for each in post.letters()] == ["refused", *["waiting"] * 3]
    for row, found in post.office.rows().items():
        assert found == sorted(found), row
    post.office.judge = kind
    assert post.redrive().left == 0


def test_a_redrive_whose_end_cannot_be_noted_is_not_done_twice(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.users((1, "-"), (2, "-"))
    post.office.judge = refusing(1, 2)
    post.write()
    post.office.judge = kind
    wrong = failing(DeadLetters.commit, 2, SinkUnavailable("it did not take a commit"))
    monkeypatch.setattr(DeadLetters, "commit", wrong)
    request = redrive.request_redrive(post.sink.folder)
    here: Any = Here()
    post.writer.serve_requests(here)
    assert post.writer.status().reason == "it did not take a commit"
    post.users((1, "later"))
    post.write()  # waits until the letters have left
    told = redrive.result_of(post.sink.folder, request)
    assert told is not None
    assert (told.sent, told.left, told.done) == (2, 0, True)
    assert post.sequences() == [1, 2, 3]
    assert post.writer.status().reason == ""


def test_a_redrive_lists_the_letters_of_a_file_once_however_many_slices_it_has(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive, "MOST_LETTERS", 3)
    post.office.judge = refusing(*range(1, 31))
    for n in range(10):  # each a file
        post.users((n, "-"), (n + 10, "-"), (n % 2, "-"))
        post.write()
    assert len(post.letters()) == 30
    listed: Counter[str] = Counter()
    read, commit = Folder.read, DeadLetters.commit

    def looked(self: Folder, path: str, columns: list[str] | None = None) -> pa.Table:
        listed[path] += columns is not None
        return read(self, path, columns)

    def committed(*given: Any, **named: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "read", read)
            commit(*given, **named)

    monkeypatch.setattr(Folder, "read", looked)
    monkeypatch.setattr(DeadLetters, "commit", committed)
    post.office.judge = refusing(5)
    here: Any = Here()
    request = redrive.request_redrive(post.sink.folder)
    for n in range(20):
        post.writer.serve_requests(here)
        if n == 1:  # a batch between two slices: one goes behind its row's letters
            post.users((1, "later"), (99, "later"))
            post.write()
    told = redrive.result_of(post.sink.folder, request)
    assert told is not None
    assert (told.sent, told.refused, told.left, told.done) == (30, 1, 1, True)
    assert max(listed.values()) <= 2, "for the order of the logs, and for where they lie"
    assert sorted(post.sequences()) == sorted(set(range(1, 33)) - {5})
    for row, found in post.office.rows().items():
        assert found == sorted(found), row


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SinkUnavailable("/letters/7 cannot be read or written"), "/letters/7 cannot be read"),
        (OSError(28, "No space left on device", "/letters"), "No space left on device: /letters"),
        (RuntimeError("s3cret"), "it ended with RuntimeError; `headrace status` "),
    ],
)
def test_a_redrive_that_fails_says_why_and_what_it_has_sent(
    post: Local, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    monkeypatch.setattr(redrive, "MOST_LETTERS", 4)
    post.users(*((n, "-") for n in range(10)))
    post.office.judge = refusing(*range(1, 11))
    post.write()
    post.office.judge = refusing(2)
    request = redrive.request_redrive(post.sink.folder)
    here: Any = Here()
    post.writer.serve_requests(here)
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "write", failing(Folder.write, 1, error))
        with pytest.raises(type(error)):
            post.writer.serve_requests(here)
    told = redrive.result_of(post.sink.folder, request)
    assert told is not None
    assert told.reason.startswith(says)
    assert "s3cret" not in told.reason
    assert (told.letters, told.sent, told.refused, told.left, told.done) == (10, 3, 1, 7, True)
    post.office.judge = kind
    assert post.redrive().left == 0
    assert sorted(post.sequences()) == list(range(1, 11))


def test_who_asks_a_busy_sink_for_a_redrive_is_next_in_line(post: Local) -> None:
    post.users((1, "-"))
    post.office.judge = refusing(1)
    post.write()
    sending, go_on = threading.Event(), threading.Event()

    def judge(event: Taken) -> tuple[str, str, float]:
        if event.sequence == 2:
            sending.set()
            go_on.wait(30)
        return kind(event)

    post.office.judge = judge
    post.users((2, "-"))
    redrive.request_redrive(post.sink.folder)
    here: Any = Here()
    batch = threading.Thread(target=post.write)
    batch.start()
    assert sending.wait(120)
    redriving = threading.Thread(target=post.writer.serve_requests, args=(here,))
    redriving.start()
    redriving.join(0.1)  # in line, or gone already
    go_on.set()
    batch.join()
    redriving.join()
    assert post.sequences() == [2, 1]


def test_dead_letters_wait_for_a_batch_that_was_begun(post: Local) -> None:
    post.users((1, "-"), (2, "-"))
    post.office.judge = refusing(1)
    post.write()
    post.office.judge = kind
    post.writer._ledger.begin(1, 0)
    redrive.request_redrive(post.sink.folder)
    here: Any = Here()
    post.writer.serve_requests(here)
    assert len(post.letters()) == 1


# --- what tasks are told -------------------------------------------------------------------------


def test_many_blocked_rows_and_points_do_not_make_the_function_large(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    collect = Frame.collect

    def weighed(self: Frame) -> Any:
        sizes.append(len(cloudpickle.dumps(self._task)))
        return collect(self)

    monkeypatch.setattr(Frame, "collect", weighed)
    box = DeadLetterBuffer(post.sink.letters, post.log.epoch)
    for n in range(20_000):
        head = (1, 0, f"evt_{n}", f"shop|public.users:{n}", "INSERT", "shop", "public", "users")
        box.add(Event(*head, None, 0, b"{}"), "refused", "no", 1)
    box.flush()
    post.writer._letters.commit(box.added, marks=marks(post.log.epoch))
    post.users((1, "a"), (30_000, "b"))
    post.write()
    post.users((2, "c"), (30_001, "d"))
    post.write()
    assert post.sequences() == [2, 4]
    assert max(sizes) < 50_000
    for n in (5, 6):
        post.users((30_000 + n, "-"))
        post.write()
        assert post.sequences()[-1] == n
    parcels = list((post.folder / "post" / "dead_letters").glob("spill-*"))
    assert len(parcels) == 1, "only that of the letters as they are now"


def marks(epoch: str) -> Any:
    return Marks(batch_id=None, epoch=epoch, sequence=1)


def test_a_task_that_cannot_read_what_it_is_told_says_so(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "MOST_BYTES", 0)
    in_slices(monkeypatch)
    post.users(*((n, "-") for n in range(30)))
    post.write(upto=10)
    unreadable = failing(Folder.read, 2, SinkUnavailable("it cannot be read"))
    monkeypatch.setattr(Folder, "read", unreadable)
    post.write(parts=2)
    assert sorted(post.sequences()) == list(range(1, 31))


def test_a_task_says_its_word_without_pandas() -> None:
    told = (
        "import sys; from headrace.sinks.push.tasks import TaskReport; "
        "from headrace.sinks.results import result; "
        "batch = result(TaskReport(0)); assert batch.num_rows == 1; batch.validate(full=True); "
        "assert 'pandas' not in sys.modules, 'pandas was imported'"
    )
    subprocess.run([sys.executable, "-c", told], check=True)


def test_a_part_that_says_nothing_is_not_settled(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.users((1, "-"))
    whole = writers.PushWriter._delivered
    monkeypatch.setattr(writers.PushWriter, "_delivered", lambda *given: whole(*given)[:1])
    with pytest.raises(
        PipelineError, match=r"of the parts \[0, 1\] of the batch, \[0\] sent a report"
    ):
        post.write(parts=2)
    assert not post.lines("settled")


def test_events_of_a_task_that_spark_ran_again_may_have_come_twice(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sinks.push.tasks._repeated", lambda: True)
    post.users((1, "-"), (2, "-"))
    post.write()
    [line] = post.lines("settled")
    assert line.doubtful == 2


def test_speculation_is_refused() -> None:
    spark: Any = SimpleNamespace(conf={"spark.speculation": "true"})
    with pytest.raises(ConfigError, match=r"spark\.speculation is true, and the sink post sends"):
        query._expect_no_speculation(spark, "post")


# --- events that are too large -------------------------------------------------------------------


@pytest.mark.parametrize("format", ["savegress", "debezium", "entity"])
def test_what_a_reference_stands_for_can_be_read_at_its_path(post: Local, format: str) -> None:
    post.reopen(format=format)
    table = post.table("users", USERS)
    names = enumerate(["small", "x" * 5000, "small"])
    post.commit(*(put(table, id=number, name=name) for number, name in names))
    post.write()
    whole = {event.id: json.loads(event.payload or "") for event in post.office.taken}
    post.office.taken.clear()
    post.reopen("query-2", adopt=True, format=format, max_event_bytes=4000, oversize="reference")
    post.writer.write(post.batch(0, 3), 0)
    told = json.loads(post.office.taken[1].payload or "")
    settings = ServerSettings(port=0)
    formats = Formats().of_log(post.log.epoch)
    app = create_app(post.log, statuses=list, copy_again=None, settings=settings, formats=formats)
    with BackgroundServer(app, settings) as server:
        answer = httpx.get(f"{server.url}{told['reference']}")
    assert answer.json()["events"] == [whole[told["id"]]]
    assert told["bytes"] > 5000


# --- batches that come again ---------------------------------------------------------------------


def test_a_settled_batch_that_comes_with_more_sends_the_rest(post: Local) -> None:
    post.users(*((n, "-") for n in range(30)))
    post.write(upto=20)
    post.reopen()
    assert post.writer.write(post.batch(0, 20), 0) == 20
    assert post.sequences() == list(range(1, 21))
    assert post.writer.write(post.batch(0, 30), 0) == 10
    assert post.sequences() == list(range(1, 31))
    assert [(line.first, line.last) for line in post.lines("settled")] == [(1, 20), (21, 30)]


def test_points_are_of_use_only_for_the_same_events_and_parts(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.users(*((n, "-") for n in range(30)))
    with monkeypatch.context() as patched:
        in_slices(patched)
        several: list[dict[str, Any]] = [{}, {"tables": ("public.users",)}]
        for chosen in several:
            post.reopen(**chosen)
            post.writer.close()
            with pytest.raises(SinkUnavailable):
                post.write(parts=2)
    post.reopen(tables=("public.users",))
    post.write(parts=3)
    assert set(post.sequences()) == set(range(1, 31))
    [line] = post.lines("settled")
    assert (line.counts.sent, line.doubtful) == (30, 30)


# --- the ledger ----------------------------------------------------------------------------------


def test_a_long_outage_does_not_make_the_ledger_grow(tmp_path: Path) -> None:
    ledger = PushLedger.open(str(tmp_path), "query-1", adopt=False)
    ledger.begin(0, 0)
    for n in range(100):
        line = LedgerEntry("paused", "query-1", 0, counts=Counts(sent=n), tasks=1)
        points = {0: DeliveryCheckpoint(n, 0)}
        ledger.pause(msgspec.structs.replace(line, points=points))
    lines = ledgers.read(tmp_path / ledgers.FILE)
    assert [(line.what, line.counts.sent) for line in lines] == [
        ("writer", 0),
        ("begun", 0),
        ("paused", 99),
    ]
    ledger.settle(LedgerEntry("settled", "query-1", 0, "A", 1, 9, 9))
    assert len(ledgers.read(tmp_path / ledgers.FILE)) == 4


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Whoever writes more into a file than this is told that it is too large."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_note_stays_until_the_next_one_is_written(tmp_path: Path) -> None:
    ledger = PushLedger.open(str(tmp_path), "query-1", adopt=False)
    file = tmp_path / ledgers.FILE
    ledger.begin(0, 0)
    first = LedgerEntry(
        "paused", "query-1", 0, counts=Counts(sent=1), tasks=1, points={0: DeliveryCheckpoint(1, 0)}
    )
    ledger.pause(first)
    before = file.read_bytes()
    longer = msgspec.structs.replace(first, points={n: DeliveryCheckpoint(2, 0) for n in range(9)})
    with no_file_beyond(len(before)), pytest.raises(OSError, match="too large"):
        ledger.pause(longer)
    assert file.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [file.name], "nothing fills the disk"
    ledger.pause(longer)
    assert [line.what for line in ledgers.read(file)] == ["writer", "begun", "paused"]
    assert ledgers.read(file)[-1] == longer
    ledger.settle(LedgerEntry("settled", "query-1", 0, "A", 1, 9, 9))
    assert [line.what for line in ledgers.read(file)][-2:] == ["paused", "settled"]


def test_lines_of_an_older_ledger_are_read(tmp_path: Path) -> None:
    file = tmp_path / ledgers.FILE
    file.write_text('{"what":"settled","writer":"query-1","batch":3,"last":9,"again":7}\n')
    [line] = ledgers.read(file)
    assert (line.last, line.doubtful) == (9, 7)


def test_who_tends_waits_for_a_redrive(post: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PushLedger, "compact", lambda self: pytest.fail("the ledger is in use"))
    with post.writer._busy:
        post.writer.maintain()


def test_logs_are_redriven_in_the_order_in_which_they_were_followed(tmp_path: Path) -> None:
    folder = Folder.of(str(tmp_path / "letters"), {})

    def kept(epoch: str, sequence: int) -> list[str]:
        box = DeadLetterBuffer(folder, epoch)
        head = (sequence, 0, "evt", "s|p.t:7", "INSERT", "s", "p", "t")
        box.add(Event(*head, None, 0, b"{}"), "refused", "no", 1)
        box.flush()
        return [file.path for file in box.added]

    younger = kept("B", 5)
    files = [*younger, *kept("A", 900)]  # refused again, later than that of B
    ledger = PushLedger.open(str(tmp_path), "query-1", adopt=True)
    ledger.settle(LedgerEntry("settled", "query-1", 0, "A", 1, 900, 900))
    ledger.settle(LedgerEntry("settled", "query-1", 1, "B", 1, 5, 5))
    assert ranks(folder, files, ledger.epochs) == {"A": 0, "B": 1}
    assert ranks(folder, files, ["A"]) == {"A": 0, "B": 1}


def test_letters_that_were_sent_and_stayed_are_counted_once(
    post: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.users((1, "-"), (2, "-"))
    post.office.judge = refusing(1, 2)
    post.write()
    post.office.judge = kind
    here: Any = Here()

    def die(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(DeadLetters, "commit", die)
        redrive.request_redrive(post.sink.folder)
        with pytest.raises(RuntimeError):
            post.writer.serve_requests(here)
    assert post.sink.sent().redriven == 0, "their table still has them"
    post.reopen()
    post.redrive()
    assert post.sink.sent().redriven == 2
    assert post.letters() == []


# --- wishes --------------------------------------------------------------------------------------


def test_whose_wish_was_replaced_is_told(tmp_path: Path) -> None:
    def replaced(told: redrive.RedriveResult | None) -> None:
        redrive.request_redrive(str(tmp_path), ["users:8"])

    with pytest.raises(PipelineError, match="another redrive of the sink took the place"):
        asking.ask(tmp_path, [], lambda: True, replaced)


def test_an_answer_takes_away_no_other_wish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = redrive.request_redrive(str(tmp_path))
    second = redrive.request_redrive(str(tmp_path), ["users:8"])
    redrive.report_result(str(tmp_path), redrive.RedriveResult(first.id))
    assert redrive.requested(str(tmp_path)) == second
    redrive.report_result(str(tmp_path), redrive.RedriveResult(second.id))
    assert redrive.requested(str(tmp_path)) is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["redriven.json"]


def test_a_wish_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "redrive.json").write_bytes(b'{"id": "0')
    assert redrive.requested(str(tmp_path)) is None
    assert not (tmp_path / "redrive.json").exists()
