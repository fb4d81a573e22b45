"""What every server of the test kit needs: a port, a folder, an end, and patience."""

import atexit
import random
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import HeadraceError

T = TypeVar("T")

# Below the range from which Linux picks the local port of an outgoing connection: a client that
# reconnects while its server is down could otherwise occupy the server's port, or reach itself.
PORTS = range(15_000, 32_000)


def wait_until(
    predicate: Callable[[], T], *, timeout: float = 10.0, message: str = "the condition holds"
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
