"""Who may ask, and where the server listens."""

import pytest

from headrace.serve import ServerSettings
from tests.serve.conftest import Site, Sites

REMOTE = ServerSettings(port=0, allow_remote=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"])
def test_a_server_that_only_this_machine_reaches_needs_no_key(host: str) -> None:
    assert not ServerSettings(host=host).key_required
    assert ServerSettings(host=host, require_key=True).key_required


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "db.example.com", "", "localhos"])
def test_a_server_that_others_could_reach_needs_a_key(host: str) -> None:
    assert ServerSettings(host=host).key_required
    assert not ServerSettings(host=host, allow_remote=True).key_required


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:3000", "127.0.0.1:1", "[::1]:80", "[::1]"]
)
def test_loopback_names_are_answered(shared: Site, host: str) -> None:
    assert shared.http.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:3000", "10.0.0.1", ""],
)
@pytest.mark.parametrize("path", ["/changefeed", "/v1/changes", "/health", "/openapi.json"])
def test_a_name_pointed_at_this_machine_is_refused(shared: Site, host: str, path: str) -> None:
    refused = shared.http.get(path, headers={"Host": host})
    assert (refused.status_code, refused.json()["error"]) == (403, "forbidden_host")


def test_any_name_is_answered_where_remote_clients_are_allowed(sites: Sites) -> None:
    site = sites(REMOTE)
    response = site.http.get("/health", headers={"Host": "feed.example.com"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://["]
)
def test_another_sites_page_cannot_make_a_browser_delete_events(shared: Site, origin: str) -> None:
    # A browser sends a plain-text POST to any site without asking first.
    refused = shared.http.post(
        "/changefeed/retention",
        content=b'{"before_sequence": 3}',
        headers={"Origin": origin, "Content-Type": "text/plain"},
    )
    assert (refused.status_code, refused.json()["error"]) == (403, "forbidden_origin")
    assert shared.log.first_sequence == 1


def test_the_servers_own_pages_may_ask(shared: Site) -> None:
    assert shared.http.get("/health", headers={"Origin": shared.url}).status_code == 200


@pytest.mark.requirement("S4-21")
@pytest.mark.parametrize("path", ["", "/stream", "/stats", "/retention"])
def test_a_changefeed_that_is_switched_off_is_not_found(sites: Sites, path: str) -> None:
    site = sites(ServerSettings(port=0, enabled=False))
    method = "POST" if path == "/retention" else "GET"
    refused = site.http.request(method, f"/changefeed{path}")
    assert refused.status_code == 404
    assert refused.json()["error"] == "not_enabled"
    assert "switched off" in refused.json()["message"]
    assert site.http.get("/health").status_code == 200


@pytest.mark.requirement("S1-04")
@pytest.mark.parametrize("path", ["", "/stream"])
def test_entity_events_that_are_switched_off_are_not_found(sites: Sites, path: str) -> None:
    site = sites(ServerSettings(port=0, enabled=False))
    refused = site.http.get(f"/v1/changes{path}", params={"format": "entity"})
    assert refused.status_code == 404
    assert refused.json() == {
        "error": "not_enabled",
        "message": "the entity events are switched off",
        "hint": "Set cdc.enabled to true.",
    }
    # What was captured before can still be read as it is in the log.
    assert site.http.get("/v1/changes").status_code == 200


@pytest.mark.requirement("S1-04")
def test_entity_events_that_are_switched_on_are_served(sites: Sites) -> None:
    site = sites(ServerSettings(port=0, enabled=True))
    assert site.http.get("/v1/changes", params={"format": "entity"}).status_code == 200


@pytest.mark.requirement("S4-21")
def test_a_changefeed_that_is_switched_on_answers(sites: Sites) -> None:
    assert sites(ServerSettings(port=0, enabled=True)).http.get("/changefeed").status_code == 200
