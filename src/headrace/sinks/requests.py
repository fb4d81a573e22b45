"""What an operator requests of a source or a sink: small files in its folder.

The process that requests need not be the one that acts, and a request outlives both: a paused sink
stays paused after a restart, and a reset that was interrupted is done again from its beginning.

    paused.json   it is paused
    resume.json   it has halted and is to be tried again
    reset.json    it is to begin again
    reload.json   in the pipeline's folder: it is to read its config again
    verify.json   it is to be compared with its sources, again and again
"""

import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

logger = logging.getLogger(__name__)

Beginning = Literal["start", "now"]  # with the log's first change, or with the next one

T = TypeVar("T", bound=msgspec.Struct)


class RequestedAt(msgspec.Struct, frozen=True):
    """When it was requested; the content of every file but `reset.json`."""

    at: int  # microseconds since 1970


class ResetRequest(msgspec.Struct, frozen=True):
    """Where to begin again; the content of `reset.json`."""

    at: int  # microseconds since 1970
    epoch: str = ""  # of the log that `after` belongs to; "": it begins with the log's first change
    after: int = 0


class VerifySchedule(msgspec.Struct, frozen=True):
    """How often a sink is compared with its sources; the content of `verify.json`."""

    at: int  # microseconds since 1970
    seconds: float  # from the begin of one to that of the next
    tables: tuple[str, ...] = ()  # none: all
    repair: bool = False  # whether tables that differ get a new snapshot


class Requests:
    """The requests of one source or sink."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)

    def pause(self) -> None:
        """Pause it; a second time changes nothing."""
        if not self.paused:
            self._write("paused.json", RequestedAt(_now()))

    def resume(self) -> None:
        """Let it go on: from a pause, or after it has halted."""
        self._write("resume.json", RequestedAt(_now()))
        self._remove("paused.json")

    @property
    def paused(self) -> bool:
        """Whether it is paused."""
        return self._file("paused.json").exists()

    @property
    def paused_at(self) -> int:
        """Since when it is paused, in microseconds since 1970; 0: it is not."""
        pause = self._read("paused.json", RequestedAt)
        return pause.at if pause else 0

    def take_resume(self) -> bool:
        """Whether it is to be tried again; says so once."""
        return self._remove("resume.json")

    def reset(self, epoch: str = "", after: int = 0) -> None:
        """Let it begin again, after a change of the log (none: with the first)."""
        self._write("reset.json", ResetRequest(_now(), epoch, after))

    @property
    def to_reset(self) -> ResetRequest | None:
        """The reset that is requested and not done."""
        return self._read("reset.json", ResetRequest)

    def finish_reset(self) -> None:
        """Note that it was done."""
        self._remove("reset.json")

    def reload(self) -> None:
        """Let a pipeline read its config again."""
        self._write("reload.json", RequestedAt(_now()))

    def take_reload(self) -> bool:
        """Whether the config is to be read again; says so once."""
        return self._remove("reload.json")

    def schedule_verify(self, seconds: float, tables: Sequence[str], *, repair: bool) -> None:
        """Let it be compared with its sources every so many seconds."""
        self._write("verify.json", VerifySchedule(_now(), seconds, tuple(tables), repair))

    def end_verify(self) -> bool:
        """Let it not be compared any more by itself; whether it was."""
        return self._remove("verify.json")

    @property
    def verify_schedule(self) -> VerifySchedule | None:
        """How often it is compared; None: when somebody does."""
        return self._read("verify.json", VerifySchedule)

    @property
    def interrupts(self) -> bool:
        """Whether what runs must stop for a request."""
        return self.paused or self._file("reset.json").exists()

    def _file(self, name: str) -> Path:
        return self._folder / name

    def _write(self, name: str, content: msgspec.Struct) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Two may request at once: each has a file of its own until it is whole.
        fresh = self._file(f"{name}.{secrets.token_hex(4)}.new")
        fresh.write_bytes(msgspec.json.encode(content))
        fresh.replace(self._file(name))

    def _read(self, name: str, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(self._file(name).read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            logger.warning("%s is damaged and is removed", self._file(name))
            self._remove(name)
            return None

    def _remove(self, name: str) -> bool:
        try:
            self._file(name).unlink()
        except FileNotFoundError:
            return False
        return True


def _now() -> int:
    return time.time_ns() // 1000
