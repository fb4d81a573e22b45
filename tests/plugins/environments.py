"""Environments of Python in a folder, with packages installed from wheels that are built here."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPARK = ("pyspark", "deltalake", "pyarrow", "pandas", "numpy")


@dataclass(frozen=True)
class Environment:
    """An environment that sees the packages of this one, but for Headrace and some others."""

    folder: Path

    @classmethod
    def created(cls, folder: Path, *wheels: Path, without: Sequence[str] = ()) -> "Environment":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        environment = cls(folder)
        _link_packages(environment.packages, hidden={"headrace", *without})
        pip = [sys.executable, "-m", "pip", "--python", str(environment.python), "install"]
        options = ["--quiet", "--no-deps", "--no-index"]
        if wheels:
            subprocess.run([*pip, *options, *map(str, wheels)], check=True)
        return environment

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def headrace(self) -> Path:
        return self.folder / "bin" / "headrace"

    @property
    def packages(self) -> Path:
        paths = {"base": str(self.folder), "platbase": str(self.folder)}
        return Path(sysconfig.get_path("purelib", "venv", vars=paths))

    def run(self, *arguments: str, cwd: Path) -> "Ran":
        """What a command of the environment prints."""
        command = [str(self.folder / "bin" / arguments[0]), *arguments[1:]]
        # The Spark of these tests has named their own Python for its tasks.
        named = {"PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"}
        given = {name: value for name, value in os.environ.items() if name not in named}
        done = subprocess.run(
            command, cwd=cwd, env=given, capture_output=True, text=True, check=False, timeout=300
        )
        return Ran(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    output: str
    errors: str


def wheel_of(project: Path, folder: Path) -> Path:
    """Build the wheel of a project."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(folder)]
    before = set(folder.glob("*.whl"))
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    [wheel] = set(folder.glob("*.whl")) - before
    return wheel


def _link_packages(packages: Path, *, hidden: set[str]) -> None:
    for folder in [Path(each) for each in sys.path if "site-packages" in each]:
        for entry in folder.iterdir():
            name = entry.name.partition("-")[0].partition(".")[0].lower()
            there = packages / entry.name
            if name not in hidden and entry.suffix != ".pth" and not there.exists():
                there.symlink_to(entry)
