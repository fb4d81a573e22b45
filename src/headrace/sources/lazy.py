"""Names of a source's package that are imported when they are first used.

Whoever reads a log needs a source's position and types, and not the driver of its database.
"""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package: `modules` has the module of each name."""

    def __getattr__(name: str) -> object:  # noqa: N807
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return __getattr__
