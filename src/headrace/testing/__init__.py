"""The test kit, shipped to users: real servers, a Spark cluster, and what every source promises."""

from .contract import SourceContract, Value
from .postgres import (
    PostgresDatabase,
    PostgresFailed,
    PostgresInstall,
    PostgresServer,
    Setting,
    postgres_installs,
)
from .processes import free_port, wait_until
from .reading import Place, Reading, Session, reading, session
from .spark import ClusterFailed, SparkCluster

__all__ = [
    "ClusterFailed",
    "Place",
    "PostgresDatabase",
    "PostgresFailed",
    "PostgresInstall",
    "PostgresServer",
    "Reading",
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
