"""The terminal of a command: where it prints and logs, and the signals that stop it."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from threading import Event

    from rich.console import Console

    from ..observe.lines import LogFormat
    from ..operate.show import Journal


_given: list[int] = []  # the umask that the process was started with, once it has another


def keep_files_private() -> None:
    """Let nobody else read what this process writes."""
    import os

    _given.append(os.umask(0o077))


def open_lakes(umask: int) -> None:
    """Let those read what this process writes who may read the folders of lakes; only ever more."""
    import os

    os.umask(os.umask(umask) & umask)


def restore_umask() -> None:
    """Write files as the user who started the process would."""
    import os

    if _given:
        os.umask(_given[0])


def open_console(*, stderr: bool = False) -> "Console":
    from ..operate.show import terminal

    return terminal(stderr=stderr)


def log_to(
    console: "Console", context: typer.Context, line_format: "LogFormat | None" = None
) -> "Journal":
    """Write the log of this process to a console."""
    import logging

    from ..observe.lines import LogFormat
    from ..operate.show import Journal

    debug = bool(context.find_root().params.get("debug"))
    journal = Journal(console, line_format or LogFormat.TEXT)
    logging.basicConfig(handlers=[journal], level=logging.WARNING, force=True)
    logging.getLogger("headrace").setLevel(logging.DEBUG if debug else logging.INFO)
    return journal


def log_error(error: str, hint: str) -> bool:
    """Write the error that ends a command into its log, if that is read by programs."""
    import logging

    from ..observe.lines import LogFormat

    formats = [getattr(handler, "line_format", None) for handler in logging.root.handlers]
    if LogFormat.JSON not in formats:
        return False
    logging.getLogger("headrace.cli").error("%s hint=%s", error, hint)
    return True


def stop_on_signals(*, with_parent: bool = False) -> "Event":
    """An event that Ctrl-C and SIGTERM set; `with_parent` the process ends with its parent."""
    import signal
    import threading

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _set(stopping))
    if with_parent:
        from ..run import end_with_parent

        end_with_parent()
    return stopping


def _set(event: "Event") -> None:
    """Set an event in a handler of signals.

    The handler interrupts the main thread, which may hold the event's lock: it is in `wait` most of
    the time. To set it there would wait for that lock for ever.
    """
    import _thread

    _thread.start_new_thread(event.set, ())


def reload_on_hangup(stopping: "Event") -> "Event":
    """An event that SIGHUP sets; when the terminal itself is gone, that stops the process."""
    import os
    import signal
    import sys
    import threading

    reloading = threading.Event()
    attended = sys.stderr.isatty()

    def hang_up(*_: object) -> None:
        try:
            if attended:
                os.tcgetpgrp(sys.stderr.fileno())
        except OSError:
            _set(stopping)
        else:
            _set(reloading)

    signal.signal(signal.SIGHUP, hang_up)
    return reloading


def start_again() -> None:
    """Begin this command anew in this very process; what it was to do once is not repeated."""
    import os
    import sys

    given = iter(sys.orig_argv[1:])
    arguments = []
    for argument in given:
        if argument == "--adopt":
            next(given, None)
        elif not argument.startswith("--adopt="):
            arguments.append(argument)
    os.execv(sys.executable, [sys.executable, *arguments])
