"""What a server keeps because the log has not taken it yet.

It is watched for as long as a source is configured, also while it is paused, has halted or the log
takes nothing: that is when it grows.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol, runtime_checkable

import msgspec

from ..errors import HeadraceError
from . import Phase, Source, Status

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0


class ServerRetained(msgspec.Struct, frozen=True):
    """What one look has found."""

    begun: bool  # whether the server keeps anything for the source
    bytes: int = 0
    warnings: tuple[str, ...] = ()
    given_up: str = ""  # why this look has let the server forget it, at the price of a snapshot


class RetainedLook(Protocol):
    """Looks at the server, over a connection that it keeps."""

    def look(self) -> ServerRetained:
        """What the server keeps now, after giving it up where a setting says so."""
        ...

    def close(self) -> None:
        """Let go of the server."""
        ...


@runtime_checkable
class RetainingSource(Protocol):
    """A source whose server keeps what was not captured yet."""

    def look_at_retained(self) -> RetainedLook | None:
        """How to look; connects when it first does. None: the server keeps nothing."""
        ...


class RetainedWatch:
    """Looks every few seconds, in a thread of its own."""

    def __init__(self, source: Source) -> None:
        self._name = source.name
        self._look = source.look_at_retained() if isinstance(source, RetainingSource) else None
        self._found = ServerRetained(begun=False)
        self._given_up = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"retained-{source.name}", daemon=True
        )

    def start(self) -> None:
        """Begin, if there is anything to look at."""
        if self._look is not None:
            self._thread.start()

    def close(self) -> None:
        """End after the look at hand, without waiting for that."""
        self._closed.set()

    def add_to(self, status: Status) -> Status:
        """The status of a source, with what its server keeps."""
        if self._look is None:
            return status
        found = self._found
        if status.phase is Phase.STREAMING and found.begun:
            self._given_up = ""  # the snapshot that this has cost is complete
        given_up = (self._given_up,) if self._given_up else ()
        return msgspec.structs.replace(
            status,
            retained_bytes=found.bytes,
            warnings=(*status.warnings, *given_up, *found.warnings),
        )

    def _run(self) -> None:
        assert self._look is not None
        while not self._closed.is_set():
            try:
                found = self._look.look()
                if found.given_up:
                    logger.warning("source=%s %s", self._name, found.given_up)
                    self._given_up = found.given_up
                self._found = found
            except HeadraceError:
                pass  # the server is away, and the source's own status says so
            self._closed.wait(_LOOK_SECONDS)
        self._look.close()
