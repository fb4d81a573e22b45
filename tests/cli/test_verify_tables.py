"""`headrace verify` of a sink of tables: what may be given, and what the server is asked to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.config import Config, load
from headrace.errors import PipelineError
from headrace.log import Log, LogReader
from headrace.log.folder import locked
from headrace.operate import verify as operate_verify
from headrace.operate.schedule import ScheduledVerifications
from headrace.operate.verify import Repair, expect_compared
from headrace.pipeline.verify_tables import VerifiedTables
from headrace.sinks.requests import Requests
from headrace.sinks.tables.sink import Tables
from headrace.sinks.verification import (
    TableOutcome,
    TableVerification,
    Verification,
    note,
    noted,
)
from headrace.testing import free_port, wait_until

pytestmark = pytest.mark.requirement("P-11")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A config with a lake and a folder of files, whose source was never captured."""
    content = {
        "data_dir": str(tmp_path / "data"),
        "sources": {"shop": {"type": "sqlite", "path": str(tmp_path / "shop.db")}},
        "server": {"port": free_port()},
        "pipeline": {
            "sinks": {
                "lake": {"type": "tables", "path": str(tmp_path / "lake")},
                "files": {"type": "files", "path": str(tmp_path / "files")},
                "audit": {"type": "history", "path": str(tmp_path / "audit")},
            }
        },
    }
    place = tmp_path / "headrace.yaml"
    place.write_bytes(msgspec.json.encode(content))  # JSON is YAML
    return place


def verify(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments, "--config", str(file)])


def test_a_schedule_is_kept_for_the_server_until_it_is_ended(file: Path) -> None:
    requests = Requests(load(file).sink_dir("lake"))
    done = verify(file, "lake", "main.items", "--repair", "--every", "30m")
    assert done.exit_code == 0, done.output
    assert "every 30m" in done.output
    schedule = requests.verify_schedule
    assert schedule is not None
    assert (schedule.seconds, schedule.tables, schedule.repair) == (1800, ("main.items",), True)
    assert "no longer" in verify(file, "lake", "--every", "never").output
    assert requests.verify_schedule is None
    assert "is not verified" in verify(file, "lake", "--every", "never").output


def test_what_is_for_tables_is_refused_for_another_sink(file: Path) -> None:
    for given in (("--repair",), ("--every", "1h"), ("main.items",)):
        done = verify(file, "files", *given)
        assert done.exit_code == 1
        assert "no tables of rows" in done.output
    done = verify(file, "audit")
    assert done.exit_code == 1
    assert "those that do: lake, files" in done.output


def test_the_server_runs_what_is_due_and_the_result_is_kept(file: Path) -> None:
    config = load(file)
    folder = config.sink_dir("lake")

    def current() -> Config:
        return config

    with ScheduledVerifications(current, file):
        Requests(folder).schedule_verify(3600, (), repair=False)
        wait_until(lambda: noted(folder) is not None, timeout=60)
    found = noted(folder)
    assert found is not None
    assert "there is no log" in found.error
    assert "could not be verified" in found.summary()


def test_a_difference_stays_known_when_the_next_verification_ends_without_a_result(
    file: Path,
) -> None:
    config = load(file)
    folder = config.sink_dir("lake")
    differs = TableVerification(source="shop", table="main.t", outcome=TableOutcome.DIFFERS)
    note(folder, Verification(sink="lake", at=1, tables=(differs,)))
    file.write_text("nonsense")
    with ScheduledVerifications(lambda: config, file):
        Requests(folder).schedule_verify(3600, (), repair=False)
        wait_until(lambda: (found := noted(folder)) and found.error, timeout=60)
    found = noted(folder)
    assert found is not None
    assert not found.sound
    assert "no result" in found.error


def left_rows(config: Config) -> Path:
    """What a verification leaves that was killed."""
    left = config.verify_dir / "lake" / "rows-1"
    left.mkdir(parents=True)
    (left.parent / "lock").touch()
    (left / "rows").write_text("hush")
    return left


def test_rows_of_a_killed_verification_are_removed_at_start_and_stop(file: Path) -> None:
    config = load(file)
    left = left_rows(config)
    with ScheduledVerifications(lambda: config, file):
        wait_until(lambda: not left.exists(), timeout=60)
        left = left_rows(config)
    assert not left.exists()


def test_rows_that_are_being_compared_stay(file: Path) -> None:
    config = load(file)
    kept = left_rows(config)
    with (kept.parent / "lock").open("a+") as lock:
        assert locked(lock)
        with ScheduledVerifications(lambda: config, file):
            pass
        assert kept.exists()


def table(name: str, outcome: TableOutcome) -> TableVerification:
    return TableVerification(source="shop", table=name, outcome=outcome, reason="why not")


FOUND = Verification(
    sink="lake",
    at=1,
    tables=(
        table("main.equal", TableOutcome.EQUAL),
        table("main.begun", TableOutcome.SNAPSHOT),
        table("main.added", TableOutcome.INSERTS_ONLY),
    ),
)


@pytest.mark.parametrize("wanted", [(), ("main.equal",), ("main.*",), ("equal", "*")])
def test_what_was_compared_is_enough(wanted: tuple[str, ...]) -> None:
    expect_compared(FOUND, wanted)


@pytest.mark.parametrize("wanted", ["main.begun", "main.a*", "begun"])
def test_a_table_that_is_named_must_be_compared(wanted: str) -> None:
    with pytest.raises(PipelineError, match=r"no table .* was compared: main\..*: why not"):
        expect_compared(FOUND, ["main.equal", wanted])


def test_a_verification_that_compared_nothing_fails(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = msgspec.structs.replace(FOUND, tables=FOUND.tables[1:])
    monkeypatch.setattr(operate_verify, "verify_tables", lambda *_: VerifiedTables(begun))
    done = verify(file, "lake")
    assert done.exit_code == 1
    assert "nothing was compared: main.begun: why not; main.added: why not" in done.output


def test_a_repaired_table_must_be_equal(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    differs = (*FOUND.tables, table("main.other", TableOutcome.DIFFERS))
    begun = (table("main.other", TableOutcome.SNAPSHOT),)
    results = [
        VerifiedTables(msgspec.structs.replace(FOUND, tables=tables)) for tables in (differs, begun)
    ]
    monkeypatch.setattr(operate_verify, "verify_tables", lambda *_: results.pop(0))
    monkeypatch.setattr(operate_verify, "request_snapshot", lambda *_: "requested")
    monkeypatch.setattr(Repair, "wait", lambda _: True)
    Log.open(load(file).log_dir).close()
    done = verify(file, "lake", "--repair")
    assert done.exit_code == 1
    assert "no table main.other was compared" in done.output


def test_the_log_is_opened_once_while_a_repair_is_waited_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(file)
    sink = Tables(name="lake", path=str(file.parent / "lake"))
    differs = msgspec.structs.replace(FOUND, tables=(table("main.t", TableOutcome.DIFFERS),))
    opened: list[object] = []
    opening = LogReader.open

    def counted(path: Path | str) -> LogReader:
        opened.append(path)
        return opening(path)

    monkeypatch.setattr(LogReader, "open", counted)
    monkeypatch.setattr(operate_verify, "connect", lambda _: "a server")
    monkeypatch.setattr(operate_verify, "_LOOK_SECONDS", 0.01)
    with Log.open(config.log_dir):
        repair = Repair(config, sink, VerifiedTables(differs))
        opened.clear()
        assert not repair.wait(seconds=0.5)
    assert len(opened) == 1
