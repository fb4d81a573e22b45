"""What another config changes, and what of it a running process takes up."""

from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config, compare, parse, taken_up

pytestmark = pytest.mark.requirement("P-14")

SHOP = {"type": "postgres", "url": "postgresql://app:hunter2@db/shop"}


def config(**sections: Any) -> Config:
    content = {"sources": {"shop": SHOP}, **sections}
    return parse(content, folder=Path("/etc/headrace"), environment={})


def test_the_same_config_changes_nothing() -> None:
    assert compare(config(), config()).lines() == []


def test_sources_and_sinks_come_go_and_change() -> None:
    lake = {"type": "files", "path": "lake"}
    hooks = {"type": "webhook", "url": "https://example.com/t0ken", "secret": "s3cret"}
    before = config(pipeline={"sinks": {"lake": lake, "hooks": hooks}})
    after = config(
        sources={"shop": {**SHOP, "tables": ["public.users"]}, "other": SHOP},
        pipeline={"sinks": {"hooks": {**hooks, "secret": "0ther", "attempts": 7}, "new": lake}},
    )
    difference = compare(before, after)
    assert difference.lines() == [
        "+ source other",
        '~ source shop: tables: ["public.*"] → ["public.users"]',
        "+ sink new",
        "- sink lake",
        "~ sink hooks: attempts: 5 → 7, secret changed",
    ]
    assert difference.pipeline_concerned


def test_a_password_does_not_show() -> None:
    secret = {**SHOP, "url": "postgresql://app:other-password@db/shop"}
    lines = compare(config(), config(sources={"shop": secret})).lines()
    assert lines == ["~ source shop: url changed"]


def test_what_needs_a_restart_is_named_and_stays() -> None:
    before = config(server={"port": 3000, "max_lag_seconds": 60}, cdc={"batch_size": 100})
    after = config(
        data_dir="elsewhere",
        server={"port": 4000, "max_lag_seconds": 5, "websocket": {"held_events": 5}},
        cdc={"batch_size": 7, "retention_days": 1},
        pipeline={"master": "local[2]", "sinks": {"lake": {"type": "files", "path": "lake"}}},
    )
    assert compare(before, after).lines() == [
        "+ sink lake",
        "~ server.max_lag_seconds: 60.0 → 5.0",
        "~ cdc.retention_days: 30.0 → 1.0",
        "~ cdc.batch_size: 100 → 7",
        "~ pipeline.master: local[*] → local[2]; the pipeline is started again",
        "! data_dir: /etc/headrace/data → /etc/headrace/elsewhere; needs a restart and stays as it "
        "was",
        "! server.port: 3000 → 4000; needs a restart and stays as it was",
        "! server.websocket.held_events: 10000 → 5; needs a restart and stays as it was",
    ]
    effective = taken_up(before, after)
    assert (effective.data_dir, effective.server.port) == (before.data_dir, 3000)
    assert (effective.server.max_lag_seconds, effective.cdc.batch_size) == (5, 7)
    # What was not taken up is named again the next time.
    assert [each.name for each in compare(effective, after).restart] == [
        "data_dir",
        "server.port",
        "server.websocket.held_events",
    ]
