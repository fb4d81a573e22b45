"""Disks of a test's own: small ones, and ones that cannot be written."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MEGABYTE = 1 << 20


class SmallDisk:
    """A file system in memory with room for little."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resize(self, size: int) -> None:
        """Give it another size."""
        mount("-o", f"remount,size={size}", self.path)

    def protect(self) -> None:
        """Let nobody write to it."""
        mount("-o", "remount,ro", self.path)


def mount(*arguments: str | Path) -> None:
    """Run mount; a system that does not allow it skips the test."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this system does not mount file systems: {done.stderr.strip()}")


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[SmallDisk]:
    """A small disk at a path."""
    path.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
