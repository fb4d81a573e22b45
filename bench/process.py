"""A measurement in a process of its own: it answers with one line of JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1800  # seconds; nothing here takes so long


class MeasurementFailed(Exception):
    """A measured program failed, or did something else than it was asked."""


class Outcome(msgspec.Struct, frozen=True):
    """What one measured run did."""

    rows: int
    seconds: float
    notes: dict[str, float] = {}  # further figures of this run, by what they are

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package."""
    return [sys.executable, "-m", f"bench.{name}", *arguments]


def environment() -> dict[str, str]:
    """Where a child that works in another folder finds this package."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Run a program to its end in `folder`; return what it printed."""
    try:
        result = subprocess.run(
            [str(word) for word in command],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        last_words = f"{error.stdout}\n{error.stderr}".strip()[-2000:]
        raise MeasurementFailed(
            f"{command[0]} ended with {error.returncode}:\n{last_words}"
        ) from error
    return result.stdout


def measure(command: Sequence[str | Path], folder: Path) -> Outcome:
    """Run a child that ends by printing an `Outcome`."""
    lines = run(command, folder).splitlines()
    return msgspec.json.decode(lines[-1], type=Outcome)


@contextmanager
def child(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A program that runs beside us and speaks in lines; it must have ended well at the end."""
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        yield process
        if process.wait(60):
            raise MeasurementFailed(f"{command[2:]} ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def next_line(process: subprocess.Popen[str]) -> str:
    """The next thing a child says."""
    assert process.stdout is not None
    if line := process.stdout.readline():
        return line
    raise MeasurementFailed(f"{process.args!r} ended without an answer")


def answer(value: Outcome | dict[str, Any]) -> None:
    """Print a child's line."""
    print(json.dumps(msgspec.to_builtins(value)), flush=True)
