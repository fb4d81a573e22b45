"""A note that a destination wants nothing more, so that nobody asks it again by starting anew."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from ...errors import SinkRefused

_FILE = "disabled.json"


class Note(msgspec.Struct, frozen=True):
    """Who said so, and what."""

    address: str  # a hash: addresses may hold secrets
    message: str
    hint: str


def disable(folder: str, address: str, error: SinkRefused) -> None:
    """Note what the destination at an address has said."""
    file = Path(folder, _FILE)
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(Note(_hashed(address), str(error), error.hint)))
    fresh.replace(file)


def expect_enabled(folder: str, address: str) -> None:
    """Raise what the destination has said, unless that was another one."""
    try:
        note = msgspec.json.decode(Path(folder, _FILE).read_bytes(), type=Note)
    except FileNotFoundError:
        return
    if note.address == _hashed(address):
        raise SinkRefused(note.message, hint=note.hint)
    enable(folder)


def enable(folder: str) -> None:
    """Forget it."""
    Path(folder, _FILE).unlink(missing_ok=True)


def _hashed(address: str) -> str:
    return hashlib.blake2b(address.encode(), digest_size=16).hexdigest()
