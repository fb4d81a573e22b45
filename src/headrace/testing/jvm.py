"""Servers that are jars: which Java runs them, and with what options."""

import os
import shutil
from pathlib import Path

STARTS_SOON = ("-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
LOGS_LITTLE = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


def java() -> str | None:
    """The program; None: there is none."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else shutil.which("java")
