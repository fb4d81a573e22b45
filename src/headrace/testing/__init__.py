"""The test kit, shipped to users: real servers, a Spark cluster, and what every source promises."""

from .contract import SourceContract, Value
from .postgres import (
    PostgresDatabase,
    PostgresInstall,
    PostgresServer,
    postgres_installs,
)
from .processes import ServerFailed, Setting, free_port, wait_until
from .reading import Place, Reading, Session, reading, session
from .spark import SparkCluster

__all__ = [
    "Place",
    "PostgresDatabase",
    "PostgresInstall",
    "PostgresServer",
    "Reading",
    "ServerFailed",
    "Session",
    "Setting",
    "SourceContract",
    "SparkCluster",
    "Value",
    "free_port",
    "postgres_installs",
    "reading",
    "session",
    "wait_until",
]
