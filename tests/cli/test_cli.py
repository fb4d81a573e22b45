"""The commands do what they say, print what went wrong in a sentence, and exit accordingly."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rocksdict import Options, Rdict
from typer.testing import CliRunner, Result

from headrace.change.event import Batch, BeforeKind, Change, Column, Op, Table, Transaction
from headrace.cli import app
from headrace.cli.quantities import parse_age, parse_size
from headrace.client import Client
from headrace.config import ServerSection, load
from headrace.errors import ConfigError, ServerAbsent
from headrace.formats.catalogue import names
from headrace.log import Log, LogReader
from headrace.run import formats
from headrace.sources.postgres.position import PostgresPosition
from headrace.testing import PostgresDatabase, free_port, wait_until
from tests.disks import small_disk
from tests.serve.histories import told

HEADRACE = [sys.executable, "-c", "from headrace.cli import main; main()"]
PASSWORD = "hunter2"
NOWHERE = f"postgresql://app:{PASSWORD}@127.0.0.1:1/shop"

USERS = Table(
    "shop", "postgres", "o", "db", "public", "users",
    (Column("id", "integer", key=True), Column("name", "text")),
)  # fmt: skip


class Site:
    """A folder with a config, and the commands run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.write_config(NOWHERE)

    def write_config(self, source_url: str, **sections: Any) -> None:
        content = {
            "sources": {"shop": {"type": "postgres", "url": source_url}},
            "server": {"port": self.port},
            **sections,
        }
        (self.folder / "headrace.yaml").write_text(json.dumps(content))

    @property
    def log(self) -> Path:
        return self.folder / "data" / "log"

    @property
    def config(self) -> Path:
        return self.folder / "headrace.yaml"

    def invoke(self, *arguments: str) -> Result:
        """Run a command in this process."""
        command, *rest = arguments
        config = ["--config", str(self.config)]
        return CliRunner().invoke(app, [command, *config, *rest])

    @contextmanager
    def running(self, *, exits: int = 0, stop: signal.Signals = signal.SIGTERM) -> Iterator[Client]:
        """Run `headrace run` in a process of its own, and stop it as a service manager would."""
        output = (self.folder / "output.txt").open("ab")
        process = subprocess.Popen(
            [*HEADRACE, "run"], cwd=self.folder, stdout=output, stderr=output
        )
        client = Client(self.url)
        try:
            wait_until(lambda: self._answers(process), timeout=120, message="the server answers")
            yield client
            process.send_signal(stop)
            assert process.wait() == exits, self.output()
        finally:
            process.kill()
            process.wait()
            output.close()

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.output()
        try:
            Client(self.url).get("/health")
        except ServerAbsent:
            return False
        return True

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def insert(number: int, *, captured_at: int | None = None) -> Change:
    """A row inserted in a transaction of its own."""
    at = captured_at or time.time_ns() // 1000
    image = msgspec.json.encode({"id": number, "name": f"user {number}"})
    key = msgspec.json.encode({"id": number})
    return Change(
        Op.INSERT, USERS, key, None, BeforeKind.NONE, image, None, (),
        Transaction(str(number), at, at), 1, PostgresPosition(number, number), last=True,
    )  # fmt: skip


@pytest.fixture
def filled(site: Site) -> Site:
    """A site whose log holds twenty changes."""
    with Log.open(site.log) as log:
        table = log.register(USERS)
        changes = [msgspec.structs.replace(insert(n), table=table) for n in range(1, 21)]
        log.append("earlier", Batch(changes, b"{}"))
    return site


def phase(client: Client) -> str:
    [source] = client.get("/v1/sources")["sources"]
    return str(source["phase"])


def streaming(client: Client) -> None:
    wait_until(lambda: phase(client) == "streaming", timeout=120, message="it streams")


def rows(client: Client) -> list[tuple[str, Any]]:
    """Every change of a row in the log: what happened, and to what id."""
    found = client.get("/v1/changes", limit=10000)["changes"]
    return [(change["op"], change["key"]["id"]) for change in found if change["key"]]


# --- what every command does ---------------------------------------------------------------------


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, "headrace 0.1.0\n")


def test_starting_the_command_line_loads_nothing_heavy() -> None:
    heavy = {"litestar", "psycopg", "pyspark", "rocksdict", "uvicorn"}
    program = f"import sys, headrace.cli; print(*{heavy} & set(sys.modules))"
    shown = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert shown.split() == []


@pytest.mark.parametrize(
    "command", ["run", "pipeline", "check", "status", "tail", "trim --before 1", "snapshot x"]
)
def test_a_config_that_cannot_be_used_is_reported_in_a_sentence(site: Site, command: str) -> None:
    site.write_config(NOWHERE, sevrer={})
    result = site.invoke(*command.split())
    assert result.exit_code == 1
    assert result.stderr == "error: headrace: no setting called sevrer; did you mean server?\n"
    assert result.stdout == ""


def test_an_error_comes_with_what_to_do(site: Site) -> None:
    (site.folder / "headrace.yaml").unlink()
    result = site.invoke("status")
    assert result.stderr.endswith("\nName another one with --config.\n")


def test_debug_shows_where_an_error_comes_from(site: Site) -> None:
    config = str(site.folder / "absent.yaml")
    result = CliRunner().invoke(app, ["--debug", "status", "--config", config])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize(
    "arguments",
    [
        ["trim"],
        ["trim", "--before", "1", "--older-than", "1d"],
        ["trim", "--older-than", "soon"],
        ["trim", "--max-size", "big"],
        ["tail", "--after", "yesterday"],
        ["tail", "--limit", "0"],
        ["tail", "--op", "upsert"],
        ["tail", "--since", "soon"],
        ["tail", "-n", "1", "--after", "2"],
        ["tail", "--format", "avro"],
        ["tail", "--preserve-transactions"],
        ["tail", "--format", "etl", "--preserve-transactions"],
        ["snapshot"],
        ["demo", "--seconds", "0"],
        ["fly"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(filled: Site, arguments: list[str]) -> None:
    command, *rest = arguments
    config = [] if command in ("demo", "fly") else ["-c", str(filled.folder / "headrace.yaml")]
    assert CliRunner().invoke(app, [command, *config, *rest]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("12h", 43_200), ("1.5d", 129_600)]
)
def test_an_age_is_read(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("10GB", 10**10), ("1.5 kB", 1500), ("2m", 2_000_000), ("7B", 7)],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


# --- without a server ----------------------------------------------------------------------------


def test_status_without_a_server_shows_what_the_log_knows(filled: Site) -> None:
    with Log.open(filled.log) as log:
        log.move_cursor("reports", 15)
    result = filled.invoke("status")
    assert result.exit_code == 0
    assert "server: not running" in result.stdout
    assert "20 changes, sequences 1 to 20" in result.stdout
    assert "cursor reports: at 15, 5 behind" in result.stdout


def test_status_as_json_has_the_same(filled: Site) -> None:
    seen = json.loads(filled.invoke("status", "--json").stdout)
    assert seen["server"] is None
    assert seen["log"]["latest_sequence"] == 20
    assert [source["source"] for source in seen["sources"]] == ["shop"]


def test_status_before_the_first_run_is_no_error(site: Site) -> None:
    result = site.invoke("status")
    assert (result.exit_code, "log: none yet" in result.stdout) == (0, True)


def sequences(result: Result) -> list[int]:
    return [json.loads(line)["sequence"] for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", range(11, 21)),
        ("--after 17", range(18, 21)),
        ("--after earliest", range(1, 21)),
        ("--after latest", []),
        ("--after earliest --limit 3", range(1, 4)),
        ("--after earliest --tables users --limit 2", range(1, 3)),
        ("--after earliest --tables public.orders --tables nothing.*", []),
    ],
)
def test_tail_reads_the_log_on_disk(filled: Site, options: str, expected: range) -> None:
    result = filled.invoke("tail", "--no-follow", "--json", *options.split())
    assert result.exit_code == 0, result.stderr
    assert sequences(result) == list(expected)


def test_tail_prints_a_line_a_change_for_people(filled: Site) -> None:
    result = filled.invoke("tail", "--no-follow", "--after", "19")
    [line] = result.stdout.splitlines()
    assert line.split()[0] == "20"
    assert 'INSERT   public.users {"id":20,"name":"user 20"}' in line


def test_tail_says_what_is_no_longer_there(filled: Site) -> None:
    with Log.open(filled.log) as log:
        log.trim(6)
    result = filled.invoke("tail", "--no-follow", "--json", "--after", "earliest")
    assert "the changes 1-5 are no longer in the log" in result.stderr
    assert sequences(result) == list(range(6, 21))


def test_tail_without_any_log_says_so(site: Site) -> None:
    result = site.invoke("tail")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: there is no log in")
    assert not site.log.exists()


def test_tail_on_disk_follows_what_another_process_writes(filled: Site) -> None:
    command = [*HEADRACE, "tail", "--json", "--after", "latest", "--limit", "1"]
    with subprocess.Popen(command, cwd=filled.folder, stdout=subprocess.PIPE) as tail:
        with Log.open(filled.log) as log:

            def ended_after_one_more() -> bool:
                change = msgspec.structs.replace(insert(21), table=log.table(1))
                log.append("earlier", Batch([change], b"{}"))
                return tail.poll() is not None

            wait_until(ended_after_one_more, timeout=120, message="tail has seen its change")
        assert tail.stdout is not None
        assert json.loads(tail.stdout.read())["sequence"] > 20


FORMATS = [*names(), "savegress --preserve-transactions"]


def kinds(result: Result) -> Counter[str]:
    """What events call themselves."""
    events = [json.loads(line) for line in result.stdout.splitlines()]
    return Counter(event.get("type") or event.get("operation") or "" for event in events)


@pytest.mark.parametrize("chosen", FORMATS)
def test_tail_prints_any_format(filled: Site, chosen: str) -> None:
    name, *marks = chosen.split()
    result = filled.invoke(
        "tail", "--no-follow", "--after", "17", "--format", name, *marks, "--tables", "users"
    )
    assert result.exit_code == 0, result.stderr
    with LogReader.open(filled.log) as log:
        changes = log.read(17)
        expected = told(log, formats(load(filled.config)).of_log(log.epoch).named(name), after=17)
    assert len(changes) == 3
    if name == "savegress":
        assert all(b"pipe-" in event.payload for event in expected)
    if not marks:
        assert result.stdout.encode().splitlines() == [event.payload for event in expected]
    else:
        assert list(kinds(result)) == ["BEGIN", "INSERT", "COMMIT"]


def test_tail_names_the_formats_it_has(filled: Site) -> None:
    refused = filled.invoke("tail", "--format", "avro").stderr
    assert all(name in refused for name in names())


def test_tail_is_one_stream_from_the_disk_and_from_a_server(filled: Site) -> None:
    with Log.open(filled.log) as log:
        table = log.table(1)
        for first in range(21, 3021, 500):
            changes = [
                msgspec.structs.replace(insert(n), table=table) for n in range(first, first + 500)
            ]
            log.append("earlier", Batch(changes, b"{}"))
    command = ["tail", "--no-follow", "--after", "earliest", "--format", "etl"]
    alone = filled.invoke(*command)
    assert kinds(alone) == {"Relation": 1, "Begin": 3020, "Insert": 3020, "Commit": 3020}
    with filled.running():
        served = filled.invoke(*command)
        assert served.stdout == alone.stdout
        three = filled.invoke(*command, "--limit", "3")
        assert three.stdout.splitlines() == alone.stdout.splitlines()[:3]


def test_tail_of_a_server_says_what_is_no_longer_there(filled: Site) -> None:
    with filled.running():
        filled.invoke("trim", "--before", "6")
        result = filled.invoke("tail", "--no-follow", "--json", "--after", "2")
    assert "the changes 3-5 are no longer in the log" in result.stderr
    assert sequences(result) == list(range(6, 21))


def test_tail_says_when_its_server_goes_away(filled: Site) -> None:
    command = [*HEADRACE, "tail", "--json", "--after", "19"]
    with filled.running():
        tail = subprocess.Popen(
            command, cwd=filled.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert tail.stdout is not None
        assert json.loads(tail.stdout.readline())["sequence"] == 20
    stderr = tail.communicate(timeout=120)[1]
    assert tail.returncode == 1
    assert f"error: the server at {filled.url} went away".encode() in stderr


def test_trim_removes_what_is_below(filled: Site) -> None:
    result = filled.invoke("trim", "--before", "6")
    assert result.stdout == "removed 5 changes; the log begins at 6\n"


def test_trim_by_age_leaves_what_is_young(filled: Site) -> None:
    assert "removed 0 changes" in filled.invoke("trim", "--older-than", "1d").stdout
    assert "removed 20 changes" in filled.invoke("trim", "--older-than", "0s").stdout


def test_trim_by_size_removes_the_oldest(filled: Site) -> None:
    assert "removed 0 changes" in filled.invoke("trim", "--max-size", "1GB").stdout
    assert "removed 20 changes" in filled.invoke("trim", "--max-size", "0").stdout


def test_trim_keeps_what_a_cursor_needs_unless_forced(filled: Site) -> None:
    with Log.open(filled.log) as log:
        log.move_cursor("reports", 3)
    held = filled.invoke("trim", "--before", "10")
    assert held.stdout.startswith("removed 3 changes; the log begins at 4\n")
    assert "cursor reports still needs" in held.stdout
    forced = filled.invoke("trim", "--before", "10", "--force")
    assert forced.stdout == (
        "removed 6 changes; the log begins at 10\nthese needed what was removed: cursor reports\n"
    )


def failure(site: Site, *command: str) -> str:
    """What a command prints that fails; never a traceback."""
    done = subprocess.run(
        [*HEADRACE, *command], cwd=site.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("ts=")]
    assert len(lines) <= 2, lines  # what is wrong, and what to do
    return "\n".join(lines)


@pytest.mark.requirement("P-17")
def test_everything_in_data_dir_is_for_its_user_alone(filled: Site) -> None:
    data = filled.folder / "data"
    for path in (data, data / "log", *(data / "log").iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with filled.running():
        open_ones = [path for path in (data, *data.rglob("*")) if path.stat().st_mode & 0o077]
    assert open_ones == []
    assert f"folder={data} was=755 now=700" in filled.output()


def test_a_data_dir_that_cannot_be_written_is_one_line(site: Site) -> None:
    with small_disk(site.folder / "disk", 64 << 20) as disk:
        site.write_config(NOWHERE, data_dir=str(disk.path / "data"))
        Log.open(disk.path / "data" / "log").close()
        disk.protect()
        for command in ("run", "status", "trim --before 1", "keys create"):
            printed = failure(site, *command.split())
            assert "Read-only file system" in printed, command


def test_a_data_dir_without_space_is_one_line(site: Site) -> None:
    with small_disk(site.folder / "disk", 64 << 20) as disk:
        site.write_config(NOWHERE, data_dir=str(disk.path / "data"))
        with suppress(OSError), (disk.path / "filler").open("wb", buffering=0) as filler:
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        filler.write(bytes(size))
        printed = failure(site, "run")
        assert "No space left on device" in printed


@pytest.mark.requirement("P-35")
def test_a_log_of_a_newer_version_is_one_line(filled: Site) -> None:
    raw = Options(raw_mode=True)
    db = Rdict(str(filled.log), raw, {"state": raw})
    db.get_column_family("state")[b"layout"] = b"99"
    db.close()
    for command in ("run", "status", "tail", "trim --before 1"):
        printed = failure(filled, *command.split())
        assert "has layout 99, this version of Headrace reads layout" in printed
        assert "Run the version of Headrace that wrote it, or a later one." in printed


def test_a_log_whose_state_is_damaged_is_one_line(filled: Site) -> None:
    with Log.open(filled.log) as log:
        log._state.flush()
        log._db.flush()
    for table in filled.log.glob("*.sst"):
        table.write_bytes(bytes(byte ^ 0x5A for byte in table.read_bytes()))
    for command in ("run", "status", "trim --before 1", "keys list"):
        printed = failure(filled, *command.split())
        assert "is damaged" in printed, printed


@pytest.mark.requirement("P-36")
def test_a_backup_of_a_running_server_is_restored_elsewhere(filled: Site) -> None:
    copied = filled.folder / "copied"
    with filled.running():
        made = filled.invoke("backup", str(copied))
        assert made.exit_code == 0, made.output
        assert f"{copied}: sequences 1 to 20 of log" in made.stdout
        assert "copied is not an empty folder" in filled.invoke("backup", str(copied)).stderr
        assert "a server runs at" in filled.invoke("restore", str(copied)).stderr
    assert [path.name for path in (filled.folder / "data").glob("backup-*")] == []
    assert not copied.stat().st_mode & 0o077
    assert not list(copied.rglob("operator.key"))
    elsewhere = filled.folder / "elsewhere"
    elsewhere.mkdir()
    other = Site(elsewhere)
    done = other.invoke("restore", str(copied))
    assert done.exit_code == 0, done.output
    assert "has everything up to sequence 20" in done.stdout
    assert "there is a log in" in other.invoke("restore", str(copied)).stderr
    with other.running() as client:
        found = client.get("/v1/changes", limit=100)["changes"]
    assert [change["sequence"] for change in found] == list(range(1, 21))


def test_a_backup_is_made_without_a_server_too(filled: Site) -> None:
    done = filled.invoke("backup", str(filled.folder / "copied"))
    assert "sequences 1 to 20" in done.stdout, done.output
    for name in ("data/copied", "copied/../data/backup-1"):
        inside = filled.invoke("backup", str(filled.folder / name))
        assert "is in data_dir" in inside.stderr


def test_trim_creates_no_log_where_there_is_none(site: Site) -> None:
    assert site.invoke("trim", "--before", "1").exit_code == 1
    assert not site.log.exists()


def test_snapshot_of_an_unknown_source_names_the_nearest(site: Site) -> None:
    result = site.invoke("snapshot", "shpo")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: no source called shpo; did you mean shop?\n",
    )


def test_snapshot_before_the_first_run_says_that_it_copies_anyway(site: Site) -> None:
    assert "never captured yet" in site.invoke("snapshot", "shop").stdout


# --- check ---------------------------------------------------------------------------------------


def test_check_passes_where_nothing_is_missing(site: Site, pg: PostgresDatabase) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    site.write_config(pg.url)
    result = site.invoke("check")
    assert result.exit_code == 0, result.stdout
    assert "✓ data_dir" in result.stdout
    assert f"✓ server: port {site.port} on 127.0.0.1 is free" in result.stdout
    assert "✗" not in result.stdout


def test_check_names_a_server_that_does_not_answer_and_hides_its_password(site: Site) -> None:
    result = site.invoke("check")
    assert result.exit_code == 1
    assert "✗" in result.stdout.partition("shop")[2]
    assert PASSWORD not in result.stdout + result.stderr


def test_check_names_a_port_that_is_taken(site: Site) -> None:
    with socket.create_server(("127.0.0.1", site.port)):
        result = site.invoke("check")
    assert result.exit_code == 1
    assert f"✗ server: cannot listen on 127.0.0.1 port {site.port}" in result.stdout


def test_check_compares_the_model_with_the_tables(site: Site, pg: PostgresDatabase) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, email text)")
    site.write_config(pg.url)
    assert "model: " not in site.invoke("check").stdout
    site.write_config(pg.url, model={"entities": {"User": {"table": "users"}}})
    good = site.invoke("check")
    assert (good.exit_code, "✓ model: " in good.stdout) == (0, True)
    wrong = {"User": {"table": "users", "identifier": "emial"}, "Post": {"table": "psots"}}
    site.write_config(pg.url, model={"entities": wrong})
    bad = site.invoke("check")
    assert bad.exit_code == 1
    assert "✗ model: headrace.model.entities.User.identifier: public.users" in bad.stdout
    assert "did you mean email?" in bad.stdout
    assert "headrace.model.entities.Post.table" in bad.stdout


def test_check_cannot_compare_a_model_with_a_database_that_does_not_answer(site: Site) -> None:
    site.write_config(NOWHERE, model={"entities": {"User": {"table": "users"}}})
    result = site.invoke("check")
    assert result.exit_code == 1
    assert "✗ model: cannot be compared with the tables" in result.stdout
    assert PASSWORD not in result.stdout


def test_check_names_a_folder_that_cannot_be_written(site: Site) -> None:
    site.write_config(NOWHERE, data_dir="headrace.yaml/data")
    result = site.invoke("check")
    assert "✗ data_dir" in result.stdout


@pytest.mark.parametrize(
    ("server", "needed"),
    [({}, False), ({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "allow_remote": True}, False)],
)
def test_check_shows_whether_clients_need_a_key(
    site: Site, server: dict[str, Any], needed: bool
) -> None:
    site.write_config(NOWHERE, server={**server, "port": site.port})
    result = site.invoke("check")
    assert "✓ server" in result.stdout
    assert ("clients need an API key" in result.stdout) is needed


def test_check_names_settings_that_were_renamed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerSection, "RENAMED", {"http_port": "port"}, raising=False)
    site.write_config(NOWHERE, server={"http_port": site.port})
    result = site.invoke("check")
    assert "! headrace.server.http_port: this setting is now called port" in result.stdout
    assert f"✓ server: port {site.port}" in result.stdout


# --- run -----------------------------------------------------------------------------------------


@pytest.fixture
def shop(site: Site, pg: PostgresDatabase) -> Site:
    """A site whose source is a real database with one table of two rows."""
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    pg.execute("INSERT INTO users VALUES (1, 'Ada'), (2, 'Bob')")
    site.write_config(pg.url)
    return site


def test_run_copies_streams_serves_and_stops_in_order(shop: Site, pg: PostgresDatabase) -> None:
    with shop.running() as client:
        streaming(client)
        pg.execute("INSERT INTO users VALUES (3, 'Cy')")
        wait_until(lambda: ("INSERT", 3) in rows(client), message="the insert is served")
        assert rows(client) == [("READ", 1), ("READ", 2), ("INSERT", 3)]
    with shop.running() as client:
        streaming(client)
        pg.execute("DELETE FROM users WHERE id = 1")
        wait_until(lambda: ("DELETE", 1) in rows(client), message="the delete is served")
        assert rows(client)[2:] == [("INSERT", 3), ("DELETE", 1)]
    assert "Traceback" not in shop.output()


def test_run_refuses_a_model_that_the_tables_do_not_have(shop: Site, pg: PostgresDatabase) -> None:
    shop.write_config(pg.url, model={"entities": {"User": {"table": "users", "id": ["uid"]}}})
    result = shop.invoke("run")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: headrace.model.entities.User.id: public.users has no")
    assert not shop.log.exists()


def test_run_serves_entities_by_its_model(shop: Site, pg: PostgresDatabase) -> None:
    model = {
        "name": "acme-api",
        "version": "2.1.0",
        "instances": {"shop": "primary"},
        "entities": {"Customer": {"table": "public.users", "identifier": "name"}},
    }
    shop.write_config(pg.url, model=model)
    with shop.running() as client:
        streaming(client)
        pg.execute("INSERT INTO users VALUES (3, 'Cy')")
        wait_until(lambda: ("INSERT", 3) in rows(client), message="the insert is served")
        *_, event = client.get("/v1/changes", format="entity")["events"]
        *_, savegress = client.get("/v1/changes", format="savegress")["events"]
        epoch = client.health()["log"]["epoch"]
    assert (event["schema_name"], event["schema_version"]) == ("acme-api", "2.1.0")
    assert event["source"]["instance"] == "primary"
    assert event["entity"]["entity_type"] == "Customer"
    assert event["entity"]["entity_identifier"] == "Cy"
    assert savegress["metadata"]["pipeline_id"] == f"pipe-{epoch[:12]}"
    assert event["event_id"] == savegress["id"]


def test_a_model_is_not_compared_with_a_database_that_does_not_answer(site: Site) -> None:
    site.write_config(NOWHERE, model={"entities": {"User": {"table": "users"}}})
    with site.running() as client:
        wait_until(lambda: phase(client) == "waiting", timeout=120, message="it waits")
    assert "model not checked" in site.output()
    assert PASSWORD not in site.output()


def test_ctrl_c_stops_it_in_order_too(site: Site) -> None:
    with site.running(stop=signal.SIGINT):
        pass
    assert "Traceback" not in site.output()


def test_the_commands_ask_the_running_server(shop: Site, pg: PostgresDatabase) -> None:
    with shop.running() as client:
        streaming(client)
        wait_until(lambda: len(rows(client)) == 2, message="both rows are copied")
        status = shop.invoke("status")
        assert f"server: {shop.url}, healthy" in status.stdout
        assert "streaming" in status.stdout
        assert "1 of 1 tables" in status.stdout
        tail = shop.invoke(
            "tail", "--json", "--after", "earliest", "--limit", "2", "--tables", "users"
        )
        assert [json.loads(line)["op"] for line in tail.stdout.splitlines()][-1] == "READ"
        assert "runs at" in shop.invoke("check").stdout
        assert (
            "a new snapshot of public.users"
            in shop.invoke("snapshot", "shop", "public.users").stdout
        )
        wait_until(lambda: rows(client).count(("READ", 1)) == 2, timeout=120, message="read again")
        latest = client.get("/health")["log"]["latest_sequence"]
        trimmed = shop.invoke("trim", "--before", str(latest))
        assert trimmed.stdout == f"removed {latest - 1} changes; the log begins at {latest}\n"


def test_a_table_the_source_does_not_have_is_refused_by_name(shop: Site) -> None:
    with shop.running() as client:
        streaming(client)
        result = shop.invoke("snapshot", "shop", "public.nothing")
        streaming(client)
    assert result.exit_code == 1
    assert "public.nothing" in result.stderr


def test_a_snapshot_requested_without_a_server_happens_at_the_next_run(
    shop: Site, pg: PostgresDatabase
) -> None:
    with shop.running() as client:
        wait_until(lambda: len(rows(client)) == 2, timeout=120, message="both rows are copied")
    result = shop.invoke("snapshot", "shop", "public.users")
    assert "the next `headrace run` takes a new snapshot" in result.stdout
    with shop.running() as client:
        wait_until(lambda: rows(client).count(("READ", 2)) == 2, timeout=120, message="read again")


def test_a_source_that_halts_is_reported_and_the_log_is_still_served(
    shop: Site, pg: PostgresDatabase
) -> None:
    with shop.running() as client:
        wait_until(lambda: len(rows(client)) == 2, timeout=120, message="both rows are copied")
        streaming(client)
    pg.drop_slots()
    with shop.running(exits=1) as client:
        wait_until(lambda: phase(client) == "halted", timeout=120, message="it has halted")
        assert len(rows(client)) == 2
        status = shop.invoke("status")
        assert "unhealthy" in status.stdout
        assert "headrace snapshot shop" in status.stdout.replace("SOURCE", "shop")
    assert "shop halted" in shop.output()
    assert "Traceback" not in shop.output()


def test_a_database_that_does_not_answer_is_tried_again_and_keeps_its_secret(site: Site) -> None:
    with site.running() as client:
        wait_until(lambda: phase(client) == "waiting", timeout=120, message="it waits")
        assert "waiting" in site.invoke("status").stdout
        shown = json.dumps([client.get("/health"), client.get("/v1/sources")])
        shown += site.invoke("status", "--json").stdout
    assert PASSWORD not in site.output() + shown


@pytest.mark.requirement("S4-21")
def test_switched_off_nothing_is_captured_and_the_feed_does_not_answer(
    shop: Site, pg: PostgresDatabase
) -> None:
    shop.write_config(pg.url, cdc={"enabled": False})
    with shop.running() as client:
        assert client.get("/v1/sources") == {"sources": []}
        with pytest.raises(Exception, match="switched off"):
            client.get("/changefeed")
    assert pg.execute(
        "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    ) == [(0,)]


@pytest.mark.requirement("S1-51")
def test_a_page_of_the_feed_has_the_batch_size_unless_the_request_says_otherwise(
    filled: Site,
) -> None:
    filled.write_config(NOWHERE, cdc={"batch_size": 7})
    with filled.running() as client:
        assert client.get("/changefeed")["count"] == 7
        assert client.get("/changefeed", limit=9)["count"] == 9


def test_two_processes_never_write_the_same_log(site: Site) -> None:
    with site.running():
        site.port = free_port()
        site.write_config(NOWHERE)
        second = subprocess.run(
            [*HEADRACE, "run"],
            cwd=site.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 1
        assert "another process is writing the log" in second.stderr
        assert "Stop the other `headrace run`" in second.stderr


def test_a_port_that_is_taken_is_reported(site: Site) -> None:
    with socket.create_server(("127.0.0.1", site.port)):
        result = subprocess.run(
            [*HEADRACE, "run"],
            cwd=site.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 1
    assert f"error: server.port {site.port} on 127.0.0.1 is in use" in result.stderr


def test_retention_removes_what_is_too_old_and_says_so(site: Site) -> None:
    day = 86_400 * 1_000_000
    now = time.time_ns() // 1000
    with Log.open(site.log) as log:
        table = log.register(USERS)
        for number, captured_at in ((1, now - 41 * day), (2, now - 40 * day), (3, now)):
            change = msgspec.structs.replace(insert(number, captured_at=captured_at), table=table)
            log.append("other", Batch([change], b"{}"))
    with site.running() as client:
        wait_until(lambda: "retention removed=" in site.output(), message="it says what it removed")
        assert [row[1] for row in rows(client)] == [3]


# --- what the docs say ---------------------------------------------------------------------------


def test_the_reference_is_what_the_commands_say() -> None:
    root = Path(__file__).parents[2]
    program = [sys.executable, "scripts/docs.py", "--check"]
    result = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.live
def test_with_json_every_line_of_a_run_is_json(
    filled: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.write_config(NOWHERE)
    monkeypatch.setenv("HEADRACE_LOG_FORMAT", "json")
    with filled.running() as client:
        wait_until(
            lambda: client.get("/v1/sources")["sources"][0]["phase"] == "waiting", timeout=120
        )
    lines = [json.loads(line) for line in filled.output().splitlines()]
    assert all({"ts", "level", "logger", "msg"} <= line.keys() for line in lines)
    assert filled.url in {line.get("url") for line in lines}
    [waiting, *_] = [line for line in lines if line.get("phase") == "waiting"]
    assert (waiting["source"], waiting["level"]) == ("shop", "warning")
    assert PASSWORD not in filled.output()


# --- habits --------------------------------------------------------------------------------------


def test_the_commands_stand_in_the_order_in_which_people_need_them() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    names = ("init", "check", "run", "status", "tail", "sinks", "pause", "reload", "keys")
    places = [shown.index(f"│ {name} ") for name in names]
    assert places == sorted(places)
    assert "--install-completion" in shown
    assert CliRunner().invoke(app, ["-V"]).stdout == "headrace 0.1.0\n"


def test_every_command_that_asks_a_server_takes_its_url() -> None:
    asking = [
        "status", "tail", "sinks", "pause", "resume", "reset", "reload", "snapshot", "trim",
        "keys create", "keys list", "keys revoke", "keys rotate",
    ]  # fmt: skip
    for command in asking:
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command.split(), "--help"]).stdout
        assert "--url" in shown, command
        assert "--key-file" in shown, command


@pytest.fixture
def mixed(site: Site) -> Site:
    """A log of forty changes: every tenth is a DELETE, and half are an hour old."""
    with Log.open(site.log) as log:
        table, now = log.register(USERS), time.time_ns() // 1000
        changes = []
        for number in range(1, 41):
            at = now - 3_600_000_000 if number <= 20 else now
            made = msgspec.structs.replace(insert(number, captured_at=at), table=table)
            op = Op.DELETE if number % 10 == 0 else Op.INSERT
            changes.append(msgspec.structs.replace(made, op=op))
        log.append("earlier", Batch(changes, b"{}"))
    return site


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-n 3", [38, 39, 40]),
        ("-n 0", []),
        ("-n 100", list(range(1, 41))),
        ("-n 2 --op delete", [30, 40]),
        ("-n 9 --op delete --op update", [10, 20, 30, 40]),
        ("-n 1 --op delete,insert --tables users", [40]),
        ("-n 1 --tables nothing", []),
        ("--since 10m", list(range(21, 41))),
        ("--since 2h --op delete", [10, 20, 30, 40]),
        ("--since 2000-01-01 --limit 2", [1, 2]),
        ("--since 2100-01-01T10:00+02:00", []),
    ],
)
def test_tail_begins_where_one_says_and_ends_unless_it_follows(
    mixed: Site, options: str, expected: list[int]
) -> None:
    result = mixed.invoke("tail", "--json", *options.split())
    assert result.exit_code == 0, result.output
    assert sequences(result) == expected


def test_tail_of_a_server_begins_at_the_same_places(mixed: Site) -> None:
    with mixed.running():
        for options, expected in (
            ("-n 2 --op delete", [30, 40]),
            ("--since 10m --limit 2", [21, 22]),
            ("-n 1 -f --limit 1", [40]),
        ):
            assert sequences(mixed.invoke("tail", "--json", *options.split())) == expected
