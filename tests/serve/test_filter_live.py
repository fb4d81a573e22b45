"""Tenants and filters over what a real PostgreSQL sends."""

from pathlib import Path
from typing import Any, LiteralString

import httpx
import pytest

from headrace.formats.catalogue import Formats, names
from headrace.log.keys import KeyRequest
from headrace.model import Model
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.testing import PostgresDatabase
from tests.sources.capturing import captured

TABLES: tuple[LiteralString, ...] = (
    "CREATE TABLE users (id text PRIMARY KEY, tenant_id int, name text)",
    "CREATE TABLE orders (id text PRIMARY KEY, tenant_id int,"
    " user_id text REFERENCES users ON DELETE CASCADE)",
    "ALTER TABLE orders REPLICA IDENTITY FULL",
)
ROWS: tuple[LiteralString, ...] = (
    "INSERT INTO users VALUES ('ours-1', 1, 'ours'), ('theirs-1', 2, 'theirs')",
    "INSERT INTO orders VALUES ('ours-2', 1, 'ours-1'), ('theirs-2', 2, 'theirs-1')",
    "INSERT INTO orders VALUES ('theirs-3', 2, 'ours-1')",
    "UPDATE users SET name = name || ' anew'",
)


@pytest.mark.requirement("S1-44", "S1-16")
def test_a_tenants_key_sees_its_own_rows_of_a_real_database(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    for statement in TABLES:
        pg.execute(statement)
    options = ServerSettings(port=0)
    with captured(pg, tmp_path) as feed:
        for statement in ROWS:
            pg.execute(statement)
        pg.execute("DELETE FROM users")
        feed.until_caught_up()
        formats = Formats(model=Model(tenant="tenant_id"))
        app = create_app(
            feed.log, statuses=list, copy_again=None, settings=options, formats=formats
        )
        made = app.state.service.keyring.create(KeyRequest(tenant="1"))
        key = {"X-API-Key": made.secret}
        with BackgroundServer(app, options) as server, httpx.Client(base_url=server.url) as http:

            def asked(**query: str) -> list[dict[str, Any]]:
                response = http.get("/v1/changes", params=query, headers=key)
                assert response.status_code == 200, response.text
                assert "theirs" not in response.text, query
                page = response.json()
                events: list[dict[str, Any]] = page.get("changes", page.get("events"))
                return events

            seen = [(each["op"], each["key"]["id"]) for each in asked()]
            # Of a deleted user PostgreSQL sends the key alone, which does not say whose it is.
            assert seen == [
                ("INSERT", "ours-1"),
                ("INSERT", "ours-2"),
                ("UPDATE", "ours-1"),
                ("DELETE", "ours-2"),
            ]
            for format in names():
                asked(format=format)
            [deleted] = asked(format="entity", event_type="entity:deleted")
            assert deleted["entity"]["entity_id"] == "ours-2"
            assert asked(tenant_id="2") == []
