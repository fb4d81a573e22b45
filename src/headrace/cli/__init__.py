"""The commands; each loads only what it needs, so that the command line answers at once."""

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import HeadraceError
from . import data, demo, erase, init, inspect, keys, parts, postgres, run, sinks, sqlite
from .terminal import keep_files_private, log_error


class Commands(TyperGroup):
    """The commands; an error of ours is printed as a sentence, not as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (HeadraceError, OSError) as error:
            if ctx.params.get("debug") or not str(error):
                raise
            hint = getattr(error, "hint", "")
            if not log_error(_sentence(error), hint):
                typer.echo(f"error: {_sentence(error)}", err=True)
                if hint:
                    typer.echo(hint, err=True)
            raise typer.Exit(1) from error


def _sentence(error: HeadraceError | OSError) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)

# In the order in which people need them; `--help` shows them so.
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Begin": (demo.demo, init.init, inspect.check, run.run),
    "Look": (inspect.status, inspect.tail, parts.sinks, sinks.verify, sinks.preview),
    "Operate": (
        parts.pause,
        parts.resume,
        parts.reset,
        parts.reload,
        data.snapshot,
        sinks.redrive,
        data.trim,
        data.backup,
        data.restore,
        data.remove,
        erase.erase,
        run.pipeline,
    ),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
for name, group in {"keys": keys.app, "postgres": postgres.app, "sqlite": sqlite.app}.items():
    app.add_typer(group, name=name, rich_help_panel="More commands")


def main() -> None:
    """Run the command line."""
    keep_files_private()
    app(prog_name="headrace")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def headrace(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error comes from, and log more.")
    ] = False,
) -> None:
    """Carry a database's row changes into a durable, ordered log, and serve them in real time.

    Every command exits with 0 when it succeeded, 1 when it failed and 2 when its options or
    arguments are wrong.
    """
