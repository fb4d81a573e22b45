"""Clients that others wrote: a browser, Node's ws, websocket-client."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import websocket

from headrace.log.keys import KeyRequest
from headrace.serve import ServerSettings
from headrace.testing import free_port, wait_until
from tests.changes import Writer, opened_writer
from tests.needs import missing
from tests.serve.browser import Front, Page, browser
from tests.serve.conftest import Site
from tests.serve.test_websocket_examples import EXAMPLES, NODE, Following
from tests.serve.ws import ANY_KEY

ROOT = Path(__file__).parents[2]
WS = ROOT / ".venv" / "node" / "node_modules" / "ws"  # where scripts/setup.sh puts it


class Restarting:
    """A server that can be stopped and started again, at the same address."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.address = ("127.0.0.1", free_port())
        self._stack = ExitStack()

    def start(self) -> Site:
        """Start it."""
        return Site(self.writer, ServerSettings(port=self.address[1]), self._stack)

    def stop(self) -> None:
        """Stop it."""
        self._stack.close()


@pytest.fixture
def restarting(tmp_path: Path) -> Iterator[Restarting]:
    """One with a table `orders`, started."""
    with opened_writer(tmp_path / "log") as writer:
        writer.table("orders")
        server = Restarting(writer)
        try:
            yield server
        finally:
            server.stop()


# --- a browser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of Chromium; every test opens its own."""
    with browser() as page:
        yield page


ROWS = "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[3].textContent)"


@pytest.mark.slow
@pytest.mark.requirement("S3-30", "S3-31")
def test_the_example_page_shows_changes_through_a_restart(
    page: Page, restarting: Restarting
) -> None:
    site = restarting.start()
    key = site.service.keyring.create(KeyRequest(tables=("orders",))).secret
    with Front(EXAMPLES, restarting.address) as front:
        page.open(f"{front.url}/browser.html")
        page.run(f"document.forms[0].key.value = '{key}', document.forms[0].requestSubmit()")
        state = "document.querySelector('output').value"
        page.await_true(f"{state} === 'connected'", "the page is connected")
        site.writer.put("orders", "1", note="<img src=x onerror=\"document.title='broken'\">")
        page.await_true(f"{ROWS}.length === 1", "a row is shown")
        restarting.stop()
        page.await_true(f"{state} !== 'connected'", "the page knows that it is not connected")
        site.writer.put("orders", "2")
        site = restarting.start()
        page.await_true(f"{state} === 'connected'", "the page is connected again")
        site.writer.put("orders", "3")
        page.await_true(f"{ROWS}.length >= 3", "all rows are shown")
        assert [json.loads(row)["id"] for row in page.run(ROWS)] == ["3", "2", "1"]
        # What a row holds is text, whatever it says.
        assert page.run("document.querySelectorAll('img').length") == 0
        assert page.run("document.title") == "Changes"


@pytest.mark.slow
@pytest.mark.requirement("S4-07", "S4-17", "S4-18")
def test_an_event_source_hears_everything_through_a_restart(
    page: Page, restarting: Restarting
) -> None:
    site = restarting.start()
    site.writer.put_many("orders", 5)
    with Front(EXAMPLES, restarting.address) as front:
        page.open(f"{front.url}/browser.html")
        page.run("""
            globalThis.heard = [];
            globalThis.source = new EventSource("/v1/changes/stream?tables=orders");
            source.onmessage = ({ data, lastEventId: id }) => heard.push([id, JSON.parse(data)]);
            0
        """)
        page.await_true("heard.length === 5", "what there was has come")
        restarting.stop()
        page.await_true("source.readyState === EventSource.CONNECTING", "it reconnects")
        site.writer.put_many("orders", 5)
        site = restarting.start()
        page.await_true("heard.length >= 10", "what was missed has come")
        site.writer.put("users", "not asked for")
        site.writer.put("orders", "last")
        page.await_true("heard.length >= 11", "what is new comes")
        heard = page.run("heard")
        page.run("source.close()")
    assert [int(id) for id, _ in heard] == [change["sequence"] for _, change in heard]
    assert [change["sequence"] for _, change in heard] == [*range(1, 11), 12]


@pytest.mark.slow
def test_a_page_of_another_site_gets_nothing(page: Page, restarting: Restarting) -> None:
    site = restarting.start()
    site.writer.put("orders", "secret")
    host, port = restarting.address
    server = f"{host}:{port}"
    with Front(EXAMPLES, None) as evil:
        page.open(f"{evil.url}/browser.html")
        tries = {
            "socket": f"""new Promise((done) => {{
                const socket = new WebSocket("ws://{server}/v1/stream");
                socket.onopen = () => done("open");
                socket.onerror = () => done("refused");
            }})""",
            "source": f"""new Promise((done) => {{
                const source = new EventSource("http://{server}/v1/changes/stream");
                source.onmessage = () => done("heard");
                source.onerror = () => done(source.readyState === 2 ? "refused" : "tries");
            }})""",
            "read": f"""fetch("http://{server}/v1/changes").then(() => "read", () => "refused")""",
            # A browser sends this without asking first, and does not show the answer.
            "trim": f"""fetch("http://{server}/changefeed/retention", {{
                method: "POST", mode: "no-cors", body: '{{"before_sequence": 99}}',
            }}).then(({{ type }}) => type)""",
        }
        told = {name: page.run(script) for name, script in tries.items()}
    assert told == {"socket": "refused", "source": "refused", "read": "refused", "trim": "opaque"}
    assert site.log.first_sequence == 1
    assert len(site.get("/v1/changes").json()["changes"]) == 1


# --- Node's ws -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example where Node finds the package ws beside it."""
    if not WS.is_dir():
        missing("the Node package ws is not installed (scripts/setup.sh ws)")
    folder = tmp_path / "example"
    folder.mkdir()
    shutil.copy(EXAMPLES / "stream.mjs", folder)
    (folder / "node_modules").symlink_to(WS.parent, target_is_directory=True)
    return folder


def node(folder: Path, url: str, key: str) -> "subprocess.Popen[str]":
    """The example on ws: without the WebSocket that Node has of its own."""
    address = url.replace("http", "ws") + "/v1/stream"
    return subprocess.Popen(
        [NODE, "--no-experimental-websocket", str(folder / "stream.mjs"), address, "orders"],
        env=os.environ | {"HEADRACE_KEY": key},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


@pytest.mark.slow
@pytest.mark.requirement("S3-30", "S3-31")
def test_ws_follows_a_table_through_a_restart_and_hears_of_what_is_lost(
    folder: Path, restarting: Restarting
) -> None:
    site = restarting.start()
    key = site.service.keyring.create(KeyRequest()).secret
    with node(folder, site.url, key) as process:
        try:
            following = Following(process)
            following.await_state("connected")
            site.writer.put("orders", "1")
            wait_until(lambda: following.ids == ["1"], timeout=120)
            restarting.stop()
            following.await_state("connects again in 1 s")
            site.writer.put("orders", "2")
            site = restarting.start()
            following.await_state("connected", 2)
            wait_until(lambda: following.ids == ["1", "2"], timeout=120)
            restarting.stop()
            following.await_state("connects again in 1 s", 2)
            for number in (3, 4):
                site.writer.put("orders", str(number))
            site.log.trim(4)  # 3 is lost
            restarting.start()
            following.await_state("gap")
            wait_until(lambda: following.ids == ["1", "2", "4"], timeout=120)
        finally:
            process.kill()


# --- websocket-client ----------------------------------------------------------------------------


@pytest.mark.requirement("S3-35")
def test_websocket_clients_app_runs_the_documents_flow(restarting: Restarting) -> None:
    site = restarting.start()
    heard: list[dict[str, Any]] = []

    def on_open(app: websocket.WebSocketApp) -> None:
        app.send(json.dumps({"type": "auth", "apiKey": ANY_KEY}))

    def on_message(app: websocket.WebSocketApp, text: str) -> None:
        message = json.loads(text)
        heard.append(message)
        if message["type"] == "auth_success":
            app.send(json.dumps({"type": "subscribe", "tables": ["orders"]}))
        elif message["type"] == "subscription_confirmed":
            threading.Thread(target=site.writer.put, args=("orders", "1")).start()
        elif message["type"] == "cdc_event":
            app.close()

    # As it comes: with an Origin of its own, which is the server's.
    address = site.url.replace("http", "ws") + "/v1/stream"
    websocket.WebSocketApp(address, on_open=on_open, on_message=on_message).run_forever()
    types = [message["type"] for message in heard]
    assert types == ["auth_success", "subscription_confirmed", "cdc_event"]
    assert heard[-1]["data"] == {"id": "1"}
