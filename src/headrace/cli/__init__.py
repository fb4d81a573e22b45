"""The commands; each loads only what it needs, so that the command line answers at once."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import HeadraceError
from . import data, demo, inspect, keys, parts, postgres, run, sinks, sqlite
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


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
for command in (
    run.run,
    run.pipeline,
    demo.demo,
    inspect.check,
    inspect.status,
    inspect.tail,
    parts.sinks,
    parts.pause,
    parts.resume,
    parts.reset,
    parts.reload,
    data.snapshot,
    data.trim,
    data.remove,
    sinks.redrive,
    sinks.verify,
):
    app.command()(command)
app.add_typer(keys.app, name="keys")
app.add_typer(postgres.app, name="postgres")
app.add_typer(sqlite.app, name="sqlite")


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
            "--version", callback=_print_version, is_eager=True, help="Print the version."
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
