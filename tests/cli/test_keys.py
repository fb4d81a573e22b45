"""`headrace keys`: on the log itself, and through a server that asks for keys."""

import json
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.config import load
from headrace.log import Log, LogReader
from headrace.run import OPERATOR_KEY, Run
from headrace.testing import free_port


class Site:
    """A folder with a config, and the commands run in it."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "headrace.yaml"
        self.data = folder / "data"
        self.server = {"host": "0.0.0.0", "port": free_port()}
        source = {"type": "postgres", "url": "postgresql://127.0.0.1:1/shop"}
        self.config.write_text(json.dumps({"sources": {"shop": source}, "server": self.server}))

    def keys(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["keys", *arguments, "--config", str(self.config)])

    def create(self, *arguments: str) -> dict[str, Any]:
        result = self.keys("create", "--json", *arguments)
        assert result.exit_code == 0, result.output
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    def listed(self) -> dict[str, str]:
        """The state of every key."""
        keys = json.loads(self.keys("list", "--json").stdout)
        return {key["id"]: key["state"] for key in keys}

    def status(self, secret: str) -> int:
        url = f"http://127.0.0.1:{self.server['port']}/changefeed"
        return httpx.get(url, headers={"X-API-Key": secret} if secret else {}).status_code


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


WISHES = (
    "--name=billing", "--tables=orders,customers", "--tables", "audit.*", "--tenant=t1",
    "--scope=cdc:read", "--expires=90d", "--connections=3", "--requests-per-second=2.5",
    "--events-per-second=1000",
)  # fmt: skip


def test_a_key_is_made_in_a_log_that_nobody_serves(site: Site) -> None:
    result = site.keys("create", *WISHES)
    assert result.exit_code == 0
    secret = result.stdout.strip()
    with LogReader.open(site.data / "log") as log:
        (key,) = log.keys()
    assert key.id in result.stderr
    assert secret not in result.stderr
    assert (key.name, key.tables, key.tenant) == (
        "billing",
        ("orders", "customers", "audit.*"),
        "t1",
    )
    assert key.limits.given() == (3, 2.5, 1000.0)
    assert key.expires_at == key.created_at + 90 * 86_400 * 1_000_000
    shown = site.keys("list").stdout
    assert f"{key.id}  valid until " in shown
    assert "cdc:read  orders, customers, audit.* of tenant t1  billing" in shown
    assert secret not in shown


def test_a_log_that_nobody_serves_can_have_its_keys_revoked_and_rotated(site: Site) -> None:
    one, two = site.create()["key"]["id"], site.create("--name=two")["key"]["id"]
    assert "is revoked" in site.keys("revoke", one).stdout
    rotated = site.keys("rotate", two, "--overlap=0s", "--json")
    new = json.loads(rotated.stdout)
    assert new["key"]["name"] == "two"
    assert site.listed() == {one: "revoked", two: "expired", new["key"]["id"]: "valid"}


def test_the_first_key_of_a_server_that_others_reach_is_made_while_it_runs(site: Site) -> None:
    with Run(load(site.config)):
        assert site.status("") == 401
        made = site.create(*WISHES)
        assert site.status(made["secret"]) == 200
        id = made["key"]["id"]
        new = json.loads(site.keys("rotate", id, "--json").stdout)
        assert site.status(made["secret"]) == site.status(new["secret"]) == 200
        assert "is revoked" in site.keys("revoke", id).stdout
        assert (site.status(made["secret"]), site.status(new["secret"])) == (401, 200)
        listed = site.listed()
        assert listed == {id: "revoked", new["key"]["id"]: "valid"}
        status = CliRunner().invoke(app, ["status", "--config", str(site.config)])
        assert "shop" in status.stdout
    assert site.listed() == listed


def test_the_operators_key_is_for_this_user_alone_and_ends_with_the_server(site: Site) -> None:
    file = site.data / OPERATOR_KEY
    with Run(load(site.config)):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        secret = file.read_text()
        assert site.status(secret) == 200
    assert not file.exists()
    # One that a killed process left behind opens nothing.
    file.write_text(secret)
    file.chmod(0o644)
    with Run(load(site.config)):
        assert site.status(secret) == 401
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.unlink()
        refused = site.keys("list")
        assert refused.exit_code == 1
        assert "needs a key" in refused.stderr
        assert OPERATOR_KEY in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["create", "--scope=cdc:write"], 2, "no scope called"),
        (["create", "--expires=soon"], 1, "no duration"),
        (["create", "--scope=cdc:admin", "--tenant=t1"], 1, "cdc:admin"),
        (["create", "--tables=orders,"], 1, "empty"),
        (["create", "--events-per-second=0"], 1, "from 0.001 to"),
        (["revoke", "key_0"], 1, "no valid key 'key_0'"),
        (["rotate", "key_0"], 1, "no valid key 'key_0'"),
        (["rotate", "key_0", "--overlap=1"], 1, "no duration"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    site: Site, arguments: list[str], code: int, message: str
) -> None:
    Log.open(site.data / "log").close()
    result = site.keys(*arguments)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.replace("│", " ").split())
    assert site.listed() == {}


def test_without_a_log_there_are_no_keys_and_listing_makes_none(site: Site) -> None:
    for command in (["list"], ["revoke", "key_0"], ["rotate", "key_0"]):
        assert site.keys(*command).exit_code == 1
    assert not site.data.exists()
