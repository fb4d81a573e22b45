"""Keys over HTTP: made, listed, revoked, rotated."""

import time
from typing import Any

import httpx
import pytest

from headrace.log.keys import Scope
from headrace.serve import ServerSettings
from tests.serve.conftest import Site, Sites


@pytest.fixture
def closed(sites: Sites) -> Site:
    """A server whose client has a key that may do everything."""
    site = sites(ServerSettings(port=0, require_key=True))
    site.http.headers.update(site.key(name="admin", scopes=frozenset({Scope.ADMIN})))
    return site


def create(site: Site, **asked: Any) -> dict[str, Any]:
    """The answer to a good request."""
    response = site.http.post("/v1/keys", json=asked)
    assert response.status_code == 201, response.text
    document: dict[str, Any] = response.json()
    return document


def opens(site: Site, secret: str) -> bool:
    return httpx.get(f"{site.url}/changefeed", headers={"X-API-Key": secret}).status_code == 200


@pytest.mark.requirement("S3-03")
def test_a_new_key_is_shown_once_and_opens_what_was_asked_for(closed: Site) -> None:
    asked = {
        "name": "billing",
        "tables": ["orders", "customers"],
        "tenant": "t1",
        "scopes": ["cdc:read"],
        "expires": "90d",
        "connections": 5,
        "requests_per_second": 10,
        "events_per_second": 0.5,
    }
    response = closed.http.post("/v1/keys", json=asked)
    assert response.headers["cache-control"] == "no-store"
    made = response.json()
    assert opens(closed, made["secret"])
    assert len(made["secret"]) == len("cdc_") + 64
    key = made["key"]
    assert key["expires_at"] - key["created_at"] == 90 * 86_400 * 1_000_000
    assert abs(key["created_at"] / 1e6 - time.time()) < 60
    shown = {name: key[name] for name in ("name", "tables", "tenant", "scopes", "state")}
    assert shown == {**{name: asked[name] for name in shown if name in asked}, "state": "valid"}
    assert key["limits"] == {
        "connections": 5,
        "requests_per_second": 10.0,
        "events_per_second": 0.5,
    }
    listing = closed.http.get("/v1/keys")
    assert listing.json()["keys"][-1] == key
    assert made["secret"] not in listing.text
    assert "hash" not in listing.text


def test_a_key_without_wishes_reads_everything_for_ever(closed: Site) -> None:
    key = create(closed)["key"]
    assert (key["scopes"], key["tables"], key["tenant"], key["expires_at"]) == (
        ["cdc:read"],
        [],
        None,
        None,
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"expires": "soon"}, "no duration"),
        ({"expires": "0s"}, "at least a second"),
        ({"expires": "99999d"}, "100 years"),
        ({"expires": 90}, "str"),
        ({"scopes": ["cdc:write"]}, "cdc:write"),
        ({"scopes": []}, "needs a scope"),
        ({"scopes": ["cdc:admin"], "tenant": "t1"}, "cdc:admin"),
        ({"tables": ["orders", ""]}, "empty"),
        ({"tenant": ""}, "empty"),
        ({"tables": "orders"}, "array"),
        ({"connections": 0}, ">= 1"),
        ({"connections": 10**30}, "connections"),
        ({"requests_per_second": -1}, ">= 0.001"),
        ({"requests_per_second": 1e-300}, ">= 0.001"),
        ({"events_per_second": 1e300}, "<= 1000000000"),
        ({"name": "a\nkey=b created"}, "not printable"),
        ({"hash": "0"}, "no such field"),
        ([], "object"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused(closed: Site, asked: Any, said: str) -> None:
    refused = closed.http.post("/v1/keys", json=asked)
    assert refused.status_code == 400
    assert said in refused.text
    assert len(closed.http.get("/v1/keys").json()["keys"]) == 1


def test_a_revoked_key_opens_nothing_and_is_still_listed(closed: Site) -> None:
    made, other = create(closed), create(closed)
    path = f"/v1/keys/{made['key']['id']}"
    revoked = closed.http.delete(path)
    assert (revoked.status_code, revoked.json()["state"]) == (200, "revoked")
    assert not opens(closed, made["secret"])
    assert opens(closed, other["secret"])
    # Once more changes nothing, least of all the time.
    assert closed.http.delete(path).json() == revoked.json()
    states = [key["state"] for key in closed.http.get("/v1/keys").json()["keys"]]
    assert states == ["valid", "revoked", "valid"]


def test_a_rotated_key_leaves_the_old_one_valid_for_the_overlap(closed: Site) -> None:
    old = create(closed, name="billing", tables=["orders"], expires="1d")
    path = f"/v1/keys/{old['key']['id']}/rotate"
    rotated = closed.http.post(path, json={"overlap": "1h"})
    assert (rotated.status_code, rotated.headers["cache-control"]) == (201, "no-store")
    new = rotated.json()
    assert opens(closed, old["secret"])
    assert opens(closed, new["secret"])
    same = ("name", "tables", "scopes", "tenant", "limits", "expires_at")
    assert {name: new["key"][name] for name in same} == {name: old["key"][name] for name in same}
    again = closed.http.post(f"/v1/keys/{new['key']['id']}/rotate", json={"overlap": "0s"})
    assert again.status_code == 201
    assert not opens(closed, new["secret"])
    ended = closed.http.post(f"/v1/keys/{new['key']['id']}/rotate", json={})
    assert (ended.status_code, ended.json()["error"]) == (404, "unknown_key")


def test_rotating_an_ended_key_does_not_bring_it_back(closed: Site) -> None:
    made = create(closed)
    closed.http.delete(f"/v1/keys/{made['key']['id']}")
    refused = closed.http.post(f"/v1/keys/{made['key']['id']}/rotate", json={})
    assert refused.status_code == 404
    assert not opens(closed, made["secret"])


@pytest.mark.parametrize(
    "id",
    ["key_000000000000", "operator", "*", "key_*", "%2e%2e", "key%3A", "%00", "ä", "x" * 1000, "'"],
)
def test_an_id_that_is_none_changes_nothing(closed: Site, id: str) -> None:
    create(closed)
    before = closed.http.get("/v1/keys").json()
    for response in (
        closed.http.delete(f"/v1/keys/{id}"),
        closed.http.post(f"/v1/keys/{id}/rotate", json={}),
    ):
        assert response.status_code in (404, 405)
        assert len(response.content) < 500
    assert closed.http.get("/v1/keys").json() == before


def test_an_id_opens_nothing_and_tells_nothing_of_its_key(closed: Site) -> None:
    made = create(closed)
    assert not opens(closed, made["key"]["id"])
    assert made["key"]["id"].removeprefix("key_") not in made["secret"]


def test_whoever_may_only_read_cannot_make_itself_more(closed: Site) -> None:
    made = create(closed, tables=["orders"])
    key = {"X-API-Key": made["secret"]}
    id = made["key"]["id"]
    for response in (
        closed.http.post("/v1/keys", json={"scopes": ["cdc:admin"]}, headers=key),
        closed.http.post(f"/v1/keys/{id}/rotate", json={}, headers=key),
        closed.http.delete(f"/v1/keys/{id}", headers=key),
        closed.http.get("/v1/keys", headers=key),
    ):
        assert (response.status_code, response.json()["error"]) == (403, "permission_denied")
