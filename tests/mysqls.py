"""The servers of the MySQL family: MariaDB, and each MySQL that is there."""

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import pytest

from headrace.testing.mariadb import MariadbServer, mariadb_install
from headrace.testing.mysql import ENVIRONMENT, MysqlServer, mysql_installs
from headrace.testing.processes import Setting
from tests.needs import missing

_MARIADB = "mariadb"
_INSTALLS = {f"mysql{'.'.join(map(str, each.numbers))}": each for each in mysql_installs()}

MYSQLS = tuple(_INSTALLS or ("mysql",))
KINDS = (_MARIADB, *MYSQLS)
"""What a test runs on; where there is no MySQL, one of these is skipped."""


def mysql_of(kind: str, settings: Mapping[str, Setting] | None = None) -> MysqlServer:
    """A new server of a kind; without one the test is skipped."""
    if kind == _MARIADB:
        expect_mariadb()
        return MariadbServer(settings=settings)
    if kind not in _INSTALLS:
        # Not even in CI it must be there: Debian has no package of it. What its binary log says
        # is tested there by files that were recorded.
        pytest.skip(f"there is no MySQL here; set {ENVIRONMENT} to where its mysqld is")
    return MysqlServer(install=_INSTALLS[kind], settings=settings)


def expect_mariadb() -> None:
    """Without a MariaDB the test is skipped, but in CI it fails."""
    if mariadb_install() is None:
        missing("MariaDB is not installed (Debian: apt-get install mariadb-server)")


class Mysqls:
    """One server of each kind, started when a test first asks for it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._running: dict[str, MysqlServer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __getitem__(self, kind: str) -> MysqlServer:
        if kind not in self._running:
            self._running[kind] = self._stack.enter_context(mysql_of(kind))
        return self._running[kind]
