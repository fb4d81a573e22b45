"""A package of another project: built, installed into a fresh environment, and used like ours."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.client import Client
from headrace.errors import ServerAbsent
from headrace.testing import free_port, wait_until
from tests.java import QUICK_JAVA
from tests.plugins.environments import ROOT, Environment, wheel_of

EXAMPLE = Path(__file__).parent / "example"
PAGE = (ROOT / "docs" / "extending.md").read_text()


@pytest.fixture(scope="module")
def environment(headrace_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("example")
    return Environment.created(folder / "venv", headrace_wheel, wheel_of(EXAMPLE, folder))


class Site:
    """A folder with a config in which source, sink and format are the example's."""

    def __init__(self, folder: Path, environment: Environment) -> None:
        self.folder = folder
        self.environment = environment
        self.port = free_port()
        self.file = folder / "access.log"
        self.file.write_text("one\ntwo\n")
        self.configure({"type": "lines", "path": str(self.file)})

    def configure(self, source: dict[str, Any], **sinks: object) -> None:
        sinks = sinks or {
            "own": {"type": "batches", "path": "own"},
            "ours": {"type": "files", "path": "ours", "format": "pair"},
        }
        spark = {"spark.ui.enabled": "false", "spark.driver.memory": "1g", **QUICK_JAVA}
        content = {
            "sources": {"access": source},
            "server": {"port": self.port},
            "pipeline": {"master": "local[1]", "spark": spark, "sinks": sinks},
        }
        (self.folder / "headrace.yaml").write_text(json.dumps(content))
        alone = {key: content[key] for key in ("sources", "server")}
        (self.folder / "capture.yaml").write_text(json.dumps(alone))

    def printed(self, *arguments: str, code: int = 0) -> str:
        ran = self.environment.run("headrace", *arguments, cwd=self.folder)
        assert ran.code == code, f"{ran.output}\n{ran.errors}"
        return ran.output + ran.errors

    @contextmanager
    def running(self) -> Iterator[Client]:
        command = [str(self.environment.headrace), "run", "-c", "capture.yaml"]
        process = subprocess.Popen(command, cwd=self.folder)
        client = Client(f"http://127.0.0.1:{self.port}")
        try:
            wait_until(lambda: latest(client) >= 2, timeout=120, message="both lines are captured")
            yield client
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()

    def append(self, line: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{line}\n")

    def stored(self, sink: str) -> list[Any]:
        files = sorted((self.folder / sink).rglob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def latest(client: Client) -> int:
    try:
        return int(client.get("/changefeed/stats")["latest_sequence"])
    except ServerAbsent:
        return -1


def pair(line: int, text: str) -> Any:
    return {"key": {"line": line}, "row": {"line": line, "text": text}}


@pytest.fixture
def site(tmp_path: Path, environment: Environment) -> Site:
    return Site(tmp_path, environment)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_source_a_sink_and_a_format_of_another_package(site: Site, java: None) -> None:
    assert f"{site.file} is there" in site.printed("check")
    expected = [pair(1, "one"), pair(2, "two"), pair(3, "three")]
    with site.running() as client:
        site.append("three")
        wait_until(lambda: latest(client) >= 3, timeout=60, message="the new line is captured")
        assert client.get("/v1/changes", format="pair", limit=10)["events"] == expected
        assert "/schemas/pair.json" in client.get("/schemas")["schemas"]
        assert client.get("/schemas/pair.json")["required"] == ["key", "row"]
        tail = site.printed("tail", "--no-follow", "--format", "pair")
        assert [json.loads(line) for line in tail.splitlines()] == expected
        shown = client.get("/v1/changes", limit=10)["changes"]
        assert [(each["op"], each["position"]) for each in shown] == [
            ("READ", {"line": 1}),
            ("READ", {"line": 2}),
            ("INSERT", {"line": 3}),
        ]
        assert "line 3" in site.printed("status", "-c", "capture.yaml")
    site.append("four")
    with site.running() as client:
        wait_until(lambda: latest(client) >= 4, timeout=60, message="it goes on where it was")
    site.printed("pipeline", "--once")
    assert [row["sequence"] for row in site.stored("own")] == [1, 2, 3, 4]
    assert site.stored("ours") == [*expected, pair(4, "four")]
    assert "own" in site.printed("status")


@pytest.mark.slow
def test_errors_name_what_is_installed_beside_ours(site: Site) -> None:
    site.configure({"type": "linse", "path": "x"}, own={"type": "batch", "path": "own"})
    printed = site.printed("check", code=1)
    assert 'no type called "linse"; there are: lines, mysql, postgres' in printed
    assert 'no type called "batch"; there are: batches, ' in printed
    site.configure(
        {"type": "lines", "file": "x"}, own={"type": "files", "path": "o", "format": "p"}
    )
    printed = site.printed("check", code=1)
    assert "headrace.sources.access: no setting called file" in printed
    printed = site.printed("tail", "--format", "par", code=2)
    assert "pair" in printed


@pytest.mark.parametrize(
    "file",
    ["pyproject.toml", *(f"src/headrace_example/{n}.py" for n in ("source", "sink", "format"))],
)
def test_the_page_shows_each_file_whole(file: str) -> None:
    assert (EXAMPLE / file).read_text() in PAGE
