"""What outlives a crash of the machine."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path


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
