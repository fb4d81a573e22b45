"""What an operator sees of the pipeline, also when it no longer runs."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.config import Config, load
from headrace.operate.commands import look, look_at_pipeline
from headrace.pipeline import session
from headrace.sinks import SinkPhase, SinkStatus
from headrace.sinks import report as sinks_report
from headrace.sinks.report import PipelineReport
from tests.changes import opened_writer

SOURCE = "sources: {db: {type: postgres, url: 'postgresql://127.0.0.1:1/x'}}\n"
LAKE = "pipeline: {sinks: {lake: {type: tables, path: lake}}}\n"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "headrace.yaml"
    file.write_text(SOURCE + LAKE)
    return load(file)


def report(
    config: Config, *, pid: int, age: float = 0, phase: SinkPhase = SinkPhase.STREAMING
) -> None:
    """Write down what a pipeline would have."""
    report = PipelineReport(
        pid=pid, at=int((time.time() - age) * 1e6), sinks=[SinkStatus(sink="lake", phase=phase)]
    )
    config.pipeline_dir.mkdir(parents=True, exist_ok=True)
    (config.pipeline_dir / "status.json").write_bytes(msgspec.json.encode(report))


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def run(config: Config, *command: str) -> Result:
    file = config.data_dir.parent / "headrace.yaml"
    return CliRunner().invoke(app, [*command, "--config", str(file)])


def test_a_pipeline_that_speaks_is_running(config: Config) -> None:
    report(config, pid=os.getpid())
    seen = look_at_pipeline(config)
    assert seen is not None
    assert (seen.running, seen.detail) == (True, f"process {os.getpid()} runs")


def test_status_compares_a_sink_with_the_log_as_it_is_now(config: Config) -> None:
    with opened_writer(config.log_dir) as writer:
        writer.put_many("users", 30)
    sinks = [
        SinkStatus(sink="lake", phase=SinkPhase.STARTING, sequence=10, lag=0),
        SinkStatus(sink="hook", phase=SinkPhase.WAITING, lag=7),
        SinkStatus(sink="other", phase=SinkPhase.STARTING),
    ]
    config.pipeline_dir.mkdir(parents=True, exist_ok=True)
    sinks_report.write(config.pipeline_dir, sinks)
    seen = look(config).pipeline
    assert seen is not None
    assert [sink.lag for sink in seen.sinks] == [20, 30, None]


def test_a_pipeline_that_fell_silent_is_reported_as_such(config: Config) -> None:
    report(config, pid=os.getpid(), age=100)
    seen = look_at_pipeline(config)
    assert seen is not None
    assert (seen.running, seen.detail) == (
        False,
        f"process {os.getpid()} has not reported for 100 s",
    )


@pytest.mark.parametrize(
    ("phase", "detail"),
    [
        (SinkPhase.STOPPED, "not running"),
        (SinkPhase.STREAMING, "not running: it ended without a last report"),
    ],
)
def test_a_pipeline_that_is_gone_is_reported_as_such(
    config: Config, phase: SinkPhase, detail: str
) -> None:
    report(config, pid=dead_pid(), phase=phase)
    seen = look_at_pipeline(config)
    assert seen is not None
    assert (seen.running, seen.detail) == (False, detail)


def test_a_pipeline_that_never_ran_is_reported_as_such(config: Config) -> None:
    result = run(config, "status")
    assert result.exit_code == 0
    assert "pipeline: has never run here\n" in result.stdout


def test_without_a_section_there_is_no_pipeline(config: Config) -> None:
    (config.data_dir.parent / "headrace.yaml").write_text(SOURCE)
    assert "pipeline" not in run(config, "status").stdout
    refused = run(config, "pipeline")
    assert refused.exit_code == 1
    assert "the config has no section pipeline" in refused.stderr


# --- what it needs -------------------------------------------------------------------------------


def test_check_looks_at_what_the_pipeline_needs(config: Config) -> None:
    shown = run(config, "check").stdout
    assert "✓ java: " in shown
    assert f"✓ checkpoint_dir: {config.checkpoint_dir} can be written" in shown
    assert f"✓ path: {config.data_dir.parent / 'lake'} can be written" in shown


def pretend_java(folder: Path, says: str) -> str:
    """A JAVA_HOME whose program says that."""
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(folder)


@pytest.mark.parametrize(
    ("says", "ok"),
    [
        ('openjdk version "17.0.15" 2025-04-15', True),
        ('openjdk version "21" 2023-09-19', True),
        ('java version "1.8.0_292"', False),
        ('openjdk version "11.0.1"', False),
        ("nonsense", False),
    ],
)
def test_java_must_be_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, ok: bool
) -> None:
    monkeypatch.setenv("JAVA_HOME", pretend_java(tmp_path, says))
    found = session.check_java()
    assert found.ok is ok
    assert ok or "Install Java 17" in found.fix


def test_without_java_a_pipeline_says_what_to_install(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    result = run(config, "pipeline", "--once")
    assert result.exit_code == 1
    assert "error: there is no Java" in result.stderr
    assert "Install Java 17 or later" in result.stderr


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[3, 2]", 3),
        ("local[*]", os.cpu_count()),
        ("spark://host:7077", 0),
        ("local-cluster[2,1,1024]", 0),
    ],
)
def test_only_a_local_master_has_cores_that_can_be_counted(master: str, cores: int) -> None:
    assert session.local_cores(master) == cores
    partitions = session.default_settings(master).get("spark.sql.shuffle.partitions")
    assert partitions == (str(2 * cores) if cores else None)
    beside = session.default_settings(master, extra_tasks=2)
    assert beside["spark.master"] == (f"local[{cores + 2}]" if cores else master)
    assert beside.get("spark.default.parallelism") == (str(cores) if cores else None)
