"""`headrace remove`: what Headrace put into a database is taken out, and nothing else."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.log import Log
from headrace.secret import Secret
from headrace.testing import PostgresDatabase, free_port
from tests.sources.capturing import Captured, postgres

Remove = Callable[..., Result]

_OBJECTS = """
    SELECT 'publication ' || pubname FROM pg_publication
    UNION ALL SELECT 'trigger ' || evtname FROM pg_event_trigger
    UNION ALL SELECT 'slot ' || slot_name FROM pg_replication_slots
              WHERE database = current_database()
    UNION ALL SELECT 'function ' || proname FROM pg_proc WHERE oid >= 16384
    UNION ALL SELECT 'relation ' || relname FROM pg_class
              WHERE oid >= 16384 AND relname !~ '^pg_toast'
    UNION ALL SELECT 'schema ' || nspname FROM pg_namespace WHERE oid >= 16384
    UNION ALL SELECT concat_ws(' ', 'identity', relname, relreplident) FROM pg_class
              WHERE oid >= 16384 AND relkind IN ('r', 'p')
    ORDER BY 1"""


def objects(database: PostgresDatabase) -> list[str]:
    """Everything in a database that is not the system's, and each table's replica identity."""
    return [name for (name,) in database.execute(_OBJECTS)]


@pytest.fixture
def settings(pg: PostgresDatabase) -> dict[str, Any]:
    """The source's settings."""
    return {
        "url": pg.url,
        "ddl": True,
        "slot": f"shop_{pg.name}",
        "tables": ["public.*"],
        "identity": "full",
    }


@pytest.fixture
def remove(settings: dict[str, Any], tmp_path: Path) -> Remove:
    """The command, with a config of its own."""
    config = tmp_path / "headrace.yaml"
    shop = {"type": "postgres", **settings}
    config.write_text(json.dumps({"sources": {"shop": shop}, "server": {"port": free_port()}}))

    def run(*options: str) -> Result:
        return CliRunner().invoke(app, ["remove", "shop", "--config", str(config), *options])

    return run


@contextmanager
def capturing(pg: PostgresDatabase, log: Path, settings: dict[str, Any]) -> Iterator[Captured]:
    """Capture the database that the config names."""
    chosen = settings | {"url": Secret(pg.url), "tables": tuple(settings["tables"])}
    with Log.open(log) as opened:
        feed = Captured(pg, opened, postgres(pg, **chosen))
        with feed.running():
            yield feed


@pytest.mark.requirement("P-02")
def test_nothing_of_headrace_is_left_and_a_later_run_begins_anew(
    pg: PostgresDatabase, settings: dict[str, Any], remove: Remove, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    pg.execute("CREATE TABLE notes (id int)")
    pg.execute("INSERT INTO users VALUES (1)")
    before = objects(pg)
    with capturing(pg, tmp_path / "data" / "log", settings) as feed:
        captured = objects(pg)
        assert captured != before
        shown = remove("--dry-run")
        assert shown.exit_code == 0, shown.output
        assert f"SELECT pg_drop_replication_slot('{feed.slot}');" in shown.stdout
        assert objects(pg) == captured
        refused = remove()
        assert refused.exit_code == 1
        assert objects(pg) == captured
    removed = remove()
    assert removed.exit_code == 0, removed.output
    assert f"removed replication slot {feed.slot}" in removed.stdout
    assert objects(pg) == before
    again = remove()
    assert (again.exit_code, again.stdout) == (0, "shop: nothing of Headrace is in the database\n")
    with capturing(pg, tmp_path / "data" / "log", settings) as feed:
        feed.assert_replays("users")
    assert remove().exit_code == 0


@pytest.mark.requirement("P-02")
def test_it_needs_no_log_and_refuses_while_somebody_else_reads_the_slot(
    pg: PostgresDatabase, settings: dict[str, Any], remove: Remove, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    before = objects(pg)
    with capturing(pg, tmp_path / "elsewhere", settings) as feed:
        refused = remove()
        assert refused.exit_code == 1
        assert f"replication slot {feed.slot} is being read" in refused.stderr
        assert "Stop the `headrace run`" in refused.stderr
    assert remove().exit_code == 0
    assert objects(pg) == before
    assert not (tmp_path / "data").exists()


@pytest.mark.requirement("P-02")
def test_what_cannot_be_taken_out_is_shown_and_the_rest_goes(
    pg: PostgresDatabase, settings: dict[str, Any], remove: Remove, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    before = objects(pg)
    with capturing(pg, tmp_path / "elsewhere", settings):
        pass
    # Somebody's own function needs one of ours.
    pg.execute(
        "CREATE VIEW described AS SELECT headrace.describe(oid) FROM pg_class WHERE relname = 'x'"
    )
    result = remove()
    assert result.exit_code == 1
    assert "✗ function headrace.describe(oid): " in result.stdout
    left = set(objects(pg)) - set(before)
    assert not any(name.startswith(("slot", "publication", "trigger")) for name in left)
    pg.execute("DROP VIEW described")
    assert remove().exit_code == 0
    assert objects(pg) == before


@pytest.mark.requirement("P-02")
@pytest.mark.parametrize("meanwhile", ["nothing", "a run"])
def test_an_identity_that_cannot_be_restored_now_is_restored_later(
    pg: PostgresDatabase, settings: dict[str, Any], remove: Remove, tmp_path: Path, meanwhile: str
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    pg.execute("CREATE TABLE notes (id int NOT NULL UNIQUE)")
    pg.execute("ALTER TABLE notes REPLICA IDENTITY USING INDEX notes_id_key")
    before = objects(pg)
    with capturing(pg, tmp_path / "elsewhere", settings):
        pass
    with pg.connect(autocommit=False) as application:
        application.execute("LOCK TABLE users, notes")
        result = remove()
    assert result.exit_code == 1
    assert "✗ replica identity of public.users: " in result.stdout
    assert "publication headrace_shop_inserts: it remembers the replica" in result.stdout
    if meanwhile == "a run":
        with capturing(pg, tmp_path / "another", settings):
            pass
    assert remove().exit_code == 0
    assert objects(pg) == before


@pytest.mark.requirement("P-02")
def test_an_index_that_is_gone_keeps_nothing_in_the_database(
    pg: PostgresDatabase, settings: dict[str, Any], remove: Remove, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE notes (id int NOT NULL UNIQUE)")
    pg.execute("ALTER TABLE notes REPLICA IDENTITY USING INDEX notes_id_key")
    with capturing(pg, tmp_path / "elsewhere", settings):
        pg.execute("ALTER TABLE notes DROP CONSTRAINT notes_id_key")
    assert remove().exit_code == 0
    assert objects(pg) == ["identity notes n", "relation notes"]


@pytest.mark.requirement("P-02")
def test_what_another_source_of_the_database_needs_stays(
    pg: PostgresDatabase, settings: dict[str, Any], remove: Remove, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    other = settings | {"name": "other", "slot": f"other_{pg.name}", "publication": "others"}
    with capturing(pg, tmp_path / "other", other) as feed:
        before = objects(pg)
        with capturing(pg, tmp_path / "elsewhere", settings):
            pass
        assert remove().exit_code == 0
        assert objects(pg) == before
        feed.capture.stop()
        assert [each.error for each in feed.source.remove(None) if each.error] == []
        assert objects(pg) == ["identity users d", "relation users", "relation users_pkey"]


def test_a_source_that_cannot_be_removed_says_so(
    remove: Remove, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("headrace.sources.postgres.source.Postgres.remove")
    result = remove()
    assert result.exit_code == 1
    assert "its type has no method `remove`" in result.stderr
