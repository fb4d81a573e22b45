"""Without the extra `spark` all but the pipeline works, and the pipeline says what to do."""

import json
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace import plugins
from headrace.client import Client
from headrace.errors import ServerAbsent
from headrace.testing import free_port, wait_until
from tests.plugins.environments import SPARK, Environment

COMMAND = "pip install 'headrace[spark]'"
MISSING = f"needs pyspark, deltalake, pyarrow, pandas, numpy: {COMMAND}"
FORMATS = plugins.names(plugins.FORMATS)


class Site:
    """A folder with a config over a SQLite database, and the light environment."""

    def __init__(self, folder: Path, environment: Environment) -> None:
        self.folder = folder
        self.environment = environment
        self.port = free_port()
        with sqlite3.connect(folder / "shop.db") as connection:
            connection.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
            connection.execute("INSERT INTO users VALUES (1, 'Ada')")
        connection.close()
        self.configure()

    def configure(self, **sections: object) -> None:
        content = {
            "sources": {"shop": {"type": "sqlite", "path": "shop.db"}},
            "server": {"port": self.port},
            **sections,
        }
        (self.folder / "headrace.yaml").write_text(json.dumps(content))

    def printed(self, *arguments: str, code: int = 0) -> str:
        ran = self.environment.run(*arguments, cwd=self.folder)
        assert ran.code == code, ran
        return ran.output or ran.errors

    @contextmanager
    def running(self) -> Iterator[Client]:
        process = subprocess.Popen([self.environment.headrace, "run"], cwd=self.folder)
        client = Client(f"http://127.0.0.1:{self.port}")
        try:
            wait_until(lambda: captured(client), timeout=120, message="the row is captured")
            yield client
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def captured(client: Client) -> bool:
    try:
        return bool(client.get("/changefeed/stats")["latest_sequence"] >= 2)
    except ServerAbsent:
        return False


@pytest.fixture(scope="module")
def light(headrace_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("light") / "venv"
    return Environment.created(folder, headrace_wheel, without=SPARK)


@pytest.fixture
def site(tmp_path: Path, light: Environment) -> Site:
    return Site(tmp_path, light)


@pytest.mark.slow
def test_capture_serving_and_the_commands_need_none_of_it(site: Site) -> None:
    hidden = f"import importlib.util as u; assert not any(map(u.find_spec, {SPARK}))"
    site.printed("python", "-c", hidden)
    assert site.printed("headrace", "sqlite", "install", "shop.db")
    assert "✗" not in site.printed("headrace", "check")
    with site.running() as client:
        for name in FORMATS:
            assert client.get("/v1/changes", format=name, limit=10), name
            assert site.printed("headrace", "tail", "--no-follow", "--format", name)
        assert client.get("/schemas")["schemas"]
        assert "streaming" in site.printed("headrace", "status")
        made = json.loads(site.printed("headrace", "keys", "create", "--name", "app", "--json"))
        assert Client(client.url, made["secret"]).get("/v1/changes", limit=1)["changes"]
        assert "app" in site.printed("headrace", "keys", "list")
    verify = (
        "from headrace.client import webhooks; from headrace.formats.signature import *;"
        "s = sign_standard(b'{}', 'evt_1', 1, standard_key('k'));"
        "h = {'webhook-id': 'evt_1', 'webhook-timestamp': '1', 'webhook-signature': s};"
        "assert webhooks.verify(b'{}', h, 'k', now=2) == 'evt_1'"
    )
    site.printed("python", "-c", verify)


@pytest.mark.slow
def test_what_needs_spark_says_in_a_line_how_to_install_it(site: Site) -> None:
    site.configure(pipeline={"sinks": {"lake": {"type": "tables", "path": "lake"}}})
    for command in (["check"], ["run"], ["pipeline"], ["redrive", "lake"], ["verify", "lake"]):
        printed = site.printed("headrace", *command, code=1)
        [line] = printed.splitlines()
        assert line.startswith("error: headrace.pipeline"), command
        assert line.endswith(MISSING), command
    printed = site.printed("headrace", "demo", "--source", "sqlite", code=1)
    assert printed == f"error: a demo with Delta tables (without them: --no-lake) {MISSING}\n"
    for module in ("headrace.pipeline", "pyspark_headrace", "pyspark_headrace_tables"):
        printed = site.printed("python", "-c", f"import {module}", code=1)
        assert printed.endswith(f"headrace.pipeline {MISSING}\n")


@pytest.mark.slow
def test_a_demo_without_delta_tables_runs(site: Site) -> None:
    options = ("--no-lake", "--seconds", "2", "--port", str(site.port))
    printed = site.printed("headrace", "demo", "--source", "sqlite", *options)
    assert "the log replays to exactly the database's rows" in printed
