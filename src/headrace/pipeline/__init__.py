"""(3b) The log → sinks, on Spark: the source, the transforms, the runner."""

from importlib import import_module
from typing import TYPE_CHECKING

from ..plugins import require_spark

if TYPE_CHECKING:
    from .apply import apply_changes
    from .transforms import as_changelog, entities, latest_per_key, log_table, rows

require_spark(__name__)

__all__ = ["apply_changes", "as_changelog", "entities", "latest_per_key", "log_table", "rows"]

_MODULES = {
    "apply_changes": "apply",
    "as_changelog": "transforms",
    "entities": "transforms",
    "latest_per_key": "transforms",
    "log_table": "transforms",
    "rows": "transforms",
}


def __getattr__(name: str) -> object:
    # Looked up on first use: Spark's workers start often, and the source needs none of these.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
