"""What `headrace check` looks at on a PostgreSQL server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import Finding

if TYPE_CHECKING:
    from .postgres import Postgres


def check(source: Postgres) -> list[Finding]:
    """Every setting and privilege that capturing needs, with the statement that mends it."""
    return []
