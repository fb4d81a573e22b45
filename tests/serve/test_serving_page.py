"""The examples of docs/serving.md, run as they stand against a real server."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.log.keys import KeyRequest
from headrace.serve import BackgroundServer, ServerSettings, create_app
from tests.changes import opened_writer

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
# Everything in these languages is an example.
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


class Site:
    """A server with two orders, and how an example reaches it."""

    def __init__(self, server: BackgroundServer, key: str) -> None:
        self._server = server
        self._key = key

    def run(self, language: str, code: str) -> str:
        """What an example prints when the default addresses are this server's."""
        here = code.replace("127.0.0.1:3000", self._server.url.removeprefix("http://"))
        here = here.replace("127.0.0.1:50051", self._server.grpc_target)
        command = {"sh": ["sh", "-ec"], "python": [sys.executable, "-W", "error", "-c"]}[language]
        done = subprocess.run(
            [*command, here],
            env=os.environ | ({"HEADRACE_KEY": self._key} if self._key else {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A server; with a parameter that says so, one that needs a key."""
    keyed = getattr(request, "param", False)
    settings = ServerSettings(port=0, grpc_port=0, require_key=keyed)
    with ExitStack() as stack:
        writer = stack.enter_context(opened_writer(tmp_path / "log"))
        writer.put("orders", "1")
        writer.put("orders", "2")
        app = create_app(writer.log, statuses=list, copy_again=None, settings=settings)
        server = stack.enter_context(BackgroundServer(app, settings))
        key = app.state.service.keyring.create(KeyRequest()).secret if keyed else ""
        yield Site(server, key)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_example_tells_of_the_orders(site: Site, block: tuple[str, str]) -> None:
    assert "orders" in site.run(*block)


@pytest.mark.parametrize("site", [True], indirect=True)
@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if "HEADRACE_KEY" in block[1]], ids=lambda block: block[0]
)
def test_every_example_that_takes_a_key_works_with_one(site: Site, block: tuple[str, str]) -> None:
    assert "orders" in site.run(*block)


@pytest.mark.requirement("S4-23")
@pytest.mark.parametrize("proxy", ["nginx", "Caddy"])
@pytest.mark.parametrize(
    "setting", ["127.0.0.1:3000", "127.0.0.1:50051", "75s", "/headrace.v1.ChangeFeed/"]
)
def test_the_proxies_are_described_for_every_protocol(proxy: str, setting: str) -> None:
    described = PAGE.partition("## Behind a proxy")[2]
    nginx, _, caddy = described.partition("Caddy sends")
    assert setting in (nginx if proxy == "nginx" else caddy)
