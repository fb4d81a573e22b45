"""A process that captures MySQL or MariaDB, seen from outside."""

import signal
import subprocess
import sys
from pathlib import Path

from headrace.errors import LogError
from headrace.log import LogReader
from headrace.sources.mysql.resume import MysqlResume, decode, file_number
from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase

ROOT = Path(__file__).parents[2]


class Captor:
    """A capturing process, seen from outside."""

    def __init__(self, database: MysqlDatabase, data_dir: Path, *pace: str) -> None:
        self._errors = data_dir.with_suffix(".errors")
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.mysqlcaptor", data_dir, database.url, *pace],
                stdin=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
            )

    def hold(self) -> None:
        """Let it store nothing more."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._end()

    def stop(self) -> None:
        """Let it end in order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._end() == 0, self._errors.read_text()[-2000:]

    def expect_running(self) -> None:
        """It must not have ended by itself."""
        assert self._process.poll() is None, self._errors.read_text()[-2000:]

    def _end(self) -> int:
        code = self._process.wait(timeout=240)
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code


def stored(data_dir: Path) -> MysqlResume | None:
    """How far the log is, as another process sees it."""
    if not (data_dir / "CURRENT").exists():
        return None
    try:
        with LogReader.open(data_dir) as log:
            resume = log.resume("faults")
    except LogError:
        return None  # it is being made
    found = None if resume is None else decode(resume)
    return found if isinstance(found, MysqlResume) else None


def catch_up(database: MysqlDatabase, data_dir: Path, captor: Captor) -> None:
    """Wait until the log has everything."""
    file, position = database.server.end
    end = file_number(file), position

    def arrived() -> bool:
        captor.expect_running()
        resume = stored(data_dir)
        return resume is not None and resume.offset >= end and not resume.to_snapshot

    wait_until(arrived, timeout=240, message=f"the log reaches {end}")
