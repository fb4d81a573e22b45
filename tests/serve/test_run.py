"""Starting and stopping the server."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from headrace.errors import HeadraceError
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.testing import wait_until
from tests.changes import opened_writer
from tests.serve.conftest import Site
from tests.serve.sse import Reader

SERVE = """
import sys
from headrace.log import Log
from headrace.serve import ServerSettings, create_app, serve
settings = ServerSettings(port=int(sys.argv[2]))
with Log.open(sys.argv[1]) as log:
    serve(create_app(log, statuses=lambda: [], copy_again=None, settings=settings), settings)
"""


def test_a_port_in_use_is_named_with_the_fix(site: Site) -> None:
    port = site.address[1]
    settings = ServerSettings(port=port)
    app = create_app(site.log, statuses=list, copy_again=None, settings=settings)
    with (
        pytest.raises(HeadraceError, match=rf"server\.port {port}") as caught,
        BackgroundServer(app, settings),
    ):
        pytest.fail("it must not start")
    assert "server.port" in caught.value.hint


def test_an_address_of_another_machine_is_named_with_the_fix(site: Site) -> None:
    settings = ServerSettings(host="192.0.2.1", port=0, allow_remote=True)
    app = create_app(site.log, statuses=list, copy_again=None, settings=settings)
    with (
        pytest.raises(HeadraceError, match=r"server\.host '192\.0\.2\.1'"),
        BackgroundServer(app, settings),
    ):
        pytest.fail("it must not start")


def test_open_streams_end_promptly_when_the_server_stops(site: Site) -> None:
    site.writer.put("users", "alice")
    url = f"{site.url}/changefeed/stream?keep_alive=true&max_seconds=60"
    forever = f"{site.url}/v1/changes/stream"
    with Reader(url) as first, Reader(forever) as second, ThreadPoolExecutor() as pool:
        poll = pool.submit(
            httpx.get, f"{site.url}/changefeed?from_seq=1&long_poll_ms=60000", timeout=60
        )
        site.await_waiting(3)
        began = time.monotonic()
        site.server.stop()
        assert time.monotonic() - began < 10
        assert first.ended.wait(120)
        assert second.ended.wait(120)
        assert len(first.events) == len(second.events) == 1
        assert poll.result().json()["events"] == []


def test_the_server_stops_although_a_client_does_not_read(tmp_path: Path) -> None:
    settings = ServerSettings(port=0)
    with opened_writer(tmp_path / "log") as writer, socket.socket() as slow:
        app = create_app(writer.log, statuses=list, copy_again=None, settings=settings)
        with BackgroundServer(app, settings) as server:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            url = httpx.URL(server.url)
            assert url.port is not None
            slow.connect((url.host, url.port))
            slow.sendall(b"GET /v1/changes/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for number in range(40):
                writer.put("users", str(number), photo="x" * (1 << 18))
            began = time.monotonic()
        assert time.monotonic() - began < 10


def test_a_log_can_be_written_after_its_server_stopped(site: Site) -> None:
    site.server.stop()
    assert site.writer.put("users", "alice") == 1


def test_two_servers_may_serve_one_log(site: Site) -> None:
    settings = ServerSettings(port=0)
    app = create_app(site.log, statuses=list, copy_again=None, settings=settings)
    with (
        BackgroundServer(app, settings) as other,
        Reader(f"{other.url}/changefeed/stream?keep_alive=true") as reader,
    ):
        site.writer.put("users", "alice")
        assert len(reader.await_events(1)) == 1
        assert site.get("/changefeed").json()["count"] == 1


def test_in_the_foreground_it_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVE, str(tmp_path / "log"), str(port)]
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: _answers(port), timeout=120, message="the server answers")
        finally:
            process.terminate()
        assert process.wait(120) in (0, -15)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
