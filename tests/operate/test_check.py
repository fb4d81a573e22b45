"""`headrace check` asks everything there is, in one pass, and sends nothing."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.event import Column, Reference, Table
from headrace.config import parse
from headrace.operate.check import CheckReport, check_everything
from headrace.plugins import Finding
from headrace.sources.postgres import Postgres
from headrace.testing import free_port
from headrace.testing.redis import HINT, RedisServer, redis_program
from tests.cli.test_cli import NOWHERE, Site
from tests.needs import missing
from tests.sinks.receiver import Receiver

pytestmark = pytest.mark.requirement("P-15")

JAVA = Finding("java", ok=True, detail="17")
KEYS = {"AWS_ACCESS_KEY_ID": "key-identity", "AWS_SECRET_ACCESS_KEY": "s3cret-of-the-bucket"}


def report(folder: Path, sinks: dict[str, Any], **pipeline: Any) -> CheckReport:
    content = {
        "sources": {"shop": {"type": "postgres", "url": NOWHERE}},
        "server": {"port": free_port()},
        "pipeline": {**pipeline, "sinks": sinks},
    }
    return check_everything(parse(content, folder=folder, environment={}), lambda: JAVA)


def found(report: CheckReport, part: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings[part]}


class Storage:
    """A bucket, and what was asked of it."""

    def __init__(self, port: int, log: Path) -> None:
        self.options = {
            **KEYS,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "here",
        }
        self._log = log

    def asked(self) -> list[str]:
        return self._log.read_text().splitlines()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    log = tmp_path / "requests.txt"
    command = [sys.executable, "-m", "tests.operate.bucket", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Storage(int(process.stdout.readline()), log)
        process.kill()


def test_everything_is_found_in_one_pass(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    closed = free_port()
    found_all = report(
        tmp_path,
        {
            "hooks": {
                "type": "webhook",
                "url": f"http://127.0.0.1:{closed}/t0ken",
                "allow_private_networks": True,
            },
            "queue": {"type": "redis", "servers": f"127.0.0.1:{closed}"},
            "lake": {"type": "tables", "path": "a file/lake"},
            "mine": {"type": "destination", "class": "nowhere_at_all:Mine"},
            "day": {"type": "files", "path": "day"},
        },
        master="locale[*]",
        checkpoint_dir="a file/checkpoints",
    )
    assert not found_all.ok
    pipeline = found(found_all, "pipeline")
    assert pipeline["master"].detail == "locale[*] is no master of Spark"
    assert "cannot be written" in pipeline["checkpoint_dir"].detail
    assert "cannot be connected to" in found(found_all, "sink hooks")["check"].detail
    assert "refused" in found(found_all, "sink queue")["check"].detail.lower()
    assert "cannot be written" in found(found_all, "sink lake")["path"].detail
    assert "nowhere_at_all" in found(found_all, "sink mine")["check"].detail
    assert found(found_all, "sink day")["path"].ok
    assert not found(found_all, "shop")["connection"].ok  # the source is asked all the same
    assert b"t0ken" not in json.dumps([str(found_all)]).encode()


def test_a_bucket_is_written_listed_and_cleaned(tmp_path: Path, storage: Storage) -> None:
    bucket = {"type": "tables", "storage": storage.options}
    seen = report(
        tmp_path,
        {
            "good": {**bucket, "path": "s3://lake/here"},
            "bad": {**bucket, "path": "s3://others/here", "type": "history"},
        },
    )
    assert found(seen, "sink good")["path"].ok, seen
    asked = storage.asked()
    assert any("list-type=2" in line and line.startswith("GET /lake") for line in asked), asked
    assert any(line.startswith("PUT /lake/here/_headrace/probe-") for line in asked)
    assert any(line.startswith(("DELETE /lake/here/_headrace/probe", "POST /lake?delete"))
               for line in asked)  # fmt: skip
    refused = found(seen, "sink bad")["path"]
    assert not refused.ok
    assert "s3://others/here" in refused.detail
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in str(seen)


def test_a_webhook_is_connected_to_and_gets_no_request(tmp_path: Path) -> None:
    with Receiver() as receiver:
        hooks = {"type": "webhook", "url": receiver.url, "allow_private_networks": True}
        seen = report(tmp_path, {"hooks": hooks})
        assert found(seen, "sink hooks")["connection"].ok
        assert receiver.connections == 1
        assert receiver.requests == []


@pytest.mark.live
def test_a_broker_is_logged_in_to(tmp_path: Path) -> None:
    if redis_program() is None:
        missing(f"Redis is not there. {HINT}")
    with RedisServer(settings={"requirepass": "right-password"}) as server:
        queue = {"type": "redis", "servers": server.address, "username": "default"}
        seen = report(
            tmp_path,
            {
                "good": {**queue, "password": "right-password"},
                "bad": {**queue, "password": "wrong-password"},
            },
        )
    assert found(seen, "sink good")["connection"].ok, seen
    [refused] = seen.findings["sink bad"]
    assert not refused.ok
    assert "wrong-password" not in str(seen)


def test_patterns_of_a_sink_that_match_nothing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = Table("shop", "postgres", "o", "db", "public", "users")
    monkeypatch.setattr(Postgres, "captured_tables", lambda _: [users])
    files = {"type": "files"}
    seen = report(
        tmp_path,
        {
            "good": {**files, "path": "a", "tables": ["public.*", "users"]},
            "bad": {**files, "path": "b", "tables": ["users", "public.ordres"]},
        },
    )
    assert found(seen, "sink good")["tables"].ok
    lost = found(seen, "sink bad")["tables"]
    assert (lost.ok, lost.detail) == (False, "no table matches public.ordres")
    assert lost.fix.endswith("there are: public.users")


def test_a_master_elsewhere_is_asked(tmp_path: Path) -> None:
    files = {"day": {"type": "files", "path": "day"}}
    for master, ok in (
        ("local", True),
        ("local[4,2]", True),
        ("yarn", True),
        (f"spark://127.0.0.1:{free_port()}", False),
        ("spark://", False),
    ):
        seen = report(tmp_path, files, master=master, shared_disk=True)
        assert found(seen, "pipeline")["master"].ok is ok, master


def test_the_same_comes_as_json(tmp_path: Path) -> None:
    site = Site(tmp_path)
    result = site.invoke("check", "--json")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert shown["ok"] is False
    assert {"name": "data_dir", "ok": True}.items() <= shown["findings"]["this machine"][0].items()


def test_a_lake_that_others_may_read_is_warned_of(tmp_path: Path) -> None:
    for name in ("lake", "shared"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    warned = report(
        tmp_path,
        {
            "lake": {"type": "tables", "path": "lake"},
            "shared": {"type": "history", "path": "shared", "mode": "0755"},
        },
    )
    [warning] = warned.warnings
    assert warning.startswith(f"sink lake: {tmp_path}/lake is open to other users (mode 0755)")


def test_transforms_are_tried_on_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = (Column("id", "bigint", key=True), Column("email", "text"), Column("n", "integer"))
    users = Table("shop", "postgres", "o", "db", "public", "users", columns)
    notes = msgspec.structs.replace(users, name="notes")
    monkeypatch.setattr(Postgres, "captured_tables", lambda _: [users, notes])
    transforms = {
        "public.users": {
            "select": ["id", "email"],
            "mask": {"email": {"hmac": "a key of sixteen or more"}},
            "where": "n > 1",
        },
        "public.*": {"mask": {"email": None, "fax": None}},
        "public.none": {"where": "id = 1"},
    }
    sinks = {
        "good": {"type": "tables", "path": "a", "transforms": transforms},
        "bad": {
            "type": "tables",
            "path": "b",
            "keys": {"public.users": ["email"]},
            "transforms": {
                "public.users": {"mask": {"email": None}},
                "public.notes": {"where": "m = 1"},
            },
        },
    }
    seen = report(tmp_path, sinks)
    good, bad = found(seen, "sink good"), found(seen, "sink bad")
    assert good["transforms public.users"].ok
    assert good["transforms public.users"].detail == "id int64, email string masked where n > 1"
    assert good["transforms public.notes"].detail == "id int64, email string null, n int32"
    assert good["transforms public.*"].detail == "mask names fax, which no table has"
    assert good["transforms public.none"].detail == "no table gets it"
    assert "mask makes email null, which is of the key" in bad["transforms public.users"].detail
    assert "there is no column m" in bad["transforms public.notes"].detail
    assert not any(each.ok for each in bad.values() if each.name.startswith("transforms"))
    assert "sixteen" not in str(seen)


def test_columns_that_a_source_hides_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = (Column("id", "bigint", key=True), Column("email", "text"))
    users = Table("shop", "postgres", "o", "db", "public", "users", columns)
    monkeypatch.setattr(Postgres, "captured_tables", lambda _: [users])
    monkeypatch.setattr(Postgres, "check", lambda _: [])

    def findings(**settings: Any) -> list[tuple[bool, str]]:
        source = {"type": "postgres", "url": NOWHERE, **settings}
        config = parse({"sources": {"shop": source}}, folder=tmp_path, environment={})
        seen = check_everything(config, lambda: Finding("java", True, ""))
        return [(each.ok, each.detail) for each in seen.findings["shop"]]

    assert findings() == []
    assert findings(mask={"users.email": None}) == [(True, "left out or masked in 1 of 1 tables")]
    lost = findings(exclude_columns=["emial"], mask={"email": None})
    assert lost[0] == (False, "no column matches emial")
    orders = Table("shop", "postgres", "o", "db", "public", "orders", (Column("buyer", "text"),))
    buyer = (Reference(("buyer",), "public", "users", ("email",)),)
    both = [users, msgspec.structs.replace(orders, references=buyer)]
    monkeypatch.setattr(Postgres, "captured_tables", lambda _: both)
    copied = findings(mask={"email": None})
    assert copied[0] == (
        False,
        "public.orders.buyer has values of public.users.email, which is left out or masked",
    )
    assert len(findings(mask={"email": None, "buyer": "keep"})) == 1
    [(ok, detail)] = findings(mask={"id": None})
    assert (ok, "takes id away" in detail) == (False, True)
