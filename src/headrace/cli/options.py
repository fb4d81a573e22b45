"""Options that many commands take, and the config that they lead to."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..observe.lines import LogFormat

if TYPE_CHECKING:
    from ..config import Config

API_KEY = "HEADRACE_API_KEY"  # the variable with the key for --url

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", help="The config file.", metavar="FILE")
]
LogLines = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="HEADRACE_LOG_FORMAT",
        help="How the lines of the log are written; text is logfmt.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="HEADRACE_URL",
        help="Ask the server there, not the one of the config; its API key is in HEADRACE_API_KEY.",
        metavar="URL",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key-file", help="With --url: a file that has the API key.", metavar="FILE"),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]

DEFAULT_CONFIG = Path("headrace.yaml")


def configured(config: Path, url: str | None, key_file: Path | None) -> "Config":
    """The config of a command: that of a file, or of a server elsewhere."""
    import os

    from ..config import Config, RemoteServer, load
    from ..errors import ConfigError
    from ..secret import Secret

    if url is None:
        if key_file is not None:
            raise typer.BadParameter("--key-file goes with --url.")
        return load(config)
    try:
        given = key_file.read_text("utf-8") if key_file else os.environ.get(API_KEY, "")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {key_file} cannot be read") from error
    key = Secret(given.strip()) if given.strip() else None
    return Config(sources=(), remote=RemoteServer(url, key))
