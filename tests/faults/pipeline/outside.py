"""A process that carries a log somewhere and dies when it is told to, seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

ROOT = Path(__file__).parents[3]

Told = TypeVar("Told")


class Outside(Generic[Told]):
    """A module of this folder at work; it answers each order with a line, unless it dies of it."""

    def __init__(
        self, module: str, argument: str, folder: Path, told: type[Told], *more: str
    ) -> None:
        """Start it; `more` are further arguments of its command."""
        self._told = told
        self._errors = folder / f"{module}.errors"
        paths = (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"tests.faults.pipeline.{module}", argument, *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        self._ready = False

    def does(self, order: msgspec.Struct) -> Told:
        """What it says of an order when it has done it."""
        told = self._asked(order)
        assert told, f"it has ended: {self.words()}"
        return told

    def dies_of(self, order: msgspec.Struct) -> None:
        """Expect that it kills itself while it does something."""
        told = self._asked(order)
        assert told is None, f"it did not die: {told}"
        assert self.process.wait() == -signal.SIGKILL, self.words()

    def await_ready(self) -> None:
        """Wait until it takes orders."""
        if not self._ready:
            assert self._heard(), f"it does not start: {self.words()}"
            self._ready = True

    def close(self) -> None:
        """Make sure that nothing of it is left."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            with suppress(BrokenPipeError):  # an order that it never read
                stream.close()

    def words(self) -> str:
        """What it said, for whoever reads a failed test."""
        return self._errors.read_text()[-4000:]

    def _asked(self, order: msgspec.Struct) -> Told | None:
        self.await_ready()
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self.process.stdin.flush()
        return self._heard()

    def _heard(self) -> Told | None:
        """The next thing it says; None: it has ended."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        return msgspec.json.decode(line, type=self._told) if line else None
