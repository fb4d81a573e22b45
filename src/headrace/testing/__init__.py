"""The test kit, shipped to users: real servers, fresh databases, a Spark cluster, and waiting."""

from .postgres import (
    PostgresDatabase,
    PostgresFailed,
    PostgresInstall,
    PostgresServer,
    Setting,
    postgres_installs,
)
from .processes import free_port, wait_until
from .spark import ClusterFailed, SparkCluster

__all__ = [
    "ClusterFailed",
    "PostgresDatabase",
    "PostgresFailed",
    "PostgresInstall",
    "PostgresServer",
    "Setting",
    "SparkCluster",
    "free_port",
    "postgres_installs",
    "wait_until",
]
