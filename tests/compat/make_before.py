"""Makes before.tar.xz: what an earlier commit keeps on disk, for test_before.py to go on with.

It is run with the code of that commit, in a folder that has it checked out:

    git worktree add ../before c68d267
    cd ../before && PYTHONPATH=src python ../headrace/tests/compat/make_before.py OUT.tar.xz

Real servers are captured with `headrace run`; then the pipeline runs once to the end, and once
more until it is killed: in the middle of a batch of the webhook, whose endpoint does not reply any
more, while somebody waits for a redrive. The servers themselves are not kept, only the SQLite
database is. `facts.json` says what the test cannot know from elsewhere.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

# Whatever the test kit of that commit is like: no type of this one describes it.
testing: Any = import_module("headrace.testing")
mariadb: Any = import_module("headrace.testing.mariadb")

CONFIG = """\
data_dir: data
sources:
  shop: {type: postgres, url: "${BEFORE_POSTGRES}", tables: ["public.*"]}
  bills: {type: postgres_events, url: "${BEFORE_POSTGRES}", tables: ["billing.*"]}
  stock: {type: mysql, url: "${BEFORE_MARIADB}", tables: ["stock.items"]}
  spare: {type: mysql, url: "${BEFORE_MARIADB}", tables: ["stock.spares"], follow: gtid}
  notes: {type: sqlite, path: notes.db}
server:
  port: ${BEFORE_PORT}
model:
  name: before
  entities:
    User: {table: public.users, identifier: name, tenant: tenant}
"""
PIPELINE = """\
pipeline:
  master: local[2]
  trigger_seconds: 0.1
  spark: {spark.ui.enabled: "false", spark.driver.memory: 1g}
  sinks:
    lake: {type: tables, path: lake}
    versions: {type: tables, path: versions, keep: history, tables: ["public.users", "main.*"]}
    audit: {type: history, path: audit}
    entities: {type: history, path: entities, format: entity}
    files: {type: files, path: files, format: debezium}
    hooks:
      type: webhook
      url: "http://127.0.0.1:${BEFORE_HOOKS}/events"
      allow_private_networks: true
      secret: known-to-both
      tables: ["public.users", "stock.*", "main.*"]
      parallelism: 1
      concurrency: 1
      timeout_seconds: 5
"""
TAKEN_BEFORE_SILENCE = 3  # events of the batch in which the pipeline is killed


class Endpoint:
    """Receives the webhooks: refuses rows called "bad", and is silent when its time is up."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.left: int | None = None  # how many more are taken; None: all
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status = endpoint.receive(self.headers["webhook-id"], body)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def receive(self, event_id: str, event: dict[str, Any]) -> int:
        if (event.get("after") or {}).get("name") == "bad":
            return 400
        if self.left is not None:
            if self.left <= 0:
                threading.Event().wait()
            self.left -= 1
        self.taken.append(event_id)
        return 200


class Maker:
    """The folder that is made, and the programs that make it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        package = Path(str(import_module("headrace").__file__)).parents[1]
        self.environment = os.environ | environment | {"PYTHONPATH": str(package)}
        self.started: list[subprocess.Popen[bytes]] = []
        self.port = environment["BEFORE_PORT"]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "headrace.cli", *arguments]
        process = subprocess.Popen(command, cwd=self.folder, env=self.environment)
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()

    def headrace(self, *arguments: str) -> None:
        code = self.start(*arguments).wait(timeout=900)
        assert code == 0, (arguments, code)

    def http(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read() or b"null")

    def latest(self) -> int:
        try:
            return int(self.http("GET", "/changefeed/stats")["latest_sequence"])
        except OSError:
            return -1


def wait(condition: Callable[[], bool], message: str) -> None:
    testing.wait_until(condition, timeout=600, message=message)


def settled(maker: Maker) -> int:
    """The log's last sequence, once nothing has come for two seconds."""
    last, since = maker.latest(), time.monotonic()
    while time.monotonic() - since < 2 or last < 1:
        assert time.monotonic() - since < 60, "nothing is served"
        time.sleep(0.1)
        if (now := maker.latest()) != last:
            last, since = now, time.monotonic()
    return last


POSTGRES_TABLES = """
CREATE TABLE users (id int PRIMARY KEY, tenant text, name text, email text);
CREATE TABLE kinds (
  id bigint PRIMARY KEY, n numeric(12,2), big numeric, f double precision, b boolean, raw bytea,
  d date, t timestamptz, local timestamp, j jsonb, a int[], u uuid);
CREATE TABLE unkeyed (a int, b text);
ALTER TABLE users REPLICA IDENTITY FULL;
CREATE SCHEMA billing;
CREATE TABLE billing.invoices (id int PRIMARY KEY, total numeric(10,2), note text);
INSERT INTO users SELECT n, 't' || n % 3, 'user ' || n, n || '@example.com'
  FROM generate_series(1, 40) n;
INSERT INTO kinds VALUES (9007199254740993, 1.50, 123456789012345678901234567890.5, 0.1, true,
  '\\x00ff', '2024-02-29', '2024-03-01 10:00:00.123456+02', '1999-12-31 23:59:59',
  '{"a": [1, null]}', '{1,2,NULL}', '00000000-0000-4000-8000-000000000001');
INSERT INTO unkeyed VALUES (1, 'one');
INSERT INTO billing.invoices SELECT n, n * 1.25, 'bill ' || n FROM generate_series(1, 10) n;
"""
MARIADB_TABLES = (
    "CREATE DATABASE stock",
    "CREATE TABLE stock.items (id int PRIMARY KEY, name varchar(50), price decimal(8,2),"
    " at datetime(6), flags set('a','b'))",
    "CREATE TABLE stock.spares (id bigint unsigned PRIMARY KEY, name text)",
    "INSERT INTO stock.items VALUES (1,'bolt',0.10,'2024-01-01 00:00:00.5','a,b'),"
    "(2,'nut',0.05,NULL,'')",
    "INSERT INTO stock.spares VALUES (18446744073709551615,'largest'),(2,'two')",
)
SQLITE_TABLES = """
CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT, weight REAL);
INSERT INTO notes VALUES (1, 'first', 0.5), (2, 'second', NULL);
"""


class Servers:
    """The three databases."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        install = testing.postgres_installs()[16]
        server = stack.enter_context(testing.PostgresServer(install))
        self.postgres = stack.enter_context(server.database())
        self.mariadb = stack.enter_context(mariadb.MariadbServer())
        self.file = folder / "notes.db"

    def create(self) -> None:
        self.postgres.execute(POSTGRES_TABLES)
        for statement in MARIADB_TABLES:
            self.mariadb.execute(statement)
        self.sqlite(SQLITE_TABLES)

    def sqlite(self, script: str) -> None:
        with sqlite3.connect(self.file) as connection:
            connection.executescript(script)
        connection.close()

    def write_once(self) -> None:
        """Everything a stream has: also what changes a table, and a row that is refused."""
        run = self.postgres.execute
        run(
            "BEGIN; SELECT pg_logical_emit_message(true, 'headrace', '{\"user_id\": \"u1\"}');"
            "UPDATE users SET email = 'new@example.com' WHERE id <= 5;"
            "DELETE FROM users WHERE id = 40; COMMIT"
        )
        run("UPDATE users SET id = 139 WHERE id = 39")
        run("UPDATE users SET name = 'bad' WHERE id = 7")
        run("UPDATE users SET name = 'behind it' WHERE id = 7")
        run("ALTER TABLE users ADD COLUMN age smallint")
        run("INSERT INTO users VALUES (50, 't1', 'with an age', NULL, 33)")
        run("INSERT INTO unkeyed VALUES (2, 'two')")
        run("UPDATE billing.invoices SET note = NULL WHERE id = 1")
        run("DELETE FROM billing.invoices WHERE id = 10")
        self.mariadb.execute("UPDATE stock.items SET price = 0.11 WHERE id = 1")
        self.mariadb.execute("INSERT INTO stock.spares VALUES (3, 'three')")
        self.sqlite("UPDATE notes SET text = 'changed' WHERE id = 1; DELETE FROM notes WHERE id=2;")

    def write_again(self, at: int) -> None:
        self.postgres.execute(
            f"INSERT INTO users SELECT n, 't1', 'later ' || n, NULL, 1"
            f" FROM generate_series({at}, {at + 9}) n"
        )
        self.postgres.execute("UPDATE billing.invoices SET total = total + 1 WHERE id < 4")
        self.mariadb.execute(f"INSERT INTO stock.items VALUES ({at},'later',1.00,NULL,'b')")
        self.mariadb.execute(f"INSERT INTO stock.spares VALUES ({at}, 'later')")
        self.sqlite(f"INSERT INTO notes VALUES ({at}, 'later', 1.5);")

    def tables(self) -> dict[str, list[list[Any]]]:
        """The rows of the tables whose values JSON has without loss."""
        return {
            "public.users": [list(r) for r in self.postgres.execute(
                "SELECT id, tenant, name, email, age FROM users ORDER BY id")],
            "billing.invoices": [list(r) for r in self.postgres.execute(
                "SELECT id, total::text, note FROM billing.invoices ORDER BY id")],
            "stock.items": [list(r) for r in self.mariadb.execute(
                "SELECT id, name, CAST(price AS char) FROM stock.items ORDER BY id")],
            "stock.spares": [list(r) for r in self.mariadb.execute(
                "SELECT CAST(id AS char), name FROM stock.spares ORDER BY id")],
        }  # fmt: skip


def keys_and_cursors(maker: Maker) -> dict[str, Any]:
    reader = maker.http("POST", "/v1/keys", {"name": "reader", "tables": ["public.users"]})
    gone = maker.http("POST", "/v1/keys", {"name": "gone"})
    maker.http("DELETE", f"/v1/keys/{gone['key']['id']}")
    maker.http("PUT", "/v1/cursors/billing", {"sequence": 12})
    maker.http("PUT", "/v1/cursors/workers", {"sequence": 4})
    body = {"consumer": "w1", "limit": 3, "lease_ms": 3_600_000}
    lease = maker.http("POST", "/v1/cursors/workers/lease", body)
    sequences = [event["sequence"] for event in lease["events"]]
    ack = {"lease": lease["lease"], "sequences": sequences[1:]}
    maker.http("POST", "/v1/cursors/workers/ack", ack)
    return {
        "key": reader["secret"],
        "revoked_key": gone["secret"],
        "cursors": maker.http("GET", "/v1/cursors")["cursors"],
        "acked_beyond_cursor": sequences[1:],
    }


def run_pipeline_and_kill_it(maker: Maker, endpoint: Endpoint) -> None:
    """Leaves a batch of the webhook half sent, and a redrive request that nobody has served."""
    endpoint.left = TAKEN_BEFORE_SILENCE
    pipeline = maker.start("pipeline")
    hooks = maker.folder / "data/pipeline/hooks"
    wait(
        lambda: endpoint.left == 0 and b'"paused"' in (hooks / "sent.jsonl").read_bytes(),
        "the half batch is noted",
    )
    redrive = maker.start("redrive", "hooks")
    wait((hooks / "redrive.json").exists, "the redrive request is there")
    time.sleep(3)  # the other sinks are done
    for process in (redrive, pipeline):
        process.send_signal(signal.SIGKILL)
        process.wait()


def make(folder: Path) -> None:
    with ExitStack() as stack:
        servers = Servers(stack, folder)
        endpoint = Endpoint()
        maker = Maker(
            folder,
            {
                "BEFORE_POSTGRES": servers.postgres.url,
                "BEFORE_MARIADB": servers.mariadb.url("stock"),
                "BEFORE_PORT": str(testing.free_port()),
                "BEFORE_HOOKS": str(endpoint.server.server_port),
            },
        )
        stack.callback(maker.close)
        servers.create()
        (folder / "capture.yaml").write_text(CONFIG)
        (folder / "headrace.yaml").write_text(CONFIG + PIPELINE)
        maker.headrace("sqlite", "install", "notes.db")
        run = maker.start("run", "-c", "capture.yaml")
        settled(maker)
        servers.write_once()
        facts = {"once": settled(maker), **keys_and_cursors(maker)}
        maker.headrace("pipeline", "--once")
        servers.write_again(100)
        facts["killed"] = settled(maker)
        run_pipeline_and_kill_it(maker, endpoint)
        servers.write_again(200)
        facts["last"] = settled(maker)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0
        facts |= {"taken": endpoint.taken, "tables": servers.tables()}
        (folder / "facts.json").write_text(json.dumps(facts, indent=1))


def left_out(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without journals of programs, and without who made it."""
    name = Path(member.name).name
    if name.startswith("LOG") or name in {"LOCK", "lock", "spark.log"} or name.endswith(".crc"):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, "before")
        made.mkdir()
        make(made)
        with tarfile.open(sys.argv[1], "w:xz", preset=9) as archive:
            archive.add(made, "before", filter=left_out)
