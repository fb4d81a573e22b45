"""The shell of a stream: nothing is opened before it is read, and other threads may end it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from ..change.event import Batch
from . import Phase, Status


class Flow(Protocol):
    """What a stream does while it is connected."""

    def batches(self) -> Iterator[Batch]:
        """Batches until the stream is closed."""
        ...

    def ack(self, resume: bytes) -> None:
        """Everything up to `resume` is durable."""
        ...

    def status(self) -> Status:
        """How it is doing; called from any thread."""
        ...

    def interrupt(self) -> None:
        """Wake whatever waits; called from any thread."""
        ...

    def release(self) -> None:
        """Let go of the database."""
        ...


_F = TypeVar("_F", bound=Flow)


class FlowStream(Generic[_F]):
    """An open source, whose flow begins when it is first read."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._closing = threading.Event()
        self._flow: _F | None = None

    def _begin(self) -> _F:
        """Connect."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        flow = self._flow = self._begin()
        try:
            yield from flow.batches()
        finally:
            flow.release()

    def ack(self, resume: bytes) -> None:
        """Everything up to `resume` is durable: the database may forget it."""
        if self._flow is not None:
            self._flow.ack(resume)

    def status(self) -> Status:
        """How it is doing; may be called from any thread."""
        if self._flow is None:
            return Status(source=self._name, phase=Phase.STARTING)
        return self._flow.status()

    def close(self) -> None:
        """End the iteration; may be called from any thread."""
        self._closing.set()
        if self._flow is not None:
            self._flow.interrupt()


def nothing_yet(globs: Sequence[str]) -> str:
    """What a source says that waits for its first table."""
    return (
        f"no table matches {', '.join(globs)} yet: tables are captured as soon as they are there; "
        "check `tables` of the source and the privileges of its user if there should be some"
    )
