"""A value of many megabytes takes a small multiple of its size, in each process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import LiteralString

import msgspec
import pytest

from headrace.capture import Capture
from headrace.change.event import Op
from headrace.errors import DecodeError
from headrace.log import Log
from headrace.sources import Phase
from headrace.sources.postgres import large
from headrace.sources.postgres.values import PgType, encoder
from headrace.sources.worker import Apart
from headrace.testing import PostgresDatabase, wait_until
from tests.sources.captures import TIMEOUT
from tests.sources.capturing import image, postgres

SENT = 60_000_000  # bytes; more than a buffer of the log takes, so that its writing counts too
LIMIT = 6  # times what was sent
IDLE = 70_000_000  # bytes that the process of a source takes before it reads anything

TEXTS = {25: PgType(25, "text", "b"), 1009: PgType(1009, "text[]", "b", element=25)}

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")

VALUES: dict[str, tuple[LiteralString, LiteralString]] = {
    "text": ("text", "repeat('x', 60000000)"),
    "escaped text": ("text", r"""repeat('x"y\z', 12000000)"""),
    "bytea": ("bytea", "decode(repeat('a7', 30000000), 'hex')"),
}


def worker() -> int:
    """The process that captures, which this one has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"sources.worker" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return 0


def memory(process: int, field: str) -> int:
    """A field of a process's status, in bytes."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


@contextmanager
def capturing(pg: PostgresDatabase, log: Log) -> Iterator[Capture]:
    capture = Capture(Apart(postgres(pg, snapshot_workers=1)), log)
    capture.start()
    try:
        yield capture
    finally:
        capture.stop()


def streaming(capture: Capture) -> None:
    wait_until(
        lambda: capture.status().phase is Phase.STREAMING, timeout=TIMEOUT, message="it streams"
    )


@pytest.mark.parametrize("name", VALUES)
def test_a_streamed_value_takes_at_most_six_times_what_was_sent(
    pg: PostgresDatabase, tmp_path: Path, name: str
) -> None:
    kind, value = VALUES[name]
    pg.execute(f"CREATE TABLE large (id int PRIMARY KEY, value {kind} STORAGE EXTERNAL)")
    first = memory(os.getpid(), "VmRSS")
    tries = []
    # What else this process does can only add to it, so the least of some tries counts. Each has
    # its own log, as buffers hold the values of the one before for a while.
    for number in range(3):
        with Log.open(tmp_path / f"log{number}") as log, capturing(pg, log) as capture:
            streaming(capture)
            processes = [os.getpid(), worker()]
            before = [first, memory(processes[1], "VmRSS")]
            for process in processes:
                Path(f"/proc/{process}/clear_refs").write_text("5")  # begins a new high-water mark
            latest = log.latest_sequence
            pg.execute(f"INSERT INTO large VALUES ({number}, {value})")
            wait_until(lambda: log.latest_sequence > latest, timeout=TIMEOUT, message="stored")  # noqa: B023
            peaks = [memory(process, "VmHWM") for process in processes]
            tries.append([(peak - idle) / SENT for peak, idle in zip(peaks, before, strict=True)])
        if max(map(min, zip(*tries, strict=True))) <= LIMIT:
            return
        pg.execute("DELETE FROM large")
    pytest.fail(f"main and worker grew by {tries} times what was sent")


@pytest.mark.parametrize("name", ["escaped text", "bytea"])
def test_a_copied_value_takes_at_most_six_times_what_was_sent(
    pg: PostgresDatabase, tmp_path: Path, name: str
) -> None:
    kind, value = VALUES[name]
    pg.execute(f"CREATE TABLE large (id int PRIMARY KEY, value {kind} STORAGE EXTERNAL)")
    pg.execute(f"INSERT INTO large VALUES (1, {value})")
    with Log.open(tmp_path / "log") as log, capturing(pg, log) as capture:
        streaming(capture)
        wait_until(lambda: log.latest_sequence >= 2, timeout=TIMEOUT, message="it is stored")
        peak = memory(worker(), "VmHWM") - IDLE
        [read] = [change for change in log.read(0, limit=10) if change.op is Op.READ]
    assert peak / SENT <= LIMIT
    stored = (image(read.after) or {})["value"]
    [(length,)] = pg.execute("SELECT length(value) FROM large")
    assert len(stored) == (length + 2) // 3 * 4 if kind == "bytea" else length


@pytest.mark.parametrize("size", [1, large.LARGE + 1])
@pytest.mark.parametrize("unit", ["é水🌊", '"\\', "\t\n", "\\\\n"])
def test_a_value_in_pieces_is_the_value_as_a_whole(unit: str, size: int) -> None:
    text = (unit * (size // len(unit) + 1))[:size]
    assert large.quoted(text.encode()) == msgspec.json.encode(text)
    copied = text.translate({9: "\\t", 10: "\\n", 92: "\\\\"}).encode()
    assert large.unescaped(copied) == text.encode()


@pytest.mark.parametrize("element", [b"x", b'"a \\"b\\" c"', b"NULL"])
def test_an_array_of_very_many_elements_is_read_as_a_short_one(element: bytes) -> None:
    encode = encoder(1009, TEXTS)
    assert encode is not None
    count = large.LARGE // (len(element) + 1) + 3
    short, long = (encode(b"{%b}" % b",".join([element] * each)) for each in (2, count))
    first = short[1:-1].split(b",")[0]
    assert long == b"[%b]" % b",".join([first] * count)
    with pytest.raises(DecodeError):
        encode(b"{%b" % b",".join([element] * count))
