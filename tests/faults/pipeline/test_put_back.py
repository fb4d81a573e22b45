"""A data_dir that is put back from a file copy while everything else has gone on."""

import json
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.testing import wait_until
from tests.pipeline.places import Place
from tests.sinks.receiver import Receiver

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("java")]


class PutBack(Place):
    """A captured SQLite file, with sinks whose own notes are not in data_dir."""

    def begin(self, port: int) -> None:
        self.write("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
        self.ask("sqlite", "install", "shop.db")
        hook = {
            "type": "webhook",
            "url": f"http://127.0.0.1:{port}/",
            "secret": "a key of sixteen or more",
            "allow_private_networks": True,
        }
        self.configure("")
        content = json.loads((self.folder / "headrace.yaml").read_text())
        content["sources"] = {"shop": {"type": "sqlite", "path": "shop.db"}}
        content["pipeline"]["checkpoint_dir"] = "notes"
        content["pipeline"]["sinks"] = {"lake": {"type": "tables", "path": "lake"}, "hook": hook}
        (self.folder / "headrace.yaml").write_text(json.dumps(content))
        self.url = f"http://127.0.0.1:{content['server']['port']}"

    def write(self, statement: str) -> None:
        with closing(sqlite3.connect(self.folder / "shop.db")) as database, database:
            database.execute(statement)

    def insert(self, first: int, last: int) -> None:
        rows = ", ".join(f"({number}, 'user {number}')" for number in range(first, last + 1))
        self.write(f"INSERT INTO users VALUES {rows}")

    def sinks(self) -> dict[str, dict[str, Any]]:
        found = json.loads(self.ask("status", "--json"))["pipeline"]["sinks"]
        return {sink["sink"]: sink for sink in found}

    def latest(self) -> int:
        try:
            return int(httpx.get(f"{self.url}/health", timeout=30).json()["log"]["latest_sequence"])
        except httpx.HTTPError:
            return 0  # it is starting

    def await_sinks(self, sequence: int) -> None:
        def reached() -> bool:
            return all(sink["sequence"] >= sequence for sink in self.sinks().values())

        wait_until(lambda: self.latest() >= sequence, timeout=120, message=self.output())
        wait_until(reached, timeout=300, message="the sinks are there")

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=180) == 0, self.output()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[PutBack]:
    place = PutBack(tmp_path)
    yield place
    place.end()


@pytest.mark.requirement("P-06")
def test_whoever_has_seen_more_than_a_copy_that_was_put_back_is_refused(place: PutBack) -> None:
    with Receiver() as receiver:
        place.begin(receiver.port)
        place.start("run")
        place.insert(1, 50)
        place.await_sinks(50)
        copied = place.latest()
        shutil.copytree(place.folder / "data", place.folder / "copy")
        place.insert(51, 80)
        place.await_sinks(copied + 30)
        page = httpx.get(f"{place.url}/v1/changes", params={"after": copied}, timeout=30).json()
        seen = {"after": page["scanned"], "epoch": page["epoch"]}
        seen_in = {**seen, "generation": page["generation"]}
        cursor = httpx.put(f"{place.url}/v1/cursors/c", json={"sequence": seen["after"]})
        assert cursor.status_code == 200, cursor.text
        place.stop()
        before = place.sinks()

        shutil.rmtree(place.folder / "data")
        (place.folder / "copy").rename(place.folder / "data")
        place.start("run")
        wait_until(lambda: place.latest() == copied, timeout=120, message=place.output())
        # Nothing was added yet: the sequence alone shows it, and the message says what to do.
        for given in (seen, seen_in, {"after": seen["after"]}):
            refused = httpx.get(f"{place.url}/v1/changes", params=given, timeout=30)
            assert refused.status_code == 409, refused.text
            assert f"go on after {copied}" in refused.json()["hint"]
        place.ask("snapshot", "shop")
        wait_until(lambda: place.latest() > seen["after"], timeout=120, message=place.output())
        # The log has other changes there now: only the generation shows it.
        refused = httpx.get(f"{place.url}/v1/changes", params=seen_in, timeout=30)
        assert (refused.status_code, refused.json()["error"]) == (409, "other_log")
        assert httpx.get(f"{place.url}/v1/cursors/c", timeout=30).status_code == 404
        put = httpx.put(
            f"{place.url}/v1/cursors/c",
            json={"sequence": seen["after"], "generation": seen_in["generation"]},
        )
        assert put.status_code == 409, put.text

        def halted() -> bool:
            return all(sink["phase"] == "halted" for sink in place.sinks().values())

        wait_until(halted, timeout=300, message=f"{place.sinks()}")
        for name, sink in place.sinks().items():
            assert f"has changes up to {before[name]['sequence']}" in sink["error"]
            assert "put back from an older copy" in sink["error"]
        assert "headrace reset lake" in place.sinks()["lake"]["hint"]
        assert "headrace pipeline --adopt hook" in place.sinks()["hook"]["hint"]
        assert place.health() != "healthy"
        place.stop()
