"""A row is erased from the log, tables, histories, files and dead letters, and searched for."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable
from typer.testing import CliRunner, Result

from headrace.change.event import Batch, BeforeKind, Change, Column, Op, Table
from headrace.cli import app
from headrace.log import Log
from headrace.secret import Secret
from headrace.sinks.lake.storage import Folder
from headrace.sinks.tables.sink import Tables
from headrace.sources.sqlite import install
from headrace.sources.sqlite.resume import SqliteResume, SqliteTableSnapshot
from headrace.transforms.rules import Mask, TableTransform
from tests.deltas import stored
from tests.sinks.lake import change, put, remove, truncate
from tests.sinks.plain import PlainLake
from tests.sinks.s3 import bucket
from tests.sources import litedb

MARKER = "zebra-marker-47114"
USERS = (Column("id", "bigint", key=True), Column("email", "text"), Column("city", "text"))


class Erasable(PlainLake):
    """A log and a Delta table of users beside a config, of which a row is to be erased."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> None:
        super().__init__(patch, folder, **settings)
        self.config = folder / "headrace.yaml"
        self.configure({"lake": {"type": "tables", "path": str(self.path), **settings}})
        self.users = self.table("users", USERS)

    def configure(self, sinks: Mapping[str, Any], **source: Any) -> None:
        content = {
            "data_dir": str(self.folder),
            "sources": {"shop": {"type": "sqlite", "path": "shop.db", **source}},
            "server": {"port": 9},
            "pipeline": {"sinks": dict(sinks)},
        }
        self.config.write_text(yaml.safe_dump(content))

    def user(self, number: int, email: str, op: Op = Op.INSERT) -> Change:
        return put(self.users, op, id=number, email=email, city="Germany")

    def flow(self) -> None:
        self.write(self.log.latest_sequence, 2)

    def erase(self, *arguments: str) -> Result:
        """Run the command, with nothing else running."""
        self.log.close()
        chosen = ["erase", *arguments, "--yes", "--config", str(self.config)]
        result = CliRunner().invoke(app, chosen)
        self.log = Log.open(self.folder / "log")
        return result

    def erased(self, *arguments: str) -> dict[str, Any]:
        result = self.erase(*arguments, "--json")
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        assert found["complete"] is True
        return found


@pytest.fixture(params=["rows", "history"])
def lake(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Erasable]:
    made = Erasable(monkeypatch, tmp_path, keep=request.param)
    yield made
    made.log.close()


def places_with(folder: Path, text: str = MARKER) -> list[str]:
    """Files below a folder that have a text: as bytes, or decoded from Parquet."""
    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content += repr(pq.read_table(path, partitioning=None).to_pylist()).encode()
        if text.encode() in content:
            found.append(str(path.relative_to(folder)))
    return found


def place(found: dict[str, Any], name: str) -> dict[str, Any]:
    [one] = [each for each in found["places"] if each["place"] == name]
    return dict(one)


def test_a_deleted_row_leaves_nothing_but_its_key(lake: Erasable, tmp_path: Path) -> None:
    lake.commit(*(lake.user(n, f"{n}@example.com") for n in range(40, 45)))
    lake.commit(lake.user(42, f"a@{MARKER}", Op.UPDATE))
    lake.flow()
    lake.commit(
        lake.user(42, f"b@{MARKER}", Op.UPDATE), lake.user(43, "new@example.com", Op.UPDATE)
    )
    lake.flow()
    lake.commit(remove(lake.users, id=42))
    lake.flow()
    lake.log._db.flush()
    before = [each for each in lake.rows("users") if each["id"] != 42]
    assert len(places_with(tmp_path)) > 3
    found = lake.erased("public.users", "42")
    assert places_with(tmp_path) == []
    assert place(found, "log")["rewritten"] == 3
    assert place(found, "sink lake: public.users")["rewritten"] >= 1
    assert found["values"] == 3  # the city is everybody's
    assert [each for each in lake.rows("users") if each["id"] != 42] == before
    past = [each for each in lake.rows("users") if each["id"] == 42]
    expected = 3 if lake.sink.keep == "history" else 0
    assert past == [{"id": 42, "email": None, "city": None}] * expected
    # The sink goes on with its table as if nothing had been.
    lake.open()
    lake.commit(lake.user(50, "later@example.com"))
    lake.flow()
    assert 50 in [each["id"] for each in lake.rows("users")]
    assert lake.erased("public.users", "42")["places"][0]["rewritten"] == 0


@pytest.mark.requirement("P-05")
def test_the_text_of_a_value_that_did_not_fit_goes_too(lake: Erasable, tmp_path: Path) -> None:
    people = lake.table("people", (USERS[0], Column("born", "date"), Column("city", "text")))
    lake.commit(put(people, id=7, born="0044-03-15 BC", city="Rome"))
    lake.commit(put(people, id=42, born=MARKER, city="Germany"))
    lake.flow()
    lake.commit(put(people, Op.UPDATE, id=42, born="2000-01-01", city="Germany"))
    lake.flow()
    lake.commit(remove(people, id=42))
    lake.flow()
    lake.log._db.flush()
    assert len(places_with(tmp_path)) > 1
    lake.erased("public.people", "42")
    assert places_with(tmp_path) == []
    kept = [each["_rescued"] for each in lake.rows("people", own=True) if each["id"] == 7]
    assert kept == ['{"born":"0044-03-15 BC"}']


def test_a_row_that_is_still_there_is_refused_unless_its_last_values_stay(
    lake: Erasable, tmp_path: Path
) -> None:
    lake.commit(lake.user(42, f"a@{MARKER}"))
    lake.flow()
    lake.commit(lake.user(42, "anonymous@invalid", Op.UPDATE))
    lake.flow()
    refused = lake.erase("users", "42")
    assert refused.exit_code == 1
    assert "the row is still in its source" in refused.output
    assert "--keep-last" in refused.output
    assert places_with(tmp_path)
    lake.erased("users", "42", "--keep-last")
    assert places_with(tmp_path) == []
    rows = lake.rows("users", own=True)
    current = [each for each in rows if each.get("_current", True)]
    assert [each["email"] for each in current] == ["anonymous@invalid"]
    assert json.loads(lake.log.read(1)[0].after or b"")["email"] == "anonymous@invalid"


def test_a_table_that_is_behind_loses_the_values_too(lake: Erasable, tmp_path: Path) -> None:
    lake.commit(lake.user(42, f"a@{MARKER}"), lake.user(43, "b@example.com"))
    lake.flow()
    lake.commit(remove(lake.users, id=42))
    lake.erased("users", "42")
    assert places_with(tmp_path) == []
    lake.open()
    lake.flow()
    ids = [each["id"] for each in lake.rows("users", own=True) if each.get("_current", True)]
    assert ids == [43]


def test_a_row_of_which_the_log_has_nothing_stays_as_readers_see_it(
    lake: Erasable, tmp_path: Path
) -> None:
    lake.commit(lake.user(42, f"a@{MARKER}"))
    lake.flow()
    lake.commit(lake.user(42, "now@example.com", Op.UPDATE), lake.user(43, "b@example.com"))
    lake.flow()
    lake.log.trim(3, force=True)
    result = lake.erase("users", "42", "--json")
    assert result.exit_code == 1
    [left] = place(json.loads(result.stdout), "sink lake: public.users")["left"]
    assert "the row as it is now; the log has no change of it" in left
    found = lake.erased("users", "42", "--keep-last")
    assert found["state"] == "the log has no change of it"
    assert places_with(tmp_path) == []
    assert "now@example.com" in [each["email"] for each in lake.rows("users")]


def test_what_cannot_be_erased_is_said(lake: Erasable, tmp_path: Path) -> None:
    lake.commit(lake.user(42, f"a@{MARKER}"), remove(lake.users, id=42))
    assert "the log has no table nothing" in lake.erase("nothing", "1").output
    assert "the key of public.users has the columns id" in lake.erase("users", '{"x": 1}').output
    assert "nothing has such a row" in lake.erase("users", "77").output
    assert lake.erase("users", "77").exit_code == 1
    nokey = lake.table("notes", (Column("text", "text"),))
    assert "has no key" in lake.erase(f"public.{nokey.name}", "1").output
    (tmp_path / "pipeline" / "gone" / "checkpoint").mkdir(parents=True)
    (tmp_path / "stray.txt").write_text(f"a@{MARKER}")
    result = lake.erase("users", "42")
    assert result.exit_code == 1
    assert "sink gone: it is not in the config" in result.output
    assert "stray.txt: an equal value" in result.output
    assert "values are left, or may be" in result.output


def full(users: Table, number: int, email: str) -> Change:
    image = b'{"id":%d,"email":"%b","city":"x"}' % (number, email.encode())
    return change(
        Op.DELETE,
        users,
        key=b'{"id":%d}' % number,
        before=image,
        before_kind=BeforeKind.FULL,
    )


@pytest.mark.parametrize("keep", ["rows", "history"])
def test_a_table_with_a_key_of_its_own_follows_what_is_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    lake = Erasable(monkeypatch, tmp_path, keep=keep, keys={"public.users": ("email",)})
    streets = (*USERS, Column("street", "text"))
    lake.users = lake.table("users", streets)
    rows = [
        put(lake.users, id=n, email=f"{n}@example.com", city="x", street=MARKER) for n in (1, 2)
    ]
    lake.commit(*rows)
    lake.flow()
    lake.commit(full(lake.users, 1, "1@example.com"))
    result = lake.erase("users", "1", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    [left] = place(found, "log")["left"]
    assert left.startswith("email keeps its values, because a sink finds its rows by it")
    assert place(found, "sink lake: public.users")["rewritten"] == 1
    # The sink was behind, and then begins anew.
    for reset in (False, True):
        lake.open()
        if reset:
            lake.sink.reset("query-1")
            lake.open()
            lake.written = 0
        lake.flow()
        assert lake.sink.failed_tables() == []
        seen = [each for each in lake.rows("users", own=True) if each.get("_current", True)]
        assert [each["id"] for each in seen] == [2]
        past = [each for each in lake.rows("users") if each["id"] == 1]
        erased = {"id": 1, "email": "1@example.com", "city": None, "street": None}
        assert past == ([erased] if keep == "history" else [])
    lake.log.close()


def test_rows_that_could_not_be_decoded_may_be_the_row(lake: Erasable) -> None:
    raw = b'{"error":"no such type","operation":"INSERT","pgoutput":"emVicmE="}'
    lake.commit(lake.user(42, f"a@{MARKER}"), remove(lake.users, id=42))
    lake.commit(change(Op.MESSAGE, lake.users, after=raw))
    result = lake.erase("users", "42", "--json")
    assert result.exit_code == 1
    [left] = place(json.loads(result.stdout), "log")["left"]
    assert left.startswith("1 rows of the table could not be decoded")
    # What a source with rules has of such a row has no value.
    lake.log.trim(4, force=True)
    lake.commit(lake.user(42, f"a@{MARKER}"), remove(lake.users, id=42))
    lake.commit(change(Op.MESSAGE, lake.users, after=b'{"operation":"INSERT"}'))
    lake.erased("users", "42")


@pytest.mark.parametrize(("before", "now"), [("first", "second"), ("first", ""), ("", "second")])
def test_a_table_whose_key_was_masked_otherwise_is_listed_as_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, now: str
) -> None:
    masks = [Mask(Secret(f"{name} key of sixteen")) if name else None for name in (before, now)]
    rules = [{"*": TableTransform(mask={"id": mask})} if mask else {} for mask in masks]
    lake = Erasable(monkeypatch, tmp_path, keep="rows")
    lake.sink = Tables(name="lake", path=str(lake.path), transforms=rules[0])
    lake.open()
    lake.commit(*(lake.user(n, f"{n}@{MARKER}") for n in (41, 42, 43)))
    lake.flow()
    lake.commit(remove(lake.users, id=42))
    changed = {"*": {"mask": {"id": {"hmac": f"{now} key of sixteen"}}}} if now else {}
    lake.configure({"lake": {"type": "tables", "path": str(lake.path), "transforms": changed}})
    for _ in range(2):  # the second time, the log no longer knows a value to search for
        result = lake.erase("users", "42", "--json")
        assert result.exit_code == 1
        [left] = place(json.loads(result.stdout), "sink lake: public.users")["left"]
        assert "was filled with another mask of its key" in left
    lake.log.close()


RENAMED = (Column("uid", "bigint", key=True), *USERS[1:])
WIDER = (USERS[0], Column("email", "text"), Column("city", "text", key=True))


@pytest.mark.parametrize(
    ("name", "columns", "key", "left"),
    [
        ("people", USERS, {"id": 42}, "1 changes are of public.users, another name of the table"),
        ("users", RENAMED, {"uid": 42}, "1 changes with values of this key are of a time when"),
        ("users", WIDER, {"id": 42, "city": "Germany"}, "1 changes with values of this key"),
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_changes_under_another_name_or_key_are_listed_as_left(
    lake: Erasable,
    name: str,
    columns: tuple[Column, ...],
    key: dict[str, Any],
    left: str,
    copied: bool,
) -> None:
    if copied:
        rows = ((42, f"a@{MARKER}"), (43, "b@example.com"))
        lake.snapshot(lake.users, [{"id": n, "email": e, "city": "Germany"} for n, e in rows])
    else:
        lake.commit(lake.user(42, f"a@{MARKER}"), lake.user(43, "b@example.com"))
    lake.commit(remove(lake.table(name, columns, first="users"), **key))
    result = lake.erase(name, json.dumps(key), "--json")
    assert result.exit_code == 1
    [found] = place(json.loads(result.stdout), "log")["left"]
    assert found.startswith(left)
    lake.log.trim(3, force=True)
    lake.erased(name, json.dumps(key))


@pytest.mark.parametrize("coded", [False, True])
def test_a_key_that_its_source_masks_is_found(lake: Erasable, tmp_path: Path, coded: bool) -> None:
    secret = "a key of sixteen characters"
    code = Mask(hmac=Secret(secret)).code("42")
    lake.configure(
        {"lake": {"type": "tables", "path": str(lake.path)}}, mask={"users.id": {"hmac": secret}}
    )
    users = lake.table("users", (Column("id", "text", key=True), *USERS[1:]))
    lake.commit(put(users, id=code, email=f"a@{MARKER}", city="x"), remove(users, id=code))
    lake.log._db.flush()
    assert places_with(tmp_path)
    lake.erased("users", code if coded else "42")
    assert places_with(tmp_path) == []
    # What came before the mask was set has the key itself.
    lake.commit(put(lake.users, id=42, email="x", city="x"))
    result = lake.erase("users", "42")
    assert result.exit_code == 1
    assert "1 changes have the key as it was before it was masked" in result.output


@pytest.mark.parametrize("done", [False, True])
def test_a_row_that_a_snapshot_may_still_read_is_refused(lake: Erasable, done: bool) -> None:
    lake.commit(lake.user(42, f"a@{MARKER}"))
    begun = SqliteTableSnapshot(1, done=done, again=True)
    resume = SqliteResume(
        uuid="u",
        reader="r",
        looks=1,
        position=1,
        snapshots={"public.users": begun},
        errored={},
        versions={},
    )
    lake.commit(truncate(lake.users, snapshot=True))
    lake.log.append("shop", Batch([], resume.encode()))
    result = lake.erase("users", "42", "--keep-last")
    assert ("a snapshot of public.users is not finished" in result.output) is not done
    assert result.exit_code == int(not done)
    values = json.loads(lake.log.read(0)[0].after or b"")
    assert values["email"] == (None if done else f"a@{MARKER}")


def test_equal_values_of_other_rows_are_named(lake: Erasable) -> None:
    orders = lake.table("orders", USERS)
    lake.commit(lake.user(42, f"a@{MARKER}"), put(orders, id=1, email=f"a@{MARKER}", city="x"))
    lake.commit(full(lake.users, 42, f"a@{MARKER}"))
    lake.flow()
    found = lake.erased("users", "42")
    assert found["notes"][0].endswith("equal to one of the row's: public.orders (1)")
    assert stored(lake.delta("orders")).num_rows == 1


def test_a_row_of_sqlite_is_erased_from_the_log(tmp_path: Path) -> None:
    path = tmp_path / "source" / "shop.db"
    path.parent.mkdir()
    connection = litedb.Connected(path)
    columns = "tenant text, id integer, email text, PRIMARY KEY (tenant, id)"
    connection.execute(f"CREATE TABLE users ({columns})")
    connection.commit()
    install(str(path), ["*"], wal=True)
    connection.execute(f"INSERT INTO users VALUES ('a', 1, 'first-{MARKER}'), ('b', 1, 'other')")
    connection.commit()
    with litedb.captured(path, tmp_path / "data") as feed:
        connection.execute(f"UPDATE users SET email = '\"x\" é {MARKER}' WHERE tenant = 'a'")
        connection.commit()
        connection.execute("DELETE FROM users WHERE tenant = 'a'")
        connection.commit()
        feed.catch_up()
        before = [(each.sequence, each.op, each.key) for each in feed.log.read(0)]
    connection.close()
    assert places_with(tmp_path / "data")
    config = tmp_path / "headrace.yaml"
    source = {"type": "sqlite", "path": str(path)}
    config.write_text(
        yaml.safe_dump({"data_dir": "data", "server": {"port": 9}, "sources": {"shop": source}})
    )
    arguments = ["erase", "users", '{"id": 1, "tenant": "a"}', "--yes", "--config", str(config)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "no value of the row is left" in done.output
    assert MARKER not in done.output
    assert "table of events" in done.output
    assert places_with(tmp_path / "data") == []
    with Log.open(tmp_path / "data" / "log") as log:
        assert [(each.sequence, each.op, each.key) for each in log.read(0)] == before
        assert not any(MARKER in repr(each) for each in log.read(0))
    assert (
        "the key of main.users has the columns tenant, id"
        in CliRunner().invoke(app, ["erase", "users", "1", "--yes", "--config", str(config)]).output
    )


def test_a_running_server_is_not_disturbed(tmp_path: Path) -> None:
    Log.open(tmp_path / "log").close()
    config = tmp_path / "headrace.yaml"
    source = {"type": "sqlite", "path": "shop.db"}
    config.write_text(
        yaml.safe_dump({"data_dir": ".", "server": {"port": 9}, "sources": {"shop": source}})
    )
    with Log.open(tmp_path / "log"):
        done = CliRunner().invoke(app, ["erase", "users", "1", "--yes", "--config", str(config)])
    assert done.exit_code == 1
    assert "another process is writing the log" in done.output


def test_a_table_in_a_bucket_is_erased_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket() as folder:
        given: dict[str, Any] = {"path": folder.uri, "storage": dict(folder.options)}
        lake = Erasable(monkeypatch, tmp_path)
        lake.sink = Tables(name="lake", **given)
        lake.open()
        lake.configure({"lake": {"type": "tables", **given}})
        lake.commit(lake.user(42, f"a@{MARKER}"), lake.user(43, "b@example.com"))
        lake.flow()
        lake.commit(remove(lake.users, id=42))
        lake.flow()
        table = folder.within("public", "users")
        assert any(MARKER.encode() in each for each in contents(table))
        lake.erased("users", "42")
        lake.log.close()
        assert not any(MARKER.encode() in each for each in contents(table))
        assert DeltaTable(table.uri, storage_options=dict(table.options)).version() > 0


def contents(folder: Folder) -> Iterator[bytes]:
    """What every object below a folder has, decoded from Parquet."""
    for entry in list(folder.objects.entries("")):
        content = folder.objects.read(entry.path) or b""
        if entry.path.endswith(".parquet"):
            content += repr(pq.read_table(pa.BufferReader(content)).to_pylist()).encode()
        yield content


@pytest.mark.parametrize("keep", ["rows", "history"])
def test_a_value_that_names_a_folder_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    lake = Erasable(
        monkeypatch,
        tmp_path,
        keep=keep,
        partition_by={"public.users": ("email",)},
        deletes="rewrite",
    )
    lake.commit(lake.user(42, "old@example.com"), lake.user(43, "b@example.com"))
    lake.flow()
    lake.commit(lake.user(42, "newer@example.com", Op.UPDATE))
    lake.flow()
    lake.commit(remove(lake.users, id=42))
    lake.flow()
    result = lake.erase("users", "42", "--json")
    found = json.loads(result.stdout)
    # A checkpoint names the partitions of removed files for an hour: that is found, and reported.
    left = [each for one in found["places"] for each in one["left"]]
    assert all("checkpoint.parquet" in each for each in left), left
    folders = [path.name for path in lake.path.rglob("email=*")]
    assert not [name for name in folders if "old" in name or "newer" in name]
    assert [each["email"] for each in lake.rows("users") if each["id"] == 43] == ["b@example.com"]
    assert {each["email"] for each in lake.rows("users") if each["id"] == 42} <= {None}
    lake.log.close()


def test_rows_that_a_killed_verification_has_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Erasable(monkeypatch, tmp_path)
    lake.commit(lake.user(42, f"a@{MARKER}"))
    lake.commit(remove(lake.users, id=42))
    lake.flow()
    left = tmp_path / "verify" / "lake" / "rows-1"
    left.mkdir(parents=True)
    (left.parent / "lock").touch()
    (left / "row").write_text(f"a@{MARKER}")
    lake.erased("users", "42")
    assert not left.exists()
    lake.log.close()
