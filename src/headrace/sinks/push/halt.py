"""A note that a destination wants nothing more, so that a restart does not try it again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from ...errors import SinkRefused

_FILE = "disabled.json"


class HaltNote(msgspec.Struct, frozen=True):
    """Why the sink has halted; the file's content."""

    address: str  # a hash: addresses may hold secrets
    message: str
    hint: str


def write_halt(folder: str, address: str, error: SinkRefused) -> None:
    """Note the error with which the destination at an address has refused everything."""
    file = Path(folder, _FILE)
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(HaltNote(_hashed(address), str(error), error.hint)))
    fresh.replace(file)


def expect_no_halt(folder: str, address: str) -> None:
    """Raise the noted error, unless it came from another address."""
    try:
        note = msgspec.json.decode(Path(folder, _FILE).read_bytes(), type=HaltNote)
    except FileNotFoundError:
        return
    if note.address == _hashed(address):
        raise SinkRefused(note.message, hint=note.hint)
    clear_halt(folder)


def clear_halt(folder: str) -> None:
    """Remove the note, so that the destination is tried again."""
    Path(folder, _FILE).unlink(missing_ok=True)


def _hashed(address: str) -> str:
    return hashlib.blake2b(address.encode(), digest_size=16).hexdigest()
