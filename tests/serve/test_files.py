"""Clients take connections, and the log and the sources still get their files."""

import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import grpc
import pytest
import yaml

from headrace.errors import ConfigError
from headrace.log import Log, files
from headrace.log._wal import WriteAheadLog
from headrace.serve import ServerSettings
from headrace.sources.sqlite import installation
from headrace.testing import free_port, wait_until
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.serve.conftest import Sites

LIMIT = 320  # open files of the server's process, and no way to raise it
IDLE = 400


class Running:
    """`headrace run` with few files, over a SQLite database."""

    def __init__(self, folder: Path) -> None:
        self.port, self.grpc_port = free_port(), free_port()
        self.output = folder / "output.log"
        # The same library as that of the source: two in one process take away each other's locks.
        self.database = apsw.Connection(str(folder / "shop.db"))
        self.database.set_busy_timeout(60_000)
        self.database.execute("PRAGMA journal_mode = wal")
        self.database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        installation.install(str(folder / "shop.db"), ["*"])
        config = {
            "sources": {"shop": {"type": "sqlite", "path": "shop.db"}},
            "server": {"port": self.port, "grpc_port": self.grpc_port},
        }
        (folder / "headrace.yaml").write_text(yaml.safe_dump(config))
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                ["sh", "-c", f"ulimit -n {LIMIT}; exec {sys.executable} -m headrace.cli run"],
                cwd=folder,
                stdout=output,
                stderr=output,
            )

    def get(self, path: str) -> tuple[int, Any]:
        """A request on a connection of its own; 0: there was no reply."""
        assert self.process.poll() is None, self.output.read_text()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def latest(self) -> int:
        status, stats = self.get("/changefeed/stats")
        return stats["latest_sequence"] if status == 200 else 0

    def insert(self) -> None:
        self.database.execute("INSERT INTO orders DEFAULT VALUES")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    server = Running(tmp_path)
    try:
        wait_until(lambda: server.get("/health")[0] == 200, timeout=240, message="it answers")
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)
        server.database.close()


@contextmanager
def idle(port: int, count: int = IDLE) -> Iterator[None]:
    """So many connections that send nothing; those that are closed are made again."""
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.socket())
            client.settimeout(30)
            client.connect(("127.0.0.1", port))
        yield


@pytest.mark.slow
@pytest.mark.requirement("P-16")
def test_capture_goes_on_whatever_connections_clients_take(running: Running) -> None:
    # A stream that is there before has its place.
    known = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
    known.request("GET", "/v1/changes/stream?operations=insert")
    stream = known.getresponse()
    assert stream.status == 200
    with idle(running.port), idle(running.grpc_port):
        wait_until(
            lambda: "clients are refused" in running.output.read_text(),
            timeout=60,
            message="some are refused",
        )
        assert running.get("/health")[0] in (0, 503)  # there is no place for another
        for _ in range(5):
            running.insert()
            while not (line := stream.readline()).startswith(b"id:"):  # until a change has come
                assert line, "the stream has ended"
    wait_until(lambda: running.get("/health")[0] == 200, timeout=60, message="there is room")
    with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        reply = ChangeFeedStub(channel).Poll(v1.PollRequest(), wait_for_ready=True, timeout=60)
        assert len(reply.events) >= 5
    text = running.output.read_text()
    assert "halted" not in text
    assert "Traceback" not in text
    known.close()


def test_more_connections_than_the_setting_get_503_until_one_goes(sites: Sites) -> None:
    site = sites(ServerSettings(port=0, max_connections=3))
    with ExitStack() as stack:
        clients = []
        for _ in range(3):
            client = http.client.HTTPConnection(*site.address, timeout=30)
            stack.callback(client.close)
            client.request("GET", "/v1/changes/stream")  # one that is idle is soon closed
            assert client.getresponse().status == 200
            clients.append(client)
        with socket.create_connection(site.address, timeout=30) as refused:
            reply = refused.makefile("rb").read()
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b'"error":"too_many_connections"' in reply
        clients[0].close()

        def answered() -> bool:
            with socket.create_connection(site.address, timeout=30) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return client.recv(12) == b"HTTP/1.1 200"

        wait_until(answered, timeout=60, message="the place is free")


def test_the_limit_of_files_is_raised_and_shared_out() -> None:
    script = (
        "import resource\n"
        "from headrace.log import files\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "print(files.raise_file_limit() == min(hard, files.MOST_FILES))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"True\n"
    for limit in (256, 1024, 4096, 65_536):
        shared = files.log_files(limit) + files.connections(limit)
        assert shared < limit, limit


def test_more_connections_than_files_are_refused_by_the_setting() -> None:
    settings = ServerSettings(port=0, max_connections=10_000_000)
    with pytest.raises(ConfigError, match=r"server\.max_connections 10000000 needs") as refused:
        _ = settings.connections
    assert "ulimit -n" in refused.value.hint


@contextmanager
def no_file_left(spare: int = 0) -> Iterator[None]:
    """Let this process open no other file, but for some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 8, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for file in taken[:spare]:
            os.close(file)
        taken = taken[spare:]
        yield
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_log_syncs_where_no_further_file_can_be_opened(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        with no_file_left():
            for _ in range(3):
                log.move_cursor("billing", 0)
        assert log.cursor("billing") is not None


def test_the_log_waits_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wal = WriteAheadLog(tmp_path)
    wal.close()  # the spare one is taken, too
    tries = []

    def sleep(seconds: float) -> None:
        tries.append(seconds)
        if len(tries) == 3:
            monkeypatch.undo()

    def list_nothing(path: Path) -> list[str]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(os, "listdir", list_nothing)
    wal.sync()
    assert len(tries) == 3
    assert caplog.text.count("ulimit -n") == 1
    wal.close()
