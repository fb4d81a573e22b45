"""Browser pages of configured origins, and of no other, may use every browser transport."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import websocket
from websocket import WebSocketBadStatusException

from headrace.config import parse
from headrace.errors import ConfigError
from headrace.serve import ServerSettings
from headrace.serve.origins import AllowedOrigins
from tests.serve.browser import Front, Page, browser
from tests.serve.conftest import Site, Sites
from tests.serve.test_websocket_examples import EXAMPLES
from tests.serve.ws import ANY_KEY

SHOP = "https://shop.example.com"


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("https://shop.example.com", True),
        ("https://SHOP.example.com", True),
        ("http://shop.example.com", False),
        ("https://shop.example.com:8443", False),
        ("https://shop.example.com.evil.net", False),
        ("https://a.apps.example.org", True),
        ("https://a.b.apps.example.org", True),
        ("https://apps.example.org", False),
        ("https://.apps.example.org", False),
        ("https://evil.net/.apps.example.org", False),
        ("https://evil.net#.apps.example.org", False),
        ("https://evil.net:1@x.apps.example.org", False),
        ("https://evilapps.example.org", False),
        ("http://a.local.test:8080", True),
        ("http://a.local.test", False),
        ("null", False),
        ("", False),
        ("https://", False),
    ],
)
def test_an_origin_is_exact_or_a_host_below_a_name(origin: str, allowed: bool) -> None:
    origins = AllowedOrigins([SHOP, "https://*.apps.example.org", "http://*.local.test:8080"])
    assert origins.allows(origin) is allowed


@pytest.mark.parametrize(
    "origin",
    ["*", "https://*", "https://*.com", "shop.example.com", "https://a.com/", "https://*.*.com",
     "https://a*.example.com", "null", "https://a.com/path", "ftp://a.com", "https://u@a.com"],
)  # fmt: skip
def test_what_is_no_origin_is_refused_in_the_config(origin: str) -> None:
    content = {
        "sources": {"shop": {"type": "sqlite", "path": "shop.db"}},
        "server": {"allowed_origins": [origin]},
    }
    with pytest.raises(ConfigError, match="allowed_origins"):
        parse(content, folder=Path("/srv"), environment={})


@pytest.fixture
def open_site(sites: Sites) -> Site:
    site = sites(ServerSettings(port=0, allowed_origins=(SHOP,)))
    site.writer.put("orders", "1")
    return site


def test_a_preflight_is_answered_for_allowed_origins_alone(open_site: Site) -> None:
    asked = {"Access-Control-Request-Method": "PUT", "Access-Control-Request-Headers": "x-api-key"}
    for path in ("/v1/changes", "/v1/cursors/billing", "/nowhere"):
        reply = open_site.http.options(path, headers=asked | {"Origin": SHOP})
        assert reply.status_code == 204
        assert reply.headers["access-control-allow-origin"] == SHOP
        assert "PUT" in reply.headers["access-control-allow-methods"]
        assert "X-API-Key" in reply.headers["access-control-allow-headers"]
        assert "Origin" in reply.headers["vary"]
        refused = open_site.http.options(path, headers=asked | {"Origin": "https://evil.net"})
        assert "access-control-allow-origin" not in refused.headers


def test_answers_and_errors_are_shown_to_allowed_origins_alone(open_site: Site) -> None:
    for path, status in (("/v1/changes", 200), ("/v1/changes?limit=x", 400), ("/nowhere", 404)):
        reply = open_site.http.get(path, headers={"Origin": SHOP})
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == SHOP
        assert "access-control-allow-credentials" not in reply.headers
        shown = reply.headers["access-control-expose-headers"].split(", ")
        assert {"X-Headrace-Gap", "X-Headrace-Gap-Reason", "X-Headrace-Scanned"} <= {*shown}
        plain = open_site.http.get(path)  # no browser's page
        assert plain.status_code == status
        assert "access-control-allow-origin" not in plain.headers
        assert plain.headers["vary"] == "Origin"  # a cache must not mix them up
    refused = open_site.http.get("/v1/changes", headers={"Origin": "https://evil.net"})
    assert (refused.status_code, refused.json()["error"]) == (403, "forbidden_origin")
    assert "access-control-allow-origin" not in refused.headers


def test_no_origin_is_allowed_by_default(shared: Site) -> None:
    for headers in ({"Origin": SHOP}, {"Origin": SHOP, "Access-Control-Request-Method": "GET"}):
        method = "OPTIONS" if len(headers) > 1 else "GET"
        reply = shared.http.request(method, "/v1/changes", headers=headers)
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers


def test_a_websocket_of_another_origin_is_refused_before_it_opens(open_site: Site) -> None:
    address = open_site.url.replace("http", "ws") + "/v1/stream"
    talk = websocket.create_connection(address, origin=SHOP, timeout=30)
    talk.send(json.dumps({"type": "auth", "apiKey": ANY_KEY}))
    assert json.loads(talk.recv())["type"] == "auth_success"
    talk.close()
    with pytest.raises(WebSocketBadStatusException) as refused:
        websocket.create_connection(address, origin="https://evil.net", timeout=30)
    assert refused.value.status_code == 403


# --- a real browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of Chromium."""
    with browser() as page:
        yield page


TRANSPORTS = {
    "poll": """fetch("URL/v1/changes", { headers: { "X-API-Key": "KEY" } })
        .then(async (reply) => {
            const scanned = reply.headers.get("X-Headrace-Scanned");
            return (await reply.json()).count === 1 && scanned === "1" ? "read" : "hidden";
        }, () => "refused")""",
    "lines": """fetch("URL/v1/changes/stream?upto=1", { headers: { Authorization: "Bearer KEY" } })
        .then(async (reply) => (await reply.text()).includes("data:") ? "read" : "hidden",
              () => "refused")""",
    "source": """new Promise((done) => {
        const source = new EventSource("URL/v1/changes/stream");
        source.onmessage = () => { source.close(); done("read"); };
        source.onerror = () => done("refused");
    })""",
    "socket": """new Promise((done) => {
        const socket = new WebSocket("URL/v1/stream".replace("http", "ws"));
        socket.onopen = () => socket.send(JSON.stringify({ type: "auth", apiKey: "KEY" }));
        socket.onmessage = ({ data }) =>
            done(JSON.parse(data).type === "auth_success" ? "read" : "hidden");
        socket.onerror = () => done("refused");
    })""",
    "put": """fetch("URL/v1/cursors/billing", {
        method: "PUT",
        headers: { "X-API-Key": "KEY", "Content-Type": "application/json" },
        body: '{"sequence": 1}',
    }).then((reply) => reply.ok ? "read" : "hidden", () => "refused")""",
}


@pytest.mark.slow
@pytest.mark.requirement("P-18")
def test_a_browser_lets_pages_of_configured_origins_use_every_transport(
    page: Page, sites: Sites
) -> None:
    with Front(EXAMPLES, None) as ours, Front(EXAMPLES, None) as evil:
        site = sites(ServerSettings(port=0, allowed_origins=(ours.url,)))
        site.writer.put("orders", "1")
        key = site.key()["X-API-Key"]
        for front, expected in ((evil, "refused"), (ours, "read")):
            page.open(f"{front.url}/browser.html")
            page.await_true(f"location.origin === '{front.url}'", "the page is there")
            for name, script in TRANSPORTS.items():
                told = page.run(script.replace("URL", site.url).replace("KEY", key))
                assert (name, told) == (name, expected)
            assert len(site.log.cursors()) == (front is ours)
