"""Options that many commands take."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", help="The config file.", metavar="FILE")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

DEFAULT_CONFIG = Path("headrace.yaml")
