"""The terminal of a command: where it prints and logs, and the signals that stop it."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from threading import Event

    from rich.console import Console


def open_console(*, stderr: bool = False) -> "Console":
    from ..operate.show import terminal

    return terminal(stderr=stderr)


def log_to(console: "Console", context: typer.Context) -> None:
    import logging

    from ..operate.show import Journal

    debug = bool(context.find_root().params.get("debug"))
    logging.basicConfig(handlers=[Journal(console)], level=logging.WARNING, force=True)
    logging.getLogger("headrace").setLevel(logging.DEBUG if debug else logging.INFO)


def stop_on_signals(*, with_parent: bool = False) -> "Event":
    """An event that Ctrl-C and SIGTERM set, and (`with_parent`) the end of the parent process."""
    import signal
    import threading

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    if with_parent:
        from ..run import watch_parent

        watch_parent(stopping)
    return stopping
