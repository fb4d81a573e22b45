"""The test kit, shipped to users: real servers, Spark, and what sources and sinks promise."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .contract import SourceContract
from .postgres import (
    PostgresDatabase,
    PostgresInstall,
    PostgresServer,
    postgres_installs,
)
from .processes import ServerFailed, Setting, free_port, wait_until
from .reading import Place, Reading, reading, session
from .sinks import SinkContract, SinkTrial
from .spark import SparkCluster
from .writing import RowWriter, Session, SqlWriter, Value

if TYPE_CHECKING:
    from .channels import ChannelContract, ChannelTrial

__all__ = [
    "ChannelContract",
    "ChannelTrial",
    "Place",
    "PostgresDatabase",
    "PostgresInstall",
    "PostgresServer",
    "Reading",
    "RowWriter",
    "ServerFailed",
    "Session",
    "Setting",
    "SinkContract",
    "SinkTrial",
    "SourceContract",
    "SparkCluster",
    "SqlWriter",
    "Value",
    "free_port",
    "postgres_installs",
    "reading",
    "session",
    "wait_until",
]


def __getattr__(name: str) -> Any:
    """Import the contract of channels when it is used: push sinks need headrace[spark]."""
    if name in ("ChannelContract", "ChannelTrial"):
        return getattr(import_module(".channels", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
