"""What an earlier version wrote to disk is read, and gone on with; make_before.py made it."""

import json
import signal
import sqlite3
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from headrace.change.event import Batch, Change, Op, Transaction
from headrace.change.replay import Replay
from headrace.cli import app
from headrace.client import Client
from headrace.config import Config, load
from headrace.errors import ServerAbsent, ServerError
from headrace.formats import StreamFormat, TransactionFormat
from headrace.formats.catalogue import names
from headrace.log import Log, LogReader
from headrace.pipeline.run import Pipeline, PipelineInput, plans
from headrace.run import formats
from headrace.testing import free_port, wait_until
from tests.deltas import stored
from tests.log.blocks import stored_block
from tests.sinks.receiver import Receiver

ARCHIVE = Path(__file__).with_name("before.tar.xz")
SOURCES = ("shop", "bills", "stock", "spare", "notes")
ROWS = (Op.READ, Op.INSERT, Op.UPDATE)
HOOKED = ("public.users", "stock.items", "stock.spares", "main.notes")
# Nothing is too old to be kept.
KEPT = "cdc: {retention_days: 36500}\n"


class Before:
    """The folder of an installation, as it was left."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        self.folder = folder / "before"
        self.facts = json.loads((self.folder / "facts.json").read_text())
        self.port = free_port()
        monkeypatch.setenv("BEFORE_POSTGRES", "postgresql://127.0.0.1:1/shop")
        monkeypatch.setenv("BEFORE_MARIADB", "mysql://root@127.0.0.1:1/stock")
        monkeypatch.setenv("BEFORE_PORT", str(self.port))
        monkeypatch.setenv("BEFORE_HOOKS", "1")

    @property
    def log(self) -> Path:
        return self.folder / "data" / "log"

    @property
    def config(self) -> Config:
        return load(self.folder / "headrace.yaml")

    def changes(self) -> list[Change]:
        with LogReader.open(self.log) as reader:
            return reader.read(0, limit=10_000)

    def write_notes(self, script: str) -> None:
        connection = sqlite3.connect(self.folder / "notes.db", timeout=60)
        connection.executescript(script)
        connection.close()

    @contextmanager
    def running(self) -> Iterator[str]:
        """`headrace run` with the one source whose database was kept."""
        notes = "sources: {notes: {type: sqlite, path: notes.db}}\n"
        config = f"{notes}server: {{port: {self.port}}}\n{KEPT}"
        (self.folder / "notes.yaml").write_text(config)
        command = [sys.executable, "-m", "headrace.cli", "run", "-c", "notes.yaml"]
        process = subprocess.Popen(command, cwd=self.folder)
        url = f"http://127.0.0.1:{self.port}"
        try:
            wait_until(lambda: answers(url), timeout=120, message="the server answers")
            yield url
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        Client(url).get("/health")
    except ServerAbsent:
        return False
    return True


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Before:
    return Before(tmp_path, monkeypatch)


def name_of(change: Change) -> str:
    return f"{change.table.schema}.{change.table.name}"


# --- the log -------------------------------------------------------------------------------------


def test_every_change_is_read_and_adds_up_to_the_tables(before: Before) -> None:
    changes = before.changes()
    assert [change.sequence for change in changes] == list(range(1, before.facts["last"] + 1))
    assert len({change.id for change in changes}) == len(changes)
    assert {change.table.source for change in changes} == set(SOURCES)
    replay = Replay.of(changes)
    assert replay.surprises == []
    found = {str(table): replay.rows(table) for table in replay.tables}
    for name, expected in before.facts["tables"].items():
        shown = [[str(value) for value in list(row.values())[: len(expected[0])]] for row in
                 found[name]]  # fmt: skip
        assert sorted(shown) == sorted([str(value) for value in row] for row in expected)
    assert len(found["public.kinds"]) == 1
    assert len(found["public.unkeyed"]) == 2


@pytest.mark.requirement("C-28")
def test_the_log_goes_on_with_blocks(before: Before) -> None:
    old = before.changes()
    with Log.open(before.log) as log:
        assert log._get(b"layout") == b"1"
        last = stored_block(log, 1, 700)
        assert last == len(old) + 700
        log.trim(10, force=True)
    found = before.changes()
    assert found[: len(old) - 9] == old[9:]
    assert [change.sequence for change in found] == list(range(10, last + 1))


@pytest.mark.parametrize("name", names())
def test_every_change_is_written_in_every_format(before: Before, name: str) -> None:
    changes, written = before.changes(), 0
    format: Any = formats(before.config).named(name)
    if isinstance(format, StreamFormat):
        stream = format.open()
        written = sum(len(stream.encode(change, wanted=True)) for change in changes)
    elif isinstance(format, TransactionFormat):
        for transaction in transactions(changes):
            written += len(format.render(transaction))
    else:
        written = sum(format.encode(change) is not None for change in changes)
    rows = sum(change.op in (*ROWS, Op.DELETE) for change in changes)
    assert written >= rows


def transactions(changes: list[Change]) -> Iterator[list[Change]]:
    begun: list[Change] = []
    for change in changes:
        begun.append(change)
        if change.last:
            yield begun
            begun = []


@pytest.mark.parametrize("name", SOURCES)
def test_where_a_source_stood_is_known(before: Before, name: str) -> None:
    [source] = [each for each in before.config.sources if each.name == name]
    with LogReader.open(before.log) as reader:
        resume = reader.resume(name)
    status = source.describe(resume)
    assert resume is not None
    assert status.position
    assert status.error == ""
    assert source.copy_again(resume, [name_of(each) for each in before.changes()
                                      if each.table.source == name][:1])  # fmt: skip


# --- capturing and serving -----------------------------------------------------------------------


@pytest.mark.slow
def test_capture_goes_on_and_cursors_keys_and_acks_are_kept(before: Before) -> None:
    facts, last = before.facts, before.facts["last"]
    before.write_notes("INSERT INTO notes VALUES (900, 'while nobody looked', 1);")
    with before.running() as url:
        here, reader = Client(url), Client(url, key=facts["key"])
        before.write_notes("UPDATE notes SET weight = 2 WHERE id = 900;")
        wait_until(
            lambda: here.get("/changefeed/stats")["latest_sequence"] >= last + 2,
            timeout=60,
            message="both changes are captured",
        )
        new = here.get("/v1/changes", after=last, limit=100)["changes"]
        assert [(each["op"], each["key"]) for each in new] == [
            ("INSERT", {"id": 900}),
            ("UPDATE", {"id": 900}),
        ]
        seen = reader.get("/v1/changes", limit=1000)["changes"]
        assert {f"{each['schema']}.{each['table']}" for each in seen} == {"public.users"}
        with pytest.raises(ServerError):
            Client(url, key=facts["revoked_key"]).get("/v1/changes")
        kept = {each["name"]: each["sequence"] for each in here.get("/v1/cursors")["cursors"]}
        assert kept == {"billing": 12, "workers": 4}
        lease = here.post("/v1/cursors/workers/lease?limit=1000", None)
        unacked = sorted(set(range(5, last + 3)) - set(facts["acked_beyond_cursor"]))
        assert [event["sequence"] for event in lease["events"]] == unacked
        here.post("/v1/cursors/workers/ack", {"lease": lease["lease"], "sequences": unacked})
        assert here.get("/v1/cursors/workers")["sequence"] == last + 2


# --- the pipeline --------------------------------------------------------------------------------


def append(before: Before) -> None:
    """Two more transactions of PostgreSQL, as its source would hand them over."""
    with Log.open(before.log) as log:
        users = [each for each in log.read(0, limit=10_000) if name_of(each) == "public.users"]
        [*_, like] = [each for each in users if each.op is Op.INSERT]
        for number, id in enumerate((901, 902), 1):
            row = {"id": id, "tenant": "t2", "name": f"new {id}", "email": None, "age": 4}
            change = msgspec.structs.replace(
                like,
                key=msgspec.json.encode({"id": id}),
                after=msgspec.json.encode(row),
                transaction=Transaction(f"9000{number}", like.transaction.commit_time + number, 1),
                position=moved(like.position, number),
                ordinal=1,
                last=True,
                sequence=0,
            )
            log.append("shop", Batch([change], log.resume("shop")))


def moved(position: Any, by: int) -> Any:
    lsn = {"commit_lsn": position.commit_lsn + by * 1000, "lsn": position.lsn + by * 1000}
    return msgspec.structs.replace(position, **lsn)


def run_pipeline(before: Before, spark: SparkSession) -> Mapping[str, Any]:
    """Each sink by itself: six at once start more programs than a busy machine can in time."""
    config = before.config
    assert config.pipeline is not None
    statuses = {}
    for sink in config.pipeline.sinks:
        queries = plans(
            [sink],
            PipelineInput(
                address=config.log_address, max_changes_per_batch=1000, trigger_seconds=0.1
            ),
            checkpoints=config.checkpoint_dir,
            once=True,
            formats=formats(config),
        )
        with Pipeline(spark, queries, folder=config.pipeline_dir) as running:
            running.work(threading.Event(), lambda: None, once=True)
        [statuses[sink.name]] = running.statuses()
    return statuses


def delta(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = stored(folder).to_pylist()
    return rows


def plain(rows: list[dict[str, Any]], columns: int) -> list[list[str]]:
    shown = [[v for k, v in row.items() if not k.startswith("_")] for row in rows]
    return sorted([str(value) for value in row[:columns]] for row in shown)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pipeline_goes_on_with_its_checkpoints_tables_and_dead_letters(
    before: Before, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = before.folder / "data/pipeline/hooks/dead_letters"
    assert sorted(each["status"] for each in delta(letters)) == ["refused", "waiting"]
    append(before)
    changes = before.changes()
    with Receiver() as receiver:
        monkeypatch.setenv("BEFORE_HOOKS", str(receiver.port))
        ended = run_pipeline(before, spark)
        assert {status.phase.value for status in ended.values()} == {"stopped"}, ended
        assert {status.sequence for status in ended.values()} == {len(changes)}
        redriven(before, letters)
        taken = [request.id for request in receiver.requests]
    assert_tables(before, changes)
    assert sorted(row["sequence"] for row in delta(before.folder / "audit")) == [
        change.sequence for change in changes
    ]
    assert_events(before, changes)
    # Nothing was sent twice, and everything once, by the version before and this one together.
    expected = sorted(each.id for each in changes if name_of(each) in HOOKED)
    assert sorted([*before.facts["taken"], *taken]) == expected


def redriven(before: Before, letters: Path) -> None:
    """The redrive request is served by the pipeline or by the command, whoever comes first."""
    config = ["--config", str(before.folder / "headrace.yaml")]
    if delta(letters):
        done = CliRunner().invoke(app, ["redrive", "hooks", *config])
        assert done.exit_code == 0, done.output
    assert delta(letters) == []
    verified = CliRunner().invoke(app, ["verify", "hooks", *config])
    assert verified.exit_code == 0, verified.output


def assert_tables(before: Before, changes: list[Change]) -> None:
    lake, facts = before.folder / "lake", before.facts
    for name, expected in facts["tables"].items():
        new = [[901, "t2", "new 901", None, 4], [902, "t2", "new 902", None, 4]]
        rows = expected + (new if name == "public.users" else [])
        found = plain(delta(lake / name.replace(".", "/")), len(rows[0]))
        assert found == sorted([str(value) for value in row] for row in rows), name
    replay = Replay.of(changes)
    for table in replay.tables:
        stored = delta(lake / table.schema / table.name)
        assert len(stored) == len(replay.rows(table)), table
    versions = delta(before.folder / "versions/public/users")
    users = [each for each in changes if name_of(each) == "public.users"]
    assert len(versions) == sum(each.op in ROWS for each in users)
    current = Counter(row["id"] for row in versions if row["_current"])
    assert current == Counter(row["id"] for row in delta(lake / "public/users"))


def assert_events(before: Before, changes: list[Change]) -> None:
    made = formats(before.config).of_log(epoch(before))
    entity: Any = made.named("entity")
    rendered = [each.sequence for one in transactions(changes) for each in entity.render(one)]
    stored = delta(before.folder / "entities")
    assert sorted(row["sequence"] for row in stored) == sorted(rendered)
    debezium: Any = made.named("debezium")
    files = sorted((before.folder / "files").glob("day=*/*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    encoded = [debezium.encode(change) for change in changes]
    assert [kept(line) for line in lines] == [kept(each) for each in encoded if each is not None]


def kept(line: str | bytes) -> Any:
    """A line without the name of the server, whose address differs."""
    event = json.loads(line)
    return {key: event.get(key) for key in ("op", "before", "after", "transaction")}


def epoch(before: Before) -> str:
    with LogReader.open(before.log) as reader:
        return reader.epoch
