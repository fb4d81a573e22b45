"""What a key of some tables or of a tenant is told, route by route: none is forgotten."""

from typing import Any

import pytest

from headrace.formats.catalogue import Formats
from headrace.model import Model
from headrace.serve import ServerSettings
from headrace.sources import Phase, Status
from tests.serve.conftest import Site, Sites

# What the others' rows, tables, cursors and sources are called; no answer may hold it.
OTHERS = "elsewhere"

# Every GET route by what it answers to such a key. A new one must be put somewhere here.
LIMITED = {
    "/changefeed",
    "/changefeed/stream",
    "/v1/changes",
    "/v1/changes/stream",
    "/v1/cursors",
    "/v1/cursors/mine",
    "/health",
}
REFUSED = {
    "/changefeed/stats",
    "/v1/ranges",
    "/v1/records",
    "/v1/tables",
    "/v1/sources",
    "/v1/keys",
}
THE_SAME_FOR_ALL = {"/schemas", "/schemas/savegress.json", "/openapi.json"}
UPGRADED = {"/v1/stream"}


@pytest.fixture
def site(sites: Sites) -> Site:
    """A server whose log is not the key's alone, with something wrong that names a table."""
    settings = ServerSettings(port=0, require_key=True)
    site = sites(settings, formats=Formats(model=Model(tenant="tenant_id")))
    site.writer.put("users", "1", tenant_id="t1")
    site.writer.put(OTHERS, "1", tenant_id=OTHERS)
    site.statuses = [Status(source="shop", phase=Phase.STREAMING, errored={OTHERS: "no key"})]
    site.http.put(f"/v1/cursors/{OTHERS}", json={"sequence": 1}, headers=site.key())
    return site


def test_every_route_is_looked_at(site: Site) -> None:
    described = site.http.get("/openapi.json", headers=site.key()).json()["paths"]
    asked = {path for path, methods in described.items() if "get" in methods}
    names = {"{name}": "mine", "{file}": "savegress.json"}
    for placeholder, name in names.items():
        asked = {path.replace(placeholder, name) for path in asked}
    assert asked | UPGRADED | {"/openapi.json"} == LIMITED | REFUSED | THE_SAME_FOR_ALL | UPGRADED


@pytest.mark.parametrize("held", [{"tables": ("users",)}, {"tenant": "t1"}], ids=str)
@pytest.mark.parametrize("path", sorted(LIMITED | REFUSED))
def test_a_key_of_a_part_hears_of_that_part_alone(
    site: Site, path: str, held: dict[str, Any]
) -> None:
    key = site.key(**held)
    site.http.put("/v1/cursors/mine", json={"sequence": 0}, headers=key)
    asked = {"upto": "2"} if path == "/v1/changes/stream" else {}
    answer = site.http.get(path, params=asked, headers=key)
    assert answer.status_code == (403 if path in REFUSED else 200), answer.text
    assert OTHERS not in answer.text
    if path in REFUSED:
        assert answer.json()["error"] == "permission_denied"
        assert answer.json()["message"]
