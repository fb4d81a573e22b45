"""`headrace run` over a source that hides columns: no value in any file, answer or output."""

import json
from pathlib import Path

import pytest

from headrace.client import Client
from headrace.log import Log
from headrace.testing import PostgresDatabase, wait_until
from tests.cli.test_cli import Site, phase, rows, streaming
from tests.sources.redacting import MASK, assert_nowhere

SECRETS = ("Oleander", "Rhabarber", MASK.hmac.reveal())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def answers(client: Client) -> str:
    return json.dumps([client.get(path) for path in ("/health", "/v1/sources", "/v1/changes")])


@pytest.mark.faults
def test_no_value_is_in_any_file_answer_or_output(
    site: Site, pg: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASK_KEY", MASK.hmac.reveal())
    source = {"type": "postgres", "url": pg.url, "slot": pg.name, "ddl": True}
    rules = {"exclude_columns": ["ssn"], "mask": {"users.email": {"hmac": "${MASK_KEY}"}}}
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, email text, ssn text)")
    pg.execute("INSERT INTO users VALUES (1, 'Oleander', 'Rhabarber')")
    site.write_config("", sources={"shop": source | rules})
    checked = site.invoke("check").output
    with site.running(exits=1) as client:
        streaming(client)
        pg.execute("UPDATE users SET email = 'Oleander-2'; ALTER TABLE users ADD COLUMN n int")
        pg.execute("UPDATE users SET email = NULL, n = 7")
        wait_until(lambda: len(rows(client)) == 3, timeout=120, message="the changes are there")
        served, tail = answers(client), site.invoke("tail", "-n", "99").output
        pg.execute("ALTER TABLE users RENAME COLUMN email TO mail")
        pg.execute("UPDATE users SET mail = 'Oleander'")
        wait_until(lambda: phase(client) == "halted", timeout=120, message="it halts")
        halted, status = answers(client), site.invoke("status").output
    assert "left out or masked in 1 of 1 tables" in checked
    assert MASK.code("Oleander-2") in served
    assert "users" in tail
    assert "public.users.mail may be public.users.email renamed" in halted
    with Log.open(site.log) as log:
        assert_nowhere(SECRETS, log, site.folder, checked, served, tail, halted, status)
