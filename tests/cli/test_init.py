"""`headrace init` asks the database, and writes a config that can be run, without the password."""

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.config import load
from headrace.errors import ConfigError
from headrace.operate.init import ChosenDatabase
from headrace.testing import PostgresDatabase


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("PGPASSWORD", "DATABASE_URL", "HEADRACE_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def init(*arguments: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(app, ["init", *arguments])


@pytest.mark.live
def test_a_config_is_written_that_can_be_checked_and_run(
    folder: Path, pg: PostgresDatabase
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    pg.execute("CREATE TABLE logs (line text)")
    result = init(pg.url, "--name", "shop", "--tables", "public.*")
    file = folder / "headrace.yaml"
    text = file.read_text()
    assert "next: " in result.stdout, result.output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "for PostgreSQL 16" in text
    assert "2 tables match now" in text
    assert "#   public.users: " in text
    # What a table without a key lacks, and how to fix it, is in the file.
    assert "REPLICA IDENTITY" in text
    config = load(file)
    assert [source.name for source in config.sources] == ["shop"]
    again = init(pg.url)
    assert again.exit_code == 1
    assert again.stderr.startswith("error: headrace.yaml is there already\n")
    assert file.read_text() == text


@pytest.mark.parametrize(
    "name",
    ["a\nserver:\n  allow_remote: true\n#", "a\r\u2028b:", "\x1b[31m\x7f", "\ud7ff\U000e0001"],
)
def test_a_name_of_a_table_is_a_comment_whatever_it_has(folder: Path, name: str) -> None:
    with closing(sqlite3.connect("shop.db")) as database:
        database.execute(f'CREATE TABLE "{name}" (id int, v text)')
    result = init("shop.db")
    assert "next: " in result.stdout, result.output
    assert not load(folder / "headrace.yaml").server.allow_remote


def test_the_password_goes_to_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "postgres://app:hunter2%40@db.example.com:5433/Web-Shop?sslmode=require"
    result = init(url, "--no-check")
    assert result.exit_code == 0, result.output
    text = (folder / "headrace.yaml").read_text()
    assert "hunter2" not in text + result.output
    bare = "postgresql://app:${PGPASSWORD}@db.example.com:5433/Web-Shop?sslmode=require"
    assert f'url: "{bare}"' in text
    assert "web_shop:" in text
    monkeypatch.setenv("PGPASSWORD", "hunter2%40")
    [source] = load(folder / "headrace.yaml").sources
    assert source.host == "db.example.com"


def test_a_database_that_does_not_answer_leaves_no_file(folder: Path) -> None:
    result = init("postgresql://app@127.0.0.1:1/shop", PGPASSWORD="hunter2")
    assert result.exit_code == 1
    assert "--no-check" in result.stderr
    assert "hunter2" not in result.output
    assert not (folder / "headrace.yaml").exists()


def test_a_sqlite_file_needs_no_url(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "2 shops.db")) as database:
        database.execute("CREATE TABLE users (id INTEGER PRIMARY KEY)")
    result = init("2 shops.db")
    assert result.exit_code == 1  # the triggers are still to be installed
    text = (folder / "headrace.yaml").read_text()
    assert "db_2_shops:" in text
    assert "#     headrace sqlite install" in text
    assert load(folder / "headrace.yaml").sources[0].name == "db_2_shops"


def test_without_a_terminal_the_database_must_be_named() -> None:
    assert init().exit_code == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [("oracle://db/x", "no source for oracle"), ("mysql://u@h/x?password=p", "behind the ?")],
)
def test_what_cannot_be_captured_is_named(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChosenDatabase.named(url)
