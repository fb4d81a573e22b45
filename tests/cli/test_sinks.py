"""`headrace redrive` and `headrace verify`, with and without a pipeline; and what stays hidden."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.testing import free_port, wait_until
from tests.changes import Writer, opened_writer
from tests.java import QUICK_JAVA
from tests.sinks.receiver import OK, Receiver, Request, reply
from tests.sparkui import assert_hidden, pages

HEADRACE = [sys.executable, "-m", "headrace.cli"]
HIDDEN = ["p4th-nobody-knows", "s1gning-secret", "t0ken-in-a-header"]


class Place:
    """A folder with a config, whose pipeline posts to a receiver."""

    def __init__(self, folder: Path, receiver: Receiver) -> None:
        self.folder = folder
        self.receiver = receiver
        self.ui = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.refused: set[str] = set()
        self.gone = False
        receiver.script = self.answer
        self.configure()

    def configure(self, **others: object) -> None:
        path, secret, token = HIDDEN
        hooks = {
            "type": "webhook",
            "url": f"{self.receiver.url}/{path}",
            "secret": secret,
            "headers": {"Authorization": token},
            "allow_private_networks": True,
            "batch_seconds": 0.1,
        }
        spark = {
            "spark.ui.enabled": True,
            "spark.ui.port": self.ui,
            "spark.driver.memory": "1g",
            **QUICK_JAVA,
        }
        content = {
            "sources": {"idle": {"type": "postgres", "url": "postgresql://127.0.0.1:1/shop"}},
            "server": {"port": free_port()},
            "pipeline": {
                "master": "local[2]",
                "spark": spark,
                "sinks": {"hooks": hooks, **others},
            },
        }
        (self.folder / "headrace.yaml").write_text(json.dumps(content))

    def answer(self, request: Request) -> bytes:
        if self.gone:
            return reply(410)
        row = json.loads(request.body)["after"]["id"]
        return reply(422, HIDDEN[2].encode()) if row in self.refused else OK

    def start(self) -> None:
        with (self.folder / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [*HEADRACE, "pipeline"], cwd=self.folder, stdout=output, stderr=output
            )

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise

    def ask(self, *command: str, code: int = 0) -> str:
        result = subprocess.run(
            [*HEADRACE, *command], cwd=self.folder, capture_output=True, text=True, check=False
        )
        output_text = result.stdout + result.stderr
        assert result.returncode == code, output_text
        with (self.folder / "output.txt").open("a") as output:
            output.write(output_text)
        return output_text

    def status(self) -> dict[str, Any]:
        file = self.folder / "data/pipeline/status.json"
        sinks = json.loads(file.read_text())["sinks"] if file.exists() else []
        return next((each for each in sinks if each["sink"] == "hooks"), {"phase": "none"})

    def await_status(self, **wanted: object) -> None:
        wait_until(
            lambda: all(self.status().get(name) == value for name, value in wanted.items()),
            timeout=180,
            message=f"the sink says {wanted}",
        )

    def rows(self) -> list[str]:
        return [json.loads(request.body)["after"]["id"] for request in self.receiver.requests]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Receiver() as receiver:
        made = Place(tmp_path, receiver)
        try:
            yield made
        finally:
            made.stop()


def fill(writer: Writer, *rows: str) -> None:
    for row in rows:
        writer.put("users", row)


@pytest.mark.slow
@pytest.mark.usefixtures("java")
def test_dead_letters_go_out_again_and_what_was_sent_is_accounted_for(place: Place) -> None:
    with opened_writer(place.folder / "data" / "log") as writer:
        fill(writer, "1", "2", "3", "4")
        place.refused = {"3"}
        place.start()
        place.await_status(sent=3, dead_letters=1)
        result = place.ask("status")
        assert "hooks: 1 dead letters of 1 rows" in result
        assert "Run `headrace redrive hooks`" in result
        assert json.loads(place.ask("status", "--json"))["pipeline"]["sinks"][0]["sent"] == 3
        result = place.ask("verify", "hooks")
        assert "4 events; 3 were sent, 1 became dead letters" in result
        assert "1 dead letters of 1 rows wait" in result

        # Asked of the pipeline that runs.
        result = place.ask("redrive", "hooks", "--key", "users:33", code=1)
        assert "no dead letter of users:33; did you mean public.users:3?" in result
        result = place.ask("redrive", "hooks", code=1)
        assert "sent 0 of 1 dead letters again; 1 are left" in result
        assert "1: it answered 422 Unprocessable Entity: ***" in result
        place.refused = set()
        result = place.ask("redrive", "hooks", "--key", "users:3")
        assert "hooks: sent 1 of 1 dead letters again; 0 are left" in result
        place.await_status(dead_letters=0)
        found = json.loads(place.ask("verify", "hooks", "--json"))
        assert (found["expected"], found["sent"], found["redriven"]) == (4, 3, 1)
        assert found["missing"] == []
        assert_hidden(pages(f"http://127.0.0.1:{place.ui}"), *HIDDEN)

        # One that was gone goes on without a restart.
        place.gone = True
        fill(writer, "5")
        place.await_status(phase="halted")
        assert "the sink has halted: " in place.ask("redrive", "hooks", code=1)
        place.gone = False
        assert "hooks: no dead letters" in place.ask("redrive", "hooks")
        place.await_status(sent=5, phase="streaming")

        # And where no pipeline runs.
        place.refused = {"6"}
        fill(writer, "6")
        place.await_status(dead_letters=1)
        place.stop()
        place.refused = set()
        assert "sent 1 of 1 dead letters again" in place.ask("redrive", "hooks")
        assert "hooks: no dead letters" in place.ask("redrive", "hooks")
        assert "nothing is missing" in place.ask("verify", "hooks")
    assert sorted(set(place.rows())) == ["1", "2", "3", "4", "5", "6"]
    assert_hidden_in_files(place.folder)


def assert_hidden_in_files(folder: Path) -> None:
    looked = 0
    for file in folder.rglob("*"):
        if file.is_file() and file.name != "headrace.yaml":
            content = file.read_bytes()
            assert [each for each in HIDDEN if each.encode() in content] == [], file
            looked += 1
    assert looked > 10
    assert (folder / "data/pipeline/spark.log").exists()


# --- wrong arguments ------------------------------------------------------------------------------


def command(place: Place, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--config", str(place.folder / "headrace.yaml")])


@pytest.mark.parametrize("name", ["redrive", "verify"])
def test_a_sink_that_is_not_there_or_sends_nothing_is_named(place: Place, name: str) -> None:
    place.configure(lake={"type": "history", "path": "lake"})
    result = command(place, name, "hook")
    assert result.exit_code == 1
    assert "error: no sink called hook; did you mean hooks?" in result.stderr
    result = command(place, name, "lake")
    assert result.exit_code == 1
    assert "error: the sink lake sends no events" in result.stderr
    assert "those that do: hooks" in result.stderr


def test_where_nothing_was_sent_there_is_nothing_to_send_again(place: Place) -> None:
    with opened_writer(place.folder / "data" / "log") as writer:
        fill(writer, "1")
        result = command(place, "verify", "hooks")
        assert result.exit_code == 0
        assert "1 events are still to come" in result.stdout
    result = command(place, "redrive", "hooks")
    assert (result.exit_code, result.stdout) == (0, "hooks: no dead letters\n")


def test_a_config_with_sinks_that_send_loads_no_spark(place: Place) -> None:
    code = (
        "import sys, headrace.config, headrace.pipeline.verify, headrace.pipeline.checkpoint\n"
        "assert headrace.config.load('headrace.yaml').pipeline.sinks\n"
        "assert 'pyspark' not in sys.modules, 'loaded'\n"
    )
    environment = {**os.environ}
    subprocess.run([sys.executable, "-c", code], cwd=place.folder, env=environment, check=True)
