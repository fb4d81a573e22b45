"""`headrace reload` and SIGHUP: only what differs is touched, and clients' streams stay open."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner
from websockets.sync.client import ClientConnection, connect

from headrace.cli import app
from headrace.client import Client
from headrace.testing import PostgresDatabase, wait_until
from tests.cli.test_cli import NOWHERE, Site, rows, site
from tests.cli.test_parts import await_phase, ok, source
from tests.java import QUICK_JAVA
from tests.serve.ws import ANY_KEY

__all__ = ["site"]

pytestmark = pytest.mark.requirement("P-14")


class Listener:
    """One connection of a client, and what came over it."""

    def __init__(self, close: Any) -> None:
        self.text = ""
        self.ended = False
        self.close = close

    def follow(self, pieces: Iterator[str | bytes]) -> None:
        try:
            for piece in pieces:
                self.text += piece if isinstance(piece, str) else piece.decode()
        except Exception as error:  # noqa: BLE001 - shown by whoever waits
            self.text += f"\n{error!r}"
        self.ended = True

    def await_row(self, name: str) -> None:
        wait_until(lambda: name in self.text or self.ended, timeout=120, message=f"{name} came")
        assert not self.ended, self.text
        assert name in self.text


def messages(socket: ClientConnection) -> Iterator[str | bytes]:
    """What comes over a WebSocket; pings are answered."""
    for text in socket:
        message = json.loads(text)
        if message["type"] == "ping":
            socket.send(json.dumps({"type": "pong", "timestamp": message["timestamp"]}))
        yield text


@contextmanager
def listening_to(client: Client, site: Site) -> Iterator[list[Listener]]:
    """A stream of server-sent events and a WebSocket, each one connection from first to last."""
    await_phase(client, "streaming")
    url = site.url
    with (
        httpx.Client(base_url=url, timeout=120) as http,
        http.stream("GET", "/v1/changes/stream", params={"after": 0}) as events,
        connect(f"{url.replace('http', 'ws')}/v1/stream") as socket,
    ):
        socket.send(json.dumps({"type": "auth", "apiKey": ANY_KEY}))
        assert json.loads(socket.recv(60))["type"] == "auth_success"
        socket.send(json.dumps({"type": "subscribe", "tables": ["users"]}))
        assert json.loads(socket.recv(60))["type"] == "subscription_confirmed"
        listeners = [Listener(events.close), Listener(socket.close)]
        followed: list[Iterator[str | bytes]] = [iter(events.iter_text()), messages(socket)]
        threads = [
            threading.Thread(target=listener.follow, args=(pieces,), daemon=True)
            for listener, pieces in zip(listeners, followed, strict=True)
        ]
        for thread in threads:
            thread.start()
        yield listeners


def write(site: Site, pg: PostgresDatabase, tables: list[str], **sections: Any) -> None:
    shop = {"type": "postgres", "url": pg.url, "tables": tables}
    site.write_config("", **{"sources": {"shop": shop}, **sections})


def other(pg: PostgresDatabase) -> dict[str, Any]:
    return {"type": "postgres", "url": pg.url, "tables": ["public.visits"], "slot": "s_other",
            "publication": "p_other"}  # fmt: skip


def runs_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except psutil.Error:  # another test's, which has ended
        return False


@pytest.fixture
def shop(site: Site, pg: PostgresDatabase) -> Site:
    for table in ("users", "orders", "visits"):
        pg.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, name text)")
    write(site, pg, ["public.users"])
    return site


@pytest.mark.live
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.usefixtures("java")
def test_a_reload_adds_a_table_a_source_and_a_sink_and_no_stream_ends(
    shop: Site, pg: PostgresDatabase
) -> None:
    lake = {"type": "files", "path": "lake", "format": "canonical"}
    pipeline: dict[str, Any] = {"master": "local[1]", "spark": QUICK_JAVA, "sinks": {"lake": lake}}
    write(shop, pg, ["public.users"], pipeline=pipeline)

    def stored(sink: str) -> str:
        return "".join(file.read_text() for file in (shop.folder / sink).rglob("*.jsonl"))

    def await_stored(sink: str, name: str) -> None:
        wait_until(lambda: name in stored(sink), timeout=240, message=f"{sink} has {name}")

    def pid() -> int:
        return int(json.loads((shop.folder / "data/pipeline/status.json").read_text())["pid"])

    pg.execute("INSERT INTO users VALUES (1, 'u-one')")
    with shop.running() as client, listening_to(client, shop) as [events, socket]:
        await_stored("lake", "u-one")
        began = pid()
        pg.execute("INSERT INTO orders VALUES (1, 'o-before')")

        shop_source = {"type": "postgres", "url": pg.url, "tables": ["public.users", "orders"]}
        pipeline["sinks"] = {"lake": lake, "copy": {**lake, "path": "copy"}}
        shop.write_config("", sources={"shop": shop_source, "other": other(pg)}, pipeline=pipeline)
        shown = ok(shop.invoke("reload"))
        assert shown.splitlines() == [
            "+ source other",
            '~ source shop: tables: ["public.users"] → ["public.users","orders"]',
            "+ sink copy",
        ]
        await_phase(client, "streaming")
        await_phase(client, "streaming", "other")
        pg.execute("INSERT INTO users VALUES (2, 'u-two')")
        pg.execute("INSERT INTO orders VALUES (2, 'o-two')")
        pg.execute("INSERT INTO visits VALUES (1, 'v-one')")
        for name in ("u-two", "o-two", "v-one"):
            events.await_row(name)
        socket.await_row("u-two")
        assert "o-before" in events.text
        for sink in ("lake", "copy"):
            await_stored(sink, "v-one")
            assert all(name in stored(sink) for name in ("u-one", "o-before", "o-two"))
        assert [each["sink"] for each in client.get("/v1/sinks")["sinks"]] == ["lake", "copy"]
        assert pid() == began  # the sinks alone were touched

        # Other settings of Spark are taken up by starting the pipeline again, in its own process.
        pipeline["sinks"].pop("copy")
        pipeline["trigger_seconds"] = 0.5
        shop.write_config("", sources={"shop": shop_source, "other": other(pg)}, pipeline=pipeline)
        assert "- sink copy" in ok(shop.invoke("reload"))
        pg.execute("INSERT INTO users VALUES (3, 'u-three')")
        await_stored("lake", "u-three")
        for listener in (events, socket):
            listener.await_row("u-three")
        assert "u-three" not in stored("copy")
        assert len([line for line in stored("lake").splitlines() if '"u-one"' in line]) == 1


@pytest.mark.live
def test_sighup_takes_up_what_it_can_and_a_broken_config_changes_nothing(
    shop: Site, pg: PostgresDatabase
) -> None:
    pg.execute("INSERT INTO users VALUES (0, 'u-zero')")
    with shop.running() as client, listening_to(client, shop) as [events, socket]:
        began = source(client)
        write(shop, pg, ["public.users"], server={"port": shop.port, "max_lag_secconds": 5})
        assert "no setting called max_lag_secconds" in shop.invoke("reload").stderr
        # The server reads the file itself, and says the same.
        [process] = [each for each in psutil.Process().children() if runs_in(each, shop.folder)]
        os.kill(process.pid, 1)
        wait_until(lambda: "config not reloaded" in shop.output(), timeout=60, message="it says so")
        assert "did you mean max_lag_seconds" in shop.output()

        write(shop, pg, ["public.users"], server={"port": shop.port + 1}, cdc={"batch_size": 1})
        pg.execute("INSERT INTO users VALUES (1, 'u-one'), (2, 'u-two')")
        dry = ["reload", "--dry-run", "--url", shop.url]
        key = str(shop.folder / "data/operator.key")
        shown = ok(CliRunner().invoke(app, [*dry, "--key-file", key]))
        assert "needs a restart and stays as it was" in shown
        assert "nothing was taken up" in shown
        os.kill(process.pid, 1)
        wait_until(
            lambda: len(client.get("/changefeed")["events"]) == 1, timeout=60, message="taken up"
        )
        for listener in (events, socket):
            listener.await_row("u-two")
        assert source(client)["position"] >= began["position"]
        assert "source=shop phase=stopped" not in shop.output()


@pytest.mark.live
def test_a_source_that_is_taken_out_stops_and_the_rest_goes_on(
    shop: Site, pg: PostgresDatabase
) -> None:
    both = {"shop": {"type": "postgres", "url": pg.url, "tables": ["users"]}, "other": other(pg)}
    shop.write_config("", sources=both)
    with shop.running() as client:
        await_phase(client, "streaming", "other")
        del both["other"]
        shop.write_config("", sources=both)
        assert ok(shop.invoke("reload")) == "- source other\n"
        assert [each["source"] for each in client.get("/v1/sources")["sources"]] == ["shop"]
        pg.execute("INSERT INTO visits VALUES (1, 'v')")
        pg.execute("INSERT INTO users VALUES (7, 'u')")
        wait_until(lambda: ("INSERT", 7) in rows(client), timeout=120, message="it goes on")
        assert ("INSERT", 1) not in rows(client)
        assert ok(shop.invoke("reload")) == "nothing has changed\n"


def test_without_a_server_there_is_nothing_to_reload(site: Site) -> None:
    site.write_config(NOWHERE)
    result = site.invoke("reload")
    assert result.exit_code == 1
    assert "the next start reads the config anyway" in result.stderr
