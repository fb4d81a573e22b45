"""A real Iceberg REST catalog in a folder: the server of Apache Iceberg's own tests.

with IcebergServer() as server:
    append(server.uri)
"""

import functools
import os
import sys
import urllib.request
from pathlib import Path

from .jvm import LOGS_LITTLE, STARTS_SOON, java
from .processes import ServerFailed, ServerProcess

HINT = "Run `scripts/setup.sh iceberg`; it takes Java 17, Maven and a way to Maven Central."


@functools.cache
def iceberg_jars() -> Path | None:
    """The folder with the catalog's jars; None: they were not fetched, or Java is missing."""
    jars = Path(os.environ.get("HEADRACE_ICEBERG_JARS") or Path(sys.prefix, "iceberg"))
    return jars if jars.is_dir() and java() is not None else None


class IcebergServer(ServerProcess):
    """A catalog that keeps its tables' names in SQLite, and their files in a folder."""

    def __init__(self) -> None:
        jars = iceberg_jars()
        if jars is None:
            raise ServerFailed("Apache Iceberg's jars are not there", hint=HINT)
        super().__init__()
        self._java = [java() or "java", *STARTS_SOON, LOGS_LITTLE, "-cp", f"{jars}/*"]

    @property
    def uri(self) -> str:
        """Its address, as clients want it."""
        return f"http://{self.address}"

    @property
    def warehouse(self) -> Path:
        """The folder of the tables' files."""
        return self.directory / "warehouse"

    def command(self) -> list[str]:
        """The server; its settings are in the environment."""
        return [*self._java, "org.apache.iceberg.rest.RESTCatalogServer"]

    def environment(self) -> dict[str, str]:
        """Its settings, each a property of the catalog behind it."""
        return {
            "CATALOG_REST_PORT": str(self.port),
            "CATALOG_WAREHOUSE": self.warehouse.as_uri(),
            "CATALOG_URI": f"jdbc:sqlite:{self.directory / 'catalog.db'}",
        }

    def answers(self) -> bool:
        """Whether it says how it is configured."""
        with urllib.request.urlopen(f"{self.uri}/v1/config", timeout=5) as response:
            return bool(response.status == 200)
