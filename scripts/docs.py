"""Writes the docs that come from code: docs/commands.md; with --check it only compares."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMANDS = ROOT / "docs" / "commands.md"
NOTICE = (
    "<!-- Written by `make docs` from the commands themselves; change them, not this page. -->\n"
)


def commands_page() -> str:
    """The reference of every command, as Typer writes it."""
    program = [sys.executable, "-m", "typer", "headrace.cli", "utils", "docs", "--name", "headrace"]
    page = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    return NOTICE + "\n" + page.strip() + "\n"


def main() -> int:
    """Write the page, or say that it is out of date."""
    current = commands_page()
    if "--check" not in sys.argv:
        COMMANDS.write_text(current)
    elif not COMMANDS.exists() or COMMANDS.read_text() != current:
        print("docs/commands.md differs from the commands: run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
