"""A table by its names."""

from __future__ import annotations

from typing import NamedTuple

from ....change.path import table_path


class TablePath(NamedTuple):
    """A table's database and name; both may have dots, so the text alone is ambiguous."""

    schema: str
    table: str

    def __str__(self) -> str:
        """As the config and the status write it."""
        return table_path(self.schema, self.table)

    @property
    def label(self) -> str:
        """A text that no other table has."""
        return ".".join(name.replace("%", "%25").replace(".", "%2E") for name in self)
