"""Names of a source's package that are imported when they are first used.

Whoever reads a log needs a source's position and types, and not the driver of its database.
"""

from collections.abc import Callable, Mapping
from importlib import import_module

from ..errors import ConfigError


def lazy(package: str, modules: Mapping[str, str], *, driver: str = "") -> Callable[[str], object]:
    """The `__getattr__` of a package: `modules` has the module of each name.

    Where the `driver` is missing, an error names the extra that has it.
    """

    def __getattr__(name: str) -> object:  # noqa: N807
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if driver:
            _expect(driver, package.rpartition(".")[2])
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return __getattr__


def _expect(driver: str, extra: str) -> None:
    try:
        import_module(driver)
    except ImportError as error:
        raise ConfigError(
            f"a source of type {extra} needs {driver}",
            hint=f"Run: pip install 'headrace[{extra}]'",
        ) from error
