"""Writes the docs that come from code: docs/cli.md; with --check it only compares."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from headrace.cli import app

COMMANDS = Path(__file__).parent.parent / "docs" / "cli.md"
NOTICE = "<!-- Written by `make docs` from the commands themselves; change them, not this page. -->"


def commands_page() -> str:
    """The reference of every command.

    Written from the commands' own objects and not by Typer, whose wording differs by version.
    """
    group: Any = typer.main.get_command(app)
    lines = [NOTICE, "", "# The commands", "", *_described("headrace", group)]
    for name, command in _commands("headrace", group):
        lines += [f"## {name}", "", *_described(name, command)]
    return "\n".join(lines).rstrip() + "\n"


def _commands(name: str, group: Any) -> Iterator[tuple[str, Any]]:
    for child, command in sorted(group.commands.items()):
        yield f"{name} {child}", command
        if hasattr(command, "commands"):
            yield from _commands(f"{name} {child}", command)


def _described(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = [name, *(_argument(p) for p in arguments), "[OPTIONS]"]
    usage += ["COMMAND"] if hasattr(command, "commands") else []
    yield from (inspect.cleandoc(command.help or ""), "", "```", " ".join(usage), "```", "")
    rows = [(f"`{p.name.upper()}`", "", p.help) for p in arguments]
    rows += [(_option(p), _default(p), p.help) for p in options]
    yield from ("| option | default | what it does |", "|---|---|---|")
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _argument(parameter: Any) -> str:
    name = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name}{value}`" for name in names)


def _default(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.default in (None, False, ""):
        return ""
    return f"`{parameter.opts[0] if parameter.default is True else parameter.default}`"


def main() -> int:
    """Write the page, or say that it is out of date."""
    current = commands_page()
    if "--check" not in sys.argv:
        COMMANDS.write_text(current)
    elif not COMMANDS.exists() or COMMANDS.read_text() != current:
        print("docs/cli.md differs from the commands: run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
