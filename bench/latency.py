"""From commit to client: how long a committed row takes to reach a reader of the SSE stream.

Three processes beside the server: `headrace run`, a writer that commits one row a transaction at
a steady rate, and a reader. The writer puts its clock into the row right before it sends it, so
the time measured includes the insert and the commit themselves. Both clocks are the machine's
monotonic one.
"""

import http.client
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psycopg

from headrace.sources import Phase
from headrace.testing import PostgresDatabase, wait_until

from .process import MeasurementFailed, answer, child, module, next_line
from .report import Figure, Figures

RATE = 1000  # changes a second
SECONDS = 15
TABLE = "public.bench_latency"

_STAMP = re.compile(rb'stamp\\?":\s*\\?"?(\d+)')
CREATE = f"CREATE TABLE {TABLE} (id int PRIMARY KEY, stamp bigint NOT NULL, note text NOT NULL)"


class Reading(msgspec.Struct, frozen=True):
    """What the reader saw."""

    milliseconds: list[float]  # of each change, in order of arrival
    seconds: float  # from the first arrival to the last


# --- the writer ----------------------------------------------------------------------------------


def write(url: str, changes: int) -> None:
    """Commit rows at the given rate, each in its own transaction."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=0) as connection:
        began = time.monotonic()
        for number in range(changes):
            time.sleep(max(0.0, began + number / RATE - time.monotonic()))
            connection.execute(
                "INSERT INTO public.bench_latency VALUES (%s, %s, 'a note of some length')",
                (number, time.monotonic_ns()),
            )
        answer({"seconds": time.monotonic() - began})


# --- the reader ----------------------------------------------------------------------------------


def read(url: str, changes: int) -> None:
    """Follow the stream until every row has come."""
    stream = _follow(url)
    answer({"ready": True})
    latencies: list[float] = []
    first = last = 0
    for arrived, stamp in _arrivals(stream):
        first, last = first or arrived, arrived
        latencies.append((arrived - stamp) / 1e6)
        if len(latencies) == changes:
            break
    answer(msgspec.to_builtins(Reading(latencies, (last - first) / 1e9)))


def _follow(url: str) -> http.client.HTTPResponse:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    connection.request("GET", "/changefeed/stream?from_seq=0&keep_alive=true&max_seconds=60")
    response = connection.getresponse()
    if response.status != 200:
        raise MeasurementFailed(f"the stream answered {response.status}: {response.read()!r}")
    return response


def _arrivals(stream: http.client.HTTPResponse) -> Iterator[tuple[int, int]]:
    """When each row came, and the stamp in it."""
    rest = b""
    while data := stream.read1(65536):
        arrived = time.monotonic_ns()
        *frames, rest = (rest + data).split(b"\n\n")
        for frame in frames:
            if match := _STAMP.search(frame):
                yield arrived, int(match[1])
    raise MeasurementFailed("the stream ended early")


# --- the measurement -----------------------------------------------------------------------------


def measure(database: PostgresDatabase, folder: Path, *, changes: int = RATE * SECONDS) -> Figures:
    """Run server, writer and reader, and say how the delays are spread."""
    database.execute(CREATE)
    count = str(changes)
    with _server(database, folder) as url, child(module("latency", "read", url, count)) as reader:
        next_line(reader)  # it has the stream open
        with child(module("latency", "write", database.url, count)) as writer:
            took = float(msgspec.json.decode(next_line(writer))["seconds"])
        reading = msgspec.json.decode(next_line(reader), type=Reading)
    return figures(reading, rate=changes / took)


def figures(reading: Reading, *, rate: float) -> Figures:
    """The delays as figures beside their targets."""
    delays = sorted(reading.milliseconds)
    return Figures(
        f"Commit → SSE client, at {RATE:,} changes/s",
        [
            Figure("p50", percentile(delays, 50), "ms", below=10),
            Figure("p99", percentile(delays, 99), "ms", below=50),
            Figure("p99.9", percentile(delays, 99.9), "ms"),
            Figure("worst", delays[-1], "ms"),
            Figure("changes", len(delays), "rows"),
            # A writer that cannot keep up on a busy machine makes the delays look better.
            Figure("written", rate, "changes/s", at_least=0.98 * RATE),
        ],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed."""
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


@contextmanager
def _server(database: PostgresDatabase, folder: Path) -> Iterator[str]:
    """A `headrace run` that captures the table and serves it; yields its address."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    source = {"type": "postgres", "url": database.url, "tables": [TABLE]}
    config = folder / "headrace.yaml"
    # JSON is YAML.
    config.write_text(
        msgspec.json.encode({"sources": {"bench": source}, "server": {"port": port}}).decode()
    )
    program = Path(sys.executable).with_name("headrace")
    command = [str(program), "run", "--config", str(config)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            wait_until(lambda: _streaming(url, server), timeout=30, message="it is streaming")
            yield url
        finally:
            server.terminate()
            server.wait(30)


def _streaming(url: str, server: subprocess.Popen[bytes]) -> bool:
    if server.poll() is not None:
        raise MeasurementFailed(f"headrace run ended with {server.returncode}")
    connection = http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=5)
    try:
        connection.request("GET", "/health")
        health = msgspec.json.decode(connection.getresponse().read())
        return all(source["phase"] == Phase.STREAMING for source in health["sources"])
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
