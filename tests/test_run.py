"""A running process logs what happens to its sources, and applies retention."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.event import (
    Batch,
    BeforeKind,
    Change,
    Op,
    Table,
    Transaction,
)
from headrace.config import CdcSection, Config, ServerSection, WebSocketSection
from headrace.errors import LogError, SourceError
from headrace.formats.catalogue import Formats
from headrace.formats.facts import Facts, SourceServer
from headrace.log import Log, RetentionSettings
from headrace.log.backup import BackupFolders
from headrace.model import Model
from headrace.run import Run, SourceStatusLog, check_model, formats, server_settings
from headrace.secret import Secret
from headrace.serve import ServerSettings
from headrace.serve.retention import retention_of
from headrace.sources import Phase, Status
from headrace.sources.postgres import Postgres
from headrace.sources.postgres.position import PostgresPosition

TABLE = Table("shop", "postgres", "o", "db", "public", "users")
DAY = 86_400 * 1_000_000


def config(
    folder: Path = Path("unused"), *, server: ServerSection | None = None, **cdc: object
) -> Config:
    source = Postgres(name="shop", url=Secret("postgresql://app:hunter2@127.0.0.1:1/shop"))
    settings = msgspec.convert(cdc, CdcSection)
    return Config(
        sources=(source,), data_dir=folder, server=server or ServerSection(), cdc=settings
    )


def write(log: Log, *, days_ago: float, size: int = 10) -> None:
    """One change, captured so long ago."""
    at = time.time_ns() // 1000 - int(days_ago * DAY)
    image = msgspec.json.encode({"text": "x" * size})
    change = Change(
        Op.INSERT, log.register(TABLE), None, None, BeforeKind.NONE, image, None, (),
        Transaction("1", at, at), 1, PostgresPosition(1, 1), last=True,
    )  # fmt: skip
    log.append("shop", Batch([change], b"{}"))


def settings(**cdc: Any) -> ServerSettings:
    """What a server of such a config knows."""
    return server_settings(config(**cdc))


def test_retention_removes_what_is_older_than_its_days(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        for days in (9, 8, 6, 0):
            write(log, days_ago=days)
        assert retention_of(log, settings(retention_days=7)).apply().removed == 2
        assert log.stats().first_sequence == 3


def test_retention_removes_the_oldest_beyond_its_size(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        for days in (3, 2, 1):
            write(log, days_ago=days, size=10_000)
        assert retention_of(log, settings()).apply().removed == 0
        assert retention_of(log, settings(retention_bytes=15_000)).apply().removed == 2
        assert log.stats().total_bytes < 15_000


def test_retention_waits_for_a_named_cursor(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        for days in (9, 8, 0):
            write(log, days_ago=days)
        log.move_cursor("reports", 1)
        trimmed = retention_of(log, settings(retention_days=7)).apply()
        assert (trimmed.removed, trimmed.held_by) == (1, "reports")


def test_retention_goes_on_after_any_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.run.RETENTION_RETRY_SECONDS", 0.0)
    failures: list[Exception] = [LogError("the log is closed"), OSError("no such file")]

    class Failing:
        def work(self, stopping: threading.Event) -> None:
            if failures:
                raise failures.pop(0)
            stopping.set()

    run: Any = Run(config(tmp_path))
    run.retention = Failing()
    run._retain(threading.Event())
    assert "the log is closed" in caplog.text
    assert "no such file" in caplog.text


def test_a_source_is_logged_once_a_phase(caplog: pytest.LogCaptureFixture) -> None:
    log = SourceStatusLog()
    streaming = Status(source="shop", phase=Phase.STREAMING, position="0/1")
    with caplog.at_level(logging.INFO, logger="headrace"):
        log.log_changes([streaming])
        log.log_changes([msgspec.structs.replace(streaming, position="0/2")])
        log.log_changes(
            [msgspec.structs.replace(streaming, errored={"public.users": "unreadable"})]
        )
        log.log_changes(
            [msgspec.structs.replace(streaming, errored={"public.users": "unreadable"})]
        )
        halted = Status(source="shop", phase=Phase.HALTED, error="slot gone", hint="copy anew")
        log.log_changes([halted])
        log.log_changes([halted])
    assert caplog.messages == [
        "source=shop phase=streaming position=0/1",
        "source=shop table=public.users errored=unreadable",
        "source=shop phase=halted position=none",
        "source=shop halted, what it captured is still served; error=slot gone; hint=copy anew",
    ]


def test_an_address_open_to_the_world_needs_keys() -> None:
    assert server_settings(config(server=ServerSection(host="0.0.0.0"))).key_required
    assert not server_settings(config()).key_required


def test_formats_know_the_log_the_servers_and_the_model() -> None:
    model = Model(name="acme-api", instances={"shop": "primary"}, regions={"shop": "eu-west-1"})
    made = formats(msgspec.structs.replace(config(), model=model))
    server = SourceServer("shop", host="127.0.0.1", instance="primary", region="eu-west-1")
    assert made == Formats(Facts("", (server,)), model)
    assert made.of_log("0123456789abcdef").facts == Facts("0123456789ab", (server,))


def test_a_config_without_a_model_asks_no_database() -> None:
    check_model(config())
    with pytest.raises(SourceError):
        check_model(msgspec.structs.replace(config(), model=Model(tenant="tenant_id")))


def test_every_setting_of_the_server_reaches_it() -> None:
    server = ServerSection(
        host="0.0.0.0",
        port=4000,
        max_lag_seconds=5,
        stall_seconds=6,
        allow_remote=True,
        require_key=True,
    )
    settings = server_settings(
        config(server=server, enabled=False, batch_size=7, retention_days=3, max_cursor_hours=4)
    )
    given = msgspec.structs.asdict(server)
    assert msgspec.structs.asdict(settings) == {
        **given,
        "enabled": False,
        "batch_size": 7,
        "pipeline": None,
        "retention": RetentionSettings(days=3, cursor_hours=4),
        "backup": BackupFolders(
            data=Path("unused"), sinks=Path("unused/pipeline"), left_out=(Path("unused/verify"),)
        ),
    }


def test_every_setting_of_the_websocket_reaches_it() -> None:
    given = WebSocketSection(
        auth_seconds=1,
        ping_seconds=2,
        pong_seconds=3,
        status_seconds=4,
        degraded_events=5,
        critical_events=6,
        held_seconds=7,
        held_events=8,
    )
    websocket = server_settings(config(server=ServerSection(websocket=given))).websocket
    assert msgspec.structs.astuple(websocket) == msgspec.structs.astuple(given)


@pytest.mark.requirement("S3-13", "S3-15", "S3-31", "S3-32")
def test_the_websocket_keeps_the_times_of_its_protocol_by_default() -> None:
    websocket = server_settings(config()).websocket
    assert websocket == WebSocketSection()
    assert (websocket.ping_seconds, websocket.pong_seconds) == (30, 60)
    assert (websocket.held_seconds, websocket.held_events) == (300, 10_000)
