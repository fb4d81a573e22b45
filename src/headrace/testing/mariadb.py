"""A real MariaDB in a folder, and fresh databases in it.

with MariadbServer() as server, server.database() as database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    capture(database.url)
"""

import functools
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .mysql import MysqlDatabase, MysqlInstall, MysqlServer, program
from .processes import ServerFailed, Setting

__all__ = [
    "MariadbDatabase",
    "MariadbInstall",
    "MariadbServer",
    "Setting",
    "mariadb_install",
]

MariadbDatabase = MysqlDatabase  # the protocol is the same


@dataclass(frozen=True, slots=True)
class MariadbInstall(MysqlInstall):
    """The programs of a MariaDB on this machine."""

    creator: Path  # mariadb-install-db

    product: ClassVar[str] = "MariaDB"
    settings: ClassVar[Mapping[str, Setting]] = {
        "innodb_log_file_size": "64M",
        "skip_name_resolve": True,
    }

    def creation(self, data: Path) -> list[str | Path]:
        """The command that makes the data of a server whose administrator has no password."""
        return [
            self.creator,
            "--no-defaults",
            f"--datadir={data}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--innodb-log-file-size=64M",
        ]


@functools.cache
def mariadb_install() -> MariadbInstall | None:
    """The MariaDB on this machine; None: there is none."""
    server, creator = program("mariadbd"), program("mariadb-install-db")
    if server is None or creator is None:
        return None
    # mariadbd  Ver 10.11.19-MariaDB-0+deb12u1 for debian-linux-gnu on x86_64 (Debian 12)
    words = subprocess.check_output([server, "--no-defaults", "--version"], text=True).split()
    version = words[2].partition("-")[0]
    return MariadbInstall(version, server, program("mariadb-binlog"), creator)


class MariadbServer(MysqlServer):
    """A MariaDB server in a directory of its own."""

    install: MariadbInstall

    @classmethod
    def found(cls) -> MariadbInstall:
        """The install to take where none is given."""
        install = mariadb_install()
        if install is None:
            raise ServerFailed(
                "MariaDB is not installed", hint="Debian: apt-get install mariadb-server"
            )
        return install
