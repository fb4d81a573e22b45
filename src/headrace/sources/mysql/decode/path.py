"""A table by its names."""

from __future__ import annotations

from typing import NamedTuple


class TablePath(NamedTuple):
    """A table's database and name; both may have dots, so the text alone is ambiguous."""

    schema: str
    table: str

    def __str__(self) -> str:
        """As the config and the status write it."""
        return f"{self.schema}.{self.table}"

    @property
    def label(self) -> str:
        """A text that no other table has."""
        return ".".join(name.replace("%", "%25").replace(".", "%2E") for name in self)
