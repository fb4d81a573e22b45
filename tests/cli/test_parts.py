"""`pause`, `resume`, `reset` and `sinks`, with a server at work, elsewhere, and without one."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.client import Client
from headrace.log import LogReader
from headrace.sinks.requests import Requests
from headrace.testing import PostgresDatabase, wait_until
from tests.cli.test_cli import NOWHERE, Site, filled, rows, site

__all__ = ["filled", "site"]

pytestmark = pytest.mark.requirement("P-14")


def source(client: Client, name: str = "shop") -> dict[str, Any]:
    [found] = [each for each in client.get("/v1/sources")["sources"] if each["source"] == name]
    return dict(found)


def await_phase(client: Client, phase: str, name: str = "shop") -> dict[str, Any]:
    wait_until(lambda: source(client, name)["phase"] == phase, timeout=120, message=phase)
    return source(client, name)


def ok(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def shop(site: Site, pg: PostgresDatabase) -> Site:
    """Two sources in one database: what happens to one must not touch the other."""
    for table in ("users", "orders"):
        pg.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    sources = {
        name: {
            "type": "postgres", "url": pg.url, "tables": [f"public.{table}"],
            "slot": f"s_{name}", "publication": f"p_{name}",
        }
        for name, table in (("shop", "users"), ("other", "orders"))
    }  # fmt: skip
    site.write_config("", sources=sources)
    return site


@pytest.mark.live
def test_a_paused_source_lets_go_of_its_database_and_stays_paused(
    shop: Site, pg: PostgresDatabase
) -> None:
    with shop.running() as client:
        await_phase(client, "streaming")
        await_phase(client, "streaming", "other")
        assert "resume shop" in ok(shop.invoke("pause", "shop"))
        paused = await_phase(client, "paused")
        assert "the database keeps what is not captured" in paused["warnings"][0]
        pg.execute("INSERT INTO users VALUES (1)")
        pg.execute("INSERT INTO orders VALUES (2)")
        wait_until(lambda: rows(client) == [("INSERT", 2)], timeout=120, message="one goes on")
        # The slot is there, and nobody uses it.
        slots = pg.execute("SELECT slot_name, active FROM pg_replication_slots ORDER BY 1")
        assert slots == [("s_other", True), ("s_shop", False)]
        assert "paused" in ok(shop.invoke("status"))
    with shop.running() as client:
        await_phase(client, "streaming", "other")
        assert source(client)["phase"] == "paused"
        ok(shop.invoke("resume", "shop"))
        wait_until(lambda: len(rows(client)) == 2, timeout=120, message="it goes on")
        assert rows(client) == [("INSERT", 2), ("INSERT", 1)]


@pytest.mark.live
def test_a_reset_of_a_source_says_what_it_does_asks_and_takes_a_new_snapshot(
    shop: Site, pg: PostgresDatabase
) -> None:
    pg.execute("INSERT INTO users VALUES (1)")
    with shop.running() as client:
        await_phase(client, "streaming")
        refused = shop.invoke("reset", "shop")  # nobody answers the question
        assert refused.exit_code == 1
        assert "takes a new snapshot of all its tables" in refused.stdout
        assert [op for op, _ in rows(client)] == ["READ"]
        ok(shop.invoke("reset", "shop", "--yes"))
        wait_until(lambda: rows(client).count(("READ", 1)) == 2, timeout=120, message="again")
        assert shop.invoke("reset", "shop", "--from", "now", "--yes").exit_code == 2
        unknown = shop.invoke("pause", "shopp")
        assert unknown.stderr == "error: no source or sink called shopp; did you mean shop?\n"


def test_without_a_server_it_is_noted_for_the_next_start(filled: Site) -> None:
    lake = {"type": "files", "path": "lake"}
    filled.write_config(NOWHERE, pipeline={"sinks": {"lake": lake}})
    requests = Requests(filled.folder / "data/pipeline/lake")
    assert ok(filled.invoke("pause", "lake")) == "lake: paused, also when Headrace is started\n"
    assert requests.paused
    assert "lake  paused" in ok(filled.invoke("sinks"))
    ok(filled.invoke("resume", "lake"))
    assert "lake  stopped" in ok(filled.invoke("sinks"))
    effect = ok(filled.invoke("reset", "lake", "--from", "now", "--yes"))
    assert "renames the folder" in effect
    assert "goes on after sequence 20" in effect
    with LogReader.open(filled.log) as log:
        wanted = requests.to_reset
        assert wanted is not None
        assert (wanted.epoch, wanted.after) == (log.epoch, 20)
    ok(filled.invoke("pause", "shop"))
    assert Requests(filled.folder / "data/sources/shop").paused


def test_tables_cannot_begin_with_what_is_new(filled: Site) -> None:
    lake = {"type": "tables", "path": "lake"}
    filled.write_config(NOWHERE, pipeline={"sinks": {"lake": lake, "shop": {**lake, "path": "b"}}})
    result = filled.invoke("reset", "lake", "--from", "now", "--yes")
    assert result.exit_code == 1
    assert "cannot begin with the next change" in result.stderr
    assert "Write source:shop or sink:shop." in filled.invoke("pause", "shop").stderr
    assert "shop: paused" in ok(filled.invoke("pause", "sink:shop"))


@pytest.mark.live
def test_a_server_elsewhere_is_asked_with_its_key(
    filled: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.write_config(NOWHERE, server={"port": filled.port, "require_key": True})
    with filled.running():
        create = ["keys", "create", "--scope", "cdc:admin", "--json", "-c", str(filled.config)]
        made = ok(CliRunner().invoke(app, create))
        key = json.loads(made)["secret"]
        nowhere = tmp_path / "nowhere"  # has no config
        nowhere.mkdir()
        monkeypatch.chdir(nowhere)

        def ask(*command: str, key: str = "") -> Result:
            given = {"HEADRACE_API_KEY": key, "HEADRACE_URL": filled.url}
            return CliRunner(env=given).invoke(app, list(command))

        refused = ask("pause", "shop")
        assert refused.exit_code == 1
        assert "HEADRACE_API_KEY" in refused.stderr
        assert "paused" in ok(ask("pause", "shop", key=key))

        def paused() -> bool:
            shown = json.loads(ok(ask("status", "--json", key=key)))
            return bool(shown["sources"][0]["phase"] == "paused")

        wait_until(paused, timeout=120, message="it is paused")
        (nowhere / "key").write_text(key + "\n")
        ok(ask("resume", "shop", "--key-file", "key"))
    assert "no Headrace server answers" in ask("resume", "shop", key=key).stderr
