"""What every server of the test kit needs: a port, a directory, a user, a process."""

from __future__ import annotations

import atexit
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar

from ..errors import HeadraceError

T = TypeVar("T")
Setting = str | int | bool
StopMode = Literal["fast", "immediate"]

# Below the range from which Linux picks the local port of an outgoing connection: a client that
# reconnects while its server is down could otherwise occupy the server's port, or reach itself.
PORTS = range(15_000, 32_000)

# A busy machine may need minutes for what takes an idle one a second.
_START_SECONDS = 240.0
_STOP_SECONDS = 240.0


def wait_until(
    predicate: Callable[[], T], *, timeout: float = 60.0, message: str = "the condition holds"
) -> T:
    """Call `predicate` until it returns something true, and return that."""
    deadline = time.monotonic() + timeout
    while not (result := predicate()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s in vain: {message}")
        time.sleep(0.01)
    return result


def free_port() -> int:
    """A port of this machine that no process listens on."""
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


def signalled_at_parent_death(name: str) -> list[str]:
    """The command prefix with which the kernel sends a signal should this process be killed.

    The kernel watches the thread that starts a process, so only the main thread may request it.
    """
    setpriv = shutil.which("setpriv")
    if setpriv and threading.current_thread() is threading.main_thread():
        return [setpriv, "--pdeathsig", name, "--"]
    return []


class ServerFailed(HeadraceError):
    """A server of the test kit does not start or stop."""


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """The user that runs a server which refuses to run as root."""

    user: int
    group: int

    @classmethod
    def choose(cls, name: str) -> Self | None:
        """The account of this name, or `nobody`; None: this process is not root's, and may stay."""
        if os.geteuid() != 0:
            return None
        accounts = {entry.pw_name: entry for entry in pwd.getpwall()}
        entry = accounts.get(name) or accounts["nobody"]
        return cls(entry.pw_uid, entry.pw_gid)

    def own(self, *paths: Path) -> None:
        """Give files to the account."""
        for path in paths:
            os.chown(path, self.user, self.group)

    def may_run(self, program: Path) -> bool:
        """Whether the account can reach and run a program."""
        try:
            subprocess.run(
                [program, "--version"], check=True, capture_output=True, cwd="/", **self.identity
            )
        except (PermissionError, subprocess.CalledProcessError):
            return False
        return True

    @property
    def identity(self) -> dict[str, Any]:
        """The arguments that make `subprocess` run a program as this account."""
        return {"user": self.user, "group": self.group, "extra_groups": []}


class ServerProcess(ABC):
    """A server that is one process, in a directory of its own; it never outlives this process."""

    # What ends it: in order, and as a crash would.
    STOP_SIGNALS: ClassVar[Mapping[StopMode, signal.Signals]] = {
        "fast": signal.SIGTERM,
        "immediate": signal.SIGKILL,
    }
    ORPHAN_SIGNAL: ClassVar[str] = "KILL"  # what the kernel sends when this process is killed

    account: ServiceAccount | None = None  # None: the user of this process

    def __init__(self, directory: Path | None = None, *, port: int | None = None) -> None:
        """Describe the server; without `directory` it lives in a temporary one."""
        self.directory = directory or temporary_directory()
        self.port = port or free_port()
        self._temporary = directory is None
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
        self.stop("immediate" if self._temporary else "fast")
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    @abstractmethod
    def command(self) -> list[str]:
        """The program and its arguments; called at each start."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether it answers a client; an OSError means no."""

    def environment(self) -> dict[str, str]:
        """The variables that the process has beside those of this one."""
        return {}

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def data(self) -> Path:
        """The directory of its data, where it has one."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        """The file that its messages go to."""
        return self.directory / "server.log"

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int:
        """The number of its process."""
        if self._process is None:
            raise ServerFailed(f"{self!r} does not run")
        return self._process.pid

    def start(self) -> None:
        """Start it and return when it answers."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start it, without waiting for it to answer."""
        if self.running:
            raise ServerFailed(f"{self!r} already runs")
        command = self.command()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*signalled_at_parent_death(self.ORPHAN_SIGNAL), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, **self.environment()},
                start_new_session=True,  # Ctrl-C is for us: we stop it, in our order
                **(self.account.identity if self.account else {}),
            )
        _started.add(self)

    def wait_until_ready(self) -> None:
        """Return when it answers, after `launch`."""
        wait_until(self._ready, timeout=_START_SECONDS, message=f"{self!r} answers")

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop it: in order, or (`immediate`) as if it crashed."""
        if self._process is not None:
            self._signal(self.STOP_SIGNALS[mode])
            try:
                self._process.wait(timeout=_STOP_SECONDS)
            except subprocess.TimeoutExpired as error:
                self.kill()
                late = f"{self!r} did not stop within {_STOP_SECONDS:g} s and was killed"
                raise ServerFailed(late) from error
        self._forget()

    def kill(self) -> None:
        """End it and what it started at once, as a power cut would."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._forget()

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop it if it runs, and start it on the same port with the same data."""
        self.stop(mode)
        self.start()

    def pause(self) -> None:
        """Let it answer nothing, with every connection still open, until `resume`."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process_id, os.WSTOPPED)  # every thread of it

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
        # What it may have started itself belongs to it.
        with suppress(ProcessLookupError):
            os.killpg(self.process_id, number)

    def _forget(self) -> None:
        self._process = None
        _started.discard(self)


_started: set[ServerProcess] = set()


@atexit.register
def _kill_started() -> None:
    """A server that a program forgot to stop does not outlive it."""
    for server in list(_started):
        server.kill()
