"""Signals end a process, whatever its main thread is at."""

import subprocess
import sys

import pytest

# A handler runs in the main thread, between two steps of it: here, while it holds the event's lock.
HELD = """
import os, signal, sys, time
from headrace.cli.terminal import reload_on_hangup, stop_on_signals

stopping = stop_on_signals()
reloading = reload_on_hangup(stopping)
event = reloading if sys.argv[1] == "SIGHUP" else stopping
with event._cond:
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    time.sleep(0.01)
print(event.wait(30))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_in_the_middle_of_waiting_is_taken(name: str) -> None:
    run = [sys.executable, "-c", HELD, name]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
