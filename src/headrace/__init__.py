"""Headrace: change data capture for Python and Spark.

database -> sources -> capture -> log -+-> serve             long poll, SSE, WebSocket, gRPC
                                       +-> pipeline -> sinks  Delta tables, history, webhooks,
                                           (Spark)            Kafka, RabbitMQ, NATS, Redis, files
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.1.0"

_MOVED = {
    "headrace.columns": "headrace.change.arrow",
    "headrace.event": "headrace.change.event",
    "headrace.frame": "headrace.change.arrow.frame",
    "headrace.webhooks": "headrace.client.webhooks",
}


class _MovedModules(MetaPathFinder, Loader):
    """Imports documented modules by the names that they had before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, _MOVED[module.__name__]
        warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        # The import system returns what stands here after this call.
        sys.modules[old] = import_module(new)


sys.meta_path.append(_MovedModules())
