"""`preview` shows a table's newest changes as a sink sees them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from headrace.change.event import Column, Op
from headrace.cli import app
from headrace.secret import Secret
from headrace.transforms import Mask
from tests.sinks.lake import Shop, put, remove

KEY = "a key of sixteen or more"
USERS = (Column("id", "bigint", key=True), Column("name", "text"), Column("country", "text"))


class Previewed(Shop):
    """A log beside a config whose sink has transforms."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        transforms = {"public.users": {"mask": {"name": {"hmac": KEY}}, "where": "country <> 'XX'"}}
        lake = {"type": "tables", "path": "lake", "transforms": transforms, "tables": ["users"]}
        content = {
            "data_dir": str(folder),
            "sources": {"shop": {"type": "sqlite", "path": "shop.db"}},
            "pipeline": {"sinks": {"lake": lake}},
        }
        self.config = folder / "headrace.yaml"
        self.config.write_text(yaml.safe_dump(content))

    def preview(self, table: str, *options: str) -> Result:
        arguments = ["preview", "lake", table, *options, "--config", str(self.config)]
        return CliRunner().invoke(app, arguments)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Previewed]:
    made = Previewed(tmp_path)
    yield made
    made.log.close()


def test_the_newest_changes_are_shown_as_the_sink_sees_them(shop: Previewed) -> None:
    users, other = shop.table("users", USERS), shop.table("other", USERS)
    for number in range(20):
        country = "XX" if number % 2 else "DE"
        shop.commit(put(users, id=number, name="ann", country=country))
        shop.commit(put(other, id=number, name="bob", country="DE"))
    shop.commit(put(users, Op.UPDATE, id=0, name="eve", country="XX"), remove(users, id=2))
    shown = shop.preview("public.users", "--limit", "4", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["columns"] == {"id": "int64", "name": "string", "country": "string"}
    assert [(row["op"], row["id"]) for row in found["rows"]] == [
        ("INSERT", 16),
        ("INSERT", 18),
        ("DELETE", 0),
        ("DELETE", 2),
    ]
    assert found["rows"][0]["name"] == Mask(Secret(KEY)).code("ann")
    assert found["hidden"] == 10
    ten = json.loads(shop.preview("users", "--json").stdout)["rows"]
    assert [row["id"] for row in ten] == [*range(4, 20, 2), 0, 2]
    plain = shop.preview("users").output
    assert "ann" not in plain
    assert "eve" not in plain
    assert "10 of the changes that were read are not for the sink" in plain


def test_what_cannot_be_shown_is_said(shop: Previewed) -> None:
    shop.commit(put(shop.table("other", USERS), id=1, name="bob", country="DE"))
    assert "the log has no table public.nothing" in shop.preview("public.nothing").output
    assert "does not get the table" in shop.preview("public.other").output


def test_a_chosen_key_may_stand_for_the_own_one(shop: Previewed) -> None:
    content = yaml.safe_load(shop.config.read_text())
    lake = content["pipeline"]["sinks"]["lake"]
    lake["keys"] = {"public.users": ["name"]}
    lake["transforms"] = {"public.users": {"select": ["name", "country"]}}
    shop.config.write_text(yaml.safe_dump(content))
    shop.commit(put(shop.table("users", USERS), id=1, name="ann", country="DE"))
    shown = shop.preview("public.users", "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["columns"] == {"name": "string", "country": "string"}
