"""What every server of the test kit needs: a port, a folder, a process, an end, and patience."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from ..errors import HeadraceError

T = TypeVar("T")

# Below the range from which Linux picks the local port of an outgoing connection: a client that
# reconnects while its server is down could otherwise occupy the server's port, or reach itself.
PORTS = range(15_000, 32_000)


def wait_until(
    predicate: Callable[[], T], *, timeout: float = 60.0, message: str = "the condition holds"
) -> T:
    """Call `predicate` until it returns something true, and return that."""
    deadline = time.monotonic() + timeout
    while not (result := predicate()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s, but not so: {message}")
        time.sleep(0.01)
    return result


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    # Not from the shared generator: tests seed it, and then every run would try the same ports.
    for port in random.SystemRandom().sample(PORTS, k=100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise HeadraceError(f"no free port between {PORTS.start} and {PORTS.stop}")


def temporary_directory() -> Path:
    """A new directory that every user may enter, removed when Python exits."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-"))
    directory.chmod(0o755)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def dies_with_us(name: str) -> list[str]:
    """The command prefix with which the kernel sends a signal should this process be killed.

    The kernel watches the thread that starts a process, so only the main thread may ask for it.
    """
    setpriv = shutil.which("setpriv")
    if setpriv and threading.current_thread() is threading.main_thread():
        return [setpriv, "--pdeathsig", name, "--"]
    return []


class ServerFailed(HeadraceError):
    """A server of the test kit does not start or stop."""


class ServerProcess(ABC):
    """A server that is one process, in a folder of its own; nothing of it outlives this process."""

    def __init__(self) -> None:
        self.directory = temporary_directory()
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address} directory={self.directory}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    @abstractmethod
    def command(self) -> list[str]:
        """The program and its arguments; called at each start."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether a client is answered; an OSError means no."""

    def environment(self) -> dict[str, str]:
        """What the process has beside this one's own."""
        return {}

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """The file that its messages go to."""
        return self.directory / "server.log"

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and return when it answers."""
        if self.running:
            raise ServerFailed(f"{self!r} already runs")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*dies_with_us("KILL"), *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, **self.environment()},
                start_new_session=True,  # Ctrl-C is for us: we stop it, in our order
            )
        _started.add(self)
        wait_until(self._ready, timeout=60, message=f"{self!r} answers")

    def stop(self) -> None:
        """Stop it in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Let it answer nothing, with every connection still open, until `resume`."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # every thread of it

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._signal(signal.SIGCONT)

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            self._forget()
            last_lines = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
            raise ServerFailed(f"{self!r} did not start; its last messages:\n{last_lines}")
        try:
            return self.answers()
        except OSError:
            return False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise ServerFailed(f"{self!r} does not run")
        # What it may have started itself belongs to it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._signal(number)
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired as error:
                self._signal(signal.SIGKILL)
                self._process.wait()
                raise ServerFailed(f"{self!r} did not stop within 60 s and was killed") from error
        self._forget()

    def _forget(self) -> None:
        self._process = None
        _started.discard(self)


_started: set[ServerProcess] = set()


@atexit.register
def _end_all() -> None:
    """A server that a program forgot to stop does not outlive it."""
    for server in list(_started):
        server.kill()
