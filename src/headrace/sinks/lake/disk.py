"""What outlives a crash of the machine."""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from ...plugins import Finding


def sync_names(folder: Path) -> None:
    """Make sure that the names in a folder are on disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def move_aside(path: Path) -> Path | None:
    """Rename a file or folder, so that its place is free; returns where it is, None: none was.

    A link stays, and what it leads to is renamed.
    """
    real = Path(os.path.realpath(path))
    if not real.exists():
        return None
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    aside = real.with_name(f"{real.name}-until-{moment}")
    real.rename(aside)
    sync_names(real.parent)
    return aside


def check_folder(name: str, folder: Path) -> Finding:
    """Whether a folder, or where it is to be made, can be written: by writing there."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".headrace-check-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        detail = f"{existing} cannot be written: {error.strerror}"
        return Finding(name, ok=False, detail=detail, fix=f"chown or chmod {existing}")
    return Finding(name, ok=True, detail=f"{folder} can be written")
