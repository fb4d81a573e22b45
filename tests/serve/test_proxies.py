"""The proxies of docs/serving.md, as they are described there, before a real server."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headrace.log.keys import KeyRequest
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.testing import free_port, wait_until
from tests.changes import Writer, opened_writer
from tests.needs import missing

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text().partition("## Behind a proxy")[2]
INSTALLED = ROOT / ".venv" / "proxies" / "usr"  # by scripts/setup.sh

READER = """
import sys
from headrace.client import Client
url, key, transport = sys.argv[1:]
client = Client(url, key, grpc=url)
assert client.get("/v1/changes", after=1, tables="orders")["changes"]
for event in client.changes(["orders"], after=1, transport=transport):
    print(event.id, flush=True)
"""


def program(name: str) -> str:
    """A proxy's program; without it the test is skipped, but in CI it fails."""
    own = [str(file) for file in INSTALLED.glob(f"*bin/{name}")]
    found = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") or next(iter(own), None)
    if found is None:
        missing(f"{name} is not installed (scripts/setup.sh proxies)")
    return found


def block(name: str) -> str:
    """A proxy's configuration, as the page has it."""
    after = {"nginx": "nginx:\n", "caddy": "cutting WebSockets off:\n"}[name]
    found = re.search(r"```\w*\n(.*?)```", PAGE.partition(after)[2], re.DOTALL)
    assert found is not None
    return found[1]


class Site:
    """A server that needs keys, a certificate for what stands before it, and a key."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        settings = ServerSettings(port=0, grpc_port=0, require_key=True)
        self.writer: Writer = stack.enter_context(opened_writer(folder / "log"))
        app = create_app(self.writer.log, statuses=list, copy_again=None, settings=settings)
        self._server = stack.enter_context(BackgroundServer(app, settings))
        self.key = app.state.service.keyring.create(KeyRequest()).secret
        self.certificate, self._private = folder / "feed.crt", folder / "feed.key"
        self._certify()
        self.port = free_port()
        self.url = f"https://localhost:{self.port}"

    def adapted(self, text: str) -> str:
        """A configuration with this server's ports instead of the default ones."""
        here = text.replace("127.0.0.1:3000", self._server.url.removeprefix("http://"))
        here = here.replace("127.0.0.1:50051", self._server.grpc_target)
        here = here.replace("/etc/ssl/feed.crt", str(self.certificate))
        return here.replace("/etc/ssl/feed.key", str(self._private))

    def tls(self) -> str:
        return f"tls {self.certificate} {self._private}"

    def ask(self, *options: str) -> str:
        """The status of a request, with the key."""
        command = ["curl", "-s", "-o", os.devnull, "-w", "%{http_code}", "--max-time", "20"]
        command += ["--cacert", str(self.certificate), "-H", f"X-API-Key: {self.key}", *options]
        done = subprocess.run(
            [*command, f"{self.url}/v1/changes"], capture_output=True, check=False
        )
        return done.stdout.decode()

    def _certify(self) -> None:
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
        command += ["ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=DNS:localhost"]
        command += ["-keyout", str(self._private), "-out", str(self.certificate)]
        subprocess.run(command, check=True, capture_output=True)


def nginx(site: Site) -> list[str]:
    """How nginx is started with the page's configuration."""
    described = site.adapted(block("nginx")).replace("listen 443 ", f"listen {site.port} ")
    described = described.replace("feed.example.com", "localhost")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {site.folder}/{kind};" for kind in kinds)
    file = site.folder / "nginx.conf"
    file.write_text(
        f"daemon off; master_process off; pid {site.folder}/nginx.pid; events {{}}\n"
        f"http {{ access_log off; {places}\n{described} }}\n"
    )
    errors = str(site.folder / "nginx.log")
    return [program("nginx"), "-p", str(site.folder), "-c", str(file), "-e", errors]


def caddy(site: Site) -> list[str]:
    """The same for Caddy."""
    described = site.adapted(block("caddy"))
    described = described.replace("feed.example.com {", f"{site.url} {{\n    {site.tls()}")
    file = site.folder / "Caddyfile"
    file.write_text(f"{{\n    admin off\n    auto_https disable_redirects\n}}\n{described}")
    return [program("caddy"), "run", "--adapter", "caddyfile", "--config", str(file)]


@pytest.fixture(params=[nginx, caddy], ids=lambda proxy: str(proxy.__name__))
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A server with two orders behind a proxy."""
    command_of: Callable[[Site], list[str]] = request.param
    with ExitStack() as stack:
        site = Site(tmp_path, stack)
        site.writer.put("orders", "1")
        site.writer.put("orders", "2")
        stack.enter_context(running(command_of(site), tmp_path))
        wait_until(lambda: site.ask() == "200", message="the proxy passes requests on")
        yield site


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[None]:
    home = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (
        (folder / "proxy.log").open("wb") as log,
        subprocess.Popen(command, env=os.environ | home, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.kill()  # asked to end, Caddy would wait for its streams


@contextmanager
def reading(site: Site, transport: str) -> Iterator[Callable[[], str]]:
    """A client behind the proxy; calling gives the id of its next event."""
    trusted = str(site.certificate)
    trust = {"SSL_CERT_FILE": trusted, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": trusted}
    with subprocess.Popen(
        [sys.executable, "-c", READER, site.url, site.key, transport],
        env=os.environ | trust,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        # Before the client connects anew by itself (75 s), which would hide a stream that hangs.
        giving_up = threading.Timer(60, process.kill)
        giving_up.start()
        try:
            yield lambda: process.stdout.readline().strip() if process.stdout else ""
        finally:
            giving_up.cancel()
            process.kill()


@pytest.mark.requirement("S4-23")
@pytest.mark.parametrize("transport", ["sse", "websocket", "grpc"])
def test_events_come_through_a_proxy_as_they_happen(site: Site, transport: str) -> None:
    ids = [change.id for change in site.writer.log.read(0, limit=10)]
    with reading(site, transport) as next_id:
        assert next_id() == ids[1]
        # The stream stays open, and nothing waits in a buffer for more to come.
        for number in ("3", "4"):
            site.writer.put("orders", number)
            [change] = site.writer.log.read(site.writer.log.latest_sequence - 1, limit=1)
            assert next_id() == change.id


def test_a_browsers_own_page_is_let_through_and_others_are_not(site: Site) -> None:
    for version in ("--http1.1", "--http2"):
        assert site.ask(version, "-H", f"Origin: {site.url}") == "200"
        assert site.ask(version, "-H", "Origin: https://elsewhere.example") == "403"
