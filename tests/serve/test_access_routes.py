"""What a key of some tables or of a tenant is told, route by route: none is forgotten."""

import time
from typing import Any

import msgspec
import pytest

from headrace.change.event import Transaction
from headrace.formats.catalogue import Formats
from headrace.model import Model
from headrace.serve import ServerSettings
from headrace.sources import Phase, Status
from tests.changes import make_change
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
    "/v1/sinks",
    "/v1/keys",
    "/metrics",
}
THE_SAME_FOR_ALL = {"/schemas", "/schemas/savegress.json", "/openapi.json", "/livez", "/readyz"}
UPGRADED = {"/v1/stream"}


@pytest.fixture
def site(sites: Sites) -> Site:
    """A server whose log is not the key's alone, with something wrong that names a table."""
    settings = ServerSettings(port=0, require_key=True)
    site = sites(settings, formats=Formats(model=Model(tenant="tenant_id")))
    site.writer.put("users", "1", tenant_id="t1")
    site.writer.put(OTHERS, "1", tenant_id=OTHERS)
    _annotated(site, users="2", others="2")
    site.statuses = [Status(source="shop", phase=Phase.STREAMING, errored={OTHERS: "no key"})]
    site.http.put(f"/v1/cursors/{OTHERS}", json={"sequence": 1}, headers=site.key())
    return site


def _annotated(site: Site, *, users: str, others: str) -> None:
    """A transaction that is about a row of the others, and changes a row of the key's too."""
    now = time.time_ns() // 1000
    said = msgspec.json.encode({"root": f"{OTHERS.title()}:{OTHERS}", "trigger": "api_update"})
    transaction = Transaction("77", now, now, said)
    rows = (
        (OTHERS, {"id": others, "tenant_id": OTHERS}),
        ("users", {"id": users, "tenant_id": "t1"}),
    )
    site.writer.append(
        [
            make_change(
                table=site.writer.table(table),
                key={"id": row["id"]},
                after=row,
                transaction=transaction,
                ordinal=ordinal,
                last=ordinal == len(rows),
            )
            for ordinal, (table, row) in enumerate(rows, 1)
        ]
    )


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
    asked = {"upto": str(site.log.latest_sequence)} if path == "/v1/changes/stream" else {}
    answer = site.http.get(path, params=asked, headers=key)
    assert answer.status_code == (403 if path in REFUSED else 200), answer.text
    assert OTHERS not in answer.text.lower()
    if path in REFUSED:
        assert answer.json()["error"] == "permission_denied"
        assert answer.json()["message"]
