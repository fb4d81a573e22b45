"""`headrace verify` of a Delta table beside a running `headrace run`: rows a second, and memory."""

import subprocess
import time
from pathlib import Path

import msgspec

from headrace.sinks.verification import Verification
from headrace.testing import PostgresDatabase, wait_until

from .family import Family, Peaks
from .lake_whole import LAKE, program, running
from .process import MeasurementFailed
from .report import Figure, Figures

ROWS = 10_000_000
_LIMIT = 3600.0


def measure(database: PostgresDatabase, folder: Path, *, rows: int) -> Figures:
    """Compare a whole table; everything that its snapshot needs is done before."""
    with running(database, folder, LAKE) as server:
        wait_until(lambda: server.followed(rows), timeout=_LIMIT, message="every row is there")
        began = time.perf_counter()
        command = [program(), "verify", "lake", "--json"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE) as process:
            with Peaks(Family(process.pid, "driver")) as peaks:
                assert process.stdout is not None
                answer = process.stdout.read()
            took = time.perf_counter() - began
        if process.returncode:
            raise MeasurementFailed(f"headrace verify ended with {process.returncode}")
    database.drop_slots()
    found = msgspec.json.decode(answer, type=Verification)
    if (found.rows, found.sound) != (rows, True):
        raise MeasurementFailed(f"{found.rows} rows were compared, of {rows}")
    held = peaks.highest
    return Figures(
        f"Verify: every row of a Delta table of {rows:,} rows",
        [
            Figure("compared", rows / found.seconds, "rows/s"),
            Figure("with the start of the program and of Spark", rows / took, "rows/s"),
            Figure("driver", held.get("driver", 0.0), "MB"),
            Figure("JVM", held.get("JVM", 0.0), "MB"),
            Figure("workers, all together", held.get("workers", 0.0), "MB"),
        ],
    )
