"""The test kit, shipped to users: real servers, Spark, and what sources and sinks promise."""

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

__all__ = [
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
