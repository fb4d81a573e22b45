"""Sinks that are compared with their sources again and again, each time by a process of its own."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from ..config import Config
from ..sinks.requests import Requests, VerifySchedule
from ..sinks.verification import Verification, note, noted
from .stale_rows import remove_stale_rows

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_STOP_SECONDS = 5.0


class ScheduledVerifications:
    """Runs `headrace verify` for the sinks that somebody wants it for, one at a time.

    A schedule is a file in the sink's folder, and so is the last result: so both hold after a
    restart. The process ends when this one does, and has a low priority; rows that it leaves when
    it is killed are removed.
    """

    def __init__(self, config: Callable[[], Config], file: Path) -> None:
        """`config` is what this process works with now, `file` where it comes from."""
        self._config = config
        self._file = file
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verifications", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # between starting a process and stopping it

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None:
            _end(process)
        self._thread.join()
        remove_stale_rows(self._config().verify_dir)

    def _run(self) -> None:
        remove_stale_rows(self._config().verify_dir)
        while not self._stopping.wait(_LOOK_SECONDS):
            try:
                for name, schedule in self._due():
                    self._verify(name, schedule)
            except Exception:  # whatever it is: the capture goes on, and so does the next round
                logger.exception("sinks are not verified, and it is tried again")
                self._stopping.wait(60 * _LOOK_SECONDS)

    def _due(self) -> list[tuple[str, VerifySchedule]]:
        config = self._config()
        found = []
        for sink in config.pipeline.sinks if config.pipeline else ():
            folder = config.sink_dir(sink.name)
            schedule = Requests(folder).verify_schedule
            if schedule is None:
                continue
            last = noted(folder)
            begun = last.tried_at if last and last.tried_at >= schedule.at else 0
            if time.time() >= begun / 1e6 + schedule.seconds:
                found.append((sink.name, schedule))
        return found

    def _verify(self, name: str, schedule: VerifySchedule) -> None:
        began = time.time_ns() // 1000
        process = self._started(name, schedule)
        if process is None:
            return
        code = process.wait()
        _kill(process)
        assert process.stdin is not None
        process.stdin.close()
        if self._stopping.is_set():
            return
        folder = self._config().sink_dir(name)
        last = noted(folder)
        if last is None or last.tried_at < began:
            # It ended before it could say why: a broken config, no memory, no Java.
            why = f"`headrace verify {name}` ended with exit code {code} and no result"
            known = last or Verification(sink=name)
            last = msgspec.structs.replace(known, error=why, failed_at=began)
            note(folder, last)
        if last.error:
            logger.warning("sink=%s verified=no exit_code=%d error=%s", name, code, last.error)
            return
        log = logger.info if last.sound else logger.error
        log(
            "sink=%s verified=yes equal=%s rows=%d differences=%d seconds=%.1f",
            *(name, "yes" if last.sound else "no", last.rows, last.differences, last.seconds),
        )

    def _started(self, name: str, schedule: VerifySchedule) -> subprocess.Popen[bytes] | None:
        command = [sys.executable, "-m", "headrace.cli", "verify", name, *schedule.tables]
        command += ["--config", str(self._file), "--with-parent"]
        command += ["--repair"] if schedule.repair else []
        with self._lock:
            if self._stopping.is_set():
                return None
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                # What it prints has keys, which are for whoever asks, and for no log.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # all of them have ended by themselves
        os.killpg(process.pid, signal.SIGKILL)
